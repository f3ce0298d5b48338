"""The charts of a report: Vega-Lite specifications, drawn to SVG by vl-convert-python, with no script and no font in them.

Each chart is drawn twice, for a wide and for a narrow page. Colours are written as placeholders that stand for the page's own
(`var(--name)`), so that one drawing serves light, dark and paper. Text in charts is for axes and letters alone; legends are the
page's, since those wrap.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from protrain.cli.report import Point, Recorded, Side, StepFigures

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
LANE_COLOURS = {
    "compute": "state_bytes",
    "wait": "gradient_bytes",
    "read": "slot_bytes",
    "write": "stash_bytes",
    "update": "rest_bytes",
}
MODE_COLOURS = {"keep": "ring_bytes", "swap": "parameter_bytes", "checkpoint": "gradient_bytes", "checkpoint_swap": "stash_bytes"}
SHAPES = {"keep": "circle", "swap": "square", "checkpoint": "triangle-up", "checkpoint_swap": "diamond"}
_NAMES = [field for field, _, _ in PARTS] + ["ink", "muted", "line", "card", "measured", "planned"]
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


def thinned(steps: Sequence[StepFigures], most: int = MOST_POINTS) -> list[StepFigures]:
    """At most so many of the steps, evenly, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


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
    shown = thinned(steps)
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
        "axisX": {"grid": False, "tickCount": 5 if narrow else 10},
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
    drawn: str = vl_convert.vegalite_to_svg(_finite(whole))
    return _ours(drawn, names)


def _finite(value: Any) -> Any:
    """A loss that is no number leaves a gap."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ours(drawn: str, names: str) -> str:
    """The drawing as part of a page: its colours, ids that no other has, one text for all its marks."""
    for name, placeholder in _PLACEHOLDERS.items():
        drawn = drawn.replace(placeholder, f"var(--{name.replace('_', '-')})")
    number = next(_numbers)
    drawn = re.sub(r'\bid="([^"]+)"', rf'id="c{number}-\1"', drawn)
    drawn = re.sub(r"url\(#([^)]+)\)", rf"url(#c{number}-\1)", drawn)
    drawn = re.sub(r'\s(?:xmlns(?::\w+)?|role|aria-\w+|font-family)="[^"]*"', "", drawn)
    return drawn.replace("<svg", f'<svg role="img" aria-label="{escape(names)}"', 1)
