"""Random states outside of torch's own, which a model's forward may draw from as well: Python's, NumPy's, and generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def numpy_state() -> Any:
    """Of NumPy's global generator; None where nobody has imported NumPy. It takes some 25 us."""
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def put_numpy_state(state: Any) -> None:
    """state: of `numpy_state`; None: nothing is put."""
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


def same_numpy_state(state: Any) -> bool:
    """Whether nothing was drawn since then."""
    now = numpy_state()
    return state is None or bool(now[2:] == state[2:] and (now[1] == state[1]).all())


@contextmanager
def kept(python: Any = None, numpy: Any = None) -> Iterator[None]:
    """What is drawn inside is not drawn. python, numpy: states to begin with; of NumPy's nothing is done where only the other is
    given."""
    states = random.getstate(), numpy_state() if python is None or numpy is not None else None
    if python is not None:
        random.setstate(python)
    put_numpy_state(numpy)
    try:
        yield
    finally:
        random.setstate(states[0])
        put_numpy_state(states[1])


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
