"""What a block was given, kept until its forward runs again: as it is, copied, or in the stash."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import _core
from ..model.strides import copies, storage_of

#: Containers that can be made again of anything.
_PLAIN = (list, tuple, dict, collections.OrderedDict, collections.defaultdict, collections.deque)


class Input:
    """A tensor among a block's inputs that is in the stash until the block is recomputed.

    view: how it lies over what is stashed, where it is a view of that.
    """

    __slots__ = ("hooks", "requires_grad", "saved", "view")

    def __init__(self, hooks: _core.SavedTensors, saved: object, tensor: torch.Tensor, base: torch.Tensor | None) -> None:
        self.hooks, self.saved, self.requires_grad = hooks, saved, tensor.requires_grad
        first = tensor.storage_offset() - (0 if base is None else base.storage_offset())
        self.view = None if base is None else (tensor.size(), tensor.stride(), first)

    def bring(self) -> torch.Tensor:
        found = self.hooks.unpack(self.saved).requires_grad_(self.requires_grad)
        if self.view is None:
            return found
        size, stride, first = self.view
        with torch.enable_grad():
            return found.as_strided(size, stride, found.storage_offset() + first)


def is_leaf(value: Any) -> bool:
    """Only plain containers and named tuples are looked into: they can be made again, whatever is put into them."""
    kind = type(value)
    return kind not in _PLAIN and not (kind.__bases__ == (tuple,) and hasattr(kind, "_fields"))


def versions_of(leaves: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
    """The tensors among them, and their versions; those made in inference mode have none."""
    return [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def stash_inputs(hooks: _core.SavedTensors, inputs: Any, views: bool, copied: bool) -> Any:
    """`inputs` with an Input for each tensor that the stash took; a tensor that occurs twice is one Input. views: those that are
    views will be views again, on which compiled code can depend. copied: they may be changed in place, so those that lie in one
    memory stay in it."""
    leaves, spec = tree_flatten(inputs, is_leaf=is_leaf)
    taken: dict[int, Any] = {}
    plain = {id(leaf): leaf for leaf in leaves if type(leaf) is torch.Tensor and not leaf.is_inference()}
    memory = collections.Counter(storage_of(leaf) for leaf in plain.values()) if copied else {}
    for leaf in leaves:
        if id(leaf) in plain and id(leaf) not in taken and memory.get(storage_of(leaf), 1) == 1:
            base = leaf._base if views else None
            taken[id(leaf)] = leaf
            if base is None or (type(base) is torch.Tensor and base.dtype == leaf.dtype and base.numel() == leaf.numel()):
                saved = hooks.pack(leaf if base is None else base)
                if getattr(saved, "stashed", False):
                    taken[id(leaf)] = Input(hooks, saved, leaf, base)
    return tree_unflatten([taken.get(id(leaf), leaf) for leaf in leaves], spec)


def bring_inputs(inputs: Any) -> Any:
    """They, with the tensors that were in the stash, in containers of their own."""
    args, kwargs = inputs
    if not any(type(value) is Input or not is_leaf(value) for value in (*args, *kwargs.values())):
        return inputs  # a call puts what it is given in a tuple and a dict of its own
    leaves, spec = tree_flatten(inputs, is_leaf=is_leaf)
    found = {id(leaf): leaf.bring() for leaf in {id(leaf): leaf for leaf in leaves if type(leaf) is Input}.values()}
    return tree_unflatten([found.get(id(leaf), leaf) for leaf in leaves], spec)


def copied_inputs(inputs: Any, views: bool) -> Any:
    """`inputs` with a copy of each plain tensor, or of each that is no view; one that occurs twice is copied once."""
    leaves, spec = tree_flatten(inputs)
    plain = [leaf for leaf in leaves if type(leaf) is torch.Tensor and not leaf.is_inference()]
    with torch.no_grad():
        made = copies(leaf for leaf in plain if views or leaf._base is None)
    for leaf in plain:
        if id(leaf) in made:
            made[id(leaf)].requires_grad_(leaf.requires_grad)
    return tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)


def aliases(inputs: Any) -> Any:
    """`inputs` such that hooks which are put on their tensors are nobody's: those that a block's forward puts on what it is given
    are there already, and would run twice. Each lies as its tensor does, also where a side is 1, and what is given twice is one
    still: a block may ask which are the same. Called where gradients are recorded."""
    leaves, spec = tree_flatten(inputs)
    plain = [leaf for leaf in leaves if type(leaf) is torch.Tensor and leaf.requires_grad and leaf.layout is torch.strided]
    made = {id(leaf): torch.ops.aten.alias.default(leaf) for leaf in plain}
    return tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)


def no_leaves(inputs: Any) -> Any:
    """`inputs` such that their tensors may be changed in place: autograd allows that to results of operations alone."""
    leaves, spec = tree_flatten(inputs)
    plain = [leaf for leaf in leaves if type(leaf) is torch.Tensor and not leaf.is_inference()]
    trained = {storage_of(leaf) for leaf in plain if leaf.requires_grad}
    made = copies(leaf for leaf in plain if storage_of(leaf) in trained)
    return tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)
