"""The page of a training: its sections, of the pieces in report_pieces.py.

Words, figures and tables are the page's; charts are SVG in it (report_charts.py). Every chart has its figures in a table below,
so nothing is told by a picture or a colour alone. What was planned is always named so; everything else was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from protrain.cli import report_charts as charts
from protrain.cli.report import Page, Recorded, thinned
from protrain.cli.report_pieces import chart, css, document, facts, header, key, legend, section, table, tiles
from protrain.cli.words import count, duration_text, size_text

MOST_ROWS = 200


def html(page: Page) -> str:
    """The whole page."""
    several = len(page.recorded) > 1
    body = [header(page.title, page.subtitle, page.notes)]
    body += _compared(page)
    for name, found in page.recorded.items():
        if several:
            body.append(f'<h2 class="of">{escape(name)}</h2>')
        else:
            body += [_key_figures(found)]
        body += [_memory(found), _lanes(found), _plan(found)]
        if not several:
            body += [_prediction(found), _loss(found)]
    body.append(facts(page.facts))
    return document(page.title, body)


def _key_figures(found: Recorded) -> str:
    steps, last = found.steps, found.steps[-1]
    highest = max(step.peak_bytes for step in steps)
    return tiles(
        [
            ("Loss", f"{last.loss:.4f}", f"from {steps[0].loss:.4f}, {count(found.n_steps, 'step')}"),
            (
                "Last step",
                duration_text(last.seconds),
                f"{duration_text(last.predicted_seconds)} planned" if last.predicted_seconds > 0 else "no time was planned",
            ),
            ("Highest memory", size_text(highest), f"of a budget of {size_text(found.budget_bytes)}"),
            ("Waited", f"{100 * last.wait_seconds / last.seconds:.1f} %" if last.seconds > 0 else "0.0 %", "of the last step"),
        ]
    )


# ---- sections of one training ----


def _memory(found: Recorded) -> str:
    samples = found.samples
    top = max(sample["highest_bytes"] for sample in samples)
    kinds = [part for part in charts.PARTS if any(sample[part[0]] for sample in samples)]
    planned, budget = found.plan["peak_bytes"], found.budget_bytes
    names = (
        f"Memory over step {found.last_step}: highest {size_text(top)}, planned peak {size_text(planned)}, budget "
        f"{size_text(budget)}. The table below has the figures."
    )
    entries = [
        key(f"area {css(kind)}", letter, name, f"at most {size_text(max(sample[kind] for sample in samples))}")
        for kind, letter, name in reversed(kinds)
    ]
    beyond = {size: "" if size <= 2 * top else ", beyond the scale" for size in (planned, budget)}
    entries += [
        key("rule solid", "", "highest between two measurements", size_text(top)),
        key("rule dashed", "", "peak as planned", size_text(planned) + beyond[planned]),
        key("rule dotted", "", "budget", size_text(budget) + beyond[budget]),
    ]
    scale, unit = charts.unit_of(top)
    heads = ["Moment", "ms", "live", "highest", *(letter for _, letter, _ in kinds)]
    rows = [
        [s["moment"], f"{1000 * s['seconds']:.1f}"]
        + [f"{s[kind] / scale:,.1f}" for kind in ("live_bytes", "highest_bytes", *(kind for kind, _, _ in kinds))]
        for s in samples
    ]
    told = (
        f"Step {found.last_step}, measured at {found.n_samples:,} moments, where blocks begin and end; the bands join them. "
        f"The line above is the most that was live since the moment before."
    )
    title = f"All {len(samples)} measurements, in {unit}"
    if found.n_samples_left_out:
        told += f" {len(samples):,} of them are shown, evenly over the step, with the highest."
        title = f"{len(samples):,} of {found.n_samples:,} measurements, with the highest, in {unit}"
    return section(
        "memory", "Memory over the step", told,
        legend(entries) + chart(charts.memory(found, names)) + table(title, heads, rows),
    )  # fmt: skip


def _lanes(found: Recorded) -> str:
    if not found.rows:
        return section("lanes", "Lanes of the step", found.missing or "Nothing was recorded.", "")
    named = ", ".join(f"{row.name} {100 * row.busy_seconds / found.step_seconds:.0f} %" for row in found.rows)
    names = f"What each lane did in step {found.last_step}, of {duration_text(found.step_seconds)}: {named}."
    rows = [
        [
            row.name,
            duration_text(row.busy_seconds),
            f"{100 * row.busy_seconds / found.step_seconds:.1f} %",
            size_text(row.bytes) if row.bytes else "",
        ]
        for row in found.rows
    ]
    told = f"Step {found.last_step} took {duration_text(found.step_seconds)}. What lies under compute is hidden behind it."
    return section(
        "lanes", "Lanes of the step", told,
        chart(charts.lanes(found, names)) + table("Busy times", ["Lane", "busy", "of the step", "moved"], rows, opened=True),
    )  # fmt: skip


def _plan(found: Recorded) -> str:
    from protrain.planner.explain import LETTERS

    plan = found.plan
    modes = plan["block_modes"]
    parts = []
    if modes:
        parts.append(
            _strip("blocks", f"{count(len(modes), 'block')}, each in its mode", modes, lambda mode: LETTERS[mode])
            + f"<p>{escape('; '.join(_ranges('block', modes)))}</p>"
        )
    homes = _homes(plan)
    parts.append(
        _strip("chunks", f"{count(len(homes), 'chunk')} of at most {size_text(plan['chunk_bytes'])}, by home", homes, str)
        + f"<p>{escape('; '.join(_ranges('chunk', homes)))}"
        + (f"; {count(plan['n_buffer'], 'slot')} take turns" if plan["n_buffer"] else "")
        + "</p>"
    )
    return section("plan", "Plan", f"The plan in use in step {found.last_step}.", "".join(parts))


def _homes(plan: dict[str, int]) -> list[str]:
    in_memory, host = plan["n_persist"], plan["n_host"]
    return ["memory"] * in_memory + ["host"] * host + ["disk"] * (plan["n_chunks"] - in_memory - host)


def _strip(kind: str, title: str, values: Sequence[str], letter: object) -> str:
    """A cell for each block or chunk: a letter on the colour of its value."""
    assert callable(letter)
    short = {"memory": "m", "host": "h", "disk": "d"}
    used = list(dict.fromkeys(values))
    cells = "".join(
        f'<li class="{css(value)}" title="{kind[:-1]} {i}: {value}">{short.get(value) or letter(value)}</li>'
        for i, value in enumerate(values)
    )
    keys = [
        key(f"area {css(value)}", short.get(value) or letter(value), value, count(values.count(value), kind[:-1]))
        for value in used
    ]
    return f'<h3>{escape(title)}</h3>{legend(keys)}<ol class="strip" start="0">{cells}</ol>'


def _ranges(word: str, values: Iterable[str]) -> list[str]:
    """As "blocks 0-3 keep"."""
    found, first = [], 0
    for value, run in groupby(values):
        last = first + len(list(run)) - 1
        found.append(f"{word} {first} {value}" if first == last else f"{word}s {first}–{last} {value}")
        first = last + 1
    return found


def _prediction(found: Recorded) -> str:
    last = found.steps[-1]
    rows = [
        ["Step time", duration_text(last.predicted_seconds) if last.predicted_seconds > 0 else "not planned",
         duration_text(last.seconds), _off(last.seconds, last.predicted_seconds)],
        ["Peak memory", size_text(last.predicted_peak_bytes), size_text(last.peak_bytes),
         _off(last.peak_bytes, last.predicted_peak_bytes)],
    ]  # fmt: skip
    times = charts.course(
        found.steps, "seconds", "predicted_seconds", "s", 1.0,
        f"Time of {count(found.n_steps, 'step')}, planned and measured; the last took {duration_text(last.seconds)}.",
    )  # fmt: skip
    scale, unit = charts.unit_of(max(max(s.peak_bytes, s.predicted_peak_bytes) for s in found.steps))
    peaks = charts.course(
        found.steps, "peak_bytes", "predicted_peak_bytes", unit, scale,
        f"Peak memory of {count(found.n_steps, 'step')}, planned and measured; of the last {size_text(last.peak_bytes)}.",
    )  # fmt: skip
    keys = [key("rule line-measured", "", "measured", ""), key("rule line-planned", "", "planned", "")]
    told = (
        "Each step beside the plan it was made under. A plan made from memory alone foretells no time; the first steps are "
        "timed, and planned by time from then on."
    )
    pair = (
        f'<div class="pair"><div><h3>Step time</h3>{chart(times)}</div>'
        f"<div><h3>Peak memory of a step</h3>{chart(peaks)}</div></div>"
    )
    return section(
        "prediction", "Planned and measured", told,
        table("The last step", ["", "planned", "measured", "difference"], rows, opened=True) + legend(keys) + pair
        + _steps_table(found),
    )  # fmt: skip


def _off(measured: float, planned: float) -> str:
    return f"{100 * (measured / planned - 1):+.1f} %".replace("-", "−") if planned > 0 else ""


def _steps_table(found: Recorded) -> str:
    shown = thinned(found.steps, MOST_ROWS)
    title = f"All {count(len(shown), 'step')}"
    if len(shown) < found.n_steps:
        title = f"{len(shown)} of {found.n_steps:,} steps, evenly, with the highest"
    rows = [
        [
            str(s.step), f"{s.loss:.4f}", duration_text(s.seconds),
            duration_text(s.predicted_seconds) if s.predicted_seconds > 0 else "",
            duration_text(s.wait_seconds), size_text(s.peak_bytes), size_text(s.predicted_peak_bytes),
        ]
        for s in shown
    ]  # fmt: skip
    return table(title, ["Step", "loss", "took", "planned", "waited", "peak", "planned peak"], rows)


def _loss(found: Recorded) -> str:
    steps = found.steps
    finite = all(math.isfinite(step.loss) for step in steps)
    told = f"From {steps[0].loss:.4f} to {steps[-1].loss:.4f} in {count(found.n_steps, 'step')}" + (
        "." if finite else "; where the line has gaps the loss was no number."
    )
    drawing = charts.course(steps, "loss", None, "", 1.0, f"Loss over steps. {told}", charts.WIDE)
    return section("loss", "Loss", told, chart(drawing))


# ---- comparisons ----


def _compared(page: Page) -> list[str]:
    found = []
    if page.sides:
        heads = ["", *page.sides[0].figures]
        rows = [[side.name, *side.figures.values()] for side in page.sides]
        names = "Seconds of each round: " + "; ".join(f"{s.name} {', '.join(f'{v:.3f}' for v in s.seconds)}" for s in page.sides)
        keys = [key("rule dotted-plain", "", page.sides[0].name, ""), key("rule line-measured", "", page.sides[1].name, "")]
        figures = table("Median, fastest and slowest", heads, rows, opened=True)
        found.append(
            section("sides", "Beside plain PyTorch", "The two take turns, one step each.",
                     figures + legend(keys) + chart(charts.rounds(page.sides, names)))
        )  # fmt: skip
    if page.points:
        names = "Throughput against activation peak: " + "; ".join(
            f"{p.name} {p.tokens_per_second:,.0f} tokens/s at {size_text(p.activation_peak_bytes)}" for p in page.points
        )
        modes = dict.fromkeys(p.mode for p in page.points)
        shapes = {"keep": "●", "swap": "■", "checkpoint": "▲", "checkpoint_swap": "◆"}
        keys = [f'<li><i class="shape {css(mode)}-ink">{shapes[mode]}</i>{escape(mode)}</li>' for mode in modes]
        rows = [[p.name, *p.figures.values()] for p in page.points]
        found.append(
            section("tradeoff", "Speed against activation memory", "Up is faster, left is smaller. Every state is in memory.",
                     legend(keys) + chart(charts.tradeoff(page.points, names))
                     + table("All configurations", ["Modes of blocks", *page.points[0].figures], rows, opened=True))
        )  # fmt: skip
    return found
