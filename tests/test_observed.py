"""What a step is seen to compute in each phase, from made-up events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protrain.dryrun.phases import DryRun, Phase
from protrain.planner.profiles import Machine, Speed
from protrain.profiling.observed import (
    ACTIVATIONS,
    PARAMETERS,
    READ,
    UPDATING,
    WRITE,
    DiskWork,
    disk_work,
    drag_seconds,
    observe,
    without_drag,
)  # fmt: skip
from protrain.profiling.timeline import BACKWARD, COMPUTE, FORWARD, KINDS, RECOMPUTE, WAIT, Pass, Raw


def phase(block: int, backward: bool, flops: int = 1000, again: tuple[int, int, int] = (0, 0, -1)) -> Phase:
    return Phase(block, backward, 0, 0, 0, 0, 0, 0, flops, 0, 0, *again)


def run_of(order: list[tuple[int, bool]], again: tuple[int, int, int]) -> DryRun:
    phases = [phase(block, backward, again=again if backward and block >= 0 else (0, 0, -1)) for block, backward in order]
    return DryRun(tuple(phases), (), (), {}, 0, 1, 1, 0, 0)


ONE = [(-1, False), (0, False), (-1, False), (0, True), (-1, True)]
#: One block twice in a step: its backwards come in the reverse order.
TWICE = [(-1, False), (0, False), (0, False), (-1, False), (0, True), (0, True), (-1, True)]


def event(start: int, end: int, kind: int, block: int = 0) -> Raw:
    return (start * 10**9, end * 10**9, 0, block, COMPUTE, kind)


def observed(events: list[Raw], end: int, run: DryRun) -> list[tuple[float, float]]:
    found = observe(events, [Pass(0, end * 10**9)], 0, end * 10**9, run)
    assert found is not None
    return list(found.times.phases)


@pytest.mark.parametrize(("again", "part"), [((0, 0, -1), 1.0), ((750, 0, 0), 0.75), ((0, 0, 0), 0.0)])
def test_a_block_that_was_kept_would_be_recomputed_as_far_as_it_was_counted(again: tuple[int, int, int], part: float) -> None:
    events = [event(1, 5, FORWARD), event(7, 12, BACKWARD)]
    found = observed(events, 13, run_of(ONE, again))
    assert [compute for compute, _ in found] == [1.0, 4.0, 2.0, 5.0, 1.0]
    assert [recomputed for _, recomputed in found] == [0.0, 0.0, 0.0, pytest.approx(4.0 * part), 0.0]


def test_a_block_that_was_recomputed_took_what_it_took() -> None:
    events = [event(1, 5, FORWARD), event(7, 8, BACKWARD), event(8, 10, RECOMPUTE), event(10, 12, BACKWARD)]
    assert observed(events, 13, run_of(ONE, (750, 0, 0)))[3] == (3.0, 2.0)


def test_recomputation_is_no_compute_where_blocks_ran_in_another_order() -> None:
    """As where a model drops some: which phase took what is not known then, but that much was computed twice is."""
    events = [event(1, 5, FORWARD, 1), event(7, 8, BACKWARD, 1), event(8, 10, RECOMPUTE, 1), event(10, 12, BACKWARD, 1)]
    found = observed(events, 13, run_of(ONE, (500, 0, 0)))
    assert sum(compute for compute, _ in found) == pytest.approx(13.0 - 2.0)
    assert found[3] == (pytest.approx(11.0 / 5), pytest.approx(11.0 / 5 / 2))


@pytest.mark.parametrize("recomputed", [False, True])
def test_what_lanes_cost_is_a_part_of_what_was_computed(recomputed: bool) -> None:
    """Recomputation that a plan did without took no time, so it lost none."""
    again = [event(8, 10, RECOMPUTE)] if recomputed else []
    events = [event(1, 5, FORWARD), event(7, 8, BACKWARD), *again, event(10, 12, BACKWARD)]
    waits = [(12 * 10**9, 13 * 10**9, 0, 0, WAIT, PARAMETERS)]
    found = observe([*events, *waits], [Pass(0, 13 * 10**9)], 0, 15 * 10**9, run_of(ONE, (500, 0, 0)))
    assert found is not None
    assert (found.computed_seconds, found.rest_seconds) == (12.0, 2.0)
    for lost, scale in ((0.0, 1.0), (3.0, 0.75), (9.0, 0.5)):
        scaled = without_drag(found, lost).phases
        assert scaled == tuple((compute * scale, again * scale) for compute, again in found.times.phases)
    assert sum(map(sum, found.times.phases)) == pytest.approx(12.0 + (0.0 if recomputed else 2.0))


def test_a_block_that_is_used_twice_recomputes_each_of_its_forwards() -> None:
    run = run_of(TWICE, (500, 0, 0))
    assert run.calls() == [(0, 1, 5), (0, 2, 4)]
    run = replace(run, phases=(*run.phases[:2], replace(run.phases[2], flops=2000), *run.phases[3:]))
    assert run.recomputed_parts() == {5: 0.5, 4: 0.25}


def test_what_a_request_carried_is_charged_for_one_request() -> None:
    lane = Speed(1e9, 1e9, 1e-9)
    machine = Machine(disk_read=lane, disk_write=lane, request_drag_seconds=1.0)

    def moved(start: int, end: int, lane: int) -> Raw:
        return (start * 10**9, end * 10**9, 10**9, 0, lane, ACTIVATIONS)

    events = [moved(1, 2, WRITE), moved(1, 2, WRITE), moved(1, 3, WRITE), moved(1, 2, READ)]
    assert drag_seconds(events, [Pass(0, 10 * 10**9)], machine) == pytest.approx(4 * 1.0 + 3 * 1.0)


@pytest.mark.parametrize(("drag", "parameters"), [(2e-9, 2.0), (-0.5e-9, 0.0)])
def test_checksums_are_charged_for_what_compute_sums(drag: float, parameters: float) -> None:
    lane = Speed(1e9, 1e9, 1e-9)
    machine = Machine(disk_read=lane, disk_write=lane, stash_drag_seconds_per_byte=drag)
    state = KINDS.index("state")

    def lost(lane: int, kind: int) -> float:
        return drag_seconds([(10**9, 2 * 10**9, 10**9, 0, lane, kind)], [Pass(0, 10 * 10**9)], machine)

    assert lost(READ, ACTIVATIONS) == lost(WRITE, ACTIVATIONS) == pytest.approx(1.0 + drag * 1e9)
    assert lost(READ, PARAMETERS) == pytest.approx(1.0 + parameters)
    assert lost(READ, state) == lost(WRITE, state) == pytest.approx(1.0)  # the update lane's


def test_what_the_disk_carried_in_waits_says_how_fast_it_is() -> None:
    machine = Machine(disk_read=Speed(5.0, 10.0), disk_write=Speed(20.0), disk_overlap=1.5)

    def lasting(start: int, end: int, size: int, lane: int, kind: int = PARAMETERS) -> Raw:
        return (start * 10**9, end * 10**9, size, 0, lane, kind)

    waits = [lasting(-5, 8, 0, WAIT), lasting(6, 10, 0, WAIT), lasting(20, 30, 0, WAIT, UPDATING), lasting(90, 120, 0, WAIT)]
    moved = [
        lasting(5, 15, 100, READ), lasting(8, 10, 20, WRITE), lasting(12, 14, 50, READ), lasting(22, 25, 50, WRITE),
        lasting(98, 102, 40, READ),
    ]  # fmt: skip
    found = disk_work([*waits, *moved], 0, 100 * 10**9, machine)
    # Of the first the half inside; the write, beside which half as much again is done; of the last what is before the step's end.
    assert (found.expected_seconds, found.taken_seconds) == (pytest.approx(5.0 + 1.0 + 2.0), pytest.approx(5.0 + 0.5 * 2.0 + 2.0))
    # Of all of them, by the faster of a lane's two figures; what one read was under way beside another is counted once.
    assert found.busy_expected_seconds == pytest.approx(10.0 + 5.0 + 4.0 + 1.0 + 2.5)
    assert found.busy_seconds == pytest.approx((10.0 + 4.0) + (2.0 + 3.0) - 0.5 * 2.0)
    unwaited = disk_work(moved, 0, 100 * 10**9, machine)
    assert unwaited == DiskWork(0.0, 0.0, found.busy_expected_seconds, found.busy_seconds)
    assert disk_work([*waits, *moved], 0, 100 * 10**9, Machine()) == DiskWork(0.0, 0.0)
