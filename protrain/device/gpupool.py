"""A GPU's share of the budget that torch's operations take: their memory comes from a pool whose segments the core hands out
and counts.

torch's caching allocator stays at work, so streams and `torch.cuda.memory_stats` are what they always are; only the segments
that it cuts tensors from are asked of `ptn_cuda_malloc` (csrc/torch/cuda_allocator.c), which refuses past the budget. What is
known of torch 2.11 to 2.13, from its sources:

- A pool is used by the allocations that a filter lets through. torch.cuda.use_mem_pool filters by thread, and backward has a
  thread of its own; so here every thread's allocations on the GPU go to the pool, as those of the CPU go to the arena.
- While a filter is set torch gives no cached segment back: an operation that the budget refuses ends in torch.OutOfMemoryError
  even though segments may lie free that are too short. Plans leave room for that (compute.py).
- While a filter is set, a block that is freed with streams recorded on it (`Tensor.record_stream`) waits; the first allocation
  after it takes such blocks for those of a CUDA graph, and forgets those streams: what they still read could be given to others.
  So `end` waits for the GPU where blocks wait, which is where somebody recorded another stream than the tensor's own.
- Cached segments of a pool are given back when the pool is gone. So homes move with a fresh pool; tensors that are still there
  keep their own segments, counted, until they go. Their allocator must outlive them: there is one for the process.
- Outside of steps an allocation that finds no memory takes free blocks of pools made with use_on_oom. They stay counted here.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

from .. import _core
from ..base.sizes import MIB

_C: Any = torch._C
_current: dict[int, GpuPool] = {}  # number of a GPU -> the pool that its allocations go to


@functools.cache
def _allocator() -> Any:
    return torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, "ptn_cuda_malloc", "ptn_cuda_free")


def _is_ordinary(kind: type) -> bool:
    """Whether it is of tensors that have memory of their own, whatever functions of torch they change."""
    return issubclass(kind, torch.Tensor) and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


class GpuPool:
    """Of one session on one GPU."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._pool: Any = None
        self._whole_stream: int | None = None  # for which what was left of the budget is one range
        self._range = (0, 0)  # its addresses

    @property
    def running(self) -> bool:
        """Whether the GPU's allocations go here now."""
        return _current.get(self.number) is self

    def begin(self) -> None:
        """What is allocated on the GPU from now on, on every thread, is this session's."""
        before = _current.get(self.number)
        if before is self:
            return
        if before is not None:
            before.end()
        if self._pool is None:
            with torch.cuda.device(self.number):
                self._pool = torch.cuda.MemPool(_allocator().allocator(), use_on_oom=True)
        _C._cuda_beginAllocateToPool(self.number, self._pool.id)
        _current[self.number] = self

    def end(self) -> None:
        """What is allocated from now on is the user's."""
        if not self.running:
            return
        del _current[self.number]
        try:
            stats = _C._cuda_memoryStats(self.number)
            if stats["active_bytes"]["all"]["current"] != stats["allocated_bytes"]["all"]["current"]:
                torch.cuda.synchronize(self.number)  # blocks wait that other streams may read
        finally:
            _C._cuda_endAllocateToPool(self.number, self._pool.id)
            _C._cuda_releasePool(self.number, self._pool.id)

    def renew(self) -> None:
        """Segments that no tensor is in go back; called between steps. Where something is left in the one range, none does: what
        is free of that would be nobody's until it goes."""
        running = self.running
        self.end()
        if not self._is_held():
            self._pool, self._whole_stream, self._range = None, None, (0, 0)
            torch.cuda.empty_cache()
        if running:
            self.begin()

    def is_whole(self) -> bool:
        """Whether the current stream's tensors are cut from one range."""
        return self._whole_stream == self._stream()

    def is_whole_elsewhere(self) -> bool:
        """Whether another stream's are."""
        return self._whole_stream not in (None, self._stream())

    def make_whole(self, size_bytes: int) -> None:
        """Tensors of the current stream are cut from one range of so many bytes from now on, where there is one. Where torch was
        told to cut no large blocks (`max_split_size_mb`) it would cut nothing from that."""
        if _C._cuda_memoryStats(self.number).get("max_split_size", -1) > 0:
            return
        try:
            made = torch.empty(size_bytes // MIB * MIB, dtype=torch.uint8, device=torch.device("cuda", self.number))
        except torch.OutOfMemoryError:  # the GPU has less than the budget: segments as they come
            return
        self._whole_stream, self._range = self._stream(), (made.data_ptr(), made.data_ptr() + made.nbytes)

    def held_of_range(self) -> list[list[torch.Tensor]]:
        """All tensors of the process that lie in the one range, by their storages; but for those that cannot be put elsewhere, as
        those of inference. Where a program keeps its own nobody knows: Python's garbage collector has seen them all."""
        begin, end = self._range
        if begin == end:
            return []
        found: dict[int, dict[int, torch.Tensor]] = {}
        todo = [each for each in gc.get_objects() if _is_ordinary(type(each))]
        while todo:
            tensor = todo.pop()
            try:
                address = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
            except (RuntimeError, NotImplementedError):  # it has none, as inside of torch.func
                continue
            if tensor.is_leaf and tensor.grad is not None:
                todo.append(tensor.grad)
            fixed = tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
            if begin <= address < end and not fixed and id(tensor) not in found.get(address, {}):
                found.setdefault(address, {})[id(tensor)] = tensor
                todo += [tensor._base] if tensor._base is not None else []  # what a view was made of holds its memory too
        return [list(tensors.values()) for tensors in found.values()]

    def _is_held(self) -> bool:
        """Whether something is left in the one range."""
        begin, end = self._range
        segments = self._pool.snapshot() if begin < end else []
        return any(begin <= each["address"] < end and each["allocated_size"] for each in segments)

    def _stream(self) -> int:
        return int(_C._cuda_getCurrentRawStream(self.number))
