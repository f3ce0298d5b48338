"""The tests for a GPU, tried where there is none: their models, modes and plain loops go together, over the device that stands
for one."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TIGHT, Chain, inputs
from standin import StandIn
from torch import nn

import protrain
from protrain.device import compute
from protrain.model.blocks import find_blocks
from protrain.runtime import pacing

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))
import references
import test_gpu

MIB = 1 << 20


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, disk: Any) -> None:
    def wrap(model: nn.Module, on: str = "cuda", **options: Any) -> tuple[Any, Any]:
        return protrain.wrap(model, test_gpu.adamw(list(model.parameters())), **options)

    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    monkeypatch.setattr(compute, "stand_in", StandIn())
    monkeypatch.setattr(pacing, "PROFILED_STEPS", 1 << 30)
    monkeypatch.setattr(test_gpu, "wrap", wrap)
    monkeypatch.setattr(references, "GPU", "cpu")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    for place in (torch.Tensor, nn.Module):
        monkeypatch.setattr(place, "cuda", lambda self: self)


def test_modes_are_given_for_each_block() -> None:
    with torch.device("meta"):
        assert len(find_blocks(test_gpu.Wide())) == test_gpu.BLOCKS


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_plain_loop_is_the_same(precision: str, no_gpu: None) -> None:
    """In either precision batches are of the type that the model computes with."""
    status = test_gpu.equal(Chain, inputs(3, rows=16), precision=precision, memory=TIGHT, host_memory=24 * MIB)
    assert status.plan.n_persist < status.plan.n_chunks


def test_activations_leave_and_come_back(no_gpu: None) -> None:
    test_gpu.test_activations_leave_and_come_back()
