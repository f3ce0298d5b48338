"""Saved tensors that leave a device's memory for the host's, and for the disk where that is short, and come back for backward.

The core copies, and keeps what it copied (csrc/runtime/device_stash.h); here stands whose memory on the device it is. A
record is a storage as it was when a tensor in it was saved: tensors that share a storage and its version share the record.
The storage is held until its copy has ended, or until all that is ordered later comes behind that copy, and let go then;
where somebody has it still when backward asks, it is forwarded without a copy. Otherwise memory is asked of torch's
allocator, and the copy up ordered behind all that the compute stream has so far, since it may be using that memory.

Both ways `window_bytes` at most are under way: what was saved and is still held, what came back and was not asked for. So the
memory that swapping takes follows from the order of the program alone, and the thread that orders waits for no copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import cast

import torch

from .. import _core
from ..base.sizes import MIB
from ..device.compute import Compute
from ..errors import BudgetError, StepError
from ..model.parameters import DisableTorchFunction
from ..profiling.device_clock import DeviceClock
from .activations import check_version, over_nothing

_REFUSED = (BudgetError, torch.OutOfMemoryError)
#: A tensor that is a smaller part of its storage is left: that is a part of a data set, say, and lives on.
MOST_PARTS = 16
_NOT_WRAPPED = "backward needs activations of a model that is not wrapped any more"


class _Alive:
    """A storage, without holding on to it. Its identity is nobody else's as long as this is there."""

    __slots__ = ("_weak",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = storage._weak_ref()

    def get(self) -> torch.UntypedStorage | None:
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        return found

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._weak)


class Record:
    """See the module's head.

    put: what was saved, as long as it lives; owner: shares its version counter; came: what was brought last, as long as that
    lives; storage: the same, held for uses that did not ask yet; follows: whether compute comes behind its copy; waiting: those
    uses; block: that saved it.
    """

    __slots__ = (
        "__weakref__",
        "block",
        "bytes",
        "came",
        "core",
        "follows",
        "owner",
        "place",
        "put",
        "stash",
        "storage",
        "waiting",
    )

    def __init__(
        self, stash: DeviceStash, core: _core.DeviceRecord, tensor: torch.Tensor, storage: torch.UntypedStorage, block: int
    ) -> None:
        self.block = block
        self.stash, self.core, self.bytes = stash, core, storage.nbytes()
        self.put = _Alive(storage)
        self.owner = cast("torch.Tensor", over_nothing(tensor))  # it is a plain one, else it would not be stashed
        self.came: _Alive | None = None
        self.storage: torch.UntypedStorage | None = None
        self.follows = False
        self.waiting, self.place = 0, -1

    def __del__(self) -> None:
        self.stash.forget(self)


class Stashed:
    """One saved tensor of a record: its geometry there."""

    __slots__ = ("asked", "dtype", "offset", "record", "size", "stride", "version")

    stashed = True

    def __init__(self, record: Record, tensor: torch.Tensor) -> None:
        self.record, self.version, self.dtype = record, tensor._version, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.asked = False

    def __del__(self) -> None:
        if not self.asked:
            self.record.stash.over(self.record)


def _counted(tensor: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """The tensor with the version counter of `owner`: who changes it in place, in a backward of their own, changes what other
    uses of the record get, and those raise. Tensors of inference have none."""
    if torch.is_inference_mode_enabled():
        return tensor
    alias = owner.detach()
    alias.data = tensor
    return alias


class DeviceStash:
    """Of one session; called on the thread that drives the step.

    hooks: those that call `pack`; least_bytes, pool_bytes: of a storage that is stashed; forwarded_bytes: handed back without a
    copy, since wrap.
    """

    def __init__(self, engine: _core.Engine, compute: Compute, modes: Callable[[], tuple[str, ...]], clock: DeviceClock) -> None:
        self._engine, self._compute, self._modes, self._clock = engine, compute, modes, clock
        self.hooks: _core.SavedTensors | None = None
        self.least_bytes = self.pool_bytes = self.forwarded_bytes = 0
        self.window_bytes = 64 * MIB
        self.closed = False
        self._static: set[int] = set()
        self._known: weakref.WeakValueDictionary[tuple[int, int, int], Record] = weakref.WeakValueDictionary()
        self._order: dict[int, weakref.ref[Record]] = {}  # by place: the last tensor that was saved of it
        self._place = 0
        # What copies read from, or write to without anybody's having asked; the core's record lives until they end.
        self._leaving: deque[tuple[torch.UntypedStorage, _core.DeviceRecord]] = deque()
        self._unasked: deque[tuple[torch.UntypedStorage, _core.DeviceRecord]] = deque()
        self._leaving_bytes = 0

    def mark_static(self, buffers: list[torch.Tensor]) -> None:
        """These live on: they are not to be copied."""
        self._static = {buffer.untyped_storage()._cdata for buffer in buffers}

    # ---- saving ----

    def pack(self, tensor: torch.Tensor, counter: int = 0) -> Stashed | None:
        """What autograd keeps of a tensor; None: the tensor itself. counter: tells who counts its changes, who may be another one
        for each of several tensors over one memory.

        Raises:
            DiskError, DeviceError: it cannot leave, or what left before it could not.
        """
        with DisableTorchFunction(), self._clock.waiting():
            if tensor._is_zerotensor() or tensor.device != self._compute.device:
                return None  # it takes no memory here
            storage = tensor.untyped_storage()
            key = storage._cdata, counter, tensor._version
            size = storage.nbytes()
            if not self.least_bytes <= size <= self.pool_bytes or size > MOST_PARTS * tensor.nbytes or key[0] in self._static:
                return None
            record = self._known.get(key)
            if record is None:
                record = self._known[key] = self._put(tensor, storage)
            else:
                self._order.pop(record.place, None)
                record.core.want(True)
            record.waiting += 1
            record.place = self._place = self._place + 1
            self._order[record.place] = weakref.ref(record)
            return Stashed(record, tensor)

    def _put(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Record:
        address = self._compute.on_device(tensor) - int(tensor.storage_offset()) * tensor.itemsize
        block = self.hooks.block if self.hooks is not None else -1
        core = self._engine.put(address, storage.nbytes(), block)
        self._leaving.append((storage, core))
        self._leaving_bytes += storage.nbytes()
        self.settle(self.window_bytes)
        return Record(self, core, tensor, storage, block)

    def settle(self, most_bytes: int = 0) -> None:
        """Let go of what copies are done with, and of more where they hold more than this: compute then comes behind them."""
        while self._unasked:
            storage, core = self._unasked.popleft()
            if not core.ended:
                core.let_go()
        while self._leaving:
            storage, core = self._leaving[0]
            if not core.ended:
                if self._leaving_bytes <= most_bytes:
                    return
                core.let_go()
            self._leaving.popleft()
            self._leaving_bytes -= storage.nbytes()

    # ---- asking ----

    def unpack(self, saved: Stashed) -> torch.Tensor:
        """The tensor again.

        Raises:
            RuntimeError: it was changed in place after it was saved.
            StepError: its model is not wrapped any more.
            DiskError, DeviceError, BudgetError, torch.OutOfMemoryError: it cannot come back.
        """
        record = saved.record
        check_version(record.owner._version, saved.version, saved.size)
        if self.closed:
            raise StepError(_NOT_WRAPPED)
        with DisableTorchFunction(), torch.no_grad(), self._clock.waiting():
            self.settle(self.window_bytes)
            storage = self._find(record)
            if record.came is not None:
                record.core.follow()
                record.follows = True
            if not saved.asked:
                saved.asked = True
                self.over(record)
            self._bring_ahead(record)
            tensor = torch.empty(0, dtype=saved.dtype, device=self._compute.device)
            tensor.set_(storage, saved.offset, saved.size, saved.stride)  # type: ignore[call-overload]
            self._compute.used_here(tensor)
            return _counted(tensor, record.owner)

    def _find(self, record: Record) -> torch.UntypedStorage:
        storage = self._somewhere(record)
        if storage is not None:
            if record.came is None:
                self.forwarded_bytes += record.bytes
            return storage
        try:
            return self._bring(record)
        except _REFUSED:
            self.settle()
        return self._bring(record)

    def _somewhere(self, record: Record) -> torch.UntypedStorage | None:
        """The record's bytes where the device has them still."""
        if record.storage is not None:
            return record.storage
        return record.put.get() if record.came is None else record.came.get()

    def _bring(self, record: Record) -> torch.UntypedStorage:
        made = torch.empty(record.bytes, dtype=torch.uint8, device=self._compute.device)
        record.core.bring(self._compute.on_device(made))
        record.storage = storage = made.untyped_storage()
        record.came, record.follows = _Alive(storage), False
        return storage

    def _bring_ahead(self, asked: Record) -> None:
        """What backward asks for next is ordered now, as far as the window goes and the host has it.

        Not across a block that is recomputed: that takes all the memory that the plan has for one block.
        """
        ahead_bytes, place, modes = 0, asked.place, self._modes()
        for number in reversed(list(self._order)):
            record = self._order[number]() if number < place and number in self._order else None
            if record is None or record.waiting == 0:
                continue
            if record.storage is None and self._somewhere(record) is not None:
                continue
            if record.block != asked.block and any(mode != "swap" for mode in modes[record.block : asked.block + 1]):
                return
            ahead_bytes += record.bytes
            if ahead_bytes > self.window_bytes:
                return
            if record.storage is None:
                if not record.core.near:
                    return
                try:
                    self._bring(record)
                except _REFUSED:
                    return

    # ---- uses that are over ----

    def over(self, record: Record) -> None:
        """One that waited does no longer, on any thread."""
        record.waiting -= 1
        if record.waiting == 0:
            record.core.want(False)
            self._release(record)

    def _release(self, record: Record) -> None:
        storage, record.storage = record.storage, None
        if storage is not None and not record.follows:
            self._unasked.append((storage, record.core))

    def forget(self, record: Record) -> None:
        """No use is left, on any thread."""
        self._order.pop(record.place, None)
        self._release(record)

    def close(self) -> None:
        """The engine is closed: nothing is under way."""
        self.closed = True
        self._leaving.clear()
        self._unasked.clear()
        self._leaving_bytes = 0
