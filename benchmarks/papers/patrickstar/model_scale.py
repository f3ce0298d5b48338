"""PatrickStar's model scale: plans for the largest GPT-2 on its machines; here the least memory that trains several models."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

from benchmarks.papers.planned import Largest, largest, largest_in_words
from benchmarks.papers.records import MIB, Experiment, Settings, mib, table
from benchmarks.papers.training import Shape, Way, train
from benchmarks.papers.turns import RefusedError, Turns
from protrain.cli.model import build

CASES = (Largest("v100x8", 8, 4096, 18, "DeepSpeed 4"), Largest("a100x8-40gb", 8, 8192, 68, "DeepSpeed 30"))
TINY_CASES = (Largest("v100x8", 8, 16384, 18, ""),)
STEPS = 3
TRIES = 5  # budgets: one for the states, then one for the batch


def measure(settings: Settings) -> dict[str, Any]:
    if settings.device == "cuda":
        shape, layers = Shape("gpt2", 1600, 1, 1, 1024, 50257), (12, 24, 48)
    else:
        shape, layers = Shape("gpt2", 256, 1, 1, 128), (8, 32, 96)
    if settings.tiny:
        shape, layers = Shape("gpt2", 64, 1, 1, 32), (4,)
    found = [smallest(replace(shape, layers=number), settings) for number in layers]
    return {"planned": [largest(case) for case in (TINY_CASES if settings.tiny else CASES)], "here": found}


def smallest(shape: Shape, settings: Settings) -> dict[str, Any]:
    """A training in the least budget that refusals name, of a model that was never in memory whole."""
    budget = MIB
    for _ in range(TRIES):
        with Turns(train, shape, Way(budget, meta=True, device=settings.device, disk=settings.disk)) as process:
            try:
                answer = process.ask(STEPS)
                break
            except RefusedError as error:
                named = re.search(r"\((\d+) bytes\)", str(error))
                if named is None:
                    raise
                budget = int(named[1])
    else:
        raise RefusedError(f"{shape.name}: no budget that was named works")
    status = answer["status"]
    parameters = sum(p.numel() for p in build(shape.config()).parameters())
    return {
        "model": shape.name,
        "parameters": parameters,
        "budget_bytes": budget,
        "states_bytes": 16 * parameters,
        "peak_bytes": status["peak_memory_bytes"],
        "disk_bytes": status["disk_bytes"],
        "host_bytes": status["host_bytes"],
        "step_seconds": answer["seconds"][-1],
        "plan": status["plan"],
    }


def body(record: dict[str, Any]) -> str:
    rows = [
        [
            one["model"], f"{one['parameters'] / 1e6:.1f}", mib(one["budget_bytes"]), mib(one["peak_bytes"]),
            f"{one['states_bytes'] / one['budget_bytes']:.1f}",
            f"{(one['disk_bytes'] + one['host_bytes'] + one['plan']['persistent_bytes']) / one['parameters']:.1f}",
            f"{one['step_seconds']:.2f}",
        ]
        for one in record["here"]
    ]  # fmt: skip
    about = (
        f"The least budget that refusals name for a model, and {STEPS} steps in it, fp32 and AdamW, the model made from "
        "meta. States, in budgets: 16 bytes for each parameter, its gradient among them, over the budget. At home, in all tiers: "
        "parameters and state, their shadows, and activations on disk. PatrickStar needs memory for 14 bytes of each "
        "parameter in its two tiers together; with a disk below them the tiers above stop being the limit."
    )
    head = ["model, batch", "parameters, M", "budget, MiB", "peak, MiB", "states, in budgets", "at home, bytes each", "step, s"]
    return "\n\n".join(["## On the paper's machines", largest_in_words(record["planned"]), "## Here", about, table(head, rows)])


EXPERIMENT = Experiment("patrickstar/model_scale", "PatrickStar: model scale", measure, body)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
