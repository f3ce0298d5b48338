"""Updates of parameters at home on a device, in step(), by torch's own fused kernels there.

The engine's kernels are the CPU's. Persistent chunks of a device are updated by what `fused=True` runs on it, so where all
chunks are persistent a step is that of plain torch on the device. On a GPU these kernels round differently from the CPU's:
what a parameter's update gives then depends on where its chunk is at home.
"""

from __future__ import annotations

import torch

from . import _core
from .optimizers import ADAMW, SGD, Hyper, n_states_of
from .parameters import DisableTorchFunction
from .residency import Residency
from .sizes import MIB
from .wrapped import Wrapped

SLICE_COUNT = 4 * MIB  # elements of bf16 that are widened at once


class DeviceUpdates:
    """Of one session's parameters."""

    def __init__(self, wrapped: Wrapped, engine: _core.Engine, residency: Residency) -> None:
        self._wrapped, self._engine, self._residency = wrapped, engine, residency

    def make(self, in_memory: list[tuple[int, torch.Tensor]], hypers: list[Hyper], scale: float) -> None:
        """Update these parameters by their gradients, which are multiplied by `scale`."""
        with torch.no_grad(), DisableTorchFunction():
            for number, grad in in_memory:
                self._update(number, grad, hypers[self._wrapped.layout.entries[number].group], scale)

    def _array(self, number: int, array: int) -> torch.Tensor:
        """One of a parameter's fp32 arrays, flat."""
        entry = self._wrapped.layout.entries[number]
        found = self._engine.state(entry.chunk, array)
        assert found is not None
        first = entry.offset_bytes // self._wrapped.element_bytes
        return found[first : first + entry.count]

    def _update(self, number: int, grad: torch.Tensor, hyper: Hyper, scale: float) -> None:
        wrapped, engine = self._wrapped, self._engine
        engine.to_memory(wrapped.layout.entries[number].chunk, True)  # its state is there from here on
        step = engine.steps(number) + 1
        values, flat = _row(self._residency.place(number)), _row(grad)
        states = [self._array(number, 1 + i) for i in range(n_states_of(hyper))]
        if not wrapped.master_array:
            _run(hyper, values, flat.mul_(scale) if scale != 1.0 else flat, states, step)
        else:
            master = self._array(number, wrapped.master_array)
            for first in range(0, values.numel(), SLICE_COUNT):
                part = slice(first, first + SLICE_COUNT)
                _take_written(values[part], master[part])
                wide = flat[part].float()
                _run(hyper, master[part], wide.mul_(scale) if scale != 1.0 else wide, [state[part] for state in states], step)
                values[part].copy_(master[part])
        engine.set_steps(number, step)


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a dense tensor in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _take_written(values: torch.Tensor, master: torch.Tensor) -> None:
    """Elements that are not their master, rounded, were written from outside: they are their master (precision.py)."""
    rounded = master.bfloat16()
    written = (rounded.view(torch.int16) != values.view(torch.int16)) & ~(rounded.isnan() & values.isnan())
    master.copy_(torch.where(written, values.float(), master))


def _run(hyper: Hyper, values: torch.Tensor, grad: torch.Tensor, states: list[torch.Tensor], step: int) -> None:
    """One update in fp32, by the kernel that `fused=True` runs."""
    code, lr, decay, maximize, beta1, beta2, eps, amsgrad, momentum, dampening, nesterov = hyper
    if code == SGD:
        torch._fused_sgd_(
            [values], [grad], [states[0]] if states else [], weight_decay=decay, momentum=momentum, lr=lr, dampening=dampening,
            nesterov=nesterov, maximize=maximize, is_first_step=step == 1,
        )  # fmt: skip
        return
    run = torch._fused_adamw_ if code == ADAMW else torch._fused_adam_
    steps = torch.full((), float(step), dtype=torch.float32, device=values.device)
    run(
        [values], [grad], [states[0]], [states[1]], [states[2]] if amsgrad else [], [steps], lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=decay, eps=eps, amsgrad=amsgrad, maximize=maximize,
    )  # fmt: skip
