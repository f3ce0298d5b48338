"""A twin of the model, of fake tensors that have shapes and no data, and its batch.

The real model is only read: its values, gradients, flags, hooks and random states stay as they are.
"""

from __future__ import annotations

import copy
import io
import threading
import types
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map

from ..base.counting import uncounted
from ..errors import DiskError, OutOfMemoryError
from ..model import keycaches, randomness
from ..model.compiled import CALL, eager
from ..model.held import has_attributes, tensors_held
from . import fakes, handlers
from .phases import DryRunError, Rounding

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def is_the_models_own(hook: Any) -> bool:
    """Without it the forward is another one: weight norm and its like compute parameters in hooks, and functions of transformers
    take the hidden states there that are asked for, put on once for all forwards. They keep nothing of the model they are on."""
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return where.startswith("torch.nn.utils") or (isinstance(hook, types.FunctionType) and where.startswith("transformers."))


def fake_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, strides, type and flag, without data, on the CPU; called inside the fake mode."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


#: What torch says where the memory of a fake tensor is asked for.
_NO_MEMORY = "Cannot access data pointer of Tensor"

#: Of which there are no copies.
LOCKS = (type(threading.Lock()), type(threading.RLock()))


def _apart(value: Any) -> Any:
    """What the twin has in the place of something that cannot be copied and is to stay as it is: a file that is only written to,
    as a log, and a generator. None: of anything else."""
    if isinstance(value, io.IOBase) and not value.closed and value.writable() and not value.readable():
        return io.StringIO() if isinstance(value, io.TextIOBase) else io.BytesIO()
    if isinstance(value, types.GeneratorType):
        return _refuse_generator()
    return None


def _refuse_generator() -> Iterator[Any]:
    raise DryRunError("its forward asks a generator for more, which would not give it again")
    yield


@dataclass
class Twin:
    model: nn.Module
    memo: dict[int, Any]
    not_counted: set[int] = field(default_factory=set)  # storages
    fixed_bytes: int = 0
    batch_bytes: int = 0  # of these
    alive: list[Any] = field(default_factory=list)  # keeps the storages' addresses from being used again
    stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # of what is no parameter; the real ones


def _make_twin(model: nn.Module, chunk_of_param: dict[int, int], round_bytes: Rounding) -> Twin:
    memo: dict[int, Any] = {}
    twin = Twin(model, memo)

    def note(tensor: Any, fixed: bool) -> None:
        if not isinstance(tensor, torch.Tensor) or id(tensor) in memo:
            return
        plain = type(tensor) in (torch.Tensor, nn.Parameter) or type(tensor).__module__.startswith("protrain.")
        if tensor.layout is not torch.strided or not plain:
            raise DryRunError(f"a tensor of the model is a {type(tensor).__name__} of layout {tensor.layout}, not a plain one")
        memo[id(tensor)] = made = fake_of(tensor)
        storage = made.untyped_storage()
        twin.alive.append(storage)
        twin.not_counted.add(storage._cdata)
        if not isinstance(tensor, nn.Parameter):
            twin.stand_ins.append((made, tensor))
        if fixed and storage.nbytes():
            twin.fixed_bytes += round_bytes(storage.nbytes())

    known = set(model.modules())
    for parameter in model.parameters():
        note(parameter, id(parameter) not in chunk_of_param)
        memo[id(parameter.grad)] = None
    for module in model.modules():
        own = {name: value for name, value in module.__dict__.items() if name not in ("_parameters", "_modules")}
        for value in tree_leaves(own, is_leaf=lambda v: isinstance(v, nn.Module)):
            if isinstance(value, nn.Module) and value not in known:  # one that is kept in a list, to be no part of the model
                for tensor in (*value.parameters(), *value.buffers()):
                    note(tensor, False)
            for tensor in tensors_held(value):
                note(tensor, tensor is value)  # what an object has was made by the program, which counts nowhere
            if isinstance(value, (*LOCKS, types.ModuleType)):
                memo[id(value)] = value
            elif (other := _apart(value)) is not None:
                memo[id(value)] = other
            if isinstance(value, torch.Generator):  # whose own way of being copied makes a tensor
                memo[id(value)] = value.clone_state()
        for name in HOOKS:
            hooks = module.__dict__.get(name)
            if hooks is not None:
                memo[id(hooks)] = OrderedDict((k, v) for k, v in hooks.items() if is_the_models_own(v))
    memo.pop(id(None), None)
    try:
        twin.model = copy.deepcopy(model, memo)
    except (DiskError, OutOfMemoryError):  # tell nothing of the model
        raise
    except Exception as error:
        raise DryRunError(f"the model cannot be copied: {one_line(error)}") from error
    for module in model.modules():
        put_forward_back(module, memo[id(module)])
        if isinstance(module, _BatchNorm) and module.momentum is None:  # a mean of all batches, which reads how many they were
            memo[id(module)].momentum = 0.1
    return twin


def put_forward_back(module: nn.Module, copied: nn.Module) -> None:
    """A forward that protrain replaced in the real module is its own again in the twin, and nothing is compiled there."""
    copied.__dict__.pop(CALL, None)
    forward = module.__dict__.get("forward")
    if not (isinstance(forward, types.FunctionType) and forward.__globals__.get("__name__", "").startswith("protrain.")):
        return
    while isinstance(forward, types.FunctionType) and forward.__globals__.get("__name__", "").startswith("protrain."):
        forward = getattr(forward, "__wrapped__", None)
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        copied.__dict__["forward"] = types.MethodType(forward.__func__, copied)
    elif forward is not None:
        copied.__dict__["forward"] = forward


def one_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    if text.startswith(_NO_MEMORY):
        return "a function that is called past torch asks where a tensor's memory is"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _fake_batch(twin: Twin, args: Any, kwargs: Any, round_bytes: Rounding) -> tuple[Any, Any]:
    """The batch without data; each of its storages is counted once, in fixed_bytes, and of one that has more than the batch, as
    where rows are taken from a whole data set, what the batch has of it."""
    storages: dict[int, tuple[Any, int]] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in twin.memo:
            return twin.memo[id(tensor)]  # type: ignore[no-any-return]
        twin.memo[id(tensor)] = made = fake_of(tensor)
        twin.alive.append(made.untyped_storage())
        twin.stand_ins.append((made, tensor))
        twin.not_counted.add(made.untyped_storage()._cdata)
        real = tensor.untyped_storage()
        _, before = storages.get(real._cdata, (real, 0))
        storages[real._cdata] = real, before + tensor.numel() * tensor.element_size()
        return made

    def convert_leaf(leaf: Any) -> Any:
        held = list(tensors_held(leaf))
        if not held or isinstance(leaf, torch.Tensor):
            return convert(leaf) if held else keycaches.with_tensors(leaf, convert)
        return copy.deepcopy(leaf, {id(tensor): convert(tensor) for tensor in held})  # an object, as of a dataclass

    converted = tree_map(convert_leaf, (args, kwargs))
    sizes = (min(real.nbytes(), own_bytes) for real, own_bytes in storages.values())
    twin.batch_bytes = sum(round_bytes(size) for size in sizes if size)
    twin.fixed_bytes += twin.batch_bytes
    return converted  # type: ignore[no-any-return]


def as_now(leaf: Any) -> Any:
    """Of an object of the program's, or a cache, a copy."""
    if isinstance(leaf, torch.Tensor) or not has_attributes(leaf):
        return keycaches.as_now(leaf)
    return copy.copy(leaf)


@contextmanager
def own_parametrizations() -> Iterator[None]:
    """What torch.nn.utils.parametrize.cached() keeps of the twin is apart from what it keeps of others, and goes."""
    before = parametrize._cache
    parametrize._cache = {}
    try:
        yield
    finally:
        parametrize._cache = before


def _fake_mode() -> FakeTensorMode:
    """In which it is an error to ask for a fake tensor's memory, as kernels do that are called past torch: it has no address."""
    mode = FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = False
    return mode


@contextmanager
def without_data(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], chunk_of_param: dict[int, int], round_bytes: Rounding
) -> Iterator[tuple[Twin, Any, Any]]:
    """The model's twin and its batch, inside the fake mode; random states stay as they are, and handlers of signals wait.

    Raises:
        DryRunError: something inside failed.
        DiskError, OutOfMemoryError: so did the disk, or memory, which says nothing of the model.
    """
    with handlers.waiting():
        random_state = torch.get_rng_state()
        try:
            with (
                uncounted(), randomness.kept(), torch._C.DisableTorchFunctionSubclass(), fakes.without_questions(kwargs),
                fakes.nothing_left_out(), fakes.as_with_data(), fakes.quiet(), eager(), _fake_mode(),
            ):  # fmt: skip
                twin = _make_twin(model, chunk_of_param, round_bytes)
                yield twin, *_fake_batch(twin, tuple(args), kwargs, round_bytes)
        except (DryRunError, DiskError, OutOfMemoryError):
            raise
        except Exception as error:
            raise DryRunError(one_line(error)) from error
        finally:
            torch.set_rng_state(random_state)
