"""An accelerator that stands for a GPU where there is none: the core's host device, ordinary torch tensors for those of the
device.

Ways between the device and the host are copies here too, and each tensor in ordinary memory is known as one. So what would end
a process on a GPU is an assertion here: an address of the wrong memory given to the engine, or, inside `Apart`, an operation
on tensors of both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protrain import _core
from protrain.device.compute import Accelerator
from protrain.model.strides import dense_strides


class StandIn(Accelerator):
    """streams: how often the engine asked for the compute stream."""

    backward_depth = 1  # autograd serves the CPU on the thread that calls backward

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), _core.Device(-1))
        self._host: dict[int, Any] = {}  # storages in ordinary memory
        self.streams = 0

    def current_stream(self) -> Callable[[], int]:
        def ask() -> int:
            self.streams += 1
            return 0

        return ask

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor lies in ordinary memory."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._host:
            self._host[key] = weakref.ref(storage, lambda _: self._host.pop(key, None))
        return tensor

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        return self.mark(super().empty_on_host(shape, dtype, strides))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_host(tensor):
            return tensor.detach()
        made = self.empty_on_host(tensor.shape, tensor.dtype, dense_strides(tensor))
        return made.copy_(tensor.detach())

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return (
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
            if self.is_host(tensor)
            else tensor
        )

    def on_host(self, tensor: torch.Tensor) -> int:
        assert self.is_host(tensor), "the engine was given an address of the device where it takes one of the host"
        return tensor.data_ptr()

    def on_device(self, tensor: torch.Tensor) -> int:
        assert not self.is_host(tensor), "the engine was given an address of the host where it takes one of the device"
        return tensor.data_ptr()


class Apart(TorchDispatchMode):
    """Inside, no operation but a copy takes tensors of both memories; what is made of the host's is the host's."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self.device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        hosts = [self.device.is_host(tensor) for tensor in given if tensor.layout == torch.strided]
        apart = [host for host, tensor in zip(hosts, given, strict=False) if tensor.dim()]
        copies = func._schema.name == "aten::copy_"
        assert copies or len(set(apart)) < 2, f"{func} takes tensors of the device and of the host"
        made = func(*args, **(kwargs or {}))
        if hosts and all(hosts) and not copies and (kwargs or {}).get("device") is None:
            for tensor in tree_leaves(made):
                if isinstance(tensor, torch.Tensor):
                    self.device.mark(tensor)
        return made
