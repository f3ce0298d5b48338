"""TorchScript and others that read a parameter below torch's dispatch of overrides: functions that are given one on disk, models
that are to be recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import protrain

WIDTH, BLOCKS, ROWS = 256, 8, 4


@torch.jit.script
def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x + bias)


class Scaled(torch.nn.Module):
    """Without parameters: it is given them."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return x * scale + shift


scaled = torch.jit.script(Scaled())


class Block(torch.nn.Module):
    """Its bias goes to a scripted function, and, as its scale, to a method of a scripted module that is no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias, self.scale = (torch.nn.Parameter(torch.randn(WIDTH) / 4) for _ in range(2))
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = bias_gelu(self.norm(x) @ self.weight, self.bias)
        return x + scaled.forward(inner, scale=self.scale, shift=self.bias)


def made() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))


def trained(model: Any, optimizer: Any) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def wrapped(disk: Path, memory: str, mode: str | None = None) -> tuple[Any, Any]:
    model = made()
    modes = [mode] * BLOCKS if mode else None
    return protrain.wrap(model, adamw(model), memory=memory, disk=disk, block_modes=modes)


@pytest.mark.parametrize("mode", [None, "keep", "swap", "checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("memory", ["5MiB", "64MiB"])
def test_a_scripted_function_is_given_parameters(memory: str, mode: str | None, fresh_disk: Path) -> None:
    """What it saves last ends a recomputation inside of the interpreter, which makes another error of that."""
    plain = made()
    want = trained(plain, adamw(plain))
    model, optimizer = wrapped(fresh_disk, memory, mode)
    assert trained(model, optimizer) == want
    status = protrain.status(model)
    assert (status.plan.n_persist < status.plan.n_chunks) == (memory == "5MiB")
    found, other = model.state_dict(), plain.state_dict()
    assert all(torch.equal(found[name], other[name]) for name in other)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(ROWS, WIDTH)), plain(torch.ones(ROWS, WIDTH)))
    protrain.unwrap(model)


RECORDS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "script": lambda model, _x: torch.jit.script(model),
    "trace": torch.jit.trace,
    "script of a part": lambda model, _x: torch.jit.script(model[0].norm),
    "trace of a part": lambda model, x: torch.jit.trace(model[-1], x),
    "export": lambda model, x: torch.export.export(model, (x,)),
}


@pytest.mark.parametrize("memory", ["5MiB", "64MiB"])
@pytest.mark.parametrize("name", RECORDS)
def test_a_wrapped_model_is_not_recorded(name: str, memory: str, fresh_disk: Path) -> None:
    """The record would read what lies where its parameters lay. Nothing of the training changes."""
    plain = made()
    plain_optimizer = adamw(plain)
    want = trained(plain, plain_optimizer) + trained(plain, plain_optimizer)
    model, optimizer = wrapped(fresh_disk, memory)
    losses = trained(model, optimizer)
    x = torch.ones(ROWS, WIDTH)
    if not (name == "trace of a part" and memory == "64MiB"):  # whose parameters are plain ones
        with pytest.raises(protrain.PlanError, match=r"give them copy\.deepcopy\(model\)"):
            RECORDS[name](model, x)
    assert losses + trained(model, optimizer) == want
    protrain.unwrap(model)


def test_a_copy_is_recorded(fresh_disk: Path) -> None:
    model: Any = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(BLOCKS))
    )
    model, optimizer = protrain.wrap(model, adamw(model), memory="5MiB", disk=fresh_disk)
    trained(model, optimizer)
    x = torch.ones(ROWS, WIDTH)
    with torch.no_grad():
        want = model(x)
        plain = copy.deepcopy(model)
        assert torch.equal(torch.jit.trace(plain, x)(x), want)
        assert torch.equal(torch.jit.script(plain)(x), want)
        protrain.unwrap(model)
        assert torch.equal(torch.jit.script(model)(x), want)


READERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "dlpack": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())),
}


@pytest.mark.parametrize("name", READERS)
def test_tensors_made_of_a_parameter_have_its_values(name: str, fresh_disk: Path) -> None:
    """Also once its slot is another's."""
    model, optimizer = wrapped(fresh_disk, "5MiB")
    trained(model, optimizer)
    want = model.state_dict()
    for number, block in enumerate(model):
        with torch.no_grad():
            model(torch.ones(ROWS, WIDTH))
        found = READERS[name](block.scale)
        with torch.no_grad():
            model(torch.ones(ROWS, WIDTH))
            assert torch.equal(found.detach().clone(), want[f"{number}.scale"])
    protrain.unwrap(model)


def test_a_class_that_turns_to_nobody_cannot_share_a_parameter(fresh_disk: Path) -> None:
    class Own(torch.Tensor):
        pass

    model, optimizer = wrapped(fresh_disk, "5MiB")
    trained(model, optimizer)
    refused = 0
    for p in model.parameters():
        if type(p) is not torch.nn.Parameter:
            with pytest.raises(protrain.PlanError, match="a Own cannot share"):
                p.as_subclass(Own)
            refused += 1
    assert refused
    protrain.unwrap(model)
