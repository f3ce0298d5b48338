"""The dry run of swap: what a step holds when every block gives what it saves to the stash, at the least.

The twin of the dry run (dryrun.py) runs once more with hooks around each block that do as the stash does where memory is short:
what is saved is nobody's until backward asks for it, is in memory while an operation of backward uses it, and is nobody's again
between two of its uses. So the live bytes are those without which no step can do: the stash waits for its writes, and reads
nothing ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class _Record:
    """A storage that blocks saved. storage: the one that is in memory, the first or one that was read; dead where none is."""

    storage: weakref.ref[Any]
    size: int  # bytes


@dataclass(frozen=True)
class _Saved:
    """A saved tensor: its record, and what it is beside its bytes."""

    record: _Record
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class DryStash:
    """Hooks for `torch.autograd.graph.saved_tensors_hooks`, of tensors without data.

    takes: whether the stash takes a storage, leaves: told of one that it leaves in memory all the same. uncounted: makes what is
    called in it count for nothing.
    """

    def __init__(
        self, takes: Callable[[Any], bool], leaves: Callable[[Any], None], uncounted: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._takes, self._leaves, self._uncounted = takes, leaves, uncounted
        self._records: dict[int, _Record] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        storage = tensor.untyped_storage()
        root, takes = tensor if tensor._base is None else tensor._base, self._takes(storage)
        if takes and root.nbytes != storage.nbytes():  # csrc/python/saved_type.c has why a part of it stays
            self._leaves(storage)
            takes = False
        if not takes:
            return tensor if tensor.is_leaf else tensor.detach()  # an output that its own node keeps would never die
        record = self._records.get(storage._cdata)
        if record is None or record.storage() is None:  # the storage that had this address before has gone
            record = self._records[storage._cdata] = _Record(weakref.ref(storage), storage.nbytes())
        return _Saved(record, tensor.shape, tensor.stride(), tensor.dtype)

    def unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        storage = saved.record.storage()
        if storage is None:
            storage = torch.empty(saved.record.size, dtype=torch.uint8).untyped_storage()
            saved.record.storage = weakref.ref(storage)
        made = self._uncounted(lambda: torch.empty_strided(saved.shape, saved.stride, dtype=saved.dtype))
        made.untyped_storage()._holds = storage  # as long as anything of it lives: autograd makes others of what it is given
        return made  # type: ignore[no-any-return]
