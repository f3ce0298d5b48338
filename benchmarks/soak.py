"""Does anything grow? Many steps with mixed block modes and changing sequence lengths, memory and disk looked at after each.

    python benchmarks/soak.py --steps 300 --out benchmarks/results/soak.json
    python benchmarks/soak.py --steps 300 --memory 96MiB --out benchmarks/results/soak_planned.json

A GPT-2 of four blocks, one of each mode. After the lengths have all been seen once, resident memory and the store's file stay
where they are: the record has both as their lowest and highest in the first and in the last third of the steps. Their plan is
the one that the first steps of a training of its own end with, as plans change with the machine's load. With --memory nobody
says how: the planner's plans are used, in a budget of that size, and the record says how many there were. Ends with status 1
where the last third's highest lies above the first third's: at all in the file, by more than SLACK_BYTES in memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from typing import NamedTuple

import torch
import transformers

import protrain

MIB = 1 << 20
MODES = ["swap", "checkpoint_swap", "checkpoint", "keep"]
LENGTHS = [512, 128, 384, 256, 512, 64, 448, 320]
SLACK_BYTES = 4 * MIB  # pages of Python's and torch's own that come and go


def resident_bytes() -> int:
    """Of this process, now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def store_file_bytes(folder: str) -> int:
    """Of the files in the folder that have no name any more and are open here."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(folder) and target.endswith("(deleted)"):
            total += os.stat(f"/proc/self/fd/{number}").st_blocks * 512
    return total


def spread(values: list[int]) -> dict[str, float]:
    return {"lowest_mib": round(min(values) / MIB, 1), "highest_mib": round(max(values) / MIB, 1)}


def grown(resident: list[int], disk: list[int], third: int) -> list[str]:
    """What is higher in the last third of the steps than it ever was in the first, in words. In bytes, one of each step."""
    found = []
    for what, values, slack_bytes in (("resident memory", resident, SLACK_BYTES), ("the store's file", disk, 0)):
        first, last = max(values[len(LENGTHS) : third]), max(values[-third:])
        if last > first + slack_bytes:
            found.append(f"{what} grew from {first / MIB:.1f} to {last / MIB:.1f} MiB")
    return found


class Soaked(NamedTuple):
    """Of a training, in bytes after each step; and how it ended."""

    resident: list[int]
    disk: list[int]
    n_plans: int
    status: protrain.Status


def train(folder: str, steps: int, memory: str, plan: protrain.Plan | None, modes: list[str] | None) -> Soaked:
    """One training of a session of its own."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=512, n_positions=512, n_embd=256, n_layer=len(MODES), n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    resident, disk, plans = [], [], set()
    model, optimizer = protrain.wrap(model, optimizer, memory=memory, disk=folder, plan=plan, block_modes=modes)
    for step in range(steps):
        ids = torch.randint(0, 512, (4, LENGTHS[step % len(LENGTHS)]))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        resident.append(resident_bytes())
        disk.append(store_file_bytes(os.path.realpath(folder)))
        status = protrain.status(model)
        plans.add((status.plan.n_persist, status.plan.n_buffer, status.plan.block_modes))
    protrain.unwrap(model)
    return Soaked(resident, disk, len(plans), status)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--steps", type=int, default=300)
    words.add_argument("--memory", metavar="SIZE", help="the planner's own plans in this budget, in place of one of each mode")
    words.add_argument("--out", help="also write the record there")
    given = words.parse_args()
    if given.steps < 6 * len(LENGTHS):
        words.error(f"--steps {given.steps} is too few to compare thirds; give {6 * len(LENGTHS)} or more")
    with tempfile.TemporaryDirectory(dir=os.environ.get("PROTRAIN_DISK")) as folder:
        if given.memory:
            found = train(folder, given.steps, given.memory, None, None)
        else:
            first = train(folder, len(LENGTHS), "1GiB", None, MODES)
            found = train(folder, given.steps, "1GiB", first.status.plan, None)
    third = given.steps // 3
    resident, disk, status = found.resident, found.disk, found.status
    record = {
        "command": f"python benchmarks/soak.py --steps {given.steps}" + (f" --memory {given.memory}" if given.memory else ""),
        "block_modes": status.plan.block_modes,
        "n_plans": found.n_plans,
        "budget_mib": round(status.budget_bytes / MIB, 1),
        "peak_mib": round(status.peak_memory_bytes / MIB, 1),
        "lengths": LENGTHS,
        "disk_write_mib_per_step": round(status.disk_write_bytes / status.steps / MIB, 1),
        "resident_first_third": spread(resident[len(LENGTHS) : third]),
        "resident_last_third": spread(resident[-third:]),
        "store_file_first_third": spread(disk[len(LENGTHS) : third]),
        "store_file_last_third": spread(disk[-third:]),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if given.out:
        with open(given.out, "w") as file:
            file.write(text + "\n")
    if growth := grown(resident, disk, third):
        raise SystemExit("; ".join(growth))


if __name__ == "__main__":
    main()
