"""Random numbers that decide how much a forward computes: the runs of a dry run draw the same, and what asks for the most."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_runs_alike import N_BLOCKS, Net, foreseen
from torch import nn

LARGEST: dict[str, Callable[[], Any]] = {
    "randint": lambda: random.randint(0, N_BLOCKS),
    "randrange": lambda: random.randrange(0, N_BLOCKS + 1, 2),
    "downwards": lambda: random.randrange(N_BLOCKS, 0, -1),
    "choice": lambda: random.choice([2, N_BLOCKS, 3]),
    "numpy's randint": lambda: np.random.randint(1, N_BLOCKS + 1),
    "numpy's choice": lambda: np.random.choice(N_BLOCKS + 1),
    "numpy's rand": lambda: round(N_BLOCKS * float(np.random.rand())),
}


@pytest.mark.parametrize("name", LARGEST)
def test_of_whole_numbers_that_a_forward_draws_the_largest_is_foreseen(name: str) -> None:
    class Drawing(Net):
        def count(self) -> int:
            return int(LARGEST[name]())

    before = random.getstate(), np.random.get_state(legacy=False)
    whole = foreseen(Net())
    assert all(foreseen(Drawing()) == whole for _ in range(3))
    assert repr((random.getstate(), np.random.get_state(legacy=False))) == repr(before)
    assert {LARGEST[name]() for _ in range(50)} != {N_BLOCKS}


def test_what_cannot_be_the_largest_is_drawn() -> None:
    """The loop that waits for another number ends, and of choices with weights, and of other things, one is made."""

    class Waiting(Net):
        def count(self) -> int:
            while random.randint(1, N_BLOCKS) == N_BLOCKS:
                pass
            assert random.choice("ab") in "ab"
            return int(np.random.choice([2, N_BLOCKS], p=[1, 0]))

    class Two(Net):
        def count(self) -> int:
            return 2

    assert foreseen(Waiting()) == foreseen(Two())


class Throwing(nn.Module):
    """Goes as often through its layer as it draws."""

    def __init__(self, draw: Callable[[], int]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(64, 64), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.draw()):
            x = x + self.layer(x).tanh()
        return x


def _of_process() -> int:
    return 1 + min(random.sample(range(40), 3))


def _of_numpy() -> int:
    return 1 + int(np.random.permutation(40)[0])


@pytest.mark.parametrize("where", ["process", "numpy", "its own", "numpy's own"])
def test_what_is_drawn_is_the_same_in_each_run_and_in_recomputation(where: str) -> None:
    class Own(Throwing):
        def __init__(self) -> None:
            super().__init__(_of_process)
            self.own = random.Random(5) if where == "its own" else np.random.default_rng(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drawn = self.own.randint(1, 40) if isinstance(self.own, random.Random) else int(self.own.integers(1, 40))
            self.draw = lambda: drawn
            return super().forward(x)

    def make() -> nn.Module:
        return Own() if "own" in where else Throwing(_of_numpy if where == "numpy" else _of_process)

    for seed in range(3):
        random.seed(seed)
        np.random.seed(seed)
        model = nn.Sequential(*(make() for _ in range(3)))
        found = foreseen(model)
        forward = [phase for phase in found.phases if phase.block >= 0 and not phase.backward]
        backward = [phase for phase in found.phases if phase.block >= 0 and phase.backward]
        again = [phase.again_operations for phase in reversed(backward)]
        counted = [phase.operations for phase in forward]
        assert all(0 <= whole - part <= 4 for whole, part in zip(counted, again, strict=True)), "up to what was saved last"
        assert found == foreseen(model)
