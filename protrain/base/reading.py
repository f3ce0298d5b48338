"""JSON that anybody may have written: parsed without surprises, and turned into dataclasses whose values are what they say.

A field that is unknown, missing or of another type, a number that is not finite or has no place in 63 bits, a name given twice, a
nesting as deep as the interpreter's stack: each is a ValueError that names the place.
"""

from __future__ import annotations

import json
import math
import os
import stat
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

MOST_COUNT = 1 << 31  # of what is counted: fields n_...
MOST_INT = 1 << 62
SIGNED = ("stash_drag_seconds_per_byte",)  # fields that may be less than 0
MINUS_ONE = ("block", "again_operations", "parameters")  # fields of whole numbers that may be -1: there is none, or not known


def open_file(path: str | os.PathLike[str], buffering: int = -1) -> Any:
    """A regular file, for reading; what would wait for somebody, such as a pipe, is refused.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is no regular file")
        return open(handle, "rb", buffering=buffering)
    except BaseException:
        os.close(handle)
        raise


def parse(text: str | bytes) -> Any:
    """Raises ValueError where it is no JSON, or has a name twice in one object."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(name for name in names if names.count(name) > 1))} is there twice")
    return found


def typed(kind: type[T], values: Any, place: str = "") -> T:
    """A dataclass of a JSON object.

    Raises:
        ValueError: a field is unknown, missing, or not of its type; it is named.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{place or 'it'} is {shown(values)}; an object is wanted")
    known = fields(kind)  # type: ignore[arg-type]
    names = [f.name for f in known]
    if unknown := sorted(map(str, set(values) - set(names))):
        raise ValueError(f"{place or 'it'} has an unknown field {shown(unknown[0])}; a {kind.__name__} has {', '.join(names)}")
    for f in known:
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{place or 'it'} lacks {f.name}")
    hints, before = get_type_hints(kind), f"{place}." if place else ""
    return kind(**{name: _value(hints[name], value, before + name, name) for name, value in values.items()})


def _value(kind: Any, value: Any, place: str, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _value(next(a for a in arguments if a is not type(None)), value, place, name)
    if is_dataclass(kind):
        return typed(kind, value, place)  # type: ignore[arg-type]
    if origin is tuple:
        return _tuple(arguments, value, place, name)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{place} is {shown(value)}; an object is wanted")
        return {_key(arguments[0], key, place): _value(arguments[1], v, f"{place}.{key}", name) for key, v in value.items()}
    return _plain(kind, value, place, name)


def _tuple(arguments: tuple[Any, ...], value: Any, place: str, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{place} is {shown(value)}; a list is wanted")
    if arguments[-1] is ...:
        return tuple(_value(arguments[0], item, f"{place}[{i}]", name) for i, item in enumerate(value))
    if len(value) != len(arguments):
        raise ValueError(f"{place} has {len(value)} entries; {len(arguments)} are wanted")
    pairs = zip(arguments, value, strict=True)
    return tuple(_value(kind, item, f"{place}[{i}]", name) for i, (kind, item) in enumerate(pairs))


def _key(kind: Any, key: str, place: str) -> Any:
    if kind is not int:
        return key
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ValueError(f"{place} has the name {shown(key)}; a number is wanted")
    return int(key)


def _plain(kind: Any, value: Any, place: str, name: str) -> Any:
    if kind is bool or kind is str:
        if not isinstance(value, kind):
            raise ValueError(f"{place} is {shown(value)}; {'true or false' if kind is bool else 'text'} is wanted")
        return value
    wanted = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ValueError(f"{place} is {shown(value)}; {wanted} is wanted")
    if kind is float:
        least = -1 if name in SIGNED else 0
        if not math.isfinite(value) or not least <= value < MOST_INT:
            raise ValueError(f"{place} is {shown(value)}; a number from {least} to {MOST_INT} is wanted")
        return float(value)
    most = MOST_COUNT if name.startswith("n_") else MOST_INT
    least = -1 if name in MINUS_ONE else 0
    if not least <= value < most:
        raise ValueError(f"{place} is {shown(value)}; a whole number from {least} to {most} is wanted")
    return value


def shown(value: Any) -> str:
    """Short enough for one line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MOST_INT:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def given_as(value: Any) -> str:
    """What stands in the place of something else, in a word or two: models and tensors are shown in a thousand lines."""
    return shown(value) if value is None or isinstance(value, str | int | float | type) else f"of type {type(value).__name__}"
