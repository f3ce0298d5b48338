"""Loops over a device that differ from a plain one in one thing, against plain torch; as in test_device.py without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import TIGHT, Chain, inputs
from standin import StandIn
from torch import nn
from twins import MIB, assert_equal, run

from protrain.device import compute
from protrain.runtime import pacing


@pytest.fixture(autouse=True)
def device(disk: Any, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    monkeypatch.setattr(compute, "stand_in", made)
    monkeypatch.setattr(pacing, "PROFILED_STEPS", 1 << 30)  # homes stay where they are
    return made


@pytest.mark.parametrize("host", [24 * MIB, 1 << 30])
def test_denormal_numbers_are_flushed_where_the_loop_says_so(host: int) -> None:
    """By the threads that update chunks of the host too, behind backward and after commit, whatever the loop says then."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, plain: bool) -> list[Any]:
        for x in inputs(4):
            torch.set_flush_denormal(True)
            (1e-18 * model(x)).backward()
            optimizer.step()
            torch.set_flush_denormal(False)
            optimizer.zero_grad()
        return []

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # those of a team that is there already flush nothing
    try:
        assert_equal(run(Chain, loop, memory=TIGHT, host_memory=host), run(Chain, loop), TIGHT)
    finally:
        torch.set_num_threads(threads)
