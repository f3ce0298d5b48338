"""Updates of parameters at home on a device, in step(), by torch's own fused kernels there.

The engine's kernels are the CPU's. Persistent chunks of a device are updated by what `fused=True` runs on it, so where all
chunks are persistent a step is that of plain torch on the device. On a GPU these kernels round differently from the CPU's:
what a parameter's update gives then depends on where its chunk is at home.

What a step changes is changed in one call of C, the engine's commit with it. Everything is prepared before, as a list of calls of
torch's functions on tensors that are there already; preparing may end anywhere and begin anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunction

from .. import _core
from ..base.sizes import MIB
from ..optim.optimizers import ADAMW, SGD, Hyper, n_states_of
from ..profiling.device_clock import DeviceClock
from .residency import Residency
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
        """Parameters with the same hyperparameters and count of steps are updated together, as `fused=True` updates a group's."""
        entries, device = self._wrapped.layout.entries, self._wrapped.compute.device
        largest = max((entries[number].count for number, _ in in_memory), default=0) if self._wrapped.master_array else 0
        wide = torch.empty(min(largest, SLICE_COUNT), dtype=torch.float32, device=device)
        alike: dict[tuple[Hyper, int], list[tuple[int, torch.Tensor]]] = {}
        for number, grad in in_memory:
            self._engine.to_memory(entries[number].chunk, True)  # its state is there from here on
            key = hypers[entries[number].group], self._engine.steps(number) + 1
            alike.setdefault(key, []).append((number, _row(grad)))
        calls: list[Call] = []
        for (hyper, step), gradients in alike.items():
            count = torch.full((), float(step), dtype=torch.float32, device=device)  # as the kernels take it
            parts = [part for number, grad in gradients for part in self._parts(number, grad, hyper)]
            if self._wrapped.master_array:
                calls += _wide_updates(parts, wide, hyper, scale, step, count)
            else:
                calls += [*_scaled([part.grad for part in parts], scale), _kernel(hyper, parts, step, count)]
        return calls

    def _array(self, number: int, array: int) -> torch.Tensor:
        """One of a parameter's fp32 arrays, flat."""
        entry = self._wrapped.layout.entries[number]
        found = self._engine.state(entry.chunk, array)
        assert found is not None
        first = entry.offset_bytes // self._wrapped.element_bytes
        return found[first : first + entry.count]

    def _parts(self, number: int, grad: torch.Tensor, hyper: Hyper) -> list[Part]:
        """What one parameter's update reads and writes; of bf16 in slices."""
        values = _row(self._residency.place(number))
        states = [self._array(number, 1 + i) for i in range(n_states_of(hyper))]
        if not self._wrapped.master_array:
            return [Part(values, values, grad, states)]
        master = self._array(number, self._wrapped.master_array)
        parts = []
        for first in range(0, values.numel(), SLICE_COUNT):
            inside = slice(first, first + SLICE_COUNT)
            _take_written(values[inside], master[inside])
            parts.append(Part(values[inside], master[inside], grad[inside], [state[inside] for state in states]))
        return parts


class Part(NamedTuple):
    """A parameter, or a slice of one, for an update; all flat. target: what is updated in fp32: the values, or their master."""

    values: torch.Tensor
    target: torch.Tensor
    grad: torch.Tensor
    states: list[torch.Tensor]


def _wide_updates(
    parts: list[Part], wide: torch.Tensor, hyper: Hyper, scale: float, step: int, count: torch.Tensor
) -> list[Call]:
    """Updates of masters by gradients of bf16, as many at once as find room in `wide`, where gradients are fp32."""
    calls: list[Call] = []
    at = 0
    while at < len(parts):
        batch: list[Part] = []
        used = 0
        while at < len(parts) and used + parts[at].grad.numel() <= wide.numel():
            part, used, at = parts[at], used + parts[at].grad.numel(), at + 1
            batch.append(part._replace(grad=wide[used - part.grad.numel() : used]))
        grads = [part.grad for part in parts[at - len(batch) : at]]
        calls += [
            (torch._foreach_copy_, ([part.grad for part in batch], grads), {}),
            *_scaled([wide[:used]], scale),
            _kernel(hyper, batch, step, count),
            (torch._foreach_copy_, ([part.values for part in batch], [part.target for part in batch]), {}),
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


def _scaled(grads: list[torch.Tensor], scale: float) -> list[Call]:
    return [(torch._foreach_mul_, (grads, scale), {})] if scale != 1.0 else []


def _kernel(hyper: Hyper, parts: list[Part], step: int, count: torch.Tensor) -> Call:
    """One update in fp32, by the kernel that `fused=True` runs. step, count: of this step, as a number and as a tensor."""
    targets, grads = [part.target for part in parts], [part.grad for part in parts]
    states = [[part.states[i] for part in parts] for i in range(n_states_of(hyper))]
    names = ["lr", "weight_decay", "maximize"]
    if hyper.kind == SGD:
        options = {name: getattr(hyper, name) for name in (*names, "momentum", "dampening", "nesterov")}
        return torch._fused_sgd_, (targets, grads, states[0] if states else []), options | {"is_first_step": step == 1}
    run = torch._fused_adamw_ if hyper.kind == ADAMW else torch._fused_adam_
    options = {name: getattr(hyper, name) for name in (*names, "beta1", "beta2", "eps", "amsgrad")}
    return run, (targets, grads, states[0], states[1], states[2] if hyper.amsgrad else [], [count] * len(parts)), options
