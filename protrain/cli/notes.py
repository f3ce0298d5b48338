"""Warnings of protrain, and notes of the commands, told as they come: what ends the process may be what one has warned of."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

#: In the order in which they came, each once.
seen: list[str] = []
_listeners: list[Callable[[str], None]] = []


def keep() -> None:
    """From here on warnings do not reach stderr: those of protrain itself are in `seen`, and those of other packages nowhere."""
    warnings.simplefilter("default")
    warnings.simplefilter("ignore", ResourceWarning)  # shown when the interpreter ends and our own way of showing is gone
    warnings.showwarning = _keep


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside of it `listener` is told of each as it comes; first of those that came before."""
    for text in seen:
        listener(text)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(text: str) -> None:
    """Those who listen hear it, once."""
    if text not in seen:
        seen.append(text)
        for listener in _listeners:
            listener(text)


def _keep(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = " ".join(str(message).split())
    ours = os.path.abspath(filename).startswith(_PACKAGE) and not issubclass(category, (DeprecationWarning, ImportWarning))
    if ours or category.__module__.split(".")[0] == "protrain":
        tell(text)
