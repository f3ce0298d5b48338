"""Evaluation: forwards without gradients, between steps, of batches that no step was planned for.

What such a forward holds at once is foreseen by a dry run of it alone, before its first operation. Where the arrangement of
training leaves too little beside it, fewer chunks stay in memory from then on; the next forward of training has its arrangement
back. A batch that does not fit with every chunk away is refused before it begins, with the smallest budget that works.

A batch that is not much larger than one that was foreseen is not foreseen again where there is plenty of room: what a forward
holds grows with the square of each length at most (scores of attention over a sequence do, all else is linear). Without that,
text that is generated word by word would be foreseen word by word.

Nothing moves while a forward runs that calls the model again, nor once one has recorded gradients, until the step is made: what
autograd keeps of a parameter that lies in memory lies there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from ..dryrun.phases import SMALL_UNSEEN_BYTES, DryRunError
from ..model.held import has_attributes, tensors_held
from ..planner.plans import Arrangement
from .batches import autocast_now, in_train_mode
from .carrying import Carrier
from .foreseeing import Foreseer
from .homes import Homes
from .outside import inside_transform
from .wrapped import Wrapped

#: Kinds of batches, and needs of each kind, that are remembered; a user who evaluates after each epoch asks for the same again.
_MOST_KNOWN = 32

#: In the place of modules in train mode, of a forward that is to come: there is none then, whatever modules are in now.
AS_EVAL = "as eval"

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

_Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Batch:
    """shapes of its tensors; kind: which modules are in train mode, what autocast casts to, and what else is given that may
    change what a forward does, but for fractions. An object, as of a dataclass, is known by its class and the tensors that it
    holds, as in training."""

    shapes: _Shapes
    kind: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str | frozenset[int]) -> _Batch | None:
        """None where there is no tensor, or anything that a dry run might change, or that is no ordinary batch."""
        leaves = tree_leaves((args, kwargs))
        objects = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_PLAIN))]
        if not all(has_attributes(leaf) and _is_flat(leaf) for leaf in objects):
            return None
        tensors = [tensor for leaf in leaves for tensor in tensors_held(leaf)]
        plain = all(type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided for tensor in tensors)
        if not tensors or not plain:
            return None
        if inside_transform() or _get_current_dispatch_mode_stack():
            return None
        words = (leaf if isinstance(leaf, bool | int | str) else type(leaf) for leaf in leaves)
        return cls(tuple(tuple(tensor.shape) for tensor in tensors), (mode, autocast_now(), len(args), *kwargs, *words))

    def growth(self, known: _Shapes) -> float:
        """By how much a tensor is longer than a known one at most, in all directions together; infinite where they are of other
        kinds."""
        if [len(shape) for shape in self.shapes] != [len(shape) for shape in known]:
            return math.inf
        pairs = zip(self.shapes, known, strict=True)
        return max(math.prod(max(new / max(old, 1), 1.0) for new, old in zip(*pair, strict=True)) for pair in pairs)


def _is_flat(leaf: Any) -> bool:
    """Whether a copy of an object has nothing in common with it that a forward may change."""
    return all(isinstance(value, (torch.Tensor, *_PLAIN)) for value in vars(leaf).values())


@dataclass
class _Known:
    """Of one kind of batch: what the last ones that were foreseen need, in bytes. possible: whether dry runs can tell."""

    needs: dict[_Shapes, int] = field(default_factory=dict)
    possible: bool = True

    def note(self, batch: _Batch, need_bytes: int) -> None:
        """A batch was foreseen."""
        if len(self.needs) >= _MOST_KNOWN:
            self.needs.pop(next(iter(self.needs)))
        self.needs[batch.shapes] = need_bytes

    def most_bytes(self, batch: _Batch) -> float:
        """What a batch needs at most, by those that were foreseen; infinite where there is none."""
        if batch.shapes in self.needs:
            return self.needs[batch.shapes]
        return min((need * batch.growth(known) ** 2 for known, need in self.needs.items()), default=math.inf)


class Evaluation:
    """Of one session; called between two steps, on the thread that drives them."""

    def __init__(self, wrapped: Wrapped, homes: Homes, carrier: Carrier, foresees: Foreseer) -> None:
        self._wrapped, self._homes, self._carrier, self._foresees = wrapped, homes, carrier, foresees
        self._before: Arrangement | None = None  # of training, while there is another one
        self._emptied = False
        self._kinds: dict[tuple[Any, ...], _Known] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether the arrangement in use is none of training's. Before a plan is made anew for training, `end`."""
        return self._before is not None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See that there is room for a forward of this batch.

        Raises:
            BudgetError: there is none, not even with every chunk away, or not beside what is held. Nothing was changed.
            DiskError: a chunk could not be moved; likewise.
        """
        batch = _Batch.of(args, kwargs, in_train_mode(self._wrapped.model))
        if batch is None or self._has_room(self._known(batch).most_bytes(batch)):
            return
        before = self._homes.arrangement
        need_bytes = self._need_bytes(args, kwargs, batch, self.leave_room)
        if need_bytes is not None and (self._homes.arrangement is not before or not self._has_room(need_bytes)):
            self._change(self._carrier.with_room_beside_held(need_bytes))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See that a forward of this batch will have room in eval mode, as far as a dry run can tell. Between two steps.

        Raises:
            BudgetError: it will not.
            DiskError: a chunk could not be moved.
        """
        batch = _Batch.of(args, kwargs, AS_EVAL)
        try:
            need_bytes = self._need_bytes(args, kwargs, batch, self.leave_room) if batch is not None else None
        finally:
            self.end()
        if need_bytes is not None:
            self._carrier.with_room(need_bytes + SMALL_UNSEEN_BYTES)  # numbers that the program will hold then

    def need_within(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """What a forward of this batch holds at once, where a step is under way, for which nothing can move; 0: not known."""
        batch = _Batch.of(args, kwargs, in_train_mode(self._wrapped.model))
        return self._need_bytes(args, kwargs, batch, None) or 0 if batch is not None else 0

    def leave_room(self) -> bool:
        """Every chunk is away, whatever was foreseen. Returns whether that is new."""
        if self._emptied:
            return False
        self._change(self._carrier.emptied(), emptied=True)
        return True

    def end(self) -> None:
        """Training goes on, in its arrangement.

        Raises:
            BudgetError: what was made in the evaluation and is still there leaves it no room.
            DiskError: a chunk could not be moved.
        """
        if self._before is not None:
            self._carrier.carry_out(self._before)
            self._before, self._emptied = None, False

    def forget(self) -> None:
        """What was found is not to be relied on any more."""
        self._kinds.clear()

    def _known(self, batch: _Batch) -> _Known:
        if batch.kind not in self._kinds and len(self._kinds) >= _MOST_KNOWN:
            self._kinds.clear()
        return self._kinds.setdefault(batch.kind, _Known())

    def _has_room(self, need_bytes: float) -> bool:
        memory_bytes = self._wrapped.settings.memory_bytes
        return need_bytes <= memory_bytes and self._carrier.used_bytes(math.ceil(need_bytes)) + need_bytes <= memory_bytes

    def _need_bytes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: _Batch, make_room: Callable[[], object] | None
    ) -> int | None:
        """None where a dry run cannot tell: it is tried then. make_room: where a kernel had no memory to be measured in."""
        known = self._known(batch)
        if batch.shapes not in known.needs and known.possible:
            evaluates = batch.kind[0] == AS_EVAL
            try:
                found = self._foresees.forward_bytes(args, kwargs, evaluates=evaluates, make_room=make_room)
                known.note(batch, found + SMALL_UNSEEN_BYTES)
            except DryRunError:
                known.possible = False
        return known.needs.get(batch.shapes)

    def _change(self, arrangement: Arrangement, *, emptied: bool = False) -> None:
        self._before = self._before or self._homes.arrangement  # first: an interrupt may come while homes move
        self._emptied = False
        self._homes.rearrange(arrangement)
        self._emptied = emptied
