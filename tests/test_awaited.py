"""Graphs that wait for their backward over a step: homes stay where autograd has saved parameters, and move when they may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nets import Chain, inputs
from test_unseen_reads import REFUSED, refuses
from torch import nn
from twins import MIB, adamw, assert_equal, run

import protrain
from protrain.model.parameters import ChunkParameter
from protrain.runtime.fitting import Fitter
from protrain.runtime.pacing import Pacer

AMPLE = 256 * MIB


@pytest.fixture(autouse=True)
def _all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step the plan is another one, as one by time may be: no chunk stays in memory."""

    def after_step(pacer: Pacer, *_: Any, **__: Any) -> None:
        pacer._homes.rearrange(pacer._carrier.emptied())

    monkeypatch.setattr(Pacer, "after_step", after_step)


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def on_disk(model: torch.nn.Module) -> bool:
    return any(isinstance(p, ChunkParameter) for p in model.parameters())


@pytest.mark.parametrize("mode", ["keep", "swap"])
@pytest.mark.parametrize("loss", [True, False])
def test_homes_stay_while_a_graph_waits(mode: str, loss: bool) -> None:
    """torch's fused kernels leave versions alone: a backward behind a step goes on with the new values."""

    def backward(output: torch.Tensor) -> float:
        value = output if loss else output.square().mean()
        value.backward()
        return value.item()

    def loop(model: Any, optimizer: Any, plain: bool) -> list[float]:
        figures, waiting = [], model(inputs(1)[0], loss=loss)
        for x in inputs(3):
            early, waiting = waiting, model(x, loss=loss)
            figures.append(backward(early))
            step(optimizer)
            assert not on_disk(model)
        figures.append(backward(waiting))
        step(optimizer)
        figures.append(backward(model(inputs(1)[0], loss=loss)))
        step(optimizer)
        assert plain or on_disk(model)
        return figures

    assert_equal(run(Chain, loop, memory=AMPLE, block_modes=[mode] * 8), run(Chain, loop), AMPLE)


def hold(output: torch.Tensor) -> torch.Tensor:
    output.mean().backward()
    return output


def drop(output: torch.Tensor) -> torch.Tensor:
    output.mean().backward()
    return output.detach()


@pytest.mark.parametrize("use", [hold, drop])
def test_homes_move_behind_a_step(use: Any) -> None:
    model = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=AMPLE)
    try:
        held = use(model(inputs(1)[0], loss=False))
        model(inputs(1)[0])  # nobody has its graph
        step(optimizer)
        assert on_disk(model)
        assert held.isfinite().all()
    finally:
        protrain.unwrap(model)


class Linears(Chain):
    """Blocks of which autograd saves views of parameters alone."""

    class block(nn.Sequential):  # noqa: N801
        def __init__(self) -> None:
            super().__init__(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))


class Boxed(Chain):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return SimpleNamespace(loss=super().forward(x, **kwargs))


def of_an_object(model: Any, _: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(x).loss
    return output


def of_eval_mode(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    model(x).backward()  # from here on training is in train mode
    output: torch.Tensor = model.eval()(x)
    model.train()
    step(optimizer)
    return output


def with_a_backward_that_keeps(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(x)
    output.backward(retain_graph=True)
    step(optimizer)
    return output


@pytest.mark.parametrize("wait", [of_an_object, of_eval_mode, with_a_backward_that_keeps])
def test_graphs_that_wait_are_seen(wait: Any) -> None:
    def train(optimizer: Any, output: Any) -> float:
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        step(optimizer)
        return loss.item()

    def loop(model: Any, optimizer: Any, plain: bool) -> list[float]:
        waiting = wait(model, optimizer, inputs(1)[0])
        figures = [train(optimizer, model(x)) for x in inputs(2)]
        figures += [train(optimizer, waiting), train(optimizer, model(inputs(1)[0]))]
        assert plain or on_disk(model)
        return figures

    make = Boxed if wait is of_an_object else Chain
    assert_equal(run(make, loop, memory=AMPLE, block_modes=["keep"] * 8), run(make, loop), AMPLE)


@refuses
def test_homes_stay_while_the_graph_of_a_gradient_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hold what the model returned, and gradients that are dropped beside it let another step begin."""

    def plan_later(fitter: Fitter) -> None:
        fitter._homes.rearrange(fitter._carrier.emptied())

    def loop(model: Any, optimizer: Any, plain: bool) -> list[float]:
        figures = []
        for x in inputs(2):
            x.requires_grad_()
            (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
            optimizer.zero_grad()
            with monkeypatch.context() as context:
                context.setattr(Fitter, "plan_later", plan_later)
                loss = model(x.detach()) + slope.square().sum()
            loss.backward()
            step(optimizer)
            assert plain or on_disk(model)  # behind the step it is awaited no more
            figures.append(loss.item())
        return figures

    assert_equal(run(Chain, loop, memory=AMPLE), run(Chain, loop), AMPLE)


def test_old_values_are_refused() -> None:
    """Of a graph that nobody sees wait, and of a view: good until a step changes what it shows."""
    model: Any = Linears()
    model, optimizer = protrain.wrap(model, adamw(model), memory=AMPLE, block_modes=["keep"] * 8)
    try:
        x = inputs(1)[0]
        graphs = [model.head(model.blocks[0](x)).mean() for _ in range(2)]
        view = model.head.weight.detach()
        model(x).backward()
        step(optimizer)
        assert on_disk(model)
        assert torch.equal(view, model.head.weight)
        graphs.pop().backward()
        step(optimizer)
        for read in (view.sum, graphs.pop().backward):
            with pytest.raises(RuntimeError, match=REFUSED):
                read()
    finally:
        protrain.unwrap(model)
