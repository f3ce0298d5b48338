"""How small a budget can be: all blocks recomputed, and all swapped; what a step takes there.

    python -m benchmarks.smallest --out benchmarks/results/smallest.json

For each model the smallest budget in which all blocks are recomputed, and the smallest of all, which the planner finds: then
blocks swap, and nothing but what an operation uses is in memory. Both are trained, and a budget in the middle; single steps take
turns, and the median of their times counts.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import transformers

import protrain
from benchmarks.turns import Run, gpt2, keep_rows
from protrain.model.blocks import find_blocks

N_STEPS = 16
N_WARM = 4  # of these: plans are confirmed by the steps before

MODELS: dict[str, tuple[Any, tuple[int, int]]] = {
    "GPT-2 384x6, 2x256": (lambda: gpt2(384, 6), (2, 256)),
    "GPT-2 768x6, 2x512": (lambda: gpt2(768, 6), (2, 512)),
    "GPT-2 512x8, 4x512": (lambda: gpt2(512, 8), (4, 512)),
    "Llama 512x6, 2x512": (lambda: _llama(512, 6), (2, 512)),
}


def _llama(hidden: int, layers: int) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64,
            intermediate_size=8 * hidden // 3, vocab_size=1024, use_cache=False,
        )
    ).train()  # fmt: skip


def smallest(make: Any, ids: torch.Tensor, modes: list[str] | None) -> int:
    """By what a session refuses: first for the states, then for the batch, and for chunks of that budget."""
    budget = 1 << 20
    for _ in range(4):
        try:
            run = Run(make, budget, modes)
            try:
                run.step(ids)
            finally:
                protrain.unwrap(run.model)
            return budget
        except protrain.BudgetError as error:
            budget = error.smallest_bytes
    raise SystemExit(f"no budget of those that were named works: {budget}")


def measure(name: str) -> dict[str, Any]:
    make, shape = MODELS[name]
    ids = torch.randint(1024, shape, generator=torch.Generator().manual_seed(0))
    again = ["checkpoint"] * len(find_blocks(make()))
    recomputed, least = smallest(make, ids, again), smallest(make, ids, None)
    runs = {
        "recomputed": Run(make, recomputed, again),
        "planned": Run(make, recomputed, None),
        "between": Run(make, (recomputed + least) // 2, None),
        "least": Run(make, least, None),
    }
    for _ in range(N_STEPS):
        for run in runs.values():
            run.step(ids)
    found: dict[str, Any] = {"model": name}
    for kind, run in runs.items():
        plan, seconds = protrain.status(run.model).plan, statistics.median(run.seconds[N_WARM:])
        found[kind] = {
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": protrain.status(run.model).peak_memory_bytes,
            "modes": ",".join(sorted(set(plan.block_modes))),
            "n_persist": plan.n_persist,
            "step_seconds": round(seconds, 4),
            "of_recomputed": round(seconds / statistics.median(runs["recomputed"].seconds[N_WARM:]), 3),
        }
    for run in runs.values():
        protrain.unwrap(run.model)
    return found


def show(row: dict[str, Any]) -> None:
    for kind in ("recomputed", "planned", "between", "least"):
        of = row[kind]
        mib = of["budget_bytes"] / 2**20
        print(f"{row['model']:20} {kind:10} {mib:7.1f} MiB {of['step_seconds']:.3f} s {of['of_recomputed']:.3f} {of['modes']}")


if __name__ == "__main__":
    keep_rows("smallest", __doc__, MODELS, measure, show)
