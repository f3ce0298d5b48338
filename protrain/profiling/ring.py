"""The ring: a model that computes as it will in training, without the model's memory.

Times do not depend on what parameters are, only on where: in memory, not in a cache that a large model would not fit. So the
parameters of a twin are views of a ring of memory, a few times as large as the caches. Each begins where the one before ends, and
at the end the ring begins anew. A model that is smaller than the ring has all of its parameters, none of them shared.

Values are small random numbers of a size that neither grows nor vanishes through many layers, so that nothing overflows and no
operation is slowed by numbers next to zero. Small parameters (norms, biases) keep their own.
"""

from __future__ import annotations

import copy
import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..base.sizes import KIB, MIB
from ..device.compute import Accelerator
from ..dryrun.passes import output_tensors
from ..dryrun.twin import HOOKS, LOCKS, is_the_models_own, put_forward_back
from ..errors import PlanError
from ..model.onmeta import transformers_buffers

#: The ring is so many times as large as the caches that hold what was used last.
RING_OF_CACHES = 4
#: A parameter of less than two dimensions keeps its values, and has memory of its own, up to this size.
_SMALL_BYTES = 64 * KIB


def cache_bytes() -> int:
    """The size of the last level of caches of the processors that this process may use."""
    sizes: dict[str, int] = {}
    level = 0
    for cpu in sorted(os.sched_getaffinity(0)):
        for folder in Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            try:
                found = int((folder / "level").read_text())
                words, shared = (folder / "size").read_text().strip(), (folder / "shared_cpu_list").read_text()
                if found > level:
                    level, sizes = found, {}
                if found == level:
                    sizes[shared] = int(words.rstrip("KMG")) * {"K": KIB, "M": MIB, "G": KIB * MIB}.get(words[-1], 1)
            except (OSError, ValueError):
                continue
    return sum(sizes.values()) or 32 * MIB


@dataclass
class _Pool:
    """Memory that parameters of one type and one size of values share, each at the next place that is long enough."""

    dtype: torch.dtype
    exponent: int  # values are normal with the deviation 2 ** (-exponent / 2)
    members: list[nn.Parameter] = field(default_factory=list)

    def counts(self) -> list[int]:
        """Elements of each member, up to the beginning of the next."""
        step = max(64 // self.dtype.itemsize, 1)
        return [-(-_extent(p) // step) * step for p in self.members]

    def make(self, count: int, device: torch.device) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each member, and its values among `count` elements."""
        buffer = torch.empty(count, dtype=self.dtype, device=device)
        done = min(count, MIB)
        if self.dtype.is_floating_point and self.dtype.itemsize > 1:
            buffer[:done].normal_(0, 2.0 ** (-self.exponent / 2))
        else:
            buffer[:done].zero_()
        while done < count:
            part = min(done, count - done)
            buffer[done : done + part].copy_(buffer[:part])
            done += part
        place = 0
        for p, size in zip(self.members, self.counts(), strict=True):
            if place + size > count:
                place = 0
            # A storage's tensor, no view: versions of parameters that share memory are counted apart.
            yield p, torch.empty(0, dtype=self.dtype, device=device).set_(buffer.untyped_storage(), place, p.shape, p.stride())
            place += size


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _exponent(p: torch.Tensor) -> int:
    """Of a deviation with which what passes through the parameter, in forward and in backward, stays of its size."""
    if p.dim() < 2 or p.numel() == 0:
        return 10
    outputs, inputs = p.numel() // p.shape[1], p.numel() // p.shape[0]
    return round(math.log2(outputs * inputs) / 2)


class Ring:
    """The memory of all of a model's parameters: `bytes` of it on `device`, taken by `make`."""

    def __init__(self, model: nn.Module, accelerator: Accelerator | None = None) -> None:
        """
        Args:
            accelerator: where the model is to compute; None: on the CPU.

        Raises:
            PlanError: a parameter is neither there nor on the CPU nor on meta.
        """
        self.device = accelerator.device if accelerator is not None else torch.device("cpu")
        caches = (accelerator.cache_bytes() if accelerator is not None else 0) or cache_bytes()
        self.alone: list[tuple[str, nn.Parameter]] = []
        pools: dict[tuple[torch.dtype, int], _Pool] = {}
        for name, p in model.named_parameters():
            if p.device.type not in ("cpu", "meta") and p.device != self.device:
                raise PlanError(f"model: parameter {name} is on {p.device}; {_allowed(self.device)} are supported")
            if p.dim() < 2 and p.numel() * p.element_size() <= _SMALL_BYTES:
                self.alone.append((name, p))
            else:
                key = (p.dtype, _exponent(p))
                pools.setdefault(key, _Pool(*key)).members.append(p)
        self.pools = [(pool, pool.counts()) for pool in pools.values()]
        model_bytes = sum(sum(counts) * pool.dtype.itemsize for pool, counts in self.pools)
        part = min(1.0, RING_OF_CACHES * caches / max(model_bytes, 1))
        self.counts = [min(sum(counts), max(*counts, int(sum(counts) * part) + 1)) for _, counts in self.pools]
        self.bytes = sum(count * pool.dtype.itemsize for count, (pool, _) in zip(self.counts, self.pools, strict=True))
        self.bytes += sum(p.numel() * p.element_size() for _, p in self.alone)

    def make(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter of the model, and its values in the twin."""
        for name, p in self.alone:
            if p.device.type != "meta":
                yield p, p.detach().to(self.device, copy=True)
            else:
                value = 0.0 if "bias" in name.rpartition(".")[2] else 1.0
                yield p, torch.full(p.shape, value, dtype=p.dtype, device=self.device)
        for (pool, _), count in zip(self.pools, self.counts, strict=True):
            yield from pool.make(count, self.device)


# ---- the twin ----


def _allowed(device: torch.device) -> str:
    return "cpu and meta" if device.type == "cpu" else f"{device}, cpu and meta"


def _other_tensor(tensor: torch.Tensor, known: torch.Tensor | None, device: torch.device, moves: bool) -> torch.Tensor:
    """A copy of a buffer, which moves to the device, or of an attribute, which stays where it is; on meta, what the model's
    constructor gives, else values that harm nothing."""
    if tensor.device.type == "meta":
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if known is None else known
        if known is None and tensor.dtype == torch.bool:
            made.fill_(True)  # a mask that masks nothing
    elif tensor.device.type == "cpu" or tensor.device == device:
        made = tensor.detach().clone()
    else:
        raise PlanError(f"model: one of its tensors is on {tensor.device}; {_allowed(device)} are supported")
    made = made.to(device) if moves else made
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def make_twin(model: nn.Module, ring: Ring) -> tuple[nn.Module, dict[int, Any]]:
    """The twin, and what stands in it for each of the model's objects, by id. Hooks stay behind, but those that belong to
    the forward.

    Raises:
        PlanError: a buffer or an attribute is a tensor neither on the ring's device nor on the CPU nor on meta.
    """
    memo: dict[int, Any] = {}
    buffers = [(name, b) for name, b in model.named_buffers() if b.device.type == "meta"]
    values = transformers_buffers(model) if buffers else {}
    known = {id(b): values.get(name) for name, b in buffers}
    buffer_ids = {id(b) for b in model.buffers()}
    for p, value in ring.make():
        memo[id(p)] = nn.Parameter(value, requires_grad=p.requires_grad)
        memo[id(p.grad)] = None
    for module in model.modules():
        own = {name: value for name, value in module.__dict__.items() if name not in ("_parameters", "_modules")}
        for value in tree_leaves(own, is_leaf=lambda v: isinstance(v, nn.Module)):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                moves = id(value) in buffer_ids or value.device.type == "meta"
                memo[id(value)] = _other_tensor(value, known.get(id(value)), ring.device, moves)
            elif isinstance(value, LOCKS):
                memo[id(value)] = value
        for name in HOOKS:
            hooks = module.__dict__.get(name)
            if hooks is not None:
                memo[id(hooks)] = OrderedDict((k, v) for k, v in hooks.items() if is_the_models_own(v))
    memo.pop(id(None), None)
    twin = copy.deepcopy(model, memo)
    for module in model.modules():
        put_forward_back(module, memo[id(module)])
    return twin, memo


def copy_batch(batch: Any, memo: dict[int, Any], device: torch.device) -> Any:
    """A batch on the device, that the twin may write to; what it shares with the model is the twin's.

    Raises:
        PlanError: a tensor of it is neither there nor on the CPU.
    """
    own = dict(memo)
    for tensor in output_tensors(batch):
        if id(tensor) not in own:
            if tensor.device.type != "cpu" and tensor.device != device:
                there = "" if device.type == "cpu" else f" or on {device}"
                raise PlanError(f"batch: a tensor is on {tensor.device}; give a batch on the CPU{there}, with real values")
            own[id(tensor)] = tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
    return copy.deepcopy(batch, own)
