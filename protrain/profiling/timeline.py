"""The timeline of a step: what each lane did when, and what of it was hidden behind compute.

The C core writes down what the disk, the update lane and waits do; `BlockClock` adds the blocks and the steps themselves, on
the thread that drives them. All of it lies in one ring that is always written (csrc/base/trace.h), so a question about a step
that is over can be answered; `StepTrace` reads it, `Timeline` is the answer.

On the compute lane events never overlap: a backward is cut where its block is recomputed. What the thread does outside of
blocks, the loss for instance, is between two events.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from .. import _core
from ..base.replacing import replaced_file
from ..errors import StepError

if TYPE_CHECKING:
    from .device_clock import DeviceClock

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

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class Sampler(Protocol):
    """Who is told at which points of a step something begins or ends; block -1: of the whole model."""

    def begin_step(self, now_ns: int) -> None: ...
    def sample(self, moment: str, block: int) -> None: ...
    def end_step(self, number: int, now_ns: int) -> None: ...


class Pass(NamedTuple):
    """One forward and backward of a step, in ns: the model's forward begins, its backward is over (0: not yet)."""

    forward_ns: int
    over_ns: int = 0


class BlockClock:
    """Writes down when blocks compute and when steps begin and end. It and its hooks hold no tensor.

    The backward of a block begins when the first gradient of what it returned comes. It ends when that of its input has
    come, when another block's begins, or when backward is over.
    """

    __slots__ = (
        "__weakref__", "_backward_begins", "_began_ns", "_block_is_back", "_closed", "_engine", "_first_block_task", "_last",
        "_open", "_open_ns", "_queued", "device", "in_backward", "passes", "sampler", "step",
    )  # fmt: skip

    def __init__(
        self,
        engine: _core.Engine,
        backward_begins: Callable[[], None],
        block_is_back: Callable[[int, bool], None],
        device: DeviceClock | None = None,
    ) -> None:
        self._engine = engine
        self.device = device  # told of each time that is read here, where a device computes
        self._backward_begins = backward_begins  # called when the first block of a backward begins
        # Called with a block's number when its backward begins, with False, and when its recomputation is over, with True.
        self._block_is_back = block_is_back
        self._closed = False
        self._began_ns = 0  # of the step under way; 0: none
        self._open = -1  # the block whose backward goes on; -1: none
        self._open_ns = 0
        self._queued = -1  # the graph task whose end calls `_backward_over`
        self._first_block_task = -1  # the graph task in which a block's backward has begun
        self._last: weakref.ref[torch.Tensor] | None = None  # what the block before returned
        self.in_backward = False  # whether a backward pass of the step under way has begun
        self.passes: list[Pass] = []  # of the step under way
        self.step: StepTrace | None = None  # the last completed step
        self.sampler: Sampler | None = None  # told of what begins and ends, where somebody wants to know

    def close(self) -> None:
        """The engine goes; hooks in graphs that live on do nothing, and hold no session."""
        self._closed, self.sampler = True, None
        self._backward_begins, self._block_is_back = _nothing, _nothing

    def now(self) -> int:
        """The time in ns; over a device a point of its compute stream too."""
        now = _core.now_ns()
        if self.device is not None:
            self.device.mark(now)
        return now

    # ---- steps ----

    def begin_step(self) -> None:
        """The first forward of a step begins."""
        if self.device is not None:
            self.device.begin_step()
        now = self.now()
        self._began_ns, self._open = now, -1
        self.passes.clear()
        # The mark by which StepTrace sees that nothing of the step has given way in the ring.
        _core.trace_add(self._engine, STEP, KIND_STEP, -1, now - 1, now)
        if self.sampler is not None:
            self.sampler.begin_step(now)

    def end_step(self, number: int) -> None:
        """Step `number`, counted from 1, is complete."""
        if self._began_ns:
            now = self.now()
            if self.device is not None:
                self.device.end_step()
            _core.trace_add(self._engine, STEP, KIND_STEP, number, self._began_ns, now)
            self.step = StepTrace(self, number, self._began_ns, now, tuple(self.passes))
            if self.sampler is not None:
                self.sampler.end_step(number, now)
        self.forget()

    def forget(self) -> None:
        """The step under way is not made."""
        self._began_ns, self._open = 0, -1

    def begin_pass(self) -> None:
        """A forward of the model begins whose backward is to come; a pass without one is no pass of the step."""
        if self.passes and self.passes[-1].over_ns == 0:
            self.passes.pop()
        self.passes.append(Pass(self.now()))
        self._sample("forward begins", -1)

    def watch_backward(self) -> None:
        """Called in a backward: its end is to be noted."""
        task = _graph_task()
        if task != self._queued and not self._closed:
            self.in_backward = True  # first: what an interrupt leaves is dropped where a backward is known to have begun
            self._queued, self._open = task, -1  # what a backward that failed left open has no end
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)  # type: ignore[attr-defined]

    def watch_model(self, output: torch.Tensor) -> None:
        """Of a model without blocks, which returned this: its backward begins where the gradient of that has come."""
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(self._model_is_back)

    def _model_is_back(self, _grad: Any) -> None:
        if not self._closed and _graph_task() != self._first_block_task:
            self._backward_is_new()

    def _backward_is_new(self) -> None:
        self._first_block_task = _graph_task()
        self.watch_backward()
        self._backward_begins()

    # ---- blocks ----

    def forward_done(self, number: int, begin_ns: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """The forward of block `number` is over: it began at begin_ns, took args and kwargs, and returned result."""
        _core.trace_add(self._engine, COMPUTE, FORWARD, number, begin_ns, self.now())
        self._sample("after forward of block", number)
        if torch.is_grad_enabled():
            self._watch(number, args, kwargs, result)

    def recomputable(self, number: int, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, the forward of block `number`, so that calls of it while backward goes on count as recomputation."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if _graph_task() == -1 or self._closed:
                return run(*args, **kwargs)
            begin = self.now()
            open_block = self._open
            self._end(begin)
            try:
                return run(*args, **kwargs)
            finally:  # it usually ends by an exception, when all that was saved is back
                now = self.now()
                _core.trace_add(self._engine, COMPUTE, RECOMPUTE, number, begin, now)
                self._sample("after recomputing block", number)
                self._open, self._open_ns = open_block, now
                self._block_is_back(number, True)

        return timed

    def _watch(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        first = args[0] if args else None
        if type(result) is torch.Tensor and type(first) is torch.Tensor and first.requires_grad:
            outputs = [result] if result.requires_grad and result is not first else []
        else:
            inputs = _tensors((args, kwargs))
            first = next((t for t in inputs if t.requires_grad), None)
            # What goes through a block as it is says nothing of when the block's backward begins.
            outputs = [t for t in _tensors(result) if t.requires_grad and not any(t is given for given in inputs)]
        if not outputs:
            return
        hooks = _BlockHooks(self, number)
        hooks.watch_outputs(outputs)
        # What the block before returned has a hook, which ends this block as well.
        if first is not None and (self._last is None or first is not self._last()):
            hooks.watch_input(first)
        self._last = weakref.ref(outputs[0])

    def _begin(self, number: int) -> None:
        if self._closed:
            return
        now = self.now()
        if _graph_task() != self._first_block_task:
            self._backward_is_new()
        self._end(now)
        self._block_is_back(number, False)
        self._open, self._open_ns = number, now
        self._sample("before backward of block", number)

    def _end(self, now: int) -> None:
        if self._open >= 0 and not self._closed:
            _core.trace_add(self._engine, COMPUTE, BACKWARD, self._open, self._open_ns, now)
        self._open = -1

    def _backward_over(self) -> None:
        now = self.now()
        self._end(now)
        if self.passes:
            self.passes[-1] = self.passes[-1]._replace(over_ns=now)
        self._sample("backward is over", -1)

    def _sample(self, moment: str, number: int) -> None:
        if self.sampler is not None and self._began_ns and not self._closed:
            self.sampler.sample(moment, number)


class _BlockHooks:
    """The hooks of one forward of one block."""

    __slots__ = ("__weakref__", "_clock", "_handle", "_number", "_task")

    def __init__(self, clock: BlockClock, number: int) -> None:
        self._clock, self._number = clock, number
        self._task = -1  # the graph task in which the block's backward began
        self._handle: Any = None  # of the hook on a leaf

    def watch_outputs(self, tensors: list[torch.Tensor]) -> None:
        """The block's backward begins when the first gradient of these has come. A node takes a hook in half the time that a
        tensor does; a parameter that is returned as it is has none, and no backward."""
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self.output)

    def watch_input(self, tensor: torch.Tensor) -> None:
        """The block's backward ends when the gradient of this has come. A leaf lives on, and its hook does not: it goes when it
        was called, or with the graph, which alone holds these hooks."""
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(self.input)
            return
        method = weakref.WeakMethod(self.input)

        def hook(grad: Any) -> None:
            there = method()
            if there is not None:
                there(grad)

        self._handle = tensor.register_hook(hook)

    def _unwatch(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    __del__ = _unwatch

    def output(self, _grad: Any) -> None:
        task = _graph_task()
        if task != self._task:  # a second output of the same block begins nothing
            self._task = task
            self._clock._begin(self._number)

    def input(self, _grad: Any) -> None:
        if self._task != _graph_task():
            return  # a leaf's gradient comes from other graphs as well
        self._unwatch()
        clock = self._clock
        if clock._open == self._number:
            clock._end(clock.now())


def _nothing(*_: Any) -> None:
    """What a backward begins, and tells, once the engine is gone."""


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts; torch's own walk takes ten times as long."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for entry in value for tensor in _tensors(entry)]


class StepTrace:
    """A completed step: whose events are asked for when `timeline` is called, while they are still in the ring. It keeps neither
    the clock that saw it nor the engine, with its threads and its file."""

    __slots__ = ("_clock", "begin_ns", "end_ns", "number", "passes")

    def __init__(self, clock: BlockClock, number: int, begin_ns: int, end_ns: int, passes: tuple[Pass, ...]) -> None:
        self._clock, self.number, self.begin_ns, self.end_ns = weakref.ref(clock), number, begin_ns, end_ns
        self.passes = passes  # as BlockClock.passes

    def raw(self) -> list[Raw]:
        """The events since the step began, of later steps too; none where the ring has lost its beginning."""
        found = self._events()
        return found if any(_is_mark(event, self.begin_ns) for event in found) else []

    def _events(self) -> list[Raw]:
        clock = self._clock()
        if clock is None:
            raise StepError(f"timeline: the model of step {self.number} is gone; ask while it is there")
        return _core.trace_events(clock._engine, self.begin_ns)

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


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that is there as a whole or not at all; what was there is replaced.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    with replaced_file(path) as fresh, open(fresh, "wb") as file:
        file.write(content)
