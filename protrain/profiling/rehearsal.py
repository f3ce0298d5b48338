"""The rehearsal: how long each phase of a training step computes, without training and without the model's memory.

A twin of the model runs forward and backward on the real batch, with real gradients that are dropped as they come. It has the
model's classes and structure, and parameters that share a little memory (ring.py). Of blocks that are alike only a few run; the
others hand their input on and get the times of those that ran. Where kept activations would not fit, blocks are recomputed in
backward; what that took is no part of the backward's time.

Passes repeat, and a phase's time is the median of its times. Phases are cut as the dry run cuts them and must be the same ones.
Over a device the twin is there, and times are those of its stream.
The real model and the batch are only read; random states stay as they are.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

from ..base.counting import uncounted
from ..base.sizes import format_bytes
from ..device.compute import Accelerator, Compute
from ..dryrun.fakes import nothing_left_out
from ..dryrun.passes import as_begun, as_given, output_tensors, starts_of, watch_backward
from ..dryrun.phases import DryRun
from ..dryrun.twin import HOOKS, one_line
from ..errors import Error
from ..model import keycaches, randomness
from ..model.compiled import eager, has_compiled
from ..model.modulestate import Beginning
from ..model.parameters import DisableTorchFunction
from ..planner.profiles import Times
from .blockclock import tensors_in
from .ring import Ring, copy_batch, make_twin

#: Of blocks that are alike so many run.
RUN_OF_ALIKE = 4
#: Passes that count, at least, and how long they take together, at least.
LEAST_PASSES, LEAST_SECONDS = 3, 0.5
#: Where passes differ by more than this part, others follow, for about so many seconds at most.
STEADY, MORE_SECONDS = 0.03, 2.0

#: Of a phase: its own part, what follows it, and recomputation.
Seconds = tuple[float, float, float]

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_now_ns = time.perf_counter_ns


class RehearsalError(Error):
    """The model cannot be rehearsed; `reason` says why, in one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the step cannot be timed by a rehearsal: {reason}")
        self.reason = reason


class OtherWayError(RehearsalError):
    """Its blocks do not run as they did in the dry run."""


class _UnlikeError(RehearsalError):
    """Blocks that were taken for alike are not, or cannot hand their input on."""


class _MemoryError(RehearsalError):
    """It takes more memory than it may."""


# ---- blocks that are alike ----


def _freeze(value: Any) -> Hashable:
    """What can be compared of an attribute or an argument; a tensor's geometry, of other objects the type."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if isinstance(value, nn.Parameter) else ()
        return (tuple(value.shape), strides, value.dtype, value.requires_grad)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | type):
        return (type(value), value)
    if isinstance(value, tuple | list):
        return (type(value), tuple(_freeze(entry) for entry in value))
    if isinstance(value, dict):
        return (type(value), tuple((str(key), _freeze(entry)) for key, entry in value.items()))
    code: Hashable = getattr(getattr(value, "__func__", value), "__code__", None)
    return (type(value), code)


def _kind_of(arguments: tuple[list[Any], Hashable]) -> Hashable:
    """What blocks that are alike are given; whole numbers among it may count the blocks."""
    leaves, spec = arguments
    return spec, tuple(int if type(leaf) is int else _freeze(leaf) for leaf in leaves)


def _describe(block: nn.Module) -> tuple[Hashable, tuple[int, ...]]:
    """What blocks that are alike have in common, and apart from it the whole numbers among their attributes: some count the
    blocks."""
    parts: list[Hashable] = []
    numbers: list[int] = []
    for name, module in block.named_modules():
        parts.append((name, type(module)))
        for key, value in module.__dict__.items():
            if key == "_modules" or key in HOOKS:
                continue
            parts.append(key)
            if type(value) is int:
                numbers.append(value)
            else:
                parts.append(_freeze(value))
    return tuple(parts), tuple(numbers)


def _find_alike(blocks: Sequence[nn.Module], run: DryRun) -> list[list[int]]:
    """Numbers of forward calls of blocks in a step, in groups of those whose blocks and whose operations are alike."""
    described = [_describe(block) for block in blocks]
    groups: dict[Hashable, list[int]] = {}
    calls = run.calls()
    for number, (block, forward, backward) in enumerate(calls):
        figures = [(run.phases[i].flops, run.phases[i].moved_bytes, run.phases[i].operations) for i in (forward, backward) if i]
        groups.setdefault((described[block][0], tuple(figures)), []).append(number)
    found: list[list[int]] = []
    for group in groups.values():
        numbers = [described[block][1] for block in dict.fromkeys(calls[call][0] for call in group)]
        counting = [all(a < b for a, b in zip(column, column[1:], strict=False)) for column in zip(*numbers, strict=True)]
        alike: dict[Hashable, list[int]] = {}
        for call in group:
            rest = zip(described[calls[call][0]][1], counting, strict=True)
            alike.setdefault(tuple(number for number, counts in rest if not counts), []).append(call)
        found += alike.values()
    return found


@dataclass(frozen=True)
class _Through:
    """How a block that does not run makes its output: a copy of one input, and what else it returns."""

    first: int  # which of the leaves of the block's arguments
    kind: type | None  # tuple, list; None: the output is a tensor
    rest: tuple[tuple[int, Any], ...]  # which leaf, or -1 and the value

    def make(self, leaves: list[Any]) -> Any:
        first = leaves[self.first].clone()
        if self.kind is None:
            return first
        return self.kind([first, *(value if leaf < 0 else leaves[leaf] for leaf, value in self.rest)])


def _find_through(leaves: list[Any], output: Any) -> _Through | None:
    """None: what the block returns cannot be made from its arguments."""
    first = next((number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)), None)
    kind = type(output) if type(output) in (tuple, list) and output else None
    returned = output[0] if kind else output
    if first is None or not isinstance(returned, torch.Tensor) or _freeze(leaves[first]) != _freeze(returned):
        return None
    rest: list[tuple[int, Any]] = []
    for value in output[1:] if kind else ():
        leaf = next((number for number, given in enumerate(leaves) if given is value), -1)
        if leaf >= 0:
            rest.append((leaf, None))
        elif isinstance(value, torch.Tensor):  # attention weights, for instance: what they lead to runs, if without this block
            rest.append((-1, value.detach()))
        elif output_tensors(value):
            return None
        else:
            rest.append((-1, value))
    return _Through(first, kind, tuple(rest))


@dataclass
class _Group:
    """Calls of blocks that are alike: all take arguments of this kind, and those that do not run return this."""

    given: Hashable = None
    through: _Through | None = None


# ---- a pass ----


@dataclass
class _Span:
    """One phase. Its own part is the block's, up to the mark of its end; what follows lies between two blocks."""

    block: int
    backward: bool
    call: int  # number of the forward of a block that it belongs to; -1 outside of blocks
    begin_ns: int
    own_end_ns: int = 0  # 0: no end was marked
    recomputed: list[tuple[int, int]] = field(default_factory=list)  # from when to when


class _Clock:
    """The spans of one pass. Over a device a time is the number of a moment of its stream, until the pass is over: then the
    thread waits for the last one, and all are translated."""

    def __init__(self, accelerator: Accelerator | None) -> None:
        self.accelerator = accelerator
        self.moments: list[Any] = []
        self.n_calls = 0
        self.spans = [_Span(-1, False, -1, self.now())]
        self.end_ns = 0

    def now(self) -> int:
        if self.accelerator is None:
            return _now_ns()
        self.moments.append(self.accelerator.moment())
        return len(self.moments) - 1

    def mark(self, block: int, backward: bool, call: int) -> None:
        self.spans.append(_Span(block, backward, call, self.now()))

    def mark_end(self, block: int, backward: bool) -> None:
        last = self.spans[-1]
        if last.block == block and last.backward == backward and not last.own_end_ns:
            last.own_end_ns = self.now()

    def mark_head(self) -> None:
        """Forward is over. What followed the last block is the head; without blocks it is the first phase."""
        last = self.spans[-1]
        if last.block >= 0:
            self.spans.append(_Span(-1, False, -1, last.own_end_ns or self.now()))

    def finish(self) -> None:
        """Backward is over. What followed the last block is the tail."""
        last = self.spans[-1]
        self.end_ns = self.now()
        if not last.backward or last.block >= 0:
            self.spans.append(_Span(-1, True, -1, (last.backward and last.own_end_ns) or self.end_ns))
        if self.accelerator is not None:
            self._translate(self.accelerator)

    def _translate(self, accelerator: Accelerator) -> None:
        base = self.moments[0]
        times = [accelerator.elapsed_ns(base, moment) for moment in self.moments]
        self.moments.clear()
        for span in self.spans:
            span.begin_ns = times[span.begin_ns]
            span.own_end_ns = times[span.own_end_ns] if span.own_end_ns else 0
            span.recomputed = [(times[begin], times[end]) for begin, end in span.recomputed]
        self.end_ns = times[self.end_ns]

    def seconds(self) -> list[Seconds]:
        """Of each span: its own part without recomputation, what followed, and recomputation."""
        found = []
        for span, end in zip(self.spans, [*(after.begin_ns for after in self.spans[1:]), self.end_ns], strict=True):
            own_end = min(span.own_end_ns or end, end)
            again = sum(last - first for first, last in span.recomputed)
            found.append(((own_end - span.begin_ns - again) / 1e9, (end - own_end) / 1e9, again / 1e9))
        return found


class _Rehearsal:
    """The twin, its blocks watched, and the passes it has made."""

    def __init__(
        self,
        twin: nn.Module,
        blocks: list[nn.Module],
        run: DryRun,
        groups: list[list[int]],
        recompute: bool,
        accelerator: Accelerator | None,
        compiled: set[int],
    ) -> None:
        self.twin, self.run, self.recompute, self.accelerator = twin, run, recompute, accelerator
        self.compiled = compiled  # numbers of blocks that are, or have a part that is: they are recomputed to their end
        self.calls = run.calls()
        self.group_of: dict[int, _Group] = {}
        self.stands_for: dict[int, list[int]] = {}  # a call that does not run -> those like it that do
        for calls in groups:
            group = _Group()
            self.group_of |= dict.fromkeys(calls, group)
            self.stands_for |= dict.fromkeys(calls[RUN_OF_ALIKE:], calls[:RUN_OF_ALIKE])
        self.clock = _Clock(accelerator)
        self.first_pass = True
        self.replaced = [(block, block.__dict__.get("forward")) for block in blocks]
        self.forwards = [block.forward for block in blocks]
        for number, block in enumerate(blocks):
            block.__dict__["forward"] = partial(self._watched, number)
        self.handles = [p.register_post_accumulate_grad_hook(_drop) for p in twin.parameters() if p.requires_grad]

    def close(self) -> None:
        """The twin is its own again, and nothing here holds it: an exception may live on."""
        for block, forward in self.replaced:
            del block.__dict__["forward"]
            if forward is not None:
                block.__dict__["forward"] = forward
        for handle in self.handles:
            handle.remove()
        self.replaced.clear()
        self.forwards.clear()
        del self.twin

    def one_pass(self, args: Any, kwargs: dict[str, Any]) -> list[Seconds]:
        """Forward and backward; seconds of each phase, as `_Clock.seconds` gives them."""
        clock = self.clock = _Clock(self.accelerator)
        args, kwargs = tree_map(keycaches.as_now, (args, kwargs))
        with torch.enable_grad():
            output = self.twin(*args, **kwargs)
            starts = starts_of(output)
            if not starts:
                raise RehearsalError("no output of the model requires a gradient; call it with labels, or unfreeze parameters")
            seeds = [None if start.numel() == 1 else torch.ones_like(start) for start in starts]
            clock.mark_head()
            torch.autograd.backward(starts, seeds)
            clock.finish()
        order = [(span.block, span.backward) for span in clock.spans]
        expected = [(phase.block, phase.backward) for phase in self.run.phases]
        if order != expected:
            same = next((n for n, (a, b) in enumerate(zip(order, expected, strict=False)) if a != b), len(expected))
            raise OtherWayError(f"its blocks run in another order than in the dry run, from phase {same} on")
        self.first_pass = False
        return clock.seconds()

    def _watched(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        """The forward of block `number`, with marks where its phases begin and end."""
        clock = self.clock
        call = clock.n_calls
        clock.n_calls += 1
        if call >= len(self.calls) or self.calls[call][0] != number:
            raise OtherWayError(f"forward {call} of a block is not the one that it was in the dry run")
        clock.mark(number, False, call)
        keycaches.note(number, args, kwargs)
        output = self._forward(call, self.forwards[number], args, kwargs)
        keycaches.drop(args, kwargs)
        watch_backward(
            tensors_in(output),
            tensors_in((args, kwargs)),
            lambda: clock.mark(number, True, call),
            lambda: clock.mark_end(number, True),
        )
        clock.mark_end(number, False)
        return output

    def _forward(self, call: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = self.group_of.get(call)
        if call in self.stands_for:
            assert group is not None
            given = tree_flatten((args, kwargs))
            if group.through is None or (self.first_pass and group.given != _kind_of(given)):
                raise _UnlikeError(f"forward {call} of a block is not like those before it")
            return group.through.make(given[0])
        output = self._run(call, forward, args, kwargs)
        if group is not None and self.first_pass:
            self._learn(call, group, args, kwargs, output)
        return output

    def _run(self, call: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.recompute:
            return forward(*args, **kwargs)
        number = self.calls[call][0]
        beginning = Beginning(self.replaced[number][0])
        timed = as_given(as_begun(partial(self._timed, forward), beginning), args, kwargs)
        output = checkpoint(
            timed, *args, use_reentrant=False, determinism_check="none", preserve_rng_state=False,
            early_stop=number not in self.compiled, **kwargs,
        )  # fmt: skip
        beginning.settle()
        return output

    def _timed(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if _graph_task() == -1:
            return forward(*args, **kwargs)
        clock = self.clock
        begin = clock.now()
        try:
            return forward(*args, **kwargs)
        finally:  # it may end by an exception, when all that was saved is back
            clock.spans[-1].recomputed.append((begin, clock.now()))

    def _learn(self, call: int, group: _Group, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """How those like this one are passed by, from one that ran."""
        arguments = tree_flatten((args, kwargs))
        given, through = _kind_of(arguments), _find_through(arguments[0], output)
        if through is None or group.given not in (None, given):
            raise _UnlikeError(f"what forward {call} of a block returns is not made like what it is given")
        group.given, group.through = given, through


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


# ---- memory ----


def _needed_bytes(run: DryRun, passed_by: Sequence[int], recompute: bool) -> int:
    """The highest live bytes of a pass beside the parameters, at most: the dry run's, less what blocks that do not run keep."""
    entries = [phase.checkpoint_entry_bytes if recompute else phase.keep_entry_bytes for phase in run.phases]
    peaks = [phase.checkpoint_peak_bytes if recompute else phase.keep_peak_bytes for phase in run.phases]
    calls = run.calls()
    for call in passed_by:
        _, forward, backward = calls[call]
        held = max(entries[forward + 1] - entries[forward], 0) if backward else 0
        for number in range(forward + 1, backward):
            peaks[number] -= held
    return run.fixed_bytes + max(peaks)


# ---- the times ----


def _medians(passes: list[list[Seconds]]) -> list[Seconds]:
    return [tuple(statistics.median(part) for part in zip(*phase, strict=True)) for phase in zip(*passes, strict=True)]  # type: ignore[misc]


def _make_times(rehearsal: _Rehearsal, passes: list[list[Seconds]]) -> Times:
    """The medians; a block that did not run computes as long as the median of those that stand for it. Recomputation takes what
    it took; where blocks were kept, the part of their forward's phase that it comes to."""
    phases = _medians(passes)
    spans = [(number, span) for number, span in enumerate(rehearsal.clock.spans) if span.call >= 0]
    forward = {span.call: number for number, span in spans if not span.backward}
    backward = {span.call: number for number, span in spans if span.backward}
    for call, others in rehearsal.stands_for.items():
        for numbers in (forward, backward):
            if call in numbers:
                own, again = (statistics.median(phases[numbers[other]][part] for other in others) for part in (0, 2))
                phases[numbers[call]] = (own, phases[numbers[call]][1], again)
    if not rehearsal.recompute:
        parts = rehearsal.run.recomputed_parts()
        for call, number in backward.items():
            phases[number] = (*phases[number][:2], sum(phases[forward[call]][:2]) * parts[number])
    return Times(tuple((own + after, again) for own, after, again in phases))


def _repeat(rehearsal: _Rehearsal, batch: Any, memo: dict[int, Any], device: torch.device) -> list[list[Seconds]]:
    """Passes, after one that does not count, until they are enough."""
    rehearsal.one_pass(*copy_batch(batch, memo, device))
    passes: list[list[Seconds]] = []
    lengths: list[float] = []
    while True:
        passes.append(rehearsal.one_pass(*copy_batch(batch, memo, device)))
        lengths.append(sum(own + after for own, after, _ in passes[-1]))
        most = max(LEAST_SECONDS, sum(lengths[:LEAST_PASSES])) + MORE_SECONDS
        steady = statistics.median(lengths) <= (1 + STEADY) * min(lengths)
        over = sum(lengths) >= LEAST_SECONDS and (steady or sum(lengths) + min(lengths) > most)
        if len(passes) >= LEAST_PASSES and over:
            return passes


# ---- all of it ----


@contextmanager
def _random_states_kept(compute: Compute) -> Iterator[None]:
    state = compute.random_state()
    try:
        with randomness.kept():
            yield
    finally:
        compute.set_random_state(state)


def _attempt(
    model: nn.Module,
    ring: Ring,
    batch: Any,
    blocks: Sequence[nn.Module],
    run: DryRun,
    groups: list[list[int]],
    recompute: bool,
    accelerator: Accelerator | None,
) -> Times:
    with torch.no_grad(), DisableTorchFunction():
        twin, memo = make_twin(model, ring)
    compiled = {number for number, block in enumerate(blocks) if has_compiled(block)}
    rehearsal = _Rehearsal(twin, [memo[id(block)] for block in blocks], run, groups, recompute, accelerator, compiled)
    try:
        return _make_times(rehearsal, _repeat(rehearsal, batch, memo, ring.device))
    finally:
        rehearsal.close()


def _rehearse_once(
    model: nn.Module,
    batch: Any,
    blocks: Sequence[nn.Module],
    run: DryRun,
    groups: list[list[int]],
    memory_bytes: int,
    accelerator: Accelerator | None,
) -> Times:
    """With activations kept where that fits memory, else recomputed."""
    try:
        ring = Ring(model, accelerator)
        passed_by = [call for group in groups for call in group[RUN_OF_ALIKE:]]
        needs = [ring.bytes + _needed_bytes(run, passed_by, recompute) for recompute in (False, True)]
        if min(needs) > memory_bytes:
            raise _MemoryError(f"it takes {format_bytes(min(needs))} of memory, and {format_bytes(memory_bytes)} may be used")
        return _attempt(model, ring, batch, blocks, run, groups, needs[0] > memory_bytes, accelerator)
    except RehearsalError as error:
        traceback.clear_frames(error.__traceback__)  # they hold the twin
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise RehearsalError(str(error) if isinstance(error, Error) else one_line(error)) from error


def rehearse(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    blocks: Sequence[nn.Module],
    run: DryRun,
    *,
    memory_bytes: int | None = None,
    compute: Compute | None = None,
) -> Times:
    """Measure what each phase of a training step of this batch computes, without training.

    Args:
        model: where it computes, on CPU or on meta, not wrapped; only read.
        args, kwargs: what the model is called with; tensors where it computes or on the CPU, with values as in training.
        blocks: modules of the model, as `find_blocks` finds them.
        run: the dry run of the same model, batch and blocks.
        memory_bytes: what may be used of the memory of what computes; None: what is free less a reserve.
        compute: what computes; None: the CPU.

    Returns:
        Seconds of each phase of `run`, in its order.

    Raises:
        RehearsalError: the model does not run, or not in this memory.
        OtherWayError: not in the order of `run`.
    """
    compute = compute or Compute()
    accelerator = compute if isinstance(compute, Accelerator) else None
    memory_bytes = compute.default_memory_bytes() if memory_bytes is None else memory_bytes
    batch = (tuple(args), dict(kwargs))
    alike = [group for group in _find_alike(blocks, run) if len(group) > RUN_OF_ALIKE]
    with uncounted(), _random_states_kept(compute), nothing_left_out(), eager():
        try:
            if alike:
                try:
                    return _rehearse_once(model, batch, blocks, run, alike, memory_bytes, accelerator)
                except _MemoryError:
                    raise
                except RehearsalError:
                    gc.collect()
            return _rehearse_once(model, batch, blocks, run, [], memory_bytes, accelerator)
        finally:
            gc.collect()
            compute.trim()
