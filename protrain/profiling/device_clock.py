"""When a device computed what a thread ordered: moments of its streams, beside the times at which the thread came by.

The thread that drives a step is far ahead of the device, so what `BlockClock` writes down says when blocks were ordered. While
steps are profiled, each time that it reads is a moment of the compute stream too. When the step is over the thread waits for the
last one, once, and all times are translated to the device's. What orders the stream behind a copy, or makes the thread wait,
stands between two moments of its own: there the device computed nothing, and what it waited for is no part of a block.

Of other steps there are two moments, the begin and the end, by which a later step sees how long it was: it asks whether the
device has come there, and waits for neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..device.compute import Accelerator
from .timeline import COMPUTE, WAIT, Pass, Raw, StepTrace


class DeviceClock:
    """Of one session; called on the threads that drive the step and its backward. running: steps are profiled."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.running = True
        self._moments: dict[int, Any] = {}  # by the time at which they were ordered, of the step under way
        self._waits: list[tuple[Any, Any]] = []
        self._update: tuple[Any, Any] | None = None
        self._begin: Any = None  # of the step under way
        self._whole: tuple[Any, Any] | None = None

    def begin_step(self) -> None:
        """What belongs to earlier steps is forgotten."""
        self._moments.clear()
        self._waits.clear()
        self._update = None
        self._begin, self._whole = self._accelerator.moment(), None

    def end_step(self) -> None:
        """All of the step is ordered."""
        if self._begin is not None:
            self._begin, self._whole = None, (self._begin, self._accelerator.moment())

    def take_step(self) -> tuple[Any, Any] | None:
        """Begin and end of the step that was ordered last, once."""
        found, self._whole = self._whole, None
        return found

    def seconds(self, step: tuple[Any, Any]) -> float | None:
        """How long a step was, as `take_step` gave it; None: the device has not come to its end. Never waits."""
        if not all(self._accelerator.passed(moment) for moment in step):
            return None
        return self._accelerator.elapsed_ns(*step) / 1e9

    def mark(self, now_ns: int) -> None:
        """The thread read this time, and the current stream is told."""
        if self.running:
            self._moments[now_ns] = self._accelerator.moment()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is ordered inside may make the current stream wait, or the thread, and computes nothing."""
        first = self._accelerator.moment() if self.running else None
        yield
        if first is not None:
            self._waits.append((first, self._accelerator.moment()))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """What is ordered inside updates parameters at home on the device."""
        first = self._accelerator.moment() if self.running else None
        yield
        if first is not None:
            self._update = first, self._accelerator.moment()

    def update_seconds(self) -> float:
        """That the last update took; 0.0 where the step was not profiled. Waits for its end."""
        return self._accelerator.elapsed_ns(*self._update) / 1e9 if self._update is not None else 0.0

    def events(self, step: StepTrace) -> tuple[list[Raw], list[Pass], int, int] | None:
        """What the device computed in this step and waited for, its passes, its begin and end: as `observe` takes them, no two
        times alike. None where it was not profiled from its begin to its end, or its events are gone. Waits for its end."""
        base, last = self._moments.get(step.begin_ns), self._moments.get(step.end_ns)
        raw = step.raw()
        if base is None or last is None or not raw:
            return None

        def at(moment: Any) -> int:
            return step.begin_ns + self._accelerator.elapsed_ns(base, moment)

        times: dict[int, int] = {}
        latest = 0
        for now_ns, moment in sorted(self._moments.items()):
            times[now_ns] = latest = max(at(moment), latest + 1)
        computed = [event for event in raw if event[4] == COMPUTE and event[1] <= step.end_ns]
        passes = [one for one in step.passes if one.over_ns]
        if not all(
            now_ns in times for now_ns in (*(t for event in computed for t in event[:2]), *(t for p in passes for t in p))
        ):
            return None
        events: list[Raw] = [(times[event[0]], times[event[1]], *event[2:]) for event in computed]
        events += [(at(first), at(end), 0, -1, WAIT, 0) for first, end in self._waits]
        return events, [Pass(times[p.forward_ns], times[p.over_ns]) for p in passes], times[step.begin_ns], times[step.end_ns]
