"""Confirming: what the first steps under a plan by time tell that its profile could not.

The profile is of steps under another plan, and lanes were measured beside a computation that is not the model's. What compute
and its lanes take together is known when the plan runs. How much of a difference is one's and how much the other's is not seen:
it is divided as their uncertainties are, the way measurements of one sum are joined. The steps' own uncertainty, which is how
far they lie apart, has its part: on a machine whose speed varies neither they nor the profile are to be believed alone. Then
the planner searches again.

Sums alone are corrected: compute of all phases by one factor, all drags by another. Waits are compared too: where they are not
those foretold, what the disk carried in them says how fast it is by now. Disks slow down once their caches are full or what
they were granted is used up, long after they were measured. Where waits were foretold and there were none, it is at least as
fast as it was beside compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..dryrun.phases import recomputes
from ..planner.plans import Forecast
from ..planner.profiles import Machine, Speed, Times
from .observed import DiskWork, waits_of
from .timeline import COMPUTE, RECOMPUTE, Pass, Raw, both, length, union

#: How far off are to be expected: a profile's compute, what lanes cost it, and what a few steps took at least; in parts of each.
COMPUTE_DOUBT, DRAG_DOUBT, STEP_DOUBT = 0.03, 0.3, 0.01
#: A profile's compute is not believed to be so many times too short, or too long, whatever drag may not explain.
MOST_COMPUTE_FACTOR = 2.0
#: Parts of a step: waits that are others than foretold by less say nothing of the disk, and so does a disk busy in them for less.
WAIT_DOUBT, TELLING_SHARE = 0.05, 0.01
#: Disks are not believed to be so many times as fast as was measured, nor so many times slower.
MOST_DISK_FACTOR = 8.0


@dataclass(frozen=True)
class Sum:
    """Of one step, in seconds: of its passes, and of the rest, without waits; and of waits."""

    passes_seconds: float
    rest_seconds: float
    wait_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.passes_seconds + self.rest_seconds + self.wait_seconds


def sum_of(events: Sequence[Raw], passes: Sequence[Pass], begin_ns: int, end_ns: int, block_modes: Sequence[str]) -> Sum | None:
    """What a step took, from its raw events; None where they are lost, where it has no pass, or one that is not whole, and where
    a block was recomputed whose mode is another."""
    inside = union((float(one.forward_ns), float(one.over_ns)) for one in passes)
    if not events or not inside or any(not begin_ns <= one.forward_ns < one.over_ns <= end_ns for one in passes):
        return None
    again = {number for start, _, _, number, lane, kind in events if lane == COMPUTE and kind == RECOMPUTE and start >= begin_ns}
    if any(not recomputes(block_modes[number]) for number in again):
        return None
    waits = waits_of(events, begin_ns, end_ns)
    waits_ns = length(waits)
    passes_ns = length(inside) - length(both(waits, inside))
    return Sum(passes_ns / 1e9, max(end_ns - begin_ns - waits_ns - passes_ns, 0.0) / 1e9, waits_ns / 1e9)


def middle(sums: Sequence[Sum]) -> Sum:
    """The median of each."""
    passes, rest, waits = (
        median(getattr(one, name) for one in sums) for name in ("passes_seconds", "rest_seconds", "wait_seconds")
    )
    return Sum(passes, rest, waits)


def apart(sums: Sequence[Sum]) -> float:
    """Half of what the passes of the longest took more than those of the shortest, in seconds."""
    passes = [one.passes_seconds for one in sums]
    return (max(passes) - min(passes)) / 2


def factors(
    forecast: Forecast, passes_seconds: float, apart_seconds: float, least_drag: float = 0.0, most_drag: float = math.inf
) -> tuple[float, float]:
    """Of what compute and drag were taken to be, by what the passes of a step took: nearer to them together. apart_seconds: how
    far the steps lie to either side. least_drag, most_drag: of the second factor; what it may not explain is compute's."""
    compute, drag = forecast.compute_seconds + forecast.recompute_seconds, forecast.drag_seconds
    compute_variance, drag_variance = (COMPUTE_DOUBT * compute) ** 2, (DRAG_DOUBT * drag) ** 2
    steps_variance = max(STEP_DOUBT * passes_seconds, apart_seconds) ** 2

    def share(variance: float, of: float, others: float, seconds: float) -> float:
        """The factor of what was taken to be `seconds`, where all is `of` more than it was taken to be."""
        return 1 + of * variance / (variance + others) / seconds if variance > 0 else 1.0

    more = passes_seconds - compute - drag
    of_drag = share(drag_variance, more, compute_variance + steps_variance, drag)
    allowed = min(max(of_drag, least_drag), most_drag)
    if allowed == of_drag:
        return share(compute_variance, more, drag_variance + steps_variance, compute), of_drag
    of_compute = share(compute_variance, passes_seconds - compute - allowed * drag, steps_variance, compute)
    return min(max(of_compute, 1 / MOST_COMPUTE_FACTOR), MOST_COMPUTE_FACTOR), allowed


def disk_factor(works: Sequence[DiskWork], step_seconds: float) -> float:
    """How many times as fast as it was taken to be the disk is, by what it carried in waits of steps of this length; 1 where that
    is too little to tell."""
    taken = sum(one.taken_seconds for one in works)
    if taken <= TELLING_SHARE * step_seconds * len(works):
        return 1.0
    return min(max(sum(one.expected_seconds for one in works) / taken, 1 / MOST_DISK_FACTOR), MOST_DISK_FACTOR)


def least_disk_factor(works: Sequence[DiskWork]) -> float:
    """How many times as fast as it was taken to be the disk is at least, by all that it carried in these steps, beside compute
    too; 1 where that is no more."""
    busy = sum(one.busy_seconds for one in works)
    return min(max(sum(one.busy_expected_seconds for one in works) / busy, 1.0), MOST_DISK_FACTOR) if busy > 0 else 1.0


def scaled_disk(machine: Machine, factor: float) -> Machine:
    """A machine whose disk carries so many times as much."""

    def scaled(speed: Speed) -> Speed:
        carried, idle = speed.bytes_per_second * factor, speed.idle_bytes_per_second * factor
        return replace(speed, bytes_per_second=carried, idle_bytes_per_second=idle)

    return replace(machine, disk_read=scaled(machine.disk_read), disk_write=scaled(machine.disk_write))


def scaled_times(times: Times, factor: float) -> Times:
    """All that is computed, by this factor."""
    return Times(tuple((compute * factor, again * factor) for compute, again in times.phases))


def scaled_drag(machine: Machine, factor: float) -> Machine:
    """A machine whose lanes cost compute so many times as much."""

    def scaled(speed: Speed) -> Speed:
        return replace(speed, drag_seconds_per_byte=speed.drag_seconds_per_byte * factor)

    return replace(
        machine, upload=scaled(machine.upload), offload=scaled(machine.offload), gather=scaled(machine.gather),
        disk_read=scaled(machine.disk_read), disk_write=scaled(machine.disk_write), update=scaled(machine.update),
        stash_drag_seconds_per_byte=machine.stash_drag_seconds_per_byte * factor,
        request_drag_seconds=machine.request_drag_seconds * factor,
        memory_drag_seconds_per_byte=machine.memory_drag_seconds_per_byte * factor,
    )  # fmt: skip
