"""Arrangements for the states alone: before any batch is known, and where what a pass needs is known as one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import BudgetError
from ..planner.planning import arrange
from ..planner.plans import Arrangement, Plan
from ..planner.smallest import Anew, refuse
from ..planner.tiers import place_away
from .wrapped import Wrapped


def first_arrangement(wrapped: Wrapped) -> Arrangement:
    """Before any batch is known: parameters in memory where they take a quarter of the budget at most, else away.

    Raises:
        BudgetError: even the safest plan for the states alone does not fit.
    """
    try:
        safest = _states_alone(wrapped)
    except BudgetError as error:
        anew = anew_of(wrapped, _states_alone)
        raise refuse(error, "the model with its largest chunks in turn", anew=anew, knows_batch=False) from None
    everything, budget = _all_in_memory(wrapped), wrapped.settings.memory_bytes
    if safest == everything or (4 * everything.static_bytes <= budget and everything.smallest_bytes <= budget):
        return everything
    return placed(safest, wrapped)


def _states_alone(wrapped: Wrapped) -> Arrangement:
    """Every chunk away; or in memory, where that takes less, of a model whose chunks are small; or a part of them, where an
    optimizer without a kernel takes most for what is away.

    Raises:
        BudgetError: neither fits.
    """
    try:
        return arranged_away(wrapped, wrapped.buffer_bytes)
    except BudgetError as error:
        everything = _all_in_memory(wrapped)
        if everything.smallest_bytes <= wrapped.settings.memory_bytes and not wrapped.compute.separate:
            return everything
        smallest = min(error.smallest_bytes, everything.smallest_bytes)
        if wrapped.footprint is not None:
            try:
                return arranged_away(wrapped, wrapped.buffer_bytes, None)
            except BudgetError as partly:
                smallest = min(smallest, partly.smallest_bytes)
        raise BudgetError(str(error), needed_bytes=smallest, budget_bytes=error.budget_bytes, smallest_bytes=smallest) from None


def _all_in_memory(wrapped: Wrapped) -> Arrangement:
    """Masters come with the values, other state with the first update; smallest_bytes: with gradients and all state, and for an
    optimizer without a kernel what its step takes; old values of that go to the disk where they have no room."""
    layout, n_blocks, own = wrapped.layout, len(wrapped.blocks), wrapped.footprint
    modes = tuple(wrapped.settings.block_modes or ["checkpoint"] * n_blocks)
    values_bytes = (3 if wrapped.master_array else 1) * sum(layout.sizes)
    step_bytes = own.bytes if own else wrapped.state_arrays * sum(layout.sizes)
    smallest_bytes = sum(layout.sizes) + sum(layout.grad_bytes) + step_bytes + wrapped.buffer_bytes
    plan = Plan(
        layout.chunk_bytes, layout.n_chunks, layout.n_chunks, 0, modes, 0, n_blocks, 0.0, values_bytes, 0, 0,
        wrapped.settings.memory_bytes,
    )  # fmt: skip
    return Arrangement(plan, [-1] * layout.n_chunks, [], 0, 0, [], values_bytes, smallest_bytes, values_bytes, values_bytes)


def arranged_away(wrapped: Wrapped, unknown_bytes: int = 0, n_persist: int | None = 0) -> Arrangement:
    """Every chunk on disk, and unknown_bytes for what a pass needs. n_persist None: as many in memory as there is room for."""
    return arrange(
        wrapped.layout, len(wrapped.blocks), wrapped.state_arrays, wrapped.settings.memory_bytes, None, n_persist=n_persist,
        unknown_bytes=unknown_bytes, ring_host_bytes=wrapped.settings.host_bytes if wrapped.compute.separate else 0,
        footprint=wrapped.footprint, n_together=wrapped.n_together, lasting_bytes=wrapped.buffer_bytes,
    )  # fmt: skip


def all_away(wrapped: Wrapped) -> Arrangement | None:
    """Every chunk away, with as little in memory as can be. None: the states take less there than away."""
    budget = wrapped.settings.memory_bytes
    room_bytes = budget
    try:
        arranged_away(wrapped, room_bytes)
    except BudgetError as error:
        room_bytes -= error.smallest_bytes - budget  # what the states take at least
    return arranged_away(wrapped, room_bytes) if room_bytes >= 0 else None


def arranged_beside(wrapped: Wrapped, room_bytes: int) -> Arrangement:
    """As many chunks in memory as leave so much for a forward without gradients; where that is too little for what an update
    takes beside it, all of them away. smallest_bytes: the least that does.

    Raises:
        BudgetError: not even then there is as much.
    """
    try:
        return arranged_away(wrapped, room_bytes, None)
    except BudgetError as error:
        away, budget = all_away(wrapped), wrapped.settings.memory_bytes
        if away is None or error.budget_bytes != budget:
            raise
        needed_bytes = away.static_bytes + room_bytes
        if needed_bytes <= budget:
            return replace(away, smallest_bytes=needed_bytes)
        raise BudgetError(str(error), needed_bytes=needed_bytes, budget_bytes=budget, smallest_bytes=needed_bytes) from None


def anew_of(wrapped: Wrapped, arranged: Callable[[Wrapped], Arrangement]) -> Anew:
    """As who wraps the model anew would have it arranged."""
    overhead = wrapped.compute.overhead

    def needed(asked: int) -> int | None:
        try:
            found = arranged(wrapped.within(asked))
        except BudgetError as error:
            return error.smallest_bytes if error.budget_bytes == asked else None
        return overhead.around(found.smallest_bytes - overhead.of(asked))

    return Anew(lambda asked: wrapped.within(asked).layout.places, needed)


def placed(found: Arrangement, wrapped: Wrapped) -> Arrangement:
    """With homes on the host, where a device computes.

    Raises:
        BudgetError: host memory does not hold what it must.
    """
    if not wrapped.compute.separate:
        return found
    return place_away(found, wrapped.layout, wrapped.state_arrays, wrapped.settings.host_bytes)
