"""Graphs that wait for their backward over a step: homes stay where autograd has saved parameters, and move when they may."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import Chain, inputs
from twins import MIB, adamw, assert_equal, run

import protrain
from protrain.model.parameters import ChunkParameter
from protrain.runtime.pacing import Pacer

AMPLE = 256 * MIB


@pytest.fixture(autouse=True)
def _all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step the plan is another one, as one by time may be: no chunk stays in memory."""

    def after_step(pacer: Pacer, *_: Any, **__: Any) -> None:
        pacer._homes.rearrange(pacer._fitter.emptied())

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
