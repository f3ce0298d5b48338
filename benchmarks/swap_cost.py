"""What activations that go to the disk and back cost a step: all blocks swapped beside all kept, in memory that holds all.

    python -m benchmarks.swap_cost --out benchmarks/results/swap_cost.json

Single steps of both take turns in one process; the median of the differences counts, for each byte that the step moves, and with
it what the step waited for the disk. Beside it what `protrain.plan` foretells.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

import protrain
from benchmarks.turns import Run, gpt2, keep_rows, show

N_STEPS = 28
N_WARM = 4
N_PLANS = 3
MEMORY_BYTES = 3 << 30
MODELS = {
    "GPT-2 1024x3, 2x256": (1024, 3, (2, 256)),
    "GPT-2 768x4, 2x256": (768, 4, (2, 256)),
    "GPT-2 512x6, 2x256": (512, 6, (2, 256)),
    "GPT-2 384x6, 2x256": (384, 6, (2, 256)),
    "GPT-2 256x4, 8x256": (256, 4, (8, 256)),
    "GPT-2 256x8, 4x128": (256, 8, (4, 128)),
}


def same_weights(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    return gpt2(hidden, layers)


def moved_bytes(run: Run) -> int:
    status = protrain.status(run.model)
    return status.disk_read_bytes + status.disk_write_bytes


def foretold(hidden: int, layers: int, ids: torch.Tensor) -> dict[str, float]:
    """Seconds of a step with all blocks in a mode, the median of some plans."""
    batch = {"input_ids": ids, "labels": ids}

    def seconds(mode: str) -> float:
        return protrain.plan(gpt2(hidden, layers), batch, memory=MEMORY_BYTES, block_modes=[mode] * layers).step_seconds

    pairs = [(seconds("keep"), seconds("swap")) for _ in range(N_PLANS)]
    return {"keep": statistics.median(keep for keep, _ in pairs), "swap": statistics.median(swap for _, swap in pairs)}


def measure(name: str) -> dict[str, Any]:
    hidden, layers, shape = MODELS[name]
    ids = torch.randint(1024, shape, generator=torch.Generator().manual_seed(0))
    keep, swap = (Run(partial(same_weights, hidden, layers), MEMORY_BYTES, [mode] * layers) for mode in ("keep", "swap"))
    waits, before = [], 0
    for number in range(N_STEPS):
        if number == N_WARM:
            before = moved_bytes(swap)
        keep.step(ids)
        swap.step(ids)
        waits.append(protrain.status(swap.model).wait_seconds)
    pairs = list(zip(keep.seconds, swap.seconds, strict=True))[N_WARM:]
    moved = (moved_bytes(swap) - before) / len(pairs)
    if keep.losses != swap.losses:
        raise SystemExit(f"{name}: the losses differ")
    lost = statistics.median(b - a for a, b in pairs)
    for run in (keep, swap):
        protrain.unwrap(run.model)
    plans = foretold(hidden, layers, ids)
    return {
        "model": name,
        "keep_seconds": round(statistics.median(a for a, _ in pairs), 4),
        "swap_to_keep": round(statistics.median(b / a for a, b in pairs), 3),
        "foretold_swap_to_keep": round(plans["swap"] / plans["keep"], 3),
        "wait_seconds": round(statistics.median(waits[N_WARM:]), 4),
        "moved_bytes": int(moved),
        "lost_ns_per_byte": round(lost / moved * 1e9, 4),
        "foretold_ns_per_byte": round((plans["swap"] - plans["keep"]) / moved * 1e9, 4),
    }


if __name__ == "__main__":
    keep_rows("swap_cost", __doc__, MODELS, measure, show)
