"""The plan: what stays in memory, what shares slots, and each block's mode.

Sizes come from a dry run of the batch (dryrun.py), decisions from the C core (csrc/plan). Today a simple rule decides: keep
activations where they fit, then keep chunks in memory, the first in execution order first. It never chooses the modes swap and
checkpoint_swap; where they are given, it counts them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any

from . import _core
from .dryrun import DryRun
from .errors import BudgetError, PlanError
from .layout import Layout
from .sizes import format_bytes

MODES = ("keep", "swap", "checkpoint", "checkpoint_swap")


@dataclass(frozen=True)
class Plan:
    """Decisions for one model, batch shape and budget. Bytes are bytes, `step_seconds` is 0.0 where no time was predicted.

    n_persist counts the chunks whose home is the device, the first ones in execution order; n_buffer the slots that the others
    share; n_swap the blocks of mode "swap"; n_checkpoint those of both checkpoint modes.
    """

    chunk_bytes: int
    n_chunks: int
    n_persist: int
    n_buffer: int
    block_modes: tuple[str, ...]
    n_swap: int
    n_checkpoint: int
    step_seconds: float
    peak_bytes: int
    host_bytes: int
    disk_bytes: int
    budget_bytes: int = field(default=0, compare=False)

    def explain(self) -> str:
        """The plan in words, lines of at most 160 characters; each range of blocks is named with its mode."""
        away = self.n_chunks - self.n_persist
        budget = f" of a budget of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
        lines = [
            f"peak memory {format_bytes(self.peak_bytes)}{budget}, {format_bytes(self.disk_bytes)} on disk",
            (
                f"{self.n_chunks} chunks of at most {format_bytes(self.chunk_bytes)} (larger parameters have one of their own): "
                f"{self.n_persist} stay in memory, {away} come from disk through {self.n_buffer} slots"
            ),
        ]
        first = 0
        for mode, run in groupby(self.block_modes):
            count = len(list(run))
            last = first + count - 1
            lines.append(f"block {first} {mode}" if count == 1 else f"blocks {first}-{last} {mode}")
            first += count
        return "\n".join(lines)

    def to_json(self) -> str:
        """All fields as a JSON object; `from_json` gives an equal plan."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the text is no JSON object with a plan's fields.
        """
        try:
            values = json.loads(text)
            known = {f.name for f in fields(cls)}
            if not isinstance(values, dict) or set(values) - known:
                raise ValueError(f"fields {sorted(known)} are known")
            return cls(**values | {"block_modes": tuple(values["block_modes"])})
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"plan: this JSON is no plan: {error}") from error


@dataclass(frozen=True)
class Arrangement:
    """A plan with what the engine needs to carry it out.

    static_bytes: parameters and state of persistent chunks, slots and the ring, live always.
    stash_bytes: about what the blocks of swap modes write to disk in one step, a part of the plan's disk_bytes.
    rise_bytes: by how much the backward of a block rises above its begin; 0 where nothing swaps.
    headroom_bytes: what reading those back ahead of their use leaves free below the plan's peak_bytes; 0 where nothing swaps.
    """

    plan: Plan
    slot_of_chunk: list[int]
    slot_bytes: list[int]
    piece_bytes: int
    n_pieces: int
    accesses: list[int]
    static_bytes: int
    smallest_bytes: int
    stash_bytes: int = 0
    headroom_bytes: int = 0
    rise_bytes: int = 0


def check_modes(block_modes: Any, n_blocks: int) -> list[str] | None:
    """`block_modes` as a list of modes.

    Raises:
        TypeError, ValueError: it is no list of known modes, one for each block.
    """
    if block_modes is None:
        return None
    if isinstance(block_modes, str) or not hasattr(block_modes, "__iter__"):
        raise TypeError(f"block_modes is {block_modes!r}; give a list of {', '.join(MODES)}, one for each block")
    modes = list(block_modes)
    for number, mode in enumerate(modes):
        if mode not in MODES:
            raise ValueError(f"block_modes[{number}] is {mode!r}; allowed are {', '.join(MODES)}")
    if len(modes) != n_blocks:
        raise ValueError(f"block_modes has {len(modes)} entries; the model has {n_blocks} blocks, give a mode for each")
    return modes


def check_plan(plan: Any, layout: Layout, n_blocks: int) -> None:
    """Whether a plan that a user gave is one for this model.

    Raises:
        TypeError: it is no Plan.
        PlanError: it was made for another model.
        ValueError: it has a block mode that is none of the four.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is {plan!r}; give a protrain.Plan or None")
    if plan.n_chunks != layout.n_chunks or len(plan.block_modes) != n_blocks:
        raise PlanError(
            f"plan: it was made for another model, of {plan.n_chunks} chunks and {len(plan.block_modes)} blocks; "
            f"this one has {layout.n_chunks} chunks and {n_blocks} blocks"
        )
    if not 0 <= plan.n_persist <= plan.n_chunks:
        raise PlanError(f"plan: n_persist is {plan.n_persist}, allowed are 0 to {plan.n_chunks}")
    check_modes(plan.block_modes, n_blocks)


def linear_accesses(n_chunks: int) -> list[int]:
    """The order of accesses where none was recorded: forward through all chunks, then back."""
    return [*range(n_chunks), *reversed(range(n_chunks))]


def arrange(
    layout: Layout,
    n_blocks: int,
    n_states: int,
    budget_bytes: int,
    run: DryRun | None,
    *,
    modes: list[str] | None = None,
    n_persist: int | None = None,
    grads_outlive_backward: bool = False,
    unknown_bytes: int = 0,
) -> Arrangement:
    """Decide for one batch shape, as seen by a dry run; without one for the safest plan of states alone.

    Args:
        unknown_bytes: activations where no dry run knows them.

    Raises:
        BudgetError: nothing fits, with the smallest budget that does.
    """
    last_phase = max(len(run.phases) - 1, 0) if run else 0
    chunks = [
        (size, grads, n_states * size if trained else 0, run.complete_phase.get(number, last_phase) if run else 0)
        for number, (size, grads, trained) in enumerate(zip(layout.sizes, layout.grad_bytes, layout.trained, strict=True))
    ]
    accesses = list(run.accesses) if run else linear_accesses(layout.n_chunks)
    phases = (
        [
            (
                p.block,
                p.backward,
                p.keep_entry_bytes,
                p.keep_peak_bytes,
                p.checkpoint_entry_bytes,
                p.checkpoint_peak_bytes,
                p.keep_working_bytes,
            )
            for p in run.phases
        ]
        if run
        else []
    )
    if run is None and modes is None:
        modes = ["checkpoint"] * n_blocks
    found = _core.make_plan(
        budget_bytes,
        (run.fixed_bytes if run else 0) + unknown_bytes,
        chunks,
        phases,
        accesses,
        run.n_together if run else 1,
        2 + n_states,
        n_blocks,
        None if modes is None else [MODES.index(mode) for mode in modes],
        -1 if n_persist is None else n_persist,
        grads_outlive_backward,
    )
    block_modes = tuple(MODES[mode] for mode in found["modes"])
    plan = Plan(
        layout.chunk_bytes,
        layout.n_chunks,
        found["n_persist"],
        found["n_buffer"],
        block_modes,
        block_modes.count("swap"),
        sum(mode.startswith("checkpoint") for mode in block_modes),
        0.0,
        found["peak_bytes"],
        0,
        found["disk_bytes"],
        budget_bytes,
    )
    return Arrangement(
        plan,
        found["slot_of_chunk"],
        found["slot_bytes"],
        found["piece_bytes"],
        found["n_pieces"],
        [chunk for chunk in accesses if chunk >= plan.n_persist],
        found["static_bytes"],
        found["smallest_bytes"],
        found["stash_bytes"],
        found["headroom_bytes"],
        found["rise_bytes"],
    )


def refuse(error: BudgetError, what: str) -> BudgetError:
    """The planner's refusal in the words of the interface."""
    return BudgetError(
        f"memory: {what} needs {format_bytes(error.needed_bytes)}, the budget is {format_bytes(error.budget_bytes)}; "
        f"the smallest budget that works is {format_bytes(error.smallest_bytes)} ({error.smallest_bytes} bytes)",
        needed_bytes=error.needed_bytes,
        budget_bytes=error.budget_bytes,
        smallest_bytes=error.smallest_bytes,
    )
