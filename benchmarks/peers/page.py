"""The page of a comparison, made from its JSON alone: one HTML file that fetches nothing and runs nothing.

python -m peers.page results/peers.json FILE.html        (in benchmarks; `protrain bench --report` writes it after a run)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from peers import show
from peers.listing import REFERENCE

from protrain.cli import report_charts as charts
from protrain.cli.report import Compared, check_report
from protrain.cli.report_pieces import chart, document, facts, header, key, legend, listed, section, table, tiles
from protrain.cli.words import MIB, CommandError, count, duration_text, size_text

TITLE = "protrain and its peers"
KINDS = {show.OURS: "ours", REFERENCE: "reference"}


def html(found: dict[str, Any]) -> str:
    """The page of a record."""
    rows = [_compared(row, found) for row in found["rows"] if row["median_seconds"] is not None]
    body = [header(TITLE, show.title(found), _notes(found)), _key_figures(found), _table(found), _standing(found)]
    if rows:
        body += [_against(rows, found), _steps(rows, found)]
    body += [_largest(found), _settings(found), _missing(found), facts(_facts(found))]
    return document(TITLE, [part for part in body if part])


def write(name: str, found: dict[str, Any]) -> None:
    """As a whole or not at all. Raises OSError."""
    from protrain.base.replacing import write_file

    write_file(name, html(found).encode())


def _compared(row: dict[str, Any], found: dict[str, Any]) -> Compared:
    kind = KINDS.get(row["name"], "peer")
    return Compared(row["name"], kind, found["batch"] * found["seq"], row["seconds"], row["peak_bytes"])


def _notes(found: dict[str, Any]) -> list[str]:
    if not found.get("interrupted"):
        return []
    measured = sum(row["median_seconds"] is not None for row in found["rows"])
    return [f"The comparison was interrupted with {measured} of {count(len(found['rows']), 'row')} measured."]


# ---- figures ----


def _key_figures(found: dict[str, Any]) -> str:
    measured = [row for row in found["rows"] if row["median_seconds"] is not None]
    named = {row["name"]: row for row in measured}
    if not {show.OURS, REFERENCE} <= named.keys():
        return ""
    ours, plain = named[show.OURS], named[REFERENCE]
    kept = sum(row["within_budget"] for row in measured)
    most = found["over"] * found["budget_bytes"]
    return tiles(
        [
            ("protrain", f"{ours['tokens_per_second']:,.0f} tokens/s", f"plain torch {plain['tokens_per_second']:,.0f}"),
            ("Median step", duration_text(ours["median_seconds"]), f"{ours['ratio']:.2f} times plain torch's"),
            ("Peak memory", _mib(ours["peak_bytes"]), f"plain torch {_mib(plain['peak_bytes'])}"),
            ("Keep to the budget", f"{kept} of {len(measured)}", f"{_mib(found['budget_bytes'])}, counted up to {_mib(most)}"),
        ]
    )


def _table(found: dict[str, Any]) -> str:
    measured = [row for row in found["rows"] if row["median_seconds"] is not None]
    if not measured:
        return ""
    words = {one.name: one.word for one in show.standings(found)}
    with_largest = show.grown(found)
    heads = [*show.HEADINGS, *(["largest model"] if with_largest else [])]
    rows = [
        show.cells(row, *([words.get(row["name"], "")] if words else [])) + ([show.largest(row)] if with_largest else [])
        for row in measured
    ]
    told = (
        f"Everybody trains the same model on the same batches and takes turns, one step each; {show.OURS} is in bold. Losses are "
        "compared with plain torch's at every step."
    )
    figures = table("All that were measured", heads, rows, opened=True, kind="rows", strong=[show.OURS])
    return section("compared", "Side by side", told, figures + _small(show.legend(found)))


def _standing(found: dict[str, Any]) -> str:
    """What protrain is ahead of, and of the others why it is not."""
    lines, behind = show.verdicts(found), show.behind(found)
    if not lines:
        return ""
    return section(
        "standing",
        "Where protrain is ahead, and where not",
        " ".join([*lines, show.own_cost(found)]),
        listed("said", behind) if behind else "",
    )


def _largest(found: dict[str, Any]) -> str:
    """How large a model each one trains in the budget, and what is too large."""
    told = show.largest_models(found)
    about = f"{found['model']} with more layers or fewer. {show.LARGEST}"
    return section("largest", f"The largest model in {_mib(found['budget_bytes'])}", about, listed("said", told)) if told else ""


def _against(rows: list[Compared], found: dict[str, Any]) -> str:
    budget, most = found["budget_bytes"], found["over"] * found["budget_bytes"]
    names = f"Throughput against peak memory, the budget {_mib(budget)}: " + "; ".join(
        f"{row.name} {row.rates[1]:,.0f} tokens/s at {_mib(row.peak_bytes)}" for row in rows
    )
    drawing, named = charts.against(rows, budget, most, names)
    keys = [
        key("rule upright", "", "budget", _mib(budget)),
        key("area most", "", "counts as kept, up to", _mib(most)),
        *_kinds(rows),
    ]
    numbers = [key(f"area {row.kind}", str(i), row.name, "") for i, row in enumerate(rows, 1)]
    told = "Up is faster, left is smaller. The line through a point goes from quartile to quartile."
    shown = legend(keys) + legend(numbers, "legend narrow" if named else "legend") + chart(drawing)
    return section("against", "Speed against memory", told, shown)


def _steps(rows: list[Compared], found: dict[str, Any]) -> str:
    ordered = sorted(rows, key=lambda row: row.quartiles[1])
    names = "Seconds of a step, median and quartiles: " + "; ".join(
        f"{row.name} {row.quartiles[1]:.3f}, {row.quartiles[0]:.3f} to {row.quartiles[2]:.3f}" for row in ordered
    )
    told = (
        f"The fastest first: the stroke is the median, the band goes from quartile to quartile, each dot is one of "
        f"{count(found['rounds'], 'round')}. Plain torch and protrain have more where not all fit memory at once, "
        "since they are in every group."
    )
    figures = [
        [row.name, *(duration_text(s) for s in (min(row.seconds), *row.quartiles, max(row.seconds))), str(len(row.seconds))]
        for row in ordered
    ]
    heads = ["", "fastest", "lower quartile", "median", "upper quartile", "slowest", "steps"]
    shown = legend(_kinds(rows)) + chart(charts.spread(ordered, names)) + table("All step times", heads, figures)
    return section("steps", "Step time", told, shown)


def _kinds(rows: Iterable[Compared]) -> list[str]:
    there = {row.kind for row in rows}
    return [
        key(f"dot {kind}", "", name, "")
        for kind, name in (("ours", show.OURS), ("reference", REFERENCE), ("peer", "its peers"))
        if kind in there
    ]


# ---- settings ----


def _settings(found: dict[str, Any]) -> str:
    """A part for each peer that has a time; its rows are together where it has several settings."""
    measured = [row for row in found["rows"] if row["median_seconds"] is not None]
    parts = [_peer(name, list(rows)) for name, rows in groupby(measured, key=_base)]
    told = "The best of each, found by running each of its documented settings by itself; those kept are in bold."
    return section("settings", "Settings", told, "".join(parts)) if parts else ""


def _base(row: dict[str, Any]) -> str:
    """The name of a row without that of its setting."""
    setting = row.get("setting")
    return str(row["name"]).removesuffix(f", {setting}") if setting else str(row["name"])


def _peer(name: str, rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    parts = [f"<h3>{escape(name)}</h3>", f'<p class="small">{_documented(first)}</p>']
    for row in rows:
        label = f'<p class="small">{escape(row["setting"])}:</p>' if row.get("setting") else ""
        knobs = "".join(f"<li><code>{escape(knob)}</code></li>" for knob in _knobs(row["knobs"]))
        parts.append(label + (f'<ul class="knobs">{knobs}</ul>' if knobs else '<p class="small">No knobs.</p>'))
    searched = [setting for row in rows for setting in row["searched"]]
    if len(searched) > 1 or any(setting["verdict"] in ("wrong", "failed") for setting in searched):
        parts.append(_search(searched, [kept for row in rows if (kept := _kept(row, searched)) is not None]))
    return f'<div class="peer">{"".join(parts)}</div>'


def _documented(row: dict[str, Any]) -> str:
    page = str(row["documented"])
    link = f'<a href="{escape(page)}" rel="noreferrer">{escape(page)}</a>' if page.startswith("https://") else escape(page)
    others = [f"{name} {version}" for name, version in row["versions"].items() if name not in ("torch", "transformers")]
    said = [f"Offloads {row['offloads']}."] if row.get("offloads") else []
    said += [f"Note: {row['note']}."] if row["note"] else []
    said += [f"By {', '.join(others)}."] if others else []
    return " ".join([f"Documented: {link}.", *map(escape, said)])


def _search(searched: list[dict[str, Any]], kept: list[dict[str, Any]]) -> str:
    """What was tried, those that were kept in bold."""
    rows = []
    for setting in searched:
        right = setting["verdict"] in ("equal", "close")
        verdict = setting["verdict"] + (f": {setting['reason']}" if setting["reason"] else "")
        figures = [duration_text(setting["seconds"]), _mib(setting["peak_bytes"])] if right else ["–", "–"]
        rows.append([", ".join(_knobs(setting["knobs"])) or "no more knobs", verdict, *figures])
    strong = [", ".join(_knobs(setting["knobs"])) or "no more knobs" for setting in kept]
    heads = ["setting", "losses", "step", "peak memory"]
    return table(f"{count(len(searched), 'setting')} tried", heads, rows, kind="settings", strong=strong)


def _kept(row: dict[str, Any], searched: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The setting of the search that a row's knobs have all of; of several the one with most of them."""
    within = [s for s in searched if s["verdict"] in ("equal", "close") and s["knobs"].items() <= row["knobs"].items()]
    return max(within, key=lambda setting: len(setting["knobs"]), default=None)


def _knobs(knobs: dict[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in knobs.items()]


# ---- without a time, and facts ----


def _missing(found: dict[str, Any]) -> str:
    verdicts = {row["name"]: row["verdict"] for row in found["rows"]}
    said = [
        (name, reason if reason.startswith("not run") else f"{_word(verdicts[name])}: {reason}")
        for name, reason in show.reasons(found)
    ]
    return section("missing", "Without a time", "", listed("said", said)) if said else ""


def _word(verdict: str) -> str:
    return "wrong losses" if verdict == "wrong" else verdict


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    machine = found["machine"]
    memory = f"{machine['cores']} cores, {size_text(machine['memory_bytes'])} of memory"
    if machine.get("cgroup_bytes"):
        memory += f", limited to {size_text(machine['cgroup_bytes'])}"
    swap = machine["swap_bytes"]
    took, versions = found.get("took_seconds"), ("Python", "torch", "transformers")
    return [
        ("Processor", machine["cpu"]),
        ("Machine", memory + (f", {size_text(swap)} of swap" if swap else ", no swap") + f", disk {machine['file_system']}"),
        ("Software", ", ".join([f"Linux {machine['kernel']}", *(f"{n} {machine[n.lower()]}" for n in versions)])),
        ("Model", ", ".join([found["model"], f"{found['parameters']:,} parameters", count(found["layers"], "layer"), "fp32",
                             f"dropout {found['dropout'] or 'off'}"])),
        ("Step", f"{found['batch']} × {found['seq']} tokens, AdamW, seed {found['seed']}"),
        ("Rounds", f"{count(found['rounds'], 'step')} of each, after {found['warm_steps']} that are not measured"),
        ("Budget", f"{_mib(found['budget_bytes'])} for all of them; counts as kept, up to {found['over']:g} of it"),
        ("Measured", f"on {found['date']}" + (f", in {duration_text(took)}" if took else "")),
        ("Made by", found["command"]),
    ]  # fmt: skip


def _small(text: str) -> str:
    return f'<p class="small">{escape(text)}</p>'


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB"


if __name__ == "__main__":
    try:
        check_report(sys.argv[2])
    except CommandError as error:
        sys.exit(str(error).replace("--report ", ""))
    write(sys.argv[2], json.loads(Path(sys.argv[1]).read_text()))
