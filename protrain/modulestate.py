"""What a block's forward may change beside its output: buffers, plain attributes, and its own inputs.

A block that is recomputed must see what its forward saw (the training flag, running means, counters, inputs as they were), and
leave what there is now: no mean is updated twice, no call counted twice. So a recomputation runs on copies of the buffers that
forward changed, and on the plain attributes that forward began with; afterwards those of now stand again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_SCALARS = (bool, int, float, str, type(None))

#: Larger buffers are not copied before each forward. One that forward changes all the same is found by its version, and copied
#: from then on.
COPIED_BYTES = 1 << 20


class _Buffer:
    __slots__ = ("before", "compared", "held", "leaf", "module", "version")

    def __init__(self, module: nn.Module, leaf: str, held: torch.Tensor, always: bool, compared: bool) -> None:
        self.module, self.leaf, self.held, self.version, self.compared = module, leaf, held, held._version, compared
        copied = always or held.nbytes <= COPIED_BYTES
        self.before: torch.Tensor | None = held.detach().clone() if copied else None

    def changed(self) -> bool:
        """Kernels of batch norm write running means past their version, so values are looked at where there is a copy; where
        looking would wait for a device, what has a copy may have changed."""
        if self.module._buffers.get(self.leaf) is not self.held or self.held._version != self.version:
            return True
        return self.before is not None and not (self.compared and torch.equal(self.before, self.held))


class ModuleState:
    """Taken before a block's forward; `settle` after it keeps what forward changed."""

    def __init__(self, block: nn.Module, large: set[str], compared: bool = True) -> None:
        """large: "MODULE.BUFFER" of the large buffers that forward is known to change; `settle` adds to it. compared: values may
        be looked at; else copies stay until the recomputation."""
        self.large = large
        self.attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self.buffers: list[tuple[str, _Buffer]] = []
        self.lost = ""  # a buffer that was changed and of which there is no copy
        with torch.no_grad():
            for name, module in block.named_modules():
                own = {key: value for key, value in vars(module).items() if type(value) in _SCALARS}
                self.attributes.append((module, own))
                for leaf, held in module._buffers.items():
                    if held is not None and not held.is_inference():
                        path = f"{name}.{leaf}" if name else leaf
                        self.buffers.append((path, _Buffer(module, leaf, held, path in large, compared)))

    def settle(self) -> None:
        """Forward is over: copies of buffers that it left alone go."""
        self.buffers = [(path, buffer) for path, buffer in self.buffers if buffer.changed()]
        for path, buffer in self.buffers:
            if buffer.before is None:
                self.lost = path
                self.large.add(path)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the block is as its forward found it; what is changed there is forgotten.

        Raises:
            RuntimeError: forward changed a buffer of which there is no copy.
        """
        if self.lost:
            raise RuntimeError(
                f"a recomputed block changed its buffer {self.lost} in forward for the first time, so what forward saw is gone: "
                f"skip this batch (the next ones keep it), or wrap with block_modes that keep this block"
            )
        now = [(module, {key: vars(module)[key] for key in own if key in vars(module)}) for module, own in self.attributes]
        held = [buffer.module._buffers.get(buffer.leaf) for _, buffer in self.buffers]
        _put(self.attributes)
        for _, buffer in self.buffers:
            assert buffer.before is not None
            buffer.module._buffers[buffer.leaf] = buffer.before
        try:
            yield
        finally:
            _put(now)
            for (_, buffer), current in zip(self.buffers, held, strict=True):
                buffer.module._buffers[buffer.leaf] = current


def _put(attributes: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, own in attributes:
        current = vars(module)
        for key, value in own.items():
            if current.get(key) is not value:
                current[key] = value
