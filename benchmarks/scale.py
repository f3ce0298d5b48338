"""Scale on paper: what the planner says of models of 70, 175 and 1,000 billion parameters on machines that files describe.

    python -m benchmarks.scale --out benchmarks/results

Nothing is run or measured: protrain/planner/offline.py counts a model's memory and operations, benchmarks/machines has the
machines. Writes scale.json and scale.md. Several devices are as in protrain/planner/hardware.py: what is not persistent is shared
out evenly, each device brings its share of a chunk by its own link and gathers the rest at one rate; persistent chunks are held
by each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.papers.families import gpt2_config
from protrain.base.sizes import format_bytes
from protrain.errors import BudgetError
from protrain.planner.explain import explain, limit_of
from protrain.planner.hardware import Hardware, load_hardware
from protrain.planner.offline import plan_for, profile_offline
from protrain.planner.plans import Plan

MACHINES = Path(__file__).resolve().parent / "machines"
SEQ = 2048
BATCHES = (1, 2, 4, 8, 16, 32)
STATE_BYTES = 14  # of a parameter: itself in two bytes, fp32 master weight and two moments
DAY_SECONDS = 86400


@dataclass(frozen=True)
class Case:
    """A model on a machine. passes: numbers of backward passes in a step that are planned for; more amortise the update."""

    model: str
    shape: str
    machine: str
    passes: tuple[int, ...]
    config: Callable[[], Any]


def llama_70b() -> Any:
    """A config of Llama's shape with 70.6 billion parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip


CASES = (
    Case("70B", "Llama, 80 x 8192", "rtx4090-nvme", (1, 16), llama_70b),
    Case("175B", "GPT, 96 x 12288", "h100x8", (1, 16), lambda: gpt2_config(12288, 96, SEQ)),
    Case("1T", "GPT, 128 x 25600", "h100x512", (1,), lambda: gpt2_config(25600, 128, SEQ)),
)


def plans_of(case: Case, hardware: Hardware) -> tuple[int, list[tuple[int, int, Plan]]]:
    """How many parameters the model has, and (batch of a device, passes, plan) of all that fit."""
    found, parameters, config = [], 0, case.config()
    for batch in BATCHES:
        profile = profile_offline(config, hardware, batch=batch, seq=SEQ)
        parameters = sum(size for size, *_ in profile.parameters) // 2
        try:
            for passes in case.passes:
                many = replace(profile, n_passes=passes)
                found.append((batch, passes, plan_for(many, hardware)))
        except BudgetError:
            break
    return parameters, found


def described(parameters: int, hardware: Hardware, batch: int, passes: int, plan: Plan) -> dict[str, Any]:
    """One plan in figures."""
    forecast, step = plan.forecast, plan.step_seconds
    assert forecast is not None
    tokens = hardware.n_devices * batch * passes * SEQ
    peak = hardware.device.flops_per_second["bf16"] * hardware.n_devices
    return {
        "batch": batch,
        "passes": passes,
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "days_for_a_billion_tokens": 1e9 * step / tokens / DAY_SECONDS,
        "share_of_peak": 6 * parameters * tokens / step / peak,
        "limit": limit_of(plan),
        "limit_in_words": explain(plan).splitlines()[2],
        "busy_shares": {lane: seconds / step for lane, seconds in forecast.busy_seconds.items() if seconds > 0},
        "wait_share": sum(forecast.wait_seconds.values()) / step,
        "recompute_share": forecast.recompute_seconds / step,
        "peak_bytes": plan.peak_bytes,
        "host_bytes_of_a_device": plan.host_bytes,
        "disk_bytes_of_a_device": plan.disk_bytes,
        "chunks": {"all": plan.n_chunks, "persistent": plan.n_persist, "host": plan.n_host},
        "modes": {mode: plan.block_modes.count(mode) for mode in sorted(set(plan.block_modes))},
    }


def planned(case: Case) -> dict[str, Any]:
    """The entry of a case: of each number of passes the plan with the most tokens a second, and why no larger batch fits."""
    hardware = load_hardware(MACHINES / f"{case.machine}.toml")
    parameters, found = plans_of(case, hardware)
    if not found:
        raise BudgetError(f"{case.model} does not fit {case.machine}", needed_bytes=0, budget_bytes=0, smallest_bytes=0)
    plans = []
    for passes in case.passes:
        best = max((one for one in found if one[1] == passes), key=lambda one: one[0] / one[2].step_seconds)
        plans.append(described(parameters, hardware, *best))
    return {
        "model": case.model,
        "shape": case.shape,
        "parameters": parameters,
        "seq": SEQ,
        "machine": hardware.name,
        "n_devices": hardware.n_devices,
        "states_bytes": STATE_BYTES * parameters,
        "largest_batch": max(batch for batch, _, _ in found),
        "plans": plans,
    }


# ---- output ----

COMMAND = "python -m benchmarks.scale --out benchmarks/results"
HEAD = [
    "model", "machine", "batch x passes", "device", "host", "disk", "step", "tokens/s", "days for 10^9 tokens", "of the peak",
    "limited by", "blocks",
]  # fmt: skip


def percent(share: float) -> str:
    """Of a share of one."""
    return f"{100 * share:.0f} %"


def days_text(days: float) -> str:
    """Two digits, or whole days."""
    return f"{days:.2g}" if days < 10 else f"{days:,.0f}"


def limit_text(plan: dict[str, Any]) -> str:
    """What limits, and the lanes that are busy for a quarter of the time or more."""
    busy = [f"{lane.replace('_', ' ')} {percent(share)}" for lane, share in plan["busy_shares"].items() if share >= 0.25]
    waits = f"waits {percent(plan['wait_share'])}"
    return f"{plan['limit']}; {waits}" + (f"; busy: {', '.join(busy)}" if busy else "")


def row(entry: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """One line of the table."""
    n = entry["n_devices"]
    return [
        f"{entry['model']} ({entry['shape']})",
        entry["machine"],
        f"{plan['batch']} x {plan['passes']}",
        format_bytes(plan["peak_bytes"]),
        format_bytes(plan["host_bytes_of_a_device"] * n),
        format_bytes(plan["disk_bytes_of_a_device"] * n) if plan["disk_bytes_of_a_device"] else "-",
        f"{plan['step_seconds']:.0f} s",
        f"{plan['tokens_per_second']:,.0f}",
        days_text(plan["days_for_a_billion_tokens"]),
        percent(plan["share_of_peak"]),
        limit_text(plan),
        ", ".join(f"{count} {mode}" for mode, count in plan["modes"].items()),
    ]


def markdown(entries: list[dict[str, Any]]) -> str:
    """scale.md."""
    lines = [HEAD, ["---"] * len(HEAD), *(row(entry, plan) for entry in entries for plan in entry["plans"])]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"# Scale on paper\n\nBy `{COMMAND}`: nothing was run or measured. Memory and operations are counted, the machines are "
        f"described in benchmarks/machines, sequences have {SEQ} tokens, mixed precision: {STATE_BYTES} bytes of parameter and "
        "state, two of gradient. Batch: sequences of each device in a pass; of those that fit, the one with the most tokens a "
        "second. Device: the peak of one; host and disk: of all devices together. Of the peak: the model's own operations, 6 for "
        f"each parameter and token.\n\n{table}\n"
    )


def main() -> None:
    """Plan every case; print a line for each plan and write scale.json and scale.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for scale.json and scale.md")
    arguments = parser.parse_args()
    entries = []
    for case in CASES:
        entry = planned(case)
        entries.append(entry)
        for plan in entry["plans"]:
            print(" | ".join(row(entry, plan)), flush=True)
    if arguments.out:
        (arguments.out / "scale.json").write_text(json.dumps({"command": COMMAND, "cases": entries}, indent=1) + "\n")
        (arguments.out / "scale.md").write_text(markdown(entries))


if __name__ == "__main__":
    main()
