"""Figure 6 of SSDTrain: step and activation peak of GPT, BERT and T5 whose activations stay, are swapped or recomputed."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.papers.records import Experiment, Settings, mib, table
from benchmarks.papers.training import Shape, Way
from benchmarks.papers.turns import take_turns

MODES = ("keep", "swap", "checkpoint")
PAPER = (
    "The paper (two A100 of 40 GB, tensor parallel, (hidden, layers) of (8192, 4), (12288, 3) and (16384, 2)): swapping "
    "takes 28 to 40 % from the activation peak of keep, 47 % at most, at about the same step time."
)


def measure(settings: Settings) -> dict[str, Any]:
    memory, rounds = 2 << 30, 6
    shapes: tuple[Shape, ...] = (
        Shape("gpt2", 512, 4, 4, 512),
        Shape("bert", 512, 4, 4, 512),
        Shape("t5", 512, 4, 4, 512),
    )
    if settings.device == "cuda":
        memory, rounds = 32 << 30, 6
        shapes = tuple(Shape(family, 4096, 4, 8, 1024, 32000) for family in ("gpt2", "bert", "t5"))
    if settings.tiny:
        memory, rounds, shapes = 64 << 20, 1, (Shape("t5", 64, 4, 2, 64),)
    rounds = settings.rounds or rounds
    cases = []
    for shape in shapes:
        ways = {mode: Way(memory, (mode,) * shape.layers, device=settings.device, disk=settings.disk) for mode in MODES}
        found = take_turns(shape, ways, rounds)
        for mode, one in found.items():
            plan = one.get("status", {}).get("plan", {})
            if plan and plan["n_persist"] != plan["n_chunks"]:
                raise RuntimeError(f"{shape.name}, {mode}: states leave memory, which would be measured as well")
        cases.append({"shape": shape.name, "modes": found})
    return {"rounds": rounds, "cases": cases}


def activation_peak(found: dict[str, Any]) -> int:
    """Above what is held between two steps."""
    return int(found["status"]["peak_memory_bytes"] - found["status"]["memory_bytes"])


def body(record: dict[str, Any]) -> str:
    rows, reasons = [], []
    for case in record["cases"]:
        keep = activation_peak(case["modes"]["keep"])
        for mode, found in case["modes"].items():
            if "reason" in found:
                rows.append([f"{case['shape']}, {mode}", *["–"] * 6])
                reasons.append(f"- {case['shape']}, {mode}: {found['reason']}")
                continue
            peak, (low, high) = activation_peak(found), found["quartiles"]
            rows.append(
                [
                    f"{case['shape']}, {mode}", mib(peak), f"{peak / keep - 1:+.0%}", f"{found['median_seconds']:.3f}",
                    f"{found['ratio']:.3f} ({low:.3f}–{high:.3f})", mib(found["step_write_bytes"]),
                    f"{found['status']['wait_seconds']:.3f}",
                ]
            )  # fmt: skip
    about = (
        f"Every state in memory, all blocks of one mode; {record['rounds']} rounds, a step of each in turns, equal losses. "
        f"Step: the median; beside it that of the ratios to keep in the same round, from quartile to quartile. {PAPER}"
    )
    head = ["model, batch, mode", "activation peak, MiB", "to keep", "step, s", "to keep", "written, MiB a step", "waits, s"]
    return "\n\n".join([about, table(head, rows), *(["\n".join(reasons)] if reasons else [])])


EXPERIMENT = Experiment("ssdtrain/figure6_step_and_peak", "SSDTrain, figure 6: step time and activation peak", measure, body)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
