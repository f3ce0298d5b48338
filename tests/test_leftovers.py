"""What a forward keeps outside of the model: a dry run leaves no tensors without data there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nets import inputs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from twins import MIB, adamw

import protrain

WIDTH = 256


def made(n_rows: int) -> torch.Tensor:
    return torch.arange(n_rows, dtype=torch.float32)[:, None] / n_rows


@functools.cache
def of_cache(n_rows: int) -> torch.Tensor:
    return made(n_rows)


@functools.lru_cache(maxsize=4)
def of_bounded_cache(n_rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return made(n_rows), [made(n_rows)]


by_length: dict[int, Any] = {}
pairs_by_length: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
of_all: list[torch.Tensor] = []
of_module: torch.Tensor | None = None
shared = SimpleNamespace(values=None)


def of_dict(n_rows: int) -> torch.Tensor:
    if n_rows not in by_length:
        by_length[n_rows] = made(n_rows)
    found: torch.Tensor = by_length[n_rows]
    return found


def of_dict_of_pairs(n_rows: int) -> torch.Tensor:
    if n_rows not in pairs_by_length:
        pairs_by_length[n_rows] = (made(n_rows), made(n_rows))
    return pairs_by_length[n_rows][1]


def of_list(n_rows: int) -> torch.Tensor:
    if not of_all:
        of_all.append(made(n_rows))
    return of_all[0]


def of_global(n_rows: int) -> torch.Tensor:
    global of_module
    if of_module is None:
        of_module = made(n_rows)
    return of_module


def of_object(n_rows: int) -> torch.Tensor:
    if shared.values is None:
        shared.values = made(n_rows)
    found: torch.Tensor = shared.values
    return found


def make_closure() -> Callable[[int], torch.Tensor]:
    kept: torch.Tensor | None = None

    def of_closure(n_rows: int) -> torch.Tensor:
        nonlocal kept
        if kept is None:
            kept = made(n_rows)
        return kept

    return of_closure


class OfClass:
    values: torch.Tensor | None = None

    @classmethod
    def get(cls, n_rows: int) -> torch.Tensor:
        if cls.values is None:
            cls.values = made(n_rows)
        return cls.values


def forget() -> None:
    global of_module
    of_cache.cache_clear()
    of_bounded_cache.cache_clear()
    by_length.clear()
    pairs_by_length.clear()
    of_all.clear()
    of_module = shared.values = OfClass.values = None


class Block(nn.Module):
    def __init__(self, get: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.get = nn.Linear(WIDTH, WIDTH), get

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.linear(x * self.get(x.shape[0])).tanh()
        return y


def net(get: Callable[[int], torch.Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(get) for _ in range(4)))


def losses(model: Any, optimizer: Any) -> list[float]:
    found = []
    for number in range(3):
        loss = model(inputs(1, 16, seed=number)[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "cache": of_cache,
    "bounded cache": lambda n_rows: of_bounded_cache(n_rows)[0] * of_bounded_cache(n_rows)[1][0],
    "dict": of_dict,
    "dict of pairs": of_dict_of_pairs,
    "list": of_list,
    "global": of_global,
    "object": of_object,
    "closure": make_closure(),
    "class": OfClass.get,
}


@pytest.mark.parametrize("memory", [4 * MIB, 64 * MIB])
@pytest.mark.parametrize("kind", KINDS)
def test_what_programs_keep_outside_of_the_model(kind: str, memory: int) -> None:
    forget()
    model: Any = net(KINDS[kind])
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    got = losses(model, optimizer)
    protrain.unwrap(model)
    assert type(KINDS[kind](16)) is torch.Tensor
    plain = net(KINDS[kind])
    assert losses(plain, adamw(plain)) == got


def test_what_the_twin_has_stays_there() -> None:
    """A module that goes on from what its last forward left is foreseen as one."""

    class Going(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.before: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x) + (0 if self.before is None else self.before)
            self.before = y.detach()
            return y

    model: Any = Going()
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 * MIB)
    got = losses(model, optimizer)
    assert type(model.before) is torch.Tensor
    protrain.unwrap(model)
    assert len(got) == 3


def test_nothing_is_left_behind_a_dry_run_that_fails(recwarn: pytest.WarningsRecorder) -> None:
    """Nor by a plan, which trains nothing."""

    class Asking(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x)
            return y if float(y.sum()) > 0 else -y

    forget()
    model: Any = Asking(Block(of_dict), Block(of_cache))
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 * MIB)
    losses(model, optimizer)
    protrain.unwrap(model)
    assert any("cannot foresee" in str(warning.message) for warning in recwarn)
    forget()
    protrain.plan(net(of_dict), inputs(1, 16)[0], memory=64 * MIB)
    assert all(type(tensor) is not FakeTensor for tensor in by_length.values())
    plain = net(of_dict)
    losses(plain, adamw(plain))
