"""Strides: how the elements of a tensor lie in memory.

A parameter whose elements fill its memory without holes, in whatever order of its dimensions (channels last, transposed), lies in
its chunk as it did when it was wrapped: kernels choose by layout, and round by what they chose. Its gradient, its state and its
master lie as it does, so that the engine may take all of them for rows of numbers; on disk there is that row. A parameter with
holes becomes contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

Strides = tuple[int, ...]

#: torch's memory begins at multiples of it.
ALIGNED_BYTES = 64


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Those of a tensor that torch makes of this shape. Others count as contiguous too where a dimension is of one element, and
    convolutions look at them."""
    return tuple(torch.empty(shape, device="meta").stride())


def dense_strides(tensor: torch.Tensor) -> Strides:
    """The tensor's own strides where it is dense, else those of a contiguous one of its shape. On any device."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tuple(tensor.stride())
    return contiguous_strides(tensor.shape)


def dense_like(tensor: torch.Tensor, dtype: torch.dtype | None = None, device: str = "cpu") -> torch.Tensor:
    """Memory for a dense copy of the tensor, or of another type or on another device."""
    return torch.empty_strided(tensor.shape, dense_strides(tensor), dtype=dtype or tensor.dtype, device=device)


def laid(tensor: torch.Tensor, strides: Strides) -> torch.Tensor:
    """The tensor itself where its elements lie as these dense strides have them, else a copy in which they do."""
    if tensor.stride() == strides:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if not tensor.numel() or all(own == wanted for size, own, wanted in pairs if size != 1):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def storage_of(tensor: torch.Tensor) -> int:
    """The same for tensors whose elements lie in one memory, and for no others."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor._is_zerotensor() and tensor.numel() > 0
    return tensor.untyped_storage().data_ptr() if plain else id(tensor)


def copies(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """By their ids, copies of tensors that lie in memory as these do: what operations choose, and how sums round, hangs on it.
    Copies of those that share memory share it too."""
    found: dict[int, torch.Tensor] = {}
    for group in _sharing(tensors):
        if len(group) == 1 and _lies_as_made(group[0]):
            found[id(group[0])] = group[0].clone()
        else:
            found |= _copies_together(group)
    return found


def copied_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What `copies` of them take."""
    found = 0
    for group in _sharing(tensors):
        if len(group) == 1 and _lies_as_made(group[0]):
            found += group[0].numel() * group[0].element_size()
        else:
            first, end = _reach(group)
            found += (end - first) * group[0].element_size()
    return found


def _sharing(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Each tensor once, with those between whose elements it has some. What is far apart in one memory, as rows of a data set,
    is apart here."""
    memories: dict[Any, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        lazy = tensor.is_conj() or tensor.is_neg()
        key = id(tensor) if lazy else (storage_of(tensor), tensor.dtype)
        memories.setdefault(key, {})[id(tensor)] = tensor
    for memory in memories.values():
        members = list(memory.values())
        if len(members) == 1:
            yield members
            continue
        together: list[torch.Tensor] = []
        for tensor in sorted(members, key=torch.Tensor.storage_offset):
            if together and tensor.storage_offset() >= _reach(together)[1]:
                yield together
                together = []
            together.append(tensor)
        yield together


def _lies_as_made(tensor: torch.Tensor) -> bool:
    """Whether a clone of the tensor lies as it does, or may lie as it likes."""
    if storage_of(tensor) == id(tensor) or tensor.is_conj() or tensor.is_neg():
        return True
    begins = tensor.storage_offset() * tensor.element_size() % ALIGNED_BYTES == 0
    return begins and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _reach(members: list[torch.Tensor]) -> tuple[int, int]:
    """Where the elements of tensors of one type lie in their memory: from the last aligned place before them to behind them."""
    size_bytes = members[0].element_size()
    first = min(int(tensor.storage_offset()) for tensor in members)
    end = max(int(tensor.storage_offset()) + (_span(tensor)[1] - _span(tensor)[0]) // size_bytes for tensor in members)
    return first - first * size_bytes % ALIGNED_BYTES // size_bytes, end


def _copies_together(members: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """All lie in one copy of the memory that they lie in."""
    first, end = _reach(members)
    source = max(members, key=lambda tensor: (tensor.untyped_storage().nbytes(), tensor.requires_grad))  # NumPy's end anywhere
    whole = source.as_strided((end - first,), (1,), first).clone()
    found = {}
    with torch.enable_grad():  # a view that is made without gradients may not be changed in place with them
        for tensor in members:
            piece = whole.as_strided(tensor.size(), tensor.stride(), int(tensor.storage_offset()) - first)
            found[id(tensor)] = piece if tensor.requires_grad or not whole.requires_grad else piece.detach()
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its elements lie, in bytes: from the first to behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two whose spans do: whether they have an element in common."""
    if one.element_size() != other.element_size():
        return True
    begin, size = min(one.data_ptr(), other.data_ptr()), one.element_size()
    seen = torch.zeros((max(_span(one)[1], _span(other)[1]) - begin) // size, dtype=torch.bool, device="cpu")

    def of(tensor: torch.Tensor) -> torch.Tensor:
        return seen.as_strided(tensor.shape, tensor.stride(), (tensor.data_ptr() - begin) // size)

    of(one).fill_(True)
    return bool(of(other).any())


def shared_memory(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str]]:
    """The names of tensors that have elements in memory in common, two and two, by address. Those without memory, and those that
    are not strided, have none."""
    spans = sorted(
        (*_span(tensor), name, tensor)
        for name, tensor in named
        if tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel()
    )
    before: list[tuple[int, str, torch.Tensor]] = []
    for begin, end, name, tensor in spans:
        before = [one for one in before if one[0] > begin]
        yield from ((other, name) for _, other, held in before if _overlap(held, tensor))
        before.append((end, name, tensor))


def outermost_first(shape: Sequence[int], strides: Strides) -> list[int]:
    """The dimensions of a dense tensor in the order in which they lie in memory; those of one element come last."""
    return sorted(range(len(strides)), key=lambda dim: (shape[dim] == 1, -strides[dim], dim))
