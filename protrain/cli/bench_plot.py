"""The picture of `protrain bench activations`: throughput over the activation peak, a curve for each mode. By matplotlib."""

from __future__ import annotations

import io
import statistics
from typing import TYPE_CHECKING, Any

from protrain.base.replacing import write_file
from protrain.cli.words import MIB

if TYPE_CHECKING:
    from protrain.cli.bench_activations import Measured

# Colours that readers with any colour vision tell apart, markers for print in grey; on which side of its point a mix's label
# stands. That of a pure mode stands to the left, where no other point is.
_LOOKS = {
    "keep": ("#222222", "o", "right"),
    "swap": ("#0072B2", "s", "right"),
    "checkpoint": ("#D55E00", "^", "left"),
    "checkpoint_swap": ("#009E73", "D", "left"),
}


def draw(path: str, found: list[Measured], summary: dict[str, Any]) -> None:
    """Draw to a PNG file, which is written as a whole or not at all. Raises OSError.

    Args: found, the last of them keep; summary, what was measured: model, batch, seq, rounds, cpu.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    keep = found[-1]
    for mode in ("swap", "checkpoint", "checkpoint_swap"):
        _curve(axes, mode, [m for m in found if m.name.split(" ")[0] == mode], keep)
    _points(axes, "keep", [keep])
    axes.set_xlabel("activation peak: memory above what is held between two steps (MiB)")
    axes.set_ylabel("throughput (tokens/s)")
    axes.set_title(
        f"{summary['model']}, batch {summary['batch']} × {summary['seq']} tokens, every state in memory\n"
        f"median of {summary['rounds']} interleaved rounds, bars from quartile to quartile; {summary['cpu']}",
        fontsize=10,
    )
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, 1.1 * max(m.activation_peak_bytes for m in found) / MIB)
    low, high = min(_ends(m)[0] for m in found), max(_ends(m)[1] for m in found)
    room = max(high - low, 0.02 * high)
    axes.set_ylim(low - 0.25 * room, high + 0.3 * room)
    axes.annotate(
        "better", xy=(0.02, 0.98), xytext=(0.1, 0.9), xycoords="axes fraction", color="#555555", ha="left", va="top",
        arrowprops={"arrowstyle": "->", "color": "#555555"},
    )  # fmt: skip
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_file(path, content.getvalue())


def _curve(axes: Any, mode: str, measured: list[Measured], keep: Measured) -> None:
    """From keep over the mixes to the pure mode; checkpoint_swap is a point."""
    if len(measured) > 1:
        line = [keep, *measured]
        axes.plot(
            [m.activation_peak_bytes / MIB for m in line],
            [m.tokens_per_second for m in line],
            color=_LOOKS[mode][0],
            linewidth=1.4,
        )
    _points(axes, mode, measured)


def _points(axes: Any, mode: str, measured: list[Measured]) -> None:
    from matplotlib.patheffects import withStroke

    colour, marker, side = _LOOKS[mode]
    height = -12 if mode == "checkpoint_swap" else 4  # it lies beside checkpoint
    rates = [m.tokens_per_second for m in measured]
    below = [rate - _ends(m)[0] for rate, m in zip(rates, measured, strict=True)]
    above = [_ends(m)[1] - rate for rate, m in zip(rates, measured, strict=True)]
    axes.errorbar(
        [m.activation_peak_bytes / MIB for m in measured], rates, yerr=[below, above],
        color=colour, marker=marker, linestyle="none", capsize=3, elinewidth=1, label=mode,
    )  # fmt: skip
    for m, rate in zip(measured, rates, strict=True):
        right = side == "right" and (mode == "keep" or m.name != mode)
        axes.annotate(
            m.name.removeprefix(f"{mode} "), (m.activation_peak_bytes / MIB, rate), xytext=(8 if right else -8, height),
            textcoords="offset points", ha="left" if right else "right", fontsize=9, color=colour, zorder=5,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip


def _ends(measured: Measured) -> tuple[float, float]:
    """Throughput at the quartiles of the rounds' seconds; never beyond the median on the wrong side."""
    if len(measured.seconds) < 2:
        return measured.tokens_per_second, measured.tokens_per_second
    fast, _, slow = statistics.quantiles(measured.seconds, n=4, method="inclusive")
    tokens = measured.tokens_per_second * measured.median_seconds
    return tokens / slow, tokens / fast
