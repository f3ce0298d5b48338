"""What a real step computed in each of its phases: from the trace of the step, without what it waited for.

The phases are those of the dry run (csrc/plan/plan.h). The trace says when each block ran forward, again, and backward; what
runs between two blocks belongs to the one that ran before. Where the blocks of a step ran in another order than in the dry run,
which a model that takes another branch does, or where there are none, the whole is divided as the dry run counted operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dryrun.flops import ordinary_seconds
from ..dryrun.phases import DryRun
from ..planner.profiles import Machine, Times
from .timeline import COMPUTE, FORWARD, KINDS, LANES, RECOMPUTE, WAIT, Interval, Pass, Raw, between, both, length, union, without


@dataclass(frozen=True)
class Observed:
    """Of one step: seconds of each phase, a mean over its passes; how long compute had work in these; and what it took beside
    passes and waits (updates of chunks in memory among it)."""

    times: Times
    computed_seconds: float
    rest_seconds: float


READ, WRITE, UPDATE, ACTIVATIONS, PARAMETERS, UPDATING = (
    LANES.index("read"), LANES.index("write"), LANES.index("update"), KINDS.index("activations"), KINDS.index("parameters"),
    KINDS.index("update"),
)  # fmt: skip


def waits_of(events: Sequence[Raw], begin_ns: int, end_ns: int) -> list[Interval]:
    """When compute waited between two times, from raw events."""
    waits = union((float(start), float(end)) for start, end, _, _, lane, _ in events if lane == WAIT)
    return both(waits, [(float(begin_ns), float(end_ns))])


def observe(events: Sequence[Raw], passes: Sequence[Pass], begin_ns: int, end_ns: int, run: DryRun) -> Observed | None:
    """The times of a step from its raw events; None where it has no whole pass."""
    whole = [one for one in passes if begin_ns <= one.forward_ns < one.over_ns <= end_ns]
    if not whole:
        return None
    waits = waits_of(events, begin_ns, end_ns)
    computed = sorted(event for event in events if event[4] == COMPUTE and event[0] >= begin_ns)
    found = [_phases(computed, waits, one, run) or _divided(computed, waits, one, run) for one in whole]
    sums = [tuple(sum(values) / len(found) for values in zip(*of_phase, strict=True)) for of_phase in zip(*found, strict=True)]
    inside = [(float(one.forward_ns), float(one.over_ns)) for one in whole]
    waited_inside = length(both(waits, inside))
    rest = (end_ns - begin_ns) - length(inside) - (length(waits) - waited_inside)
    return Observed(Times(tuple((a, b) for a, b in sums)), (length(inside) - waited_inside) / 1e9, max(rest, 0.0) / 1e9)


def _phases(computed: list[Raw], waits: list[Interval], one: Pass, run: DryRun) -> list[tuple[float, float]] | None:
    """(compute, recompute) seconds of each phase of one pass; None where its blocks ran in another order than in the dry run."""
    events = [event for event in computed if event[0] >= one.forward_ns and event[1] <= one.over_ns]
    visits: list[list[Raw]] = []
    for event in events:
        backward = event[5] != FORWARD
        if backward and visits and visits[-1][-1][5] != FORWARD and visits[-1][-1][3] == event[3]:
            visits[-1].append(event)  # a backward is cut where its block is recomputed
        else:
            visits.append([event])
    numbers = [number for number, phase in enumerate(run.phases) if phase.block >= 0]
    expected = [(run.phases[number].block, run.phases[number].backward) for number in numbers]
    if not visits or [(visit[0][3], visit[0][5] != FORWARD) for visit in visits] != expected:
        return None
    begins: list[int] = []
    place = 0
    for number, phase in enumerate(run.phases):
        if phase.block >= 0:
            begins.append(visits[place][0][0])
            place += 1
        else:
            begins.append(one.forward_ns if number == 0 else visits[place - 1][-1][1])
    begins[0] = one.forward_ns
    again = [
        union((float(event[0]), float(event[1])) for event in visits[numbers.index(number)] if event[5] == RECOMPUTE)
        if phase.block >= 0
        else []
        for number, phase in enumerate(run.phases)
    ]
    found = []
    for number, (begin, end) in enumerate(zip(begins, [*begins[1:], one.over_ns], strict=True)):
        span = [(float(begin), float(end))]
        recomputed = length(again[number]) - length(both(waits, again[number]))
        found.append(((length(span) - length(both(waits, span)) - recomputed) / 1e9, recomputed / 1e9))
    return _with_recomputation(found, run)


def _with_recomputation(found: list[tuple[float, float]], run: DryRun) -> list[tuple[float, float]]:
    """A block that was not recomputed would take its forward's time, as far as recomputation goes."""
    parts = run.recomputed_parts()
    forward = {backward: found[number][0] for _, number, backward in run.calls()}
    return [
        (compute, (again or forward[number] * parts[number]) if number in parts else 0.0)
        for number, (compute, again) in enumerate(found)
    ]


def _divided(computed: list[Raw], waits: list[Interval], one: Pass, run: DryRun) -> list[tuple[float, float]]:
    """What was recomputed is no phase's compute, and of which phase it is not known."""
    again = union((float(event[0]), float(event[1])) for event in computed if event[5] == RECOMPUTE)
    span = without([(float(one.forward_ns), float(one.over_ns))], again)
    seconds = (length(span) - length(both(waits, span))) / 1e9
    weights = [ordinary_seconds(phase.flops, phase.moved_bytes, phase.operations) for phase in run.phases]
    total = sum(weights) or 1.0
    return _with_recomputation([(seconds * weight / total, 0.0) for weight in weights], run)


def _of_checksums(machine: Machine, lane: int, kind: int) -> float:
    """Seconds for each byte that compute's threads sum: of activations, with whatever else they cost beside the lane, and of
    parameters that were fetched."""
    if kind == ACTIVATIONS:
        return machine.stash_drag_seconds_per_byte
    return machine.checksum_seconds_per_byte if lane == READ and kind == PARAMETERS else 0.0


def drag_seconds(events: Sequence[Raw], passes: Sequence[Pass], machine: Machine) -> float:
    """What the passes of a step lost to its lanes, by the machine's figures: nothing to what these did while compute waited."""
    inside = union((float(one.forward_ns), float(one.over_ns)) for one in passes)
    waits = union((float(start), float(end)) for start, end, _, _, lane, _ in events if lane == WAIT)
    computing = without(inside, waits)
    lost = 0.0
    requests: set[tuple[int, int, int]] = set()  # what begins and ends together is one
    for start, end, size, _, lane, kind in events:
        if lane not in (READ, WRITE, UPDATE) or end <= start:
            continue
        share, beside = (length(between(of, start, end)) / (end - start) for of in (inside, computing))
        if lane == UPDATE:
            size = round((end - start) / 1e9 * machine.update.bytes_per_second)
        speed = machine.disk_read if lane == READ else machine.disk_write if lane == WRITE else machine.update
        lost += size * (beside * speed.drag_seconds_per_byte + share * _of_checksums(machine, lane, kind))
        if lane != UPDATE and (start, end, lane) not in requests:
            requests.add((start, end, lane))
            lost += beside * machine.request_drag_seconds
    return lost


@dataclass(frozen=True)
class DiskWork:
    """What the disk carried in a step, in seconds: what that should have taken by a machine's figures, and took. While compute
    waited, when the disk shares with nobody and has all to do that it can; and whenever it was busy, which it can do at least."""

    expected_seconds: float
    taken_seconds: float
    busy_expected_seconds: float = 0.0
    busy_seconds: float = 0.0


def disk_work(events: Sequence[Raw], begin_ns: int, end_ns: int, machine: Machine) -> DiskWork:
    """Of a step, from its raw events. Waits for updates are left out, as there the lane may be what is slow, and of others the
    time that is spent on updates."""
    waits = waits_of([event for event in events if event[5] != UPDATING], begin_ns, end_ns)
    waits = without(waits, union((float(start), float(end)) for start, end, _, _, lane, _ in events if lane == UPDATE))
    expected = busy_expected = 0.0
    waited: dict[int, list[Interval]] = {READ: [], WRITE: []}
    busy: dict[int, list[Interval]] = {READ: [], WRITE: []}
    for start, end, size, _, lane, _ in events:
        if lane not in busy or end <= start:
            continue
        speed = machine.disk_read if lane == READ else machine.disk_write
        alone = speed.idle_bytes_per_second or speed.bytes_per_second
        if alone <= 0:
            continue
        span = [(float(start), float(end))]
        inside = between(waits, start, end)
        if inside:
            expected += length(inside) / (end - start) * size / alone
            waited[lane] += inside
        busy_expected += size / max(alone, speed.bytes_per_second)
        busy[lane] += span
    return DiskWork(expected, _taken_seconds(waited, machine), busy_expected, _taken_seconds(busy, machine))


def _taken_seconds(requests: dict[int, list[Interval]], machine: Machine) -> float:
    """Of the disk. Reads and writes at once get done more than one alone, by the overlap."""
    reads, writes = union(requests[READ]), union(requests[WRITE])
    together = length(both(reads, writes))
    return (length(reads) + length(writes) + (machine.disk_overlap - 2) * together) / 1e9


def without_drag(found: Observed, lost_seconds: float) -> Times:
    """The times as they would be with no lane beside compute; at most half of what it computed can have been lost. Times of
    recomputation that there was not are no part of that, but lose as much."""
    scale = max(1.0 - lost_seconds / found.computed_seconds, 0.5) if found.computed_seconds > 0 else 1.0
    return Times(tuple((compute * scale, again * scale) for compute, again in found.times.phases))


def of_whole(times: Times, share: float) -> Times:
    """The times of a whole batch by those of a share of its elements. Attention to all of a sequence takes more than that, what
    an operation costs beside its elements less."""
    return Times(tuple((compute / share, again / share) for compute, again in times.phases))


def least(first: Times, second: Times) -> Times:
    """Phase by phase the shorter: the first step of a process touches memory and starts threads, and noise only adds."""
    return Times(tuple((min(a, c), min(b, d)) for (a, b), (c, d) in zip(first.phases, second.phases, strict=True)))
