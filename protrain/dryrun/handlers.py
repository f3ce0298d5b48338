"""Handlers of signals wait while a dry run runs, for a place at which they may raise.

A handler may raise anywhere in Python, as Ctrl-C's does. But torch asks its fake tensors in Python where it takes no error, such
as for their device, and ends the process when one comes. And what is no KeyboardInterrupt, such as the error of an alarm, would
be taken for one of the model's. So handlers run between two operations, and what they raise comes out of the dry run as it is.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Raised(BaseException):
    """By a handler: an error that is not to be taken for the model's."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Handlers:
    """Of the process: Python runs them on the main thread. depth: dry runs, one inside another."""

    def __init__(self) -> None:
        self._depth = 0
        self._real: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._came.append((number, frame))
        else:  # an error kept the real one from being put back
            self._real[number](number, frame)

    def _begin(self) -> None:
        self._depth += 1
        for number in signal.valid_signals() if self._depth == 1 else ():
            handler = signal.getsignal(number)
            if callable(handler) and handler != self._note:
                self._real[number] = handler
                signal.signal(number, self._note)

    def _end(self) -> None:
        try:
            for number, handler in self._real.items() if self._depth == 1 else ():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)
        finally:
            self._depth -= 1
            if not self._depth:
                self.let_in()

    def let_in(self) -> None:
        """Those that waited run."""
        while self._came and threading.current_thread() is threading.main_thread():
            number, frame = self._came.pop(0)
            try:
                self._real[number](number, frame)
            except Exception as error:
                raise _Raised(error) from None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which handlers run in `let_in` alone, and at its end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            try:
                self._begin()
                yield
            finally:
                self._end()
        except _Raised as raised:
            if self._depth:
                raise
            raise raised.error from None


_handlers = _Handlers()
let_in, waiting = _handlers.let_in, _handlers.waiting
