"""What a batch is known by: the shapes of its tensors, the names that they are given by, its words, and the flags of the moment.

Arguments that are no tensors may say what the model computes: whole numbers, strings and what is true or not, the words of a
batch, are a part of what it is known by. A word that has had too many values, as a count of steps, is not looked at any more, and
batches that were foreseen to need the same are one.

What a step takes hangs on what records gradients, on which modules train, and on autocast, as much as on shapes: a loop may
freeze parameters for its first steps, or begin in eval mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..dryrun.phases import DryRun
from ..errors import PlanError
from ..model.held import tensors_held
from ..model.parameters import DisableTorchFunction

#: Of a word among the arguments, so many values are told apart.
MOST_VALUES = 8


@dataclass(frozen=True)
class Flags:
    """Of the moment a batch came at. recording: what records gradients, parameters by their numbers, and tensors of the batch by
    theirs, behind one; training: modules in train mode, by their order in the model; autocast: see `autocast_now`."""

    recording: frozenset[int]
    training: frozenset[int]
    autocast: tuple[Any, ...]

    def cover(self, other: Flags) -> bool:
        """Whether what the other ones have is among these: a step with these is taken to need no less."""
        wider = self.recording >= other.recording and self.training >= other.training
        return wider and self.autocast == other.autocast


#: Of a batch: the shape of each tensor among the arguments, the names of keywords that have tensors, the words; flags, the last.
Entry = tuple[int, ...] | str | Flags
Shapes = tuple[Entry, ...]
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


def _covers(known: Entry, entry: Entry) -> bool:
    if isinstance(known, Flags) and isinstance(entry, Flags):
        return known.cover(entry)
    if isinstance(known, tuple) and isinstance(entry, tuple):
        return len(known) == len(entry) and all(x >= y for x, y in zip(known, entry, strict=True))
    return known == entry


def tensors_of(shapes: Shapes) -> list[tuple[int, ...]]:
    """The shapes alone."""
    return [entry for entry in shapes if isinstance(entry, tuple)]


def without_words(shapes: Shapes) -> Shapes:
    """The shapes and the flags."""
    return tuple(entry for entry in shapes if not isinstance(entry, str))


def elements(shapes: Shapes) -> int:
    """Of all tensors of a batch."""
    return sum(map(math.prod, tensors_of(shapes)))


def in_train_mode(model: nn.Module) -> frozenset[int]:
    """Modules that are, by their order in the model."""
    return frozenset(n for n, module in enumerate(model.modules()) if module.training)


def autocast_now() -> tuple[Any, ...]:
    """The types that operations are cast to, and whether casts of parameters are held, on the CPU and on a GPU; nothing where
    autocast is not on."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (*((kind, torch.get_autocast_dtype(kind)) for kind in kinds), torch.is_autocast_cache_enabled()) if kinds else ()


def _flags(model: nn.Module, params: Sequence[nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flags:
    given = [tensor for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) for tensor in tensors_held(leaf)]
    with DisableTorchFunction():  # that of a parameter on disk takes longer
        recording = frozenset(n for n, tensor in enumerate((*params, *given)) if tensor.requires_grad)
    return Flags(recording, in_train_mode(model), autocast_now())


class Batches:
    """Of one session: what its batches are known by. model, params: whose flags are looked at."""

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self._model, self._params = model, params
        self._values: dict[int, set[str]] = {}  # by their places among the arguments
        self._same: dict[Shapes, Shapes] = {}  # batches that need what another one of other words needs

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
        """What a batch is known by: as `shapes_of`, without words that have had too many values, and the flags of this moment.

        Raises:
            PlanError: a tensor is nested.
        """
        found: list[Entry] = [*shapes_of(args, kwargs), _flags(self._model, self._params, args, kwargs)]
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
