"""Python's and NumPy's random states around what is recomputed: whoever draws is seen, and nobody is asked needlessly."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import protrain
from protrain.model import randomness

SEEDS = itertools.count()
PYTHONS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "seed": lambda: random.seed(next(SEEDS)),
    "shuffle": lambda: random.shuffle([1, 2]),
}
NUMPYS: dict[str, Callable[[], Any]] = {
    "rand": numpy.random.rand,
    "randn": numpy.random.randn,
    "seed": lambda: numpy.random.seed(next(SEEDS)),
    "bytes": lambda: numpy.random.bytes(1),
    "binomial": lambda: numpy.random.binomial(10, 0.5),
    "permutation": lambda: numpy.random.permutation(4),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Other tests find both generators as this one did, and NumPy's of its kind."""
    python, bits, state = random.getstate(), numpy.random.get_bit_generator(), numpy.random.get_state(legacy=False)
    yield
    random.setstate(python)
    numpy.random.set_bit_generator(bits)
    numpy.random.set_state(state)


def written(states: randomness.States) -> bytes:
    return pickle.dumps(states)


@pytest.mark.parametrize("bits", [None, numpy.random.PCG64], ids=["MT19937", "PCG64"])
@pytest.mark.parametrize(("kind", "name"), [(0, name) for name in PYTHONS] + [(1, name) for name in NUMPYS])
def test_what_is_drawn_is_seen(kind: int, name: str, bits: Any) -> None:
    """Also the second of two normal numbers, which were drawn as a pair."""
    if bits is not None:
        numpy.random.set_bit_generator(bits(5))
        if name == "seed":
            pytest.skip("NumPy seeds its default kind alone")
    draw = (PYTHONS, NUMPYS)[kind][name]
    for _ in range(3):
        before = randomness.now()
        assert all(one is other for one, other in zip(randomness.now(), before, strict=True))
        draw()
        drawn = randomness.drawn_since(before)
        assert drawn[kind] is before[kind]
        assert drawn[1 - kind] is None
        after = randomness.now()
        with randomness.kept(drawn):
            assert written(randomness.now()) == written((before[0], after[1]) if kind == 0 else (after[0], before[1]))
            draw()
        assert written(randomness.now()) == written(after)


def test_states_are_kept_where_nothing_is_given() -> None:
    before = written(randomness.now())
    with randomness.kept():
        random.random()
        numpy.random.rand()
        assert written(randomness.now()) != before
    assert written(randomness.now()) == before


class Draws(torch.nn.Module):
    """Its noise comes from a generator outside of torch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inner, self.draw = torch.nn.Linear(32, 32), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self.draw()


@pytest.mark.parametrize("bits", [None, numpy.random.PCG64], ids=["MT19937", "PCG64"])
@pytest.mark.parametrize(
    "draw", [lambda: random.gauss(1, 0.1), lambda: float(numpy.random.normal(1, 0.1))], ids=["python", "numpy"]
)
def test_a_recomputed_block_draws_the_same(draw: Callable[[], float], bits: Any, fresh_disk: Path) -> None:
    def train(wrapped: bool) -> tuple[list[float], list[bytes]]:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.set_bit_generator(bits(5) if bits is not None else numpy.random.MT19937(5))
        model: Any = torch.nn.Sequential(*(Draws(draw) for _ in range(4)))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if wrapped:
            model, optimizer = protrain.wrap(model, optimizer, memory="64MiB", disk=fresh_disk, block_modes=["checkpoint"] * 4)
        losses = []
        for _ in range(3):
            loss = model(torch.ones(8, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        values = [value.numpy().tobytes() for value in model.state_dict().values()]
        if wrapped:
            protrain.unwrap(model)
        return losses, values

    assert train(True) == train(False)
