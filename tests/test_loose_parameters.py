"""Parameters that need gradients and are not the optimizer's: nobody froze them, and nobody drops what they are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import Rows
from torch import nn

import protrain
from protrain.state import torchfiles

MIB = 1 << 20
N_STEPS = 4


def rows(seed: int) -> torch.Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))


def some(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for name, p in model.named_parameters() if "blocks.1" in name or "blocks.4" in name], lr=1e-3)


def trained(memory: int | None, disk: Path, *, drops_all: bool, passes: int = 1, norm: float | None = None) -> tuple[Any, ...]:
    """Losses, norms and values of a training; of plain torch where memory is None."""
    model: Any = Rows(512)
    optimizer: Any = some(model)
    if memory is not None:
        model, optimizer = protrain.wrap(model, optimizer, memory=memory, disk=str(disk), accumulate=passes, max_grad_norm=norm)
    figures = []
    for number in range(N_STEPS):
        for one in range(passes):
            loss = model(rows(10 * number + one))
            loss.backward()
            figures.append(loss.item())
        if norm is not None and memory is None:
            figures.append(nn.utils.clip_grad_norm_(model.parameters(), norm).item())
        optimizer.step()
        if norm is not None and memory is not None:
            figures.append(optimizer.grad_norm.item())
        (model if drops_all else optimizer).zero_grad()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if memory is not None:
        assert protrain.status(model).peak_memory_bytes <= memory
        protrain.unwrap(model)
    return figures, values, grads


def equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    tensors = all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
        for ours, theirs in zip(one[1:], other[1:], strict=True)
    )
    return one[0] == other[0] and tensors


def named(run: Callable[[int], Any]) -> int:
    """The budget that the first batch names, which wrap's names in its turn."""
    memory = 64 << 10
    for _ in range(2):
        with pytest.raises(protrain.BudgetError) as refused:
            run(memory)
        memory = refused.value.smallest_bytes
    return memory


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("drops_all", [True, False], ids=["model.zero_grad", "optimizer.zero_grad"])
def test_the_budget_that_is_named_counts_their_gradients(disk: Path, drops_all: bool, passes: int) -> None:
    """Each budget that was named was refused by the next request, up to twice the first one."""
    run = partial(trained, disk=disk, drops_all=drops_all, passes=passes)
    plain, memory = run(None), named(run)
    for budget in (memory, 9 * memory // 8, 3 * memory // 2):
        assert equal(run(budget), plain)


@pytest.mark.parametrize("drops_all", [True, False], ids=["model.zero_grad", "optimizer.zero_grad"])
@pytest.mark.parametrize("memory", [14 * MIB, 64 * MIB])
def test_their_gradients_are_in_the_norm(disk: Path, memory: int, drops_all: bool) -> None:
    plain = trained(None, disk, drops_all=drops_all, norm=0.01)
    assert equal(trained(memory, disk, drops_all=drops_all, norm=0.01), plain)


def test_state_of_a_parameter_without_dimensions_is_written(tmp_path: Path) -> None:
    """Such as CLIP's scale of logits; the Trainer's checkpoint of it was a traceback."""
    value = torch.tensor(3.5)
    torchfiles.save({"state": torchfiles.described(value.shape, value.stride(), lambda: value)}, str(tmp_path / "state.pt"))
    assert torch.equal(torch.load(tmp_path / "state.pt")["state"], value)


class Tables(nn.Module):
    """Blocks of small trained parts and a buffer that nobody writes to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Table() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(384, 384).requires_grad_(False)
        self.down, self.up = nn.Linear(384, 4, bias=False), nn.Linear(4, 384, bias=False)
        self.register_buffer("table", torch.zeros(900 << 10, dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def test_copies_of_buffers_are_foreseen(disk: Path) -> None:
    """A recomputed block's forward begins with copies of small ones, for which the named budget had no room."""

    def run(memory: int) -> None:
        model: Any = Tables()
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer = protrain.wrap(model, optimizer, memory=memory, disk=str(disk))
        for _ in range(3):
            model(torch.randn(4, 384)).backward()
            optimizer.step()
            optimizer.zero_grad()

    run(named(run))
