"""Table 2 of ProTrain: the largest GPT-2 that can be trained. Plans for the paper's machines; runs in a small budget here."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.papers.beside import largest as largest_here
from benchmarks.papers.planned import Largest, largest, largest_in_words
from benchmarks.papers.records import MIB, Experiment, Settings, mib, table
from benchmarks.papers.training import Shape

CASES = (
    Largest("rtx3090x4", 1, 8192, 34, "DeepSpeed 15, Colossal-AI 25, FSDP 3"),
    Largest("rtx3090x4", 4, 8192, 37, "DeepSpeed 15, Colossal-AI 25, FSDP 15"),
    Largest("a100x4", 1, 8192, 75, "DeepSpeed 34, Colossal-AI 53, FSDP 10"),
    Largest("a100x4", 4, 8192, 87, "DeepSpeed 37, Colossal-AI 53, FSDP 55"),
)
TINY_CASES = (Largest("v100x8", 8, 16384, 18, ""),)
NAMES = ("plain torch", "all-checkpoint", "protrain")


def measure(settings: Settings) -> dict[str, Any]:
    if settings.device == "cuda":
        shape, memory, most = Shape("gpt2", 1600, 1, 4, 1024, 50257), 16 << 30, 192
    else:
        shape, memory, most = Shape("gpt2", 512, 1, 1, 128), 256 * MIB, 32
    if settings.tiny:
        shape, memory, most = Shape("gpt2", 64, 1, 1, 32), 64 * MIB, 1
    found = largest_here(settings, shape, memory, NAMES, most)
    for one in found:
        one["parameters"] = parameters(shape, one["layers"])
    return {
        "planned": [largest(case) for case in (TINY_CASES if settings.tiny else CASES)],
        "hidden": shape.hidden,
        "batch": shape.batch,
        "seq": shape.seq,
        "memory": memory,
        "largest": found,
    }


def parameters(shape: Shape, layers: int) -> int:
    """Of a GPT-2: 12 h^2 + 13 h in each layer, the embeddings, the last norm."""
    h, positions = shape.hidden, max(shape.seq, 1024)
    return layers * (12 * h * h + 13 * h) + (shape.vocabulary + positions + 2) * h


def body(record: dict[str, Any]) -> str:
    rows = [
        [
            one["name"],
            f"{'≥ ' if one['at_least'] else ''}{one['layers']}",
            f"{one['parameters'] / 1e6:.1f}",
            f"{16 * one['parameters'] / record['memory']:.1f}",
        ]
        for one in record["largest"]
    ]
    reasons = [f"- {one['name']}: {one['reason']}" for one in record["largest"] if one["reason"]]
    about = (
        f"GPT-2 of hidden size {record['hidden']}, {record['batch']} x {record['seq']} tokens, fp32 and AdamW in "
        f"{mib(record['memory'])} MiB, of which only protrain can be told. Held: five steps whose peak is at most 1.1 of it. "
        "On the CPU that is the process's resident high-water mark beyond what it holds before it has a model, which has "
        "more in it than what protrain counts. Doubled and bisected over the layers; ≥: more were not tried. States: 16 "
        "bytes for each parameter."
    )
    return "\n\n".join(
        [
            "## On the paper's machines",
            largest_in_words(record["planned"]),
            "## Here",
            about,
            table(["", "layers", "parameters, M", "states, in budgets"], rows),
            *(["\n".join(reasons)] if reasons else []),
        ]
    )


EXPERIMENT = Experiment("protrain/table2_largest_model", "ProTrain, table 2: the largest trainable model", measure, body)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
