"""Steps of one GPT-2 on a GPU, in one process: plain torch, and protrain with all blocks in each mode and in given budgets.

    python benchmarks/gpu/modes.py --layers 6 --hidden 2560 --batch 4 --seq 1024 --memory 8GiB 60GiB --out modes.json

Of each are told: the step, waited for at its end and not, beside what the plan had said; what the thread took to order it; what
torch's tensors and the engine held, and what of the budget was taken. Plain torch in bf16 has its optimizer's state in bf16 too,
and moves less than protrain, which keeps fp32 masters. `--device cpu` tries the program; such figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu import measure
from gpu.systems import Step, ordinary

from protrain import BudgetError, status, wrap
from protrain.api import find_session
from protrain.base.sizes import parse_bytes
from protrain.model.blocks import find_blocks
from protrain.planner.plans import MODES

WARMUP, STEPS = 4, 8  # protrain plans by the times of the first two


def synchronize(words: argparse.Namespace) -> None:
    if words.device == "cuda":
        torch.cuda.synchronize()


def timed(words: argparse.Namespace, step: Step) -> dict[str, Any]:
    """Seconds of a step: waited_for and ordered of the same steps, at the median; not_waited_for over some in a row."""
    batches = [ids.to(words.device) for ids in measure.make_batches(words, 4)]
    losses = [step(batches[number % 4]).item() for number in range(WARMUP)]
    synchronize(words)
    if words.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    waited, ordered = [], []
    for number in range(words.steps):
        synchronize(words)
        begin = time.perf_counter()
        step(batches[number % 4])
        ordered.append(time.perf_counter() - begin)
        synchronize(words)
        waited.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for number in range(words.steps):
        last = step(batches[number % 4])
    synchronize(words)
    found = {
        "seconds_waited_for": statistics.median(waited),
        "seconds_ordered": statistics.median(ordered),
        "seconds_not_waited_for": (time.perf_counter() - begin) / words.steps,
        "first_loss": losses[0],
        "last_loss": last.item(),
    }
    if words.device == "cuda":
        found["torch_peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def plain(words: argparse.Namespace) -> dict[str, Any]:
    model = measure.make_model(words, words.layers).to(words.device)
    if words.precision == "bf16":
        model = model.bfloat16()
    return timed(words, ordinary(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)))


def wrapped(words: argparse.Namespace, memory: str, mode: str | None) -> dict[str, Any]:
    """mode: of all blocks; None: the plan's.

    Raises:
        BudgetError: the budget is too small for it.
    """
    model = measure.make_model(words, words.layers)
    modes = [mode] * len(find_blocks(model)) if mode else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with torch.device(words.device):
        model, optimizer = wrap(
            model, optimizer, memory=memory, host_memory=words.host_memory, disk=words.disk, precision=words.precision,
            block_modes=modes,
        )  # fmt: skip
    try:
        found = timed(words, ordinary(model, optimizer))
        told, stats = status(model), find_session(model).engine.stats()
        plan = told.plan
        return found | {
            "memory": memory,
            "planned_seconds": plan.step_seconds or None,
            "planned_peak_bytes": plan.peak_bytes,
            "peak_bytes": told.peak_memory_bytes,
            "engine_bytes": stats.get("device_bytes"),
            "chunks": {"device": plan.n_persist, "host": plan.n_host, "all": plan.n_chunks},
            "block_modes": {name: plan.block_modes.count(name) for name in sorted(set(plan.block_modes))},
        }
    finally:
        measure.close(model)


def measured(words: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By name: the plan's modes in each budget, each mode in the largest, and plain torch, last: what it leaves on a GPU, such as
    workspaces, would not be there for others."""
    largest = max(words.memory, key=parse_bytes)
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    cases |= {f"in {memory}": lambda memory=memory: wrapped(words, memory, None) for memory in words.memory}
    cases |= {f"all {mode}": lambda mode=mode: wrapped(words, largest, mode) for mode in MODES}
    cases["plain torch"] = lambda: plain(words)
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        try:
            found[name] = case()
        except (BudgetError, torch.OutOfMemoryError) as error:
            found[name] = {"does_not_fit": measure.one_line(error)}
        gc.collect()
        measure.let_go(words)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    found.add_argument("--memory", nargs="+", default=["60GiB"], help="the GPU's budgets; modes are given in the largest")
    found.add_argument("--host-memory", default=None)
    found.add_argument("--disk", default=None)
    found.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    found.add_argument("--tf32", action="store_true", help="products of fp32 in TF32")
    found.add_argument("--layers", type=int, default=6)
    found.add_argument("--hidden", type=int, default=2560)
    found.add_argument("--vocabulary", type=int, default=50257)
    found.add_argument("--batch", type=int, default=4)
    found.add_argument("--seq", type=int, default=1024)
    found.add_argument("--steps", type=int, default=STEPS)
    found.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    found.add_argument("--out", default=None, help="a file for the figures, as JSON")
    return found


def main(arguments: list[str] | None = None) -> int:
    words = parser().parse_args(arguments)
    if words.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = words.tf32
    settings = {name: value for name, value in vars(words).items() if name != "out"}
    text = json.dumps({"settings": settings, "cases": measured(words)}, indent=2)
    print(text)
    if words.out:
        Path(words.out).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
