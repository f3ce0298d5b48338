"""What of a model moves with it to a device beside its parameters: buffers, and where all of it goes back to."""

from __future__ import annotations

import torch
from torch import nn

from .parameters import DisableTorchFunction


class Places:
    """Where a model's tensors were when it was wrapped. Parameters that had no memory (meta) go back to ordinary memory."""

    def __init__(self, model: nn.Module, params: list[nn.Parameter]) -> None:
        self._params = [(p, p.device if p.device.type != "meta" else torch.device("cpu")) for p in params]
        self._model = model
        self._moved: list[tuple[nn.Module, str, torch.device]] = []

    def move_buffers(self, device: torch.device) -> None:
        """Buffers are where parameters are computed with; shared ones stay shared."""
        made: dict[int, torch.Tensor] = {}
        for module in self._model.modules():
            for leaf, buffer in module._buffers.items():
                if buffer is None or buffer.device == device:
                    continue
                self._moved.append((module, leaf, buffer.device))
                module._buffers[leaf] = made.setdefault(id(buffer), buffer.to(device=device))

    def give_back(self) -> None:
        """Everything is where it was, and what is shared still is; parameters have their values in ordinary memory."""
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # each beside what it was made of, whose id is nobody else's so
        for module, leaf, device in self._moved:
            buffer = module._buffers.get(leaf)
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = buffer.to(device=device), buffer
                module._buffers[leaf] = made[id(buffer)][0]
        self._moved.clear()
        with DisableTorchFunction():
            for p, device in self._params:
                if p.device not in (device, torch.device("meta")):  # a wrap that failed leaves some without values
                    p.data = p.data.to(device=device)
