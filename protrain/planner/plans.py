"""What a plan says, and what the engine needs beside it; what a user gives as one is checked here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..base.reading import given_as, parse, shown, typed
from ..errors import PlanError
from ..model.layout import Layout

VERSION = 1  # of a plan's JSON; one that has none is of the first, whose fields are the same
MODES = ("keep", "swap", "checkpoint", "checkpoint_swap")

#: Why compute waits, in the order of csrc/plan/plan.h.
WAITS = ("chunk", "stash_write", "stash_read", "gradients", "update")


@dataclass(frozen=True)
class Forecast:
    """Where the time of a step goes, as simulated: seconds of one step of all its passes. compute, recompute, fixed, drag, update
    and the waits are its sum; lanes are busy beside that, in busy_seconds and moved_bytes by their names: upload, offload,
    gather, disk_read, disk_write, update.

    compute is that of the model's operations, recompute that of blocks run again, fixed what every step takes, drag what compute
    loses to lanes that use the same processor and memory, and to a budget full to its last 36th, update what step() computes;
    wait_seconds by reason: chunk (parameters still being brought), stash_write (memory that activations still take), stash_read
    (activations), gradients (in backward, for them to leave memory), update (in step(), for updates under way).
    """

    compute_seconds: float
    recompute_seconds: float
    fixed_seconds: float
    drag_seconds: float
    update_seconds: float
    wait_seconds: dict[str, float]
    busy_seconds: dict[str, float]
    moved_bytes: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """Decisions for one model, batch shape and budget. Bytes are bytes, `step_seconds` is 0.0 where no time was predicted.

    chunk_bytes is the size of a chunk's parameters at most, n_chunks how many there are, budget_bytes what the plan was made for;
    host_bytes (over a GPU) and disk_bytes are what it takes there. n_persist counts the chunks whose home is the device, the
    first ones in execution order; n_buffer the slots that the others share; n_ahead how many chunks behind the one in use are
    read ahead (0 where a plan does not say it: as its slots let); n_swap the blocks of mode "swap"; n_checkpoint those of both
    checkpoint modes; n_host the chunks behind the persistent ones whose home is host memory. peak_bytes is the sum of
    persistent_bytes (parameters and state), slot_bytes, ring_bytes (for updates under way) and activations with all else.
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
    n_host: int = 0
    n_ahead: int = 0
    persistent_bytes: int = field(default=0, compare=False)
    slot_bytes: int = field(default=0, compare=False)
    ring_bytes: int = field(default=0, compare=False)
    forecast: Forecast | None = field(default=None, compare=False)

    def explain(self, more: Plan | None = None) -> str:
        """The plan in words, lines of at most 160 characters; each range of blocks is named with its mode. more: the plan for a
        larger budget, to say what that would buy."""
        from .explain import explain

        return explain(self, more)

    def to_json(self) -> str:
        """All fields and the version of this form as a JSON object; `from_json` gives an equal plan."""
        return json.dumps({"version": VERSION} | asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the text is no JSON object with a plan's fields, or of another version.
        """
        try:
            values = parse(text)
            version = values.pop("version", 1) if isinstance(values, dict) else VERSION
            if type(version) is not int or version != VERSION:
                raise ValueError(
                    f"its version is {shown(version)}, this protrain reads {VERSION}; plan again, or use the protrain that wrote "
                    "it"
                )
            found = typed(cls, values)
            found._check()
        except ValueError as error:
            raise PlanError(f"plan: this JSON is no plan: {error}") from error
        return found

    def _check(self) -> None:
        """Raises ValueError where its fields contradict each other."""
        if any(mode not in MODES for mode in self.block_modes):
            raise ValueError(f"block_modes has a mode that is none of {', '.join(MODES)}")
        if self.chunk_bytes < 1 or not 0 <= self.n_persist <= self.n_persist + self.n_host <= self.n_chunks:
            raise ValueError(
                f"it has {self.n_chunks} chunks of {self.chunk_bytes} bytes, {self.n_persist} persistent and {self.n_host} in "
                f"host memory"
            )
        smallest = min(getattr(self, f.name) for f in fields(self) if f.type == "int")
        if smallest < 0:
            raise ValueError(f"one of its numbers is {smallest}")


@dataclass(frozen=True)
class Arrangement:
    """A plan with what the engine needs to carry it out.

    accesses: chunks that are not persistent in the order in which a step with the plan's modes reads them.
    static_bytes: parameters and state of persistent chunks, slots and the ring, live always.
    stash_bytes: about what the blocks of swap modes write to disk in one step, a part of the plan's disk_bytes.
    rise_bytes: by how much the backward of a block rises above its saved tensors; 0 where nothing swaps, as the next two.
    needed_bytes: of the plan's peak, without the copies that an optimizer without a kernel keeps in step() while there is room.
    computed_bytes: of that, before step(). Both are 0 where nothing is known of a step.
    headroom_bytes: what reading those back ahead of their use leaves free below needed_bytes. recompute_bytes: the same
    beside what is asked for behind a block that recomputes.
    pending_bytes: of gradients of chunks on disk, that may always wait for their updates; more of them within the peak.
    Over a device (tiers.py): shadow_of_chunk: the chunks at home on the host, and whether they have a shadow there;
    gradient_memory_bytes, staging_bytes: what gradients, and a piece of a load from the disk, pass through; 0: none do;
    host_ring_bytes: of the ring, which is the host's; stash_pool_bytes: for activations of blocks that swap; stash_window_bytes:
    of them on the way at once; between_bytes: of the plan's peak, what is for memory that is lost between tensors.
    unseen_bytes: of smallest_bytes, what no dry run saw.
    first_peak_bytes: the peak of a step under this plan that makes the state of an optimizer without a kernel; plan.peak_bytes
    is without it where no such step comes.
    """

    plan: Plan
    slot_of_chunk: list[int]
    slot_bytes: list[int]
    piece_bytes: int
    n_pieces: int
    accesses: list[int]
    static_bytes: int
    smallest_bytes: int
    needed_bytes: int = 0
    computed_bytes: int = 0
    stash_bytes: int = 0
    headroom_bytes: int = 0
    rise_bytes: int = 0
    recompute_bytes: int = 0
    shadow_of_chunk: dict[int, bool] = field(default_factory=dict)
    gradient_memory_bytes: int = 0
    staging_bytes: int = 0
    host_ring_bytes: int = 0
    stash_pool_bytes: int = 0
    stash_window_bytes: int = 0
    safest_bytes: int = 0
    pending_bytes: int = 0
    between_bytes: int = 0
    first_peak_bytes: int = 0
    unseen_bytes: int = 0


def check_modes(block_modes: Any, n_blocks: int) -> list[str] | None:
    """`block_modes` as a list of modes.

    Raises:
        TypeError, ValueError: it is no list of known modes, one for each block.
    """
    if block_modes is None:
        return None
    if isinstance(block_modes, str) or not hasattr(block_modes, "__iter__"):
        raise TypeError(f"block_modes is {given_as(block_modes)}; give a list of {', '.join(MODES)}, one for each block")
    modes = list(block_modes)
    for number, mode in enumerate(modes):
        if mode not in MODES:
            raise ValueError(f"block_modes[{number}] is {mode!r}; allowed are {', '.join(MODES)}")
    if len(modes) != n_blocks:
        raise ValueError(f"block_modes has {len(modes)} entries; the model has {n_blocks} blocks, give a mode for each")
    return modes


def check_numbers(plan: Any) -> None:
    """Whether what a user gave is a plan whose numbers can be any.

    Raises:
        TypeError: it is no Plan.
        PlanError: one of its numbers is none, or below zero.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is {given_as(plan)}; give a protrain.Plan or None")
    for name in (f.name for f in fields(plan) if f.type == "int"):
        value, least = getattr(plan, name), 1 if name == "chunk_bytes" else 0
        if type(value) is not int or (value < least and name != "n_persist"):  # which is looked at with the model
            raise PlanError(f"plan: {name} is {value!r}; give a whole number, at least {least}")


def check_plan(plan: Plan, layout: Layout, n_blocks: int) -> None:
    """Whether a plan that a user gave is one for this model.

    Raises:
        PlanError: it was made for another model.
        ValueError: it has a block mode that is none of the four.
    """
    if plan.n_chunks != layout.n_chunks or len(plan.block_modes) != n_blocks:
        raise PlanError(
            f"plan: it was made for another model, of {plan.n_chunks} chunks and {len(plan.block_modes)} blocks; "
            f"this one has {layout.n_chunks} chunks and {n_blocks} blocks"
        )
    if not 0 <= plan.n_persist <= plan.n_chunks:
        raise PlanError(f"plan: n_persist is {plan.n_persist}, allowed are 0 to {plan.n_chunks}")
    check_modes(plan.block_modes, n_blocks)
