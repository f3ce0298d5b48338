"""Random states outside of torch's own, which a model's forward may draw from as well: Python's, NumPy's, and generators."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: What every object begins with: how often it is held, and its class.
_HEAD_BYTES = object.__basicsize__


class _Global:
    """A generator of the process, of Python or of NumPy.

    To be asked for its state takes one of NumPy 30 us and one of Python 9, and each block that is recomputed wants to know
    whether its forward drew. So the memory of the objects that hold the state is looked at, which takes 2: where nothing in it
    has changed, the state is the one that was given before.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None], holders: Callable[[], list[Any] | None]) -> None:
        """holders: of all that decides what is drawn next, objects of a known layout and plain values; None: it is not known."""
        self._get, self.put, self._holders = get, put, holders
        self._seen: Any = None
        self._state: Any = None

    def _look(self) -> Any:
        holders = self._holders()
        return holders and [one if type(one) in (float, type(None)) else _memory_of(one) for one in holders]

    def state(self) -> Any:
        """The same object as before where nothing was drawn since."""
        seen = self._look()
        if seen is None or seen != self._seen:
            state = self._get()
            if self._look() != seen:  # another thread draws from it
                seen = None
            if seen is None and self._state is not None and pickle.dumps(state) == pickle.dumps(self._state):
                state = self._state
            self._state, self._seen = state, seen
        return self._state


def _memory_of(one: Any) -> bytes:
    """Of an object of a class written in C that holds its state itself."""
    return ctypes.string_at(id(one) + _HEAD_BYTES, type(one).__basicsize__ - _HEAD_BYTES)


def _pythons() -> list[Any] | None:
    inner: Any = getattr(random.getstate, "__self__", None)
    return [inner, getattr(inner, "gauss_next", None)] if type(inner) is random.Random else None


def _numpy_random() -> Any:
    return sys.modules["numpy"].random


def _numpys() -> list[Any] | None:
    """Of NumPy's default kind of generator, both it and what it draws bits from."""
    numpy = _numpy_random()
    outer: Any = getattr(numpy.get_state, "__self__", None)
    inner: Any = getattr(outer, "_bit_generator", None)
    return [outer, inner] if type(outer) is numpy.RandomState and type(inner) is numpy.MT19937 else None


_python = _Global(random.getstate, random.setstate, _pythons)
_numpy = _Global(
    lambda: _numpy_random().get_state(legacy=False),
    lambda state: _numpy_random().set_state(state),
    _numpys,
)

#: Of Python's generator and of NumPy's; None: of one that nobody has imported, or that nobody asks for.
States = tuple[Any, Any]


def now() -> States:
    """The same objects as before, of each generator that nothing was drawn from since."""
    return _python.state(), _numpy.state() if "numpy" in sys.modules else None


def drawn_since(before: States) -> States:
    """Of the generators that something was drawn from since then, what they were; None of the others."""
    python, numpy = (was if was is not state else None for was, state in zip(before, now(), strict=True))
    return python, numpy


def _put(states: States) -> None:
    for generator, state in zip((_python, _numpy), states, strict=True):
        if state is not None:
            generator.put(state)


@contextmanager
def kept(begin: States = (None, None)) -> Iterator[None]:
    """What is drawn inside is not drawn. begin: what generators are put to first; None: they go on as they are."""
    before = now()
    _put(begin)
    try:
        yield
    finally:
        _put(drawn_since(before))


#: By their classes: how generators that are objects give their state, and take it.
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
}


def _know_numpys() -> None:
    """From when somebody imports NumPy on."""
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and hasattr(numpy, "Generator"):
        _GENERATORS[numpy.Generator] = (
            lambda one: one.bit_generator.state,
            lambda one, state: setattr(one.bit_generator, "state", state),
        )
        _GENERATORS[numpy.RandomState] = (numpy.RandomState.get_state, numpy.RandomState.set_state)


def generators(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Those among the values, each with its state."""
    if len(_GENERATORS) == 2:
        _know_numpys()
    found = {id(one): one for one in values if type(one) in _GENERATORS}
    return [(one, _GENERATORS[type(one)][0](one)) for one in found.values()]


def put_states(states: list[tuple[Any, Any]]) -> None:
    """states: of `generators`."""
    for one, state in states:
        _GENERATORS[type(one)][1](one, state)
