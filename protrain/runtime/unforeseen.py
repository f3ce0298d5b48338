"""What steps took whose batches no dry run foresaw, and which blocks may be kept by it: nobody knows what the next step does, so
an eighth more counts, and blocks are kept in a half of what is left, the last ones first. A step within that eighth changes
nothing: how many gradients wait for their updates differs from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..planner.plans import Plan


def with_more(n_bytes: int) -> int:
    """What plans have room for where steps took so much."""
    return n_bytes * 9 // 8


class Unforeseen:
    """Of one session. shows: the step under way, or to come, is one under the safest plan that tells of others.
    seen_bytes: of it, what a dry run has seen before it failed, where blocks are recomputed and where they swap."""

    def __init__(self) -> None:
        self.shows = False
        self.seen_bytes: Sequence[int] = (0, 0)
        self._taken_bytes = 0  # beside chunks and what kept blocks save
        self._refused_bytes = 0  # the same of a step that was refused
        self._saved_bytes: dict[int, int] = {}  # of blocks, as their recomputations showed it

    def note_step(self, beside_bytes: int, saved_bytes: dict[int, int]) -> bool:
        """One was made that took so much beside chunks and what kept blocks save; returns whether that is more than counts.
        saved_bytes: of blocks that were recomputed."""
        more = beside_bytes > with_more(self._taken_bytes)
        if more:
            self._taken_bytes = beside_bytes
        for number, n_bytes in saved_bytes.items():
            self._saved_bytes[number] = max(self._saved_bytes.get(number, 0), n_bytes)
        return more

    def note_refused(self, beside_bytes: int) -> None:
        """One was not made that would have taken so much: the next one is under the safest plan, and tells of others."""
        self._refused_bytes, self.shows = max(self._refused_bytes, beside_bytes), True

    def forget_refused(self) -> None:
        """What was refused fits in no plan: others go on."""
        self._refused_bytes = 0

    @property
    def beside_bytes(self) -> int:
        """What plans have room for, beside chunks and what kept blocks save."""
        return with_more(max(self._taken_bytes, self._refused_bytes))

    def kept_bytes(self, plan: Plan) -> int:
        """What its kept blocks save."""
        return sum(self._saved_bytes.get(number, 0) for number, mode in enumerate(plan.block_modes) if mode == "keep")

    def keeping(self, plan: Plan, budget_bytes: int) -> Plan:
        """The plan, which has all chunks in memory, with the blocks kept whose savings are known and find room."""
        room, modes = (budget_bytes - plan.peak_bytes) // 2, list(plan.block_modes)
        for number in reversed(range(len(modes))):
            n_bytes = with_more(self._saved_bytes.get(number, 0))
            if 0 < n_bytes <= room:
                room, modes[number] = room - n_bytes, "keep"
        return replace(plan, block_modes=tuple(modes))
