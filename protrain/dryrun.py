"""The dry run: what one training step of one batch shape holds in memory, before any real step.

A twin of the model, of fake tensors that have shapes and no data, runs forward and backward: with every block's activations kept,
with every block recomputed in backward, and with every block swapped (dryswap.py). Each new storage is counted when an operation
returns it and discounted when it dies, so the live bytes are those of the real step: activations, temporaries, gradients until
their chunk is complete. What CPU kernels allocate inside themselves is not seen by fake tensors; it is measured or comes from a
table (workspace.py).

The real model is only read: its values, gradients, flags, hooks and random states stay as they are.
"""

from __future__ import annotations

import copy
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median_low
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from . import fakes, keycaches, randomness
from .compiled import CALL, eager, find_compiled
from .counting import uncounted
from .dryswap import DryStash
from .errors import Error
from .flops import flops_of, ordinary_seconds
from .knownvalues import KnownValues
from .modulestate import Beginning
from .sizes import stash_least_bytes
from .workspace import Workspace, tensors_in, workspace_bytes

Rounding = Callable[[int], int]

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__

#: What no dry run sees: tensors that plain numbers become in operations. Up to 12 KB were found, whatever the number of blocks.
SMALL_UNSEEN_BYTES = 16 << 10

#: And what none of blocks that swap sees: norms that are clipped (64 bytes for each parameter), a record that was asked for
#: before it was written, and stays. Other runs are upper bounds without it.
UNSEEN_BYTES = 512 << 10


class DryRunError(Error):
    """The model cannot run on fake tensors; `reason` says why, in one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model cannot be measured without running it: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Phase:
    """One phase of a step (csrc/plan/plan.h): bytes when it began and at its highest, in the run that keeps and in the one that
    recomputes; and, in the one that keeps, the most that was live at once of what was made in the phase itself, and what a block
    saved there that swap leaves in memory, as it is too small. `block` is the number of the block, -1 outside of blocks. flops,
    moved_bytes and operations are of the run that keeps: what its operations compute (matrix products, convolutions, attention; a
    multiply-add is two), read and write, and how many they are. Of a block's backward again_flops, again_moved_bytes and
    again_operations are what recomputation adds to that: it stops at the last tensor that the block saved, but for one that is
    compiled, which runs to its end; operations -1: not known. swap_entry_bytes, swap_peak_bytes: in the run that swaps, at the
    least; a peak of 0: not known. own_accesses: so many of the accesses in it, the last, are the backward's own, and the others
    those of recomputation; 0: not known. keep_after_bytes, checkpoint_after_bytes, swap_after_bytes: the highest in each run from
    the first moment on at which a chunk's gradients were complete in it; 0: none were, or not known."""

    block: int
    backward: bool
    keep_entry_bytes: int
    keep_peak_bytes: int
    checkpoint_entry_bytes: int
    checkpoint_peak_bytes: int
    keep_working_bytes: int = 0
    small_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0
    operations: int = 0
    again_flops: int = 0
    again_moved_bytes: int = 0
    again_operations: int = -1
    swap_entry_bytes: int = 0
    swap_peak_bytes: int = 0
    own_accesses: int = 0
    keep_after_bytes: int = 0
    checkpoint_after_bytes: int = 0
    swap_after_bytes: int = 0


def _by_phase(accesses: Sequence[int], access_phases: Sequence[int], n_phases: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(n_phases)]
    for chunk, number in zip(accesses, access_phases, strict=True):
        found[number].append(chunk)
    return found


def recomputes(mode: str) -> bool:
    """Whether a block of this mode runs its forward again in backward."""
    return mode.startswith("checkpoint")


@dataclass(frozen=True)
class DryRun:
    """What a step of one batch shape holds in memory and which chunks it reads.

    phases: before the blocks, forward of each block, head, backward of each block, tail.
    accesses: chunks in the order operations read them, with recomputation; in one phase one after another differs.
    access_phases: number of the phase in which each access happens.
    complete_phase: chunk -> number of the phase in which the last of its gradients comes; chunks that get none are left out.
    less_bytes: chunk -> by how much less is live behind its completion than behind the first one in that phase, in every run;
        what is not there is 0 or not known.
    fixed_bytes: batch, buffers, and parameters outside of all chunks.
    n_together: the most chunks that one operation, or one compiled module, reads.
    output_count: outputs that backward starts from.
    record_bytes: the mean size of what a block saves in one storage that the stash takes, and of blocks the median; 0: nothing,
        or not known.
    outside_bytes: outputs of which the program around the model makes its loss; 0: the model makes it.
    loss_bytes: from when the model has returned to when backward is at its first block, at most, by how much more than at its
        beginning is live; 0: no block has a backward.
    keep_peak_bytes, checkpoint_peak_bytes: the highest of all phases in each run, without fixed_bytes and parameters.
    """

    phases: tuple[Phase, ...]
    accesses: tuple[int, ...]
    access_phases: tuple[int, ...]
    complete_phase: dict[int, int]
    fixed_bytes: int
    n_together: int
    output_count: int
    keep_peak_bytes: int
    checkpoint_peak_bytes: int
    record_bytes: int = 0
    outside_bytes: int = 0
    loss_bytes: int = 0
    less_bytes: dict[int, int] = field(default_factory=dict)

    def calls(self) -> list[tuple[int, int, int]]:
        """For each forward of a block: the block, and the numbers of its phases of forward and backward (0: it has none)."""
        forwards = [(phase.block, number) for number, phase in enumerate(self.phases) if phase.block >= 0 and not phase.backward]
        backwards: dict[int, list[int]] = {}
        for number, phase in enumerate(self.phases):
            if phase.block >= 0 and phase.backward:
                backwards.setdefault(phase.block, []).append(number)
        # A block that is used twice runs backward in the reverse order.
        return [(block, number, backwards[block].pop() if backwards.get(block) else 0) for block, number in forwards]

    def accesses_with(self, block_modes: Sequence[str]) -> list[int]:
        """The order in which a step reads chunks whose blocks have these modes. Where it is not known which accesses are those of
        a backward itself, it is the last to each chunk."""
        found: list[int] = []
        for number, accesses in enumerate(self.accesses_of_phases()):
            phase = self.phases[number]
            if not phase.backward or phase.block < 0 or recomputes(block_modes[phase.block]):
                found += accesses
            elif phase.own_accesses:
                found += accesses[-phase.own_accesses :]
            else:
                found += reversed(dict.fromkeys(reversed(accesses)))
        return found

    def accesses_of_phases(self) -> list[list[int]]:
        """`accesses`, for each phase its own."""
        return _by_phase(self.accesses, self.access_phases, len(self.phases))

    def with_loss(self, more_bytes: int) -> DryRun:
        """With a loss that takes so much more than was foreseen."""
        if not more_bytes:
            return self
        head = max(number for number, phase in enumerate(self.phases) if not phase.backward)
        phase = self.phases[head]
        raised = replace(
            phase,
            keep_peak_bytes=phase.keep_peak_bytes + more_bytes,
            checkpoint_peak_bytes=phase.checkpoint_peak_bytes + more_bytes,
            keep_working_bytes=phase.keep_working_bytes + more_bytes,
            swap_peak_bytes=phase.swap_peak_bytes + more_bytes if phase.swap_peak_bytes else 0,
        )
        phases = (*self.phases[:head], raised, *self.phases[head + 1 :])
        return replace(
            self,
            phases=phases,
            keep_peak_bytes=max(phase.keep_peak_bytes for phase in phases),
            checkpoint_peak_bytes=max(phase.checkpoint_peak_bytes for phase in phases),
        )

    def counted(self) -> list[tuple[int, int, int]]:
        """Of each phase, nothing recomputed: what it computes, the bytes it reads and writes, and its operations."""
        return [(phase.flops, phase.moved_bytes, phase.operations) for phase in self.phases]

    def recomputed(self) -> dict[int, tuple[int, int, int]]:
        """Number of a block's backward -> what recomputation computes there, the bytes it reads and writes, and its operations:
        those of the whole forward where they are not known."""
        found: dict[int, tuple[int, int, int]] = {}
        for _, forward, backward in self.calls():
            whole, part = self.phases[forward], self.phases[backward]
            if backward and part.again_operations >= 0:
                found[backward] = (part.again_flops, part.again_moved_bytes, part.again_operations)
            elif backward:
                found[backward] = (whole.flops, whole.moved_bytes, whole.operations)
        return found

    def recomputed_parts(self) -> dict[int, float]:
        """Number of a block's backward -> the part of its forward's time that recomputation takes, as counted operations do."""
        forward = {backward: self.phases[number] for _, number, backward in self.calls()}
        parts: dict[int, float] = {}
        for number, again in self.recomputed().items():
            whole = ordinary_seconds(forward[number].flops, forward[number].moved_bytes, forward[number].operations)
            parts[number] = min(ordinary_seconds(*again) / whole, 1.0) if whole > 0 else 1.0
        return parts


# ---- counting ----


@dataclass
class _Segment:
    """Live bytes from one mark to the next. `pending`: the end of a block so far, the head or the tail if nothing follows."""

    block: int
    backward: bool
    entry: int
    peak: int
    pending: bool = False
    lowest: int = field(init=False)  # so far
    working: int = 0  # by how much it rose above the lowest before, at most
    small: int = 0  # what a block saved, too small for the stash, but for its outputs
    complete: dict[int, int] = field(default_factory=dict)  # chunk -> the highest from its completion to the next
    flops: int = 0
    moved: int = 0  # bytes
    operations: int = 0

    def __post_init__(self) -> None:
        self.lowest = self.entry

    def rise(self, live_bytes: int) -> None:
        self.peak, self.working = max(self.peak, live_bytes), max(self.working, live_bytes - self.lowest)
        self.note_after(live_bytes)

    def note_after(self, live_bytes: int) -> None:
        """So many are live now; it counts behind a completion."""
        if self.complete:
            latest = next(reversed(self.complete))
            self.complete[latest] = max(self.complete[latest], live_bytes)

    @property
    def after(self) -> int:
        """The highest behind the first completion; 0: there is none."""
        return max(self.complete.values(), default=0)

    def after_each(self) -> dict[int, int]:
        """chunk -> the highest behind its completion."""
        found: dict[int, int] = {}
        highest = 0
        for chunk, live_bytes in reversed(self.complete.items()):
            found[chunk] = highest = max(highest, live_bytes)
        return found

    def hold(self, n_bytes: int) -> None:
        """So many more are live throughout."""
        self.peak += n_bytes
        self.complete = {chunk: live_bytes + n_bytes for chunk, live_bytes in self.complete.items()}

    def absorb(self, end: _Segment) -> None:
        """What followed belongs to this segment as well."""
        self.rise(end.peak)
        self.complete.update({chunk: live_bytes for chunk, live_bytes in end.complete.items() if chunk not in self.complete})
        self.working, self.lowest = max(self.working, end.working), min(self.lowest, end.lowest)
        self.flops, self.moved, self.operations = self.flops + end.flops, self.moved + end.moved, self.operations + end.operations


@dataclass
class _Sum:
    """What autograd adds up of two gradients, and whether it really does so in place."""

    first: int  # storage of the one that the other is added to
    live_bytes: int  # with a new tensor for it
    segment: _Segment
    in_place: bool = False


class _Meter(TorchDispatchMode):
    """Counts live storages and reads of chunks, in segments."""

    def __init__(
        self,
        round_bytes: Rounding,
        not_counted: set[int],
        chunk_of_storage: dict[int, int],
        workspace: Workspace,
        least_bytes: int,
        known_values: KnownValues,
    ) -> None:
        super().__init__()
        self.known_values = known_values
        self.least_bytes = least_bytes  # of what the stash takes
        self.workspace = workspace
        self.round_bytes = round_bytes
        self.known: dict[int, Any] = dict.fromkeys(not_counted)
        self.chunk_of_storage = chunk_of_storage
        self.live_bytes = 0
        self.accesses: list[tuple[int, _Segment]] = []
        self.n_together = 1
        self.held: set[int] = set()  # chunks that a compiled module has read together, until another is read
        self.segments = [_Segment(-1, False, 0, 0)]
        self.saved: dict[int, list[int]] = {}  # of each block, sizes of the storages that the stash takes
        self.outputs: set[int] = set()  # storages that are outputs of blocks
        self.absorbed: list[tuple[_Segment, _Segment]] = []  # an end and the segment that it became a part of
        self.counts = True  # what is made
        self.sum: _Sum | None = None  # until the next operation
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tensors of the program that are no part of the model
        self.thread = get_ident()  # whose operations are seen
        self.unseen = False  # whether a block ran on another

    def check_seen(self) -> None:
        """Whether the forward that is over ran where its operations are seen.

        Raises:
            DryRunError: it ran on another thread, or a block of it did.
        """
        nothing = not self.accesses and not any(segment.operations for segment in self.segments)
        if self.unseen or nothing:
            raise DryRunError("its forward runs on a thread of its own, where operations are not seen")

    def begin(self, block: int, backward: bool, pending: bool = False) -> None:
        """A segment begins, and the one before it ends."""
        self.settle()
        self.segments[-1].note_after(self.live_bytes)
        self.segments.append(_Segment(block, backward, self.live_bytes, self.live_bytes, pending=pending))

    def mark(self, block: int, backward: bool) -> None:
        """A phase begins; an open end of a block was part of that block's phase."""
        self.fold()
        self.begin(block, backward)

    def fold(self) -> None:
        """An open end was part of the segment before."""
        self.settle()
        if self.segments[-1].pending:
            end = self.segments.pop()
            end.note_after(self.live_bytes)
            self.segments[-1].absorb(end)
            self.absorbed.append((end, self.segments[-1]))

    def mark_end(self, block: int, backward: bool, outputs: Sequence[torch.Tensor] = ()) -> None:
        """A block is through; what follows is the head or the tail if no other block begins."""
        last = self.segments[-1]
        if last.block == block and last.backward == backward:
            self.outputs.update(output.untyped_storage()._cdata for output in outputs)
            self.begin(-1, backward, pending=True)

    def settle(self) -> None:
        """It is known where the last sum of two gradients lies: in the first, which is gone then, as nobody else had it, or in
        new memory. Autograd never adds in place where it is watched as here."""
        if self.sum is not None and not self.sum.in_place:
            self.sum.segment.rise(self.sum.live_bytes)
        self.sum = None

    def _drop(self, key: int, size: int, segment: _Segment) -> None:
        if self.sum is not None and key == self.sum.first:
            self.sum.in_place = True
        if self.known.pop(key, None) is not None:
            self.live_bytes -= size
            self.segments[-1].lowest = min(self.segments[-1].lowest, self.live_bytes)
            if segment.block >= 0 and not segment.backward and self.segments[-1].backward:
                if size >= self.least_bytes:
                    self.saved.setdefault(segment.block, []).append(size)
                elif key not in self.outputs:
                    segment.small += size
        self.outputs.discard(key)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        size = self._size(storage) if self.counts else 0
        segment = self.segments[-1]

        def drop(_: Any, key: int = key, size: int = size) -> None:
            self._drop(key, size, segment)

        self.known[key] = weakref.ref(storage, drop)
        self.live_bytes += size

    def _size(self, storage: Any) -> int:
        return self.round_bytes(storage.nbytes()) if storage.nbytes() else 0

    def bytes_of(self, tensors: Sequence[torch.Tensor]) -> int:
        """Of what was counted."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        return sum(self._size(storage) for key, storage in storages.items() if self.known.get(key) is not None)

    def stashed(self, storage: Any) -> bool:
        """Whether the stash takes it: what the model has and what is small stays in memory."""
        return self.known.get(storage._cdata) is not None and self._size(storage) >= self.least_bytes

    def uncounted(self, make: Callable[[], Any]) -> Any:
        """What `make` makes is in memory already."""
        self.counts = False
        try:
            return make()
        finally:
            self.counts = True

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor that the program has beside the model, as a constant of a module. It is only read.

        Raises:
            DryRunError: it is to be trained.
        """
        if isinstance(tensor, FakeTensor) or not tensor.dim():
            return tensor
        if tensor.requires_grad:
            raise DryRunError("its forward reads a tensor that requires a gradient and is no part of it")
        if id(tensor) not in self.own:
            made = _fake(tensor)
            self.own[id(tensor)] = tensor, made
            self.known[made.untyped_storage()._cdata] = None
            self.known_values.know(made, tensor)
        return self.own[id(tensor)][1]

    def _read(self, inputs: Sequence[Any]) -> None:
        chunks: list[int] = []
        for tensor in tensors_in(inputs):
            chunk = self.chunk_of_storage.get(tensor.untyped_storage()._cdata)
            if chunk is not None and chunk not in chunks:
                chunks.append(chunk)
        if not self.held.issuperset(chunks):
            self.held = set()
            self._note_read(chunks)

    def read_together(self, chunks: Sequence[int]) -> None:
        """What a compiled module reads, which is about to run, forward or backward; nothing: it is through."""
        self._note_read(chunks)
        self.held = set(chunks)

    def _note_read(self, chunks: Sequence[int]) -> None:
        self.n_together = max(self.n_together, len(chunks))
        segment = self.segments[-1]
        for chunk in chunks:
            if not self.accesses or self.accesses[-1][0] != chunk or self.accesses[-1][1] is not segment:
                self.accesses.append((chunk, segment))

    def numbers(self) -> Callable[[_Segment], int]:
        """The number of a segment, and of one that became a part of another, among the final segments."""
        number_of = {id(segment): number for number, segment in enumerate(self.segments)}
        for end, owner in reversed(self.absorbed):
            number_of[id(end)] = number_of[id(owner)]
        return lambda segment: number_of[id(segment)]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's guard against it costs more than the counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two calls of three: autograd asks where a tensor is
            return args[0].fake_device
        self.settle()
        inputs = [*args, *(kwargs or {}).values()]
        if func not in _LIFTS and any(type(tensor) is not FakeTensor and tensor.dim() for tensor in tensors_in(inputs)):
            args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs or {}))
            inputs = [*args, *kwargs.values()]
        result = fakes.call(self.known_values, self.workspace, func, args, kwargs or {})
        if not func.is_view:
            self._read(inputs)
        outputs = list(tensors_in([result]))
        for tensor in outputs:
            self._count(tensor)
        workspace = self.workspace(func, args, kwargs or {}, outputs)
        segment = self.segments[-1]
        added = func is torch.ops.aten.add.Tensor and sys._getframe(1).f_code is _RUN_BACKWARD  # by autograd itself
        if added and _becomes(args[0], result):
            self.sum = _Sum(args[0].untyped_storage()._cdata, self.live_bytes, segment)
        else:
            segment.rise(self.live_bytes + workspace)
        if not func.is_view:
            segment.operations += 1
            segment.moved += sum(tensor.numel() * tensor.element_size() for tensor in (*tensors_in(inputs), *outputs))
            segment.flops += flops_of(func.overloadpacket, args, kwargs or {}, result)
        return result


#: What makes a tensor that a program writes number by number one of the others.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default)


def _becomes(gradient: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether another gradient that is added to this one may be added in place, if nobody else has it. A view has what it is a
    view of, and so is not the only one that has its memory."""
    same = gradient.shape == total.shape and gradient.dtype == total.dtype and not gradient._is_view()
    return same and gradient.untyped_storage().nbytes() == total.untyped_storage().nbytes()


# ---- the twin ----

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def _is_the_models_own(hook: Any) -> bool:
    """Without it the forward is another one: weight norm and its like compute parameters in hooks, and functions of transformers
    take the hidden states there that are asked for, put on once for all forwards. They keep nothing of the model they are on."""
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return where.startswith("torch.nn.utils") or (isinstance(hook, types.FunctionType) and where.startswith("transformers."))


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, strides, type and flag, without data, on the CPU; called inside the fake mode."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


#: Of which there are no copies.
LOCKS = (type(threading.Lock()), type(threading.RLock()))


@dataclass
class _Twin:
    model: nn.Module
    memo: dict[int, Any]
    not_counted: set[int] = field(default_factory=set)  # storages
    fixed_bytes: int = 0
    alive: list[Any] = field(default_factory=list)  # keeps the storages' addresses from being used again
    stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # of what is no parameter; the real ones


def _make_twin(model: nn.Module, chunk_of_param: dict[int, int], round_bytes: Rounding) -> _Twin:
    memo: dict[int, Any] = {}
    twin = _Twin(model, memo)

    def note(tensor: Any, fixed: bool) -> None:
        if not isinstance(tensor, torch.Tensor) or id(tensor) in memo:
            return
        plain = type(tensor) in (torch.Tensor, nn.Parameter) or type(tensor).__module__.startswith("protrain.")
        if tensor.layout is not torch.strided or not plain:
            raise DryRunError(f"a tensor of the model is a {type(tensor).__name__} of layout {tensor.layout}, not a plain one")
        memo[id(tensor)] = made = _fake(tensor)
        storage = made.untyped_storage()
        twin.alive.append(storage)
        twin.not_counted.add(storage._cdata)
        if not isinstance(tensor, nn.Parameter):
            twin.stand_ins.append((made, tensor))
        if fixed and storage.nbytes():
            twin.fixed_bytes += round_bytes(storage.nbytes())

    for parameter in model.parameters():
        note(parameter, id(parameter) not in chunk_of_param)
        memo[id(parameter.grad)] = None
    for module in model.modules():
        own = {name: value for name, value in module.__dict__.items() if name not in ("_parameters", "_modules")}
        for value in tree_leaves(own, is_leaf=lambda v: isinstance(v, nn.Module)):
            for tensor in keycaches.tensors_held(value):
                note(tensor, tensor is value)  # what an object has was made by the program, which counts nowhere
            if isinstance(value, LOCKS):
                memo[id(value)] = value
            if isinstance(value, torch.Generator):  # whose own way of being copied makes a tensor
                memo[id(value)] = value.clone_state()
        for name in _HOOKS:
            hooks = module.__dict__.get(name)
            if hooks is not None:
                memo[id(hooks)] = OrderedDict((k, v) for k, v in hooks.items() if _is_the_models_own(v))
    memo.pop(id(None), None)
    try:
        twin.model = copy.deepcopy(model, memo)
    except Exception as error:
        raise DryRunError(f"the model cannot be copied: {_one_line(error)}") from error
    for module in model.modules():
        _put_forward_back(module, memo[id(module)])
        if isinstance(module, _BatchNorm) and module.momentum is None:  # a mean of all batches, which reads how many they were
            memo[id(module)].momentum = 0.1
    return twin


def _put_forward_back(module: nn.Module, copied: nn.Module) -> None:
    """A forward that protrain replaced in the real module is its own again in the twin, and nothing is compiled there."""
    copied.__dict__.pop(CALL, None)
    forward = module.__dict__.get("forward")
    if not (isinstance(forward, types.FunctionType) and forward.__globals__.get("__name__", "").startswith("protrain.")):
        return
    while isinstance(forward, types.FunctionType) and forward.__globals__.get("__name__", "").startswith("protrain."):
        forward = getattr(forward, "__wrapped__", None)
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        copied.__dict__["forward"] = types.MethodType(forward.__func__, copied)
    elif forward is not None:
        copied.__dict__["forward"] = forward


def _one_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ---- a step ----


def _starts(output: Any) -> list[torch.Tensor]:
    """What backward starts from: the loss where there is one, or several, which are added up then; else every float output that
    requires a gradient. A single number behind other outputs is the loss where it is made of them."""

    def is_loss(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad

    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if is_loss(loss):
        return [loss]  # type: ignore[list-item]
    first = output
    if isinstance(output, dict) and output:
        first = next(iter(output.values()))
    elif isinstance(output, (tuple, list)) and output:
        first = output[0]
    leaves = [leaf for leaf in _output_tensors(output) if leaf.requires_grad and leaf.is_floating_point()]
    losses = [leaf for leaf in leaves if is_loss(leaf)]
    return losses if is_loss(first) or (losses and _made_of(losses, leaves)) else leaves


def _made_of(losses: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether all the outputs are among what the losses were computed from."""
    wanted = {output.grad_fn for output in outputs}
    seen = {loss.grad_fn for loss in losses}
    queue = deque(seen)
    while queue and not wanted <= seen:
        for node, _ in getattr(queue.popleft(), "next_functions", ()):
            if node is not None and node not in seen:
                seen.add(node)
                queue.append(node)
    return wanted <= seen


def _output_tensors(output: Any) -> list[torch.Tensor]:
    return [tensor for leaf in tree_flatten(output)[0] for tensor in keycaches.tensors_held(leaf)]


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

    def __init__(self, meter: _Meter, parameters: list[tuple[nn.Parameter, int]], compiled: list[_Compiled]) -> None:
        self.meter = meter
        self.members: dict[int, list[nn.Parameter]] = {}  # of each chunk, and of each compiled module below 0
        self.groups: dict[int, list[int]] = {}
        self.complete_segment: dict[int, _Segment] = {}
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


def watch_backward(
    outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], begins: Callable[[], None], ends: Callable[[], None]
) -> None:
    """Of a module that was just called: `begins` is called once, when the first gradient of its outputs comes in backward, `ends`
    when that of its first input has come."""
    began = False

    def first(_: torch.Tensor) -> None:
        nonlocal began
        if not began:
            began = True
            begins()

    for tensor in outputs:
        if tensor.requires_grad:
            tensor.register_hook(first)
    given = next((t for t in inputs if t.requires_grad), None)
    if given is not None:
        given.register_hook(lambda _: ends())


@dataclass
class _Compiled:
    """A module of the twin whose like in the model is compiled, and the chunks of its parameters."""

    module: nn.Module
    chunks: list[int]


def _compiled(twin: _Twin, module: nn.Module, chunk_of_param: dict[int, int]) -> _Compiled:
    chunks = {chunk_of_param[id(p)] for p in module.parameters() if id(p) in chunk_of_param}
    return _Compiled(twin.memo[id(module)], sorted(chunks))


def _mark_compiled(meter: _Meter, part: _Compiled) -> Callable[[], None]:
    """Replaces the twin's forward by one whose chunks are read together, in backward too. Returns what undoes it."""
    forward = part.module.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        held = meter.held
        meter.read_together(part.chunks)
        output = forward(*args, **kwargs)
        meter.held = held
        watch_backward(_output_tensors(output), (), lambda: meter.read_together(part.chunks), lambda: None)
        return output

    return _put_forward(part.module, marked)


def _put_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """The module's forward is another one. Returns what undoes it."""
    replaced = module.__dict__.get("forward")
    module.__dict__["forward"] = forward

    def undo() -> None:
        if replaced is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = replaced

    return undo


def as_given(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The forward, to be run with these arguments, and then again: lists, dicts and caches of keys among them, which it may
    change, are as they were."""
    leaves, spec = tree_flatten((args, kwargs))
    leaves, caches = keycaches.copied(leaves)
    if not caches and not any(isinstance(value, list | dict) for value in (*args, *kwargs.values())):
        return forward
    runs = iter((False, True))

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(runs, True):
            args, kwargs = tree_unflatten(leaves, spec)
        return forward(*args, **kwargs)

    return run


def as_begun(forward: Callable[..., Any], beginning: Beginning) -> Callable[..., Any]:
    """The forward, to be run and then again: the second time its block is as the first one found it."""
    runs = iter((False, True))

    def run(*args: Any, **kwargs: Any) -> Any:
        if not next(runs, True):
            return forward(*args, **kwargs)
        with beginning.restored():
            return forward(*args, **kwargs)

    return run


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


def _mark_block(meter: _Meter, block: nn.Module, number: int, compiled: Sequence[_Compiled], mode: str) -> Callable[[], None]:
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
        keycaches.note(args, kwargs)
        kept: list[torch.Tensor] = []  # as large as what forward puts others in the place of, which its recomputation needs
        if recomputes(mode):
            beginning = Beginning(block)
            output = checkpoint(
                as_given(as_begun(forward, beginning), args, kwargs), *args, use_reentrant=False, determinism_check="none",
                preserve_rng_state=False, early_stop=early_stop, context_fn=lambda: (_unpacked_again(), nullcontext()), **kwargs,
            )  # fmt: skip
            kept += [torch.empty_like(value) for value in beginning.settle() if not meter.bytes_of([value])]
        elif mode == "swap":
            stash = DryStash(meter.stashed, meter.uncounted)
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

        watch_backward(_output_tensors(output), _output_tensors((args, kwargs)), begins, ends)
        meter.mark_end(number, False, _output_tensors(output))
        return output

    return _put_forward(block, marked)


@dataclass
class _Run:
    segments: list[_Segment]
    accesses: list[int]
    access_phases: list[int]
    complete: dict[int, int]
    n_together: int
    output_count: int
    record_bytes: int
    outside_bytes: int
    loss_bytes: int

    def accesses_of_phases(self) -> list[list[int]]:
        return _by_phase(self.accesses, self.access_phases, len(self.segments))


def _finish_segments(meter: _Meter) -> list[_Segment]:
    """Segments in order with exactly one head and one tail."""
    if not meter.segments[-1].backward or meter.segments[-1].block >= 0:
        meter.begin(-1, True)
    meter.settle()
    meter.segments[-1].note_after(meter.live_bytes)
    return meter.segments


def _add_unseen(segments: list[_Segment], held_bytes: int) -> None:
    """What no dry run sees, and what the program around the model holds until backward: the output of the step before."""
    for segment in segments:
        if not segment.backward:
            segment.entry += held_bytes
            segment.hold(held_bytes)
        segment.hold(UNSEEN_BYTES)


def _run_step(
    twin: _Twin,
    args: Any,
    kwargs: Any,
    blocks: list[nn.Module],
    compiled: list[_Compiled],
    chunks: list[tuple[nn.Parameter, int]],
    round_bytes: Rounding,
    mode: str,
    hold_output: bool,
    workspace: Workspace,
) -> _Run:
    chunk_of_storage = {parameter.untyped_storage()._cdata: chunk for parameter, chunk in chunks}
    least_bytes = stash_least_bytes(chunks[0][0].element_size() if chunks else 4)
    meter = _Meter(round_bytes, twin.not_counted, chunk_of_storage, workspace, least_bytes, KnownValues(twin.stand_ins))
    gradients = _Gradients(meter, [(p, chunk) for p, chunk in chunks if p.requires_grad], compiled)
    undo = [_mark_compiled(meter, part) for part in compiled if part.module not in blocks]
    undo += [_mark_block(meter, block, number, compiled, mode) for number, block in enumerate(blocks)]
    try:
        with meter, torch.enable_grad():
            output = twin.model(*args, **kwargs)
            meter.check_seen()
            starts = _starts(output)
            if not starts:
                raise DryRunError("no output of the model requires a gradient; call it with labels, or unfreeze parameters")
            held_bytes = meter.bytes_of(_output_tensors(output)) if hold_output else 0
            outside_bytes, output_count = meter.bytes_of([start for start in starts if start.numel() > 1]), len(starts)
            if not hold_output:
                output = None
            last = meter.segments[-1]
            if last.block >= 0:  # a model that ends in its last block has an empty head
                meter.begin(-1, False)
            last.pending = False
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
            segments = _finish_segments(meter)
            del output, starts, seeds
            if mode == "swap":
                _add_unseen(segments, held_bytes)
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
    return _Run(segments, accesses, phases, complete, meter.n_together, output_count, record_bytes, outside_bytes, loss_bytes)


def _fake_batch(twin: _Twin, args: Any, kwargs: Any, round_bytes: Rounding) -> tuple[Any, Any]:
    """The batch without data; each of its storages is counted once, in fixed_bytes, and of one that has more than the batch, as
    where rows are taken from a whole data set, what the batch has of it."""
    storages: dict[int, tuple[Any, int]] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in twin.memo:
            return twin.memo[id(tensor)]  # type: ignore[no-any-return]
        twin.memo[id(tensor)] = made = _fake(tensor)
        twin.alive.append(made.untyped_storage())
        twin.stand_ins.append((made, tensor))
        twin.not_counted.add(made.untyped_storage()._cdata)
        real = tensor.untyped_storage()
        _, before = storages.get(real._cdata, (real, 0))
        storages[real._cdata] = real, before + tensor.numel() * tensor.element_size()
        return made

    def convert_leaf(leaf: Any) -> Any:
        held = list(keycaches.tensors_held(leaf))
        if not held or isinstance(leaf, torch.Tensor):
            return convert(leaf) if held else keycaches.with_tensors(leaf, convert)
        return copy.deepcopy(leaf, {id(tensor): convert(tensor) for tensor in held})  # an object, as of a dataclass

    converted = tree_map(convert_leaf, (args, kwargs))
    sizes = (min(real.nbytes(), own_bytes) for real, own_bytes in storages.values())
    twin.fixed_bytes += sum(round_bytes(size) for size in sizes if size)
    return converted  # type: ignore[no-any-return]


def _as_now(leaf: Any) -> Any:
    """Of an object that has tensors, or a cache, a copy."""
    if isinstance(leaf, torch.Tensor) or next(keycaches.tensors_held(leaf), None) is None:
        return keycaches.as_now(leaf)
    return copy.copy(leaf)


def _phase(keep: _Segment, recompute: _Segment, swap: _Segment | None, own_accesses: int) -> Phase:
    phase = Phase(
        keep.block, keep.backward, keep.entry, keep.peak, recompute.entry, recompute.peak, keep.working, keep.small,
        keep.flops, keep.moved, keep.operations, keep_after_bytes=keep.after, checkpoint_after_bytes=recompute.after,
    )  # fmt: skip
    if swap is not None:
        phase = replace(phase, swap_entry_bytes=swap.entry, swap_peak_bytes=swap.peak, swap_after_bytes=swap.after)
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
    third: Sequence[_Segment | None] = [None] * len(keep.segments)
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
    )


@contextmanager
def _own_parametrizations() -> Iterator[None]:
    """What torch.nn.utils.parametrize.cached() keeps of the twin is apart from what it keeps of others, and goes."""
    before = parametrize._cache
    parametrize._cache = {}
    try:
        yield
    finally:
        parametrize._cache = before


@contextmanager
def _without_data(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], chunk_of_param: dict[int, int], round_bytes: Rounding
) -> Iterator[tuple[_Twin, Any, Any]]:
    """The model's twin and its batch, inside the fake mode; random states stay as they are.

    Raises:
        DryRunError: something inside failed.
    """
    random_state = torch.get_rng_state()
    try:
        with (
            uncounted(), randomness.kept(), torch._C.DisableTorchFunctionSubclass(), fakes.without_questions(kwargs),
            fakes.nothing_left_out(), fakes.quiet(), eager(), FakeTensorMode(),
        ):  # fmt: skip
            twin = _make_twin(model, chunk_of_param, round_bytes)
            yield twin, *_fake_batch(twin, tuple(args), kwargs, round_bytes)
    except DryRunError:
        raise
    except Exception as error:
        raise DryRunError(_one_line(error)) from error
    finally:
        torch.set_rng_state(random_state)


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

    Raises:
        DryRunError: the model cannot run without data (control flow that depends on values, custom kernels), runs on a thread of
            its own, or has nothing to train.
    """
    with _without_data(model, args, kwargs, chunk_of_param, round_bytes) as (twin, fake_args, fake_kwargs):
        fake_blocks = [twin.memo[id(block)] for block in blocks]
        chunks = [(twin.memo[id(p)], chunk_of_param[id(p)]) for p in model.parameters() if id(p) in chunk_of_param]
        compiled = [_compiled(twin, part, chunk_of_param) for _, part in find_compiled(model)]

        def in_mode(mode: str) -> _Run:
            given, named = tree_map(_as_now, (fake_args, fake_kwargs))  # containers of its own
            with _own_parametrizations():
                return _run_step(twin, given, named, fake_blocks, compiled, chunks, round_bytes, mode, hold_output, workspace)

        keep, swap = in_mode("keep"), None
        recompute = in_mode("checkpoint") if fake_blocks else keep
        if fake_blocks and not compiled:
            with suppress(Exception):  # then what swapping cannot do without is not known
                swap = in_mode("swap")
    return _join(keep, recompute, swap, twin.fixed_bytes)


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
        _without_data(model, args, kwargs, {}, round_bytes) as (twin, fake_args, fake_kwargs),
    ):  # fmt: skip
        if evaluates:
            twin.model.train(False)
        meter = _Meter(round_bytes, twin.not_counted, {}, workspace, 0, KnownValues(twin.stand_ins))
        with _own_parametrizations(), meter:
            output = twin.model(*fake_args, **fake_kwargs)
        meter.check_seen()
        del output
    return meter.segments[-1].peak
