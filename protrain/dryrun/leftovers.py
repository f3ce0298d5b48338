"""Tensors without data that a dry run leaves in what outlives it: caches of functions and of programs.

A forward that asks `functools.cache` for a mask, or a dict by its length, fills it with fake tensors in a dry run, and the next
real forward finds them: torch refuses to compute with both. So what a run has made and neither the twin nor anything of the run
has any more is looked for where it lies, and taken out: the next forward makes it anew, as the first one would have.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..model.held import tensors_held
from .meter import Meter

#: How many tuples and the like are between a tensor and the container that it is taken out of, at most.
_MOST_DEPTH = 4
_NO_HOLDERS = (types.FrameType, types.TracebackType, types.GeneratorType, torch.Tensor)


@contextmanager
def nothing_left(model: nn.Module) -> Iterator[list[Meter]]:
    """Around a run of the twin, `model`: what the meters that are put into the list have seen it make, and tuples of it, is taken
    out of what has it when the run is over, but for the twin's modules."""
    meters: list[Meter] = []
    try:
        yield meters
    except BaseException as error:
        clear_frames(error.__traceback__)  # what they have goes
        raise
    finally:
        left = {storage._cdata for meter in meters for storage in meter.left()}
        if left:
            left -= {tensor.untyped_storage()._cdata for module in model.modules() for tensor in _tensors_of(module)}
        if left:
            _take_out(left)


def _take_out(left: set[int]) -> None:
    found: list[Any] = [one for one in gc.get_objects() if type(one) is FakeTensor and one.untyped_storage()._cdata in left]
    for _ in range(_MOST_DEPTH):
        if not found:
            return
        found = _take_out_of_holders(found)


def _tensors_of(module: nn.Module) -> Iterable[torch.Tensor]:
    for value in module.__dict__.values():
        yield from tensors_held(value)


def _take_out_of_holders(found: list[Any]) -> list[Any]:
    """Returns holders that cannot be changed, which are taken out themselves."""
    ids = {id(one) for one in found}
    further = []
    for holder in gc.get_referrers(*found):
        if holder is found or isinstance(holder, _NO_HOLDERS):
            continue
        if isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, tuple | frozenset):
            further.append(holder)
        elif isinstance(holder, dict):
            _take_out_of_dict(holder, ids)
        elif isinstance(holder, list):
            holder[:] = [one for one in holder if id(one) not in ids]
        elif isinstance(holder, set):
            holder.difference_update([one for one in holder if id(one) in ids])
        elif isinstance(holder, types.CellType):
            holder.cell_contents = None
        else:
            _forget_attributes(holder, ids)
    return further


def _take_out_of_dict(holder: dict[Any, Any], ids: set[int]) -> None:
    names = [name for name, value in holder.items() if id(value) in ids]
    owner = next((one for one in gc.get_referrers(holder) if _has_as_namespace(one, holder, names)), None)
    for name in names:
        if owner is None:
            del holder[name]
        else:
            _forget(owner, name)


def _has_as_namespace(owner: Any, holder: dict[Any, Any], names: list[Any]) -> bool:
    if isinstance(owner, type):
        return all(owner.__dict__.get(name) is holder[name] for name in names)
    return getattr(owner, "__dict__", None) is holder


def _forget_attributes(owner: Any, ids: set[int]) -> None:
    """Of an object whose attributes lie in no dict that could be seen."""
    for name in [name for name, value in getattr(owner, "__dict__", {}).items() if id(value) in ids]:
        _forget(owner, name)


def _forget(owner: Any, name: str) -> None:
    """What such an attribute was before nobody knows: as its class has it, or None, which mostly says that there is nothing."""
    if not isinstance(owner, type) and hasattr(type(owner), name):
        delattr(owner, name)
    else:
        setattr(owner, name, None)
