"""Homes: carrying an arrangement out. Chunks get their homes, those on disk their slots, blocks their modes, and the engine what
it needs to know of the plan: the ring, what may wait for the update lane, the recorded order, the goal and the headroom.

Homes move between two steps alone, one chunk at a time, those that leave memory first, so that the others find room. A disk that
fails on the way leaves each chunk in one home or the other, and the model goes back to the arrangement that it had; where that
fails too, before any parameter is used again (`settle`). Nothing is decided here: see fitting.py and pacing.py.
"""

from __future__ import annotations

import warnings
from contextlib import suppress

import torch

from .. import _core
from ..dryrun.phases import swaps
from ..errors import BudgetError, DiskError
from ..planner.plans import Arrangement
from ..planner.tiers import STAGING_PIECES
from .outside import outside_transforms
from .residency import Residency
from .running import Runner
from .wrapped import Wrapped


class Homes:
    """Of one session. arrangement: the one in use. stash_goal_bytes: what the stash keeps to; 0: nothing goes there."""

    def __init__(
        self, wrapped: Wrapped, engine: _core.Engine, residency: Residency, runner: Runner, arrangement: Arrangement
    ) -> None:
        self.arrangement = arrangement
        self._wrapped, self._engine, self._residency, self._runner = wrapped, engine, residency, runner
        self.stash_goal_bytes = self._headroom = 0  # see _set_goal
        self._bounds = (0, 0, 0)  # that the headroom was adjusted between: the goal, the least and the most
        self._told = False
        self.settled = True  # parameters lie where the arrangement has them; False while homes move

    def begin_fill(self) -> None:
        """Give every chunk its first home and slot; the parameters' values come next, chunk by chunk."""
        if self._wrapped.compute.separate:
            self._wrapped.compute.trim()  # what torch keeps for later of the program before counts as free memory
        for number, slot in enumerate(self.arrangement.slot_of_chunk):
            if slot < 0:
                self._engine.to_memory(number, False)
        self._to_away(self.arrangement)
        self._set_slots()

    def rearrange(self, arrangement: Arrangement) -> None:
        """Carry out another arrangement, between steps.

        Raises:
            DiskError, BudgetError: it could not be carried out; the one that was in use still is.
        """
        old = self.arrangement
        self._engine.yield_states(False)
        same_slots = arrangement.slot_of_chunk == old.slot_of_chunk and arrangement.slot_bytes == old.slot_bytes
        same_stash = arrangement.stash_pool_bytes == old.stash_pool_bytes
        same_ring = arrangement.piece_bytes == old.piece_bytes and arrangement.n_pieces == old.n_pieces
        same_away = same_stash and arrangement.shadow_of_chunk == old.shadow_of_chunk
        if self.settled and same_slots and same_ring and same_away:
            self._to_memory(arrangement)  # it may fail: first
            self._use(arrangement)
            self._set_order()
            self._set_goal()
            self._set_stash()
            return
        self._change(arrangement)

    def yield_states(self) -> None:
        """A step has begun: where it lacks memory the state of chunks in memory goes to the disk, and is back for the update."""
        self._engine.yield_states(True)

    def bring_states(self) -> None:
        """Before a step: state that gave way in one that was not made is in memory again, where it has room."""
        if self._engine.held()["yielded_bytes"]:
            self._engine.yield_states(False)
            with suppress(BudgetError, DiskError):  # it can wait for the update
                self._to_memory(self.arrangement)

    def drop_own_slots(self) -> None:
        """Between steps: no chunk has a slot beside those of the arrangement any more.

        Raises:
            DiskError, BudgetError: it could not be carried out.
        """
        if self._residency.own_slots:
            self._change(self.arrangement)

    def _change(self, arrangement: Arrangement) -> None:
        old = self.arrangement
        self._residency.release_nodes()
        if self._runner.device_stash is not None:
            self._runner.device_stash.settle()
        self._engine.drop()
        try:
            self._move(arrangement)
        except BaseException:
            try:
                self._move(old)
            except Exception:  # the first one tells; what is not done now is done by settle
                self._use(old)
                self._residency.watch_all()
            raise

    def settle(self) -> None:
        """The arrangement in use is carried out, also where a disk failed while homes moved, there and back.

        Raises:
            DiskError, BudgetError: it still cannot be.
        """
        if not self.settled:
            self._move(self.arrangement)

    def _move(self, arrangement: Arrangement) -> None:
        # What is made of memory here is no tensor of inference, nor of a transform of torch.func that the forward is inside of.
        with torch.inference_mode(False), torch.no_grad(), outside_transforms():
            engine, foreign = self._engine, self._wrapped.foreign
            self.settled = False
            self._residency.unbind_all()
            engine.drop_slots()
            engine.drop_ring()
            self._wrapped.compute.trim()
            self._leave_host(arrangement)
            self._to_away(arrangement)
            if foreign is not None:
                foreign.leave()
            self._to_memory(arrangement)
            if foreign is not None:
                foreign.arrive()
            self._use(arrangement)
            self._set_slots()
            self._residency.bind_all()
            self.settled = True

    def _leave_host(self, arrangement: Arrangement) -> None:
        """Beside a device: the host has room for what comes there. What passes through it shrinks now, and grows when homes have
        moved; chunks that go on to the device, which has no room for them yet, wait on disk where both do not fit."""
        old, wrapped, engine = self.arrangement, self._wrapped, self._engine
        if not wrapped.compute.separate:
            return
        if arrangement.gradient_memory_bytes < old.gradient_memory_bytes:
            engine.set_gradient_memory(arrangement.gradient_memory_bytes)
        if arrangement.staging_bytes < old.staging_bytes:
            engine.set_staging(arrangement.staging_bytes, STAGING_PIECES if arrangement.staging_bytes else 0)
        if arrangement.stash_pool_bytes < old.stash_pool_bytes:
            engine.set_stash_memory(arrangement.stash_pool_bytes)
        leaving = [number for number in old.shadow_of_chunk if arrangement.slot_of_chunk[number] < 0]
        homes_bytes = sum(
            wrapped.layout.sizes[number] * (1 + (1 + wrapped.state_arrays) * (1 + old.shadow_of_chunk[number]))
            for number in leaving
        )
        if arrangement.plan.host_bytes + homes_bytes > wrapped.settings.host_bytes:
            for number in leaving:
                if not engine.in_memory(number):
                    engine.to_disk(number)

    def _to_away(self, arrangement: Arrangement) -> None:
        """Those on disk first, then those on the host that may lose a shadow: what leaves the host gives others room there."""
        shadows, here = arrangement.shadow_of_chunk, self.arrangement.shadow_of_chunk
        for number, slot in enumerate(arrangement.slot_of_chunk):
            if slot >= 0 and number not in shadows:
                self._engine.to_disk(number)
        for number in sorted(shadows, key=lambda number: (shadows[number], number not in here, number)):
            self._engine.to_host(number, shadows[number])

    def _to_memory(self, arrangement: Arrangement) -> None:
        """State comes now, not at the first update: what is free in the first step tells of the others."""
        trained = self._wrapped.layout.trained
        for number, slot in enumerate(arrangement.slot_of_chunk):
            if slot < 0:
                self._engine.to_memory(number, trained[number])

    def _use(self, arrangement: Arrangement) -> None:
        self.arrangement, self._runner.modes = arrangement, arrangement.plan.block_modes

    def _set_slots(self) -> None:
        found, engine, wrapped = self.arrangement, self._engine, self._wrapped
        engine.set_slots(found.slot_of_chunk, found.slot_bytes)
        if found.piece_bytes:
            engine.set_ring(found.piece_bytes, found.n_pieces)
        if wrapped.compute.separate:
            engine.set_gradient_memory(found.gradient_memory_bytes)
            engine.set_staging(found.staging_bytes, STAGING_PIECES if found.staging_bytes else 0)
            self._set_stash()
            self._tell_unlocked()
        self._set_order()
        self._set_goal()
        self._runner.make_hooks(on_disk=any(slot >= 0 for slot in found.slot_of_chunk))

    def _set_stash(self) -> None:
        """Host memory for activations, and how much of them is on the way at once."""
        stash = self._runner.device_stash
        if stash is None:
            return
        self._engine.set_stash_memory(self.arrangement.stash_pool_bytes)
        stash.pool_bytes, stash.window_bytes = self.arrangement.stash_pool_bytes, self.arrangement.stash_window_bytes

    def _tell_unlocked(self) -> None:
        """Host memory that the driver did not lock is copied from and to more slowly: said once."""
        reason = self._engine.unlocked_reason()
        if reason and not self._told:
            self._told = True
            warnings.warn(
                f"protrain: copies between the host and the device are slower than they could be: {reason}", stacklevel=2
            )

    def _set_order(self) -> None:
        self._engine.set_order([c for c in self.arrangement.accesses if not self._engine.in_memory(c)])

    def _set_goal(self) -> None:
        """What the plan means to have in memory at most is what the stash works for, and what gradients that wait keep to. Where
        nothing is known of activations there is no goal. The same bounds again leave the headroom as it was adjusted."""
        found = self.arrangement
        goal = found.needed_bytes if found.needed_bytes > found.static_bytes else 0
        self.stash_goal_bytes = goal if any(map(swaps, found.plan.block_modes)) else 0
        bounds = self.stash_goal_bytes, found.rise_bytes, found.headroom_bytes
        if bounds != self._bounds:
            self._bounds, self._headroom = bounds, found.headroom_bytes
        self._engine.set_goal(goal)
        self._engine.set_pending(found.pending_bytes)
        self._engine.set_headroom(self._headroom, found.recompute_bytes)

    def adjust_headroom(self, peak: int) -> None:
        """A step is over that had so many bytes in memory at most: what it left unused under the goal goes to reading ahead,
        between the plan's two bounds."""
        if self.stash_goal_bytes:
            unused = self.stash_goal_bytes - peak
            found = self.arrangement
            wanted = self._headroom - (unused * 3 // 4 if unused > 0 else unused)
            self._headroom = min(max(wanted, found.rise_bytes), found.headroom_bytes)
            self._engine.set_headroom(self._headroom, found.recompute_bytes)
