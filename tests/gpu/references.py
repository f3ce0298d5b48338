"""Plain torch on a GPU, updated where protrain updates: on the GPU what persists there, on the CPU what does not.

torch's fused kernels of the CPU and of the GPU round differently, and protrain has the CPU's bits for chunks on the host and on
disk. So the loop that it must equal bit for bit has two optimizers: each parameter is updated by the one where its chunk is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

GPU = "cuda"  # tests of these tests have none
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Plain:
    """A model on the GPU, of whose parameters `on_gpu` are updated there. bf16: over fp32 masters."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, on_gpu: set[str], bf16: bool = False) -> None:
        self.model = model.cuda()
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, p in self.model.named_parameters():
            master = nn.Parameter(p.detach().to(device=GPU if name in on_gpu else "cpu", dtype=torch.float32, copy=True))
            if bf16:
                p.data = p.data.bfloat16()
            self.pairs.append((p, master))
        places = [[m for _, m in self.pairs if m.device.type == kind] for kind in dict.fromkeys((GPU, "cpu"))]
        self.inner = [make(masters) for masters in places if masters]

    def step(self) -> None:
        for p, master in self.pairs:
            master.grad = None if p.grad is None else p.grad.to(device=master.device, dtype=torch.float32)
        for optimizer in self.inner:
            optimizer.step()
        with torch.no_grad():
            for p, master in self.pairs:
                p.copy_(master)

    def zero_grad(self) -> None:
        for p, _ in self.pairs:
            p.grad = None


def train(model: Any, trainer: Any, batches: list[torch.Tensor], stream: torch.cuda.Stream | None = None) -> list[float]:
    """The ordinary loop, on a stream where one is given."""
    losses = []
    with torch.cuda.stream(stream):
        for x in batches:
            loss = model(x.cuda())
            loss.backward()
            trainer.step()
            trainer.zero_grad()
            losses.append(loss.item())
    return losses


def values(model: nn.Module) -> dict[str, bytes]:
    """All of a state dict, as bytes."""
    found = {}
    for name, value in model.state_dict().items():
        plain = value.detach().cpu().contiguous()
        found[name] = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy().tobytes()
    return found
