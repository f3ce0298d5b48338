"""The table and the picture of a comparison, made from its JSON alone:

python -m peers.show benchmarks/results/peers.json        (in benchmarks; writes peers.md and peers.png beside it)
"""

from __future__ import annotations

import io
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protrain.cli.words import MIB, count, duration_text, json_text, size_text

HEADINGS = ("", "tokens/s", "median step", "to plain torch", "peak memory", "in budget", "protrain", "losses", "set-up", "knobs")
LOSSES = {"equal": "equal", "close": "close", "wrong": "wrong"}
OURS = "protrain"
LARGEST = (
    "Largest model: parameters of the one with the most layers whose peak the budget holds, in the setting with the least peak."
)


@dataclass(frozen=True)
class Standing:
    """How a peer's row stands to protrain's, in the rounds that both were in. speed: the peer's over protrain's; even: from
    quartile to quartile that is less and more than 1; lighter: protrain's peak memory is equal or lower; text: one clause with
    the figures, and what is known of the peer."""

    name: str
    speed: float
    even: bool
    lighter: bool
    offloads: bool
    text: str

    @property
    def word(self) -> str:
        """What protrain is: "ahead" where it is faster with no more memory."""
        if self.even:
            return "even" if self.lighter else "larger"
        if self.speed < 1:
            return "ahead" if self.lighter else "larger"
        return "slower" if self.lighter else "behind"


def standings(found: dict[str, Any]) -> list[Standing]:
    """Of each peer that has a time, in the table's order; none where protrain has none."""
    ours = next((row for row in found["rows"] if row["name"] == OURS and row["median_seconds"] is not None), None)
    if ours is None:
        return []
    timed = [row for row in found["rows"] if row["median_seconds"] is not None and row["to_ours"] and row is not ours]
    return [_standing(row, ours, found["budget_bytes"]) for row in timed]


def _standing(row: dict[str, Any], ours: dict[str, Any], budget_bytes: int) -> Standing:
    low, high = _quartiles([1 / ratio for ratio in row["to_ours"]])
    speed = 1 / statistics.median(row["to_ours"])
    offloads = row.get("offloads", "")
    how = f"{speed:.2f} times as fast as protrain" + (f" ({low:.2f}–{high:.2f})" if low < high else "")
    where = f"at {row['peak_bytes'] / MIB:,.0f} MiB where protrain has {ours['peak_bytes'] / MIB:,.0f}"
    budget = f"{'within' if row['within_budget'] else 'over'} the budget of {size_text(budget_bytes)}"
    known = [f"offloads {offloads}"] if offloads else []
    known += [row["note"]] if row["note"] else []
    lighter = ours["peak_bytes"] <= row["peak_bytes"]
    text = "; ".join([f"{how}, {where}: {budget}", *known])
    return Standing(row["name"], speed, low <= 1 <= high, lighter, offloads not in ("", "nothing"), text)


def verdicts(found: dict[str, Any]) -> list[str]:
    """Whether protrain is ahead, in sentences: of all that have a time, then of those that offload."""
    stand = standings(found)
    if not stand:
        return []
    ahead = [one for one in stand if one.word == "ahead"]
    counts = f"{len(ahead)} of the {len(stand)}"
    lines = [
        f"protrain is ahead of {counts} other rows that have a time: faster in the same rounds, at equal or lower peak memory."
    ]
    offload = [one for one in stand if one.offloads]
    missed = [one.name for one in offload if one.word != "ahead"]
    if offload and not missed:
        lines.append(f"Of those that offload it is ahead of all {len(offload)}.")
    elif offload:
        lines.append(f"Of the {len(offload)} that offload it is not ahead of {', '.join(missed)}.")
    return lines


def behind(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows that protrain is not ahead of, and why."""
    return [(one.name, one.text) for one in standings(found) if one.word != "ahead"]


def own_cost(found: dict[str, Any]) -> str:
    """What protrain pays for its peak, beside plain torch."""
    rows = {row["name"]: row for row in found["rows"]}
    ours, plain = rows[OURS], found["rows"][0]
    share = ours["peak_bytes"] / plain["peak_bytes"]
    cost = f"A step of protrain takes {ours['ratio']:.2f} of {plain['name']}'s, with {100 * share:.0f} % of its peak memory"
    counted = ours.get("counted_bytes")
    counts = f"; by its own count, which is what it holds to the budget, {counted / MIB:,.0f} MiB at most" if counted else ""
    return cost + counts + "."


def cells(row: dict[str, Any], word: str = "") -> list[str]:
    """A row of the table, without the largest model; a row without a time says why elsewhere. Args: word, `Standing.word`."""
    if row["median_seconds"] is None:
        losses = "wrong" if row["verdict"] == "wrong" else ""
        return [row["name"], "–", "–", "–", "–", "", "", losses or row["verdict"], "–", str(n_knobs(row))]
    low, high = _quartiles(row["seconds"])
    return [
        row["name"],
        f"{row['tokens_per_second']:,.0f}",
        f"{duration_text(row['median_seconds'])} ({low:.2f}–{high:.2f})",
        _ratio(row),
        f"{row['peak_bytes'] / MIB:,.0f} MiB",
        "yes" if row["within_budget"] else "no",
        word,
        LOSSES[row["verdict"]],
        duration_text(row["setup_seconds"]),
        str(n_knobs(row)),
    ]


def n_knobs(row: dict[str, Any]) -> int:
    """How many values a user sets that are not the documented defaults."""
    return sum(name not in row["defaults"] or row["defaults"][name] != value for name, value in row["knobs"].items())


def _ratio(row: dict[str, Any]) -> str:
    low, high = _quartiles(row["ratios"])
    return f"{row['ratio']:.2f}" + (f" ({low:.2f}–{high:.2f})" if low < high else "")


def title(found: dict[str, Any]) -> str:
    """One line on what was measured."""
    return (
        f"{found['model']}, {found['parameters'] / 1e6:.0f} M parameters, batch {found['batch']} x {found['seq']} tokens, "
        f"budget {size_text(found['budget_bytes'])}, {found['rounds']} interleaved rounds"
        f"{', interrupted' if found.get('interrupted') else ''}"
    )


def took(found: dict[str, Any]) -> str:
    """How long the whole command took, and what was installed before it or in it; empty where the record does not say."""
    if "took_seconds" not in found:
        return ""
    kept = found.get("kept_searches", 0)
    earlier = f", with {kept} of the searches kept from earlier runs" if kept else ", its searches included"
    installed = {row["peer"]: row["install_seconds"] for row in found.get("rows", []) if row["install_seconds"]}
    once = ", ".join(f"{peer} in {duration_text(seconds)}" for peer, seconds in installed.items())
    once = f" Installed at its first use, once: {once}; what it compiles then comes on top." if once else ""
    return f"The whole command took {duration_text(found['took_seconds'])}{earlier}.{once}"


def legend(found: dict[str, Any]) -> str:
    """What the columns mean."""
    with_largest = grown(found)
    return (
        "Median step, to plain torch: in brackets from quartile to quartile; ratios are those of the same rounds. "
        "Peak memory: the process's resident high-water mark over the measured steps, less what it held before it had a model. "
        f"In budget: at most {found['over']:g} of it, since a process has more pages than its tensors'. "
        "What protrain is, in the same rounds: 'ahead' is faster with no more memory; 'even', faster in some rounds and slower "
        "in others, from quartile to quartile, with no more memory; 'slower', with no more memory; 'larger', not slower, with "
        "more memory; 'behind', slower with more. "
        "Losses: equal to plain torch's in every step, or closer than "
        f"{found['tolerance']:g} of them, else wrong and without a time. "
        "Set-up: from the model's making to steady steps. Knobs: values that a user sets and that are no documented defaults. "
        "Fastest and leanest: two settings of one peer, where none keeps to the budget." + (f" {LARGEST}" if with_largest else "")
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
    with_largest = grown(found)
    for heading in (*HEADINGS, *(["largest model"] if with_largest else [])):
        table.add_column(heading, justify="left" if heading in ("", "protrain", "losses") else "right", no_wrap=True)
    words = {one.name: one.word for one in standings(found)}
    for row in found["rows"]:
        shown = cells(row, words.get(row["name"], "")) + ([largest(row)] if with_largest else [])
        table.add_row(*shown, style="bold" if row["name"] == OURS else None)
    print(title(found))
    console = Console(highlight=False)
    console.width = max(console.width if sys.stdout.isatty() else 0, 165)  # a narrower one would lose figures
    console.print(table)
    for line in verdicts(found):
        print(line)
    for name, reason in [*behind(found), *reasons(found)]:
        print(f"{name}: {reason}")
    print(legend(found))
    if took(found):
        print(took(found))


def grown(found: dict[str, Any]) -> bool:
    """Whether the largest model was asked for."""
    return any(row["largest_layers"] is not None for row in found["rows"])


def largest(row: dict[str, Any]) -> str:
    if row["largest_layers"] is None:
        return "–"
    if not row["largest_layers"]:
        return "none"
    return ("≥ " if row["largest_at_least"] else "") + f"{row['largest_parameters'] / 1e6:,.0f} M"


def largest_models(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Of each row for which it was asked: the largest model, and why it is not larger."""
    told = []
    for row in found["rows"]:
        if row["largest_layers"] is not None:
            what = f"{largest(row)} parameters in {count(row['largest_layers'], 'layer')}" if row["largest_layers"] else "none"
            told.append((row["name"], f"{what}; {row['largest_ended']}"))
    return told


# ---- the page ----


def markdown(found: dict[str, Any]) -> str:
    """peers.md."""
    with_largest = grown(found)
    headings = [*(h or "what" for h in HEADINGS), *(["largest model"] if with_largest else [])]
    machine = found["machine"]
    lines = [
        "# protrain and its peers",
        "",
        f"By `{found['command']}` on {found['date']}; the record is [peers.json](peers.json). {took(found)}".rstrip(),
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
    words = {one.name: one.word for one in standings(found)}
    for row in found["rows"]:
        shown = cells(row, words.get(row["name"], "")) + ([largest(row)] if with_largest else [])
        shown[0] = f"**{shown[0]}**" if row["name"] == OURS else shown[0]
        lines.append("| " + " | ".join(shown) + " |")
    lines += ["", *_behind(found), *_largest(found), *_missing(found), *_wrong(found)]
    lines += ["## Settings", "", "The best of each, found by running each documented setting by itself."]
    for row in found["rows"]:
        lines += _settings(row)
    return "\n".join(lines).rstrip() + "\n"


def _behind(found: dict[str, Any]) -> list[str]:
    """Where protrain is ahead, and where it is not."""
    if not (lines := verdicts(found)):
        return []
    named = behind(found)
    section = ["", "## Where protrain is behind, and why", "", own_cost(found), ""] if named else []
    return [" ".join(lines), *section, *(f"- {name}: {_escaped(reason)}." for name, reason in named), ""]


def _largest(found: dict[str, Any]) -> list[str]:
    """How far each one gets."""
    named = [f"- {name}: {_escaped(told)}." for name, told in largest_models(found)]
    about = f"Of {found['model']} with more layers or fewer, in {size_text(found['budget_bytes'])}." if named else ""
    return ["## The largest model for the budget", "", about, "", *named, ""] if named else []


def _wrong(found: dict[str, Any]) -> list[str]:
    """The settings that train something else, whether or not others of their row are right."""
    named = [(row["name"], setting) for row in found["rows"] for setting in row["searched"] if setting["verdict"] == "wrong"]
    lines = [f"- {name}, {_knobs(setting['knobs'])}: {_escaped(setting['reason'])}." for name, setting in named]
    return ["## Settings with wrong losses", "", *lines, ""] if named else []


def _knobs(knobs: dict[str, Any]) -> str:
    text = ", ".join(f"{name}={json.dumps(value)}" for name, value in knobs.items())
    return f"`{text}`" if text else "the kept knobs alone"


def _missing(found: dict[str, Any]) -> list[str]:
    """Why rows have no time."""
    named = reasons(found)
    return ["## Without a time", "", *(f"- {name}: {_escaped(reason)}" for name, reason in named), ""] if named else []


def _settings(row: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"### {row['name']}",
        "",
        f"Documented: {_link(row['documented'])}." + (f" Note: {row['note']}." if row["note"] else ""),
    ]
    if row["versions"].keys() - {"torch", "transformers", "protrain"}:
        lines[-1] += " Measured: " + ", ".join(
            f"{n} {v}" for n, v in row["versions"].items() if n not in ("torch", "transformers")
        )
    if row["knobs"]:
        lines += ["", "Kept: " + ", ".join(f"`{name}={json.dumps(value)}`" for name, value in row["knobs"].items())]
    if len(row["searched"]) > 1 or any(s["verdict"] in ("wrong", "failed") for s in row["searched"]):
        lines += ["", "| setting | losses | step | peak memory |", "| --- | --- | ---: | ---: |"]
        for setting in row["searched"]:
            lines.append("| " + " | ".join(_searched(setting)) + " |")
    return lines


def _link(page: str) -> str:
    return f"<{page}>" if page.startswith("https://") else page


def _searched(setting: dict[str, Any]) -> list[str]:
    knobs = _knobs(setting["knobs"])
    verdict = setting["verdict"] + (f": {_escaped(setting['reason'])}" if setting["reason"] else "")
    if setting["verdict"] not in ("equal", "close"):
        return [knobs, verdict, "–", "–"]
    return [knobs, verdict, duration_text(setting["seconds"]), f"{setting['peak_bytes'] / MIB:,.0f} MiB"]


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

    from protrain.base.replacing import write_file

    folder.mkdir(parents=True, exist_ok=True)
    written = ["peers.json", "peers.md"]
    write_file(str(folder / "peers.json"), (json_text(found, indent=1) + "\n").encode())
    write_file(str(folder / "peers.md"), markdown(found).encode())
    if find_spec("matplotlib") is not None:
        write_file(str(folder / "peers.png"), picture(found))
        written.append("peers.png")
    return written


if __name__ == "__main__":
    record = Path(sys.argv[1])
    write(record.parent, json.loads(record.read_text()))
