"""What the planner says of the machines on which ProTrain (arXiv 2406.08334) and PatrickStar (2108.05818) were measured, beside
what they report: the largest GPT-2 for which a plan exists, and tokens each second.

    python benchmarks/papers.py --out benchmarks/results

Nothing is run or measured: protrain/offline.py counts a model's memory and operations, and the machines are described in
protrain/machines. Writes papers.json and papers.md. One assumption is free: the share of the devices' peak rate that whole steps
reach (flops_share in the descriptions). It changes tokens each second alone; what fits does not depend on it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protrain.errors import BudgetError
from protrain.hardware import Hardware, load_hardware
from protrain.layout import pack
from protrain.offline import gpt2_config, gpt2_parameters, most_layers, plan_for, profile_offline
from protrain.planning import Plan
from protrain.sizes import GIB

SEQ = 1024
STATE_BYTES = 14  # of a parameter: itself in two bytes, fp32 master weight and two moments
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Largest:
    """The largest GPT-2 of a hidden size on a machine, and what a paper reports, in billions of parameters."""

    paper: str
    machine: str
    n_devices: int
    hidden: int
    reported: float
    others: str


@dataclass(frozen=True)
class Anchor:
    """Tokens each second that ProTrain reports for a GPT-2 of these layers and hidden size."""

    model: str
    machine: str
    hidden: int
    layers: int
    reported: float


LARGEST = (
    Largest("ProTrain", "rtx3090x4", 1, 8192, 34, "DeepSpeed 15, Colossal-AI 25, FSDP 3"),
    Largest("ProTrain", "rtx3090x4", 4, 8192, 37, "DeepSpeed 15, Colossal-AI 25, FSDP 15"),
    Largest("ProTrain", "a100x4", 1, 8192, 75, "DeepSpeed 34, Colossal-AI 53, FSDP 10"),
    Largest("ProTrain", "a100x4", 4, 8192, 87, "DeepSpeed 37, Colossal-AI 53, FSDP 55"),
    Largest("PatrickStar", "v100x8", 8, 4096, 18, "DeepSpeed 4"),
)
ANCHORS = (
    Anchor("GPT2-10B", "a100x4", 4096, 48, 8266.40),
    Anchor("GPT2-20B", "a100x4", 8192, 25, 5043.75),
    Anchor("GPT2-30B", "a100x4", 8192, 37, 3431.38),
    Anchor("GPT2-40B", "a100x4", 8192, 50, 2723.50),
    Anchor("GPT2-10B", "rtx3090x4", 4096, 48, 2493.0),
)


# ---- the largest model ----


def bytes_of_tiers(plan: Plan, hidden: int, layers: int, n_devices: int) -> dict[str, float]:
    """Where a plan's states lie: billions of parameters on the device and on the host, and bytes of each there."""
    sizes = pack(parameters_of(hidden, layers), plan.chunk_bytes).sizes
    persistent, away = sum(sizes[: plan.n_persist]) / 2e9, sum(sizes[plan.n_persist :]) / 2e9
    return {
        "persistent_billions": persistent,
        "host_billions": away,
        "host_bytes_per_parameter": plan.host_bytes * n_devices / (away * 1e9) if away else 0.0,
        "device_bytes_for_movement_and_activations": float(plan.peak_bytes - plan.persistent_bytes),
    }


def parameters_of(hidden: int, layers: int) -> list[tuple[int, int, bool]]:
    """(bytes, block, trained) of each parameter of a GPT-2 in two bytes."""
    import torch
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(gpt2_config(hidden, layers, SEQ))
    in_block = {id(p): number for number, block in enumerate(model.transformer.h) for p in block.parameters()}
    return [(2 * p.numel(), in_block.get(id(p), -1), True) for p in model.parameters()]


def limit_of(hardware: Hardware, found: dict[str, Any]) -> str:
    """The memory equation in words: what ends the growth."""
    host, n = hardware.host_bytes / GIB, hardware.n_devices
    return (
        f"the host holds {found['host_billions']:.1f} B parameters at {found['host_bytes_per_parameter']:.1f} bytes "
        f"in {host:.0f} GiB; the device keeps {found['persistent_billions']:.1f} B at {STATE_BYTES} bytes, "
        f"{found['device_bytes_for_movement_and_activations'] / GIB:.1f} GiB of it for slots, gradients and activations"
        + (f"; what is persistent is held by each of the {n} devices, so they add little" if n > 1 else "")
    )


def difference(case: Largest, hardware: Hardware, found: dict[str, Any]) -> str:
    """Why an entry is not the paper's; empty where it is within 10 %."""
    ratio = found["billions"] / case.reported
    if abs(ratio - 1) <= 0.1:
        return ""
    assert hardware.host is not None
    all_bytes = hardware.host.memory_bytes + hardware.n_devices * hardware.device.memory_bytes
    per_parameter = all_bytes / (case.reported * 1e9)
    text = (
        f"{case.reported:g} B parameters in all of the host's and the devices' memory together, "
        f"{all_bytes / GIB:.0f} GiB, are {per_parameter:.1f} bytes each"
    )
    if per_parameter < STATE_BYTES:
        return (
            f"{text}: less than the {STATE_BYTES} that two-byte parameters with fp32 Adam state take, with nothing left for "
            "activations. States took fewer bytes there, or the machine had more memory than the paper names; "
            f"at {STATE_BYTES} bytes even all of it would hold {all_bytes / STATE_BYTES / 1e9:.1f} B"
        )
    if ratio < 1:
        return (
            f"{text}, more than {STATE_BYTES}: it needs the memory of all devices for different chunks. Here persistent chunks "
            "are held by every device and only the others are shared out, on the host"
        )
    more = per_parameter - STATE_BYTES
    return f"{text}: {more:.1f} more than {STATE_BYTES}. The paper's runs stopped short of that; a plan uses all of it"


def largest(case: Largest) -> dict[str, Any]:
    """The entry of one machine."""
    hardware = load_hardware(case.machine, n_devices=case.n_devices)
    answer = most_layers(lambda layers: gpt2_config(case.hidden, layers, SEQ), hardware, batch=1, seq=SEQ)
    if answer is None:
        raise BudgetError(f"no GPT-2 fits {case.machine}", needed_bytes=0, budget_bytes=0, smallest_bytes=0)
    layers, plan = answer
    found: dict[str, Any] = asdict(case) | {"layers": layers, "billions": gpt2_parameters(case.hidden, layers, SEQ) / 1e9}
    found["ratio"] = found["billions"] / case.reported
    found |= bytes_of_tiers(plan, case.hidden, layers, case.n_devices)
    found |= {"limit": limit_of(hardware, found), "difference": difference(case, hardware, found)}
    found["plan"] = json.loads(plan.to_json()) | {"block_modes": sorted(set(plan.block_modes))}
    return found


# ---- tokens each second ----


def throughput(case: Anchor) -> dict[str, Any]:
    """The best batch by the forecast, and the largest that fits."""
    hardware = load_hardware(case.machine)
    config, found = gpt2_config(case.hidden, case.layers, SEQ), []
    for batch in BATCHES:
        try:
            plan = plan_for(profile_offline(config, hardware, batch=batch, seq=SEQ), hardware)
        except BudgetError:
            break
        found.append((hardware.n_devices * batch * SEQ / plan.step_seconds, batch, plan))
    if not found:
        raise BudgetError(f"{case.model} does not fit {case.machine}", needed_bytes=0, budget_bytes=0, smallest_bytes=0)
    billions = gpt2_parameters(case.hidden, case.layers, SEQ) / 1e9
    model_flops = 6 * billions * 1e9 * case.reported / hardware.n_devices
    peak = hardware.device.flops_per_second["bf16"]
    return asdict(case) | {
        "billions": billions,
        "best": rate_of(*max(found, key=lambda one: one[0]), case.reported),
        "largest_batch": rate_of(*found[-1], case.reported),
        "flops_share": hardware.device.flops_share,
        "reported_share_of_peak": model_flops / peak,
        "reported_share_of_peak_if_all_is_recomputed": model_flops * 4 / 3 / peak,
    }


def rate_of(tokens_per_second: float, batch: int, plan: Plan, reported: float) -> dict[str, Any]:
    """One plan: its rate, and where its time goes as shares of the step."""
    forecast, step = plan.forecast, plan.step_seconds
    assert forecast is not None
    return {
        "batch": batch,
        "tokens_per_second": tokens_per_second,
        "ratio": tokens_per_second / reported,
        "step_seconds": step,
        "shares": {
            "compute": forecast.compute_seconds / step,
            "recompute": forecast.recompute_seconds / step,
            "update": forecast.update_seconds / step,
            "wait": sum(forecast.wait_seconds.values()) / step,
        },
        "modes": {mode: plan.block_modes.count(mode) for mode in sorted(set(plan.block_modes))},
        "n_persist": plan.n_persist,
        "n_chunks": plan.n_chunks,
    }


# ---- output ----

COMMAND = "python benchmarks/papers.py --out benchmarks/results"
INTRODUCTION = (
    f"By `{COMMAND}`: nothing was run or measured. Memory and operations are counted (protrain/offline.py), the machines are "
    "described in protrain/machines, sequences have 1024 tokens, dropout is off."
)
ABOUT_SIZES = (
    f"One sequence for each device, mixed precision: {STATE_BYTES} bytes of parameter and state, two of gradient. No disk. "
    "The largest is found by bisection over the layers."
)
ABOUT_RATES = (
    "ProTrain's measurements beside forecasts. The paper's batch sizes are not known, nor the layers of the models of 20 B "
    "and more, so two plans stand for each model: of the batches "
    f"{', '.join(map(str, BATCHES))} "
    "the one that is fastest by the forecast, and the largest that fits. One assumption is free, the share of the peak rate "
    "that whole steps reach: 70 %, near to what the paper's figure for 40 B is if every block is recomputed. So the "
    "agreement of that model's largest batch is no evidence, and that of the others, which compute for most of the time as "
    "well, is weak. The rates of links and of the host's Adam are in the descriptions. A phase takes as long as its matrix "
    "products or as its memory traffic, whichever is more: where both count, in smaller models more than in larger ones, "
    "the forecast is too fast. In the paper's table 4 GPT2-10B recomputes nothing on 4 A100 in a batch of 8, and yet its "
    "rate is a smaller share of the peak than that of the larger models: one share cannot be right for all of them."
)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    """Of a share of one."""
    return f"{100 * share:.0f} %"


def markdown(results: dict[str, Any]) -> str:
    """Both tables with what there is to say of each entry."""
    sizes, rates = results["largest"], results["throughput"]
    first = table(
        ["paper", "machine", "devices", "paper, B", "planned, B", "ratio", "layers x hidden", "others in the paper, B"],
        [
            [
                entry["paper"], entry["machine"], str(entry["n_devices"]), f"{entry['reported']:g}", f"{entry['billions']:.1f}",
                f"{entry['ratio']:.2f}", f"{entry['layers']} x {entry['hidden']}", entry["others"],
            ]
            for entry in sizes
        ],
    )  # fmt: skip
    notes = [
        f"- {entry['machine']}, {entry['n_devices']} device{'s' if entry['n_devices'] > 1 else ''}: {entry['limit']}."
        + (f" Not within 10 %: {entry['difference']}." if entry["difference"] else "")
        for entry in sizes
    ]
    second = table(
        ["model", "machine", "paper, tokens/s", "batch", "planned", "ratio", "modes", "compute, recompute, update, wait"],
        [
            [
                entry["model"], entry["machine"], f"{entry['reported']:.0f}", f"{plan['batch']}, {which}",
                f"{plan['tokens_per_second']:.0f}", f"{plan['ratio']:.2f}",
                ", ".join(f"{n} {mode}" for mode, n in plan["modes"].items()), ", ".join(map(percent, plan["shares"].values())),
            ]
            for entry in rates
            for which, plan in (("the fastest", entry["best"]), ("the largest", entry["largest_batch"]))
        ],
    )  # fmt: skip
    parts = [
        "# The papers' machines, planned",
        INTRODUCTION,
        "## The largest GPT-2 for which a plan exists",
        ABOUT_SIZES,
        first,
        "\n".join(notes),
        "## Tokens each second",
        ABOUT_RATES,
        second,
        "\n".join(map(share_in_words, rates)),
    ]
    return "\n\n".join(parts) + "\n"


def share_in_words(entry: dict[str, Any]) -> str:
    """What the paper's figure says of the device, beside what is assumed."""
    return (
        f"- {entry['model']} on {entry['machine']}: the paper's figure is {percent(entry['reported_share_of_peak'])} of the peak "
        f"rate in the model's own operations, {percent(entry['reported_share_of_peak_if_all_is_recomputed'])} if every block is "
        f"recomputed; assumed is {percent(entry['flops_share'])} for all that is computed. To be as slow as the paper's figure, "
        f"the fastest plan would have to compute at about {percent(entry['flops_share'] / entry['best']['ratio'])}."
    )


def main() -> None:
    """Plan every entry; print a line for each and write papers.json and papers.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for papers.json and papers.md")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"command": COMMAND, "largest": [], "throughput": []}
    for case in LARGEST:
        entry = largest(case)
        results["largest"].append(entry)
        print(f"{case.machine} x{case.n_devices}: {entry['billions']:.1f} B, the paper {case.reported:g} B", flush=True)
    for anchor in ANCHORS:
        entry = throughput(anchor)
        results["throughput"].append(entry)
        rate = entry["best"]["tokens_per_second"]
        print(f"{anchor.model} on {anchor.machine}: {rate:.0f} tokens/s, the paper {anchor.reported:.0f}", flush=True)
    if arguments.out:
        (arguments.out / "papers.json").write_text(json.dumps(results, indent=1) + "\n")
        (arguments.out / "papers.md").write_text(markdown(results))


if __name__ == "__main__":
    main()
