"""Values that a dry run knows: what follows from the whole numbers of a batch alone, its ids, masks and labels.

Fake tensors have no data, and a model that asks for some could not be foreseen: whether labels are in range, how many tokens a
mask leaves, where a sentence ends. So operations on whole numbers that are known run on them beside the fake ones. What is asked
is answered from there, and an output whose size hangs on values has the size that it has. What comes of the batch's other numbers
or of parameters is never known, nor of chance, but where one number is drawn; and a batch without data knows nothing.

Which of several a program chooses by computed numbers (a router its experts, by topk or argmax) is not known either, but how many
choose what hardly changes a step's memory. So places are made up, some of them chosen more often, and followed like known ones.
No computed number is taken to be infinite or none at all, for which programs look before they raise.

The first batch of its shapes stands for all: one that selects more of its tokens may need more than was foreseen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ..base.counting import uncounted
from .answers import Answer, Replies, hangs_on_values, is_question, masks_among
from .workspace import tensors_in

#: Of the largest tensor whose values are followed, one that is the same along a dimension counted without it.
MOST_NUMBERS = 1 << 18

#: A single random number, drawn to decide whether a layer is left out: below what share of them it is. None is, then.
ALMOST_ONE = 0.999

#: Answers that a program asks for in a run; what asks for more hangs on one that is not right, in a loop that has no end.
MOST_ANSWERS = 1 << 16

_aten = torch.ops.aten

#: What chooses along a dimension, or along the last one: the number of the output that has the places.
_CHOOSING = {
    _aten.topk.default: 1, _aten.max.dim: 1, _aten.min.dim: 1, _aten.sort.default: 1, _aten.sort.stable: 1,
    _aten.argmax.default: 0, _aten.argmin.default: 0, _aten.multinomial.default: 0,
}  # fmt: skip

#: What gives the same numbers, element by element.
_COPYING = (_aten._to_copy.default, _aten.clone.default)

#: What is true of no number that can be computed with.
_OF_NONE = (_aten.isnan.default, _aten.isinf.default)


def _is_of_all(operation: Any, args: Sequence[Any]) -> bool:
    """What is true of each number that can be computed with: it is itself, and not infinite (torch.isfinite asks so)."""
    if operation is _aten.eq.Tensor:
        return args[0] is args[1]
    return bool(operation is _aten.ne.Scalar and isinstance(args[1], float) and math.isinf(args[1]))


def _is_whole(kind: torch.dtype) -> bool:
    return not kind.is_floating_point and not kind.is_complex


def _small(tensors: Iterable[torch.Tensor]) -> bool:
    return all(tensor.numel() <= MOST_NUMBERS for tensor in tensors)


class KnownValues:
    """Of one run on fake tensors, inside the fake mode.

    Args:
        given: fake tensors and those that they stand for.
        replies: what a forward with data was answered where values are not known; with any no choices are made up.
    """

    def __init__(self, given: Iterable[tuple[torch.Tensor, torch.Tensor]] = (), replies: Replies | None = None) -> None:
        self.replies = Replies() if replies is None else replies
        self._of = WeakIdKeyDictionary()
        self._answers = 0
        for fake, real in given:
            self.know(fake, real)

    def know(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """What the fake tensor stands for, where that is followed."""
        if _is_whole(real.dtype) and real.layout == torch.strided and _small([real]) and _has_data(real):
            self._of[fake] = _really(functools.partial(_copy, real))

    def call(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        """The result of an operation on fake tensors. run: what calls it on them."""
        inputs = list(tensors_in([*args, *kwargs.values()]))
        if operation is _aten.rand.default and math.prod(args[0]) == 1:
            result = run(operation, args, kwargs)
            self._of[result] = _really(lambda: torch.full(args[0], ALMOST_ONE, dtype=result.dtype))
            return result
        reply = self.replies.take(operation) if self.replies and is_question(operation, args) else None
        if torch.Tag.nondeterministic_seeded in operation.tags or not self._may_know(operation, inputs):
            masks = masks_among(operation, args)
            if reply is not None and not masks:
                return tree_map_only(Answer, self._made, reply)
            args = self._counted(args, masks, reply or ()) if masks else args
            result = run(operation, args, kwargs)
            if operation._schema.is_mutable:
                self._forget(operation, args, kwargs)
            if operation in _CHOOSING and not self.replies:
                self._make_up(operation, args, kwargs, result)
            if operation in _OF_NONE or _is_of_all(operation, args):
                answer = operation not in _OF_NONE
                self._of[result] = _really(lambda: torch.tensor(answer).expand(result.shape))
            return result
        if hangs_on_values(operation):
            self._answers += 1
            if self._answers > MOST_ANSWERS:
                return run(operation, args, kwargs)
            real = self._run(operation, args, kwargs)
            result = tree_map_only(torch.Tensor, _stand_in, real)
        else:
            result = run(operation, args, kwargs)
            real = self._follow(operation, args, kwargs, result)
            if operation._schema.is_mutable:
                self._forget(operation, args, kwargs, narrow_alone=real is not None)
            if real is None:
                return result
        for fake, value in zip(tensors_in([result]), tensors_in([real]), strict=True):
            self._of[fake] = value
        return result

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What is known of a tensor."""
        if type(tensor) is torch.Tensor:  # a number that a program wrote
            return tensor if _small([tensor]) else None
        found: torch.Tensor | None = self._of.get(tensor)
        if found is None and isinstance(tensor, FakeTensor):
            found = tensor.constant
        return found

    def ask(self, tensor: torch.Tensor, question: Callable[[torch.Tensor], int]) -> int | None:
        """A number that follows from a tensor's values; None where they are not known."""
        value = self.value(tensor)
        return None if value is None else _really(lambda: question(value))

    def as_array(self, tensor: torch.Tensor, *, force: bool = False) -> Any:
        """What a tensor is for NumPy.

        Raises:
            RuntimeError: it is not known.
        """
        reply, value = self.replies.take_array(), self.value(tensor)
        if value is not None:
            return _really(lambda: value.numpy(force=force).copy())
        return torch.Tensor.numpy(tensor, force=force) if reply is None else reply

    def _made(self, answer: Answer) -> torch.Tensor:
        """A fake tensor for one that was an answer."""
        made = torch.empty_strided(answer.shape, answer.stride, dtype=answer.dtype)
        if answer.values is not None and _small([answer.values]):
            self._of[made] = _really(answer.values.clone)  # what the program writes to is its own
        return made

    def _may_know(self, operation: Any, inputs: Sequence[torch.Tensor]) -> bool:
        if inputs:
            return all(self.value(tensor) is not None for tensor in inputs)
        return any(argument.name == "dtype" for argument in operation._schema.arguments) and "empty" not in operation._schema.name

    def _make_up(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Places for a choice by numbers that are not known."""
        places = [result] if isinstance(result, torch.Tensor) else list(result)
        chosen, chooser = places[_CHOOSING[operation]], args[0]
        words = operation._schema.arguments
        named = {word.name: word.default_value for word in words} | {w.name: given for w, given in zip(words, args, strict=False)}
        dim = (named | dict(kwargs)).get("dim", -1)
        if chooser.dim() and dim is not None and _small([chosen]):
            self._of[chosen] = _really(lambda: _uneven(chosen, chooser, dim))

    def _run(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given, named = tree_map_only(torch.Tensor, self.value, (tuple(args), dict(kwargs)))
        return _really(lambda: operation(*given, **named))

    def _follow(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """What an operation makes of values that are known; None: it is too large, or it fails on another device, say. A mask of
        sentences, large as it is, is the same for all tokens that look: it is followed as one that was expanded."""
        single = isinstance(result, torch.Tensor) and not operation._schema.is_mutable
        try:
            if operation.is_view or _small(tensors_in([result])):
                real = self._run(operation, args, kwargs)
                wide = any(map(_is_wide, tensors_in(tree_map_only(torch.Tensor, self.value, list(args)))))
                return tree_map_only(torch.Tensor, _alone, real) if wide and operation.is_view else real
            if single and (torch.Tag.pointwise in operation.tags or operation in _COPYING):
                given, named = tree_map_only(torch.Tensor, self._narrow, (tuple(args), dict(kwargs)))
                real = _really(lambda: operation(*given, **named))
                return _really(lambda: real.expand(result.shape)) if _small([real]) else None
        except Exception:
            return None
        return None

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What is known of a tensor, once where it is the same along a dimension."""
        value = self.value(tensor)
        return None if value is None else _really(functools.partial(_narrow, value))

    def _forget(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], narrow_alone: bool = False) -> None:
        """What an operation wrote to is not known any more. narrow_alone: but what is no wider than its memory, which was written
        to as well."""
        written = [
            value for argument, value in zip(operation._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]  # fmt: skip
        storages = {tensor.untyped_storage()._cdata for tensor in tensors_in([written, kwargs.get("out")])}
        for tensor in [tensor for tensor in self._of if tensor.untyped_storage()._cdata in storages]:
            if not narrow_alone or _is_wide(self._of[tensor]):
                del self._of[tensor]

    def _counted(self, args: Sequence[Any], masks: Sequence[torch.Tensor], answered: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Masks that are known, by which an operation picks from what is not, become the places that they leave. answered: the
        masks that a forward with data had there."""
        places: list[Any] = []
        known_as = dict(zip(map(id, masks), answered, strict=False))
        for index in args[1]:
            known = self.value(index) if any(index is mask for mask in masks) else None
            if known is None and (answer := known_as.get(id(index))) is not None and answer.shape == index.shape:
                known = self._of[index] = _really(answer.clone)  # backward picks by it as well
            if known is None:
                places.append(index)
            else:
                places += map(_stand_in, _really(functools.partial(torch.nonzero, known, as_tuple=True)))
        return [args[0], places, *args[2:]]


def _is_wide(value: Any) -> bool:
    """Whether several of its numbers are one in memory."""
    return isinstance(value, torch.Tensor) and any(
        n > 1 and step == 0 for n, step in zip(value.shape, value.stride(), strict=True)
    )


def _alone(value: torch.Tensor) -> torch.Tensor:
    """A part of what is wide, which may be written to: with memory of its own, where it is small."""
    return _really(value.clone) if _small([value]) else value


def _narrow(value: torch.Tensor) -> torch.Tensor:
    for dim in range(value.dim()):
        if value.stride(dim) == 0:
            value = value.narrow(dim, 0, min(value.shape[dim], 1))
    for dim in range(value.dim()):
        if value.shape[dim] > 1 and bool((value == value.narrow(dim, 0, 1)).all()):
            value = value.narrow(dim, 0, 1)
    return value


def _has_data(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().cpu()


def _really(make: Callable[[], Any]) -> Any:
    """What `make` makes has data, and counts in no budget."""
    with unset_fake_temporarily(), uncounted():
        return make()


def _uneven(chosen: torch.Tensor, chooser: torch.Tensor, dim: int) -> torch.Tensor:
    """Places along a dimension of the chooser, different ones of a row, the first chosen about twice as often as the middle and
    the last hardly ever: what a step computes for one place after the other is rather too much than too little."""
    among = chooser.shape[dim]
    in_row = chosen.shape[dim] if chosen.dim() == chooser.dim() else 1
    n_rows = chosen.numel() // max(in_row, 1)
    share = (torch.arange(n_rows) + 0.5) / max(n_rows, 1)
    first = (among * (1 - (1 - share).sqrt())).long()
    rows = (first[:, None] + torch.arange(in_row)) % among
    if chosen.dim() == chooser.dim():
        last = chosen.movedim(dim, -1).shape
        rows = rows.reshape(last).movedim(-1, dim)
    return torch.empty_strided(chosen.shape, chosen.stride(), dtype=chosen.dtype).copy_(rows.reshape(chosen.shape))


def _stand_in(real: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
