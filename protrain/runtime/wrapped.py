"""What was wrapped: a model's parameters and blocks, its optimizer's groups, and what `wrap` was asked for.

The parts of a session share it and change nothing in it but `settings`, between two steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import _core
from ..device.compute import Compute
from ..model.compiled import find_compiled
from ..model.fused import find_fused, find_recurrent
from ..model.layout import Layout, first_blocks
from ..model.placing import Places
from ..model.precision import loose_grads_bytes, state_arrays, widened_bytes
from ..optim.foreign import Foreign
from ..optim.optimizers import Hyper, hyper_of
from ..planner.plans import Plan


@dataclass(frozen=True)
class Settings:
    """What `wrap` was asked for, checked."""

    memory_bytes: int
    host_bytes: int  # of ordinary memory beside a device; not used without one
    disk: str
    accumulate: int
    max_grad_norm: float | None
    plan: Plan | None
    block_modes: list[str] | None


class Wrapped:
    """See the module's head. Parameters are numbered as in the layout; kind is the optimizer's class, groups are its own.

    n_states: arrays of optimizer state that the kernels keep beside each parameter; state_arrays: these and the master, counted
    in arrays of parameters; master_array: the number of the master among a parameter's arrays, 0 where there is none; compute:
    what computes; places: where the model's tensors go back to; buffer_bytes: what the model's buffers take of the budget, where
    the CPU computes, although nobody here has allocated them; frozen: those parameters of the optimizer that it does not train;
    given_dtypes: of the parameters as they came.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        params: list[nn.Parameter],
        blocks: list[tuple[str, nn.Module]],
        kind: type[torch.optim.Optimizer],
        groups: list[dict[str, Any]],
        settings: Settings,
        compute: Compute,
        foreign: Foreign | None = None,
        n_states: int = 0,
    ) -> None:
        self.model, self.layout, self.params, self.blocks = model, layout, params, blocks
        self.kind, self.groups, self.settings, self.foreign = kind, groups, settings, foreign
        self.compute = compute
        self.places = Places(model, params)
        buffers = [b for b in model.buffers() if b.layout == torch.strided and b.numel()]
        self.buffer_bytes = 0 if compute.separate else sum(_core.rounded_bytes(b.numel() * b.element_size()) for b in buffers)
        self.footprint = foreign.footprint if foreign else None
        self.number_of = {id(p): number for number, p in enumerate(params)}
        self.grouped = [[id(p) for p in group["params"]] for group in groups]
        owned = [self.number_of[id(p)] for group in groups for p in group["params"]]
        self.frozen = [number for number in owned if layout.entries[number].group < 0]
        self.element_bytes = layout.dtype.itemsize
        self.given_dtypes = [p.dtype for p in params]
        self.n_states = n_states
        self.state_arrays = state_arrays(self.n_states, layout.dtype)
        self.master_array = 1 + self.n_states if layout.dtype == torch.bfloat16 else 0

    def with_memory(self, budget_bytes: int) -> Wrapped:
        """The same in another budget, with the chunks of this one."""
        other = copy.copy(self)
        other.settings = replace(self.settings, memory_bytes=budget_bytes)
        return other

    def within(self, budget_bytes: int) -> Wrapped:
        """The same, to plan with, as `wrap` would have it in another budget; with other chunks, where no plan says them."""
        other = self.with_memory(budget_bytes)
        if self.settings.plan is None:
            other.layout = self.layout.within(budget_bytes, first_blocks(self.params, [block for _, block in self.blocks]))
        return other

    def numbers_in(self, module: nn.Module) -> list[int]:
        """Of a module's parameters."""
        return [self.number_of[id(p)] for p in module.parameters()]

    def own_numbers(self, module: nn.Module) -> dict[str, int]:
        """A module's own parameters by their names in it, as they are now: they may have been tied, or have changed places, since
        wrap. Those that came after it, which no step takes, have no number."""
        number_of, own = self.number_of, module._parameters
        return {leaf: number_of[id(p)] for leaf, p in own.items() if p is not None and id(p) in number_of}

    @property
    def n_together(self) -> int:
        """The most chunks that a module reads at once: one that is compiled, or recurrent."""
        return self._most_chunks([*(module for _, module in find_compiled(self.model)), *find_recurrent(self.model)])

    @property
    def beside_fused_bytes(self) -> int:
        """Of slots: what one of torch's own layers takes beside one chunk, where it runs as one operation."""
        return (self._most_chunks(find_fused(self.model)) - 1) * self.layout.chunk_bytes

    def _most_chunks(self, modules: Sequence[nn.Module]) -> int:
        """That one of them has parameters in; at least one."""
        entries = self.layout.entries
        return max((len({entries[number].chunk for number in self.numbers_in(module)}) for module in modules), default=1)

    def hypers(self) -> list[Hyper]:
        """The groups' values of this moment as the kernels take them; none where no kernel does.

        Beside a device, whose kernels round otherwise than the CPU's, updates on the CPU are fused, which is faster."""
        hypers = [] if self.foreign else [hyper_of(self.kind, group) for group in self.groups]
        return [hyper._replace(fused=True) for hyper in hypers] if self.compute.separate else hypers

    @property
    def fused(self) -> bool:
        """Whether all updates round as torch's fused kernels do."""
        return all(hyper.fused for hyper in self.hypers())

    @property
    def grads_outlive_backward(self) -> bool:
        """Whether those of the last pass wait for `step()` too, whatever the loop does."""
        return self.settings.max_grad_norm is not None or self.foreign is not None

    @property
    def widened_bytes(self) -> int:
        return widened_bytes(self.layout, self.settings.max_grad_norm)

    @property
    def loose_grads_bytes(self) -> int:
        return loose_grads_bytes(self.layout, self.params)

    def make_engine(self) -> _core.Engine:
        """An engine of these parameters; nothing of it has a home yet.

        Raises:
            DiskError: its file cannot be made.
            DeviceError: the device cannot be used.
        """
        layout, settings = self.layout, self.settings
        options = self.compute.engine_options(settings.memory_bytes, settings.host_bytes)
        return _core.Engine(
            settings.disk,
            chunks=[(size, trained) for size, trained in zip(layout.sizes, layout.trained, strict=True)],
            params=[(e.chunk, e.offset_bytes, e.count, e.group >= 0, max(e.group, 0)) for e in layout.entries],
            n_groups=len(self.groups),
            n_states=self.n_states,
            bf16=self.master_array > 0,
            **options,
        )
