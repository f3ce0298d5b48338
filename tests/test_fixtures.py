"""What every test shares holds: a test that fails, and leaves its model wrapped in the middle of a step, is one failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import close_sessions, open_sessions
from nets import TIGHT, Chain, inputs
from twins import adamw

import protrain


def half_a_step(disk: Path) -> tuple[Any, Any]:
    """What a test holds that failed: the wrapped model, and its loss and its optimizer."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=disk)
    return model, (model(inputs(1)[0]), optimizer)


def test_what_is_left_wrapped_is_closed(fresh_disk: Path) -> None:
    model, rest = half_a_step(fresh_disk)
    with pytest.raises(protrain.BudgetError):
        torch.empty(2 * TIGHT, dtype=torch.uint8)
    close_sessions(open_sessions())
    torch.empty(2 * TIGHT, dtype=torch.uint8)
    again, _ = half_a_step(fresh_disk)
    assert open_sessions() == {protrain.session_of(again)}
    del model, rest
    protrain.unwrap(again)


def test_also_where_its_disk_still_fails(fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = half_a_step(fresh_disk)
    (session,) = open_sessions()

    def fail() -> None:
        raise protrain.DiskError("the disk is gone")

    monkeypatch.setattr(session.homes, "settle", fail)
    close_sessions({session})
    assert not open_sessions()
    torch.empty(2 * TIGHT, dtype=torch.uint8)
    del model
