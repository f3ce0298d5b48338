"""transformers' caches of keys and values, and of states, which the layers of a model are given and add theirs to.

A block that runs again must find its part of a cache as its first forward did: else its keys would be there twice, or, between an
encoder and a decoder, not be made again at all.

A model of transformers keeps keys for generation unless it is told not to, also in training, where nobody has use for them. To
turn that off is not the same: attention reads them where the cache has put them together, and what lies otherwise other kernels
serve, which round otherwise. So layers are given the cache, and what a block has added goes when it is through (`dropped`). A
model that runs a block twice reads there what the first time added: its keys stay.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..base.entries import same_entries


class _Held:
    """What a cache is made of, as a block was given it. A block adds to one layer, of as many as the model has: that one is found
    without a look at each from Python."""

    def __init__(self, cache: Any, kind: type) -> None:
        self.cache = cache  # whose id stays its own
        parts = list(_parts(cache, kind))
        self._lists = [(part, part.copy()) for part in parts if isinstance(part, list)]
        self._dicts = [part for part in parts if isinstance(part, dict)]
        self._begun = [dict(part) for part in self._dicts]
        self._sizes = list(map(len, self._dicts))
        self._values = list(itertools.chain.from_iterable(map(dict.values, self._begun)))
        self._owners = [place for place, size in enumerate(self._sizes) for _ in range(size)]

    def put(self) -> None:
        """It is again as it was."""
        for part, begun in self._lists:
            part[:] = begun
        self._put(itertools.compress(itertools.count(), map(operator.ne, map(len, self._dicts), self._sizes)))
        now = itertools.chain.from_iterable(map(dict.values, self._dicts))
        self._put(itertools.compress(self._owners, map(operator.is_not, now, self._values)))

    def _put(self, places: Iterable[int]) -> None:
        for place in set(places):
            self._dicts[place].clear()
            self._dicts[place].update(self._begun[place])


class Dropping:
    """Of a forward that runs. found: by their ids, the caches that its blocks were given, as they were; ran: numbers of blocks,
    each with the id of a cache that it was given; read_again: one was given the same cache twice, so what is added stays."""

    def __init__(self) -> None:
        self.found: dict[int, _Held] = {}
        self.ran: set[tuple[int, int]] = set()
        self.read_again = False


#: None: what is added to caches stays.
_dropping: ContextVar[Dropping | None] = ContextVar("_dropping", default=None)


def are_of_no_use(model: nn.Module) -> bool:
    """Whether it is a transformers model that keeps keys for generation unless told not to, and computes the same where they are
    dropped. Those that keep states, as of linear attention, do not."""
    stateful = getattr(model, "_is_stateful", False)
    return hasattr(model, "config") and not stateful and "use_cache" in inspect.signature(model.forward).parameters


@contextmanager
def dropped(kwargs: Mapping[str, Any], wanted: bool = True) -> Iterator[Dropping]:
    """Inside, blocks of a model that is called with these arguments leave caches as they found them, unless the caller asked for
    one, or gave one. wanted: whether they are to."""
    given = any(kwargs.get(name) is not None for name in ("use_cache", "past_key_values", "cache"))
    dropping = Dropping()
    token = _dropping.set(dropping if wanted and not given else None)
    try:
        yield dropping
    finally:
        _dropping.reset(token)


def note(number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Block `number` is given these arguments. Returns whether it reads what it has added to a cache before, and what is gone."""
    dropping, kind = _dropping.get(), _class()
    if dropping is None or kind is None or dropping.read_again:
        return False
    for value in (*args, *kwargs.values()):
        if isinstance(value, kind):
            if id(value) not in dropping.found:
                dropping.found[id(value)] = _Held(value, kind)
            dropping.read_again |= (number, id(value)) in dropping.ran
            dropping.ran.add((number, id(value)))
    return dropping.read_again


def drop(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """The block is through: what it has added to caches goes."""
    dropping = _dropping.get()
    if dropping is None or dropping.read_again:
        return
    for value in (*args, *kwargs.values()):
        held = dropping.found.get(id(value))
        if held is not None:
            held.put()


def _parts(cache: Any, kind: type) -> Iterator[Any]:
    """The attributes of a cache and of its layers, and the lists and dicts among them."""
    yield vars(cache)
    for value in vars(cache).values():
        if isinstance(value, kind):
            yield from _parts(value, kind)
        elif isinstance(value, list | dict):
            yield value
    for layer in _own_layers(cache):
        yield vars(layer)
        yield from (value for value in vars(layer).values() if isinstance(value, dict))


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


def is_cache(value: Any) -> bool:
    """Whether it is one of transformers' caches."""
    kind = _class()
    return kind is not None and isinstance(value, kind)


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
    """The forward is over: of layers that it left alone the copies go, which would keep what those hold. Where what it added is
    dropped, the caches are soon what their copies are."""
    kind, dropping = _class(), _dropping.get()
    if dropping is not None and not dropping.read_again:
        return
    for cache, made in pairs:
        for name, value in vars(made).items():
            now = getattr(cache, name, None)
            if isinstance(value, list) and isinstance(now, list):
                for place, (before, after) in enumerate(zip(value, now, strict=False)):
                    if _same(before, after):
                        value[place] = after
            elif kind is not None and isinstance(value, kind):
                settle([(now, value)])


@functools.cache
def _is_plain(kind: Any) -> bool:
    """Whether copy.copy makes of such an object another with the same entries in its dict, and nothing else."""
    own = all(getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__", "__new__"))
    more = any(hasattr(kind, name) for name in ("__copy__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"))
    return own and not more and not any(vars(base).get("__slots__") for base in kind.__mro__)


def _shallow(one: Any) -> Any:
    """As copy.copy, in a fifth of the time: there is one for each layer of the model, and each block that is recomputed."""
    kind: Any = type(one)
    if not _is_plain(kind):
        return copy.copy(one)
    made = object.__new__(kind)
    made.__dict__.update(one.__dict__)
    return made


def _copied(cache: Any, kind: type) -> Any:
    """Down to the layers' own dicts, which those of linear attention keep their states in."""
    made = _shallow(cache)
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
    yield from _own_layers(cache)


def _own_layers(cache: Any) -> Iterator[Any]:
    for value in vars(cache).values():
        if isinstance(value, list):
            yield from (layer for layer in value if hasattr(layer, "__dict__"))


def _same(before: Any, after: Any) -> bool:
    """Whether all attributes are the same objects, or dicts of the same."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(after[key] is value for key, value in before.items())
    one, other = getattr(before, "__dict__", None), getattr(after, "__dict__", None)
    if one is not None and other is not None and same_entries(one, other):
        return True
    if one is None or other is None or one.keys() != other.keys():
        return before is after
    return all(other[key] is value or (isinstance(value, dict) and _same(value, other[key])) for key, value in one.items())
