"""Homes that move while the disk fails: the model stays usable, and what it has computed stays what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TIGHT, Chain, inputs, rigid, steps
from twins import adamw, bits

import protrain


class Failing:
    """An engine whose chunks cannot change their homes: from call number `first` of that kind on, for `count` calls."""

    def __init__(self, engine: Any, first: int, count: int) -> None:
        self._engine, self._first, self._last = engine, first, first + count - 1
        self.calls = 0

    def _move(self, name: str, *args: Any) -> None:
        self.calls += 1
        if self._first <= self.calls <= self._last:
            raise protrain.DiskError("/disk: read failed", errno=5, filename="/disk", asked_bytes=4096)
        getattr(self._engine, name)(*args)

    def to_memory(self, *args: Any) -> None:
        self._move("to_memory", *args)

    def to_disk(self, *args: Any) -> None:
        self._move("to_disk", *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def state_of(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: bits(value) for name, value in model.state_dict().items()}


def begun(disk: Path) -> tuple[Any, Any, Any]:
    """Wrapped, and the first batch will move homes: the plan without one has fewer chunks in memory than the budget holds."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=2 * TIGHT, disk=disk)
    return model, optimizer, protrain.session_of(model)


def plain(count: int) -> tuple[list[float], dict[str, bytes]]:
    model = Chain()
    return steps(inputs(count))(model, adamw(model), True), state_of(model)


def calls_of_the_first_batch(disk: Path) -> int:
    model, optimizer, session = begun(disk)
    session.homes._engine = engine = Failing(session.engine, 0, 0)
    steps(inputs(1))(model, optimizer, False)
    protrain.unwrap(model)
    return engine.calls


def test_a_fault_while_homes_move_behind_the_first_step(fresh_disk: Path) -> None:
    """As they do where that left room for what nobody foresaw: the step is made, and its plan goes on."""
    count = calls_of_the_first_batch(fresh_disk)
    losses, state = plain(3)
    for first in (3 * count // 4, count):
        model, optimizer, session = begun(fresh_disk)
        session.homes._engine = Failing(session.engine, first, 1)
        with pytest.warns(UserWarning, match="a better plan could not be carried out, the one in use stays: .*read failed"):
            assert steps(inputs(3))(model, optimizer, False) == losses
        assert state_of(model) == state
        protrain.unwrap(model)


def test_a_fault_while_homes_move(fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At calls that move a chunk: told, nothing has changed, and the same step made again is plain torch's."""
    rigid(monkeypatch)
    count = calls_of_the_first_batch(fresh_disk)
    assert count > 3
    losses, state = plain(2)
    for first in (1, 2, count // 2, count):
        model, optimizer, session = begun(fresh_disk)
        before = state_of(model)
        session.homes._engine = Failing(session.engine, first, 1)
        with pytest.raises(protrain.DiskError, match="read failed"):
            steps(inputs(1))(model, optimizer, False)
        assert state_of(model) == before
        assert model.head.bias.sum().item() == Chain().head.bias.sum().item()  # used without a step
        optimizer.zero_grad()
        assert steps(inputs(2))(model, optimizer, False) == losses
        assert state_of(model) == state
        protrain.unwrap(model)


@pytest.mark.parametrize("then", ["train", "evaluate", "look", "unwrap"])
def test_a_disk_that_is_gone_for_longer(then: str, fresh_disk: Path) -> None:
    """Moving back fails too. Values can be read all the time; whatever comes first when the disk is well moves homes back."""
    losses, state = plain(2)
    model, optimizer, session = begun(fresh_disk)
    before = state_of(model)
    session.homes._engine = Failing(session.engine, 2, 1 << 30)
    for _ in range(2):
        with pytest.raises(protrain.DiskError, match="read failed"):
            steps(inputs(1))(model, optimizer, False)
        optimizer.zero_grad()
        assert state_of(model) == before
        for p in (model.head.bias, model.blocks[0].up.weight):  # one that was in memory, one that was not
            with pytest.raises(protrain.DiskError, match="read failed"):
                p.sum()
    with pytest.raises(protrain.DiskError, match="read failed"):
        protrain.unwrap(model)
    session.homes._engine = session.engine
    if then == "train":
        assert steps(inputs(2))(model, optimizer, False) == losses
        assert state_of(model) == state
    elif then == "evaluate":
        with torch.no_grad():
            assert model(inputs(1)[0]).item() == losses[0]
    elif then == "look":
        same = Chain()
        assert all(torch.equal(p * 1, q) for p, q in zip(model.parameters(), same.parameters(), strict=True))
    protrain.unwrap(model)
    assert state_of(model) == (state if then == "train" else before)


def test_what_is_carried_out_later_is_the_arrangement_that_was_in_use(fresh_disk: Path) -> None:
    """Not the other one, whose last part was refused: its chunks had moved, and could not move back."""
    losses, state = plain(2)
    model, optimizer, session = begun(fresh_disk)
    before, engine = session.homes.arrangement, Failing(session.engine, 1 << 30, 1 << 30)

    def refuse(*_: Any) -> None:
        engine._first, engine._last = 0, 1 << 30
        raise protrain.BudgetError("no memory for slots", needed_bytes=2, budget_bytes=1, smallest_bytes=2)

    engine.set_order = refuse
    session.homes._engine = engine
    with pytest.raises(protrain.BudgetError, match="no memory for slots"):
        steps(inputs(1))(model, optimizer, False)
    assert session.homes.arrangement is before
    session.homes._engine = session.engine
    optimizer.zero_grad()
    with torch.no_grad():
        assert model(inputs(1)[0]).item() == losses[0]
    assert steps(inputs(2))(model, optimizer, False) == losses
    assert state_of(model) == state
    protrain.unwrap(model)


def test_a_fault_after_a_step_was_made(fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning anew is not the step's business: it is made, counts, and the plan in use stays, which is said."""
    losses, state = plain(3)
    model, optimizer, session = begun(fresh_disk)
    found = steps(inputs(1))(model, optimizer, False)

    def fail(_arrangement: Any) -> None:
        raise protrain.DiskError("/disk: write failed", errno=28, filename="/disk", asked_bytes=4096)

    monkeypatch.setattr(session.homes, "rearrange", fail)
    with pytest.warns(UserWarning, match="a better plan could not be carried out, the one in use stays: /disk: write failed"):
        found += steps(inputs(2)[1:])(model, optimizer, False)
    monkeypatch.undo()
    assert protrain.status(model).steps == 2
    found += steps(inputs(3)[2:])(model, optimizer, False)
    assert (found, state_of(model)) == (losses, state)
    protrain.unwrap(model)
