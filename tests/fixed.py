"""Times that were not measured: what a plan keeps in memory hangs on times, and those of a busy machine are others every run."""

from __future__ import annotations

from dataclasses import replace

import protrain
from protrain.planner.profiles import Machine, Speed, Times


def with_fixed_times(found: protrain.Profile) -> protrain.Profile:
    """The profile on a machine that computes 2 ms in each phase, 1 ms of it again, and has a disk of 1 MB/s either way: too slow
    for a chunk to go there that need not."""
    times = tuple((2e-3, 1e-3 if phase.backward and phase.block >= 0 else 0.0) for phase in found.run.phases)
    disk, update = Speed(1e6, 1e6, 0.0), Speed(1e10, 1e10, 0.0)
    machine = Machine(disk_read=disk, disk_write=disk, update=update, step_update_bytes_per_second=1e10)
    return replace(found, times=Times(times), machine=machine)
