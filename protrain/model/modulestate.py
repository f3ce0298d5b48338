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
import itertools
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .. import _core
from ..base.entries import put_entries
from .held import Attributes, has_attributes
from .parameters import ChunkTensor, DisableTorchFunction
from .randomness import generators, put_states

_SCALARS = frozenset((bool, int, float, str, type(None)))
_DICTS = frozenset((dict, collections.OrderedDict, collections.defaultdict, collections.Counter))
_TENSORS = frozenset((torch.Tensor, ChunkTensor))
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

_Entries = tuple[dict[Any, Any], dict[Any, Any]]  # a store, and what stood in it


class _Tensor:
    """A buffer, or an attribute, as forward found it; store: what has it.

    held: it itself, until forward is over; then what a recomputation gets, None where that is the copy. before: the copy, where
    forward may have written to it. seen: the checksum of one number for each channel, to which forward did not write: a batch
    norm that runs later may, past its version.
    """

    __slots__ = ("before", "compared", "held", "leaf", "of_channels", "seen", "store", "trained", "version")

    def __init__(self, store: dict[str, Any] | Attributes, leaf: str, held: torch.Tensor, copied: bool, compared: bool) -> None:
        self.store, self.leaf, self.trained = store, leaf, held.requires_grad
        self.held: torch.Tensor | None = held
        self.version = None if held.is_inference() else held._version
        self.compared = compared and held.layout is torch.strided
        self.of_channels = self.compared and type(held) is torch.Tensor and held.ndim == 1 and held.is_floating_point()
        self.before: torch.Tensor | None = held.detach().clone() if copied else None
        self.seen: int | None = None

    def settle(self) -> bool:
        """Forward is over; whether there is no copy of what it wrote to.

        Kernels of batch norm write running means past their version, so values are looked at where there is a copy; where
        looking would wait for a device, what has a copy may have changed.
        """
        assert self.held is not None
        if self._is_written() or not (self.before is None or (self.compared and torch.equal(self.before, self.held))):
            self.held = None
            return self.before is None
        self.seen = _sum_of(self.held) if self.of_channels and self.before is not None else None
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
        later = self.seen is not None and self.held is not None and _sum_of(self.held) != self.seen
        if later or (self.before is None and self._is_written()):
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
    """Of one module, what forward began with: values as they are, copies of containers. tensors: names of those it has; objects:
    of what may hold others."""

    __slots__ = ("begun", "containers", "keys", "objects", "own", "tensors")

    def __init__(self, module: nn.Module, others: list[Any]) -> None:
        """others: gets objects of other classes."""
        self.own = own = vars(module)
        self.keys = tuple(own)
        self.tensors: list[str] = []
        self.containers: list[str] = []
        self.objects: list[str] = []
        self.begun: dict[str, Any] = {"training": module.training}
        for key in itertools.filterfalse(_TORCHS.__contains__, self.keys):
            value = own[key]
            kind = type(value)
            if kind in _SCALARS or kind is FunctionType:
                self.begun[key] = value
            elif kind is torch.Tensor:
                self.tensors.append(key)
            elif kind in _CONTAINERS or isinstance(value, tuple):
                self.begun[key] = _copied(value)
                self.containers.append(key)
            else:
                self.begun[key] = value  # it itself: what it holds is its own
                self.objects.append(key)
                others.append(value)

    def settle(self) -> None:
        """Forward is over: objects go in which it left what it computed. They would hold its graph, and that, by the tensors it
        saved, them."""
        for key in self.objects:
            value = self.begun[key]
            held = getattr(value, "__dict__", {}).values()
            if _TENSORS.isdisjoint(map(type, held)) and not isinstance(value, torch.Tensor):
                continue
            if any(getattr(one, "grad_fn", None) is not None for one in (value, *held)):
                del self.begun[key]

    def put(self) -> None:
        """They stand again, containers as new copies: what runs then may fail, and run again."""
        if tuple(self.own) != self.keys:
            for key in self.own.keys() - frozenset(self.keys):
                del self.own[key]
        self.own.update(self.begun)
        for key in self.containers:
            self.own[key] = _copied(self.begun[key])


class _Hooks:
    """Those on some modules, which mostly have none."""

    __slots__ = ("entries", "modules")

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.entries: list[_Entries] = [(store, store.copy()) for store in self._stores()]

    def _stores(self) -> list[dict[Any, Any]]:
        """Of modules that have any now."""
        owns = [own for own in map(vars, self.modules) if any(map(own.get, _HOOKS))]
        return [store for own in owns for store in map(own.get, _HOOKS) if store is not None]

    def put(self) -> None:
        """They stand again, and no others."""
        known = {id(store) for store, _ in self.entries}
        _put([(store, {}) for store in self._stores() if id(store) not in known])
        _put(self.entries)


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
        #: Each module's parameters, buffers and modules: what they were.
        self.registered: list[_Entries] = []
        named = list(block.named_modules())
        self.modules = [module for _, module in named]
        self.hooks = _Hooks(self.modules)
        self.trained: list[tuple[nn.Parameter, bool]] = []
        self.lost = ""  # a tensor that was changed in place and of which there is no copy
        self.tried = False  # a recomputation has begun, which may have changed the copies
        with torch.no_grad(), DisableTorchFunction():
            for name, module in named:
                parameters, buffers, modules = module._parameters, module._buffers, module._modules
                self.registered.append((parameters, parameters.copy()))
                self.registered.append((buffers, dict.fromkeys(buffers)))  # `tensors` has what they were, without graphs
                self.registered.append((modules, modules.copy()))
                self.trained.extend([(p, p.requires_grad) for p in parameters.values() if p is not None])
                attributes = _Attributes(module, others)
                self.attributes.append(attributes)
                found = [(buffers, leaf, held) for leaf, held in buffers.items() if held is not None]
                found += [(attributes.own, leaf, attributes.own[leaf]) for leaf in attributes.tensors]
                for store, leaf, held in found:
                    path = f"{name}.{leaf}" if name else leaf
                    copied = path in large or _is_small(held)
                    self.tensors.append((path, _Tensor(store, leaf, held, copied, compared)))
            for made in objects:
                self._take_trained(made, compared)
            self.generators = generators(others)

    def _take_trained(self, made: Any, compared: bool) -> None:
        """What is to be differentiated through is put into a copy of an object when forward runs again. It is large and rarely
        changed in place: copied where it is known to be. Other tensors of objects are what they are by then."""
        store = Attributes(made)
        for leaf, held in store.items():
            if type(held) is torch.Tensor and held.requires_grad:
                path = f"{type(made).__name__}.{leaf}"
                self.tensors.append((path, _Tensor(store, leaf, held, path in self.large, compared)))
                store[leaf] = None

    def settle(self) -> None:
        """Forward is over: copies of tensors that it did not write to go."""
        with torch.no_grad(), DisableTorchFunction():
            for one in self.attributes:
                one.settle()
            for path, tensor in self.tensors:
                if tensor.settle():
                    self.lost = path
                    self.large.add(path)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the block is as its forward found it; what is changed there is forgotten.

        Raises:
            RuntimeError: forward changed a tensor in place of which there is no copy, or somebody did after it, or a
                recomputation that failed.
        """
        if self.lost:
            raise RuntimeError(
                f"a recomputed block changed its tensor {self.lost} in forward for the first time, so what forward saw is gone: "
                f"skip this batch (the next ones keep it), or wrap with block_modes that keep this block"
            )
        if self.tried and (changed := next((path for path, tensor in self.tensors if tensor.before is not None), "")):
            raise RuntimeError(
                f"a recomputed block changes its tensor {changed} in forward, and its recomputation failed before: what it saw "
                "is gone: run forward again, or wrap with block_modes that keep this block"
            )
        begun = [(tensor.store, tensor.leaf, tensor.begun()) for _, tensor in self.tensors]
        self.tried = True
        stores = [one.own for one in self.attributes] + [store for store, _ in self.registered]
        now, hooks = [(store, store.copy()) for store in stores], _Hooks(self.modules)
        drawn = generators(one for one, _ in self.generators)
        switched: list[tuple[nn.Parameter, bool]] = []
        with DisableTorchFunction():
            own_hooks = [(p, _hooks_of(p)) for p, _ in self.trained]
        try:
            for one in self.attributes:
                one.put()
            put_states(self.generators)
            _put(self.registered)
            self.hooks.put()
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
                for p, known in own_hooks:
                    if _hooks_of(p) != known:  # forward had put them on
                        _drop_hooks(p, known)
            put_states(drawn)
            _put(now)
            hooks.put()


class Beginning:
    """A block as its forward found it, for a trial that recomputes: without copies of tensors, so what was changed in place stays
    changed. Taken before the forward; `settle` after it.
    """

    def __init__(self, block: nn.Module) -> None:
        self.modules = list(block.modules())
        self.hooks = _Hooks(self.modules)
        others: list[Any] = []
        self.attributes = [_Attributes(module, others) for module in self.modules]
        self.generators = generators(others)
        self.stores = [store for module in self.modules for store in (vars(module), module._buffers)]
        self.tensors = [
            (store, name, held) for store in self.stores for name, held in store.items() if isinstance(held, torch.Tensor)
        ]

    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """What is copied before a forward that is to be recomputed: each tensor, one as large, and its version now."""
        small = [held for _, _, held in self.tensors if _is_small(held)]
        return [(held, torch.empty_like(held), held._version) for held in small]

    def settle(self) -> list[torch.Tensor]:
        """Forward is over; the tensors that it put others in the place of."""
        replaced = [held for store, name, held in self.tensors if store.get(name) is not held]
        self.tensors = [(store, name, without_graph(held)) for store, name, held in self.tensors]
        return replaced

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, for once, the block is as its forward found it; what is changed there is forgotten."""
        now, hooks = [(store, store.copy()) for store in self.stores], _Hooks(self.modules)
        drawn = generators(one for one, _ in self.generators)
        try:
            self.hooks.put()
            for one in self.attributes:
                one.put()
            put_states(self.generators)
            for store, name, held in self.tensors:
                store[name] = held
            self.attributes, self.tensors = [], []
            yield
        finally:
            put_states(drawn)
            _put(now)
            hooks.put()


def objects_as_now(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """A forward's arguments with a copy of each object and set among them, and the objects' copies: with attributes, and
    containers in them, of their own. Those that cannot be copied stay what they are."""
    made: dict[int, Any] = {}
    sets: dict[int, Any] = {}
    for leaf in leaves:
        if type(leaf) is set:
            sets.setdefault(id(leaf), leaf.copy())
        elif id(leaf) not in made and has_attributes(leaf, slots=True):
            with suppress(Exception), torch.no_grad(), DisableTorchFunction():
                other = copy.copy(leaf)
                if other is not leaf and type(other) is type(leaf):
                    attributes = Attributes(other)
                    for name, value in attributes.items():
                        if type(value) is not torch.Tensor and (copied := _copied(value)) is not value:
                            attributes[name] = copied
                    made[id(leaf)] = other
    known = made | sets
    return [known.get(id(leaf), leaf) for leaf in leaves], list(made.values())


def _hooks_of(p: nn.Parameter) -> tuple[Any, ...]:
    """Keys of the hooks on its gradient, and of those behind that."""
    return (*(p._backward_hooks or ()), *(p._post_accumulate_grad_hooks or ()))


def _drop_hooks(p: nn.Parameter, known: tuple[Any, ...]) -> None:
    """Others than these go."""
    for store in (p._backward_hooks, p._post_accumulate_grad_hooks):
        if store:
            for key in store.keys() - set(known):
                del store[key]


def _put(stores: list[_Entries]) -> None:
    for store, entries in stores:
        put_entries(store, entries)


def _is_small(held: torch.Tensor) -> bool:
    """Whether it is copied before each forward."""
    return held.layout is torch.strided and not (held.is_inference() or held.is_nested) and held.nbytes <= COPIED_BYTES


def _sum_of(held: torch.Tensor) -> int:
    return _core.checksum(held.detach().contiguous().view(torch.uint8).numpy())


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
