"""The charts of a report: Vega-Lite specifications, drawn to SVG by vl-convert-python, with no script and no font in them.

Each chart is drawn twice, for a wide and for a narrow page. Colours are written as placeholders that stand for the page's own
(`var(--name)`), so that one drawing serves light, dark and paper. Text in charts is for axes and letters, and for names of points
where they all find room; legends are the page's, since those wrap.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from protrain.cli.report import Compared, Point, Recorded, Side, StepFigures, thinned
from protrain.cli.words import finite

WIDE, HALF, NARROW = 1040, 508, 334
MOST_POINTS = 400
#: A band of memory has its letter where it is so thick.
LETTER_PIXELS = 16

#: Kinds of memory from the bottom of the stack up: field of MemorySample, letter, name.
PARTS = (
    ("parameter_bytes", "P", "parameters at home in memory"),
    ("state_bytes", "O", "optimizer state in memory"),
    ("slot_bytes", "S", "slots that chunks on disk share"),
    ("ring_bytes", "R", "ring that updates stream through"),
    ("gradient_bytes", "G", "gradients"),
    ("stash_bytes", "T", "activations on their way to or from disk"),
    ("rest_bytes", "A", "activations kept, and working memory"),
)
#: Lanes of profiling/timeline.py: copies between host memory and a device are as the disk's of their direction.
LANE_COLOURS = {
    "compute": "state_bytes",
    "wait": "gradient_bytes",
    "read": "slot_bytes",
    "write": "stash_bytes",
    "update": "rest_bytes",
    "upload": "slot_bytes",
    "offload": "stash_bytes",
}
MODE_COLOURS = {"keep": "ring_bytes", "swap": "parameter_bytes", "checkpoint": "gradient_bytes", "checkpoint_swap": "stash_bytes"}
SHAPES = {"keep": "circle", "swap": "square", "checkpoint": "triangle-up", "checkpoint_swap": "diamond"}
_NAMES = [field for field, _, _ in PARTS] + ["ink", "muted", "line", "card", "measured", "planned"]
KIND_COLOURS = {"ours": "measured", "reference": "ink", "peer": "ring_bytes"}
#: In labels of points, pixels: what a character takes, how high a line is, how far from its point a label stands.
CHARACTER, LINE, AWAY = 6.9, 15.0, 9.0
#: A placeholder is a colour that nothing else has.
_PLACEHOLDERS = {name: f"#fe{i:02d}ed" for i, name in enumerate(_NAMES)}
_numbers = itertools.count(1)


def colour(name: str) -> str:
    """The placeholder of one of the page's colours."""
    return _PLACEHOLDERS[name]


@dataclass(frozen=True)
class Drawing:
    """A chart for wide and narrow pages, as SVG."""

    wide: str
    narrow: str


def unit_of(size: float) -> tuple[int, str]:
    """The binary unit in which a size has one to four digits before the point."""
    return next(((s, u) for s, u in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")) if size >= s), (1, "bytes"))


# ---- the charts ----


def memory(found: Recorded, names: str) -> Drawing:
    """What memory was of, over the last step. Args: names, what the text alternative says."""
    top = max(sample["highest_bytes"] for sample in found.samples)
    lines = [size for size in (found.budget_bytes, found.plan["peak_bytes"]) if 0 < size <= 2 * top]
    scale, unit = unit_of(max([top, *lines]))
    height = 300
    high = 1.04 * max([top, *lines]) / scale
    stacked, letters = _stacked(found.samples, scale, high / height * LETTER_PIXELS)
    x = _seconds(found.step_seconds)
    y = {"type": "quantitative", "scale": {"domain": [0, high], "nice": False}, **_unit(unit)}
    bands = {
        "data": {"values": stacked},
        "mark": {"type": "area", "stroke": colour("card"), "strokeWidth": 0.8},
        "encoding": {
            "x": x, "y": {"field": "low", **y}, "y2": {"field": "high"},
            "color": {"field": "kind", "type": "nominal", "legend": None, "scale": _scale([p[0] for p in PARTS])},
        },
    }  # fmt: skip
    highest = {
        "data": {"values": [{"t": s["seconds"], "size": s["highest_bytes"] / scale} for s in found.samples]},
        "mark": {"type": "line", "interpolate": "step-before", "color": colour("ink"), "strokeWidth": 1.5},
        "encoding": {"x": x, "y": {"field": "size", **y}},
    }
    rules = [
        {
            "data": {"values": [{"size": size / scale}]},
            "mark": {"type": "rule", "color": colour(name), "strokeWidth": 1.6, "strokeDash": dash},
            "encoding": {"y": {"field": "size", **y}},
        }
        for size, name, dash in (
            (found.plan["peak_bytes"], "planned", [6, 4]), (found.budget_bytes, "ink", [1, 3])
        )
        if size in lines
    ]  # fmt: skip
    text = {
        "data": {"values": letters},
        "mark": {"type": "text", "color": colour("card"), "fontSize": 12, "fontWeight": 700},
        "encoding": {"x": x, "y": {"field": "size", **y}, "text": {"field": "letter"}},
    }
    layers = [bands, highest, *rules, *([text] if letters else [])]
    return _draw({"layer": layers}, height, names, y_extent=132)


def _stacked(samples: list[dict[str, Any]], scale: int, least: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Bands of every kind that was there at all; and where a letter fits: in the middle of a stretch as thick as any."""
    below = [0.0] * len(samples)
    bands, letters = [], []
    for kind, letter, _ in PARTS:
        sizes = [sample[kind] / scale for sample in samples]
        if not any(sizes):
            continue
        for sample, low, size in zip(samples, below, sizes, strict=True):
            bands.append({"t": sample["seconds"], "kind": kind, "low": low, "high": low + size})
        inner = range(1, len(samples) - 1) or range(len(samples))
        thickest = max(sizes[i] for i in inner)
        if thickest >= least:
            places = [i for i in inner if sizes[i] >= 0.95 * thickest]
            i = places[len(places) // 2]
            letters.append({"t": samples[i]["seconds"], "size": below[i] + sizes[i] / 2, "letter": letter})
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    return bands, letters


def lanes(found: Recorded, names: str) -> Drawing:
    """What each lane did in the last step."""
    values = [
        {"row": row.name, "lane": LANE_COLOURS[row.lane], "start": start, "end": end}
        for row in found.rows
        for start, end in row.spans
    ]
    order = [row.name for row in found.rows]
    spec = {
        "data": {"values": values},
        "mark": {"type": "bar", "height": 13, "stroke": None},
        "encoding": {
            "x": {**_seconds(found.step_seconds), "field": "start"},
            "x2": {"field": "end"},
            "y": {"field": "row", "type": "nominal", "sort": order, "title": None, "axis": {"domain": False, "grid": True}},
            "color": {"field": "lane", "type": "nominal", "legend": None, "scale": _scale([p[0] for p in PARTS])},
        },
    }
    return _draw(spec, 21 * len(order) + 52, names, y_extent=132, narrow_extent=132)


def course(
    steps: Sequence[StepFigures], field: str, planned: str | None, unit: str, scale: float, names: str, width: int = HALF
) -> Drawing:
    """A figure over steps, beside what was planned where that is known."""
    shown = thinned(steps, MOST_POINTS)
    values = [{"step": s.step, "value": getattr(s, field) / scale} for s in shown]
    x = {
        "field": "step", "type": "quantitative", "title": "step",
        "scale": {"nice": False, "zero": False, "padding": 8},
        "axis": {"tickMinStep": 1, "format": "d", "grid": False, "tickCount": 6},
    }  # fmt: skip
    if len(shown) == 1:
        x["axis"] = {"values": [shown[0].step], "format": "d", "grid": False}
    y = {"field": "value", "type": "quantitative", **_unit(unit), "scale": {"zero": planned is not None}}
    few = len(shown) <= 60
    point = {"filled": True, "size": 26, "color": colour("measured")} if few else False
    measured = {
        "data": {"values": values},
        "mark": {"type": "line", "color": colour("measured"), "strokeWidth": 1.8, "point": point},
        "encoding": {"x": x, "y": y},
    }
    layers = [measured]
    if planned is not None:
        known = [{"step": s.step, "value": getattr(s, planned) / scale} for s in shown if getattr(s, planned) > 0]
        mark: dict[str, Any] = {
            "type": "line", "interpolate": "step-after", "color": colour("planned"), "strokeWidth": 1.8, "strokeDash": [6, 4],
            "point": {"filled": False, "size": 30, "shape": "square", "color": colour("planned")} if few else False,
        }  # fmt: skip
        layers.append({"data": {"values": known}, "mark": mark, "encoding": {"x": x, "y": y}})
    return _draw({"layer": layers}, 210, names, width=width)


def rounds(sides: Sequence[Side], names: str) -> Drawing:
    """Seconds of each round of what was compared."""
    looks = ((colour("ring_bytes"), "square", [2, 3]), (colour("measured"), "circle", [1, 0]))
    layers = []
    for side, (paint, shape, dash) in zip(sides, looks, strict=False):
        layers.append(
            {
                "data": {"values": [{"round": i, "seconds": seconds} for i, seconds in enumerate(side.seconds, 1)]},
                "mark": {
                    "type": "line", "color": paint, "strokeWidth": 1.8, "strokeDash": dash,
                    "point": {"filled": True, "size": 36, "shape": shape, "color": paint},
                },
                "encoding": {
                    "x": {
                        "field": "round", "type": "quantitative", "title": "round",
                        "scale": {"nice": False, "zero": False, "padding": 8},
                        "axis": {"tickMinStep": 1, "format": "d", "grid": False, "tickCount": 8},
                    },
                    "y": {"field": "seconds", "type": "quantitative", **_unit("s"), "scale": {"zero": True}},
                },
            }
        )  # fmt: skip
    return _draw({"layer": layers}, 220, names)


def tradeoff(points: Sequence[Point], names: str) -> Drawing:
    """Throughput over the activation peak, a shape for each mode."""
    scale, unit = unit_of(max(p.activation_peak_bytes for p in points))
    modes = [mode for mode in SHAPES if any(p.mode == mode for p in points)]
    values = [{"mode": p.mode, "size": p.activation_peak_bytes / scale, "rate": p.tokens_per_second} for p in points]
    spec = {
        "data": {"values": values},
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
        "encoding": {
            "x": {
                "field": "size", "type": "quantitative", "title": f"activation peak ({unit})",
                "scale": {"domain": [0, 1.08 * max(p.activation_peak_bytes for p in points) / scale], "nice": False},
            },
            "y": {"field": "rate", "type": "quantitative", "title": "tokens/s", "scale": {"zero": False, "padding": 16}},
            "color": {
                "field": "mode", "type": "nominal", "legend": None,
                "scale": {"domain": modes, "range": [colour(MODE_COLOURS[m]) for m in modes]},
            },
            "shape": {
                "field": "mode", "type": "nominal", "legend": None,
                "scale": {"domain": modes, "range": [SHAPES[m] for m in modes]},
            },
        },
    }  # fmt: skip
    return _draw(spec, 300, names)


def against(rows: Sequence[Compared], budget_bytes: int, most_bytes: float, names: str) -> tuple[Drawing, bool]:
    """Throughput over peak memory, the budget as a line, and a band from it to most_bytes, which still counts as kept.

    Returns:
        The chart, and whether the wide one has names at its points. It has numbers where they find no room, from 1 in the order
        of rows, as the narrow one always has.
    """
    height = max(340, 30 * len(rows))
    called, numbers = [row.name for row in rows], [str(i) for i in range(1, len(rows) + 1)]
    wide = _against(rows, budget_bytes, most_bytes, called, WIDE - 90, height)
    narrow = _against(rows, budget_bytes, most_bytes, numbers, NARROW - 90, height)
    named = wide is not None
    wide = wide or _against(rows, budget_bytes, most_bytes, numbers, WIDE - 90, height)
    empty = [""] * len(rows)  # more points than the page has room for: the legend and the table say what they are
    wide, narrow = (spec or _against(rows, budget_bytes, most_bytes, empty, WIDE, height) for spec in (wide, narrow))
    assert wide is not None
    assert narrow is not None
    return Drawing(_svg(wide, WIDE, height + 52, names, False, 56), _svg(narrow, NARROW, height + 52, names, True, 40)), named


def _against(
    rows: Sequence[Compared], budget_bytes: int, most_bytes: float, texts: Sequence[str], width: int, height: int
) -> dict[str, Any] | None:
    """The specification; None where texts do not all find room. Args: width, height, about what the axes span, in pixels."""
    right = 1.06 * max(budget_bytes, most_bytes, *(row.peak_bytes for row in rows))
    top = 1.08 * max(row.rates[2] for row in rows)
    scale, unit = (1 << 20, "MiB") if right < 10 << 30 else unit_of(right)
    across, up = width / right, height / top
    dots = [(row.peak_bytes * across, row.rates[1] * up) for row in rows]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
    taken += [(x - 2, row.rates[0] * up, x + 2, row.rates[2] * up) for (x, _), row in zip(dots, rows, strict=True)]
    taken.append((budget_bytes * across - 3, 0, budget_bytes * across + 3, height))
    places = _places(dots, [CHARACTER * len(text) for text in texts], taken, width, height)
    if places is None:
        return None
    x = {
        "field": "size", "type": "quantitative", "title": f"peak resident memory ({unit})",
        "scale": {"domain": [0, right / scale], "nice": False},
    }  # fmt: skip
    y = {"field": "rate", "type": "quantitative", "title": "tokens/s", "scale": {"domain": [0, top], "nice": False}}
    colours = _kind_colours()
    values = [
        {"size": row.peak_bytes / scale, "kind": row.kind, "low": row.rates[0], "rate": row.rates[1], "high": row.rates[2]}
        for row in rows
    ]
    labels = [
        {"size": px / across / scale, "rate": py / up, "kind": row.kind, "text": text, "align": align}
        for (px, py, align), row, text in zip(places, rows, texts, strict=True)
    ]
    kept = {
        "data": {"values": [{"size": budget_bytes / scale, "most": most_bytes / scale}]},
        "mark": {"type": "rect", "color": colour("planned"), "opacity": 0.22},
        "encoding": {"x": x, "x2": {"field": "most"}},
    }
    budget = {
        "data": {"values": [{"size": budget_bytes / scale}]},
        "mark": {"type": "rule", "color": colour("ink"), "strokeWidth": 1.6, "strokeDash": [1, 3]},
        "encoding": {"x": x},
    }
    bars = {
        "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6},
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colours},
    }
    points = {"mark": {"type": "point", "filled": True, "size": 80, "opacity": 1}, "encoding": {"x": x, "y": y, "color": colours}}
    called = [
        {
            "data": {"values": [label for label in labels if label["align"] == align]},
            "mark": {"type": "text", "fontSize": 12, "align": align, "baseline": "middle"},
            "encoding": {"x": x, "y": y, "text": {"field": "text"}, "color": colours},
        }
        for align in ("left", "right", "center")
    ]
    return {"data": {"values": values}, "layer": [kept, budget, bars, points, *called]}


_Box = tuple[float, float, float, float]  # left, low, right, high


def _places(
    dots: Sequence[tuple[float, float]], widths: Sequence[float], taken: Sequence[_Box], width: float, height: float
) -> list[tuple[float, float, str]] | None:
    """Where each label stands, and which end of it, so that none covers another or anything that is taken; None where that was
    not found. Each takes the first place that is free, so the order matters: several are tried."""
    numbers = range(len(dots))
    orders = (
        list(numbers), list(reversed(numbers)), sorted(numbers, key=lambda i: -widths[i]), sorted(numbers, key=lambda i: dots[i]),
        sorted(numbers, key=lambda i: -dots[i][0]), sorted(numbers, key=lambda i: dots[i][1]),
        sorted(numbers, key=lambda i: -dots[i][1]),
    )  # fmt: skip
    for order in orders:
        found: dict[int, tuple[float, float, str]] = {}
        boxes = list(taken)
        for i in order:
            place = _place(dots[i], widths[i], boxes, width, height)
            if place is None:
                break
            found[i], box = place
            boxes.append(box)
        else:
            return [found[i] for i in numbers]
    return None


def _place(
    dot: tuple[float, float], wide: float, boxes: Sequence[_Box], width: float, height: float
) -> tuple[tuple[float, float, str], _Box] | None:
    """The first free place at a point, and what it covers: beside it, above, below, then a little higher or lower beside it."""
    (x, y), half = dot, LINE / 2
    beside = [(side, up) for up in (0.0, half, -half, LINE, -LINE, 1.5 * LINE, -1.5 * LINE) for side in ("left", "right")]
    for align, up in [*beside[:2], ("center", AWAY + half), ("center", -AWAY - half), *beside[2:]]:
        start = {"left": x + AWAY, "right": x - AWAY - wide, "center": x - wide / 2}[align]
        box = (start, y + up - half, start + wide, y + up + half)
        inside = box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height
        if inside and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes):
            return ({"left": x + AWAY, "right": x - AWAY, "center": x}[align], y + up, align), box
    return None


def _kind_colours() -> dict[str, Any]:
    """Each row in the colour of its kind."""
    return {
        "field": "kind", "type": "nominal", "legend": None,
        "scale": {"domain": list(KIND_COLOURS), "range": [colour(name) for name in KIND_COLOURS.values()]},
    }  # fmt: skip


def spread(rows: Sequence[Compared], names: str) -> Drawing:
    """Seconds of a step, row by row from the top: every round, from quartile to quartile, and the median."""
    longest = max(len(row.name) for row in rows)
    return Drawing(
        _spread(rows, [row.name for row in rows], WIDE, min(round(CHARACTER * longest) + 16, 320), names),
        _spread(rows, ["\n".join(textwrap.wrap(row.name, 18)) for row in rows], NARROW, 132, names),
    )


def _spread(rows: Sequence[Compared], called: list[str], width: int, extent: int, names: str) -> str:
    lines = max(name.count("\n") for name in called) + 1
    x = {
        "type": "quantitative", **_unit("s"),
        "scale": {"domain": [0, 1.04 * max(max(row.seconds) for row in rows)], "nice": False},
    }  # fmt: skip
    axis = {
        "domain": False, "grid": True, "labelLimit": extent, "labelOverlap": False, "labelExpr": "split(datum.label, '\\n')",
        "labelOffset": {
            "condition": [
                {"test": f"length(split(datum.value, '\\n')) == {n}", "value": -7 * (n - 1)} for n in range(2, lines + 1)
            ],
            "value": 0,
        },
    }  # fmt: skip
    y = {"field": "row", "type": "nominal", "sort": called, "title": None, "axis": axis}
    colours = _kind_colours()
    each = [
        {"row": name, "kind": row.kind, "low": row.quartiles[0], "median": row.quartiles[1], "high": row.quartiles[2]}
        for row, name in zip(rows, called, strict=True)
    ]
    rounds = [{"row": name, "kind": row.kind, "seconds": s} for row, name in zip(rows, called, strict=True) for s in row.seconds]
    layers = [
        {
            "mark": {"type": "bar", "height": 14, "opacity": 0.35},
            "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": colours},
        },
        {
            "data": {"values": rounds},
            "mark": {"type": "point", "filled": True, "size": 22, "opacity": 0.9},
            "encoding": {"x": {**x, "field": "seconds"}, "y": y, "color": colours},
        },
        {
            "mark": {"type": "tick", "thickness": 3, "size": 20, "opacity": 1},
            "encoding": {"x": {**x, "field": "median"}, "y": y, "color": colours},
        },
    ]
    spec = {"data": {"values": each}, "layer": layers}
    return _svg(spec, width, len(rows) * max(26, 14 * lines + 12) + 40, names, width == NARROW, extent)


# ---- drawing ----


def _seconds(step_seconds: float) -> dict[str, Any]:
    scale = {"domain": [0, step_seconds], "nice": False}
    return {"field": "t", "type": "quantitative", "title": "seconds", "scale": scale}


def _unit(unit: str) -> dict[str, Any]:
    """An axis whose numbers have their unit, and that needs no title."""
    return {"title": None, "axis": {"labelExpr": f"datum.label + ' {unit}'"} if unit else {}}


def _scale(kinds: list[str]) -> dict[str, Any]:
    return {"domain": kinds, "range": [colour(kind) for kind in kinds]}


def _config(narrow: bool, y_extent: int) -> dict[str, Any]:
    axis = {
        "labelColor": colour("muted"), "titleColor": colour("muted"), "gridColor": colour("line"), "domainColor": colour("line"),
        "tickColor": colour("line"), "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 400, "titlePadding": 8,
        "labelLimit": 150, "labelOverlap": True, "tickSize": 4,
    }  # fmt: skip
    return {
        "font": "sans-serif",
        "background": None,
        "view": {"stroke": None},
        "axis": axis,
        "axisX": {"grid": False, "tickCount": 5 if narrow else 10, "labelFlush": False, "labelSeparation": 8},
        "axisY": {"domain": False, "ticks": False, "tickCount": 5, "minExtent": y_extent},
    }


def _draw(
    spec: dict[str, Any], height: int, names: str, *, width: int = WIDE, y_extent: int = 56, narrow_extent: int = 56
) -> Drawing:
    narrow = _svg(spec, NARROW, height, names, True, narrow_extent)
    return Drawing(_svg(spec, width, height, names, False, y_extent), narrow)


def _svg(spec: dict[str, Any], width: int, height: int, names: str, narrow: bool, y_extent: int) -> str:
    import vl_convert

    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": width, "height": height, "padding": {"left": 0, "top": 6, "right": 10, "bottom": 8},
        "autosize": {"type": "fit", "contains": "padding"},
        "config": _config(narrow, y_extent),
        **spec,
    }  # fmt: skip
    drawn: str = vl_convert.vegalite_to_svg(finite(whole))  # a loss that is no number leaves a gap
    return _ours(drawn, names)


def _ours(drawn: str, names: str) -> str:
    """The drawing as part of a page: its colours, ids that no other has, one text for all its marks."""
    for name, placeholder in _PLACEHOLDERS.items():
        drawn = drawn.replace(placeholder, f"var(--{name.replace('_', '-')})")
    number = next(_numbers)
    drawn = re.sub(r'\bid="([^"]+)"', rf'id="c{number}-\1"', drawn)
    drawn = re.sub(r"url\(#([^)]+)\)", rf"url(#c{number}-\1)", drawn)
    drawn = re.sub(r'\s(?:xmlns(?::\w+)?|role|aria-\w+|font-family)="[^"]*"', "", drawn)
    return drawn.replace("<svg", f'<svg role="img" aria-label="{escape(names)}"', 1)
