"""Residency: where each parameter lies, and that it lies there when it is looked at.

A parameter is a view of its chunk's home in memory or of its slot, and goes along, with the views of it that the program keeps,
where the chunk gets another place. One of a chunk on disk is in its slot during the operation that reads it (`bring`), and in
backward until the node of the graph that asked for it is done (`unpack_parameter`).
What autograd saves of a slot is recognised by its storage and replaced by a record, since other bytes lie there a moment later.
The waiting and reading itself is the engine's (csrc/runtime/residency.c). It also shuts the storage of each chunk on disk that is
not in use: who reads it then, past all that demands, is refused (csrc/torch/storage.h). So is who reads where a chunk lay in
memory, as a graph or a view of before, once the chunk has other values than it had when it went.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _core
from ..errors import BudgetError, Error
from ..model.parameters import ChunkTensor, ChunkView, DisableTorchFunction, Owner, enchain, release
from ..model.views import Views
from ..profiling.device_clock import DeviceClock
from .activations import SavedParameter, check_version
from .loads import PARAMETERS, Loads
from .otherhooks import n_backwards
from .outside import outside_modes
from .wrapped import Wrapped

#: Under this name a node of the graph has its mark among its metadata.
_MARK = "protrain_mark"


def _mark_of_node() -> object | None:
    """Of the node of the graph that runs: an object of its own, which dies with it, so that no other node ever has the same; None
    where none runs. To hold on to the node itself would be to hold on to its graph, and so, unseen by Python, to the model."""
    node = torch._C._current_autograd_node()
    return None if node is None else node.metadata.setdefault(_MARK, object())  # type: ignore[attr-defined]


def storage_of(tensor: torch.Tensor) -> int:
    """Which storage the tensor shows; 0: none, as torch's zeros that take no memory, of forward-mode AD."""
    return 0 if tensor._is_zerotensor() else tensor.untyped_storage()._cdata


@dataclass(eq=False)
class _Node:
    """A node of the graph, by its mark, of a graph task, the chunks that are held for it, and the thread that runs it."""

    mark: object | None
    task: int
    thread: int = field(default_factory=threading.get_ident)
    chunks: set[int] = field(default_factory=set)


class Residency:
    """Of one session's parameters. owner: whom parameters on disk turn to when they are used; over_homes: by chunk, what others
    have made over its memory, which goes with its place."""

    def __init__(self, wrapped: Wrapped, engine: _core.Engine, owner: Owner, device_clock: DeviceClock | None = None) -> None:
        self._layout, self._params, self._element_bytes = wrapped.layout, wrapped.params, wrapped.element_bytes
        self._engine, self.owner, self._compute = engine, owner, wrapped.compute
        self._device_clock = device_clock
        self.loads = Loads(engine)
        self._demand = engine.demand if device_clock is None else self._demand_over_device
        self._bases: dict[int, torch.Tensor] = {}  # chunk -> its region as one flat tensor
        self._begins: dict[int, int] = {}  # chunk -> where its region begins
        self._stays: dict[int, tuple[int, list[StorageWeakRef]]] = {}  # chunk in memory -> where it lies, all storages over that
        self._left: dict[int, list[StorageWeakRef]] = {}  # chunk -> those over memory that it lay in, which has its values still
        self.over_homes: dict[int, Any] = {}
        self._views = Views()
        self._offsets = [[self._layout.entries[i].offset_bytes for i in members] for members in self._layout.members]
        self._chunk_of_storage: dict[int, int] = {}  # of those on disk that have a place
        self.own_slots = 0  # that were made since slots were
        self._unbound: int | None = None  # a chunk that gets, or has got, a slot of its own, until its parameters lie there
        self.filling: set[int] = set()  # chunks whose parameters get their first values, in use until that is over
        self._loans: list[int] = []  # chunks whose addresses were given away, in use
        self._nodes: list[_Node] = []  # whose chunks are held: each waits for a backward that runs inside of it, but for the last

    # ---- where parameters lie ----

    def bind(self, chunk: int) -> None:
        """Make the chunk's parameters views of where the chunk lies now."""
        with outside_modes():
            self._bind(chunk)

    def _bind(self, chunk: int) -> None:
        self.unbind(chunk)
        base = self._bases[chunk] = self._compute.base(self._engine, chunk, self._layout.dtype)
        self._begins[chunk] = base.data_ptr()
        in_memory = self._engine.in_memory(chunk)
        self._note_stay(chunk, base.untyped_storage() if in_memory else None)
        for index in self._layout.members[chunk]:
            p = self._params[index]
            with DisableTorchFunction():
                p.data = self.place(index)
            if in_memory:
                release(p)
            else:
                enchain(p, self.owner, index)
        for view in self._views.of(chunk):
            self._views.put(view, base)
        if not in_memory:  # from here on nothing is laid over a place that is not in use
            self._chunk_of_storage[base.untyped_storage()._cdata] = chunk
            self._engine.guard(chunk, base.untyped_storage())

    def _note_stay(self, chunk: int, storage: torch.UntypedStorage | None) -> None:
        """The chunk lies in memory, under this storage, or does not."""
        begin, refs = self._stays.pop(chunk, (0, []))
        refs = [ref for ref in refs if not ref.expired()]
        if storage is None or begin != self._begins[chunk]:
            if refs:
                self._left.setdefault(chunk, []).extend(refs)
            refs = []
        if storage is not None:
            self._stays[chunk] = self._begins[chunk], [*refs, StorageWeakRef(storage)]

    def note_changed(self, numbers: Iterable[int]) -> None:
        """These parameters have other values: where their chunks lay in memory before is not read as theirs any more."""
        for chunk in {self._layout.entries[number].chunk for number in numbers} if self._left else ():
            for ref in self._left.pop(chunk, ()):
                left = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
                if left is not None:  # what the engine guarded before stays shut
                    self._engine.guard(chunk, left)
                    self._engine.guard(chunk, self._guarded(chunk))

    def is_shown(self, chunk: int, own: Counter[int]) -> bool:
        """Whether something shows the memory of a chunk that lies in memory beside its parameters, as what `.data` or detach()
        gave does. own: how many parameters have each storage."""
        storage, *others = self._storages(chunk)  # two uses: the tensor's and this one
        return bool(others) or torch._C._storage_Use_Count(storage._cdata) > 2 + own[storage._cdata]

    def _storages(self, chunk: int) -> list[torch.UntypedStorage]:
        """Those that lie over a chunk in memory: its own, and of those from before it was last away what is alive."""
        storage = self._bases[chunk].untyped_storage()
        stayed = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._stays.get(chunk, (0, []))[1]]
        return [storage, *(other for other in stayed if other is not None and other._cdata != storage._cdata)]

    def part(self, chunk: int) -> None:
        """What shows the memory of a chunk that lies in memory has a copy of it from now on, as it was; parameters keep it."""
        with torch.no_grad(), DisableTorchFunction():
            for storage in self._storages(chunk):
                copy = self._bases[chunk].clone()
                _core.swap_memory(storage._cdata, storage_of(copy))
        self._stays.pop(chunk, None)
        self._views.part(chunk)
        self.bind(chunk)

    def part_views(self, number: int, values: Callable[[], torch.Tensor]) -> None:
        """Views of a parameter on disk show what it was from now on, `values`."""
        entry = self._layout.entries[number]
        if any(view._protrain[1] == number for view in self._views.of(entry.chunk)):
            self._views.part_from(entry.chunk, number, values(), entry.offset_bytes)

    def shown(self, tensor: torch.Tensor) -> int | None:
        """The parameter on disk whose bytes the tensor shows; None: it shows another's."""
        chunk = self._chunk_of_storage.get(storage_of(tensor))
        return None if chunk is None else self._number_at(chunk, tensor)

    def shows(self, value: torch.Tensor, number: int) -> bool:
        """Whether a tensor is parameter `number`, which is on disk, all of it and as it lies."""
        if not isinstance(value, ChunkView) or value._protrain != (self.owner, number):
            return False
        with DisableTorchFunction():
            p = self._params[number]
            same = (value.dtype, value.shape, value.stride()) == (p.dtype, p.shape, p.stride())
            return same and value.storage_offset() == p.storage_offset() and not value.is_conj() and not value.is_neg()

    def who_shows(self, number: int) -> list[int]:
        """Parameters in memory whose `.data` shows this parameter, which is on disk."""
        chunk = self._layout.entries[number].chunk
        if chunk not in self._bases:
            return []
        storage = storage_of(self._bases[chunk])
        with DisableTorchFunction():
            others = [i for i, p in enumerate(self._params) if not isinstance(p, ChunkTensor) and storage_of(p) == storage]
            return [i for i in others if self.shown(self._params[i]) == number]

    def _guarded(self, chunk: int) -> torch.UntypedStorage | None:
        """The storage of a chunk on disk that has a place."""
        storage = self._bases[chunk].untyped_storage() if chunk in self._bases else None
        return storage if storage is not None and storage._cdata in self._chunk_of_storage else None

    def bind_all(self) -> None:
        for chunk in range(self._layout.n_chunks):
            self.bind(chunk)

    def unbind(self, chunk: int) -> None:
        """The chunk has no place any more; its parameters are the caller's. What shows the place still is never read again."""
        base = self._bases.pop(chunk, None)
        if base is not None and self._chunk_of_storage.pop(base.untyped_storage()._cdata, None) is not None:
            self._engine.guard(chunk, None)

    def unbind_all(self) -> None:
        """Parameters and views of them keep their shapes over one shared element, so that slots can go."""
        nothing = torch.zeros((), dtype=self._layout.dtype, device=self._compute.device)
        with DisableTorchFunction():
            for p in self._params:
                p.data = nothing.expand(p.shape)
        self._views.lift_all()
        self.forget()

    def watch_all(self) -> None:
        """Parameters have no place: each use of one, also of those in memory, turns to the session first."""
        for number, p in enumerate(self._params):
            enchain(p, self.owner, number)

    def forget(self) -> None:
        """Slots and homes go, wherever parameters lie now."""
        self.own_slots = 0
        self._unbound = None
        for chunk in list(self._bases):
            self.unbind(chunk)
        self.over_homes.clear()

    def bound(self) -> Iterator[int]:
        """The parameters of the chunks that have a place."""
        for chunk in list(self._bases):
            yield from self._layout.members[chunk]

    def place(self, number: int) -> torch.Tensor:
        """A view of where the values of parameter `number` lie, of its shape and strides. One without elements lies nowhere."""
        entry = self._layout.entries[number]
        if not entry.count:
            return torch.empty_strided(entry.shape, entry.strides, dtype=self._layout.dtype, device=self._compute.device)
        first = entry.offset_bytes // self._element_bytes
        return self._bases[entry.chunk].as_strided(entry.shape, entry.strides, first)

    def base(self, chunk: int) -> torch.Tensor:
        """Where a chunk lies, which is bound, as one flat tensor."""
        return self._bases[chunk]

    def begin(self, chunk: int) -> int | None:
        """The address of a chunk; None where it has no place yet."""
        return self._begins[chunk] if chunk in self._bases else None

    def address(self, number: int) -> int | None:
        """Where the values of parameter `number` begin; None where its chunk has no place yet."""
        entry = self._layout.entries[number]
        begin = self.begin(entry.chunk)
        return None if begin is None else begin + entry.offset_bytes

    def moved(self) -> int | None:
        """A chunk in memory that torch has put elsewhere since; None: there is none. Those on disk torch does not find."""
        in_memory = (item for item in self._bases.items() if item[1].untyped_storage()._cdata not in self._chunk_of_storage)
        return next((chunk for chunk, base in in_memory if base.data_ptr() != self._begins[chunk]), None)

    def owner_of_memory(self, tensor: torch.Tensor, numbers: list[int]) -> int | None:
        """The parameter whose bytes the tensor shows, where its storage is that of one of these parameters' chunks; else None."""
        chunk = self._chunk_of_storage.get(storage_of(tensor))
        if chunk is None or all(self._layout.entries[number].chunk != chunk for number in numbers):
            return None
        return self._number_at(chunk, tensor)

    def _number_at(self, chunk: int, tensor: torch.Tensor) -> int:
        """The parameter of the chunk in whose bytes the tensor, which lies in the chunk, begins."""
        offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
        return self._layout.members[chunk][bisect.bisect_right(self._offsets[chunk], offset_bytes) - 1]

    def note_view(self, view: torch.Tensor, number: int) -> None:
        """The tensor is a view of parameter `number`: wherever that goes it goes along."""
        self._views.add(view, self._layout.entries[number].chunk)

    # ---- operations ----

    def bring(self, numbers: Iterable[int]) -> Iterator[int]:
        """The chunks of these parameters, one after another: each is in its slot when it is yielded, and stays there until the
        engine's `unuse`."""
        chunks = list(dict.fromkeys(self._layout.entries[number].chunk for number in numbers))
        if self.filling:
            chunks = [chunk for chunk in chunks if chunk not in self.filling]
        for place, chunk in enumerate(chunks):
            self._bind_rest()
            if not self._demand(chunk):
                self._unbound = chunk
                try:
                    self._engine.own_slot(chunk)  # its slot is taken by what this same operation reads
                except Error as error:  # there was none made
                    self._unbound = None
                    if isinstance(error, BudgetError) and place + 1 < len(chunks):
                        raise self._refuse_together(error, chunks, place) from None
                    raise
                self.own_slots += 1
                self._bind_rest()
                self._demand(chunk)
            yield chunk

    def _refuse_together(self, error: BudgetError, chunks: Sequence[int], place: int) -> BudgetError:
        """Of an operation that reads all these chunks: no slot was made for the one in this place, nor for those behind."""
        rest = sum(not self._engine.in_memory(chunk) for chunk in chunks[place + 1 :])
        smallest_bytes = error.smallest_bytes + rest * _core.rounded_bytes(self._layout.chunk_bytes)
        return BudgetError(
            f"an operation reads parameters of {len(chunks)} chunks at once, for which the memory budget has no room; give a "
            f"budget of at least {smallest_bytes} bytes, or let it read fewer parameters at a time",
            needed_bytes=error.needed_bytes,
            budget_bytes=error.budget_bytes,
            smallest_bytes=smallest_bytes,
        )

    def _demand_over_device(self, chunk: int) -> bool:
        assert self._device_clock is not None
        with self._device_clock.waiting():
            return self._engine.demand(chunk)

    def _bind_rest(self) -> None:
        """A chunk has a slot of its own, and an interrupt may have come before its parameters were bound to it."""
        if self._unbound is not None:
            self.bind(self._unbound)
            self._unbound = None

    def write_back(self, numbers: Iterable[int]) -> None:
        """Parameters were changed in place outside of an update: their homes follow at once. Where that is refused, or fails,
        they are what their homes are, also those behind it.

        Raises:
            StepError, DiskError: the first of them.
        """
        first: BaseException | None = None
        for number in numbers:
            try:
                self._write_back(number)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def _write_back(self, number: int) -> None:
        p, entry = self._params[number], self._layout.entries[number]
        if entry.chunk in self.filling:
            return
        with DisableTorchFunction():
            values = self._compute.to_host(p)
            with self.loads.whole(entry.name, PARAMETERS):
                self._engine.transfer(number, 0, self._compute.on_host(values), True)
        self.note_changed([number])
        assert entry.count == p.numel()

    def lend(self, chunks: list[int]) -> None:
        """The operation that brought these chunks has given addresses of theirs away, as to a kernel of Triton that is about to
        start: the chunks, which are the list's no more, stay in use until the next operation on parameters, or the next node."""
        self._loans += chunks
        chunks.clear()

    def end_loans(self) -> None:
        """What was lent is back."""
        while self._loans:
            self._engine.unuse(self._loans.pop())

    # ---- saved tensors ----

    def saved_parameter(self, tensor: torch.Tensor) -> SavedParameter | None:
        """The record of a tensor that lies in the memory of a parameter on disk; None for any other tensor."""
        with DisableTorchFunction():
            if tensor.layout != torch.strided:
                return None
            chunk = self._chunk_of_storage.get(storage_of(tensor))
            if chunk is None:
                return None
            return self.saved_view(tensor, self._number_at(chunk, tensor))

    def saved_view(self, view: torch.Tensor, number: int) -> SavedParameter:
        """The record of a tensor that shows bytes of parameter `number`, which is on disk."""
        with DisableTorchFunction():
            offset_bytes = int(view.storage_offset()) * view.element_size()
            return SavedParameter(number, view, offset_bytes - self._layout.entries[number].offset_bytes, self._params[number])

    def unpack_parameter(self, saved: SavedParameter) -> torch.Tensor:
        """The tensor again, its chunk in place. It stays there until the node of the graph that asked is done.

        Raises:
            RuntimeError: the parameter was changed in place after it was saved.
        """
        entry = self._layout.entries[saved.number]
        chunk = entry.chunk
        self._bind_rest()
        node = self._come_to(_mark_of_node())
        with DisableTorchFunction():
            owner = saved.owner()
            if owner is not None:
                check_version(owner._version, saved.version, saved.size)
            if not self._engine.in_memory(chunk) and torch.is_grad_enabled():
                return self._copy_of(saved)  # this backward has a graph of its own, which holds on to what it is given
            if chunk not in node.chunks and not self._engine.in_memory(chunk):
                if not self._demand(chunk):
                    return self._copy_of(saved)  # the slot is taken by what this same node reads
                node.chunks.add(chunk)
            return saved.over(self._bases[chunk], entry.offset_bytes)

    def _copy_of(self, saved: SavedParameter) -> torch.Tensor:
        """The tensor again, in memory of its own, from the parameter's home."""
        copy = self._compute.empty_on_host([self._layout.entries[saved.number].count], self._layout.dtype)
        self._engine.transfer(saved.number, 0, self._compute.on_host(copy), False)
        return saved.over(self._compute.to_device(copy), 0)

    def _come_to(self, mark: object | None) -> _Node:
        """The node of this mark runs; those that do not run any more give up their chunks. One whose backward makes another
        backward, as functions that recompute by hand do, goes on behind that with what it was given."""
        if self._nodes and self._nodes[-1].mark is mark:
            return self._nodes[-1]
        self.end_loans()
        task, n_outer = torch._C._current_graph_task_id(), len(self._nodes) - 1
        if self._nodes and self._nodes[-1].task != task:
            n_outer = max(n_backwards() - self._compute.backward_depth, 0)
        while len(self._nodes) > n_outer + 1:
            self._release_last()
        if len(self._nodes) == n_outer + 1 and self._nodes and self._nodes[-1].mark is not mark:
            self._release_last()
        if not self._nodes or self._nodes[-1].mark is not mark:
            self._nodes.append(_Node(mark, task))
        return self._nodes[-1]

    def _release_last(self) -> None:
        node = self._nodes[-1]
        for chunk in node.chunks:
            self._engine.unuse(chunk)
        node.chunks.clear()
        self._nodes.pop()

    def held_by_another(self) -> bool:
        """Whether a node that another thread runs, or has run, holds chunks."""
        return any(node.chunks and node.thread != threading.get_ident() for node in self._nodes)

    def release_nodes(self) -> None:
        """The nodes of the graph whose parameters are held in place are done, and whoever was given addresses."""
        self.end_loans()
        while self._nodes:
            self._release_last()

    # ---- recomputation ----

    @contextmanager
    def node_waits(self) -> Iterator[None]:
        """What runs inside is a recomputation that a node of the graph has asked for, before it was given a parameter of the
        block (csrc/python/recomputed_type.c). What nodes around it hold stays where it is."""
        self._come_to(_mark_of_node())
        nodes, self._nodes = self._nodes, []
        try:
            yield
        finally:
            self.release_nodes()
            self._nodes = nodes
