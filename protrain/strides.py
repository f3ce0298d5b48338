"""Strides: how the elements of a tensor lie in memory.

A parameter whose elements fill its memory without holes, in whatever order of its dimensions (channels last, transposed), lies in
its chunk as it did when it was wrapped: kernels choose by layout, and round by what they chose. Its gradient, its state and its
master lie as it does, so that the engine may take all of them for rows of numbers; on disk there is that row. A parameter with
holes becomes contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def outermost_first(shape: Sequence[int], strides: Strides) -> list[int]:
    """The dimensions of a dense tensor in the order in which they lie in memory; those of one element come last."""
    return sorted(range(len(strides)), key=lambda dim: (shape[dim] == 1, -strides[dim], dim))
