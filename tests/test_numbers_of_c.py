"""Numbers and orders that Python shares with the core: as the sources of the core have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protrain.base.sizes import KIB, MIB, MOST_PASSES
from protrain.planner import hardware, planning, plans, profiles, requests
from protrain.profiling import timeline

CORE = Path(__file__).resolve().parent.parent / "csrc"


def number(name: str, file: str) -> float:
    """What `#define name` says there."""
    found = re.search(rf"^#define {name}\s+(.*?)(?:\s*/\*.*)?$", (CORE / file).read_text(), re.MULTILINE)
    assert found is not None, f"{file} has no {name}"
    text = re.sub(r"\((?:u?int\d+_t|size_t|double)\)", "", found[1]).replace("PTN_MIB", str(MIB)).replace("PTN_KIB", str(KIB))
    assert re.fullmatch(r"[\d.e+*<() -]+", text), f"{file}: {name} is {text}"
    return float(eval(text))


def order(name: str, file: str) -> list[str]:
    """The words of an enum, in small letters."""
    found = re.search(rf"typedef enum {name} {{(.*?)}} {name};", (CORE / file).read_text(), re.DOTALL)
    assert found is not None, f"{file} has no {name}"
    return [word.strip().split(" ")[0].lower() for word in re.sub(r"/\*.*?\*/", "", found[1], flags=re.DOTALL).split(",")]


@pytest.mark.parametrize(
    ("here", "name", "file"),
    [
        (requests.PIECE_BYTES, "PIECE_BYTES", "disk/store.c"),
        (requests.MOST_PARTS, "PTN_PIECE_PARTS", "disk/store.h"),
        (requests.LEAST_RING_PIECE_BYTES, "LEAST_PIECE_BYTES", "plan/room.c"),
        (requests.BUDGET_PER_RING_PIECE, "BUDGET_PER_PIECE", "plan/room.c"),
        (planning._MOST_BYTES, "PTN_PLAN_MOST_BYTES", "plan/parts.h"),
        (MOST_PASSES, "MOST_PASSES", "plan/request.c"),
    ],
)
def test_numbers_are_the_same(here: int, name: str, file: str) -> None:
    assert here == number(name, file)


def test_the_largest_piece_of_the_ring_is_that_of_its_last_level() -> None:
    levels = number("PTN_FIT_RING_LEVELS", "plan/parts.h")
    assert requests.LEAST_RING_PIECE_BYTES << int(levels) - 1 == requests.MOST_RING_PIECE_BYTES


def test_the_most_that_a_lane_costs_compute_is_what_the_planner_takes() -> None:
    most_seconds = number("MOST_DRAG_NS_PER_BYTE", "plan/request.c") / 1e9
    allowed, _ = hardware._DRAG
    assert allowed(most_seconds)
    assert not allowed(1.01 * most_seconds)


@pytest.mark.parametrize(
    ("here", "prefix", "name", "file"),
    [
        (timeline.LANES, "ptn_lane_", "ptn_trace_lane", "base/trace.h"),
        (timeline.KINDS, "ptn_trace_", "ptn_trace_kind", "base/trace.h"),
        ((*profiles.LANES, "n_lanes"), "ptn_", "ptn_lane_name", "profile/profile.h"),
        (plans.MODES, "ptn_", "ptn_mode", "plan/plan.h"),
        ((*plans.WAITS, "ptn_n_waits"), "ptn_wait_", "ptn_wait_reason", "plan/plan.h"),
    ],
)
def test_orders_are_the_same(here: tuple[str, ...], prefix: str, name: str, file: str) -> None:
    assert list(here) == [word.removeprefix(prefix) for word in order(name, file) if word]
