"""transformers' caches of keys and values, and of states, which the layers of a model are given and add theirs to.

A block that runs again must find its part of a cache as its first forward did: else its keys would be there twice, or, between an
encoder and a decoder, not be made again at all.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _class() -> type | None:
    """Of all caches; None where nobody has imported it."""
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)


def as_now(leaf: Any) -> Any:
    """Of a cache a copy as it is now; anything else as it is. Tensors are not copied: layers put longer ones in their place."""
    kind = _class()
    return _copied(leaf, kind) if kind is not None and isinstance(leaf, kind) else leaf


def copied(leaves: list[Any]) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """A forward's arguments as they are now, and each cache among them with its copy."""
    made = [as_now(leaf) for leaf in leaves]
    return made, [(leaf, other) for leaf, other in zip(leaves, made, strict=True) if other is not leaf]


def with_tensors(leaf: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Of a cache a copy with other tensors in its layers; anything else as it is."""
    kind, made = _class(), as_now(leaf)
    if kind is None or made is leaf:
        return leaf
    for layer in _layers(made, kind):
        for held in (vars(layer), *(value for value in vars(layer).values() if isinstance(value, dict))):
            held.update({name: convert(value) for name, value in held.items() if isinstance(value, torch.Tensor)})
    return made


def settle(pairs: list[tuple[Any, Any]]) -> None:
    """The forward is over: of layers that it left alone the copies go, which would keep what those hold."""
    kind = _class()
    for cache, made in pairs:
        for name, value in vars(made).items():
            now = getattr(cache, name, None)
            if isinstance(value, list) and isinstance(now, list):
                for place, (before, after) in enumerate(zip(value, now, strict=False)):
                    if _same(before, after):
                        value[place] = after
            elif kind is not None and isinstance(value, kind):
                settle([(now, value)])


def _copied(cache: Any, kind: type) -> Any:
    """Down to the layers' own dicts, which those of linear attention keep their states in."""
    made = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, kind):
            setattr(made, name, _copied(value, kind))
        elif isinstance(value, list):
            setattr(made, name, [_copied(layer, kind) if hasattr(layer, "__dict__") else layer for layer in value])
        elif isinstance(value, dict):
            setattr(made, name, dict(value))
    return made


def _layers(cache: Any, kind: type) -> Iterator[Any]:
    for value in vars(cache).values():
        if isinstance(value, kind):
            yield from _layers(value, kind)
        elif isinstance(value, list):
            yield from (layer for layer in value if hasattr(layer, "__dict__"))


def _same(before: Any, after: Any) -> bool:
    """Whether all attributes are the same objects, or dicts of the same."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(after[key] is value for key, value in before.items())
    one, other = getattr(before, "__dict__", None), getattr(after, "__dict__", None)
    if one is None or other is None or one.keys() != other.keys():
        return before is after
    return all(other[key] is value or (isinstance(value, dict) and _same(value, other[key])) for key, value in one.items())
