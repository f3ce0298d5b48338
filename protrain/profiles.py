"""The profile: what was measured of a machine and of a step, as the planner reads it (csrc/profile/profile.h).

Three things, told apart because they come from different places and last differently long. `Machine`: how fast lanes carry bytes
and what that costs compute; measured once (calibration.py) or read from a description of hardware (hardware.py). `Times`: what
each phase of a step computes; from real steps (observed.py), from a rehearsal of the model without its states (rehearsal.py), or
from counted operations (hardware.py). `Profile`: both, with the dry run whose phases they are of and the model's parameters: all
that a plan needs, here or elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .dryrun import DryRun, Phase
from .errors import PlanError
from .footprint import Footprint

#: In the order of csrc/profile/profile.h.
LANES = ("upload", "offload", "gather", "disk_read", "disk_write", "update")
VERSION = 1


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
    stash_drag_seconds_per_byte: compute lost for each byte of activations beside the lane's drag. What is measured has none:
    checksums are a part of the disk's own.
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
    step_update_bytes_per_second: float = 0.0
    step_fixed_seconds: float = 0.0
    access_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    swap_seconds: float = 0.0


@dataclass(frozen=True)
class Times:
    """For each phase of the dry run, in seconds: (its operations, with all they need in place; running its block's forward again
    in a backward). The second is 0.0 for all but the backwards of blocks."""

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
    optimizer without a kernel; then n_states is 0, and plans have no times.
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
            values = json.loads(text)
            if not isinstance(values, dict):
                raise ValueError("it is no object")
            if values.pop("version", None) != VERSION:
                raise ValueError(f"it is not of version {VERSION}")
            run = _known(DryRun, values.pop("run"))
            run["phases"] = tuple(Phase(**_known(Phase, phase)) for phase in run["phases"])
            for name in ("accesses", "access_phases"):
                run[name] = tuple(int(number) for number in run[name])
            run["complete_phase"] = {int(chunk): int(phase) for chunk, phase in run["complete_phase"].items()}
            machine = _known(Machine, values.pop("machine"))
            machine |= {lane: Speed(**_known(Speed, machine[lane])) for lane in LANES if lane in machine}
            times = Times(tuple((float(a), float(b)) for a, b in _known(Times, values.pop("times"))["phases"]))
            parameters = tuple((int(size), int(block), bool(trained)) for size, block, trained in values.pop("parameters"))
            if (footprint := values.pop("footprint", None)) is not None:
                footprint = Footprint(**_known(Footprint, footprint))
                footprint = replace(footprint, state_bytes=tuple(int(size) for size in footprint.state_bytes))
                values["footprint"] = footprint
            found = cls(parameters=parameters, run=DryRun(**run), times=times, machine=Machine(**machine), **_known(cls, values))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"profile: this JSON is no profile: {error}") from error
        if len(found.times.phases) != len(found.run.phases):
            raise PlanError(f"profile: it has times of {len(found.times.phases)} phases, and {len(found.run.phases)} phases")
        return found


def _known(kind: type, values: Any) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    if not isinstance(values, dict) or set(values) - names:
        raise ValueError(f"a {kind.__name__} has the fields {sorted(names)}")
    return dict(values)
