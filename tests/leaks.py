"""Does anything stay? Rounds of wrap, train, save, load, unwrap, and many steps of one model: memory, files, threads, disk.

    python tests/leaks.py --rounds 50 --steps 1000

After a few rounds and steps, which fill caches, nothing may grow: descriptors, threads, tensors' memory and the store's file not
at all, resident memory by less than what a model has. Figures are one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from crashes import MEMORY, STEPS, adamw, batch, make, train_one

import protrain
from protrain import _core

MIB = 1 << 20
SETTLED = 4  # rounds, and parts of the steps, that fill caches
#: Of resident memory, that is no leak: what the allocators of C and Python keep, tens of KiB, and two pages that the kernel made
#: huge. A model has 6.3 MiB.
GROWTH_BYTES = 4 * MIB
MODES = ["swap", "checkpoint", "checkpoint_swap", "keep", "swap", "checkpoint"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counts() -> dict[str, int]:
    """What may not grow at all."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "live_bytes": _core.memory_stats()["live_bytes"],
    }


def one_round(number: int, disk: Path) -> None:
    model: Any = make()
    options: dict[str, Any] = [{}, {"block_modes": MODES}, {"max_grad_norm": 0.5}, {"accumulate": 2}][number % 4]
    model, optimizer = protrain.wrap(model, adamw(model), memory=MEMORY, disk=disk / "store", **options)
    for step in range(2):
        train_one(model, optimizer, step)
    if number % 3 == 0:
        protrain.save(model, optimizer, disk / "checkpoint")
        protrain.load(model, optimizer, disk / "checkpoint")
    if number % 5 == 4:
        model(batch(0))  # a graph that nobody uses
    protrain.unwrap(model)


def rounds(count: int, disk: Path) -> dict[str, int]:
    """Returns what is left of the last one."""
    first: dict[str, int] = {}
    resident = 0
    for number in range(count + SETTLED):
        one_round(number, disk)
        found = counts()
        if number == SETTLED - 1:
            first, resident = found, resident_bytes()
        assert not first or found == first, f"round {number}: {found}, after round {SETTLED} it was {first}"
        assert not list((disk / "store").iterdir())
    growth = resident_bytes() - resident
    assert growth < GROWTH_BYTES, f"resident memory grew by {growth} bytes in {count} rounds"
    return {"rounds": count, "resident_growth_kib": growth >> 10, **found}


def steps(count: int, disk: Path) -> dict[str, int]:
    model: Any = make()
    model, optimizer = protrain.wrap(model, adamw(model), memory=MEMORY, disk=disk / "store", block_modes=MODES)
    first: dict[str, int] = {}
    resident = store = 0
    part = max(count // 8, 10)
    for number in range(count + part):
        train_one(model, optimizer, number % STEPS)
        if number == part - 1:
            first, resident, store = counts(), resident_bytes(), protrain.status(model).disk_bytes
    found = counts()
    growth, on_disk = resident_bytes() - resident, protrain.status(model).disk_bytes
    slack = 2 * MIB  # of tensors' memory: what is in a slot or read ahead when it is looked at
    assert found["descriptors"] == first["descriptors"], f"{found}, before {first}"
    assert found["threads"] == first["threads"], f"{found}, before {first}"
    assert found["live_bytes"] <= first["live_bytes"] + slack, f"{found}, before {first}"
    assert growth < GROWTH_BYTES, f"resident memory grew by {growth} bytes in {count} steps"
    assert on_disk <= store + slack, f"{on_disk} bytes on disk, before {store}"
    protrain.unwrap(model)
    return {"steps": count, "resident_growth_kib": growth >> 10, "disk_growth_kib": (on_disk - store) >> 10}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=50)
    words.add_argument("--steps", type=int, default=1000)
    given = words.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=os.environ.get("PROTRAIN_DISK")) as work:
        (Path(work) / "store").mkdir()
        found = {"of rounds": rounds(given.rounds, Path(work)), "of steps": steps(given.steps, Path(work))}
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
