"""Values: each parameter's, its optimizer state's and its master's, read and written wherever they lie.

Arrays of a parameter are numbered: 0 is the parameter, from 1 on its state, and the last its master in bf16 (precision.py). All
lie as the parameter does (strides.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import _core
from ..base.counting import uncounted
from ..errors import PlanError
from ..model.parameters import DisableTorchFunction
from ..model.precision import master, write_master
from ..model.strides import laid
from ..runtime import changes
from ..runtime.loads import PARAMETERS, STATE
from ..runtime.residency import Residency
from ..runtime.wrapped import Wrapped


class Values:
    """Of one session. masters_given: masters that came with the optimizer's state, since the last step; strides_changed: those of
    a parameter, since the last forward; loads: those that put values here and did not end. turn: the session's, without which
    homes may be moving."""

    def __init__(self, wrapped: Wrapped, engine: _core.Engine, residency: Residency, turn: AbstractContextManager[Any]) -> None:
        self.wrapped, self.engine, self.residency, self.turn = wrapped, engine, residency, turn
        self.masters_given: set[int] = set()
        self.strides_changed = False
        self.loads = residency.loads

    def get(self, number: int, array: int = 0) -> torch.Tensor:
        """An owned copy of a parameter, or of another of its arrays, in ordinary memory and no budget."""
        with self.turn:
            return self._get(number, array)

    def _get(self, number: int, array: int) -> torch.Tensor:
        entry = self.wrapped.layout.entries[number]
        if array == 0:
            changes.adopt(self, number)
        elif array == self.wrapped.master_array:
            return master(self, number)
        with uncounted(), DisableTorchFunction():
            compute, dtype = self.wrapped.compute, torch.float32 if array else self.wrapped.layout.dtype
            tensor = compute.empty_on_host(entry.shape, dtype, entry.strides)
            if entry.count:
                self.engine.transfer(number, array, compute.on_host(tensor), False)
        return tensor

    def put(self, number: int, value: torch.Tensor, array: int = 0) -> None:
        """Set a parameter, its master with it where it has one, or one of its arrays alone."""
        self.write(number, value, array)
        if array == 0:
            with uncounted(), DisableTorchFunction():
                write_master(self, number, value)

    def write(self, number: int, value: torch.Tensor, array: int = 0) -> None:
        """Set a parameter as who writes to it does, or one of its arrays: a master goes on where its numbers round to these.

        Raises:
            PlanError: the value is of another shape.
        """
        entry = self.wrapped.layout.entries[number]
        if value.shape != entry.shape:
            raise PlanError(f"parameter {entry.name} is of shape {tuple(entry.shape)}, it was given {tuple(value.shape)}")
        with self.turn, uncounted(), DisableTorchFunction():
            dtype = torch.float32 if array else self.wrapped.layout.dtype
            compute = self.wrapped.compute
            tensor = compute.to_host(laid(value.detach().resolve_neg().to(dtype=dtype), entry.strides))
            if tensor.numel():
                with self.loads.whole(entry.name, STATE if array else PARAMETERS):
                    self.engine.transfer(number, array, compute.on_host(tensor), True)
            if array == 0:
                self.residency.note_changed([number])
