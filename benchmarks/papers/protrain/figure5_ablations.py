"""Figure 5 of ProTrain: what a step takes without one of its optimizations, to what it takes with all of them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

from benchmarks.papers.records import MIB, Experiment, Settings, mib, table
from benchmarks.papers.training import Shape, Way, train
from benchmarks.papers.turns import WARM_STEPS, Turns, take_turns

#: Of the paper's three: its words, and its figure for a GPT-2 of 10 B on four RTX 3090.
PAPER = {
    "no hierarchical chunks": ("no persistent chunk, three buffers", "1.02 to 1.19"),
    "no overlapped update": ("updates in step(), behind backward", "1.22 on average"),
    "all-checkpoint": ("every block recomputed", "1.04 on average"),
}


TELLS_APART = 0.02  # ratios nearer to one than this say nothing


def measure(settings: Settings) -> dict[str, Any]:
    if settings.device == "cuda":
        shape, memory, batches, rounds = Shape("gpt2", 1600, 48, 1, 1024, 50257), 16 << 30, (2, 8), 5
    else:
        shape, memory, batches, rounds = Shape("gpt2", 512, 8, 1, 256), 240 * MIB, (1, 4), 8
    if settings.tiny:
        shape, memory, batches, rounds = Shape("gpt2", 128, 4, 1, 32), 12 * MIB, (2,), 2
    rounds, cases = settings.rounds or rounds, []
    for batch in batches:
        of_batch = replace(shape, batch=batch)
        found = take_turns(of_batch, ways(of_batch, settings, memory), rounds)
        cases.append({"batch": batch, "ways": found})
    return {"shape": asdict(shape), "memory": memory, "rounds": rounds, "cases": cases}


def ways(shape: Shape, settings: Settings, memory: int) -> dict[str, Way]:
    """With everything; without each. What is not left out is as in the plan that protrain found."""
    everything = Way(memory, device=settings.device, disk=settings.disk)
    with Turns(train, shape, everything) as process:
        plan = process.ask(WARM_STEPS)["status"]["plan"]
    n_blocks = len(plan["block_modes"])
    return {
        "protrain": replace(everything, plan=json.dumps(plan)),
        "no hierarchical chunks": replace(everything, plan=json.dumps(plan | {"n_persist": 0, "n_host": 0, "n_buffer": 3})),
        "no overlapped update": replace(everything, plan=json.dumps(plan), late=True),
        "all-checkpoint": replace(everything, block_modes=("checkpoint",) * n_blocks),
    }


def body(record: dict[str, Any]) -> str:
    shape = record["shape"]
    rows = [row(name, case["batch"], found) for case in record["cases"] for name, found in case["ways"].items()]
    refused = [
        f"- {name}, batch {case['batch']}: {found['reason']}"
        for case in record["cases"]
        for name, found in case["ways"].items()
        if "reason" in found
    ]
    about = (
        f"GPT-2 {shape['hidden']}x{shape['layers']}, sequences of {shape['seq']} tokens, fp32 and AdamW in "
        f"{mib(record['memory'])} MiB; {record['rounds']} rounds, a step of each in turns, equal losses. Ratio: the median "
        "of those of the same round, in brackets from quartile to quartile; above 1, what is left out was worth having. The "
        "plan is protrain's own, found in a run before: without persistent chunks and with three slots the rest of it "
        "stays, and memory is left over, as in the paper; with every block recomputed the planner may use what that frees. "
        "Without the overlap (learning rates are set between `backward()` and `step()`) gradients of chunks on disk wait "
        "there, so that half of what it costs is their way."
    )
    head = ["", "batch", "ratio", "paper", "step, s", "read, MiB", "written, MiB", "waits, s", "persistent", "slots", "modes"]
    verdicts = [line for case in record["cases"] for line in not_as_in_the_paper(case)]
    return "\n\n".join([about, table(head, rows), *("\n".join(lines) for lines in (refused, verdicts) if lines)])


def not_as_in_the_paper(case: dict[str, Any]) -> list[str]:
    """A line for what is not slower without: nothing lost, or something gained."""
    own, lines = case["ways"]["protrain"], []
    for name, found in case["ways"].items():
        if name == "protrain" or "reason" in found or found["quartiles"][0] > 1:
            continue
        low, high = found["quartiles"]
        gained = high < 1 or found["ratio"] < 1 - TELLS_APART
        what = "is faster than protrain's own plan" if gained else "differs from protrain's own plan by no more than noise"
        waits = own["status"]["wait_seconds"], found["status"]["wait_seconds"]
        moved = [mib(one["step_read_bytes"] + one["step_write_bytes"]) for one in (own, found)]
        lines.append(
            f"- Not as in the paper: {name}, batch {case['batch']}, {what} ({found['ratio']:.2f}, {low:.2f}–{high:.2f}). A step "
            f"of protrain's plan moves {moved[0]} MiB and waits {waits[0]:.3f} s, this one {moved[1]} MiB and {waits[1]:.3f} s."
        )
    return lines


def row(name: str, batch: int, found: dict[str, Any]) -> list[str]:
    paper = PAPER[name][1] if name in PAPER else "1"
    if "reason" in found:
        return [name, str(batch), "–", paper, *["–"] * 7]
    status, (low, high) = found["status"], found["quartiles"]
    plan = status["plan"]
    modes = {mode: plan["block_modes"].count(mode) for mode in dict.fromkeys(plan["block_modes"])}
    return [
        name, str(batch), f"{found['ratio']:.2f} ({low:.2f}–{high:.2f})", paper, f"{found['median_seconds']:.3f}",
        mib(found["step_read_bytes"]), mib(found["step_write_bytes"]), f"{status['wait_seconds']:.3f}",
        f"{plan['n_persist']}/{plan['n_chunks']}", str(plan["n_buffer"]), ", ".join(f"{n} {mode}" for mode, n in modes.items()),
    ]  # fmt: skip


EXPERIMENT = Experiment("protrain/figure5_ablations", "ProTrain, figure 5: ablations", measure, body)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
