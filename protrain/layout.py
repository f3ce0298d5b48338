"""From a model to chunks: which parameter lies where.

Parameters come in the order of `model.named_parameters()`, which is their order of execution in every model that is
written in the order in which it runs; a tied parameter stands where it comes first. The C core packs them
(csrc/plan/layout.c).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from . import _core
from .errors import PlanError
from .sizes import MIB

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Entry:
    """One parameter: where it lies and to which group of the optimizer it belongs (-1: frozen, not trained)."""

    name: str
    index: int
    chunk: int
    offset_bytes: int
    shape: torch.Size
    group: int

    @property
    def count(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True)
class Layout:
    """Entries in execution order, and for each chunk its bytes (padded to pages) and whether it is trained."""

    entries: tuple[Entry, ...]
    chunk_bytes: int
    sizes: tuple[int, ...]
    trained: tuple[bool, ...]
    members: tuple[tuple[int, ...], ...]
    grad_bytes: tuple[int, ...]

    @property
    def n_chunks(self) -> int:
        return len(self.sizes)


def _largest_chunk(block_bytes: list[int], budget_bytes: int) -> int:
    """A chunk holds a block where the budget allows it: at least 1 MiB, so that requests are worth a disk's while, and at most
    a twelfth of the budget, so that slots and a chunk's gradients fit beside activations."""
    whole = max(block_bytes, default=4 * MIB)
    size = max(min(whole, budget_bytes // 12), MIB)
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _places(sizes: list[tuple[int, int]], largest: int) -> list[tuple[int, int]]:
    """(chunk, offset) of each (bytes, block). Up to the end of the first block chunks are a third of the others: their updates
    are the last of backward and hide behind nothing, so the less the very last one has to move the better."""
    first_end = max((i + 1 for i, (_, block) in enumerate(sizes) if block == 0), default=0)
    fine = max(-(-largest // 3 // PAGE_BYTES) * PAGE_BYTES, min(largest, 4 * MIB))
    head = _core.layout(sizes[:first_end], fine)
    n_head = max((chunk + 1 for chunk, _ in head), default=0)
    return head + [(chunk + n_head, offset) for chunk, offset in _core.layout(sizes[first_end:], largest)]


def make_layout(
    named: list[tuple[str, nn.Parameter]],
    groups: dict[int, int],
    blocks: list[nn.Module],
    budget_bytes: int,
    chunk_bytes: int | None,
) -> Layout:
    """Pack parameters into chunks.

    Args:
        named: (name, parameter) in execution order, each parameter once.
        groups: id(parameter) -> optimizer group.
        chunk_bytes: of a plan that is used as it is; None to choose.

    Raises:
        PlanError: a parameter is not fp32.
    """
    block_of: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for p in block.parameters():
            block_of.setdefault(id(p), number)
    in_blocks = [0] * len(blocks)
    for name, p in named:
        if p.dtype != torch.float32:
            raise PlanError(f"parameter {name} is {p.dtype}; only torch.float32 is supported, call model.float() first")
        if id(p) in block_of:
            in_blocks[block_of[id(p)]] += -(-4 * p.numel() // 64) * 64
    largest = chunk_bytes or _largest_chunk(in_blocks, budget_bytes)
    places = _places([(4 * p.numel(), block_of.get(id(p), -1)) for _, p in named], largest)
    entries = tuple(
        Entry(name, index, chunk, offset, p.shape, groups.get(id(p), -1) if p.requires_grad else -1)
        for index, ((name, p), (chunk, offset)) in enumerate(zip(named, places, strict=True))
    )
    n_chunks = max((e.chunk for e in entries), default=-1) + 1
    members: list[list[int]] = [[] for _ in range(n_chunks)]
    for e in entries:
        members[e.chunk].append(e.index)
    ends = [max(entries[i].offset_bytes + 4 * entries[i].count for i in indices) for indices in members]
    return Layout(
        entries,
        largest,
        tuple(max(-(-end // PAGE_BYTES), 1) * PAGE_BYTES for end in ends),
        tuple(any(entries[i].group >= 0 for i in indices) for indices in members),
        tuple(map(tuple, members)),
        tuple(sum(4 * entries[i].count for i in indices if entries[i].group >= 0) for indices in members),
    )
