"""What adapters over a frozen model take: memory, what a step moves, and its time beside plain torch's.

    python -m benchmarks.adapters --out benchmarks/results/adapters.json

peft's LoRA of rank 8 on every linear layer of a block; single steps of plain torch and of protrain take turns in one process, and
must find equal losses. Budgets are parts of what the weights and the adapters' gradients and state take.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import torch

import protrain
from benchmarks.turns import gpt2, keep_rows, show

N_STEPS = 16
N_WARM = 6  # two are profiled, four confirm the plan
MODELS = {
    "GPT-2 768x6, 2x256, half": (768, 6, (2, 256), 0.5),
    "GPT-2 768x6, 2x256, twice": (768, 6, (2, 256), 2.0),
    "GPT-2 512x12, 1x512, half": (512, 12, (1, 512), 0.5),
}


def adapted(hidden: int, layers: int) -> tuple[Any, torch.optim.Optimizer]:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(hidden, layers), config).train()
    return model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4, fused=True)


def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> tuple[float, float]:
    """(seconds, loss)."""
    begin = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin, loss.item()


def measure(name: str) -> dict[str, Any]:
    hidden, layers, shape, part = MODELS[name]
    ids = torch.randint(1024, shape, generator=torch.Generator().manual_seed(0))
    plain, trained = adapted(hidden, layers), adapted(hidden, layers)
    weights = sum(p.nbytes for p in plain[0].parameters())
    adapters = sum(p.nbytes for p in plain[0].parameters() if p.requires_grad)
    memory = int(part * (weights + 3 * adapters))
    model, optimizer = protrain.wrap(*trained, memory=memory)
    pairs, before = [], protrain.status(model)
    for number in range(N_STEPS):
        if number == N_WARM:
            before = protrain.status(model)
        one, other = step(*plain, ids), step(model, optimizer, ids)
        if one[1] != other[1]:
            raise SystemExit(f"{name}: the losses differ in step {number}")
        pairs.append((one[0], other[0]))
    status = protrain.status(model)
    protrain.unwrap(model)
    return {
        "model": name,
        "weights_bytes": weights,
        "adapters_bytes": adapters,
        "budget_bytes": memory,
        "memory_bytes": status.memory_bytes,
        "disk_bytes": status.disk_bytes,
        "step_read_bytes": (status.disk_read_bytes - before.disk_read_bytes) // (N_STEPS - N_WARM),
        "step_write_bytes": (status.disk_write_bytes - before.disk_write_bytes) // (N_STEPS - N_WARM),
        "plain_seconds": round(statistics.median(a for a, _ in pairs[N_WARM:]), 4),
        "to_plain": round(statistics.median(b / a for a, b in pairs[N_WARM:]), 3),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    keep_rows("adapters", __doc__, MODELS, measure, show)
