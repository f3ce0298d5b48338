"""Updates of parameters at home on a device, in step(), by torch's own fused kernels there.

The engine's kernels are the CPU's. Persistent chunks of a device are updated by what `fused=True` runs on it, so where all
chunks are persistent a step is that of plain torch on the device. On a GPU these kernels round differently from the CPU's:
what a parameter's update gives then depends on where its chunk is at home.

What a step changes is changed in one call of C, the engine's commit with it. Everything is prepared before, as a list of calls of
torch's functions on tensors that are there already; preparing may end anywhere and begin anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunction, TensorBase

from . import _core
from .device_clock import DeviceClock
from .optimizers import ADAMW, SGD, Hyper, n_states_of
from .residency import Residency
from .sizes import MIB
from .wrapped import Wrapped

SLICE_COUNT = 4 * MIB  # elements of bf16 that are widened at once

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class DeviceUpdates:
    """Of one session's parameters."""

    def __init__(self, wrapped: Wrapped, engine: _core.Engine, residency: Residency, clock: DeviceClock) -> None:
        self._wrapped, self._engine, self._residency, self._clock = wrapped, engine, residency, clock

    def make_step(
        self, counted: list[tuple[int, int]], in_memory: list[tuple[int, torch.Tensor]], hypers: list[Hyper], scale: float
    ) -> None:
        """Make the engine's step, in which these parameters are updated by their gradients, multiplied by `scale`; of those
        counted there is only a count. Modes of torch's functions, such as a default device, see nothing of it."""
        with torch.no_grad(), DisableTorchFunction():
            calls = self._prepare(in_memory, hypers, scale)
            with self._clock.updating():
                self._engine.make_step(counted + [(number, 0) for number, _ in in_memory], scale, calls)

    def _prepare(self, in_memory: list[tuple[int, torch.Tensor]], hypers: list[Hyper], scale: float) -> list[Call]:
        entries, compute = self._wrapped.layout.entries, self._wrapped.compute
        largest = max((entries[number].count for number, _ in in_memory), default=0) if self._wrapped.master_array else 0
        wide = torch.empty(min(largest, SLICE_COUNT), dtype=torch.float32, device=compute.device)
        counts: dict[int, torch.Tensor] = {}  # steps, as the kernels take them
        calls: list[Call] = []
        for number, grad in in_memory:
            self._engine.to_memory(entries[number].chunk, True)  # its state is there from here on
            step = self._engine.steps(number) + 1
            if step not in counts:
                counts[step] = torch.full((), float(step), dtype=torch.float32, device=compute.device)
            calls += self._update(number, _row(grad), hypers[entries[number].group], scale, step, counts[step], wide)
        return calls

    def _array(self, number: int, array: int) -> torch.Tensor:
        """One of a parameter's fp32 arrays, flat."""
        entry = self._wrapped.layout.entries[number]
        found = self._engine.state(entry.chunk, array)
        assert found is not None
        first = entry.offset_bytes // self._wrapped.element_bytes
        return found[first : first + entry.count]

    def _update(
        self, number: int, grad: torch.Tensor, hyper: Hyper, scale: float, step: int, count: torch.Tensor, wide: torch.Tensor
    ) -> list[Call]:
        """The calls that make one parameter's update; wide: where gradients are fp32."""
        values = _row(self._residency.place(number))
        states = [self._array(number, 1 + i) for i in range(n_states_of(hyper))]
        if not self._wrapped.master_array:
            return [*_scaled(grad, scale), _kernel(hyper, values, grad, states, step, count)]
        master = self._array(number, self._wrapped.master_array)
        calls: list[Call] = []
        for first in range(0, values.numel(), SLICE_COUNT):
            part = slice(first, first + SLICE_COUNT)
            _take_written(values[part], master[part])
            widened = wide[: values[part].numel()]
            calls += [
                (TensorBase.copy_, (widened, grad[part]), {}),
                *_scaled(widened, scale),
                _kernel(hyper, master[part], widened, [state[part] for state in states], step, count),
                (TensorBase.copy_, (values[part], master[part]), {}),
            ]
        return calls


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a dense tensor in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _take_written(values: torch.Tensor, master: torch.Tensor) -> None:
    """Elements that are not their master, rounded, were written from outside: they are their master (precision.py)."""
    rounded = master.bfloat16()
    written = (rounded.view(torch.int16) != values.view(torch.int16)) & ~(rounded.isnan() & values.isnan())
    master.copy_(torch.where(written, values.float(), master))


def _scaled(grad: torch.Tensor, scale: float) -> list[Call]:
    return [(TensorBase.mul_, (grad, scale), {})] if scale != 1.0 else []


def _kernel(
    hyper: Hyper, values: torch.Tensor, grad: torch.Tensor, states: list[torch.Tensor], step: int, count: torch.Tensor
) -> Call:
    """One update in fp32, by the kernel that `fused=True` runs. step, count: of this step, as a number and as a tensor."""
    code, lr, decay, maximize, beta1, beta2, eps, amsgrad, momentum, dampening, nesterov = hyper
    if code == SGD:
        return torch._fused_sgd_, ([values], [grad], [states[0]] if states else []), {
            "weight_decay": decay, "momentum": momentum, "lr": lr, "dampening": dampening, "nesterov": nesterov,
            "maximize": maximize, "is_first_step": step == 1,
        }  # fmt: skip
    run = torch._fused_adamw_ if code == ADAMW else torch._fused_adam_
    return run, ([values], [grad], [states[0]], [states[1]], [states[2]] if amsgrad else [], [count]), {
        "lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": decay, "eps": eps, "amsgrad": amsgrad, "maximize": maximize,
    }  # fmt: skip
