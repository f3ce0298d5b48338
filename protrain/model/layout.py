"""From a model to chunks: which parameter lies where.

Parameters come in the order of `model.named_parameters()`, which is their order of execution in every model that is
written in the order in which it runs; a tied parameter stands where it comes first. The C core packs them
(csrc/plan/layout.c).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from .. import _core
from ..base.sizes import MIB
from ..errors import PlanError
from .strides import Strides, dense_strides

PAGE_BYTES = 4096
#: A chunk that is worth a request of its own.
SMALL_BYTES = 4 * MIB
#: Of an element of the optimizer's state, and of the master.
STATE_BYTES = 4


@dataclass
class Entry:
    """One parameter: where it lies, with which strides, and to which group of the optimizer it belongs (-1: frozen, not trained).
    Nothing of it changes but the strides and the name, where a user gives a parameter others (changes.py)."""

    name: str
    index: int
    chunk: int
    offset_bytes: int
    shape: torch.Size
    strides: Strides
    group: int
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = self.shape.numel()


@dataclass(frozen=True)
class Chunks:
    """For each chunk its bytes (padded to pages), whether it is trained, its parameters by number, and what their gradients count
    (each is a tensor of its own, and so rounded as such); for each parameter its chunk and its offset there in bytes. widening:
    bytes of an array of state beside one of parameters, 2 where fp32 is beside bf16."""

    chunk_bytes: int
    sizes: tuple[int, ...]
    trained: tuple[bool, ...]
    members: tuple[tuple[int, ...], ...]
    grad_bytes: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    widening: int

    @property
    def n_chunks(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Layout(Chunks):
    """Chunks, and their entries in execution order."""

    entries: tuple[Entry, ...]
    dtype: torch.dtype = torch.float32

    def described(self, block_of: Sequence[int]) -> tuple[tuple[int, int, bool], ...]:
        """The parameters, as `pack` takes them. block_of: for each the number of its block, or -1."""
        pairs = zip(self.entries, block_of, strict=True)
        return tuple((e.count * self.dtype.itemsize, block, e.group >= 0) for e, block in pairs)

    def within(self, budget_bytes: int, block_of: Sequence[int]) -> Layout:
        """The same parameters as they would be packed for another budget. block_of: as for `described`."""
        parameters = self.described(block_of)
        found = pack(parameters, chunk_size(parameters, budget_bytes), self.widening)
        entries = tuple(
            replace(e, chunk=chunk, offset_bytes=offset) for e, (chunk, offset) in zip(self.entries, found.places, strict=True)
        )
        return Layout(**found.__dict__, entries=entries, dtype=self.dtype)


def chunk_size(parameters: Sequence[tuple[int, int, bool]], budget_bytes: int) -> int:
    """The size of chunks for parameters as `pack` takes them. A chunk holds a block, what is trained of it or what is not, where
    the budget allows it: at least 1 MiB, so that requests are worth a disk's while, and at most a twelfth of the budget, so that
    slots and gradients of a chunk fit beside activations. Where blocks must be cut, into pieces that are as equal as their
    parameters' sizes allow, so that slots, as large as the largest chunk in them, are well used: packing is tried with sizes down
    to half of the most."""
    larger = max(_apart(parameters), key=lambda indices: sum(parameters[i][0] for i in indices))
    most = max(min(_block_bytes(parameters, larger) or SMALL_BYTES, budget_bytes // 12), MIB)
    most = -(-most // PAGE_BYTES) * PAGE_BYTES
    return _core.layout_size([parameters[i][:2] for i in larger], max(most // 2, MIB), most)


def _apart(parameters: Sequence[tuple[int, int, bool]]) -> tuple[list[int], list[int]]:
    """The numbers of those that are trained, and of the others."""
    numbers = range(len(parameters))
    return [i for i in numbers if parameters[i][2]], [i for i in numbers if not parameters[i][2]]


def _block_bytes(parameters: Sequence[tuple[int, int, bool]], indices: Iterable[int]) -> int:
    """What the largest block has of these; 0 where none is in a block."""
    found: dict[int, int] = {}
    for size, block, _ in (parameters[i] for i in indices):
        if block >= 0:
            found[block] = found.get(block, 0) + -(-size // 64) * 64
    return max(found.values(), default=0)


def _places(sizes: list[tuple[int, int]], largest: int) -> list[tuple[int, int]]:
    """(chunk, offset) of each (bytes, block). Up to the end of the first block chunks are a third of the others: their updates
    are the last of backward and hide behind nothing, so the less the very last one has to move the better."""
    first_end = max((i + 1 for i, (_, block) in enumerate(sizes) if block == 0), default=0)
    fine = max(-(-largest // 3 // PAGE_BYTES) * PAGE_BYTES, min(largest, SMALL_BYTES))
    head = _core.layout(sizes[:first_end], fine)
    n_head = max((chunk + 1 for chunk, _ in head), default=0)
    return head + [(chunk + n_head, offset) for chunk, offset in _core.layout(sizes[first_end:], largest)]


def make_layout(
    named: list[tuple[str, nn.Parameter]],
    groups: dict[int, int],
    blocks: list[nn.Module],
    budget_bytes: int,
    chunk_bytes: int | None,
    dtype: torch.dtype = torch.float32,
) -> Layout:
    """Pack parameters into chunks.

    Args:
        named: (name, parameter) in execution order, each parameter once.
        groups: id(parameter) -> optimizer group.
        chunk_bytes: of a plan that is used as it is; None to choose.
        dtype: of the parameters as they will be trained.

    Raises:
        PlanError: a parameter's elements share memory.
    """
    for name, p in named:
        if p.device.type != "meta" and any(stride == 0 < size - 1 for size, stride in zip(p.shape, p.stride(), strict=True)):
            raise PlanError(f"parameter {name} is expanded, its elements share memory: give it memory of its own first")
    parameters = describe([p for _, p in named], blocks, groups, dtype)
    found = pack(parameters, chunk_bytes or chunk_size(parameters, budget_bytes), STATE_BYTES // dtype.itemsize)
    entries = tuple(
        Entry(name, index, chunk, offset, p.shape, dense_strides(p), groups.get(id(p), -1) if p.requires_grad else -1)
        for index, ((name, p), (chunk, offset)) in enumerate(zip(named, found.places, strict=True))
    )
    return Layout(**found.__dict__, entries=entries, dtype=dtype)


def describe(
    params: Iterable[nn.Parameter],
    blocks: Sequence[nn.Module],
    groups: Container[int] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[tuple[int, int, bool], ...]:
    """(bytes, number of the first block that has it or -1, trained) of each parameter. groups: of the ids that an optimizer has;
    None: it has all. dtype: the type that parameters will be of; None: their own."""
    params = list(params)
    return tuple(
        (p.numel() * (dtype or p.dtype).itemsize, block, p.requires_grad and (groups is None or id(p) in groups))
        for p, block in zip(params, first_blocks(params, blocks), strict=True)
    )


def first_blocks(params: Sequence[nn.Parameter], blocks: Sequence[nn.Module]) -> list[int]:
    """For each parameter the number of the first block that has it, or -1."""
    block_of = {id(p): number for number, block in reversed(list(enumerate(blocks))) for p in block.parameters()}
    return [block_of.get(id(p), -1) for p in params]


def pack(parameters: Sequence[tuple[int, int, bool]], chunk_bytes: int, widening: int = 1) -> Chunks:
    """Pack parameters, each (bytes, number of its block or -1, trained), in execution order, into chunks of at most chunk_bytes;
    a larger parameter has one of its own. Those that are trained and the others never share a chunk: a trained chunk has state
    for all of it, and is written after each step, which adapters in frozen blocks should not cost. Of these the smaller part,
    whose chunks could hold many blocks and would be complete only with the first of them, has no more in one than a block or
    SMALL_BYTES. Chunks come in the order of their first parameters. widening: as `Chunks` has it."""
    apart = _apart(parameters)
    smaller = min(apart, key=lambda indices: sum(parameters[i][0] for i in indices))
    found: list[list[tuple[int, int]]] = []  # (parameter, offset) of each chunk
    for indices, cut in zip(apart, (_places, _core.layout), strict=True):
        largest = min(chunk_bytes, max(_block_bytes(parameters, indices), SMALL_BYTES)) if indices is smaller else chunk_bytes
        places = cut([parameters[i][:2] for i in indices], largest)
        chunks: list[list[tuple[int, int]]] = [[] for _ in range(max((chunk for chunk, _ in places), default=-1) + 1)]
        for index, (chunk, offset) in zip(indices, places, strict=True):
            chunks[chunk].append((index, offset))
        found += chunks
    found.sort()
    members = tuple(tuple(index for index, _ in chunk) for chunk in found)
    ends = [offset + parameters[index][0] for index, offset in (chunk[-1] for chunk in found)]
    where = {index: (number, offset) for number, chunk in enumerate(found) for index, offset in chunk}
    return Chunks(
        chunk_bytes,
        tuple(max(-(-end // PAGE_BYTES), 1) * PAGE_BYTES for end in ends),
        tuple(parameters[indices[0]][2] for indices in members),
        members,
        tuple(sum(_core.rounded_bytes(parameters[i][0]) for i in indices if parameters[i][2]) for indices in members),
        tuple(where[i] for i in range(len(parameters))),
        widening,
    )
