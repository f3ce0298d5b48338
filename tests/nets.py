"""Small models of blocks whose state is larger than the budget, and what the tests of semantics do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from twins import MIB, Loop, adamw, assert_equal, run

import protrain
from benchmarks.refusals import NO_FIRST_ROOM, NO_SWAPPING, NO_YIELDING
from protrain.runtime.pacing import Pacer

TIGHT = 20 * MIB  # the state of a Chain is 41 MiB


class Block(nn.Module):
    """0.33 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_in = nn.LayerNorm(256)
        self.up = nn.Linear(256, 512)
        self.down = nn.Linear(512, 256)
        self.square = nn.Linear(256, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.square(self.down(torch.tanh(self.up(self.norm_in(x)))))
        return y


class Chain(nn.Module):
    """Eight blocks and a head; gives a loss, or what the head gives. `skip`: numbers of blocks that are left out."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([self.block() for _ in range(8)])
        self.head = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor, *, skip: Sequence[int] = (), loss: bool = True) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number not in skip:
                x = block(x)
        y: torch.Tensor = self.head(x)
        return y.square().mean() if loss else y


def inputs(count: int, rows: int = 8, seed: int = 1) -> list[torch.Tensor]:
    """Random fp32 [rows, 256]."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, rows, 256, generator=generator))


class Carrying(nn.Module):
    """Goes on from what its last forward left, in another way than from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.wide = nn.Linear(64, 64), nn.Linear(64, 128)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is not None:
            x = x + self.wide(x + self.state).tanh()[..., :64]
        x = x + self.layer(x).tanh()
        self.state = x.mean(0)
        return x


class Starting(nn.Module):
    """Its blocks begin with nothing each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Carrying() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.state = None
            x = block(x)
        return x.square().mean()


def rigid(monkeypatch: pytest.MonkeyPatch, *, first_room: bool = False, yields: bool = False) -> None:
    """Without what spares programs that no plan foresaw a refusal: a first step leaves room for them, state in memory gives way,
    and what their forwards save leaves memory."""
    monkeypatch.setattr(*NO_SWAPPING)
    if not first_room:
        monkeypatch.setattr(*NO_FIRST_ROOM)
    if not yields:
        monkeypatch.setattr(*NO_YIELDING)


def steps(batches: list[torch.Tensor], loss_of: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: model(x)) -> Loop:
    """The ordinary loop; loss_of(model, batch) is the loss, which most models give themselves."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        figures = []
        for x in batches:
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    return loop


def both(
    make: Callable[[], nn.Module],
    loop: Loop,
    optimizer: Callable[..., Any] = adamw,
    room: int = 0,
    all_in_memory: bool = False,
    **options: Any,
) -> protrain.Status:
    """Train in plain torch and wrapped: the same bits, and most of the state went to disk.

    room: bytes that the budget has over that of the plan, for what the plan does not foresee: graphs of several forwards,
    gradients that the user asks for.
    all_in_memory: no chunk was on disk; no plan by time is made, which may find that slower on a machine that others use too.
    """
    options = {"memory": TIGHT, **options}
    if room:
        model = make()
        foreseen = protrain.plan(model, inputs(1)[0], memory=TIGHT, optimizer=optimizer(model))
        options |= {"memory": TIGHT + room, "plan": foreseen}
    with ExitStack() as stack:
        if all_in_memory:
            stack.enter_context(patch.object(Pacer, "after_step", lambda *_, **__: None))
        status = assert_equal(run(make, loop, optimizer, **options), run(make, loop, optimizer), options["memory"])
    assert (status.plan.n_persist == status.plan.n_chunks) == all_in_memory
    assert all_in_memory or (status.disk_read_bytes > 0 and status.disk_write_bytes > 0)
    return status
