"""Strides: how the elements of a tensor lie in memory.

A parameter whose elements fill its memory without holes, in whatever order of its dimensions (channels last, transposed), lies in
its chunk as it did when it was wrapped: kernels choose by layout, and round by what they chose. Its gradient, its state and its
master lie as it does, so that the engine may take all of them for rows of numbers; on disk there is that row. A parameter with
holes becomes contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

Strides = tuple[int, ...]


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
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if not tensor.numel() or all(own == wanted for size, own, wanted in pairs if size != 1):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


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
