"""How often a program is refused that does what no plan foresaw; and what spares it that, to be left out to measure it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import protrain
from protrain.runtime.fitting import Fitter
from protrain.runtime.homes import Homes

#: As unittest.mock.patch.object and pytest's monkeypatch.setattr take them: the first step leaves no room; state stays in memory;
#: so does what forwards save that nobody foresaw.
NO_FIRST_ROOM: tuple[type, str, Any] = (Fitter, "_with_first_room", lambda _self, _run, best: best)
NO_YIELDING: tuple[type, str, Any] = (Homes, "yield_states", lambda _self: None)
NO_SWAPPING: tuple[type, str, Any] = (Fitter, "must_swap", lambda _self: False)


def until_made(
    model: Any, optimizer: Any, loss_of: Callable[[Any, int], torch.Tensor], count: int, most_refused: int
) -> tuple[list[float], int]:
    """So many steps, each made again until it is not refused, or until so many were; the losses, and how many were refused."""
    losses: list[float] = []
    refused = 0
    while len(losses) < count and refused < most_refused:
        try:
            loss = loss_of(model, len(losses))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        except protrain.BudgetError:
            refused += 1
        loss = None  # type: ignore[assignment]
        optimizer.zero_grad()
    return losses, refused
