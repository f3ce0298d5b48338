"""Parameters on disk that are read past all that demands their chunks: refused, never other parameters' numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import TIGHT, Chain, inputs
from torch import nn
from twins import adamw, assert_equal, run

import protrain
from protrain.model.parameters import ChunkParameter

refuses = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12), reason="a torch that cannot open a storage again"
)
REFUSED = "the memory of a parameter that is on disk is read where protrain cannot see it"


def trained(model: Any, optimizer: Any, count: int = 2) -> list[float]:
    losses = []
    for x in inputs(count):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_disk(model: nn.Module) -> list[Any]:
    found = [p for p in model.parameters() if isinstance(p, ChunkParameter)]
    assert len(found) > 20
    return found


def by_data(p: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(1)
    x.data = p
    return x


def by_set(p: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1).set_(p)


READS: dict[str, Callable[[Any], Any]] = {
    "tensor": torch.tensor,
    "Tensor": lambda p: torch.Tensor(p) + 0,
    "asarray": lambda p: torch.asarray(p, copy=True),
    "nested": lambda p: torch.nested.nested_tensor([p]),
    "data": lambda p: by_data(p) + 0,
    "set": lambda p: by_set(p) + 0,
    "subclass": lambda p: torch.Tensor._make_subclass(torch.Tensor, p) + 0,
    "write": lambda p: by_data(p).zero_(),
    "address": lambda p: by_data(p).data_ptr(),
}


@refuses
@pytest.mark.parametrize("name", READS)
def test_what_nobody_sees_is_refused(name: str) -> None:
    def loop(model: Any, optimizer: Any, plain: bool) -> list[float]:
        losses = trained(model, optimizer)
        if not plain:
            for p in on_disk(model):
                with pytest.raises(RuntimeError, match=REFUSED):
                    READS[name](p)
        return losses + trained(model, optimizer)

    assert_equal(run(Chain, loop, memory=TIGHT), run(Chain, loop), TIGHT)


@refuses
def test_what_shows_a_place_is_refused_when_that_is_gone() -> None:
    model = Chain()
    wrapped, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    trained(wrapped, optimizer)
    shown = [by_data(p) for p in on_disk(wrapped)]
    protrain.unwrap(wrapped)
    for tensor in shown:
        with pytest.raises(RuntimeError, match=REFUSED):
            tensor.clone()
    for p in model.parameters():
        assert torch.equal(torch.tensor(p), p)


@refuses
def test_an_address_is_good_until_the_next_operation() -> None:
    """As those are that serialisers tell shared memory by."""
    model = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    try:
        trained(model, optimizer)
        for p in on_disk(model):
            want = p.detach().clone()
            assert torch.equal(from_address(p), want)
            storage = p.untyped_storage()
            assert storage.data_ptr() == p.data_ptr() - p.storage_offset() * 4
            assert p.norm() == want.norm()
            with pytest.raises(RuntimeError, match=REFUSED):
                storage.data_ptr()
    finally:
        protrain.unwrap(model)


def test_what_is_shown_is_what_plain_torch_shows() -> None:
    plain, model = Chain(), Chain()
    model, _ = protrain.wrap(model, adamw(model), memory=TIGHT)
    try:
        assert on_disk(model)
        for p, twin in zip(model.parameters(), plain.parameters(), strict=True):
            assert repr(p) == repr(twin)
            assert f"{p.data[:2]}" == f"{twin.data[:2]}"
            assert f"{p.flatten()[0]:.5f} {p.data.flatten()[1]}" == f"{twin.flatten()[0]:.5f} {twin.data.flatten()[1]}"
    finally:
        protrain.unwrap(model)


def test_no_parameter_is_made_of_one_on_disk() -> None:
    model = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    try:
        p = model.blocks[5].up.weight
        assert isinstance(p, ChunkParameter)
        for make in (nn.Parameter, nn.Embedding.from_pretrained):
            with pytest.raises(protrain.PlanError, match="cannot share the memory of one that is on disk"):
                make(p)
        own = nn.Embedding.from_pretrained(p.detach().clone())
        assert torch.equal(own.weight, p)
        trained(model, optimizer)
    finally:
        protrain.unwrap(model)


def from_address(p: torch.Tensor) -> torch.Tensor:
    """[elements] of fp32, as a kernel finds them that torch did not start."""
    address = p.data_ptr()
    return torch.frombuffer((ctypes.c_float * p.numel()).from_address(address), dtype=torch.float32).view(p.shape)


class WithKernel(nn.Module):
    """Gives addresses of parameters of this block and of others, all at once, to what reads them after that."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 512)
        self.down = nn.Linear(512, 256)
        self.others: list[WithKernel] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [self.up.weight, *(other.down.weight for other in self.others)]
        kernel = [from_address(weight) for weight in weights]
        with torch.no_grad():
            scale = torch.stack([torch.stack([seen.abs().max(), seen.square().sum()]) for seen in kernel]).mean(0)
        y: torch.Tensor = x + scale[0] * self.down(torch.tanh(self.up(x))) / scale[1]
        return y


class Kernels(Chain):
    block = WithKernel

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.others = [self.blocks[number - 1], self.blocks[number - 3]]  # type: ignore[assignment]


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint", "checkpoint_swap"])
def test_kernels_that_torch_does_not_start(mode: str) -> None:
    def loop(model: Any, optimizer: Any, plain: bool) -> list[float]:
        assert plain or len(on_disk(model)) > 20
        losses = trained(model, optimizer, 3)
        with torch.no_grad():
            return [*losses, model(inputs(1)[0]).item()]

    assert_equal(run(Kernels, loop, memory=TIGHT, block_modes=[mode] * 8), run(Kernels, loop), TIGHT)


def mixed(p: nn.Parameter, other: nn.Parameter) -> None:
    p.add_(other, alpha=0.5)
    other.mul_(1.25)


def shared(p: nn.Parameter, other: nn.Parameter) -> None:
    p.data = other.data


@pytest.mark.parametrize("combine", [mixed, shared])
def test_first_values_that_are_made_of_others(combine: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
    """Of chunks that are filled already, and have lost their slots to others since."""

    def fill(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            with torch.no_grad():
                p.normal_()
                for other in before:
                    if other.shape == p.shape:
                        combine(p, other)
            before.append(p)

    def filled(model: nn.Module) -> nn.Module:
        before.clear()
        torch.manual_seed(5)
        for module in model.modules():
            fill(module)
        return model

    before: list[nn.Parameter] = []
    want = filled(Chain()).state_dict()
    with torch.device("meta"):
        model = Chain()
    before.clear()
    torch.manual_seed(5)
    model, _ = protrain.wrap(model, adamw(model), memory=TIGHT, param_init_fn=fill)
    try:
        for name, value in model.state_dict().items():
            assert torch.equal(value, want[name]), name
    finally:
        protrain.unwrap(model)
