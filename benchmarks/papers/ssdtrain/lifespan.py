"""SSDTrain's model of write bandwidth and lifespan: what swapping every activation asks of SSDs, counted and measured.

Bandwidth: all activations are written in the first half of a step. Lifespan: bytes that the SSDs take before they wear out, over
those of a step, in steps. The model's activations are what a dry run counts; here they stand beside what swap really writes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import protrain
from benchmarks.papers.families import gpt2_config
from benchmarks.papers.planned import MACHINES
from benchmarks.papers.records import Experiment, Settings, mib, table
from benchmarks.papers.training import Shape, Way
from benchmarks.papers.turns import take_turns
from protrain.dryrun.phases import DryRun
from protrain.planner.hardware import load_hardware
from protrain.planner.offline import profile_offline

SEQ = 1024
YEAR_SECONDS = 365 * 86400
SSDS = 4  # of each GPU: Samsung 980 PRO, 1 TB
RATED_BYTES = 600e12  # of one, by its data sheet
RETENTION = 86  # times as many cycles where data is to last for a day and not for three years
ENDURANCE_BYTES = SSDS * RATED_BYTES * RETENTION
PAPER_YEARS, PAPER_GB_S = 2, 12.1
PAPER = (
    f"The paper finds at most {PAPER_GB_S} GB/s for each GPU and more than {PAPER_YEARS} years, for larger systems, with a write "
    "amplification of 1 and four such SSDs for each GPU."
)


@dataclass(frozen=True)
class Case:
    """A GPT-2 as the paper measured them, on one A100 of 40 GB; its tensor parallelism over two halves both bytes and time."""

    hidden: int
    layers: int
    batch: int


CASES = (Case(8192, 4, 16), Case(12288, 3, 16), Case(16384, 2, 16))


def activation_bytes(run: DryRun) -> int:
    """What blocks that are kept hold between forward and backward: from the first block's begin to the end of the last."""
    entries = [phase.keep_entry_bytes for phase in run.phases if phase.block >= 0 and not phase.backward]
    pairs = zip(run.phases, run.phases[1:], strict=False)
    after = next(phase for before, phase in pairs if before.block >= 0 and phase.block < 0)
    return after.keep_entry_bytes - entries[0]


def model_of(n_bytes: int, seconds: float) -> dict[str, float]:
    """The paper's two formulas."""
    return {
        "write_bytes_per_second": n_bytes / (seconds / 2),
        "lifespan_years": ENDURANCE_BYTES * seconds / n_bytes / YEAR_SECONDS,
    }


def planned(case: Case) -> dict[str, Any]:
    """Counted operations at the rate of the description, nothing else in the step."""
    hardware = load_hardware(MACHINES / "a100x8-40gb.toml", n_devices=1)
    config = gpt2_config(case.hidden, case.layers, SEQ)
    config.activation_function = "gelu_pytorch_tanh"  # one operation, as Megatron's: GPT-2's own saves three tensors more
    found = profile_offline(config, hardware, batch=case.batch, seq=SEQ)
    assert found.times is not None
    seconds = sum(compute for compute, _ in found.times.phases)
    n_bytes = activation_bytes(found.run)
    return {
        "model": f"GPT {case.hidden}x{case.layers}, {case.batch} x {SEQ} tokens, one A100",
        "activation_bytes": n_bytes,
        "step_seconds": seconds,
        **model_of(n_bytes, seconds),
    }


def measured(settings: Settings, shape: Shape, memory: int, rounds: int) -> dict[str, Any]:
    """Every block swapped, every state in memory: what is written, and what a step takes."""
    ways = {mode: Way(memory, (mode,) * shape.layers, disk=settings.disk) for mode in ("keep", "swap")}
    found = take_turns(shape, ways, rounds)
    written, seconds = found["swap"]["step_write_bytes"], found["swap"]["median_seconds"]
    n_bytes = activation_bytes(protrain.profile(shape.model(), shape.inputs(0), memory=memory, disk=settings.disk).run)
    return {
        "model": f"{shape.name}, this machine",
        "activation_bytes": n_bytes,
        "written_bytes": written,
        "step_seconds": seconds,
        "ratio_to_keep": found["swap"]["ratio"],
        **model_of(n_bytes, seconds),
    }


def measure(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"planned": [planned(case) for case in (CASES[2:] if settings.tiny else CASES)]}
    if settings.device != "cpu":
        return found | {
            "reason": "Nothing is measured on a GPU: there activations go to the host, and to the disk what that does not hold."
        }
    shape, memory, rounds = Shape("gpt2", 512, 4, 4, 512), 2 << 30, 5
    if settings.tiny:
        shape, memory, rounds = Shape("gpt2", 64, 2, 4, 128), 64 << 20, 1
    return found | {"measured": measured(settings, shape, memory, settings.rounds or rounds)}


def body(record: dict[str, Any]) -> str:
    entries = [*record["planned"], *([record["measured"]] if "measured" in record else [])]
    rows = [
        [
            one["model"], mib(one["activation_bytes"]), f"{one['step_seconds']:.2f}",
            f"{one['write_bytes_per_second'] / 1e9:.2f}", f"{one['lifespan_years']:.1f}",
        ]
        for one in entries
    ]  # fmt: skip
    parts = [
        (
            f"Bandwidth: activations over half of a step. Lifespan: {SSDS} x {RATED_BYTES / 1e12:.0f} TB rated x {RETENTION} "
            f"for a retention of a day, over the activations of a step. {PAPER} The A100's steps are counted, not measured: "
            "operations at 70 % of its peak, no updates. So they are nearly as short as they could be, and the bandwidth is "
            "as high."
        ),
        table(["model, batch", "activations, MiB", "step, s", "write, GB/s", "lifespan, years"], rows),
        str(record.get("reason", "")),
    ]
    years = [one["lifespan_years"] for one in record["planned"]]
    fastest = max(one["write_bytes_per_second"] for one in record["planned"]) / 1e9
    if min(years) < PAPER_YEARS:
        parts.append(
            f"So this is not the paper's finding: {min(years):.1f} to {max(years):.1f} years and up to {fastest:.1f} GB/s here, "
            f"more than {PAPER_YEARS} years and at most {PAPER_GB_S} GB/s there. Steps of half of this share of the peak would "
            "have half the bandwidth, and twice the years."
        )
    if "measured" in record:
        one = record["measured"]
        parts.append(
            f"Here a step wrote {mib(one['written_bytes'])} MiB, {one['written_bytes'] / one['activation_bytes']:.2f} of the "
            f"model's {mib(one['activation_bytes'])}: what is asked for before its turn to be written is not written, nor "
            f"what the rule of the stash finds not worth it. The step took {one['ratio_to_keep']:.2f} of that of keep."
        )
    return "\n\n".join(part for part in parts if part)


EXPERIMENT = Experiment("ssdtrain/lifespan", "SSDTrain: write bandwidth and lifespan", measure, body)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
