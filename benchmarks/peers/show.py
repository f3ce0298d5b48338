"""The table and the picture of a comparison, made from its JSON alone:

python -m peers.show benchmarks/results/peers.json        (in benchmarks; writes peers.md and peers.png beside it)
"""

from __future__ import annotations

import io
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from protrain.cli.words import MIB, duration_text, size_text

HEADINGS = ("", "tokens/s", "median step", "to plain torch", "peak memory", "in budget", "losses", "set-up", "knobs")
LOSSES = {"equal": "equal", "close": "close", "wrong": "wrong"}
OURS = "protrain"


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table, without the largest model; a row without a time says why elsewhere."""
    if row["median_seconds"] is None:
        losses = "wrong" if row["verdict"] == "wrong" else ""
        return [row["name"], "–", "–", "–", "–", "", losses or row["verdict"], "–", str(len(row["knobs"]))]
    low, high = _quartiles(row["seconds"])
    return [
        row["name"],
        f"{row['tokens_per_second']:,.0f}",
        f"{duration_text(row['median_seconds'])} ({low:.2f}–{high:.2f})",
        f"{row['ratio']:.2f}",
        f"{row['peak_bytes'] / MIB:,.0f} MiB",
        "yes" if row["within_budget"] else "no",
        LOSSES[row["verdict"]],
        duration_text(row["setup_seconds"]),
        str(len(row["knobs"])),
    ]


def title(found: dict[str, Any]) -> str:
    """One line on what was measured."""
    return (
        f"{found['model']}, {found['parameters'] / 1e6:.0f} M parameters, batch {found['batch']} x {found['seq']} tokens, "
        f"budget {size_text(found['budget_bytes'])}, {found['rounds']} interleaved rounds"
        f"{', interrupted' if found.get('interrupted') else ''}"
    )


def legend(found: dict[str, Any]) -> str:
    """What the columns mean."""
    return (
        "Median step: in brackets from quartile to quartile. To plain torch: median of the ratios in the same rounds. "
        "Peak memory: the process's resident high-water mark over the measured steps, less what it held before it had a model. "
        f"In budget: at most {found['over']:g} of it. Losses: equal to plain torch's in every step, or closer than "
        f"{found['tolerance']:g} of them, else wrong and without a time. "
        "Set-up: from the model's making to steady steps. Knobs: what a user set."
    )


def reasons(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Of the rows without a time: why."""
    return [(row["name"], row["reason"]) for row in found["rows"] if row["median_seconds"] is None]


# ---- the terminal ----


def print_table(found: dict[str, Any]) -> None:
    """The table as a person at a terminal reads it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    full = any(row["largest_parameters"] for row in found["rows"])
    for heading in (*HEADINGS, *(["largest model"] if full else [])):
        table.add_column(heading, justify="left" if heading in ("", "losses") else "right", no_wrap=True)
    for row in found["rows"]:
        table.add_row(*cells(row), *([_largest(row)] if full else []), style="bold" if row["name"] == OURS else None)
    print(title(found))
    console = Console(highlight=False)
    console.width = max(console.width if sys.stdout.isatty() else 0, 140)  # a narrower one would lose figures
    console.print(table)
    for name, reason in reasons(found):
        print(f"{name}: {reason}")
    print(legend(found))


def _largest(row: dict[str, Any]) -> str:
    if not row["largest_parameters"]:
        return "–"
    return ("≥ " if row["largest_at_least"] else "") + f"{row['largest_parameters'] / 1e6:,.0f} M"


# ---- the page ----


def markdown(found: dict[str, Any]) -> str:
    """peers.md."""
    full = any(row["largest_parameters"] for row in found["rows"])
    headings = [*(h or "what" for h in HEADINGS), *(["largest model"] if full else [])]
    machine = found["machine"]
    lines = [
        "# protrain and its peers",
        "",
        f"By `{found['command']}` on {found['date']}; the record is [peers.json](peers.json).",
        "",
        f"- {title(found)}, AdamW in fp32, dropout off, seed {found['seed']}, {found['warm_steps']} steps before those measured.",
        (
            f"- {machine['cpu']}, {machine['cores']} cores, {size_text(machine['memory_bytes'])} of memory, "
            f"{size_text(machine['swap_bytes'])} of swap, disk {machine['file_system']}, Linux {machine['kernel']}, "
            f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}."
        ),
        f"- {legend(found)}",
        "",
        "![Throughput and peak memory of each](peers.png)",
        "",
        "| " + " | ".join(headings) + " |",
        "| --- |" + " ---: |" * (len(headings) - 1),
    ]
    for row in found["rows"]:
        shown = cells(row) + ([_largest(row)] if full else [])
        shown[0] = f"**{shown[0]}**" if row["name"] == OURS else shown[0]
        lines.append("| " + " | ".join(shown) + " |")
    lines += ["", *_missing(found), "## Settings", "", "The best of each, found by running each documented setting by itself."]
    for row in found["rows"]:
        lines += _settings(row)
    return "\n".join(lines).rstrip() + "\n"


def _missing(found: dict[str, Any]) -> list[str]:
    """Why rows have no time."""
    named = reasons(found)
    return ["## Without a time", "", *(f"- {name}: {_escaped(reason)}" for name, reason in named), ""] if named else []


def _settings(row: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"### {row['name']}",
        "",
        f"Documented: {row['documented']}" + (f". Note: {row['note']}." if row["note"] else ""),
    ]
    if row["versions"].keys() - {"torch", "transformers", "protrain"}:
        lines[-1] += " " + ", ".join(f"{n} {v}" for n, v in row["versions"].items() if n not in ("torch", "transformers"))
    if row["knobs"]:
        lines += ["", "Kept: " + ", ".join(f"`{name}={json.dumps(value)}`" for name, value in row["knobs"].items())]
    if len(row["searched"]) > 1 or any(s["verdict"] in ("wrong", "failed") for s in row["searched"]):
        lines += ["", "| setting | losses | step | peak memory |", "| --- | --- | ---: | ---: |"]
        for setting in row["searched"]:
            lines.append("| " + " | ".join(_searched(setting)) + " |")
    return lines


def _searched(setting: dict[str, Any]) -> list[str]:
    knobs = ", ".join(f"{name}={json.dumps(value)}" for name, value in setting["knobs"].items())
    verdict = setting["verdict"] + (f": {_escaped(setting['reason'])}" if setting["reason"] else "")
    if setting["verdict"] not in ("equal", "close"):
        return [f"`{knobs}`", verdict, "–", "–"]
    return [f"`{knobs}`", verdict, duration_text(setting["seconds"]), f"{setting['peak_bytes'] / MIB:,.0f} MiB"]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _quartiles(seconds: list[float]) -> tuple[float, float]:
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high


# ---- the picture ----


def picture(found: dict[str, Any]) -> bytes:
    """A PNG: tokens a second and peak memory side by side, a bar for each row that has a time. By matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in found["rows"] if row["median_seconds"] is not None][::-1]
    figure = Figure(figsize=(11, 1.9 + 0.42 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2, sharey=True)
    colours = ["#0072B2" if row["name"] == OURS else "#9A9A9A" for row in rows]
    names = [row["name"] for row in rows]
    tokens = [row["tokens_per_second"] for row in rows]
    speed.barh(names, tokens, color=colours)
    per_step = found["batch"] * found["seq"]
    ends = [_quartiles(row["seconds"]) for row in rows]
    spread = [[t - per_step / high, per_step / low - t] for t, (low, high) in zip(tokens, ends, strict=True)]
    speed.errorbar(tokens, range(len(rows)), xerr=[[max(e, 0) for e in side] for side in zip(*spread, strict=True)],
                   fmt="none", ecolor="#222222", capsize=2.5, linewidth=1)  # fmt: skip
    speed.set_xlabel("tokens/s, more is better")
    peaks = [row["peak_bytes"] / MIB for row in rows]
    memory.barh(names, peaks, color=colours)
    memory.set_xlabel("peak resident memory (MiB), less is better")
    budget = found["budget_bytes"] / MIB
    memory.axvline(budget, color="#D55E00", linewidth=1.4, linestyle="--")
    memory.annotate(f"budget {budget:,.0f}", (budget, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 4),
                    textcoords="offset points", ha="center", color="#D55E00", fontsize=9)  # fmt: skip
    for axes, values, ends_at in ((speed, tokens, [per_step / low for low, _ in ends]), (memory, peaks, peaks)):
        for place, (value, end) in enumerate(zip(values, ends_at, strict=True)):
            axes.annotate(
                f"{value:,.0f}", (max(value, end), place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9
            )
        axes.set_xlim(0, 1.15 * max(*values, *ends_at, budget if axes is memory else 0))
        axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title(found)}\nmedians, bars from quartile to quartile; {found['machine']['cpu']}", fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def write(folder: Path, found: dict[str, Any]) -> list[str]:
    """peers.json, peers.md and, where matplotlib is, peers.png into a folder; returns their names. Raises OSError."""
    from importlib.util import find_spec

    from protrain.timeline import write_file

    folder.mkdir(parents=True, exist_ok=True)
    written = ["peers.json", "peers.md"]
    write_file(str(folder / "peers.json"), (json.dumps(found, indent=1) + "\n").encode())
    write_file(str(folder / "peers.md"), markdown(found).encode())
    if find_spec("matplotlib") is not None:
        write_file(str(folder / "peers.png"), picture(found))
        written.append("peers.png")
    return written


if __name__ == "__main__":
    record = Path(sys.argv[1])
    write(record.parent, json.loads(record.read_text()))
