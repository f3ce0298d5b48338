"""Which memory counts against a budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import _core


@contextmanager
def uncounted() -> Iterator[None]:
    """Tensors made inside belong to no budget: copies that a user asked for, beside the training."""
    before = _core.swap_account(None)
    try:
        yield
    finally:
        _core.swap_account(before)
