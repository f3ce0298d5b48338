"""The tensors that objects hold: those of a dataclass, a namespace, a batch of a data set's own class."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn

from .keycaches import is_cache

_WITHOUT_TENSORS = (
    int, str, float, bytes, NoneType, type, nn.Module, ModuleType,
    FunctionType, BuiltinFunctionType, MethodType, functools.partial,
)  # fmt: skip

_PLAIN = (bool, int, float, str, NoneType)


def tensors_held(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """A tensor itself, or those that an object has as attributes, as one of a dataclass, and in containers there. Those of
    caches, which layers change, and of protrain are left out; modules of both kinds, classes, functions are not looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif not depth or isinstance(value, _WITHOUT_TENSORS) or is_cache(value) or type(value).__module__.startswith("protrain."):
        return
    elif isinstance(value, dict | list | tuple | set):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from tensors_held(entry, depth - 1)
    elif hasattr(value, "__dict__"):
        for entry in vars(value).values():
            yield from tensors_held(entry, depth - 1)


def held_by_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """What a model's modules hold beside parameters, to be compared with later: plain values, and the shapes of tensors."""
    return [
        (name, value if isinstance(value, _PLAIN) else [tensor.shape for tensor in tensors_held(value)])
        for module in model.modules()
        for name, value in vars(module).items()
        if name != "_parameters"
    ]


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own buffers that its state dict has, by their names in it."""
    own, others = module._buffers, module._non_persistent_buffers_set
    return {name: buffer for name, buffer in own.items() if buffer is not None and name not in others}


def has_attributes(value: Any) -> bool:
    """Whether it is an object of a class of the program's, as of a dataclass: no tensor, no module, no generator, nothing to call
    or that ends something when it goes, no cache, and none of protrain's."""
    others = (torch.Tensor, random.Random, *_WITHOUT_TENSORS)
    return (
        hasattr(value, "__dict__")
        and not (isinstance(value, others) or callable(value) or hasattr(type(value), "__del__") or is_cache(value))
        and not type(value).__module__.startswith("protrain.")
    )
