"""What lives and what is read while a twin of fake tensors runs (twin.py), by segments from one mark to the next.

Each new storage is counted when an operation returns it and discounted when it dies, so live bytes are those of the real step:
activations, temporaries, gradients until their chunk is complete. What CPU kernels allocate inside themselves is not seen by fake
tensors; it is measured or comes from a table (workspace.py).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from . import fakes, handlers
from .flops import flops_of
from .knownvalues import KnownValues
from .phases import SMALL_TENSOR_BYTES, DryRunError, Rounding
from .twin import fake_of
from .workspace import Workspace, tensors_in

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


@dataclass
class Segment:
    """Live bytes from one mark to the next. `pending`: the end of a block so far, the head or the tail if nothing follows."""

    block: int
    backward: bool
    entry: int
    peak: int
    pending: bool = False
    lowest: int = field(init=False)  # so far
    working: int = 0  # by how much it rose above the lowest before, at most
    small: int = 0  # what a block saved, too small for the stash, but for its outputs
    left: int = 0  # what a block saved that the stash leaves in memory though it is not small
    complete: dict[int, int] = field(default_factory=dict)  # chunk -> the highest from its completion to the next
    flops: int = 0
    moved: int = 0  # bytes
    operations: int = 0
    small_live: int = 0  # of small tensors at its highest

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

    def absorb(self, end: Segment) -> None:
        """What followed belongs to this segment as well."""
        self.rise(end.peak)
        self.complete.update({chunk: live_bytes for chunk, live_bytes in end.complete.items() if chunk not in self.complete})
        self.working, self.lowest = max(self.working, end.working), min(self.lowest, end.lowest)
        self.small_live = max(self.small_live, end.small_live)
        self.flops, self.moved, self.operations = self.flops + end.flops, self.moved + end.moved, self.operations + end.operations


@dataclass
class _Sum:
    """What autograd adds up of two gradients, and whether it really does so in place."""

    first: int  # storage of the one that the other is added to
    live_bytes: int  # with a new tensor for it
    segment: Segment
    in_place: bool = False


class Meter(TorchDispatchMode):
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
        self.live_bytes = self.small_bytes = 0
        self.accesses: list[tuple[int, Segment]] = []
        self.n_together = 1
        self.held: set[int] = set()  # chunks that a compiled module has read together, until another is read
        self.segments = [Segment(-1, False, 0, 0)]
        self.saved: dict[int, list[int]] = {}  # of each block, sizes of the storages that the stash takes
        self.outputs: set[int] = set()  # storages that are outputs of blocks
        self.left_in: set[int] = set()  # storages that the stash leaves in memory though they are not small
        self.absorbed: list[tuple[Segment, Segment]] = []  # an end and the segment that it became a part of
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
        now = self.live_bytes
        self.segments.append(Segment(block, backward, now, now, pending=pending, small_live=self.small_bytes))

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

    def _drop(self, key: int, size: int, segment: Segment) -> None:
        if self.sum is not None and key == self.sum.first:
            self.sum.in_place = True
        if self.known.pop(key, None) is not None:
            self.live_bytes -= size
            self.small_bytes -= size if size <= SMALL_TENSOR_BYTES else 0
            self.segments[-1].lowest = min(self.segments[-1].lowest, self.live_bytes)
            if segment.block >= 0 and not segment.backward and self.segments[-1].backward:
                if size >= self.least_bytes:
                    self.saved.setdefault(segment.block, []).append(size)
                elif key not in self.outputs:
                    segment.small += size
        self.outputs.discard(key)
        self.left_in.discard(key)

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
        if size <= SMALL_TENSOR_BYTES:
            self.small_bytes += size
            segment.small_live = max(segment.small_live, self.small_bytes)

    def _size(self, storage: Any) -> int:
        return self.round_bytes(storage.nbytes()) if storage.nbytes() else 0

    def bytes_of(self, tensors: Sequence[torch.Tensor]) -> int:
        """Of what was counted."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        return sum(self._size(storage) for key, storage in storages.items() if self.known.get(key) is not None)

    def left(self) -> list[Any]:
        """Storages of what was made and is still there."""
        found = [ref() for ref in self.known.values() if ref is not None]
        return [storage for storage in found if storage is not None]

    def stashed(self, storage: Any) -> bool:
        """Whether the stash takes it: what the model has and what is small stays in memory."""
        return self.known.get(storage._cdata) is not None and self._size(storage) >= self.least_bytes

    def leaves(self, storage: Any) -> None:
        """The stash leaves it in memory, though it takes others like it: it stays from this block's forward to its backward."""
        if storage._cdata not in self.left_in:
            self.left_in.add(storage._cdata)
            self.segments[-1].left += self._size(storage)

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
            made = fake_of(tensor)
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

    def numbers(self) -> Callable[[Segment], int]:
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
        handlers.let_in()
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
