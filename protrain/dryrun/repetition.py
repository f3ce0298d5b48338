"""A dry run of a model whose blocks are alike, without running all of them.

A dry run takes time in proportion to the blocks, and those of a language model say the same again and again. So the model runs
with five: the first, the last, and three that stand for all between. What a middle block adds to memory is constant from one to
the next, so the phases of the others follow: each is that of its neighbour and so many bytes more.

Nothing is taken for granted. Middle blocks must be built alike (same modules, same parameters, same settings but for their own
number) and lie alike in chunks, and the three that ran must have differed in nothing but that constant. Where any of this does
not hold, the whole model runs: slower, and right as well.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..model.layout import Chunks
from .dryrun import dry_run
from .phases import DryRun, Phase, Rounding
from .workspace import Workspace, workspace_bytes

#: Blocks that run: the first, three of the middle, the last.
N_RUN = 5


def dry_run_alike(
    model: nn.Module,
    kwargs: dict[str, Any],
    blocks: Sequence[tuple[str, nn.Module]],
    chunks: Chunks,
    *,
    round_bytes: Rounding,
    workspace: Workspace = workspace_bytes,
) -> tuple[DryRun, int]:
    """The dry run of a model, from five of its blocks where the others are like them.

    Args:
        model: on meta; only read.
        kwargs: what it is called with.
        blocks: as `find_blocks` finds them.
        chunks: of the model's parameters in the order of `named_parameters`.
        round_bytes, workspace: as those of `dry_run`.

    Returns:
        the dry run, and how many blocks really ran.

    Raises:
        DryRunError: as `dry_run` does.
    """
    chunk_of = {id(p): chunk for p, (chunk, _) in zip(model.parameters(), chunks.places, strict=True)}
    places = _chunks_of_blocks(model, [block for _, block in blocks], chunks)
    found = _shortened(model, blocks) if places is not None and _alike([block for _, block in blocks]) else None
    if places is not None and found is not None:
        short, run_blocks, left_out = found
        run = dry_run(short, (), kwargs, run_blocks, chunk_of, round_bytes=round_bytes, workspace=workspace)
        fixed = run.fixed_bytes + sum(round_bytes(size) for block in left_out for size in _buffer_sizes(block))
        whole = _Expansion(run, places, len(blocks)).whole()
        if whole is not None:
            return replace(whole, fixed_bytes=fixed), N_RUN
    modules = [block for _, block in blocks]
    return dry_run(model, (), kwargs, modules, chunk_of, round_bytes=round_bytes, workspace=workspace), len(blocks)


# ---- whether blocks are alike ----


def _buffer_sizes(block: nn.Module) -> list[int]:
    return [buffer.untyped_storage().nbytes() for buffer in block.buffers() if buffer.untyped_storage().nbytes()]


def _settings(block: nn.Module, number: int) -> list[Any]:
    """What decides how a block runs: its modules, their plain settings and parameters. A whole number that counts along with the
    blocks is a block's own number: its distance to the number stands for it."""
    found: list[Any] = []
    for name, module in block.named_modules():
        plain: dict[str, Any] = {}
        for key, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool) and "idx" in key:
                plain[key] = ("number", value - number)
            elif isinstance(value, bool | int | float | str | None | torch.dtype):
                plain[key] = value
        own = [
            (key, tuple(p.shape), p.stride(), p.dtype, p.requires_grad) for key, p in module._parameters.items() if p is not None
        ]
        held = [(key, tuple(b.shape), b.dtype) for key, b in module._buffers.items() if b is not None]
        found.append((name, type(module), plain, own, held))
    return found


def _alike(blocks: list[nn.Module]) -> bool:
    """Whether all blocks but the first and the last are built alike."""
    middle = blocks[1:-1]
    return len(blocks) > N_RUN and all(_settings(block, 1 + i) == _settings(middle[0], 1) for i, block in enumerate(middle))


def _chunks_of_blocks(model: nn.Module, blocks: list[nn.Module], chunks: Chunks) -> list[list[int]] | None:
    """The chunks of each block in order; None where the middle blocks do not lie alike, in chunks of their own."""
    block_of: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for p in block.parameters():
            if id(p) in block_of:
                return None
            block_of[id(p)] = number
    owners = [block_of.get(id(p), -1) for p in model.parameters()]
    found: list[list[int]] = [[] for _ in blocks]
    shapes: list[list[tuple[int, int]]] = [[] for _ in blocks]
    for (chunk, offset), owner in zip(chunks.places, owners, strict=True):
        if owner < 0:
            continue
        if chunk not in found[owner]:
            found[owner].append(chunk)
        shapes[owner].append((found[owner].index(chunk), offset))
    for number in range(1, len(blocks) - 1):
        alone = all({owners[member] for member in chunks.members[chunk]} == {number} for chunk in found[number])
        if not alone or shapes[number] != shapes[1]:
            return None
    return found


def _shortened(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> tuple[nn.Module, list[nn.Module], list[nn.Module]] | None:
    """A copy with the same parameters that has five of the blocks; those five; and those left out of the model. None where the
    blocks are not one whole list."""
    parents = {name.rpartition(".")[0] for name, _ in blocks}
    names = [name.rpartition(".")[2] for name, _ in blocks]
    if len(parents) != 1 or names != [str(number) for number in range(len(blocks))]:
        return None
    parent = parents.pop()
    container = model.get_submodule(parent)
    if not isinstance(container, nn.ModuleList) or len(container) != len(blocks):
        return None
    short = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    listed = short.get_submodule(parent)
    run = [listed._modules[names[number]] for number in (*range(N_RUN - 1), len(blocks) - 1)]
    listed._modules.clear()
    listed._modules.update({str(number): block for number, block in enumerate(run)})
    kept = [block for block in run if block is not None]
    return short, kept, [block for _, block in blocks[N_RUN - 1 : -1]]


# ---- from five to all ----


@dataclass(frozen=True)
class _Expansion:
    """The dry run of five blocks (their chunks numbered as in the whole model) made that of n_blocks."""

    run: DryRun
    places: list[list[int]]
    n_blocks: int

    def whole(self) -> DryRun | None:
        """None where the five did not run as blocks that are alike do."""
        per_phase = self.run.accesses_of_phases()
        if not (self._in_order() and self._constant() and self._same_chunks(per_phase)):
            return None
        complete = self._complete()
        if complete is None:
            return None
        phases = self._phases()
        accesses = self._accesses(per_phase)
        more = self.n_blocks - N_RUN
        keep, again, swap = (
            head and head + more * rise for head, rise in zip(self.run.head_bytes, self._rise()[:3], strict=True)
        )
        return replace(
            self.run,
            phases=phases,
            accesses=tuple(chunk for chunk, _ in accesses),
            access_phases=tuple(phase for _, phase in accesses),
            complete_phase=complete,
            less_bytes=self._less(complete),
            head_bytes=(keep, again, swap),
            keep_peak_bytes=max(phase.keep_peak_bytes for phase in phases),
            checkpoint_peak_bytes=max(phase.checkpoint_peak_bytes for phase in phases),
        )

    @staticmethod
    def _at(block: int, backward: bool, n_blocks: int) -> int:
        """The number of a block's phase among those of n_blocks."""
        return 2 * n_blocks + 1 - block if backward else 1 + block

    def _run_of(self, block: int) -> int:
        """Which of the five stands for a block."""
        return 0 if block == 0 else N_RUN - 1 if block == self.n_blocks - 1 else 2

    def _in_order(self) -> bool:
        forward = [(block, False) for block in range(N_RUN)]
        backward = [(block, True) for block in reversed(range(N_RUN))]
        wanted = [(-1, False), *forward, (-1, False), *backward, (-1, True)]
        return [(phase.block, phase.backward) for phase in self.run.phases] == wanted

    def _constant(self) -> bool:
        """Whether the three in the middle differ by what one block retains, in both directions, and in nothing else."""
        rise = self._rise()
        for backward in (False, True):
            first = self.run.phases[self._at(1, backward, N_RUN)]
            for block in (2, 3):
                phase = self.run.phases[self._at(block, backward, N_RUN)]
                if phase != _shifted(first, block - 1, rise, block):
                    return False
        return True

    def _rise(self) -> tuple[int, int, int, int]:
        """What a middle block retains, kept, recomputed and swapped, and of small tensors, kept."""
        second, third = self.run.phases[self._at(2, False, N_RUN)], self.run.phases[self._at(3, False, N_RUN)]
        return (
            third.keep_entry_bytes - second.keep_entry_bytes,
            third.checkpoint_entry_bytes - second.checkpoint_entry_bytes,
            third.swap_entry_bytes - second.swap_entry_bytes,
            third.small_live_bytes - second.small_live_bytes,
        )

    def _moved(self, chunk_list: list[int], to_block: int) -> list[int]:
        """Accesses of the third block as another middle block would make them."""
        index = {chunk: number for number, chunk in enumerate(self.places[2])}
        return [self.places[to_block][index[chunk]] if chunk in index else chunk for chunk in chunk_list]

    def _same_chunks(self, per_phase: list[list[int]]) -> bool:
        """Whether the three read their own chunks alike, and nobody else does."""
        owner = {chunk: block for block in (1, 2, 3) for chunk in self.places[block]}
        for phase, chunk_list in zip(self.run.phases, per_phase, strict=True):
            if any(owner.get(chunk, phase.block) != phase.block for chunk in chunk_list):
                return False
        return all(
            per_phase[self._at(block, backward, N_RUN)] == self._moved(per_phase[self._at(2, backward, N_RUN)], block)
            for block in (1, 3)
            for backward in (False, True)
        )

    def _complete(self) -> dict[int, int] | None:
        """The phases in which gradients are complete; None where those of a middle block are not in its own backward."""
        middle = {chunk: block for block in range(1, self.n_blocks - 1) for chunk in self.places[block]}
        for block in (1, 2, 3):
            phases = {self.run.complete_phase.get(chunk) for chunk in self.places[block]}
            if phases != {self._at(block, True, N_RUN)} and phases != {None}:
                return None
        trained = self.run.complete_phase.get(self.places[2][0]) is not None if self.places[2] else False
        found = {chunk: self._at(block, True, self.n_blocks) for chunk, block in middle.items()} if trained else {}
        number_of = {phase: number for number, phase in enumerate(self._sources()) if not self._is_middle(phase)}
        for chunk, phase in self.run.complete_phase.items():
            if chunk in middle:
                continue
            if phase not in number_of:
                return None
            found[chunk] = number_of[phase]
        return dict(sorted(found.items()))

    def _less(self, complete: dict[int, int]) -> dict[int, int]:
        """Of all that are complete; those of a middle block are those of the third."""
        found = dict(self.run.less_bytes)
        for block in range(1, self.n_blocks - 1):
            for source, chunk in zip(self.places[2], self.places[block], strict=True):
                found[chunk] = self.run.less_bytes.get(source, 0)
        return {chunk: found[chunk] for chunk in complete if found.get(chunk)}

    def _is_middle(self, phase: int) -> bool:
        return 0 < self.run.phases[phase].block < N_RUN - 1

    def _order(self) -> list[tuple[int, bool]]:
        """(block, backward) of each phase of the whole model."""
        forward = [(block, False) for block in range(self.n_blocks)]
        backward = [(block, True) for block in reversed(range(self.n_blocks))]
        return [(-1, False), *forward, (-1, False), *backward, (-1, True)]

    def _sources(self) -> list[int]:
        """For each phase of the whole model, the phase of the five that stands for it."""
        found = []
        for number, (block, backward) in enumerate(self._order()):
            if block >= 0:
                found.append(self._at(self._run_of(block), backward, N_RUN))
            else:
                found.append(0 if number == 0 else 2 * N_RUN + 2 if backward else N_RUN + 1)
        return found

    def _phases(self) -> tuple[Phase, ...]:
        rise = self._rise()
        found = []
        for number, ((block, _), source) in enumerate(zip(self._order(), self._sources(), strict=True)):
            ends = block == self.n_blocks - 1 or number == self.n_blocks + 1  # the last block and the head
            above = self.n_blocks - N_RUN if ends else block - 2 if self._is_middle(source) else 0
            found.append(_shifted(self.run.phases[source], above, rise, block))
        return tuple(found)

    def _accesses(self, per_phase: list[list[int]]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for number, ((block, _), source) in enumerate(zip(self._order(), self._sources(), strict=True)):
            chunk_list = self._moved(per_phase[source], block) if self._is_middle(source) else per_phase[source]
            found.extend((chunk, number) for chunk in chunk_list)
        return found


def _shifted(phase: Phase, count: int, rise: tuple[int, int, int, int], block: int) -> Phase:
    """The phase with so many more blocks retained."""
    keep, again, swap, small = rise

    def above(known_bytes: int, rise_bytes: int) -> int:
        return known_bytes + count * rise_bytes if known_bytes else 0

    return replace(
        phase,
        block=block,
        keep_entry_bytes=phase.keep_entry_bytes + count * keep,
        keep_peak_bytes=phase.keep_peak_bytes + count * keep,
        checkpoint_entry_bytes=phase.checkpoint_entry_bytes + count * again,
        checkpoint_peak_bytes=phase.checkpoint_peak_bytes + count * again,
        swap_entry_bytes=phase.swap_entry_bytes + count * swap,
        swap_peak_bytes=phase.swap_peak_bytes + count * swap,
        keep_after_bytes=above(phase.keep_after_bytes, keep),
        checkpoint_after_bytes=above(phase.checkpoint_after_bytes, again),
        swap_after_bytes=above(phase.swap_after_bytes, swap),
        small_live_bytes=phase.small_live_bytes + count * small,
    )
