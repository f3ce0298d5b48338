"""A small model for programs that break things: crashes.py and faults.py."""

from __future__ import annotations

import torch
from torch import nn


class Rows(nn.Module):
    """Six blocks, called with rows of 128; gives a loss. inner: the width inside of a block, which says what it saves."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, inner), nn.Tanh(), nn.Linear(inner, 128), nn.LayerNorm(128)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
