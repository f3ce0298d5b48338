"""Planning: what stays in memory, what shares slots, and each block's mode.

Sizes come from a dry run of the batch (dryrun.py), times from a profile (profiles.py), decisions from the C core (csrc/plan):
with times the candidate whose simulated step is the shortest; without, a fixed rule: keep activations where they fit, then keep
chunks in memory, the first in execution order first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

from .. import _core
from ..base.sizes import format_bytes
from ..dryrun.phases import SMALL_UNSEEN_BYTES, DryRun, recomputes, swaps
from ..errors import BudgetError, PlanError
from ..model.layout import Chunks, chunk_size, pack
from ..optim.footprint import Footprint
from .plans import MODES, WAITS, Arrangement, Forecast, Plan
from .profiles import DEVICE_UPDATE_BYTES_PER_SECOND, LANES, Machine, Profile, Times
from .requests import with_memory, with_requests
from .smallest import NO_OVERHEAD, Anew, refuse
from .tiers import host_room, place_away

#: More than that no part of a step has (csrc/plan/parts.h).
_MOST_BYTES = 1 << 45
#: The first step leaves for what nobody has seen yet what the safest plan would, up to all gradients and so many times what a
#: step holds whose blocks are all kept.
FIRST_ROOM_TIMES = 2


def first_room(run: DryRun, chunks: Chunks, memory_bytes: int, found: Arrangement, n_refused: int = 0) -> int:
    """Bytes that the first step of all leaves for a program that runs several forwards before a backward, or goes through a
    backward again, to show it: what the safest plan would where there is a second forward in it, else what the one with the least
    in memory would. found: for the steps behind it; n_refused: in a row, for want of it."""
    most_bytes = most_room(run, chunks) << n_refused
    room_bytes = memory_bytes - found.safest_bytes
    if room_bytes < second_bytes(run, chunks):
        room_bytes = memory_bytes - found.smallest_bytes
    return min(most_bytes, max(room_bytes, 0))


def most_room(run: DryRun, chunks: Chunks) -> int:
    """What that takes where nothing that is saved leaves memory, as in a backward through a backward."""
    return FIRST_ROOM_TIMES * run.keep_peak_bytes + sum(chunks.grad_bytes)


def second_bytes(run: DryRun, chunks: Chunks) -> int:
    """What another forward takes at most before the same backward, whose blocks are all recomputed, with all gradients."""
    return max((phase.checkpoint_peak_bytes for phase in run.phases if not phase.backward), default=0) + sum(chunks.grad_bytes)


def linear_accesses(chunks: Chunks) -> list[int]:
    """The order of accesses where none was recorded: forward through all parameters, then back."""
    order = [chunk for chunk, _ in groupby(chunk for chunk, _ in chunks.places)]
    return [*order, *reversed(order)]


def arrange(
    chunks: Chunks,
    n_blocks: int,
    n_states: int,
    budget_bytes: int,
    run: DryRun | None,
    *,
    modes: Sequence[str] | None = None,
    n_persist: int | None = None,
    n_buffer: int = 0,
    n_ahead: int = 0,
    grads_outlive_backward: bool = False,
    n_passes: int = 1,
    unknown_bytes: int = 0,
    times: Times | None = None,
    machine: Machine | None = None,
    host_budget_bytes: int = 0,
    n_ranks: int = 1,
    ring_host_bytes: int = 0,
    disk_budget_bytes: int = 0,
    footprint: Footprint | None = None,
    n_together: int = 1,
    lasting_bytes: int = 0,
    unfilled_bytes: int = 0,
) -> Arrangement:
    """Decide for one batch shape, as seen by a dry run; without one for the safest plan of states alone.

    Args:
        modes, n_persist: as given, where not None. n_buffer, n_ahead: with n_persist, of the plan that all are from.
        unknown_bytes: activations where no dry run knows them.
        times, machine: for a plan by time; both or none.
        host_budget_bytes: of a host tier beside the device, the ring among it where that is there. n_ranks: devices that share
            what is not persistent.
        ring_host_bytes: all of host memory, where the ring is there, in no budget of the device; 0: it is in the budget.
        disk_budget_bytes: of the disk, for one device; 0: as much as is needed.
        footprint: of an optimizer without a kernel; n_states is 0 then.
        n_together: the most chunks that are read at once, where no dry run knows it.
        lasting_bytes: of unknown_bytes, what is there in step() too. unfilled_bytes: what nobody means to fill: in no peak.

    Raises:
        BudgetError: nothing fits, with the smallest budget that does.
        ValueError: a step of the batch is larger than any machine.
    """
    peaks = (max(phase.keep_peak_bytes, phase.checkpoint_peak_bytes, phase.small_bytes) for phase in run.phases) if run else ()
    if run and max(run.fixed_bytes, *peaks) > _MOST_BYTES:
        raise ValueError(f"a step of this batch needs more than {format_bytes(_MOST_BYTES)}, the most that there are plans for")
    last_phase = max(len(run.phases) - 1, 0) if run else 0
    states = (
        [sum(footprint.state_bytes[i] for i in members) for members in chunks.members]
        if footprint
        else [n_states * size if trained else 0 for size, trained in zip(chunks.sizes, chunks.trained, strict=True)]
    )
    complete = [run.complete_phase.get(number, last_phase) if run else 0 for number in range(chunks.n_chunks)]
    less = [run.less_bytes.get(number, 0) if run else 0 for number in range(chunks.n_chunks)]
    here, away = _updates(chunks, footprint)
    described: list[tuple[int, ...]] = list(zip(chunks.sizes, chunks.grad_bytes, states, complete, less, here, away, strict=True))
    # What a device and its host cannot do without was never measured.
    phases = _phases(run, host_budget_bytes == 0 and ring_host_bytes == 0) if run else []
    fixed_bytes = (run.fixed_bytes + SMALL_UNSEEN_BYTES if run else 0) + unknown_bytes
    update_bytes = 0
    if footprint:
        update_bytes = footprint.beside_bytes + (run.left_bytes if run else 0)
        if not phases:
            passing_bytes = max(unknown_bytes - lasting_bytes, 0)
            phases = [(-1, True, 0, passing_bytes, 0, passing_bytes)]
            fixed_bytes -= passing_bytes
        fixed_bytes += footprint.small_bytes
    accesses = list(run.accesses) if run else linear_accesses(chunks)
    if run is None and modes is None:
        modes = ["checkpoint"] * n_blocks
    of_model = None
    if run and times and machine:
        of_model = with_memory(machine, run.counted())
        of_model = with_requests(
            of_model, chunks.sizes, n_states, run.record_bytes, budget_bytes, chunks.widening, chunks.trained
        )
    found = _core.make_plan(
        budget_bytes,
        fixed_bytes,
        described,
        phases,
        accesses,
        list(run.access_phases) if run else [],
        run.n_together if run else n_together,
        2 + n_states,
        n_blocks,
        None if modes is None else [MODES.index(mode) for mode in modes],
        -1 if n_persist is None else n_persist,
        n_buffer,
        n_ahead,
        grads_outlive_backward,
        n_passes,
        host_budget_bytes,
        n_ranks,
        _timed(times, of_model) if of_model and times else None,
        ring_host_bytes,
        update_bytes,
        chunks.widening,
        disk_budget_bytes,
    )
    ring_bytes = 0 if ring_host_bytes else found["ring_bytes"]
    block_modes = tuple(MODES[mode] for mode in found["modes"])
    forecast, needed_bytes = found["forecast"], found["peak_bytes"] - unfilled_bytes
    peak_bytes = first_peak_bytes = needed_bytes
    if footprint and run:
        live_bytes = found["static_bytes"] + run.fixed_bytes + run.left_bytes + footprint.small_bytes
        live_bytes += sum(chunks.grad_bytes[: found["n_persist"]])
        room_bytes = needed_bytes if any(map(swaps, block_modes)) else budget_bytes
        first_peak_bytes, peak_bytes = (
            max(
                needed_bytes,
                footprint.highest_bytes(chunks.places, found["n_persist"], live_bytes, room_bytes, makes_state=makes_state),
            )
            for makes_state in (True, False)
        )
    plan = Plan(
        chunk_bytes=chunks.chunk_bytes,
        n_chunks=chunks.n_chunks,
        n_persist=found["n_persist"],
        n_buffer=found["n_buffer"],
        block_modes=block_modes,
        n_swap=block_modes.count("swap"),
        n_checkpoint=sum(map(recomputes, block_modes)),
        step_seconds=forecast["step_ns"] / 1e9,
        peak_bytes=peak_bytes,
        host_bytes=found["host_bytes"],
        disk_bytes=found["disk_bytes"],
        budget_bytes=budget_bytes,
        n_host=found["n_host"],
        n_ahead=found["n_ahead"],
        persistent_bytes=found["static_bytes"] - found["slot_bytes_total"] - ring_bytes,
        slot_bytes=found["slot_bytes_total"],
        ring_bytes=ring_bytes,
        forecast=_forecast(forecast) if forecast["step_ns"] else None,
    )
    return Arrangement(
        plan,
        found["slot_of_chunk"],
        found["slot_bytes"],
        found["piece_bytes"],
        found["n_pieces"],
        [chunk for chunk in (run.accesses_with(block_modes) if run else accesses) if chunk >= plan.n_persist],
        found["static_bytes"],
        found["smallest_bytes"],
        needed_bytes,
        found["computed_bytes"] - unfilled_bytes,
        found["stash_bytes"],
        found["headroom_bytes"],
        found["rise_bytes"],
        found["recompute_bytes"],
        host_ring_bytes=found["ring_bytes"] - ring_bytes,
        safest_bytes=found["safest_bytes"],
        pending_bytes=found["pending_bytes"],
        first_peak_bytes=first_peak_bytes,
    )


#: Of a phase, in the order in which the core takes them.
_PHASE_FIELDS = (
    "block", "backward", "keep_entry_bytes", "keep_peak_bytes", "checkpoint_entry_bytes", "checkpoint_peak_bytes",
    "keep_working_bytes", "small_bytes", "swap_entry_bytes", "swap_peak_bytes", "own_accesses", "keep_after_bytes",
    "checkpoint_after_bytes", "swap_after_bytes",
)  # fmt: skip


def _updates(chunks: Chunks, footprint: Footprint | None) -> tuple[list[int], list[int]]:
    """What an optimizer without a kernel takes in its step for one parameter of each chunk, where that is in memory and where it
    is on disk."""
    if footprint is None:
        return [0] * chunks.n_chunks, [0] * chunks.n_chunks
    trained = set(footprint.order)
    members = [[number for number in indices if number in trained] for indices in chunks.members]
    here = [max((footprint.work_bytes[number] for number in indices), default=0) for indices in members]
    return here, [max(map(footprint.away_bytes, indices), default=0) for indices in members]


def _phases(run: DryRun, least: bool) -> list[tuple[int, ...]]:
    """As the core takes them. least: with what blocks that swap cannot do without."""
    phases = list(run.phases)
    if not least:
        phases = [replace(phase, swap_entry_bytes=0, swap_peak_bytes=0, swap_after_bytes=0) for phase in phases]
    return [tuple(getattr(phase, name) for name in _PHASE_FIELDS) for phase in phases]


def _ns(seconds: float) -> int:
    return min(round(seconds * 1e9), 1 << 62)  # more than the core takes for a time, which it says


def _timed(times: Times, machine: Machine) -> tuple[Any, ...]:
    """Times and machine as the core takes them."""
    lanes = [getattr(machine, lane) for lane in LANES]
    return (
        [(_ns(compute), _ns(again)) for compute, again in times.phases],
        [(s.bytes_per_second, s.idle_bytes_per_second, s.drag_seconds_per_byte * 1e9) for s in lanes],
        machine.disk_overlap,
        machine.link_overlap,
        machine.stash_drag_seconds_per_byte * 1e9,
        machine.step_update_bytes_per_second,
        _ns(machine.step_fixed_seconds),
        _ns(machine.access_seconds),
        _ns(machine.checkpoint_seconds),
        _ns(machine.swap_seconds),
        machine.request_drag_seconds * 1e9,
    )


def _forecast(found: _core.ForecastResult) -> Forecast:
    return Forecast(
        compute_seconds=found["compute_ns"] / 1e9,
        recompute_seconds=found["recompute_ns"] / 1e9,
        fixed_seconds=found["fixed_ns"] / 1e9,
        drag_seconds=found["drag_ns"] / 1e9,
        update_seconds=found["update_ns"] / 1e9,
        wait_seconds={reason: ns / 1e9 for reason, ns in zip(WAITS, found["wait_ns"], strict=True)},
        busy_seconds={lane: ns / 1e9 for lane, ns in zip(LANES, found["busy_ns"], strict=True)},
        moved_bytes=dict(zip(LANES, found["moved_bytes"], strict=True)),
    )


def anew_from_profiles(
    profiled: Callable[[int], Profile],
    parameters: Sequence[tuple[int, int, bool]],
    *,
    most_bytes: int | None = None,
    **options: Any,
) -> Anew:
    """As `plan_from_profile` would plan, with these options, from the profile of a budget. parameters: of the model; most_bytes:
    the largest budget that there is."""

    def needed(asked: int) -> int | None:
        if most_bytes is not None and asked > most_bytes:
            return None
        try:
            plan_from_profile(profiled(asked), 0, **options)
        except BudgetError as error:
            return error.smallest_bytes if error.budget_bytes == 0 else None
        return 0

    return Anew(lambda asked: pack(parameters, chunk_size(parameters, asked)).places, needed)


def plan_from_profile(
    profile: Profile,
    budget_bytes: int,
    *,
    host_budget_bytes: int = 0,
    disk_budget_bytes: int = 0,
    n_ranks: int = 1,
    modes: Sequence[str] | None = None,
    given: Plan | None = None,
) -> Plan:
    """The plan for a budget, in bytes, of what was profiled, here or elsewhere; deterministic.

    Args:
        host_budget_bytes: of host memory for each device, where the profile's machine has one beside it; the ring is there then.
            Of a profile that was measured over a device it has to hold all that a session keeps on the host.
        disk_budget_bytes: of the disk for each device, where a file describes it; 0: as much as is needed.
        n_ranks: devices that share what is not persistent.
        modes: of the blocks; None: the planner's choice.
        given: a plan whose decisions are taken, to foretell what it takes by this profile.

    Raises:
        BudgetError: nothing fits, with the smallest budget that does.
        PlanError: the profile contradicts itself.
    """
    chunks = pack(profile.parameters, profile.chunk_bytes, profile.widening)
    if any(not 0 <= chunk < chunks.n_chunks for chunk in (*profile.run.accesses, *profile.run.complete_phase)):
        raise PlanError(f"profile: its dry run names chunks that its parameters do not fill; they fill {chunks.n_chunks}")
    if given is not None and given.chunk_bytes != profile.chunk_bytes:
        raise PlanError(f"given: its chunks are of {given.chunk_bytes} bytes, those of the profile of {profile.chunk_bytes}")
    # What an update without a kernel takes, and when, is not simulated.
    timed = profile.footprint is None and bool(profile.times.phases)
    over = profile.overhead
    beside = over is not None or profile.machine.upload.bytes_per_second > 0  # host memory, where updates pass through it
    room_bytes = host_budget_bytes if over is None else host_room(chunks, profile.n_states, host_budget_bytes)
    beside_bytes = over.of(budget_bytes) + over.between(profile.run.checkpoint_peak_bytes) if over is not None else 0
    machine = profile.machine
    if over is not None and machine.step_update_bytes_per_second == 0:
        machine = replace(machine, step_update_bytes_per_second=DEVICE_UPDATE_BYTES_PER_SECOND)

    def arranged(unfilled_bytes: int = 0) -> Arrangement:
        return arrange(
            chunks, profile.n_blocks, profile.n_states, budget_bytes, profile.run, modes=given.block_modes if given else modes,
            n_persist=given.n_persist if given else None, n_buffer=given.n_buffer if given else 0,
            n_ahead=given.n_ahead if given else 0,
            grads_outlive_backward=profile.grads_outlive_backward, n_passes=profile.n_passes,
            times=profile.times if timed else None, machine=machine if timed else None,
            unknown_bytes=beside_bytes + unfilled_bytes, host_budget_bytes=room_bytes, n_ranks=n_ranks,
            ring_host_bytes=host_budget_bytes if beside else 0, disk_budget_bytes=disk_budget_bytes, footprint=profile.footprint,
            unfilled_bytes=unfilled_bytes,
        )  # fmt: skip

    try:
        found = arranged()
    except BudgetError as error:
        raise refuse(error, "a step of this batch", over or NO_OVERHEAD) from None
    if profile.footprint is not None:  # the first step makes the state of the optimizer, under a plan of its own
        first = found
        if given is None and over is None:  # as a session does, which leaves no such room over a device
            with suppress(BudgetError):
                first = arranged(first_room(profile.run, chunks, budget_bytes, found))
        peak_bytes = max(found.plan.peak_bytes, first.first_peak_bytes)
        found = replace(found, plan=replace(found.plan, peak_bytes=peak_bytes))
    if over is not None:
        return place_away(found, chunks, profile.n_states, host_budget_bytes).plan
    if found.host_ring_bytes > host_budget_bytes:
        raise BudgetError(
            f"host_memory of {format_bytes(host_budget_bytes)} does not hold what updates pass through: give at least "
            f"{format_bytes(found.host_ring_bytes)}",
            needed_bytes=found.host_ring_bytes, budget_bytes=host_budget_bytes, smallest_bytes=found.host_ring_bytes,
        )  # fmt: skip
    return found.plan
