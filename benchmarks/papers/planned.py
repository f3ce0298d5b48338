"""What the planner says of machines that papers measured on: the largest GPT-2 for which a plan exists, beside what they report.

Nothing is run: protrain/planner/offline.py counts a model's memory, and the machines are described in protrain/machines and
benchmarks/machines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.papers.families import gpt2_config, gpt2_parameters, most_layers
from benchmarks.papers.records import table
from protrain.base.sizes import GIB
from protrain.errors import BudgetError
from protrain.model.layout import pack
from protrain.planner.hardware import Hardware, load_hardware
from protrain.planner.plans import Plan

SEQ = 1024
STATE_BYTES = 14  # of a parameter: itself in two bytes, fp32 master weight and two moments
MACHINES = Path(__file__).resolve().parent.parent / "machines"


@dataclass(frozen=True)
class Largest:
    """The largest GPT-2 of a hidden size on a machine, and what a paper reports, in billions of parameters."""

    machine: str
    n_devices: int
    hidden: int
    reported: float
    others: str

    def hardware(self) -> Hardware:
        """One that ships, or one of benchmarks/machines."""
        own = MACHINES / f"{self.machine}.toml"
        return load_hardware(own if own.exists() else self.machine, n_devices=self.n_devices)


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
    hardware = case.hardware()
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


def largest_in_words(entries: Sequence[dict[str, Any]]) -> str:
    """The entries as Markdown: what was assumed, a table, what limits each."""
    rows = [
        [
            entry["machine"], str(entry["n_devices"]), f"{entry['reported']:g}", f"{entry['billions']:.1f}",
            f"{entry['ratio']:.2f}", f"{entry['layers']} x {entry['hidden']}", entry["others"],
        ]
        for entry in entries
    ]  # fmt: skip
    notes = [
        f"- {entry['machine']}, {entry['n_devices']} device{'s' if entry['n_devices'] > 1 else ''}: {entry['limit']}."
        + (f" Not within 10 %: {entry['difference']}." if entry["difference"] else "")
        for entry in entries
    ]
    about = (
        "Planned, not run: memory is counted (protrain/planner/offline.py) and the machines are described in files. Sequences of "
        f"{SEQ} tokens, one for each device, mixed precision: {STATE_BYTES} bytes of parameter and state, two of gradient. "
        "No disk. The largest is found by bisection over the layers."
    )
    head = ["machine", "devices", "paper, B", "planned, B", "ratio", "layers x hidden", "others in the paper, B"]
    return "\n\n".join([about, table(head, rows), "\n".join(notes)])
