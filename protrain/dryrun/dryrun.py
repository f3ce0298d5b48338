"""The dry run: what one training step of one batch shape holds in memory, before any real step.

A twin of the model (twin.py) runs forward and backward under a meter (meter.py): with every block's activations kept, with every
block recomputed in backward, and with every block swapped (dryswap.py). What it finds is in phases.py.

Each of these runs has a twin of its own and begins as the real step would: with what the model holds, and with the states of
generators. Where a step leaves the model with other tensors or plain values than it found, as one that goes on from what its
forward kept, the step behind it is run too, and the one that takes more is foretold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median_low
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ..base.sizes import stash_least_bytes
from ..errors import DiskError, OutOfMemoryError
from ..model import keycaches
from ..model.compiled import find_compiled
from ..model.fused import find_recurrent
from ..model.held import held_by_modules
from ..model.modulestate import Beginning
from . import handlers
from .answers import Answers, Replies, answered_again
from .dryswap import DryStash
from .fakes import answering
from .knownvalues import KnownValues
from .leftovers import nothing_left
from .meter import Meter, Segment
from .passes import as_begun, as_given, output_tensors, put_forward, starts_of, watch_backward
from .phases import DryRun, DryRunError, Phase, Rounding, by_phase, recomputes
from .twin import Twin, as_now, one_line, own_parametrizations, without_data
from .workspace import Workspace, workspace_bytes

#: What the run whose blocks swap does not see beside SMALL_UNSEEN_BYTES: norms that are clipped (64 bytes for each parameter), a
#: record that was asked for before it was written, and stays. Other runs are upper bounds without it.
UNSEEN_BYTES = 512 << 10


def _loss_outside(output: torch.Tensor) -> torch.Tensor:
    """A loss that the program around the model makes of its output: cross entropy in fp32, as of most outputs that are large."""
    numbers = output.float() if output.dtype != torch.float64 else output
    if numbers.dim() < 2:
        return numbers.square().mean()
    rows = numbers.flatten(0, -2)
    return torch.nn.functional.cross_entropy(rows, torch.empty(len(rows), dtype=torch.int64))


class _Gradients:
    """Holds each chunk's gradients until all of its trained parameters have theirs, as the engine does. Those of a compiled
    module come together, when its backward is through."""

    def __init__(self, meter: Meter, parameters: list[tuple[nn.Parameter, int]], compiled: list[_Whole]) -> None:
        self.meter = meter
        self.members: dict[int, list[nn.Parameter]] = {}  # of each chunk, and of each compiled module below 0
        self.groups: dict[int, list[int]] = {}
        self.complete_segment: dict[int, Segment] = {}
        self.handles = []
        part_of = {id(p): -1 - number for number, part in enumerate(compiled) for p in part.module.parameters()}
        for parameter, chunk in parameters:
            groups = self.groups[id(parameter)] = [chunk, part_of[id(parameter)]] if id(parameter) in part_of else [chunk]
            for group in groups:
                self.members.setdefault(group, []).append(parameter)
            self.handles.append(parameter.register_post_accumulate_grad_hook(self._arrived(chunk, groups)))
        self.missing = {group: len(members) for group, members in self.members.items()}

    def _arrived(self, chunk: int, groups: list[int]) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            self.complete_segment[chunk] = self.meter.segments[-1]
            for group in groups:
                self.missing[group] -= 1
            for group in groups:
                if self.missing[group] == 0:
                    for parameter in self.members[group]:
                        if all(self.missing[other] == 0 for other in self.groups[id(parameter)]):
                            parameter.grad = None
                            self.meter.segments[-1].complete.setdefault(self.groups[id(parameter)][0], 0)

        return hook

    def clear(self) -> None:
        for handle in self.handles:
            handle.remove()
        for members in self.members.values():
            for parameter in members:
                parameter.grad = None


@dataclass
class _Whole:
    """A module of the twin whose forward is one operation, that is compiled in the model or recurrent, and the chunks of its
    parameters. backward: whether its backward is one too."""

    module: nn.Module
    chunks: list[int]
    backward: bool


def _whole(twin: Twin, module: nn.Module, chunk_of_param: dict[int, int], backward: bool) -> _Whole:
    chunks = {chunk_of_param[id(p)] for p in module.parameters() if id(p) in chunk_of_param}
    return _Whole(twin.memo[id(module)], sorted(chunks), backward)


def _mark_whole(meter: Meter, part: _Whole) -> Callable[[], None]:
    """Replaces the twin's forward by one whose chunks are read together. Returns what undoes it."""
    forward = part.module.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        held = meter.held
        meter.read_together(part.chunks)
        output = forward(*args, **kwargs)
        meter.held = held
        if part.backward:
            watch_backward(output_tensors(output), (), lambda: meter.read_together(part.chunks), lambda: None)
        return output

    return put_forward(part.module, marked)


class _Recomputed:
    """What torch's checkpoint gave for a saved tensor: the tensor once it was asked for, which checkpoint answers once."""

    __slots__ = ("packed", "tensor")

    def __init__(self, packed: Any) -> None:
        self.packed = packed
        self.tensor: torch.Tensor | None = None


@contextmanager
def _unpacked_again() -> Iterator[None]:
    """Inside of torch's checkpoint: what is saved can be asked for more than once, as where blocks are recomputed for real, by a
    torch.autograd.Function that reads `ctx.saved_tensors` twice."""
    outer_pack, outer_unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def unpack(saved: _Recomputed) -> Any:
        if saved.tensor is None:
            saved.tensor = outer_unpack(saved.packed)
        return saved.tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Recomputed(outer_pack(tensor)), unpack):
        yield


def _mark_block(meter: Meter, block: nn.Module, number: int, compiled: Sequence[_Whole], mode: str) -> Callable[[], None]:
    """Replaces the twin's forward by one that marks phases, and recomputes or swaps by its mode. Returns what undoes it.

    compiled: what is compiled in the model.
    """
    forward, inside = block.forward, {id(module) for module in block.modules()}
    chunks = next((part.chunks for part in compiled if part.module is block), [])
    early_stop = not any(id(part.module) in inside for part in compiled)

    def marked(*args: Any, **kwargs: Any) -> Any:
        meter.unseen |= get_ident() != meter.thread
        meter.mark(number, False)
        meter.read_together(chunks)
        keycaches.note(number, args, kwargs)
        kept: list[torch.Tensor] = []  # as large as what forward writes to, or puts others in the place of: for its recomputation
        if recomputes(mode):
            again, beginning = answered_again(forward, meter.known_values.replies), Beginning(block)
            copies = beginning.copies()
            output = checkpoint(
                as_given(as_begun(again, beginning), args, kwargs), *args, use_reentrant=False, determinism_check="none",
                preserve_rng_state=False, early_stop=early_stop, context_fn=lambda: (_unpacked_again(), nullcontext()), **kwargs,
            )  # fmt: skip
            kept += [torch.empty_like(value) for value in beginning.settle() if not meter.bytes_of([value])]
            kept += [copy for held, copy, version in copies if held._version != version]
            copies.clear()
        elif mode == "swap":
            stash = DryStash(meter.stashed, meter.leaves, meter.uncounted)
            with torch.autograd.graph.saved_tensors_hooks(stash.pack, stash.unpack):
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        meter.read_together([])
        keycaches.drop(args, kwargs)

        def begins() -> None:
            meter.mark(number, True)
            meter.read_together(chunks)

        def ends() -> None:
            kept.clear()
            meter.mark_end(number, True)

        watch_backward(output_tensors(output), output_tensors((args, kwargs)), begins, ends)
        meter.mark_end(number, False, output_tensors(output))
        return output

    return put_forward(block, marked)


@dataclass
class _Run:
    segments: list[Segment]
    accesses: list[int]
    access_phases: list[int]
    complete: dict[int, int]
    n_together: int
    output_count: int
    record_bytes: int
    outside_bytes: int
    loss_bytes: int
    head_bytes: int
    left_bytes: int

    def accesses_of_phases(self) -> list[list[int]]:
        return by_phase(self.accesses, self.access_phases, len(self.segments))


def _finish_segments(meter: Meter) -> list[Segment]:
    """Segments in order with exactly one head and one tail."""
    if not meter.segments[-1].backward or meter.segments[-1].block >= 0:
        meter.begin(-1, True)
    meter.settle()
    meter.segments[-1].note_after(meter.live_bytes)
    return meter.segments


def _add_unseen(segments: list[Segment], held_bytes: int) -> None:
    """What no dry run sees, and what the program around the model holds until backward: the output of the step before."""
    for segment in segments:
        if not segment.backward:
            segment.entry += held_bytes
            segment.hold(held_bytes)
        segment.hold(UNSEEN_BYTES)


def _run_step(
    twin: Twin,
    args: Any,
    kwargs: Any,
    blocks: list[nn.Module],
    compiled: list[_Whole],
    recurrent: list[_Whole],
    chunks: list[tuple[nn.Parameter, int]],
    round_bytes: Rounding,
    mode: str,
    hold_output: bool,
    workspace: Workspace,
    replies: Replies,
    meters: list[Meter],
) -> _Run:
    chunk_of_storage = {parameter.untyped_storage()._cdata: chunk for parameter, chunk in chunks}
    least_bytes = stash_least_bytes(chunks[0][0].element_size() if chunks else 4)
    known_values = KnownValues(twin.stand_ins, replies)
    meter = Meter(round_bytes, twin.not_counted, chunk_of_storage, workspace, least_bytes, known_values)
    meters.append(meter)
    gradients = _Gradients(meter, [(p, chunk) for p, chunk in chunks if p.requires_grad], compiled)
    undo = [_mark_whole(meter, part) for part in recurrent]
    undo += [_mark_whole(meter, part) for part in compiled if part.module not in blocks]
    undo += [_mark_block(meter, block, number, compiled, mode) for number, block in enumerate(blocks)]
    try:
        with meter, answering(known_values), torch.enable_grad():
            output = twin.model(*args, **kwargs)
            meter.check_seen()
            starts = starts_of(output)
            if not starts:
                raise DryRunError("no output of the model requires a gradient; call it with labels, or unfreeze parameters")
            held_bytes = meter.bytes_of(output_tensors(output)) if hold_output else 0
            outside_bytes, output_count = meter.bytes_of([start for start in starts if start.numel() > 1]), len(starts)
            if not hold_output:
                output = None
            last = meter.segments[-1]
            if last.block >= 0:  # a model that ends in its last block has an empty head
                meter.begin(-1, False)
            last.pending = False
            head_bytes = meter.segments[-1].peak
            meter.begin(-1, False, pending=True)
            loss = meter.segments[-1]
            if outside_bytes:
                sizes = [start.nbytes for start in starts]
                largest = sizes.index(max(sizes))
                starts[largest] = _loss_outside(starts[largest])
            seeds = [None if start.numel() == 1 else torch.empty_like(start) for start in starts]
            torch.autograd.backward(starts, seeds)
            loss_bytes = loss.peak - loss.entry
            if meter.segments[-1] is loss:
                meter.fold()
                loss_bytes = 0  # no block has a backward, and the loss no end
            segments, left_bytes = _finish_segments(meter), meter.live_bytes
            del output, starts, seeds
            if mode == "swap":
                _add_unseen(segments, held_bytes)
                head_bytes += held_bytes + UNSEEN_BYTES
    finally:
        gradients.clear()
        for put_back in reversed(undo):
            put_back()
    number_of = meter.numbers()
    complete = {chunk: number_of(segment) for chunk, segment in gradients.complete_segment.items()}
    read = [access for access, _ in groupby((chunk, number_of(segment)) for chunk, segment in meter.accesses)]
    accesses, phases = [chunk for chunk, _ in read], [number for _, number in read]
    means = [sum(sizes) // len(sizes) for sizes in meter.saved.values()]
    record_bytes = median_low(means) if means else 0
    return _Run(
        segments, accesses, phases, complete, meter.n_together, output_count, record_bytes, outside_bytes, loss_bytes, head_bytes,
        left_bytes,
    )  # fmt: skip


def _phase(keep: Segment, recompute: Segment, swap: Segment | None, own_accesses: int) -> Phase:
    phase = Phase(
        keep.block, keep.backward, keep.entry, keep.peak, recompute.entry, recompute.peak, keep.working, keep.small,
        keep.flops, keep.moved, keep.operations, keep_after_bytes=keep.after, checkpoint_after_bytes=recompute.after,
        small_live_bytes=keep.small_live,
    )  # fmt: skip
    if swap is not None:
        phase = replace(
            phase, swap_entry_bytes=swap.entry, swap_peak_bytes=swap.peak, swap_after_bytes=swap.after,
            small_bytes=keep.small + swap.left,
        )  # fmt: skip
    if keep.block < 0 or not keep.backward:
        return phase
    return replace(
        phase,
        again_flops=max(recompute.flops - keep.flops, 0),
        again_moved_bytes=max(recompute.moved - keep.moved, 0),
        again_operations=max(recompute.operations - keep.operations, 0),
        own_accesses=own_accesses,
    )


def _own_accesses(keep: list[int], recompute: list[int]) -> int:
    """How many accesses of a backward with its recomputation are those that it makes without; 0: they do not end as those do."""
    return len(keep) if recompute[-len(keep) :] == keep else 0


def _less_bytes(runs: Sequence[_Run], chunk: int, phase: int) -> int:
    """By how much less is live behind a chunk's completion in the phase than behind the first one, in each of the runs; 0: it is
    not complete there in all of them."""
    found = []
    for run in runs:
        segment = run.segments[phase]
        found.append(segment.after - segment.after_each().get(chunk, segment.after))
    return min(found)


@dataclass
class _Trial:
    """Of one mode, on a twin of its own. runs: of a step, and where that left the model with other tensors or plain values than
    it found, of the one behind it; meter: of the first; fixed_bytes, batch_bytes: of the twin, which is gone."""

    fixed_bytes: int
    batch_bytes: int
    runs: list[_Run] = field(default_factory=list)
    meter: Meter | None = None


def _seen_bytes(tried: dict[str, _Trial], mode: str, n_blocks: int) -> int:
    """About what a step holds at the least that ended too early, by the run of this mode and the one that keeps: what was live at
    once, as blocks that were not reached go on, and each block once more beside it, as its backward will have it. 0: none was
    reached."""
    keep, other = tried["keep"], tried.get(mode)
    if keep.meter is None or other is None or other.meter is None:
        return 0
    blocks = [segment for segment in keep.meter.segments if segment.block >= 0 and not segment.backward]
    if not blocks:
        return 0
    again_bytes = max(segment.peak - segment.entry for segment in blocks)
    in_the_end = other.meter.segments[-1].entry * max(n_blocks, len(blocks)) // len(blocks)
    return keep.fixed_bytes + max(*(segment.peak for segment in other.meter.segments), in_the_end + again_bytes)


def _peaks(run: DryRun) -> tuple[int, int]:
    return run.checkpoint_peak_bytes, run.keep_peak_bytes


def _order(run: _Run) -> list[tuple[int, bool]]:
    return [(segment.block, segment.backward) for segment in run.segments]


def _join(keep: _Run, recompute: _Run, swap: _Run | None, fixed_bytes: int) -> DryRun:
    """The runs side by side.

    Raises:
        DryRunError: the phases of two differ, so that one cannot stand for the other.
    """
    if _order(keep) != _order(recompute):
        raise DryRunError("its blocks run in another order when they are recomputed")
    runs = [keep, recompute]
    third: Sequence[Segment | None] = [None] * len(keep.segments)
    if swap is not None and _order(swap) == _order(keep):
        runs, third = [*runs, swap], swap.segments
    own = map(_own_accesses, keep.accesses_of_phases(), recompute.accesses_of_phases())
    phases = tuple(_phase(*of_phase) for of_phase in zip(keep.segments, recompute.segments, third, own, strict=True))
    chunks = sorted({*keep.complete, *recompute.complete})  # a model may take another branch the second time
    complete = {chunk: max(keep.complete.get(chunk, 0), recompute.complete.get(chunk, 0)) for chunk in chunks}
    return DryRun(
        phases,
        tuple(recompute.accesses),
        tuple(recompute.access_phases),
        complete,
        fixed_bytes,
        max(keep.n_together, recompute.n_together),
        keep.output_count,
        max(phase.keep_peak_bytes for phase in phases),
        max(phase.checkpoint_peak_bytes for phase in phases),
        keep.record_bytes,
        keep.outside_bytes,
        keep.loss_bytes,
        {chunk: less for chunk, phase in complete.items() if (less := _less_bytes(runs, chunk, phase))},
        (keep.head_bytes, recompute.head_bytes, swap.head_bytes if len(runs) == 3 and swap is not None else 0),
        left_bytes=keep.left_bytes,
    )


@handlers.waiting()
def dry_run(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    blocks: Sequence[nn.Module],
    chunk_of_param: dict[int, int],
    *,
    round_bytes: Rounding,
    hold_output: bool = True,
    workspace: Workspace = workspace_bytes,
    answers: Answers | None = None,
) -> DryRun:
    """Predict what one training step of this batch holds in memory.

    Args:
        model: on CPU or meta; only read.
        args, kwargs: what the model is called with; tensors of any device, only their shapes count.
        blocks: modules of the model, as `find_blocks` finds them.
        chunk_of_param: id of each parameter -> number of its chunk.
        round_bytes: what the allocator counts for a request of so many bytes.
        workspace: what kernels hold inside themselves, on the device that is to train.
        hold_output: the caller of the model still holds its whole output, not only the loss, while backward runs.
        answers: what a forward of such a batch with data was answered, where values are not known.

    Raises:
        DryRunError: the model cannot run without data (control flow that depends on values, custom kernels), runs on a thread of
            its own, or has nothing to train.
    """
    tried: dict[str, _Trial] = {}

    def in_mode(mode: str) -> _Trial:
        with without_data(model, args, kwargs, chunk_of_param, round_bytes) as (twin, fake_args, fake_kwargs):
            trial = _Trial(twin.fixed_bytes, twin.batch_bytes)
            fake_blocks = [twin.memo[id(block)] for block in blocks]
            chunks = [(twin.memo[id(p)], chunk_of_param[id(p)]) for p in model.parameters() if id(p) in chunk_of_param]
            compiled = [_whole(twin, part, chunk_of_param, True) for _, part in find_compiled(model)]
            recurrent = [_whole(twin, part, chunk_of_param, False) for part in find_recurrent(model)]

            def step() -> None:
                given, named = tree_map(as_now, (fake_args, fake_kwargs))  # containers of its own
                with own_parametrizations(), nothing_left(twin.model) as meters:
                    try:
                        found = _run_step(
                            twin, given, named, fake_blocks, compiled, recurrent, chunks, round_bytes, mode, hold_output,
                            workspace, Replies(answers), meters,
                        )  # fmt: skip
                        trial.runs.append(found)
                    finally:
                        trial.meter = trial.meter or meters[0]

            first = tried.get("keep")
            before = held_by_modules(twin.model) if first is None else []
            tried[mode] = trial
            step()
            if held_by_modules(twin.model) != before if first is None else len(first.runs) == 2:
                with suppress(Exception):  # what the program does between two steps is missing
                    step()
        return trial

    try:
        keep, swap = in_mode("keep"), None
    except (DiskError, OutOfMemoryError):
        raise
    except Exception as error:
        if not tried:
            raise
        for mode in ("checkpoint", "swap"):
            with suppress(Exception):  # they end where this one did
                in_mode(mode)
        reason = error.reason if isinstance(error, DryRunError) else one_line(error)
        raise DryRunError(reason, [_seen_bytes(tried, mode, len(blocks)) for mode in ("checkpoint", "swap")]) from error
    recompute = in_mode("checkpoint") if blocks else keep
    if blocks and not find_compiled(model):
        with suppress(Exception):  # then what swapping cannot do without is not known
            swap = in_mode("swap")
    found = _join(keep.runs[0], recompute.runs[0], swap.runs[0] if swap is not None else None, keep.fixed_bytes)
    if len(keep.runs) == len(recompute.runs) == 2:
        third = swap.runs[1] if swap is not None and len(swap.runs) == 2 else None
        with suppress(DryRunError):
            found = max(found, _join(keep.runs[1], recompute.runs[1], third, keep.fixed_bytes), key=_peaks)
    varies = answers is not None and answers.varies
    return replace(found, batch_bytes=keep.batch_bytes, varies=varies)


def dry_forward(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    evaluates: bool,
    round_bytes: Rounding,
    workspace: Workspace = workspace_bytes,
) -> int:
    """Predict the most, in bytes, that a forward of this batch without gradients holds in memory at once, its output among it:
    beside parameters, buffers and the batch.

    Args:
        evaluates: as in eval mode; else as the model's modules are now. The others are `dry_run`'s.

    Raises:
        DryRunError: the model cannot run without data, or runs on a thread of its own.
    """
    # In inference mode composite operations reach no meter in their parts, which are what takes memory.
    with (
        torch.inference_mode(False), torch.no_grad(),
        without_data(model, args, kwargs, {}, round_bytes) as (twin, fake_args, fake_kwargs),
    ):  # fmt: skip
        if evaluates:
            twin.model.train(False)
        meter = Meter(round_bytes, twin.not_counted, {}, workspace, 0, KnownValues(twin.stand_ins))
        with own_parametrizations(), nothing_left(twin.model) as meters:
            meters.append(meter)
            given, named = tree_map(as_now, (fake_args, fake_kwargs))  # objects of its own
            with meter:
                twin.model(*given, **named)
            meter.check_seen()
    return meter.segments[-1].peak
