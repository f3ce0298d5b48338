"""What a batch is known by: the shapes of its tensors, the names that they are given by, and its words.

Arguments that are no tensors may say what the model computes: whole numbers, strings and what is true or not, the words of a
batch, are a part of what it is known by. A word that has had too many values, as a count of steps, is not looked at any more, and
batches that were foreseen to need the same are one.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..dryrun.phases import DryRun
from ..errors import PlanError
from ..model.held import tensors_held

#: Of a word among the arguments, so many values are told apart.
MOST_VALUES = 8

#: Of a batch: the shape of each tensor among the arguments, the names of keywords that have tensors, and the words.
Shapes = tuple[tuple[int, ...] | str, ...]
Batch = tuple[DryRun | None, Shapes]


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """The shapes of all tensors of a batch, behind the name where that is a keyword's, and its words: what else is given, true or
    not, a whole number, a string or None; in order.

    Raises:
        PlanError: one is nested. It has no shape to plan for, and one of layout jagged hides from parameters on disk that they
            are read: its class runs each operation with the functions of all other classes turned off.
    """
    found: list[torch.Tensor | str] = []
    for name, value in [("", args), *((f"{name}=", value) for name, value in kwargs.items())]:
        entries: list[torch.Tensor | str] = []
        for leaf in torch.utils._pytree.tree_leaves(value):
            entries += [f"{name}{leaf!r}"] if isinstance(leaf, bool | int | str | None) else tensors_held(leaf)
        found += [name] if name and any(isinstance(entry, torch.Tensor) for entry in entries) else []
        found += entries
    nested = next((tensor for tensor in found if isinstance(tensor, torch.Tensor) and tensor.is_nested), None)
    if nested is not None:
        raise PlanError(
            f"the model was given a nested tensor (of layout {nested.layout}), where training takes tensors of one shape: pass a "
            "padded one, as torch.nested.to_padded_tensor makes it, and a mask"
        )
    return tuple(entry if isinstance(entry, str) else tuple(entry.shape) for entry in found)


def covers(known: Shapes, shapes: Shapes) -> bool:
    """Whether a batch of these shapes needs no more than one of the known shapes."""
    return len(known) == len(shapes) and all(map(_covers, known, shapes))


def _covers(known: tuple[int, ...] | str, shape: tuple[int, ...] | str) -> bool:
    if isinstance(known, str) or isinstance(shape, str):
        return known == shape
    return len(known) == len(shape) and all(x >= y for x, y in zip(known, shape, strict=True))


def tensors_of(shapes: Shapes) -> list[tuple[int, ...]]:
    """The shapes alone."""
    return [shape for shape in shapes if not isinstance(shape, str)]


def elements(shapes: Shapes) -> int:
    """Of all tensors of a batch."""
    return sum(map(math.prod, tensors_of(shapes)))


class Words:
    """Of one session: the words of its batches so far."""

    def __init__(self) -> None:
        self._values: dict[int, set[str]] = {}  # by their places among the arguments
        self._same: dict[Shapes, Shapes] = {}  # batches that need what another one of other words needs

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
        """What a batch is known by: as `shapes_of`, without words that have had too many values.

        Raises:
            PlanError: a tensor is nested.
        """
        found = list(shapes_of(args, kwargs))
        for place, word in enumerate(found):
            if isinstance(word, str):
                values = self._values.setdefault(place, set())
                if len(values) <= MOST_VALUES:
                    values.add(word)
                if len(values) > MOST_VALUES:
                    found[place] = ""
        return self._same.get(tuple(found), tuple(found))

    def note_same(self, shapes: Shapes, known: Shapes) -> None:
        """A batch of these shapes needs what the known one needs: from here on it is that one."""
        self._same[shapes] = known

    def forget_same(self) -> None:
        """Each batch is foreseen for itself again."""
        self._same.clear()
