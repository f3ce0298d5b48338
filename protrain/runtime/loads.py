"""Loads that did not end, and other changes: values are put one by one, and a disk that fails between two leaves old ones beside
new ones. Such a model is neither trained, nor run, nor saved, until a whole load has replaced what the other left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import _core
from ..errors import DiskError, StepError

PARAMETERS, STATE = "parameters", "optimizer state"
_LOAD_FAILED = "the last load failed half-way"


class Loads:
    """Of one session."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine, self._torn_writes = engine, 0
        self._half: set[str] = set()
        self._cause = _LOAD_FAILED  # of what is half there
        self._found: list[DiskError] | None = None  # none: no load_state_dict is under way

    @contextmanager
    def replacing(self, *parts: str) -> Iterator[bool]:
        """Around a load of these parts, from before its first value; if it does not end, they are half loaded. Gives whether one
        of them was: then there may be state of parameters whose count of steps is 0."""
        half = not self._half.isdisjoint(parts)
        self.begin(*parts)
        yield half
        self.end(*parts)

    def begin(self, *parts: str, cause: str = _LOAD_FAILED) -> None:
        """From here on these parts are a mixture, until a whole load of them ends; cause: in the words of `check`."""
        self._half.update(parts)
        self._cause = cause

    def mix(self, cause: str) -> None:
        """The same of all parts, by something that was no load."""
        self.begin(PARAMETERS, STATE, cause=cause)

    def end(self, *parts: str) -> None:
        self._half.difference_update(parts)

    @contextmanager
    def whole(self, name: str, part: str) -> Iterator[None]:
        """Around a write of a parameter of this name, or of one of its arrays, to its home: what a disk that failed under way has
        left there is a mixture."""
        try:
            yield
        except DiskError:
            torn_writes = self._engine.stats()["torn_writes"]
            if torn_writes != self._torn_writes:
                self._torn_writes = torn_writes
                self.begin(part, cause=f"the disk failed while {name} was written")
            raise

    @contextmanager
    def of_state_dict(self) -> Iterator[None]:
        """Around torch's load_state_dict, which makes words of what copying raised.

        Raises:
            DiskError: the disk failed while parameters were put; they are half loaded.
        """
        found: list[DiskError] = []
        before, self._found = self._found, found  # a module's own load_state_dict may call that of another one
        try:
            yield
        except Exception as error:
            failed = error if isinstance(error, DiskError) else found[-1] if found else None
            if failed is None:
                raise
            self.begin(PARAMETERS)
            try:
                raise failed from None
            finally:
                del failed  # an error that its own traceback holds keeps what the forward under way has allocated
        finally:
            found.clear()
            self._found = before

    def note(self, error: DiskError) -> None:
        """An operation on parameters failed; kept for the load_state_dict that may have made it, and for nobody else."""
        if self._found is not None:
            self._found.append(error)

    def check(self, what: str) -> None:
        """Whether all values are of one load or step.

        Raises:
            StepError: a load did not end, or the disk failed while something else changed them.
        """
        if self._half:
            parts = " and ".join(part for part in (PARAMETERS, STATE) if part in self._half)
            raise StepError(f"{what}: {self._cause} and left a mixture of {parts}: load a checkpoint again")
