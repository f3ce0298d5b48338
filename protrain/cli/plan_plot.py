"""The picture of `protrain plan --sweep`: time and peak of a step against the budget, what limits it, and the modes of blocks.

Three panels over one axis of budgets, which rise by one factor and so are evenly apart on it: the step's seconds on a ground
coloured by what limits it, the peak beside the budget itself, and a band of the modes' counts. By matplotlib.
"""

from __future__ import annotations

import io
import math
import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from protrain.base.replacing import write_file
from protrain.cli.words import size_text
from protrain.planner.explain import LETTERS, limit_of

if TYPE_CHECKING:
    from protrain.planner.plans import Plan

# Colours that readers with any colour vision tell apart; those of modes are the same as in the picture of activations.
_MODES = {"keep": "#999999", "swap": "#0072B2", "checkpoint": "#D55E00", "checkpoint_swap": "#009E73"}
_LIMITS = {"compute": "#e8f1e4", "read": "#dbe9f6", "write": "#fbe3d6", "update": "#efe3f3"}
_LINE, _SECOND = "#222222", "#0072B2"


def draw(path: str, title: str, plans: list[Plan]) -> None:
    """Draw to a PNG file, which is written as a whole or not at all. Raises OSError.

    Args: plans, of a sweep, smallest budget first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = all(plan.step_seconds > 0 for plan in plans)
    blocks = any(plan.block_modes for plan in plans)
    heights = [3.0] * timed + [2.2] + [1.2] * blocks
    figure = Figure(figsize=(9, 1.6 + sum(heights)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    places = [math.log2(plan.budget_bytes) for plan in plans]
    edges = _edges(places)
    if timed:
        _draw_time(panels[0], plans, places)
        _draw_limits(panels[0], plans, edges)
    _draw_peak(panels[1 if timed else 0], plans, places)
    if blocks:
        _draw_modes(panels[-1], plans, edges)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlim(edges[0], edges[-1])
    panels[-1].set_xticks(places, [size_text(plan.budget_bytes).replace(" ", "\n") for plan in plans], fontsize=9)
    panels[-1].set_xlabel("memory budget")
    panels[0].set_title("\n".join(textwrap.wrap(title, 90)), fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_file(path, content.getvalue())


def _edges(places: list[float]) -> list[float]:
    """Where each budget's stretch of the axis begins and ends: half-way to its neighbours."""
    between = [(a + b) / 2 for a, b in pairwise(places)]
    half = (places[1] - places[0]) / 2 if len(places) > 1 else 0.5
    return [places[0] - half, *between, places[-1] + (places[-1] - between[-1] if between else half)]


def _draw_time(axes: Any, plans: list[Plan], places: list[float]) -> None:
    """The step, and of it what is not waiting."""
    seconds = [plan.step_seconds for plan in plans]
    axes.plot(places, seconds, color=_LINE, marker="o", markersize=4, linewidth=1.6, label="step", zorder=3)
    if all(plan.forecast for plan in plans):
        worked = [plan.step_seconds - sum(plan.forecast.wait_seconds.values()) for plan in plans if plan.forecast]
        axes.plot(places, worked, color=_LINE, linestyle=":", linewidth=1.2, label="of it not waiting", zorder=2)
    axes.set_ylim(0, 1.15 * max(seconds))
    axes.set_ylabel("seconds")
    axes.grid(True, axis="y", color="#cccccc", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_limits(axes: Any, plans: list[Plan], edges: list[float]) -> None:
    """The ground behind the times."""
    seen: set[str] = set()
    for i, plan in enumerate(plans):
        limit = limit_of(plan)
        if limit is not None:
            axes.axvspan(
                edges[i], edges[i + 1], color=_LIMITS[limit], linewidth=0, zorder=0,
                label=None if limit in seen else f"limited by {limit}",
            )  # fmt: skip
            seen.add(limit)
    _legend(axes)


def _draw_peak(axes: Any, plans: list[Plan], places: list[float]) -> None:
    """On a line of the budget, which it nearly hides where all of it is used."""
    budgets = [plan.budget_bytes for plan in plans]
    scale, unit = next((s, u) for s, u in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1, "bytes")) if max(budgets) >= s)
    axes.plot(places, [size / scale for size in budgets], color="#cccccc", linewidth=5, label="budget")
    axes.plot(
        places, [plan.peak_bytes / scale for plan in plans], color=_SECOND, marker="s", markersize=4, linewidth=1.4, label="peak"
    )
    axes.set_ylim(0, 1.08 * max(budgets) / scale)
    axes.set_ylabel(unit)
    axes.grid(True, axis="y", color="#cccccc", linewidth=0.6)
    axes.set_axisbelow(True)
    _legend(axes)


def _draw_modes(axes: Any, plans: list[Plan], edges: list[float]) -> None:
    widths = [right - left for left, right in pairwise(edges)]
    below = [0] * len(plans)
    for mode in LETTERS:
        counts = [plan.block_modes.count(mode) for plan in plans]
        if any(counts):
            axes.bar(
                edges[:-1], counts, widths, below, align="edge", color=_MODES[mode], edgecolor="white", linewidth=0.8, label=mode
            )
        below = [a + b for a, b in zip(below, counts, strict=True)]
    axes.set_ylim(0, max(below))
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
    axes.set_ylabel("blocks")
    _legend(axes, reverse=True)


def _legend(axes: Any, reverse: bool = False) -> None:
    """Beside the panel, where it covers nothing."""
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, reverse=reverse)
