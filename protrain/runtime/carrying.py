"""Carrying out an arrangement beside what else is in memory: what a program holds of earlier steps, and states that no plan
counts yet. Where that leaves too little room the arrangement in use stays, and what holds it is told; where something else is to
have room, as a forward without gradients, chunks leave memory for it."""

from __future__ import annotations

from typing import NoReturn

from .. import _core
from ..base.sizes import format_bytes
from ..errors import BudgetError
from ..planner.plans import Arrangement
from ..planner.smallest import refuse
from .arranging import all_away, anew_of, arranged_beside, placed
from .homes import Homes
from .otherhooks import release_failed_backward
from .wrapped import Wrapped


class HeldError(BudgetError):
    """There is a plan, and what else is in memory leaves it no room."""


class Carrier:
    """Of one session."""

    def __init__(self, wrapped: Wrapped, engine: _core.Engine, homes: Homes) -> None:
        self._wrapped, self._engine, self._homes = wrapped, engine, homes

    def carry_out(self, arrangement: Arrangement) -> None:
        """Homes and slots are this now.

        Raises:
            HeldError: what else is in memory leaves it no room; the one in use stays.
            DiskError: a chunk could not be moved; likewise.
        """
        if not self.can_carry_out(arrangement):
            self._refuse_held(arrangement)
        self._homes.rearrange(arrangement)

    def can_carry_out(self, arrangement: Arrangement) -> bool:
        """Whether homes and slots can be this now, with what else is in memory."""
        room = self._wrapped.settings.memory_bytes - arrangement.static_bytes
        return self.held_bytes(room) <= room

    def _refuse_held(self, arrangement: Arrangement) -> NoReturn:
        held, budget = self.held_bytes(0), self._wrapped.settings.memory_bytes
        needed = held + arrangement.static_bytes
        raise HeldError(
            f"{format_bytes(held)} of earlier steps are still in memory, beside which this batch's plan has no room: it needs "
            f"{format_bytes(needed)}, the budget is {format_bytes(budget)}; drop what holds them (losses, outputs, graphs)",
            needed_bytes=needed, budget_bytes=budget, smallest_bytes=needed,
        )  # fmt: skip

    # ---- room for other things ----

    def with_room(self, room_bytes: int) -> Arrangement:
        """As many chunks in memory as so much beside them leaves room for, in a forward without gradients.

        Raises:
            BudgetError: not even with all of them away there is as much.
        """

        def arranged(wrapped: Wrapped) -> Arrangement:
            beside_bytes = wrapped.compute.overhead.of(wrapped.settings.memory_bytes)
            return arranged_beside(wrapped, room_bytes + wrapped.buffer_bytes + beside_bytes)

        try:
            return placed(arranged(self._wrapped), self._wrapped)
        except BudgetError as error:
            anew = anew_of(self._wrapped, arranged)
            raise refuse(error, "a forward of this batch", self._wrapped.compute.overhead, anew) from None

    def with_room_beside_held(self, need_bytes: int) -> Arrangement:
        """The same for a forward that needs so much beside what is in memory now.

        Raises:
            HeldError: without that there would be room.
            BudgetError: not even then.
        """
        held = self.held_bytes(0)
        try:
            return self.with_room(held + need_bytes)
        except BudgetError as error:
            refused = error
        try:
            self.with_room(need_bytes)
        except BudgetError:
            raise refused from None
        raise HeldError(
            f"{format_bytes(held)} of earlier forwards are still in memory, beside which this one has no room: it needs "
            f"{format_bytes(refused.smallest_bytes)}, the budget is {format_bytes(refused.budget_bytes)}; drop what holds them "
            f"(outputs, losses, graphs), or save them",
            needed_bytes=refused.needed_bytes, budget_bytes=refused.budget_bytes, smallest_bytes=refused.smallest_bytes,
        )  # fmt: skip

    def emptied(self) -> Arrangement:
        """Nothing stays in memory but what is in use; as it is where the states take less there than away."""
        away = all_away(self._wrapped)
        return placed(away, self._wrapped) if away is not None else self._homes.arrangement

    # ---- what else is in memory ----

    def held_bytes(self, room: int) -> int:
        """What is in memory beside states and slots. Where it is more than `room`, a backward that failed may have left it."""
        held = self.held_now_bytes()
        if held <= room:
            return held
        release_failed_backward()
        return self.held_now_bytes()

    def used_bytes(self, room: int) -> int:
        """What the arrangement in use takes, all of it, and what is in memory beside. `room`: for what has to find room then."""
        static_bytes = self._homes.arrangement.static_bytes
        beside_bytes = self.held_bytes(self._wrapped.settings.memory_bytes - static_bytes - room)
        return max(static_bytes + beside_bytes, self._wrapped.compute.held_bytes(self._engine))

    def waiting_bytes(self) -> int:
        """Likewise, as it is now, without what goes to the disk where memory is short."""
        return max(self.held_now_bytes() - self._engine.held()["stash_memory_bytes"], 0)

    def held_now_bytes(self) -> int:
        """Likewise, as it is now. States may be there that the arrangement in use does not count: those of a checkpoint that was
        loaded before the first batch. And of those that it counts some may be to come: an optimizer without a kernel makes them
        in its first step."""
        arrangement, known, foreign = self._homes.arrangement, self._engine.held(), self._wrapped.foreign
        persistent = arrangement.static_bytes - arrangement.plan.slot_bytes - arrangement.plan.ring_bytes
        more = known["parameter_bytes"] + known["state_bytes"] + known["yielded_bytes"] - persistent
        more = max(more, 0) if foreign is None else more + foreign.here_bytes
        live_bytes = self._wrapped.compute.held_bytes(self._engine) + known["yielded_bytes"]
        return live_bytes - self._wrapped.buffer_bytes - arrangement.static_bytes - more
