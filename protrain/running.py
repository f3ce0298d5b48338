"""Running: each block of a forward in its mode, and each operation outside of blocks with the parameters it reads in place.

Both run inside saved-tensor hooks, so that what autograd saves of a parameter on disk is recognised and passed through. The
hooks of a block also see to its activations (activations.py); those of a single operation keep everything else as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _core
from .activations import (
    STASH_LEAST_BYTES,
    BlockHabits,
    Hooks,
    check_outer_hooks,
    leave,
    run_checkpointed,
    run_operation,
    run_swapped,
)
from .device_stash import DeviceStash, Stashed
from .errors import PlanError
from .parameters import DisableTorchFunction
from .residency import Residency
from .timeline import BlockClock
from .wrapped import Wrapped

#: What a block does where nothing may leave memory: outside of a training step's forward.
WITHOUT_STASH = {"keep": "keep", "swap": "checkpoint", "checkpoint": "checkpoint", "checkpoint_swap": "checkpoint"}


def _inside_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Runner:
    """Of one session's blocks and operations; called on the thread that drives the step.

    stashing: whether a forward of a training step goes on; filling: parameters get their first values, where they lie.
    """

    def __init__(
        self, wrapped: Wrapped, engine: _core.Engine, residency: Residency, clock: BlockClock, modes: tuple[str, ...]
    ) -> None:
        self.blocks, self.residency, self.modes = wrapped.blocks, residency, modes
        self.compute = wrapped.compute
        self._wrapped, self._engine, self._clock = wrapped, engine, clock
        self.device_stash = (
            DeviceStash(engine, wrapped.compute, lambda: self.modes, clock.device) if clock.device is not None else None
        )
        self.habits = [BlockHabits() for _ in wrapped.blocks]
        self.frame: Any = None  # of the block whose forward runs, or runs again
        self.innermost: Any = None  # the pack hook that it pushed
        self.pushed: list[Hooks] = []  # the saved-tensor hooks that blocks and operations are inside of, the innermost last
        self.stashing = self.filling = False

    def make_hooks(self, on_disk: bool) -> None:
        """Saved-tensor hooks: of operations outside of blocks, which keep, and of blocks that swap. What lives on anyway, the
        model's buffers, is not to be written. on_disk: there are parameters on disk."""
        saved_parameter = self.residency.saved_parameter if on_disk else None
        keep = _core.SavedTensors(self._engine, saved_parameter, self._unpack, 0)
        self.operation_hooks = keep.pack, keep.unpack
        least_bytes = STASH_LEAST_BYTES * self._wrapped.element_bytes // 4  # what is stashed in fp32 is stashed in bf16
        over_device = self.device_stash
        stash_tensor = over_device.pack if over_device is not None else None
        self.stash = _core.SavedTensors(self._engine, saved_parameter, self._unpack, least_bytes, stash_tensor)
        self.stash_hooks = self.stash.pack, self.stash.unpack
        plain = [b for b in self._wrapped.model.buffers() if type(b) is torch.Tensor and b.layout == torch.strided]
        for buffer in plain:
            if buffer.device.type == "cpu":
                _core.mark_static(buffer.data_ptr())
        if over_device is not None:
            over_device.hooks, over_device.least_bytes = self.stash, least_bytes
            over_device.mark_static(plain)

    def _unpack(self, saved: Any) -> torch.Tensor:
        """What the hooks gave autograd and do not know themselves."""
        if type(saved) is Stashed:
            return saved.record.stash.unpack(saved)
        return self.residency.unpack_parameter(saved)

    def recompute_all(self) -> None:
        """The blocks of this forward take as little memory as they can."""
        self.modes = tuple("checkpoint" for _ in self.blocks)

    def forget(self) -> None:
        """No block runs and no hooks are pushed any more: what was under way has ended, whatever its ends did not come to."""
        self.frame = self.innermost = None
        leave(self)

    def can_copy(self, size_bytes: int) -> bool:
        """Whether the budget has room now for copies of so many bytes, and for as much again."""
        return self.compute.held_bytes(self._engine) + 2 * size_bytes <= self._wrapped.settings.memory_bytes

    def run_block(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of block `number` in its mode.

        Raises:
            PlanError: hooks of others are around it, which its mode cannot be inside of.
        """
        if self.frame is not None:
            return forward(*args, **kwargs)  # it belongs to the block around it
        begin_ns = self._clock.now()
        result = self._run_in_mode(number, forward, args, kwargs)
        self._clock.forward_done(number, begin_ns, args, kwargs, result)
        return result

    def _run_in_mode(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = self.modes[number] if self.stashing else WITHOUT_STASH[self.modes[number]]
        if mode == "keep" or not torch.is_grad_enabled() or _inside_transform():  # which takes no saved-tensor hooks
            return forward(*args, **kwargs)
        check_outer_hooks(*self.blocks[number], mode)
        if mode == "swap":
            return run_swapped(self, number, forward, args, kwargs)
        again = self._clock.recomputable(number, forward)
        return run_checkpointed(self, number, again, args, kwargs, mode == "checkpoint_swap")

    def call(
        self, func: Callable[..., Any], found: list[Any], numbers: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a torch call that reads parameters of chunks on disk, or views of them: `found`, of the parameters `numbers`.

        Raises:
            PlanError: it is inside a transform of torch.func, whose tensors do not say whose memory they show.
        """
        if _inside_transform():
            raise PlanError(
                "a transform of torch.func (grad, vmap, jvp) reads parameters that are on disk: pass parameters of your own by "
                "torch.func.functional_call"
            )
        chunks: list[int] = []
        versions = [tensor._version for tensor in found] if not self.filling else []
        try:
            for number in numbers:
                chunk = self._wrapped.layout.entries[number].chunk
                if chunk not in chunks and not self.filling:
                    self.residency.bring(chunk)
                    chunks.append(chunk)
            with DisableTorchFunction():
                if torch.is_grad_enabled():
                    result = run_operation(self, func, args, kwargs)
                else:
                    result = func(*args, **kwargs)
            for tensor, number, version in zip(found, numbers, versions, strict=False):
                if tensor._version != version:
                    self.residency.write_back(number)
        finally:
            for chunk in chunks:
                self._engine.unuse(chunk)
        return result
