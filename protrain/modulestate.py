"""What a block's forward may change beside its output: buffers, attributes, and its own inputs.

A block that is recomputed must see what its forward saw (the training flag, running means, counters, lists, generators, what is
to be trained, inputs as they were), and leave what there is now: no mean is updated twice, no call counted twice. So it runs
again on copies of the tensors that forward changed, and with the attributes that forward began with; afterwards those of now
stand again. Of attributes that are containers the entries are kept, not what these hold; of other objects nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .parameters import DisableTorchFunction

_SCALARS = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set)
#: What every module has; containers among it are torch's own.
_TORCHS = frozenset(vars(nn.Module()))

#: Larger buffers are not copied before each forward. One that forward changes all the same is found by its version, and copied
#: from then on. Of tensors that are mere attributes larger ones are left alone: most are there to be looked at.
COPIED_BYTES = 1 << 20

#: Stands for an attribute that there is none of.
_NOTHING = object()


class _Tensor:
    """A buffer, or an attribute; store: the dict that has it."""

    __slots__ = ("before", "compared", "held", "leaf", "store", "version")

    def __init__(self, store: dict[str, Any], leaf: str, held: torch.Tensor, copied: bool, compared: bool) -> None:
        self.store, self.leaf, self.held, self.version, self.compared = store, leaf, held, held._version, compared
        self.before: torch.Tensor | None = held.detach().clone() if copied else None

    def changed(self) -> bool:
        """Kernels of batch norm write running means past their version, so values are looked at where there is a copy; where
        looking would wait for a device, what has a copy may have changed."""
        if self.store.get(self.leaf) is not self.held or self.held._version != self.version:
            return True
        return self.before is not None and not (self.compared and torch.equal(self.before, self.held))


class _Attributes:
    """Of one module, what forward began with: plain values, copies of containers, states of generators."""

    __slots__ = ("containers", "generators", "keys", "own", "values")

    def __init__(self, module: nn.Module) -> None:
        self.own = own = vars(module)
        self.keys = frozenset(own)
        self.values: dict[str, Any] = {}
        self.containers: dict[str, Any] = {}
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        for key, value in own.items():
            kind = type(value)
            if kind in _SCALARS:
                self.values[key] = value
            elif kind in _CONTAINERS and key not in _TORCHS:
                self.containers[key] = value.copy()
            elif kind is torch.Generator:
                self.generators.append((value, value.get_state()))

    def put(self) -> list[tuple[str, Any]]:
        """They stand again, containers as new copies; returns what `put_back` takes."""
        own, changed = self.own, []
        for key in own.keys() - self.keys:
            changed.append((key, own.pop(key)))
        for values in (self.values, self.containers):
            for key, value in values.items():
                current = own.get(key, _NOTHING)
                if current is not value:
                    changed.append((key, current))
                    own[key] = value
        return changed

    def put_back(self, changed: list[tuple[str, Any]]) -> None:
        for key in self.own.keys() - self.keys:
            del self.own[key]
        for key, value in changed:
            if value is _NOTHING:
                self.own.pop(key, None)
            else:
                self.own[key] = value


class ModuleState:
    """Taken before a block's forward; `settle` after it keeps what forward changed."""

    def __init__(self, block: nn.Module, large: set[str], compared: bool = True) -> None:
        """large: "MODULE.BUFFER" of the large buffers that forward is known to change; `settle` adds to it. compared: values may
        be looked at; else copies stay until the recomputation."""
        self.large = large
        self.attributes: list[_Attributes] = []
        self.tensors: list[tuple[str, _Tensor]] = []
        self.parameters: list[tuple[dict[str, Any], dict[str, Any]]] = []  # each module's, and which they were
        self.trained: list[tuple[nn.Parameter, bool]] = []
        self.lost = ""  # a buffer that was changed and of which there is no copy
        with torch.no_grad(), DisableTorchFunction():
            for name, module in block.named_modules():
                if own := module._parameters:
                    self.parameters.append((own, own.copy()))
                    self.trained.extend([(p, p.requires_grad) for p in own.values() if p is not None])
                self.attributes.append(_Attributes(module))
                for leaf, held in module._buffers.items():
                    if held is not None and not held.is_inference():
                        path = f"{name}.{leaf}" if name else leaf
                        copied = path in large or held.nbytes <= COPIED_BYTES
                        self.tensors.append((path, _Tensor(module._buffers, leaf, held, copied, compared)))
                for leaf, held in vars(module).items():
                    if type(held) is torch.Tensor and _is_small_state(held):
                        self.tensors.append((leaf, _Tensor(vars(module), leaf, held, True, compared)))

    def settle(self) -> None:
        """Forward is over: copies of tensors that it left alone go."""
        self.tensors = [(path, tensor) for path, tensor in self.tensors if tensor.changed()]
        for path, tensor in self.tensors:
            if tensor.before is None:
                self.lost = path
                self.large.add(path)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the block is as its forward found it; what is changed there is forgotten.

        Raises:
            RuntimeError: forward changed a buffer of which there is no copy.
        """
        if self.lost:
            raise RuntimeError(
                f"a recomputed block changed its buffer {self.lost} in forward for the first time, so what forward saw is gone: "
                f"skip this batch (the next ones keep it), or wrap with block_modes that keep this block"
            )
        now = [attributes.put() for attributes in self.attributes]
        replaced = [(own, own.copy()) for own, seen in self.parameters if not _same_entries(own, seen)]
        for own, seen in self.parameters:
            _put_entries(own, seen)
        held = [tensor.store.get(tensor.leaf, _NOTHING) for _, tensor in self.tensors]
        for _, tensor in self.tensors:
            tensor.store[tensor.leaf] = tensor.before
        drawn = [(generator, generator.get_state()) for one in self.attributes for generator, _ in one.generators]
        for one in self.attributes:
            for generator, state in one.generators:
                generator.set_state(state)
        with DisableTorchFunction():
            switched = [(p, p.requires_grad) for p, trained in self.trained if p.requires_grad != trained]
            for p, trained in switched:
                p.requires_grad_(not trained)
        try:
            yield
        finally:
            with DisableTorchFunction():
                for p, trained in switched:
                    p.requires_grad_(trained)
            for own, given in replaced:
                _put_entries(own, given)
            for generator, state in drawn:
                generator.set_state(state)
            for attributes, changed in zip(self.attributes, now, strict=True):
                attributes.put_back(changed)
            for (_, tensor), current in zip(self.tensors, held, strict=True):
                if current is _NOTHING:
                    tensor.store.pop(tensor.leaf, None)
                else:
                    tensor.store[tensor.leaf] = current


def _same_entries(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both have the same objects under the same names."""
    return one.keys() == other.keys() and all(other[key] is value for key, value in one.items())


def _put_entries(store: dict[str, Any], seen: dict[str, Any]) -> None:
    """`store` has the entries of `seen`, and no others."""
    if not _same_entries(store, seen):
        for key in store.keys() - seen.keys():
            del store[key]
        store.update(seen)


def _is_small_state(held: torch.Tensor) -> bool:
    """Whether an attribute may be what forward goes on from, and is copied: nothing that is to be differentiated."""
    if held.requires_grad or held.layout is not torch.strided or held.is_inference():
        return False
    return held.nbytes <= COPIED_BYTES
