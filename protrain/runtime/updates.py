"""Updates: when parameters are updated, and with which values of the optimizer's groups.

Behind backward, as gradients come, where that is allowed: where no norm of all gradients is to be known first, and where the loop
does not set learning rates between backward and step(). Else in step(). Chunks in memory are updated in step() in any case.
"""

from __future__ import annotations

import time

import torch

from .. import _core
from ..errors import StepError
from ..optim.optimizers import Hyper
from ..profiling.device_clock import DeviceClock
from .changes import check_groups
from .device_updates import DeviceUpdates
from .residency import Residency
from .wrapped import Wrapped

#: The first steps update in step(), to see whether this loop sets learning rates between backward and step. A loop that does
#: shows it in its first two steps, since a schedule changes rates from one step to the next.
PROBED_STEPS = 2


class Updates:
    """Of one session, by the engine's kernels. seconds, bytes: of what the last step updated in memory."""

    def __init__(
        self, wrapped: Wrapped, engine: _core.Engine, residency: Residency, device_clock: DeviceClock | None = None
    ) -> None:
        self._wrapped, self._engine = wrapped, engine
        self._on_device = DeviceUpdates(wrapped, engine, residency, device_clock) if device_clock is not None else None
        self._hypers = wrapped.hypers()
        self._late: bool | None = True if wrapped.foreign else None  # updates wait for step(); None: not known yet
        self._probed = 0  # steps that showed it, or not
        self.seconds, self.bytes = 0.0, 0

    @property
    def behind_backward(self) -> bool:
        """Whether the step's last gradients are used as they come."""
        return self._late is False and self._wrapped.settings.max_grad_norm is None

    def begin(self) -> None:
        """The step's last backward pass begins: updates behind it are made with the groups' values of now."""
        check_groups(self._wrapped)
        self._take(self._wrapped.hypers())

    def _take(self, hypers: list[Hyper]) -> None:
        self._hypers = hypers
        for number, hyper in enumerate(hypers):
            self._engine.set_hyper(number, hyper)

    def make(self, in_memory: list[tuple[int, torch.Tensor]], scale: float, *, all_passes: bool, taken: bool) -> None:
        """Make the step, the engine's commit with it.

        Args:
            in_memory: parameters of chunks in memory, and their gradients.
            scale: multiplies all gradients.
            all_passes: the step had as many backward passes as it may have.
            taken: there are gradients of parameters on disk.

        Raises:
            StepError: a group was changed after updates behind backward had begun; this step is not made.
        """
        engine, entries = self._engine, self._wrapped.layout.entries
        hypers = self._wrapped.hypers()
        same = not all_passes or hypers == self._hypers  # fewer passes: no update began with the old ones
        if self.behind_backward and not same and taken:
            self._late = True
            raise StepError(
                "a parameter group was changed between backward() and step(), after updates had begun with the old values; this "
                "step was not made, the model is as it was before it; from now on updates wait for step()"
            )
        self._take(hypers)
        engine.update_spilled(scale)
        engine.wait()
        empty = [
            entry.index
            for entry in entries
            if entry.group >= 0 and not entry.count and self._wrapped.params[entry.index].grad is not None
        ]
        pairs = [(number, 0) for number in empty]  # of no elements: there is only a count
        began = time.perf_counter()
        # Either way the step is one call: an interrupt comes before it or after it.
        if self._on_device is not None:
            self._on_device.make_step(pairs, in_memory, hypers, scale)
        else:
            engine.make_step(pairs + [(number, grad.data_ptr()) for number, grad in in_memory], scale)
        self.seconds = time.perf_counter() - began
        updated = sum(entries[number].count for number, _ in in_memory)
        self.bytes = self._wrapped.element_bytes * (1 + self._wrapped.state_arrays) * updated
        self._probed += 1
        if self._late is None and (not same or self._probed >= PROBED_STEPS):
            self._late = not same
