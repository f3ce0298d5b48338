"""What a training step holds in memory, phase by phase, and which chunks it reads: what a dry run finds (dryrun.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..errors import Error
from .flops import ordinary_seconds

Rounding = Callable[[int], int]

#: Small tensors: torch's allocator of a GPU cuts them from segments of their own.
SMALL_TENSOR_BYTES = 1 << 20

#: What no dry run sees: tensors that plain numbers become in operations. Up to 12 KB were found, whatever the number of blocks.
SMALL_UNSEEN_BYTES = 16 << 10


#: Of what a step holds whose tensors are larger or smaller by what it computes another one may take such a part more.
VARIED_PART = 8


class DryRunError(Error):
    """The model cannot run on fake tensors; `reason` says why, in one line. seen_bytes: about what a step holds at the least
    beside parameters, by what was seen up to there, where blocks are recomputed and where they swap; 0: not known."""

    def __init__(self, reason: str, seen_bytes: Sequence[int] = (0, 0)) -> None:
        super().__init__(f"the model cannot be measured without running it: {reason}")
        self.reason, self.seen_bytes = reason, seen_bytes


@dataclass(frozen=True)
class Phase:
    """One phase of a step (csrc/plan/plan.h): bytes when it began and at its highest, in the run that keeps and in the one that
    recomputes; and, in the one that keeps, the most that was live at once of what was made in the phase itself, and what a block
    saved there that swap leaves in memory, as it is too small. `block` is the number of the block, -1 outside of blocks. flops,
    moved_bytes and operations are of the run that keeps: what its operations compute (matrix products, convolutions, attention; a
    multiply-add is two), read and write, and how many they are. Of a block's backward again_flops, again_moved_bytes and
    again_operations are what recomputation adds to that: it stops at the last tensor that the block saved, but for one that is
    compiled, which runs to its end; operations -1: not known. swap_entry_bytes, swap_peak_bytes: in the run that swaps, at the
    least; a peak of 0: not known. own_accesses: so many of the accesses in it, the last, are the backward's own, and the others
    those of recomputation; 0: not known. keep_after_bytes, checkpoint_after_bytes, swap_after_bytes: the highest in each run from
    the first moment on at which a chunk's gradients were complete in it; 0: none were, or not known. small_live_bytes: of small
    tensors, at their highest in the run that keeps."""

    block: int
    backward: bool
    keep_entry_bytes: int
    keep_peak_bytes: int
    checkpoint_entry_bytes: int
    checkpoint_peak_bytes: int
    keep_working_bytes: int = 0
    small_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0
    operations: int = 0
    again_flops: int = 0
    again_moved_bytes: int = 0
    again_operations: int = -1
    swap_entry_bytes: int = 0
    swap_peak_bytes: int = 0
    own_accesses: int = 0
    keep_after_bytes: int = 0
    checkpoint_after_bytes: int = 0
    swap_after_bytes: int = 0
    small_live_bytes: int = 0


def by_phase(accesses: Sequence[int], access_phases: Sequence[int], n_phases: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(n_phases)]
    for chunk, number in zip(accesses, access_phases, strict=True):
        found[number].append(chunk)
    return found


def recomputes(mode: str) -> bool:
    """Whether a block of this mode runs its forward again in backward."""
    return mode.startswith("checkpoint")


def swaps(mode: str) -> bool:
    """Whether what a block of this mode saves, or was given, leaves memory between forward and backward."""
    return mode.endswith("swap")


@dataclass(frozen=True)
class DryRun:
    """What a step of one batch shape holds in memory and which chunks it reads.

    phases: before the blocks, forward of each block, head, backward of each block, tail.
    accesses: chunks in the order operations read them, with recomputation; in one phase one after another differs.
    access_phases: number of the phase in which each access happens.
    complete_phase: chunk -> number of the phase in which the last of its gradients comes; chunks that get none are left out.
    less_bytes: chunk -> by how much less is live behind its completion than behind the first one in that phase, in every run;
        what is not there is 0 or not known.
    fixed_bytes: batch, buffers, and parameters outside of all chunks.
    n_together: the most chunks that one operation, or one compiled module, reads.
    output_count: outputs that backward starts from.
    record_bytes: the mean size of what a block saves in one storage that the stash takes, and of blocks the median; 0: nothing,
        or not known.
    outside_bytes: outputs of which the program around the model makes its loss; 0: the model makes it.
    loss_bytes: from when the model has returned to when backward is at its first block, at most, by how much more than at its
        beginning is live; 0: no block has a backward.
    batch_bytes: of fixed_bytes, what the batch is.
    left_bytes: live when backward is over, as outputs that the program holds.
    head_bytes: the highest in the head before that, in the run that keeps, the one that recomputes and the one that swaps.
    varies: whether how large its tensors are hangs on numbers that it computes, so that another step may take more.
    keep_peak_bytes, checkpoint_peak_bytes: the highest of all phases in each run, without fixed_bytes and parameters.
    """

    phases: tuple[Phase, ...]
    accesses: tuple[int, ...]
    access_phases: tuple[int, ...]
    complete_phase: dict[int, int]
    fixed_bytes: int
    n_together: int
    output_count: int
    keep_peak_bytes: int
    checkpoint_peak_bytes: int
    record_bytes: int = 0
    outside_bytes: int = 0
    loss_bytes: int = 0
    less_bytes: dict[int, int] = field(default_factory=dict)
    head_bytes: tuple[int, int, int] = (0, 0, 0)
    batch_bytes: int = 0
    left_bytes: int = 0
    varies: bool = False

    @property
    def varied_bytes(self) -> int:
        """By how much more another step of the batch's shapes is taken to need."""
        return self.checkpoint_peak_bytes // VARIED_PART if self.varies else 0

    @property
    def small_peak_bytes(self) -> int:
        """The highest of small tensors alone, in the run that keeps."""
        return max((phase.small_live_bytes for phase in self.phases), default=0)

    def calls(self) -> list[tuple[int, int, int]]:
        """For each forward of a block: the block, and the numbers of its phases of forward and backward (0: it has none)."""
        forwards = [(phase.block, number) for number, phase in enumerate(self.phases) if phase.block >= 0 and not phase.backward]
        backwards: dict[int, list[int]] = {}
        for number, phase in enumerate(self.phases):
            if phase.block >= 0 and phase.backward:
                backwards.setdefault(phase.block, []).append(number)
        # A block that is used twice runs backward in the reverse order.
        return [(block, number, backwards[block].pop() if backwards.get(block) else 0) for block, number in forwards]

    def kept_bytes(self, block_modes: Sequence[str]) -> int:
        """What blocks hold from forward to backward that they would not if they swapped, or were recomputed where that is not
        known. Of the last one nothing stays that swaps: what it saves is written once its forward is over."""
        found, calls = 0, self.calls()
        last = max((number for _, number, backward in calls if backward), default=0)
        for block, number, backward in calls:
            if backward and not swaps(block_modes[block]):
                begin, end = self.phases[number], self.phases[number + 1]
                recomputed = end.checkpoint_entry_bytes - begin.checkpoint_entry_bytes
                swapped = 0 if number == last else end.swap_entry_bytes - begin.swap_entry_bytes
                least = min(swapped, recomputed) if end.swap_peak_bytes else recomputed
                kept = end.keep_entry_bytes - begin.keep_entry_bytes if block_modes[block] == "keep" else recomputed
                found += max(kept - least, 0)
        return found

    def keeping_within(self, block_modes: Sequence[str], n_bytes: int) -> list[str]:
        """The modes with as many blocks recomputed that are to be kept, and where that is too little swapped that are recomputed,
        the first ones, that others hold no more than this."""
        modes = list(block_modes)
        for mode, less in (("keep", "checkpoint"), ("checkpoint", "swap")):
            for number, now in enumerate(modes):
                if now == mode and self.kept_bytes(modes) > n_bytes:
                    modes[number] = less
        return modes

    def accesses_with(self, block_modes: Sequence[str]) -> list[int]:
        """The order in which a step reads chunks whose blocks have these modes. Where it is not known which accesses are those of
        a backward itself, it is the last to each chunk."""
        found: list[int] = []
        for number, accesses in enumerate(self.accesses_of_phases()):
            phase = self.phases[number]
            if not phase.backward or phase.block < 0 or recomputes(block_modes[phase.block]):
                found += accesses
            elif phase.own_accesses:
                found += accesses[-phase.own_accesses :]
            else:
                found += reversed(dict.fromkeys(reversed(accesses)))
        return found

    def accesses_of_phases(self) -> list[list[int]]:
        """`accesses`, for each phase its own."""
        return by_phase(self.accesses, self.access_phases, len(self.phases))

    def with_loss(self, more_bytes: int) -> DryRun:
        """With a loss that takes so much more than was foreseen, or less, where it is below 0."""
        if not more_bytes or (more_bytes < 0 and not all(self.head_bytes[:2])):
            return self
        head = max(number for number, phase in enumerate(self.phases) if not phase.backward)
        phase, (keep, checkpoint, swap) = self.phases[head], self.head_bytes
        knows_swap = phase.swap_peak_bytes > 0 and (more_bytes > 0 or swap > 0)
        changed = replace(
            phase,
            keep_peak_bytes=max(phase.keep_peak_bytes + more_bytes, keep),
            checkpoint_peak_bytes=max(phase.checkpoint_peak_bytes + more_bytes, checkpoint),
            keep_working_bytes=phase.keep_working_bytes + max(more_bytes, 0),
            swap_peak_bytes=max(phase.swap_peak_bytes + more_bytes, swap) if knows_swap else 0,
        )
        phases = (*self.phases[:head], changed, *self.phases[head + 1 :])
        return replace(
            self,
            phases=phases,
            keep_peak_bytes=max(phase.keep_peak_bytes for phase in phases),
            checkpoint_peak_bytes=max(phase.checkpoint_peak_bytes for phase in phases),
        )

    def counted(self) -> list[tuple[int, int, int]]:
        """Of each phase, nothing recomputed: what it computes, the bytes it reads and writes, and its operations."""
        return [(phase.flops, phase.moved_bytes, phase.operations) for phase in self.phases]

    def same_phases(self, other: DryRun) -> bool:
        """Whether blocks run in the same order, forward and backward."""
        own, others = ([(phase.block, phase.backward) for phase in run.phases] for run in (self, other))
        return own == others

    def computes_as(self, other: DryRun) -> bool:
        """Whether phase for phase the same operations run, whatever chunks their parameters lie in."""
        return self.counted() == other.counted() and self.same_phases(other)

    def recomputed(self) -> dict[int, tuple[int, int, int]]:
        """Number of a block's backward -> what recomputation computes there, the bytes it reads and writes, and its operations:
        those of the whole forward where they are not known."""
        found: dict[int, tuple[int, int, int]] = {}
        for _, forward, backward in self.calls():
            whole, part = self.phases[forward], self.phases[backward]
            if backward and part.again_operations >= 0:
                found[backward] = (part.again_flops, part.again_moved_bytes, part.again_operations)
            elif backward:
                found[backward] = (whole.flops, whole.moved_bytes, whole.operations)
        return found

    def recomputed_parts(self) -> dict[int, float]:
        """Number of a block's backward -> the part of its forward's time that recomputation takes, as counted operations do."""
        forward = {backward: self.phases[number] for _, number, backward in self.calls()}
        parts: dict[int, float] = {}
        for number, again in self.recomputed().items():
            whole = ordinary_seconds(forward[number].flops, forward[number].moved_bytes, forward[number].operations)
            parts[number] = min(ordinary_seconds(*again) / whole, 1.0) if whole > 0 else 1.0
        return parts
