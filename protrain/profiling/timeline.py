"""The timeline of a step: what each lane did when, and what of it was hidden behind compute.

The C core writes down what the disk, the update lane and waits do; blockclock.py adds the blocks and the steps themselves, on
the thread that drives them. All of it lies in one ring that is always written (csrc/base/trace.h), so a question about a step
that is over can be answered; `StepTrace` reads it, `Timeline` is the answer.

On the compute lane events never overlap: a backward is cut where its block is recomputed. What the thread does outside of
blocks, the loss for instance, is between two events.
"""

from __future__ import annotations

import json
import os
import weakref
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from ..base.replacing import write_file
from ..errors import StepError

if TYPE_CHECKING:
    from .blockclock import BlockClock

#: Lanes and kinds, numbered as csrc/base/trace.h numbers them.
LANES = ("step", "compute", "wait", "read", "write", "update", "upload", "offload")
#: Lanes that are empty, and not shown, where the CPU computes.
TRANSFERS = LANES[-2:]
KINDS = (
    "step", "forward", "backward", "recompute", "parameters", "state", "gradients", "activations", "update", "memory",
)  # fmt: skip
STEP, COMPUTE, WAIT = LANES.index("step"), LANES.index("compute"), LANES.index("wait")
KIND_STEP, FORWARD, BACKWARD, RECOMPUTE = 0, 1, 2, 3
OF_BLOCK = {"forward", "backward", "recompute", "activations"}

#: As `_core.trace_events` gives it: start and end in ns, bytes, number of the block or chunk (-1: none), lane, kind.
Raw = tuple[int, int, int, int, int, int]
Interval = tuple[float, float]


class Pass(NamedTuple):
    """One forward and backward of a step, in ns: the model's forward begins, its backward is over (0: not yet)."""

    forward_ns: int
    over_ns: int = 0


class StepTrace:
    """A completed step: whose events are asked for when `timeline` is called, while they are still in the ring. It keeps neither
    the clock that saw it nor the engine, with its threads and its file."""

    __slots__ = ("_clock", "_grown", "begin_ns", "end_ns", "number", "passes")

    def __init__(self, clock: BlockClock, number: int, begin_ns: int, end_ns: int, passes: tuple[Pass, ...]) -> None:
        self._clock, self.number, self.begin_ns, self.end_ns = weakref.ref(clock), number, begin_ns, end_ns
        self.passes = passes  # as BlockClock.passes
        self._grown = False

    def raw(self) -> list[Raw]:
        """The events since the step began, of later steps too; none where the ring has lost its beginning."""
        found = self._events()
        return found if self._has_begin(found) else []

    def _events(self) -> list[Raw]:
        clock = self._clock()
        if clock is None:
            raise StepError(f"timeline: the model of step {self.number} is gone; ask while it is there")
        found = _core.trace_events(clock._engine, self.begin_ns)
        if clock.step is self and not self._grown and not self._has_begin(found):  # more than the ring holds
            self._grown = True
            _core.trace_grow(clock._engine)  # those of the next step find room
        return found

    def _has_begin(self, events: list[Raw]) -> bool:
        return any(_is_mark(event, self.begin_ns) for event in events)

    def timeline(self) -> Timeline:
        """What the lanes did in the step.

        Raises:
            StepError: later steps have taken the place of its events, or the model is unwrapped or gone.
        """
        try:
            raw = self._events()
        except RuntimeError:
            raise StepError(f"timeline: the model of step {self.number} is unwrapped; ask before protrain.unwrap") from None
        return make_timeline(raw, self.number, self.begin_ns, self.end_ns)


@dataclass(frozen=True)
class Event:
    """What one lane did for a while, in seconds from the beginning of the step; bytes moved, 0 where nothing was.

    What was ordered before the step, such as a chunk read ahead, may start below 0, and what was written behind it may end
    after it.
    """

    lane: str
    name: str
    start_seconds: float
    end_seconds: float
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """A step, counted from 1: its length in seconds, and the events in it in the order they started."""

    step: int
    seconds: float
    events: tuple[Event, ...]
    began_ns: int = field(repr=False)  # on the monotonic clock of the machine

    def to_json(self) -> str:
        """A Chrome trace, as ui.perfetto.dev and chrome://tracing read it."""
        return chrome_trace([self])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, which is there as a whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_file(path, self.to_json().encode())

    def explain(self) -> str:
        """A few lines: how long each lane was busy, and how much of that was hidden behind compute.

        Hidden is what lies between the first block's beginning and the last block's end while the step did not wait.
        """
        busy = {lane: union(self._inside(lane)) for lane in LANES}
        computed = busy["compute"]
        behind = without([(computed[0][0], computed[-1][1])], busy["wait"]) if computed else []
        lines = [f"step {self.step}: {self.seconds:.3f} s"]
        for lane in LANES[1:]:
            seconds = length(busy[lane])
            if lane in TRANSFERS and seconds == 0:
                continue
            share = seconds / self.seconds if self.seconds > 0 else 0.0
            line = f"{lane:<8} {seconds:.3f} s, {share:.1%} of the step"
            if lane not in ("compute", "wait") and seconds > 0:
                hidden = length(both(busy[lane], behind))
                if lane != "update":
                    line += f", {sum(e.bytes for e in self.events if e.lane == lane) / 1e6:,.1f} MB"
                line += f", {hidden / seconds:.1%} of it hidden behind compute" if computed else ""
            if lane == "wait":
                line += "".join(f", {kind} {part:.3f} s" for kind, part in self._kinds(lane))
            lines.append(line)
        return "\n".join(lines)

    def _inside(self, lane: str, kind: str = "") -> list[Interval]:
        """The parts of a lane's events, or of those of one kind, that lie in the step."""
        found = (event for event in self.events if event.lane == lane and event.name.startswith(kind))
        cut = ((max(event.start_seconds, 0.0), min(event.end_seconds, self.seconds)) for event in found)
        return [(start, end) for start, end in cut if start < end]

    def _kinds(self, lane: str) -> list[tuple[str, float]]:
        """The kinds of events of a lane, and how long each was busy."""
        kinds = dict.fromkeys(event.name.split(" ")[0] for event in self.events if event.lane == lane)
        return [(kind, length(union(self._inside(lane, kind)))) for kind in kinds]


def make_timeline(raw: Iterable[Raw], number: int, begin_ns: int, end_ns: int) -> Timeline:
    """The timeline of step `number`, out of events of which some may belong to other steps.

    Raises:
        StepError: the ring has lost the step's beginning.
    """
    found: list[Raw] = []
    whole = False
    for event in raw:
        start, end, _, which, lane, _ = event
        if lane == STEP and which == -1:
            whole = whole or _is_mark(event, begin_ns)
        elif end > begin_ns and start < end_ns and (lane != STEP or which == number):
            found.append(event)
    if not whole:
        raise StepError(
            f"timeline: not all events of step {number} are kept any more; call protrain.status(model).timeline() right "
            f"after optimizer.step()"
        )
    found.sort()
    events = tuple(
        Event(LANES[lane], _name(which, kind), (start - begin_ns) / 1e9, (end - begin_ns) / 1e9, size)
        for start, end, size, which, lane, kind in found
    )
    return Timeline(number, (end_ns - begin_ns) / 1e9, events, begin_ns)


def _is_mark(event: Raw, begin_ns: int) -> bool:
    """Whether it is what begin_step wrote at begin_ns."""
    return event[4] == STEP and event[3] == -1 and event[1] == begin_ns


def _name(number: int, kind: int) -> str:
    """As "forward block 3", "parameters chunk 5", "step 12", "memory"."""
    name = KINDS[kind]
    if number < 0:
        return name
    return f"{name} {number}" if name == "step" else f"{name} {'block' if name in OF_BLOCK else 'chunk'} {number}"


# ---- intervals: sorted, apart from each other ----


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What any of the intervals covers."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def both(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What both of two unions cover."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def between(a: list[Interval], start: float, end: float) -> list[Interval]:
    """What of a union lies between two times, without a look at all of it."""
    first = max(bisect_left(a, (start, start)) - 1, 0)
    return both([(start, end)], a[first : bisect_left(a, (end, end))])


def without(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What union `a` covers and union `b` does not."""
    edges = [float("-inf"), *(edge for interval in b for edge in interval), float("inf")]
    return both(a, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: list[Interval]) -> float:
    """The sum of the lengths of a union."""
    return sum(end - start for start, end in intervals)


# ---- files ----


def chrome_trace(timelines: Iterable[Timeline]) -> str:
    """Several steps as one Chrome trace, from the beginning of the first.

    Events of a lane that overlap, as reads do, lie in rows (threads) of their own, so that viewers show them all. What one
    request to the disk carried is one event. What belongs to two steps, such as a chunk read ahead, is there once.
    """
    steps = list(timelines)
    origin = min((t.began_ns for t in steps), default=0)
    lanes: dict[str, set[tuple[int, int, str, int]]] = {lane: set() for lane in LANES}
    for timeline in steps:
        for event in requests(timeline.events):
            start, end = (timeline.began_ns - origin + round(t * 1e9) for t in (event.start_seconds, event.end_seconds))
            lanes[event.lane].add((start, end, event.name, event.bytes))
    first = min((event[0] for events in lanes.values() for event in events), default=0)
    out: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "protrain"}}]
    tid = 0
    for lane, events in lanes.items():
        if lane in TRANSFERS and not events:
            continue
        for number, row in enumerate(_rows(sorted(events)) or [[]]):
            tid += 1
            name = lane if number == 0 else f"{lane} {number + 1}"
            out.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}})
            out.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": tid, "args": {"sort_index": tid}})
            out += [_chrome_event(tid, lane, start - first, end - first, text, size) for start, end, text, size in row]
    return json.dumps({"traceEvents": out, "displayTimeUnit": "ms"})


def requests(events: Iterable[Event]) -> list[Event]:
    """The same events, but for those that one request to the disk carried, which begin and end together: these are one."""
    found: dict[Any, list[Event]] = {}
    for number, event in enumerate(events):
        one = event.lane in ("read", "write")
        found.setdefault((event.lane, event.start_seconds, event.end_seconds) if one else number, []).append(event)
    return [
        replace(group[0], name=", ".join(dict.fromkeys(event.name for event in group)), bytes=sum(event.bytes for event in group))
        for group in found.values()
    ]


def _chrome_event(tid: int, lane: str, start: int, end: int, name: str, size: int) -> dict[str, Any]:
    event = {"ph": "X", "pid": 1, "tid": tid, "cat": lane, "name": name, "ts": start / 1000, "dur": (end - start) / 1000}
    if size:
        event["args"] = {"bytes": size} | ({"GB/s": round(size / (end - start), 3)} if end > start else {})
    return event


def _rows(events: list[tuple[int, int, str, int]]) -> list[list[tuple[int, int, str, int]]]:
    """Sorted events in as few rows as possible, no two of a row at the same time."""
    rows: list[list[tuple[int, int, str, int]]] = []
    for event in events:
        row = next((row for row in rows if row[-1][1] <= event[0]), None)
        if row is None:
            rows.append(row := [])
        row.append(event)
    return rows
