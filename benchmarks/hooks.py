"""What our saved-tensor hooks cost for each saved tensor, beside the least that any cost: lambdas that return their argument.

    python -m benchmarks.hooks --out benchmarks/results/hooks.json

One graph of many operations that each save one tensor is made, run backward and dropped, with each kind of hooks in turn. What
differs from the empty hooks is pack, unpack and what they leave to be freed; the median over rounds of the difference counts.
Where a record is made 64 KiB are also written for each tensor, on threads of the disk's beside what is timed, and summed before
on the thread that is timed; where they are not handed back from memory it waits for a read, and compares. Sums and waits are
given beside the whole, as they depend on the bytes, on whether a cache has them, and on the disk.

Then the blocks of two models are run, swapped, and what they save is counted by these kinds: the average over a block follows.
What an operation saves it has just computed or read. A record also lets memory go: where results that were computed before are
all kept, the next ones lie in memory that caches do not hold, and that may cost more than the hooks do.
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
from benchmarks.papers.training import Shape
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


def whole() -> list[torch.Tensor]:
    """As large as what is stashed: of each the operation saves its result, and makes a record of what it has just computed."""
    return [torch.ones(LEAST_BYTES // 4, requires_grad=True) for _ in range(N_TENSORS)]


def separate() -> list[torch.Tensor]:
    """Views of one element, each in a block of its own that is stashed: a record of bytes that no cache has."""
    return [torch.ones(LEAST_BYTES // 4)[:1].requires_grad_() for _ in range(N_TENSORS)]


ONE_RECORD, OF_ITS_OWN = "stashed, one record", "stashed, a record each"
IN_NO_CACHE = f"{OF_ITS_OWN}, in no cache"
#: What operations are given, and the operation: sin saves that, relu its result.
KINDS: dict[str, tuple[Callable[[], list[torch.Tensor]], Callable[[torch.Tensor], torch.Tensor]]] = {
    "kept, a leaf": (leaves_of_one, torch.sin),
    "kept, a result": (results_of_one, torch.sin),
    ONE_RECORD: (shared, torch.sin),
    OF_ITS_OWN: (whole, torch.relu),
    IN_NO_CACHE: (separate, torch.sin),
}
#: How many records a round makes of each kind.
RECORDS = {ONE_RECORD: 1, OF_ITS_OWN: N_TENSORS, IN_NO_CACHE: N_TENSORS}

#: Models of two blocks whose activations are large enough to be stashed.
MODELS = {"GPT-2": Shape("gpt2", 128, 2, 2, 256), "Llama": Shape("llama", 128, 2, 2, 256)}


def saved_by_block(shape: Shape) -> dict[str, int]:
    """How many tensors a block saves that are of each kind, in a step behind the first."""
    counts = dict.fromkeys(KINDS, 0)
    model, inputs = shape.model(), shape.inputs(0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = protrain.wrap(model, optimizer, memory="256MiB", block_modes=["swap"] * shape.layers)
    runner, engine = session_of(model).runner, session_of(model).engine
    pack, unpack = runner.stash_hooks

    def count(tensor: torch.Tensor) -> Any:
        records = engine.stats()["stash_record_count"]
        saved = pack(tensor)
        if getattr(saved, "stashed", False):
            counts[OF_ITS_OWN if engine.stats()["stash_record_count"] > records else ONE_RECORD] += 1
        else:
            counts["kept, a leaf" if tensor.is_leaf else "kept, a result"] += 1
        return saved

    for hooks in ((pack, unpack), (count, unpack)):
        runner.stash_hooks = hooks
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    protrain.unwrap(model)
    return {name: n // shape.layers for name, n in counts.items()}


def seconds(
    hooks: tuple[Any, Any],
    given: list[torch.Tensor],
    operation: Callable[[torch.Tensor], torch.Tensor],
    engine: _core.Engine,
) -> float:
    """Of one forward, backward and drop. The stash's pass begins and ends outside of what is timed."""
    ones = [torch.ones_like(given[0])] * N_TENSORS
    engine.stash_begin()
    begin = time.perf_counter()
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    outputs = [operation(tensor) for tensor in given]
    torch._C._autograd._pop_saved_tensors_default_hooks()
    middle = time.perf_counter()
    engine.stash_end()
    back = time.perf_counter()
    torch.autograd.grad(outputs, given, ones)
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
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = protrain.wrap(model, optimizer, memory="256MiB", disk=folder)  # nothing counts once it is dropped
        engine = session_of(model).engine
        engine.use_account(True)
        ours = _core.SavedTensors(engine, None, lambda packed: packed, LEAST_BYTES)
        empty: tuple[Any, Any] = (lambda tensor: tensor, lambda tensor: tensor)
        machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "torch": torch.__version__}
        results: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python -m benchmarks.hooks --rounds {words.rounds}",
            "machine": machine,
            "cases": {},
            "blocks": {},
        }
        for name, (make, operation) in KINDS.items():
            given = make()
            pairs, began = [], engine.stats()
            for _ in range(words.rounds + 20):
                empty_seconds, before = seconds(empty, given, operation, engine), engine.stats()
                our_seconds, after = seconds((ours.pack, ours.unpack), given, operation, engine), engine.stats()
                sums, waits = (after[key] - before[key] for key in ("disk_checksum_ns", "stash_wait_ns"))
                pairs.append((empty_seconds * 1e9, our_seconds * 1e9, (our_seconds - empty_seconds) * 1e9, sums, waits))
            made = (after["stash_record_count"] - began["stash_record_count"]) / (words.rounds + 20)
            if made != RECORDS.get(name, 0):
                raise RuntimeError(f"{name}: {made} records a round")
            keys = "empty_hooks_ns", "our_hooks_ns", "above_empty_ns", "checksums_ns", "waited_ns"
            columns = zip(*pairs[20:], strict=True)
            found = {key: round(statistics.median(each) / N_TENSORS) for key, each in zip(keys, columns, strict=True)}
            found["above_empty_without_both_ns"] = round(
                statistics.median(above - sums - waits for _, _, above, sums, waits in pairs[20:]) / N_TENSORS
            )
            results["cases"][name] = found
            print(f"{name}: {found['above_empty_ns']} ns a tensor above empty hooks, {found['checksums_ns']} of them checksums, "
                  f"{found['waited_ns']} waits for the disk", flush=True)  # fmt: skip
            del given
        protrain.unwrap(model)
    for kind, shape in MODELS.items():
        saved = saved_by_block(shape)
        average = {
            f"average_{key}": round(sum(n * results["cases"][name][key] for name, n in saved.items()) / sum(saved.values()))
            for key in ("above_empty_ns", "above_empty_without_both_ns")
        }
        results["blocks"][kind] = {"saved": saved, **average}
        print(f"a block of {kind}: {average}", flush=True)
    if words.out:
        words.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
