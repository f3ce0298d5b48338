"""Several forwards of a step before one backward: what those that wait hold, and what a step with as many needs beside one.

No dry run sees them. Autograd holds what each of them saved until its own backward, and, as the last one's comes first, every
gradient until those of all others are added to it. What blocks save is another matter in each mode: what is measured here is
compared by what a dry run tells of it. What goes to the disk is not held.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dryrun.phases import DryRun
from ..model.layout import Chunks


class Several:
    """Of one session.

    hold_bytes: of other forwards before a backward, before the last of them; 0: there were none.
    kept_bytes: of what blocks of one forward save, in the steps that showed what these take.
    n_waiting: forwards that waited at once in the step under way, up to now.
    """

    def __init__(self) -> None:
        self.hold_bytes = self.kept_bytes = 0
        self.n_waiting = self._most_waiting = 0
        self._known_waiting = 0  # of all steps before it
        self._saved_bytes = 0  # by the blocks of those in the step under way
        self._each_bytes = 0  # that one of them holds whose blocks save nothing, at most

    def begin_step(self) -> None:
        self.n_waiting, self._saved_bytes, self._known_waiting = 0, 0, self._most_waiting

    def note(self, held_bytes: int, run: DryRun | None, modes: Sequence[str]) -> None:
        """Another forward of a step begins, and those before it hold so much; modes: of the blocks in the last of them."""
        self.n_waiting += 1
        self._most_waiting = max(self._most_waiting, self.n_waiting)
        self.hold_bytes = max(self.hold_bytes, held_bytes)
        self._saved_bytes += run.kept_bytes(modes) if run is not None else 0
        self._each_bytes = max(self._each_bytes, (held_bytes - self._saved_bytes) // self.n_waiting)

    def note_kept(self) -> None:
        """The step under way was made, or refused. Where it had several forwards what the first of them keeps is there until its
        own backward, the last of all: a plan that keeps more takes so much more."""
        if self.n_waiting:
            self.kept_bytes = max(self.kept_bytes, self._saved_bytes // self.n_waiting)

    def more_kept(self, run: DryRun, modes: Sequence[str]) -> int:
        """By how much more others hold with these modes than in the steps that showed it."""
        return max(run.kept_bytes(modes) - self.kept_bytes, 0) * max(self._most_waiting, 1)

    def more_to_come(self, saved_bytes: int) -> int:
        """What forwards hold that wait when the one ends that begins now, and as many again, as how many come is not known.
        saved_bytes: by the blocks of each that comes. 0: a step before had as many, and plans know of them."""
        if self.n_waiting <= self._known_waiting:
            return 0
        n_more = self.n_waiting + 1
        return (self.n_waiting + n_more) * self._each_bytes + self._saved_bytes + n_more * saved_bytes

    def needed_bytes(self, chunks: Chunks, saved_bytes: int = 0) -> int:
        """What a step takes beside one of a single forward, at most. How many forwards there will be is not known: after the
        second, twice as many as there were, and so on. saved_bytes: by the blocks of each."""
        if not self._most_waiting:
            return 0
        n_others = (1 << self._most_waiting.bit_length()) - 1
        return n_others * (self._each_bytes + saved_bytes) + sum(chunks.grad_bytes)
