"""`optimizer.state` of a wrapped optimizer: which parameters have state, and by which names, but no values.

Frameworks look through it to move state to their device, or to know whether there is any (Lightning's Trainer). Values are not
there to be had: a copy could be changed, which would change nothing, and those of the whole model do not fit memory.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from typing import Any, NoReturn

from ..errors import PlanError

#: Parameter -> names of its state.
Names = Callable[[], Mapping[Any, Sequence[str]]]


def refuse_state() -> NoReturn:
    """Values of state are read, or set.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        "optimizer.state: a wrapped optimizer's state lies where its parameters do; state_dict() gives copies of it, and "
        "load_state_dict() takes another"
    )


class _Value:
    """Stands for a value; what it is asked for is refused."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse_state()

    def __repr__(self) -> str:
        return "<in state_dict()>"


def _refuse(*_: Any) -> Any:
    refuse_state()


for _name in (
    "float", "int", "index", "bool", "len", "iter", "getitem", "setitem", "neg", "abs", "lt", "le", "gt", "ge",
    *(side + name for side in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")),
):  # fmt: skip
    setattr(_Value, f"__{_name}__", _refuse)


class _Entry(MutableMapping[str, Any]):
    """Of one parameter."""

    def __init__(self, names: Sequence[str]) -> None:
        self._values = {name: _Value() for name in names}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if self._values.get(name) is not value:  # what moves state puts back what it could not move
            refuse_state()

    def __delitem__(self, name: str) -> None:
        refuse_state()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


class StateView(MutableMapping[Any, Any]):
    """The parameters that have state, in the optimizer's order; a parameter without has an entry without names, as in torch."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def __getitem__(self, parameter: Any) -> _Entry:
        return _Entry(self._names().get(parameter, ()))

    def __setitem__(self, parameter: Any, value: Any) -> None:
        refuse_state()

    def __delitem__(self, parameter: Any) -> None:
        refuse_state()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names())

    def __contains__(self, parameter: Any) -> bool:
        return parameter in self._names()

    def __len__(self) -> int:
        return len(self._names())

    def items(self) -> ItemsView[Any, Any]:
        return self._entries().items()

    def values(self) -> ValuesView[Any]:
        return self._entries().values()

    def _entries(self) -> dict[Any, _Entry]:
        """All of them, with the names of all asked for once and not for each."""
        return {parameter: _Entry(names) for parameter, names in self._names().items()}

    def __repr__(self) -> str:
        return repr(self._entries())
