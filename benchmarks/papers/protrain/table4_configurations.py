"""Table 4 of ProTrain: the configurations that the search finds, for the paper's machines beside its own, and for this one."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import protrain
from benchmarks.papers.families import gpt2_config
from benchmarks.papers.records import MIB, Experiment, Settings, mib, table
from benchmarks.papers.training import Shape, Way, train
from benchmarks.papers.turns import WARM_STEPS, Turns
from protrain.planner.hardware import load_hardware
from protrain.planner.offline import plan_offline

SEQ = 1024


@dataclass(frozen=True)
class Row:
    """A row of the paper's table. batch: of all devices together."""

    name: str
    model: str
    hidden: int
    machine: str
    batch: int
    n_block: int
    n_checkpoint: int
    n_swap: int
    n_chunk: int
    n_persist: int
    n_buffer: int


ROWS = (
    Row("A", "GPT2-1B", 1536, "rtx3090x4", 8, 32, 0, 0, 12, 12, 0),
    Row("A", "GPT2-1B", 1536, "a100x4", 8, 32, 0, 0, 12, 12, 0),
    Row("B", "GPT2-1B", 1536, "rtx3090x4", 64, 32, 24, 2, 12, 2, 3),
    Row("C", "GPT2-1B", 1536, "a100x4", 64, 32, 0, 0, 12, 12, 0),
    Row("D", "GPT2-10B", 4096, "rtx3090x4", 8, 48, 48, 0, 49, 3, 46),
    Row("E", "GPT2-10B", 4096, "a100x4", 8, 48, 0, 0, 49, 15, 3),
)


def measure(settings: Settings) -> dict[str, Any]:
    if settings.device == "cuda":
        shape, memory, batches = Shape("gpt2", 1600, 32, 1, 1024, 50257), 16 << 30, (2, 16)
    else:
        shape, memory, batches = Shape("gpt2", 384, 12, 1, 256), 256 * MIB, (1, 4, 8)
    if settings.tiny:
        shape, memory, batches = Shape("gpt2", 64, 2, 1, 32), 16 * MIB, (1,)
    here = [found_here(replace(shape, batch=batch), memory, settings) for batch in batches]
    return {
        "planned": [planned(row) for row in (ROWS[:1] if settings.tiny else ROWS)],
        "shape": asdict(shape),
        "memory": memory,
        "here": here,
    }


def planned(row: Row) -> dict[str, Any]:
    """A row of the paper with our plan's numbers."""
    hardware = load_hardware(row.machine)
    config = gpt2_config(row.hidden, row.n_block, SEQ)
    plan = plan_offline(config, hardware, batch=row.batch // hardware.n_devices, seq=SEQ)
    return {"paper": asdict(row), "ours": numbers(plan)}


def numbers(plan: Any) -> dict[str, int]:
    """Of a plan, by the names of the paper. n_buffer counts slots, which the paper calls chunk buffers."""
    return {
        "n_block": len(plan.block_modes),
        "n_checkpoint": plan.n_checkpoint,
        "n_swap": plan.n_swap,
        "n_chunk": plan.n_chunks,
        "n_persist": plan.n_persist,
        "n_buffer": plan.n_buffer,
    }


def found_here(shape: Shape, memory: int, settings: Settings) -> dict[str, Any]:
    """On the CPU what protrain.plan says; on a GPU the plan of a run."""
    if settings.device == "cpu":
        plan = protrain.plan(shape.model(), shape.inputs(0), memory=memory, disk=settings.disk)
    else:
        with Turns(train, shape, Way(memory, device=settings.device, disk=settings.disk)) as process:
            fields = process.ask(WARM_STEPS)["status"]["plan"]
        plan = protrain.Plan(**{**fields, "block_modes": tuple(fields["block_modes"]), "forecast": None})
    return {"batch": shape.batch, **numbers(plan), "block_modes": list(plan.block_modes)}


def body(record: dict[str, Any]) -> str:
    head = ["", "batch", "blocks", "checkpoint", "swap", "chunks", "persistent", "buffers"]
    rows = []
    for entry in record["planned"]:
        paper, ours = entry["paper"], entry["ours"]
        rows.append([f"{paper['name']}, {paper['model']}, {paper['machine']}: paper", str(paper["batch"]), *cells(paper)])
        rows.append(["ours", str(paper["batch"]), *cells(ours)])
    about = (
        "Planned, not run. The paper's batch is taken for that of all four devices together: 64 sequences on each would not "
        "fit with the activations that row C keeps. It does not name the hidden size of GPT2-1B: 1536, of 32 blocks, is "
        "0.98 B parameters. A chunk here is a block where the budget allows it, so there are more and smaller ones in rows "
        "A to C. Rows A and C are the paper's. B is near it. In D nearly all chunks have a buffer in both; the paper makes "
        "room for them by recomputing every block, the planner by swapping more than half of them."
    )
    shape = record["shape"]
    here = [
        [str(one["batch"]), *cells(one), "".join({"checkpoint_swap": "x"}.get(mode, mode[0]) for mode in one["block_modes"])]
        for one in record["here"]
    ]
    return "\n\n".join(
        [
            "## On the paper's machines",
            about,
            table(head, rows),
            "## Here",
            (
                f"GPT-2 {shape['hidden']}x{shape['layers']}, sequences of {shape['seq']} tokens, fp32 in "
                f"{mib(record['memory'])} MiB. As in the paper, a larger batch takes memory from chunks, and its compute "
                "hides what is moved."
            ),
            table([*head[1:], "modes"], here),
            "Modes, a letter for each block: k keep, s swap, c checkpoint, x checkpoint_swap.",
        ]
    )


def cells(found: dict[str, Any]) -> list[str]:
    return [str(found[f"n_{name}"]) for name in ("block", "checkpoint", "swap", "chunk", "persist", "buffer")]


EXPERIMENT = Experiment("protrain/table4_configurations", "ProTrain, table 4: searched configurations", measure, body)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
