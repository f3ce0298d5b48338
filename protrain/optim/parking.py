"""Parking: containers of tensors, as optimizers keep them for each parameter, with their large tensors on disk.

Nothing is known of such a tree but that it is made of dicts, lists, tuples, tensors and plain values. Tensors of PARKED_BYTES or
more go to extents of the engine's file, everything else stays in memory as it is. What comes back has the same form: types of
containers, order of keys, dtypes, shapes and strides; one tensor that stood in two places stands in both again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import _core
from ..model.strides import dense_like

#: A smaller tensor stays in memory: a request to the disk would cost more than the memory is worth.
PARKED_BYTES = 16 << 10
PAGE_BYTES = 4096

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

Tree = Any


def map_tensors(tree: Tree, make: Callable[[torch.Tensor], Any], other: Callable[[Any], Any] = lambda value: value) -> Tree:
    """The tree with make(tensor) in place of each tensor, called once for each, and other(value) of whatever is no container."""
    return _mapped(tree, make, other, {})


def _mapped(value: Any, make: Callable[[torch.Tensor], Any], other: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    """Not a function inside of another: that would be a cycle, and hold tensors until the collector comes."""
    if isinstance(value, torch.Tensor):
        if id(value) not in made:
            made[id(value)] = make(value)
        return made[id(value)]
    if isinstance(value, dict):
        result = {key: _mapped(item, make, other, made) for key, item in value.items()}
        if type(value) is dict:
            return result
        same_kind = copy.copy(value)  # an OrderedDict or a defaultdict stays one
        same_kind.update(result)
        return same_kind
    if isinstance(value, tuple):
        items = [_mapped(item, make, other, made) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_mapped(item, make, other, made) for item in value]
    return value if isinstance(value, _PLAIN) else other(value)


def tensors_of(tree: Tree) -> list[torch.Tensor]:
    """Its tensors, each once, in order."""
    found: list[torch.Tensor] = []
    map_tensors(tree, found.append)
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values are its bytes in memory: no subclass, no special layout."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "meta")
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def is_large(tensor: torch.Tensor) -> bool:
    """Whether it is parked on disk."""
    return is_plain(tensor) and tensor.numel() * tensor.element_size() >= PARKED_BYTES


def clone(tree: Tree) -> Tree:
    """An owned copy of the whole tree; tensors are copied with their strides."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if not is_plain(tensor):
            return tensor.detach().clone()
        return dense_like(tensor).copy_(tensor.detach())

    return map_tensors(tree, make, copy.deepcopy)


def described(tree: Tree) -> Tree:
    """The tree with tensors that have shapes and no data."""
    return map_tensors(tree, lambda tensor: dense_like(tensor, device="meta") if is_plain(tensor) else tensor)


class Space:
    """Extents of an engine's file. What is given back is kept for the next of its size: a step takes as much as the last one."""

    def __init__(self, engine: _core.Engine) -> None:
        self.engine = engine
        self._free: dict[int, list[int]] = {}  # bytes -> offsets

    def take(self, n_bytes: int) -> int:
        """The offset of an extent of so many bytes, whole pages.

        Raises:
            DiskError: the disk has no space.
        """
        free = self._free.get(n_bytes)
        return free.pop() if free else self.engine.reserve(n_bytes)[0]

    def give_back(self, n_bytes: int, offset: int) -> None:
        """The extent may be taken again."""
        self._free.setdefault(n_bytes, []).append(offset)

    def trim(self) -> None:
        """What is free here is free for all of the engine."""
        for n_bytes, offsets in self._free.items():
            for offset in offsets:
                self.engine.release(offset, n_bytes)
        self._free.clear()


@dataclass
class _Away:
    """Stands in a parked tree for a tensor on disk."""

    like: torch.Tensor  # on meta, with its strides
    n_bytes: int
    offset: int

    @property
    def extent_bytes(self) -> int:
        """Whole pages."""
        return -(-self.n_bytes // PAGE_BYTES) * PAGE_BYTES


class Parked:
    """One tree, parked: an owned copy.

    Raises:
        DiskError: a tensor cannot be written; nothing is parked.
    """

    def __init__(self, space: Space, tree: Tree) -> None:
        self._space = space
        self._away: list[_Away] = []
        try:
            self._tree = map_tensors(tree, self._put, copy.deepcopy)
        except BaseException:
            self.release()
            raise

    def _put(self, tensor: torch.Tensor) -> Any:
        if not is_large(tensor):
            return clone(tensor)
        tensor = tensor.detach()
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            tensor = tensor.contiguous()
        away = _Away(dense_like(tensor, device="meta"), tensor.numel() * tensor.element_size(), 0)
        away.offset = self._space.take(away.extent_bytes)
        self._away.append(away)
        self._space.engine.move(away.offset, tensor.data_ptr(), away.n_bytes, True)
        return away

    def _unpark(self, make: Callable[[_Away], torch.Tensor], small: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
        made = {id(away): make(away) for away in self._away}
        return map_tensors(self._tree, small, lambda value: made[id(value)] if id(value) in made else copy.deepcopy(value))

    def fetch(self) -> Tree:
        """An owned copy of the tree, in memory.

        Raises:
            DiskError: a tensor cannot be read.
        """

        def read(away: _Away) -> torch.Tensor:
            tensor = torch.empty_strided(away.like.shape, away.like.stride(), dtype=away.like.dtype)
            self._space.engine.move(away.offset, tensor.data_ptr(), away.n_bytes, False)
            return tensor

        return self._unpark(read, clone)

    def take_out(self, key: str, place: torch.Tensor) -> None:
        """Put what the tree, a dict, has there into a tensor that lies as it did, and out of the tree.

        Raises:
            DiskError: it cannot be read; it is in the tree still.
        """
        found = self._tree[key]
        if isinstance(found, _Away):
            self._space.engine.move(found.offset, place.data_ptr(), found.n_bytes, False)
            self._away.remove(found)
            self._space.give_back(found.extent_bytes, found.offset)
        else:
            place.copy_(found)
        del self._tree[key]

    def described(self) -> Tree:
        """The tree with tensors that have shapes and no data."""
        return described(self._unpark(lambda away: away.like, lambda tensor: tensor))

    def release(self) -> None:
        """Give its extents back; it cannot be fetched again."""
        for away in self._away:
            self._space.give_back(away.extent_bytes, away.offset)
        self._away.clear()


# ---- plain data ----


class _NotPlainError(Exception):
    pass


def plain_items(values: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Copies of those items whose values are nothing but containers, tensors and plain values."""

    def refuse(_: Any) -> Any:
        raise _NotPlainError

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return refuse(tensor) if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone()

    for key, value in values.items():
        try:
            yield key, map_tensors(value, own, refuse)
        except _NotPlainError:
            continue


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _same_keys(first: list[Any], second: list[Any]) -> bool:
    """A tensor, as a parameter that a class keeps something by, is none but itself."""
    alike = (a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in zip(first, second, strict=False))
    return len(first) == len(second) and all(alike)


def same(first: Any, second: Any) -> bool:
    """Whether two trees of plain data are equal, tensors byte for byte."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
            return False
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        return bool(torch.equal(_bytes_of(first), _bytes_of(second)))
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return _same_keys(list(first), list(second)) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second) or (isinstance(first, float) and first != first and second != second)
