"""The profile: what was measured of a machine and of a step, as the planner reads it (csrc/profile/profile.h).

Three things, told apart because they come from different places and last differently long. `Machine`: how fast lanes carry bytes
and what that costs compute; measured once (calibration.py) or read from a description of hardware (hardware.py). `Times`: what
each phase of a step computes; from real steps (observed.py), from a rehearsal of the model without its states (rehearsal.py), or
from counted operations (offline.py). `Profile`: both, with the dry run whose phases they are of and the model's parameters: all
that a plan needs, here or elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from ..base.reading import parse, typed
from ..device.overhead import Overhead
from ..dryrun.phases import DryRun
from ..errors import PlanError
from ..optim.footprint import Footprint

#: In the order of csrc/profile/profile.h.
LANES = ("upload", "offload", "gather", "disk_read", "disk_write", "update")
VERSION = 3
MOST_BLOCKS, MOST_STATES = 1 << 16, 64
#: Of parameters and state at home on a device, where no step has told.
DEVICE_UPDATE_BYTES_PER_SECOND = 1e11


@dataclass(frozen=True)
class Speed:
    """Of a lane: bytes each second while compute runs (0.0: there is no such lane) and while it waits (0.0: the same), and the
    seconds of compute lost for each byte."""

    bytes_per_second: float = 0.0
    idle_bytes_per_second: float = 0.0
    drag_seconds_per_byte: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What a step takes beside its own computation. The update lane's bytes are those of parameters and state, 12 for each
    parameter of Adam in fp32.

    disk_overlap, link_overlap: 1.0 where both directions share the time, 2.0 where neither slows the other.
    stash_drag_seconds_per_byte: compute lost for each byte of activations beside the lane's drag: measured, it is that of the
    checksums that compute's threads take. Negative where activations lose less, which is never below nothing.
    request_drag_seconds: compute lost for each request to the disk, beside what its bytes cost.
    memory_drag_seconds_per_byte: compute that does nothing but walk through memory loses so much more for each byte of the disk's
    lanes.
    step_update_bytes_per_second: of parameters and state at home on the device, updated in step().
    step_fixed_seconds: of each step; access_seconds: of each demand of a chunk that is there; checkpoint_seconds: of each
    recomputed block beside recomputation; swap_seconds: of each block of a swap mode.
    """

    upload: Speed = field(default_factory=Speed)
    offload: Speed = field(default_factory=Speed)
    gather: Speed = field(default_factory=Speed)
    disk_read: Speed = field(default_factory=Speed)
    disk_write: Speed = field(default_factory=Speed)
    update: Speed = field(default_factory=Speed)
    disk_overlap: float = 1.0
    link_overlap: float = 2.0
    stash_drag_seconds_per_byte: float = 0.0
    request_drag_seconds: float = 0.0
    memory_drag_seconds_per_byte: float = 0.0
    step_update_bytes_per_second: float = 0.0
    step_fixed_seconds: float = 0.0
    access_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    swap_seconds: float = 0.0

    @property
    def checksum_seconds_per_byte(self) -> float:
        """Compute lost for each byte whose checksum its threads take; 0.0 where that is not known."""
        return max(self.stash_drag_seconds_per_byte, 0.0)


@dataclass(frozen=True)
class Times:
    """For each phase of the dry run, in seconds: (its operations, with all they need in place; in a block's backward, running its
    forward again up to the last tensor that it saved). The second is 0.0 for all other phases."""

    phases: tuple[tuple[float, float], ...]

    @property
    def compute_seconds(self) -> float:
        """Of one pass, nothing recomputed."""
        return sum(compute for compute, _ in self.phases)


@dataclass(frozen=True)
class Profile:
    """All that a plan needs of a model, a batch and a machine.

    parameters: (bytes, number of its block or -1, trained) of each parameter in execution order. run.accesses and
    run.complete_phase are of chunks of chunk_bytes, so a plan from this profile has chunks of that size. footprint: of an
    optimizer without a kernel; then n_states is 0, and plans have no times. overhead: where it was measured over a device that
    has memory of its own; plans from it place homes as a session does there (tiers.py). n_states counts arrays of state in arrays
    of parameters; widening: so many are one, 2 where fp32 is beside bf16.
    """

    parameters: tuple[tuple[int, int, bool], ...]
    n_blocks: int
    n_states: int
    chunk_bytes: int
    run: DryRun
    times: Times
    machine: Machine
    n_passes: int = 1
    grads_outlive_backward: bool = False
    model: str = ""
    footprint: Footprint | None = None
    overhead: Overhead | None = None
    widening: int = 1

    def to_json(self) -> str:
        """All of it as a JSON object; `from_json` gives an equal profile."""
        return json.dumps({"version": VERSION} | asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote.

        Raises:
            PlanError: the text is no JSON object with a profile's fields, or of another version.
        """
        try:
            values = parse(text)
            if not isinstance(values, dict):
                raise ValueError("it is no object")
            if values.pop("version", None) != VERSION:
                raise ValueError(f"it is not of version {VERSION}")
            found = typed(cls, values)
            found._check()
        except ValueError as error:
            raise PlanError(f"profile: this JSON is no profile: {error}") from error
        return found

    def _check(self) -> None:
        """Raises ValueError where its parts contradict each other."""
        run, n_phases = self.run, len(self.run.phases)
        if len(self.times.phases) != n_phases:
            raise ValueError(f"it has times of {len(self.times.phases)} phases, and {n_phases} phases")
        if len(run.access_phases) != len(run.accesses):
            raise ValueError(f"it has {len(run.accesses)} accesses, and phases of {len(run.access_phases)}")
        if not all(0 <= phase < n_phases for phase in (*run.access_phases, *run.complete_phase.values())):
            raise ValueError(f"it names a phase that is none of its {n_phases}")
        if any(phase.own_accesses > len(found) for phase, found in zip(run.phases, run.accesses_of_phases(), strict=True)):
            raise ValueError("it names more accesses of a phase's own than there are in it")
        if not self.parameters:
            raise ValueError("it has no parameters")
        named = [*(block for _, block, _ in self.parameters), *(phase.block for phase in run.phases)]
        if not 0 <= self.n_blocks <= MOST_BLOCKS or any(block >= self.n_blocks for block in named):
            raise ValueError(
                f"it has {self.n_blocks} blocks; its parameters or phases name others, or they are more than {MOST_BLOCKS}"
            )
        if self.chunk_bytes < 1 or any(size < 0 for size, _, _ in self.parameters):
            raise ValueError(f"chunks of {self.chunk_bytes} bytes, or a parameter of less than none")
        if not 0 <= self.n_states <= MOST_STATES or self.n_passes < 1:
            raise ValueError(f"{self.n_states} arrays of state, {self.n_passes} passes in a step")
        if not 1 <= self.widening <= MOST_STATES or self.n_states % self.widening:
            raise ValueError(f"{self.n_states} arrays of state, each as wide as {self.widening} of parameters")
        if self.overhead is not None and (min(asdict(self.overhead).values()) < 0 or self.overhead.part == 1):
            raise ValueError(f"an overhead of {self.overhead.fixed_bytes} bytes and one part in {self.overhead.part}")
        if self.footprint is not None:
            self._check_footprint(self.footprint)

    def _check_footprint(self, footprint: Footprint) -> None:
        for of in (footprint.state_bytes, footprint.value_bytes, footprint.work_bytes):
            if len(of) != len(self.parameters):
                raise ValueError(f"it has what an optimizer takes for {len(of)} parameters, and {len(self.parameters)}")
        if any(not 0 <= number < len(self.parameters) for number in footprint.order):
            raise ValueError(f"its optimizer names a parameter that is none of its {len(self.parameters)}")
