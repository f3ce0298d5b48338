"""What our saved-tensor hooks cost for each saved tensor, beside the least that any cost: lambdas that return their argument.

    python benchmarks/hooks.py --out benchmarks/results/hooks.json

One graph of many operations that each save one tensor is made, run backward and dropped, with each kind of hooks in turn. What
differs from the empty hooks is pack, unpack and what they leave to be freed; the median over rounds of the difference counts. The
last kind also writes 64 KiB for each tensor on threads of its own, beside what is timed, and may wait to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import protrain
from protrain import _core
from protrain.api import session_of

N_TENSORS = 256
LEAST_BYTES = 64 << 10


def leaves_of_one() -> list[torch.Tensor]:
    """Leaves of one element, in blocks that are never stashed: kept as they are."""
    return [torch.ones(1, requires_grad=True) for _ in range(N_TENSORS)]


def results_of_one() -> list[torch.Tensor]:
    """Results of operations, as small: kept by an alias."""
    return [leaf * 1 for leaf in leaves_of_one()]


def shared() -> list[torch.Tensor]:
    """Views of one element in one block that is stashed: one record, many uses."""
    block = torch.ones(LEAST_BYTES // 4)
    return [block[i : i + 1].requires_grad_() for i in range(N_TENSORS)]


def separate() -> list[torch.Tensor]:
    """Views of one element, each in a block of its own that is stashed: a record, and its I/O, for each."""
    return [torch.ones(LEAST_BYTES // 4)[:1].requires_grad_() for _ in range(N_TENSORS)]


KINDS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "kept, a leaf": leaves_of_one,
    "kept, a result": results_of_one,
    "stashed, one record": shared,
    "stashed, a record each": separate,
}


def seconds(hooks: tuple[Any, Any], leaves: list[torch.Tensor], engine: _core.Engine) -> float:
    """Of one forward, backward and drop. The stash's pass begins and ends outside of what is timed."""
    ones = [torch.ones(1)] * N_TENSORS
    engine.stash_begin()
    begin = time.perf_counter()
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    outputs = [leaf.sin() for leaf in leaves]
    torch._C._autograd._pop_saved_tensors_default_hooks()
    middle = time.perf_counter()
    engine.stash_end()
    back = time.perf_counter()
    torch.autograd.grad(outputs, leaves, ones)
    del outputs
    return time.perf_counter() - back + middle - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the saved-tensor hooks, for each saved tensor.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of each kind")
    words = parser.parse_args()
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8)
    with tempfile.TemporaryDirectory() as folder:
        model, _ = protrain.wrap(model, torch.optim.AdamW(model.parameters(), fused=True), memory="256MiB", disk=folder)
        engine = session_of(model).engine
        engine.use_account(True)
        ours = _core.SavedTensors(engine, None, lambda packed: packed, LEAST_BYTES)
        empty: tuple[Any, Any] = (lambda tensor: tensor, lambda tensor: tensor)
        machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "torch": torch.__version__}
        results: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "command": f"benchmarks/hooks.py --rounds {words.rounds}",
            "machine": machine,
            "cases": {},
        }
        for name, make in KINDS.items():
            leaves = make()
            pairs = [
                (seconds(empty, leaves, engine), seconds((ours.pack, ours.unpack), leaves, engine))
                for _ in range(words.rounds + 20)
            ][20:]
            found = results["cases"][name] = {
                "empty_hooks_ns": round(statistics.median(e for e, _ in pairs) / N_TENSORS * 1e9),
                "our_hooks_ns": round(statistics.median(o for _, o in pairs) / N_TENSORS * 1e9),
                "above_empty_ns": round(statistics.median(o - e for e, o in pairs) / N_TENSORS * 1e9),
            }
            print(f"{name}: {found['above_empty_ns']} ns a tensor above empty hooks", flush=True)
            del leaves
        protrain.unwrap(model)
    if words.out:
        words.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
