"""Which memory counts against a budget.

A session's training steps count, from the first forward of a step to the end of its `optimizer.step()`, forwards outside of
training, and what wrapping allocates. What is made between two steps, another model or a batch, is the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import _core

if TYPE_CHECKING:
    from ..device.compute import Compute


@contextmanager
def counted(engine: _core.Engine, compute: Compute) -> Iterator[_core.Engine]:
    """Tensors made inside count against the budget of this engine's session."""
    apart, before, again = _core.set_apart(False), _core.swap_account(None), compute.counts()
    compute.count(engine, True)
    try:
        yield engine
    finally:
        if not again:
            compute.count(engine, False)
        _core.swap_account(before)
        _core.set_apart(apart)


@contextmanager
def counted_alone(folder: str, budget_bytes: int) -> Iterator[_core.Engine]:
    """Tensors made inside count against a budget of their own, in no session."""
    engine = _core.Engine(folder, budget_bytes, [], [], 1, 0)
    apart, before = _core.set_apart(False), _core.swap_account(None)
    try:
        engine.use_account(True)
        yield engine
    finally:
        _core.swap_account(before)
        _core.set_apart(apart)
        engine.close()


@contextmanager
def uncounted() -> Iterator[None]:
    """Tensors that this thread makes inside belong to no budget: copies that a user asked for, beside the training, which may go
    on meanwhile in another thread."""
    apart = _core.set_apart(True)
    try:
        yield
    finally:
        _core.set_apart(apart)
