"""The tensors that objects hold: those of a dataclass, a namespace, a batch of a data set's own class."""

from __future__ import annotations

import copyreg
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


def has_attributes(value: Any, slots: bool = False) -> bool:
    """Whether it is an object of a class of the program's, as of a dataclass: no tensor, no module, no generator, nothing to call
    or that ends something when it goes, no cache, and none of protrain's. slots: also one that has them in slots."""
    others = (torch.Tensor, random.Random, *_WITHOUT_TENSORS)
    return (
        not (isinstance(value, others) or callable(value) or hasattr(type(value), "__del__") or is_cache(value))
        and (hasattr(value, "__dict__") or (slots and bool(slot_names(type(value)))))
        and not type(value).__module__.startswith("protrain.")
    )


def slot_names(kind: type) -> list[str]:
    """Those of a class's `__slots__`, and its bases', that instances keep values in; kept with the class."""
    return copyreg._slotnames(kind)  # type: ignore[attr-defined,no-any-return]


class Attributes:
    """An object's attributes, those in slots among them, as a dict would have them."""

    __slots__ = ("_names", "_object")

    def __init__(self, value: Any) -> None:
        self._object, self._names = value, slot_names(type(value))

    def items(self) -> list[tuple[str, Any]]:
        """What has a value."""
        found = [(name, getattr(self._object, name)) for name in self._names if hasattr(self._object, name)]
        return [*found, *getattr(self._object, "__dict__", {}).items()]

    def __setitem__(self, name: str, value: Any) -> None:
        own = getattr(self._object, "__dict__", {})
        if name in own:
            own[name] = value
        else:
            object.__setattr__(self._object, name, value)  # also where its class is frozen
