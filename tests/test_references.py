"""The C extension's types: as many references after as before, whatever became of their objects."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TIGHT, Block, Chain, inputs, steps
from twins import adamw

import protrain
from protrain import _core

TYPES = ("Region", "Engine", "Saved", "SavedTensors", "Recomputed", "SavedOrder", "DeviceRecord", "MachineBench")
ROUNDS = 20


def counts() -> dict[str, int]:
    """References to each type, one of which each of its objects has."""
    gc.collect()
    return {name: sys.getrefcount(getattr(_core, name)) for name in TYPES}


@pytest.mark.parametrize("name", TYPES)
def test_constructions_that_fail(name: str, fresh_disk: Path) -> None:
    kind: Any = getattr(_core, name)
    bad: list[tuple[Any, ...]] = [(), ("x",), (1, 2, 3), (None,) * 12, (str(fresh_disk), -1), (str(fresh_disk / "missing"),)]
    before = counts()
    for _ in range(ROUNDS):
        for arguments in bad:
            with pytest.raises((TypeError, ValueError, OSError, OverflowError)):
                kind(*arguments)
    assert counts() == before


def one_round(disk: Path, modes: list[str], ends: str) -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory="64MiB", disk=disk, block_modes=modes)
    steps(inputs(1, rows=64))(model, optimizer, False)
    loss = model(inputs(1, rows=64)[0])
    if ends == "dropped":
        del loss, model, optimizer
        return
    loss.backward()
    if ends == "unwrapped before the graph":
        protrain.unwrap(model)
        del loss
        return
    del loss
    protrain.unwrap(model)


@pytest.mark.parametrize("ends", ["unwrapped", "unwrapped before the graph", "dropped"])
def test_rounds_of_training(ends: str, fresh_disk: Path) -> None:
    modes = ["swap", "checkpoint_swap"] * 4
    one_round(fresh_disk, modes, ends)
    before = counts()
    for _ in range(2):
        one_round(fresh_disk, modes, ends)
    assert counts() == before


class Keeps(Block):
    """The error that it caught, whose traceback has the calls around it, down to the frame of its recomputation."""

    error: Exception | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            raise ValueError
        except ValueError as error:
            self.error = error
        return super().forward(x)


@pytest.mark.parametrize("mode", ["swap", "checkpoint", "checkpoint_swap"])
def test_a_block_that_keeps_an_error_goes_with_its_model(mode: str, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chain, "block", Keeps)
    one_round(fresh_disk, [mode] * 8, "unwrapped")
    before = counts()
    one_round(fresh_disk, [mode] * 8, "unwrapped")
    assert counts() == before


def test_errors_in_the_middle(fresh_disk: Path) -> None:
    """Calls with arguments that are none, of an engine that is open and of one that is closed."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk)
    steps(inputs(1))(model, optimizer, False)
    engine = protrain.session_of(model).engine
    before, given = counts(), [object(), "x", [1, 2], torch.ones(3), 1 << 70, -1]
    references = [sys.getrefcount(value) for value in given[:4]]
    names = [name for name in dir(engine) if not name.startswith("_") and name != "close"]
    for closed in (False, True):
        if closed:
            protrain.unwrap(model)
        for name in names:
            method = getattr(engine, name)
            for value in given:
                with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError, AttributeError):
                    method(value, value, value, value, value, value, value, value, value)
                    raise AssertionError(f"{name} took nine arguments that are none")
        del method
    assert [sys.getrefcount(value) for value in given[:4]] == references
    after = counts()
    assert after["Saved"] == before["Saved"]
    assert after["Engine"] == before["Engine"]
