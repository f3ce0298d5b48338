"""Random states outside of torch's, Python's and NumPy's, which a model's forward may draw from as well."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
