"""Models that no dry run foresees, as what they compute decides what they do: what their steps took is planned with.

Where what they ask can be heard they are foreseen from their second step on (test_answers.py)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from nets import Block, Chain, rigid
from torch import nn
from twins import MIB, adamw

import protrain

pytestmark = pytest.mark.filterwarnings("ignore:protrain cannot foresee")


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


class Deciding(Chain):
    """41 MiB of states; numbers decide from a length of `least` on, read past torch where nobody hears it. Wide, the loss takes
    4 KiB for each row, several times."""

    block = Block

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:  # type: ignore[override]
        if len(x) >= self.least and x.untyped_storage()[3] > 255:
            x = -x
        y = super().forward(x, loss=False)
        return (y.repeat(1, 4).exp() if wide else y).square().mean()


Step = tuple[int, bool]  # rows, and whether the loss is wide


def train(model: nn.Module, optimizer: Any, steps: Sequence[Step]) -> tuple[list[float | None], list[protrain.Status]]:
    """Losses, None where a step was refused, and what there was after each step."""
    losses: list[float | None] = []
    seen: list[protrain.Status] = []
    generator = torch.Generator().manual_seed(1)
    for rows, wide in steps:
        x, loss = torch.randn(rows, 256, generator=generator), None
        try:
            loss = model(x, wide)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        except protrain.BudgetError:
            losses.append(None)
        del loss
        optimizer.zero_grad()
        if not isinstance(optimizer, torch.optim.AdamW):
            seen.append(protrain.status(model))
    return losses, seen


def both(steps: Sequence[Step], memory: int, least: int = 0, refused: int = 0) -> list[protrain.Status]:
    """The same numbers as plain torch, but for steps that were refused."""
    model: Any = Deciding(least)
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    losses, seen = train(model, optimizer, steps)
    protrain.unwrap(model)
    assert losses.count(None) == refused
    plain = Deciding(least)
    made = [step for step, loss in zip(steps, losses, strict=True) if loss is not None]
    if not refused:
        assert losses == train(plain, adamw(plain), made)[0]
    assert all(status.peak_memory_bytes <= memory for status in seen)
    return seen


class Asking(Chain):
    """Asks what it has computed before the block of this number, or before the head."""

    def __init__(self, asks_at: int = 8) -> None:
        super().__init__()
        self.asks_at = asks_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for number, part in enumerate((*self.blocks, self.head)):
            if number == self.asks_at and (x > 1e9).any():
                x = -x
            x = part(x)
        return x.square().mean()


def made(model: nn.Module, optimizer: Any) -> list[float]:
    """Losses of four steps of 2,048 rows."""
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(4):
        loss = model(torch.randn(2048, 256, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def started(asks_at: int, memory: int) -> list[float] | int:
    """A program that ends where it is refused: the budget that it is to be started with then."""
    model: Any = Asking(asks_at)
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    try:
        return made(model, optimizer)
    except protrain.BudgetError as error:
        return error.smallest_bytes
    finally:
        protrain.unwrap(model)


@pytest.mark.parametrize(("asks_at", "most", "last"), [(8, 2, 24), (4, 2, 28), (0, 5, 44)])
def test_what_was_seen_before_a_dry_run_failed_is_named(asks_at: int, most: int, last: int) -> None:
    """Blocks swap from the first step on where recomputed ones may have no room, which takes 41 MiB: half of that will do."""
    plain = Asking(asks_at)
    memory, named = 8 * MIB, []
    while isinstance(found := started(asks_at, memory), int):
        assert found > memory
        memory = found
        named.append(memory)
    assert found == made(plain, adamw(plain))
    assert len(named) <= most, named
    assert memory <= last * MIB, named


@pytest.mark.parametrize("memory", [24, 32, 40, 50, 60, 70, 90])
def test_a_larger_budget_trains_what_a_smaller_one_does(memory: int) -> None:
    """Where blocks swap, where they are recomputed, and between."""
    assert isinstance(started(8, memory * MIB), list)


def test_a_step_that_is_made_again_swaps() -> None:
    """Where blocks were recomputed in the one that was refused, and nobody knew what they would take."""
    model: Any = Asking(0)
    model, optimizer = protrain.wrap(model, adamw(model), memory=30 * MIB)
    with pytest.raises(protrain.BudgetError):
        made(model, optimizer)
    plain = Asking(0)
    assert made(model, optimizer) == made(plain, adamw(plain))
    assert set(protrain.status(model).plan.block_modes) == {"swap"}
    protrain.unwrap(model)


def is_ample(status: protrain.Status) -> bool:
    return status.plan.n_persist == status.plan.n_chunks and set(status.plan.block_modes) == {"keep"}


def test_blocks_are_kept_where_memory_is_ample() -> None:
    """Once a step under the safest plan has shown what they save."""
    seen = both([(512, False)] * 4, 1 << 30)
    assert is_ample(seen[0])
    assert seen[0].plan.peak_bytes == seen[-1].plan.peak_bytes


@pytest.mark.parametrize("memory", [32, 60, 68, 76])
def test_blocks_are_kept_in_a_half_of_what_is_left(memory: int) -> None:
    """Which they never pass, and with no chunk on disk."""
    seen = both([(1024, False)] * 4, memory * MIB)
    modes, plan = seen[-1].plan.block_modes, seen[-1].plan
    assert modes.count("keep") in {32: (0,), 60: range(8), 68: range(1, 8), 76: range(1, 9)}[memory]
    assert plan.n_persist == plan.n_chunks or "keep" not in modes
    assert plan.peak_bytes <= memory * MIB


def test_a_longer_batch_runs_under_the_safest_plan_and_memory_is_used_again() -> None:
    """After it, and after one that is longer in one direction and needs less in all."""
    seen = both([(64, False)] * 2 + [(512, False)] + [(64, False)] * 2, 1 << 30)
    assert all(map(is_ample, seen))
    assert seen[1].plan.peak_bytes < seen[2].plan.peak_bytes == seen[-1].plan.peak_bytes


def test_what_was_refused_runs_under_the_safest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is planned with from then on, where chunks can make room for it; where they cannot the others go on as before."""
    light, wide = (1024, False), (1024, True)
    rigid(monkeypatch)
    seen = both([light, light, wide, wide, light, wide, light, wide], 48 * MIB, refused=1)
    assert seen[-1].plan.n_persist < seen[1].plan.n_persist
    seen = both([light, light, wide, light, light], 28 * MIB, refused=1)
    assert seen[-1].plan.peak_bytes == seen[1].plan.peak_bytes


def test_some_batches_are_foreseen_and_others_are_not() -> None:
    """Where those that are fill the memory, the first that is not runs under the safest plan all the same."""
    for memory in (60 * MIB, 1 << 30):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = both([(128, False)] * 3 + [(2048, False)] * 2 + [(128, False), (2048, False)], memory, least=1024)
        assert sum("cannot foresee" in str(one.message) for one in caught) == 1
        assert is_ample(seen[2])
    assert is_ample(seen[-1])


def test_passes_of_steps_that_are_not_made_leave_nothing_behind() -> None:
    model: Any = Deciding()
    model, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30)
    x = torch.randn(16, 256)
    for _ in range(20):
        model(x).backward()
        optimizer.zero_grad()
    assert len(protrain.session_of(model).runner._saved or ()) <= len(model.blocks)
    protrain.unwrap(model)
