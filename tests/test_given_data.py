"""Values that others put into parameters: by `.data`, by another optimizer, by a load, in a forward; and transforms of
torch.func, inside of which homes do not move."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from nets import TIGHT, Block, Chain, inputs, steps
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from twins import MIB, adamw, assert_equal, run

import protrain

#: All in memory, some chunks, none.
BUDGETS = (1 << 30, TIGHT, 8 * MIB)


def step(model: Any, optimizer: Any, x: torch.Tensor) -> float:
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def averaged(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
    """As many tutorials keep an average: put in by `.data`, and what was there before put back."""
    figures: list[Any] = []
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x in inputs(4):
        figures.append(step(model, optimizer, x))
        for name, p in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
        backup = {}
        for name, p in model.named_parameters():
            backup[name], p.data = p.data, shadow[name]
        with torch.no_grad():
            figures.append(float(model(x)))
        figures.append([float(tensor.double().sum()) for tensor in backup.values()])
        for name, p in model.named_parameters():
            p.data = backup[name]
        figures.append(float(model(x).detach()))
    return figures


def exchanged(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
    """Two parameters, of one chunk or of two."""
    figures = []
    for number, x in enumerate(inputs(4)):
        a, b = model.blocks[0].up.bias, model.blocks[0 if number % 2 else 5].up.bias
        a.data, b.data = b.data, a.data
        figures.append(step(model, optimizer, x))
    return figures


def by_two(**options: Any) -> Callable[[Any, Any, bool], list[Any]]:
    """The head is trained by an optimizer of the user's own."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        other = torch.optim.AdamW(model.head.parameters(), lr=1e-2, **options)
        figures = []
        for x in inputs(4):
            loss = model(x)
            grads = torch.autograd.grad(loss, list(model.head.parameters()), retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for p, grad in zip(model.head.parameters(), grads, strict=True):
                p.grad = grad
            other.step()
            other.zero_grad()
            figures.append(float(loss.detach()))
        return figures

    return loop


def other_groups(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
    figures = []
    for number, x in enumerate(inputs(4)):
        optimizer.param_groups = [{**group, "lr": 0.01 * number} for group in optimizer.param_groups]
        figures.append(step(model, optimizer, x))
    return figures


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("loop", [averaged, exchanged, other_groups])
def test_bits_are_those_of_plain_torch(loop: Any, memory: int) -> None:
    ours, plain = run(Chain, loop, memory=memory), run(Chain, loop)
    assert ours.figures == plain.figures
    assert ours.tensors == plain.tensors


def blocks_alone(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.blocks.parameters(), lr=1e-3, fused=True)


@pytest.mark.parametrize("memory", [1 << 30, 9 * MIB])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_an_optimizer_of_the_users_own_trains_what_is_in_no_group(options: dict[str, bool], memory: int) -> None:
    loop = by_two(**options)
    ours, plain = run(Chain, loop, blocks_alone, memory=memory), run(Chain, loop, blocks_alone)
    assert ours.figures == plain.figures
    assert ours.tensors == plain.tensors


@pytest.mark.parametrize("memory", BUDGETS)
def test_views_of_before_show_what_a_parameter_was(memory: int) -> None:
    """As in plain torch, where `.data =` gives it another storage. Afterwards they are nobody's, and can be written to."""
    plain, model = Chain(), Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    assert step(model, optimizer, inputs(1)[0]) == step(plain, adamw(plain), inputs(1)[0])
    for one in (plain, model):
        one.kept = {name: (p.data, p.detach().view(-1)[1:5]) for name, p in one.named_parameters()}  # type: ignore[assignment]
        for p in one.parameters():
            p.data = torch.full_like(p, 0.5)
        for p in one.parameters():
            p.data = p.data + 1
        one(inputs(1)[0])
        for whole, _ in one.kept.values():
            whole.mul_(2)
    for name, (whole, part) in plain.kept.items():
        ours, ours_part = model.kept[name]
        assert torch.equal(ours, whole), name
        assert torch.equal(ours_part, part), name
        assert ours.untyped_storage().data_ptr() == ours_part.untyped_storage().data_ptr()
    assert all(torch.equal(p.detach(), q.detach()) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    protrain.unwrap(model)


@pytest.mark.parametrize("memory", BUDGETS)
def test_data_given_to_itself_changes_nothing(memory: int) -> None:
    """As modules do that are converted to what they are. Views go on to show the parameter, as in plain torch."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    step(model, optimizer, inputs(1)[0])
    kept = [(p, p.data, p.detach()[1:3]) for p in model.parameters()]
    for p, _, _ in kept:
        p.data = p.data
    with torch.no_grad():
        for p, _, _ in kept:
            p.add_(1)
    for p, whole, part in kept:
        assert torch.equal(whole, p.detach())
        assert torch.equal(part, p.detach()[1:3])
    protrain.unwrap(model)


def test_what_a_view_shows_that_cannot_be_told_is_refused() -> None:
    """In memory a view shows a chunk; whose bytes it shows is not known where only some of them were given other data."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30)
    step(model, optimizer, inputs(1)[0])
    given, before = model.blocks[0].up.bias, model.blocks[0].up.bias.detach().clone()
    kept, given.data = given.data, torch.zeros_like(given)
    for _ in range(2):
        with pytest.raises(protrain.PlanError, match=r"blocks\.0\.up\.bias was given other data while .* keep copies"):
            model(inputs(1)[0])
    assert torch.equal(kept, before)
    del kept
    assert step(model, optimizer, inputs(1)[0]) >= 0
    assert not given.detach().eq(before).all()
    protrain.unwrap(model)


@pytest.mark.parametrize("memory", BUDGETS)
def test_what_is_loaded_comes_over_what_was_given(memory: int, tmp_path: Any) -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    step(model, optimizer, inputs(1)[0])
    protrain.save(model, optimizer, tmp_path / "saved")
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    protrain.load(model, optimizer, tmp_path / "saved")
    model(inputs(1)[0])
    assert all(torch.equal(p.detach(), q) for p, q in zip(model.parameters(), before, strict=True))
    loss = model(inputs(1)[0])
    protrain.load(model, optimizer, tmp_path / "saved")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    protrain.unwrap(model)


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint", "checkpoint_swap"])
def test_a_parameter_that_is_written_behind_its_forward_is_noticed(mode: str) -> None:
    """Autograd has saved no bias: blocks that are kept or swapped go on as plain torch does, those that run again would not."""
    plain, model = Chain(), Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30, block_modes=[mode] * 8)
    for one in (plain, model):
        loss = one(inputs(1)[0])
        with torch.no_grad():
            one.blocks[3].down.bias.add_(0.1)
        if one is model and mode.startswith("checkpoint"):
            with pytest.raises(RuntimeError, match=r"blocks\.3 is recomputed, and a parameter of it was changed"):
                loss.backward()
            optimizer.zero_grad()
            step(model, optimizer, inputs(1)[0])
        else:
            loss.backward()
    if not mode.startswith("checkpoint"):
        assert torch.equal(model.head.weight.grad, plain.head.weight.grad)
        assert torch.equal(model.blocks[0].up.weight.grad, plain.blocks[0].up.weight.grad)
    protrain.unwrap(model)


class Empty(nn.Module):
    """A block with a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.nothing = nn.Linear(256, 256), nn.Parameter(torch.empty(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.linear(x)) + self.nothing.sum()
        return y


class EmptyChain(Chain):
    block = Empty


@pytest.mark.parametrize(
    "make", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.AdamW, torch.optim.SGD]
)
@pytest.mark.parametrize("memory", [1 << 30, 5 * MIB])
def test_a_parameter_without_elements_is_trained_by_any_optimizer(make: Any, memory: int) -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        return [step(model, optimizer, x) for x in inputs(3)]

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return make(model.parameters(), lr=1e-3)

    ours, plain = run(EmptyChain, loop, optimizer, memory=memory), run(EmptyChain, loop, optimizer)
    assert ours.figures == plain.figures
    assert ours.tensors == plain.tensors


def tangent(model: Any, x: torch.Tensor) -> Any:
    return torch.func.jvp(lambda y: model(y, loss=False), (x,), (torch.ones_like(x),))[1]


def gradient(model: Any, x: torch.Tensor) -> Any:
    return torch.func.grad(model)(x)


def mapped(model: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return torch.vmap(lambda y: model(y, loss=False))(x)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("transformed", [tangent, gradient, mapped])
@pytest.mark.parametrize("memory", [1 << 30, TIGHT])
def test_no_home_moves_inside_a_transform(transformed: Callable[[Any, torch.Tensor], Any], memory: int, steps: int) -> None:
    """Before a batch is known, and with one of another shape: what plain torch gives, or one line, and training goes on."""
    plain, model = Chain(), Chain()
    ours, theirs = protrain.wrap(model, adamw(model), memory=memory)[1], adamw(plain)
    for x in inputs(steps):
        assert step(model, ours, x) == step(plain, theirs, x)
    x = inputs(1, rows=12)[0]
    if memory < 1 << 30:
        with pytest.raises(protrain.PlanError, match=r"a transform of torch\.func"):
            transformed(model, x)
    else:
        assert torch.equal(transformed(model, x).detach(), transformed(plain, x).detach())
    for x in inputs(3, rows=12):
        assert step(model, ours, x) == step(plain, theirs, x)
    assert all(torch.equal(p, q) for p, q in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    protrain.unwrap(model)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("memory", BUDGETS)
def test_a_call_with_fake_tensors_leaves_parameters_as_they_are(memory: int, steps: int) -> None:
    """As those who estimate memory or operations make it; it may be an error, where parameters are on disk."""
    plain, model = Chain(), Chain()
    ours, theirs = protrain.wrap(model, adamw(model), memory=memory)[1], adamw(plain)
    for x in inputs(steps):
        assert step(model, ours, x) == step(plain, theirs, x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, suppress(Exception):
        model(mode.from_tensor(inputs(1, rows=12)[0]))
    for x in inputs(3):
        assert step(model, ours, x) == step(plain, theirs, x)
    protrain.unwrap(model)


@pytest.mark.parametrize("within", ["loss", "backward"])
def test_the_budget_of_a_model_that_is_gone_is_in_force_no_more(within: str) -> None:
    """Its step ended in an exception, and nobody can end it: what torch keeps of a backward that failed holds the session."""

    def broken() -> None:
        model: Any = Chain()
        model, _optimizer = protrain.wrap(model, adamw(model), memory=9 * MIB)
        if within == "backward":
            model.blocks[3].up.weight.register_hook(lambda _: 1 // 0)
        model(inputs(1)[0]).backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    gc.collect()
    assert torch.ones(16 << 20).sum() == 16 << 20
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()  # which ends the one that failed


def test_parameters_made_in_inference_mode_are_refused() -> None:
    model: Any = Chain()
    with torch.inference_mode():
        model.blocks[1].up = nn.Linear(256, 512)
    with pytest.raises(protrain.PlanError, match=r"blocks\.1\.up\.weight was made in torch\.inference_mode"):
        protrain.wrap(model, adamw(model), memory=1 << 30)


class Clamping(Block):
    """As some models do in each forward of training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.square.weight.data.clamp_(-120, 120)
        return super().forward(x)


class ClampingChain(Chain):
    block = Clamping


@pytest.mark.parametrize("memory", [6 * MIB, TIGHT, 256 * MIB])
def test_a_write_in_a_forward_that_changes_no_bit_is_none(memory: int) -> None:
    loop = steps(inputs(3))
    assert_equal(run(ClampingChain, loop, memory=memory), run(ClampingChain, loop), memory)
