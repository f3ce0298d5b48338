"""Updates of parameters at home on a device, in step(), by torch's own fused kernels there.

The engine's kernels are the CPU's. Persistent chunks of a device are updated by what `fused=True` runs on it, so where all
chunks are persistent a step is that of plain torch on the device. On a GPU these kernels round differently from the CPU's:
what a parameter's update gives then depends on where its chunk is at home.

What a step changes is changed in one call of C, the engine's commit with it. Everything is prepared before, as a list of calls of
torch's functions on tensors that are there already; preparing may end anywhere and begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunction

from .. import _core
from ..base.sizes import KIB, MIB
from ..optim.optimizers import ADAMW, SGD, Hyper, n_states_of
from ..profiling.device_clock import DeviceClock
from .residency import Residency
from .wrapped import Wrapped

#: Elements of bf16 that are widened, and looked at, at once, at least and at most: as many as a thousandth of the budget's bytes,
#: of which they so take a hundredth.
LEAST_SLICE_COUNT, MOST_SLICE_COUNT = 64 * KIB, 32 * MIB

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Part(NamedTuple):
    """What an update of a parameter, or of a slice of one, reads and writes beside its gradient; all flat.

    inside: of the parameter; target: what is updated in fp32: the values, or their master.
    """

    inside: slice
    values: torch.Tensor
    target: torch.Tensor
    states: list[torch.Tensor]


@dataclass(eq=False)
class _Resident:
    """A chunk at home on the device, as tensors that are there as long as it is: making some for each parameter in each step
    costs more of the thread that orders than all else of an update.

    masters: None where values are fp32; parts: of each parameter whose update was seen.
    """

    addresses: list[int]
    values: torch.Tensor
    masters: torch.Tensor | None
    states: list[torch.Tensor]
    parts: dict[int, list[Part]] = field(default_factory=dict)


class DeviceUpdates:
    """Of one session's parameters."""

    def __init__(self, wrapped: Wrapped, engine: _core.Engine, residency: Residency, clock: DeviceClock) -> None:
        self._wrapped, self._engine, self._residency, self._clock = wrapped, engine, residency, clock
        self._residents: dict[int, _Resident] = residency.over_homes  # they hold the memory of their chunks
        self._slice_count = min(max(wrapped.settings.memory_bytes // 1024, LEAST_SLICE_COUNT), MOST_SLICE_COUNT)

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
        self._come_to(dict.fromkeys(entries[number].chunk for number, _ in in_memory))
        if self._wrapped.master_array:
            self._take_written([number for number, _ in in_memory])
        total = sum(entries[number].count for number, _ in in_memory) if self._wrapped.master_array else 0
        wide = torch.empty(min(total, self._slice_count), dtype=torch.float32, device=device)
        alike: dict[tuple[Hyper, int], list[tuple[int, torch.Tensor]]] = {}
        for number, grad in in_memory:
            key = hypers[entries[number].group], self._engine.steps(number) + 1
            alike.setdefault(key, []).append((number, _row(grad)))
        calls: list[Call] = []
        for (hyper, step), gradients in alike.items():
            count = torch.full((), float(step), dtype=torch.float32, device=device)  # as the kernels take it
            parts, grads = [], []
            for number, grad in gradients:
                found = self._parts(number)
                parts += found
                grads += [grad] if len(found) == 1 else [grad[part.inside] for part in found]
            if self._wrapped.master_array:
                calls += _wide_updates(parts, grads, wide, hyper, scale, step, count)
            else:
                calls += [*_scaled(grads, scale), _kernel(hyper, parts, grads, step, count)]
        return calls

    def _come_to(self, chunks: Iterable[int]) -> None:
        """These chunks are at home on the device, their state too, and known by the tensors over where they lie now."""
        master_array, n_states = self._wrapped.master_array, self._wrapped.n_states
        arrays = [*range(1, 1 + n_states), *([master_array] if master_array else [])]
        known = self._residents.copy()
        self._residents.clear()
        for chunk in chunks:
            self._engine.to_memory(chunk, True)
            values = self._residency.base(chunk)
            found = [state for array in arrays if (state := self._engine.state(chunk, array)) is not None]
            assert len(found) == len(arrays)
            addresses = [tensor.data_ptr() for tensor in (values, *found)]
            before = known.get(chunk)
            if before is None or before.addresses != addresses:
                masters = found[-1] if master_array else None
                before = _Resident(addresses, values, masters, found[:n_states])
            self._residents[chunk] = before

    def _parts(self, number: int) -> list[Part]:
        """What one parameter's update reads and writes; of bf16 in slices."""
        entry = self._wrapped.layout.entries[number]
        resident = self._residents[entry.chunk]
        found = resident.parts.get(number)
        if found is not None:
            return found
        begin, count = self._first(number), entry.count
        most = self._slice_count if resident.masters is not None else count
        made: list[Part] = []
        for first in range(0, count, most):
            last = min(first + most, count)
            here = slice(begin + first, begin + last)
            values = resident.values[here]
            target = values if resident.masters is None else resident.masters[here]
            made.append(Part(slice(first, last), values, target, [state[here] for state in resident.states]))
        resident.parts[number] = made
        return made

    def _first(self, number: int) -> int:
        """The place of a parameter's first element in its chunk."""
        return self._wrapped.layout.entries[number].offset_bytes // self._wrapped.element_bytes

    def _take_written(self, numbers: list[int]) -> None:
        """Elements of bf16 that are not their master, rounded, were written from outside: they are their master (precision.py).
        Parameters that lie side by side are looked at together."""
        layout = self._wrapped.layout
        updated = set(numbers)
        for chunk, resident in self._residents.items():
            assert resident.masters is not None
            first, last = 0, 0
            for number in [*layout.members[chunk], -1]:
                if number in updated:
                    first = self._first(number) if first == last else first
                    last = self._first(number) + layout.entries[number].count
                    continue
                for begin in range(first, last, self._slice_count):
                    here = slice(begin, min(begin + self._slice_count, last))
                    _take_written(resident.values[here], resident.masters[here])
                first = last


def _wide_updates(
    parts: list[Part], grads: list[torch.Tensor], wide: torch.Tensor, hyper: Hyper, scale: float, step: int, count: torch.Tensor
) -> list[Call]:
    """Updates of masters by gradients of bf16, as many at once as find room in `wide`, where gradients are fp32."""
    calls: list[Call] = []
    at = 0
    while at < len(parts):
        begin, sizes = at, [grads[at].numel()]
        used, at = sizes[0], at + 1
        while at < len(parts) and used + grads[at].numel() <= wide.numel():
            sizes.append(grads[at].numel())
            used, at = used + sizes[-1], at + 1
        batch, widened = parts[begin:at], list(wide[:used].split_with_sizes(sizes))
        calls += [
            (torch._foreach_copy_, (widened, grads[begin:at]), {}),
            *_scaled([wide[:used]], scale),
            _kernel(hyper, batch, widened, step, count),
            (torch._foreach_copy_, ([part.values for part in batch], [part.target for part in batch]), {}),
        ]
    return calls


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a dense tensor in the order in which they lie."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _take_written(values: torch.Tensor, masters: torch.Tensor) -> None:
    """Of NaNs that differ in bits that nobody reads, the one that is there is taken."""
    rounded = masters.bfloat16()
    torch.where(rounded.view(torch.int16) == values.view(torch.int16), masters, values.float(), out=masters)


def _scaled(grads: list[torch.Tensor], scale: float) -> list[Call]:
    return [(torch._foreach_mul_, (grads, scale), {})] if scale != 1.0 else []


def _kernel(hyper: Hyper, parts: list[Part], grads: list[torch.Tensor], step: int, count: torch.Tensor) -> Call:
    """One update in fp32, by the kernel that `fused=True` runs. step, count: of this step, as a number and as a tensor."""
    targets = [part.target for part in parts]
    states = [[part.states[i] for part in parts] for i in range(n_states_of(hyper))]
    names = ["lr", "weight_decay", "maximize"]
    if hyper.kind == SGD:
        options = {name: getattr(hyper, name) for name in (*names, "momentum", "dampening", "nesterov")}
        return torch._fused_sgd_, (targets, grads, states[0] if states else []), options | {"is_first_step": step == 1}
    run = torch._fused_adamw_ if hyper.kind == ADAMW else torch._fused_adam_
    options = {name: getattr(hyper, name) for name in (*names, "beta1", "beta2", "eps", "amsgrad")}
    return run, (targets, grads, states[0], states[1], states[2] if hyper.amsgrad else [], [count] * len(parts)), options
