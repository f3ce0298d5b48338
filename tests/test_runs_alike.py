"""The runs of one dry run begin alike, with the model as it is, and what a step leaves to the one behind it is foreseen too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Carrying, steps
from test_dryrun import predict
from torch import nn
from twins import MIB, assert_equal, run

import protrain
from protrain.dryrun.phases import DryRun

N_BLOCKS = 6


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))


class Net(nn.Module):
    """Goes through as many of its blocks as `count` says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block() for _ in range(N_BLOCKS)])

    def count(self) -> int:
        return N_BLOCKS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.blocks[: self.count()]:
            x = x + one(x)
        return x.square().mean()


def foreseen(model: nn.Module) -> DryRun:
    return predict(model, (torch.zeros(512, 64),))


class Counting(Net):
    """Goes through two blocks in every other forward."""

    def __init__(self, calls: int = 0) -> None:
        super().__init__()
        self.calls = calls

    def count(self) -> int:
        self.calls += 1
        return N_BLOCKS if self.calls % 2 else 2


class Listing(Net):
    """Adds up what the program around it takes out again before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.blocks:
            x = x + one(x)
            self.parts.append(x.abs().mean())
        return x.square().mean() + sum(self.parts)


def test_each_run_begins_with_the_model_as_it_is() -> None:
    model = Listing()
    first = foreseen(model)
    assert model.parts == []
    assert foreseen(model) == first


@pytest.mark.parametrize("calls", [0, 1])
def test_of_a_step_and_the_one_behind_it_the_one_that_takes_more_is_foreseen(calls: int) -> None:
    model = Counting(calls)
    assert foreseen(model) == foreseen(Net())
    assert model.calls == calls


class Going(Carrying):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        assert self.state is not None
        self.state = self.state.detach()
        return x


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Going() for _ in range(N_BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.blocks:
            x = one(x)
        return x.square().mean()


@pytest.mark.parametrize("modes", [None, "keep", "checkpoint"])
def test_steps_of_a_model_that_goes_on_from_the_one_before_have_room(modes: str | None, disk: Path) -> None:
    """The first of them takes less, as there is nothing yet to go on from."""
    batches = [torch.randn(2048, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    options: dict[str, Any] = {"block_modes": [modes] * N_BLOCKS} if modes else {}
    with pytest.raises(protrain.BudgetError) as refused:
        run(Chained, steps(batches), memory=4 * MIB, disk=disk, **options)
    memory = refused.value.smallest_bytes
    got, want = run(Chained, steps(batches), memory=memory, disk=disk, **options), run(Chained, steps(batches))
    for seen in (got, want):  # torch has states in the order in which they came to be
        seen.tensors = dict(sorted(seen.tensors.items()))
    assert_equal(got, want, memory)
