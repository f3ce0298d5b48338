"""When blocks compute, and when steps begin and end: written down on the thread that drives them, in the ring of the timeline."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .. import _core
from .timeline import BACKWARD, COMPUTE, FORWARD, KIND_STEP, RECOMPUTE, STEP, Pass, StepTrace

if TYPE_CHECKING:
    from .device_clock import DeviceClock

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class Sampler(Protocol):
    """Who is told at which points of a step something begins or ends; block -1: of the whole model."""

    def begin_step(self, now_ns: int) -> None: ...
    def sample(self, moment: str, block: int) -> None: ...
    def end_step(self, number: int, now_ns: int) -> None: ...


class BlockClock:
    """Writes down when blocks compute and when steps begin and end. It and its hooks hold no tensor.

    The backward of a block begins when the first gradient of what it returned comes. It ends when that of its input has
    come, when another block's begins, or when backward is over.
    """

    __slots__ = (
        "__weakref__", "_backward_begins", "_began_ns", "_block_is_back", "_closed", "_engine", "_failed", "_first_block_task",
        "_last", "_open", "_open_ns", "_queued", "_unfinished", "device", "in_backward", "passes", "sampler", "step",
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
        self._unfinished = self._failed = False  # the last that has did not come to its end; one before it did not
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
        self._began_ns, self._open, self._unfinished, self._failed = 0, -1, False, False

    def begin_pass(self) -> None:
        """A forward of the model begins whose backward is to come; a pass without one is no pass of the step."""
        self._failed = self.backward_failed()
        if self.passes and self.passes[-1].over_ns == 0:
            self.passes.pop()
        self.passes.append(Pass(self.now()))
        self._sample("forward begins", -1)

    def backward_failed(self) -> bool:
        """Whether a backward pass of the step under way has ended in an error."""
        return self._failed or (self._unfinished and _graph_task() == -1)

    def is_backward_over(self) -> bool:
        """Whether the last backward pass, if there was one, has come to its end."""
        return not self._unfinished

    def watch_backward(self) -> None:
        """Called in a backward: its end is to be noted."""
        task = _graph_task()
        if task != self._queued and not self._closed:
            self.in_backward = True  # first: what an interrupt leaves is dropped where a backward is known to have begun
            self._unfinished = True
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
            inputs = tensors_in((args, kwargs))
            first = next((t for t in inputs if t.requires_grad), None)
            # What goes through a block as it is says nothing of when the block's backward begins.
            outputs = [t for t in tensors_in(result) if t.requires_grad and not any(t is given for given in inputs)]
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
        self._unfinished = False
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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts; torch's own walk takes ten times as long."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for entry in value for tensor in tensors_in(entry)]
