"""What a block's forward may change beside its output: buffers, attributes, and its own inputs.

A block that is recomputed must see what its forward saw (the training flag, running means, counters, lists, generators, its
parameters, which torch.func.functional_call gives it others for, what is to be trained, hooks on its modules, inputs as they
were), and leave what there is now: no mean is updated twice, no call counted twice. So it runs again on copies of the tensors
that forward changed in place, and with the attributes that forward began with, also where others set them for the forward alone;
afterwards those of now stand again. Of attributes that are containers the entries are kept, down to containers in them, not what
other objects hold. Objects that forward is given, as a state that layers hand on, are treated as the block is: it runs again on
copies of them.
"""

from __future__ import annotations

import collections
import copy
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from .held import has_attributes
from .parameters import DisableTorchFunction
from .randomness import generators, put_states

_SCALARS = frozenset((bool, int, float, str, type(None)))
_DICTS = frozenset((dict, collections.OrderedDict, collections.defaultdict, collections.Counter))
_CONTAINERS = _DICTS | {list, set, collections.deque}
#: How deep containers in containers are looked for: some hold themselves.
_DEPTH = 8
#: What every module has; containers among it are torch's own.
_TORCHS = frozenset(vars(nn.Module()))

#: Where a module has the hooks that run with its forward.
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip

#: Larger tensors are not copied before each forward. One that forward changes in place all the same is found by its version, and
#: copied from then on.
COPIED_BYTES = 1 << 20

#: Stands for an attribute that there is none of.
_NOTHING = object()


class _Tensor:
    """A buffer, or an attribute, as forward found it; store: the dict that has it.

    held: it itself, until forward is over; then what a recomputation gets, None where that is the copy. before: the copy, where
    forward may have written to it.
    """

    __slots__ = ("before", "compared", "held", "leaf", "store", "trained", "version")

    def __init__(self, store: dict[str, Any], leaf: str, held: torch.Tensor, copied: bool, compared: bool) -> None:
        self.store, self.leaf, self.trained = store, leaf, held.requires_grad
        self.held: torch.Tensor | None = held
        self.version = None if held.is_inference() else held._version
        self.compared = compared and held.layout is torch.strided
        self.before: torch.Tensor | None = held.detach().clone() if copied else None

    def settle(self) -> bool:
        """Forward is over; whether there is no copy of what it wrote to.

        Kernels of batch norm write running means past their version, so values are looked at where there is a copy; where
        looking would wait for a device, what has a copy may have changed.
        """
        assert self.held is not None
        if self._is_written() or not (self.before is None or (self.compared and torch.equal(self.before, self.held))):
            self.held = None
            return self.before is None
        self.before = None
        self.held = without_graph(self.held)
        return False

    def _is_written(self) -> bool:
        return self.version is not None and self.held is not None and self.held._version != self.version

    def begun(self) -> torch.Tensor:
        """As forward found it.

        Raises:
            RuntimeError: forward left it alone, and it was changed in place since.
        """
        if self._is_written():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a block is "
                f"recomputed, and its tensor {self.leaf} was changed after its forward began; wrap with block_modes that keep "
                "this block, or put another tensor in its place"
            )
        if self.before is None:
            assert self.held is not None
            return self.held
        with torch.enable_grad():  # which may be changed in place again: autograd does not allow that to a leaf
            return self.before.requires_grad_().clone() if self.trained else self.before


class _Attributes:
    """Of one module, what forward began with: plain values, copies of containers."""

    __slots__ = ("begun", "keys", "own")

    def __init__(self, module: nn.Module, others: list[Any]) -> None:
        """others: gets objects of other classes."""
        self.own = own = vars(module)
        self.keys = frozenset(own)
        self.begun: dict[str, Any] = {"training": module.training}
        for key, value in own.items():
            if key in _TORCHS:
                continue
            kind = type(value)
            if kind in _SCALARS:
                self.begun[key] = value
            elif kind in _CONTAINERS or isinstance(value, tuple):
                self.begun[key] = _copied(value)
            elif kind is not torch.Tensor:
                others.append(value)

    def put(self) -> None:
        """They stand again, containers as new copies."""
        for key in self.own.keys() - self.keys:
            del self.own[key]
        self.own.update(self.begun)


class ModuleState:
    """Taken before a block's forward; `settle` after it keeps what a recomputation needs."""

    def __init__(
        self, block: nn.Module, large: set[str], others: list[Any], objects: Iterable[Any] = (), compared: bool = True
    ) -> None:
        """large: "MODULE.NAME" of the large tensors that forward is known to change in place; `settle` adds to it. others: what
        forward may draw from beside the block's own, if these are generators; gets what the block has. objects: copies of those
        that forward is given, for its recomputation. compared: values may be looked at; else copies stay until then."""
        self.large = large
        self.attributes: list[_Attributes] = []
        self.tensors: list[tuple[str, _Tensor]] = []
        #: Each module's parameters, buffers and hooks: what they were.
        self.registered: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self.trained: list[tuple[nn.Parameter, bool]] = []
        self.lost = ""  # a tensor that was changed in place and of which there is no copy
        with torch.no_grad(), DisableTorchFunction():
            for name, module in block.named_modules():
                if own := module._parameters:
                    self.registered.append((own, own.copy()))
                    self.trained.extend([(p, p.requires_grad) for p in own.values() if p is not None])
                if own := module._buffers:
                    self.registered.append((own, own.copy()))
                self.registered += _hooks(module)
                self.attributes.append(_Attributes(module, others))
                for store in (module._buffers, vars(module)):
                    for leaf, held in store.items():
                        if type(held) is torch.Tensor or (store is module._buffers and held is not None):
                            path = f"{name}.{leaf}" if name else leaf
                            copied = path in large or _is_small(held)
                            self.tensors.append((path, _Tensor(store, leaf, held, copied, compared)))
            for made in objects:
                self._take_trained(made, compared)
            self.generators = generators(others)

    def _take_trained(self, made: Any, compared: bool) -> None:
        """What is to be differentiated through is put into a copy of an object when forward runs again. It is large and rarely
        changed in place: copied where it is known to be. Other tensors of objects are what they are by then."""
        store = vars(made)
        for leaf, held in list(store.items()):
            if type(held) is torch.Tensor and held.requires_grad:
                path = f"{type(made).__name__}.{leaf}"
                self.tensors.append((path, _Tensor(store, leaf, held, path in self.large, compared)))
                store[leaf] = None

    def settle(self) -> None:
        """Forward is over: copies of tensors that it did not write to go."""
        with torch.no_grad(), DisableTorchFunction():
            for path, tensor in self.tensors:
                if tensor.settle():
                    self.lost = path
                    self.large.add(path)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the block is as its forward found it; what is changed there is forgotten.

        Raises:
            RuntimeError: forward changed a tensor in place of which there is no copy, or somebody did after it.
        """
        if self.lost:
            raise RuntimeError(
                f"a recomputed block changed its tensor {self.lost} in forward for the first time, so what forward saw is gone: "
                f"skip this batch (the next ones keep it), or wrap with block_modes that keep this block"
            )
        begun = [(tensor.store, tensor.leaf, tensor.begun()) for _, tensor in self.tensors]
        stores = [one.own for one in self.attributes] + [store for store, _ in self.registered]
        now = [(store, store.copy()) for store in stores]
        drawn = generators(one for one, _ in self.generators)
        switched: list[tuple[nn.Parameter, bool]] = []
        try:
            for one in self.attributes:
                one.put()
            put_states(self.generators)
            for store, seen in self.registered:
                _put(store, seen)
            for store, leaf, tensor in begun:
                store[leaf] = tensor
            with DisableTorchFunction():
                switched = [(p, p.requires_grad) for p, trained in self.trained if p.requires_grad != trained]
                for p, trained in switched:
                    p.requires_grad_(not trained)
            yield
        finally:
            with DisableTorchFunction():
                for p, trained in switched:
                    p.requires_grad_(trained)
            put_states(drawn)
            for store, entries in now:
                _put(store, entries)


class Beginning:
    """A block as its forward found it, for a trial that recomputes: without copies of tensors, so what was changed in place stays
    changed. Taken before the forward; `settle` after it.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = list(block.modules())
        self.hooks = [one for module in modules for one in _hooks(module)]
        self.attributes = [_Attributes(module, []) for module in modules]
        self.stores = [store for module in modules for store in (vars(module), module._buffers)]
        self.tensors = [
            (store, name, held) for store in self.stores for name, held in store.items() if isinstance(held, torch.Tensor)
        ]

    def settle(self) -> list[torch.Tensor]:
        """Forward is over; the tensors that it put others in the place of."""
        replaced = [held for store, name, held in self.tensors if store.get(name) is not held]
        self.tensors = [(store, name, without_graph(held)) for store, name, held in self.tensors]
        return replaced

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, for once, the block is as its forward found it; what is changed there is forgotten."""
        now = [(store, store.copy()) for store in (*self.stores, *(store for store, _ in self.hooks))]
        try:
            for store, seen in self.hooks:
                _put(store, seen)
            for one in self.attributes:
                one.put()
            for store, name, held in self.tensors:
                store[name] = held
            self.attributes, self.tensors, self.hooks = [], [], []
            yield
        finally:
            for store, entries in now:
                _put(store, entries)


def objects_as_now(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """A forward's arguments with a copy of each object among them, and the copies: with attributes, and containers in them, of
    their own. Those that cannot be copied stay what they are."""
    made: dict[int, Any] = {}
    for leaf in leaves:
        if id(leaf) not in made and has_attributes(leaf):
            with suppress(Exception), torch.no_grad(), DisableTorchFunction():
                other = copy.copy(leaf)
                if other is not leaf and type(other) is type(leaf):
                    copied = {name: _copied(value) for name, value in vars(other).items() if type(value) is not torch.Tensor}
                    vars(other).update(copied)
                    made[id(leaf)] = other
    return [made.get(id(leaf), leaf) for leaf in leaves], list(made.values())


def _hooks(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The stores of its hooks, with what is in them now."""
    own = vars(module)
    return [(store, store.copy() if store else {}) for name in _HOOKS if (store := own.get(name)) is not None]


def _put(store: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """`store` has these entries, and no others."""
    if not store and not entries:
        return
    same = operator.is_
    if len(store) == len(entries) and all(map(same, store, entries)) and all(map(same, store.values(), entries.values())):
        return
    for key in store.keys() - entries.keys():
        del store[key]
    store.update(entries)
    if isinstance(store, collections.OrderedDict):  # hooks, which run in their order
        for key in entries:
            store.move_to_end(key)


def _is_small(held: torch.Tensor) -> bool:
    """Whether it is copied before each forward."""
    return held.layout is torch.strided and not (held.is_inference() or held.is_nested) and held.nbytes <= COPIED_BYTES


def without_graph(held: torch.Tensor) -> torch.Tensor:
    """A tensor for a recomputation, whose result nobody differentiates through it: its graph would hold the steps before."""
    return held if held.grad_fn is None else held.detach().requires_grad_()


def _copied(value: Any, depth: int = _DEPTH) -> Any:
    """A container as it is now, with the containers in it; of a tensor that was computed no graph; anything else as it is."""
    kind = type(value)
    if kind is torch.Tensor:
        return without_graph(value)
    if isinstance(value, tuple) and depth:
        entries = [_copied(entry, depth - 1) for entry in value]
        if all(map(operator.is_, entries, value)):
            return value
        return kind(entries) if kind is tuple else kind._make(entries) if hasattr(kind, "_make") else value
    if kind not in _CONTAINERS:
        return value
    made = value.copy()
    if depth and kind is not set:
        plain = _SCALARS.issuperset(map(type, made.values() if kind in _DICTS else made))
        for place, entry in () if plain else list(made.items() if kind in _DICTS else enumerate(made)):
            made[place] = _copied(entry, depth - 1)
    return made
