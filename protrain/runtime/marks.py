"""The most that was in memory in the step under way, and what of it the program between the model and backward took.

The arena tells the highest since its last mark, and so does each part of a step that wants to know its own; the step's is the
highest of them all. Where state in memory gave way (csrc/runtime/states.c) what plans learn from is as if it had stayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import _core, errors

#: A step that had this part of the highest since wrap in memory is as good as the highest.
_AS_HIGH = 0.99


class Marks:
    """Of one session; called on the thread that drives the step.

    highest_bytes: live at most since the step began, up to the last mark.
    planned_bytes: the same with state that gave way, and without an update that takes what memory there is.
    within_bytes: live at most in forwards without gradients that came behind a backward of the step, which are in none of the
        others but highest_bytes; of one that was refused, what would have been.
    loss_bytes: from when the model has returned to when backward is at its first block, at most, by how much more than at its
        beginning was live; of the passes of the step the most. None: not known.
    foretold_bytes: what was foretold of the last of the steps that had the most in memory; 0: none was made.
    """

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._refused_bytes = self._at_output = self._since_output = self._untold = 0
        self.highest_bytes = self.planned_bytes = self.within_bytes = 0
        self._updates = self._within = False
        self.loss_bytes: int | None = None
        self._highest_step = self.foretold_bytes = 0
        self._losses = errors.n_losses

    def begin(self) -> None:
        """From here on it is another step."""
        self._engine.mark()
        self._engine.mark_yielded()
        self._loss_ends()
        self._refused_bytes = self._since_output = 0
        self.highest_bytes = self.planned_bytes = self.within_bytes = 0
        self._updates, self._within, self.loss_bytes = False, False, None
        self._losses = errors.n_losses

    @property
    def lost(self) -> bool:
        """Whether the disk failed, or the system had no memory, since the step began, for whomever."""
        return errors.n_losses != self._losses

    def mark(self) -> int:
        """The highest since the last mark."""
        refused_bytes, highest = self.refused_bytes, self._engine.mark()
        self.highest_bytes, self._untold = max(self.highest_bytes, highest), max(self._untold, highest)
        wanted = highest + self._engine.mark_yielded()
        if self._within:
            self.within_bytes = max(self.within_bytes, wanted)
            return highest
        self._refused_bytes, self._since_output = refused_bytes, max(self._since_output, wanted)
        self.planned_bytes = max(self.planned_bytes, wanted) if not self._updates else self.planned_bytes
        return highest

    def tell(self) -> int:
        """The highest since this was last asked, whoever marked between."""
        self.mark()
        highest, self._untold = self._untold, 0
        return highest

    @property
    def in_loss(self) -> bool:
        """Whether the model has returned and backward is not at its first block."""
        return self._at_output > 0

    @contextmanager
    def within(self) -> Iterator[None]:
        """Around a forward without gradients behind a backward of the step."""
        self.mark()
        self._within = True
        try:
            yield
        finally:
            self.mark()
            self._within = False

    def note_within(self, needed_bytes: int) -> None:
        """Such a forward was refused that would have had so much in memory."""
        self.within_bytes = max(self.within_bytes, needed_bytes)

    def update_begins(self) -> None:
        """An update that keeps copies where there is memory for them."""
        self.mark()
        self._updates = True

    @property
    def refused_bytes(self) -> int:
        """What would have been live in the step with the largest request that was refused; 0: none was."""
        refused_bytes = self._engine.stats()["refused_bytes"]
        if refused_bytes:
            refused_bytes += self._engine.held()["yielded_bytes"]
        return max(self._refused_bytes, refused_bytes)

    def step_made(self, foretold_bytes: int) -> None:
        """A step is complete, of which so much was foretold."""
        self.mark()
        if self.highest_bytes >= _AS_HIGH * self._highest_step:
            self._highest_step, self.foretold_bytes = max(self._highest_step, self.highest_bytes), foretold_bytes

    def grows(self) -> None:
        """What a forward takes that begins is not known: a request in it names what is needed and half of what it took."""
        self._engine.set_growth(self._engine.held()["live_bytes"])

    def model_returned(self) -> None:
        """A forward of the whole model is over."""
        self.mark()
        held = self._engine.held()
        self._at_output = self._since_output = held["live_bytes"] + held["yielded_bytes"]
        self._engine.set_growth(held["live_bytes"])

    def backward_begins(self) -> None:
        """A backward is at its first block."""
        if self._at_output:
            self.mark()
            self.loss_bytes = max(self.loss_bytes or 0, self._since_output - self._at_output)
            self._loss_ends()

    def _loss_ends(self) -> None:
        self._at_output = 0
        self._engine.set_growth(0)
