"""What an optimizer that has no kernel needs, and whether its parameters can be updated one by one: found by trying it out.

The optimizer's own step runs on stand-ins, never on the model. Small ones show whether a step of all parameters at once gives
what steps of one after another give: a class for which they differ, or which changes parameters that have no gradient, needs the
whole model. Stand-ins of full size and without data, on meta, show how large the state of each parameter is and what a step takes
in memory.
"""

from __future__ import annotations

import copy
import inspect
import random
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import _core
from ..base.counting import counted_alone
from ..base.sizes import measuring_bytes
from ..dryrun.workspace import workspace_bytes
from ..errors import BudgetError, Error, PlanError
from ..model.strides import dense_like, dense_strides
from .parking import clone, is_large, map_tensors, plain_items, same, tensors_of

Group = dict[str, Any]

#: Sides of small stand-ins: unequal, so that a class that looks at shapes sees them.
SIDES = (3, 5, 4, 2)
TRIED_STEPS = 3
#: Of a stand-in of full size: RAdam takes more from its sixth step on.
MEASURED_STEPS = 8
#: Small stand-ins of each shape in a group: enough for parameters to be mixed.
TRIED_OF_A_SHAPE = 2


@dataclass(frozen=True)
class Footprint:
    """Bytes that an optimizer without a kernel takes. Of each parameter, 0 where it is not trained: state_bytes, its large state,
    which is where its chunk is; value_bytes; work_bytes, what its step makes beside its value, gradient and large state.
    small_bytes: of all state that stays in memory always; kept_bytes: of small values, whose old ones stay there until a step is
    whole. order: the numbers of parameters as it goes through them."""

    state_bytes: tuple[int, ...]
    value_bytes: tuple[int, ...]
    work_bytes: tuple[int, ...]
    small_bytes: int
    kept_bytes: int
    order: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """All of it, where all parameters are in memory."""
        return sum(self.state_bytes) + self.small_bytes + self.beside_bytes + max(self.work_bytes, default=0)

    @property
    def beside_bytes(self) -> int:
        """In a step, whatever parameter it is at: the old ones of what is small."""
        return self.small_bytes + self.kept_bytes

    def away_bytes(self, number: int) -> int:
        """In a step, at this parameter, which is on disk."""
        return 2 * self.value_bytes[number] + self.state_bytes[number] + self.work_bytes[number]

    @property
    def step_bytes(self) -> int:
        """In a step, at whatever parameter."""
        return max(map(self.away_bytes, self.order), default=0) + self.beside_bytes

    def highest_bytes(
        self, places: Sequence[tuple[int, int]], n_persist: int, live_bytes: int, memory_bytes: int, *, makes_state: bool
    ) -> int:
        """What a step has in memory at most, by the order in which it goes through the parameters: copies of what it changes in
        memory stay there as far as so much memory goes.

        Args:
            places: of parameters, the chunk first; those of n_persist chunks are in memory.
            live_bytes: when it begins, with all state. makes_state: it is the one that makes that, so that there is more room for
                copies before.
        """
        here = [number for number in self.order if places[number][0] < n_persist]
        due = sum(self.state_bytes[number] for number in here) if makes_state else 0
        live = highest = live_bytes - due
        old_bytes = 0 if makes_state else self.small_bytes  # of small state, which there is room for: it is in step_bytes
        for number in self.order:
            if places[number][0] >= n_persist:
                highest = max(highest, live + old_bytes + self.away_bytes(number))
                continue
            state_bytes = self.state_bytes[number]
            copied_bytes = self.value_bytes[number] + (0 if makes_state else state_bytes)
            if live + copied_bytes + self.step_bytes + due <= memory_bytes:
                live += copied_bytes
            if makes_state:
                live, due = live + state_bytes, due - state_bytes
            highest = max(highest, live + old_bytes + self.work_bytes[number])
        return highest


# ---- an optimizer narrowed to some of its parameters ----

#: Where torch's optimizers keep the hooks that users register: those on steps, and all.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
HOOKS = (
    *STEP_HOOKS, "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip

#: Methods of classes that tell training from evaluation.
MODES = ("train", "eval")

#: Attributes of torch's Optimizer itself, which no class keeps values of a step in.
_OWN = {"state", "param_groups", "defaults", "step", "_zero_grad_profile_name", *HOOKS}


@dataclass(frozen=True)
class Shared:
    """What a step may change beside parameters and their state: values of groups, attributes of the optimizer, and entries of its
    state that belong to no parameter. All copies; only what is plain data."""

    groups: list[Group]
    attributes: dict[str, Any]
    loose: dict[Any, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Shared:
        """As it is now."""
        return cls(
            [dict(plain_items({k: v for k, v in group.items() if k != "params"})) for group in optimizer.param_groups],
            dict(plain_items({k: v for k, v in vars(optimizer).items() if k not in _OWN})),
            dict(plain_items({k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)})),
        )

    def put_into(self, optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
        """The optimizer has groups with these values, beside what in `groups` is no plain data; attributes and state likewise."""
        for group, values in zip(groups, self.groups, strict=True):
            group.update(clone(values))
        for name in dict(plain_items({k: v for k, v in vars(optimizer).items() if k not in _OWN})):
            if name not in self.attributes:
                delattr(optimizer, name)
        vars(optimizer).update(clone(self.attributes))
        optimizer.state = defaultdict(dict, clone(self.loose))
        optimizer.param_groups = list(groups)

    def equals(self, other: Shared) -> bool:
        """Whether all of it is the same."""
        return same(self.groups, other.groups) and same(self.attributes, other.attributes) and same(self.loose, other.loose)


def own_step(optimizer: torch.optim.Optimizer) -> Any:
    """The class's step without what torch wraps around it: hooks and a profiler's record, which are for whole steps."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step


@contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Neither the optimizer's hooks nor those of all optimizers run inside, in a step of a superclass either."""
    before: dict[str, Any] = {name: vars(optimizer).get(name) for name in STEP_HOOKS}
    everywhere: list[dict[Any, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [dict(hooks) for hooks in everywhere]
    try:
        for name in STEP_HOOKS:
            setattr(optimizer, name, type(before[name] or {})())
        for hooks in everywhere:
            hooks.clear()
        yield
    finally:
        for name, own in before.items():
            setattr(optimizer, name, own)
        for hooks, was in zip(everywhere, kept, strict=True):
            hooks.update(was)


def own_mode(optimizer: torch.optim.Optimizer, name: str) -> Any:
    """The class's own `train` or `eval`, by which schedule-free optimizers exchange what they train for what they evaluate; None
    where it has none that can be called so."""
    method: Any = getattr(type(optimizer), name, None) if name in MODES else None
    if not inspect.isfunction(method):
        return None
    return None if _required(method) else method


def _required(method: Any) -> list[str]:
    """Names of the arguments without which it cannot be called."""
    return [
        parameter.name
        for parameter in list(inspect.signature(method).parameters.values())[1:]
        if parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def run_narrowed(
    optimizer: torch.optim.Optimizer, shared: Shared, groups: Sequence[Group], group: int, p: nn.Parameter | None, state: Any,
    method: Any = None,
) -> tuple[Any, Shared]:  # fmt: skip
    """One step of the optimizer with this parameter alone, its state given (None: it has none); or another method of its class.

    Returns its state after the step (None where it has none) and what the step made of the shared values, from which it started.
    """
    narrowed = [{**known, "params": [p] if number == group and p is not None else []} for number, known in enumerate(groups)]
    shared.put_into(optimizer, narrowed)
    if state is not None:
        optimizer.state[p] = state  # type: ignore[index]
    with torch._C.DisableTorchFunctionSubclass():
        (method or own_step(optimizer))(optimizer)
    new = optimizer.state.pop(p, None)  # type: ignore[arg-type]
    return new, Shared.of(optimizer)


def copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Another of the same class with the same attributes, to be tried out; plain data is its own."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    vars(other).update(dict(plain_items({k: v for k, v in vars(optimizer).items() if k not in _OWN})))
    return other


def in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Another like it, to be tried out, told that training begins where its class wants to be told."""
    other, train = copy_of(optimizer), own_mode(optimizer, "train")
    if train is None:
        return other
    given = optimizer.param_groups
    run_narrowed(other, Shared.of(optimizer), given, 0, None, None, train)
    other.param_groups = [now | {"params": group["params"]} for now, group in zip(other.param_groups, given, strict=True)]
    other.state = optimizer.state
    return other


# ---- refusals ----


def check_class(optimizer: torch.optim.Optimizer) -> None:
    """Whether the class can at all be served without a kernel.

    Raises:
        PlanError: its step needs a closure, or sparse gradients, or is to be differentiated, or reaches parameters by itself; or
            its state is not on the CPU.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise PlanError(f"optimizer is {name}; it takes sparse gradients only and gradients here are dense: use Adam or Adagrad")
    required = _required(own_step(optimizer))
    if isinstance(optimizer, torch.optim.LBFGS) or required:
        raise PlanError(
            f"optimizer is {name}; its step needs {required[0] if required else 'closure'} and with it the whole model at once: "
            f"use one whose step() takes no argument"
        )
    for attribute, value in vars(optimizer).items():
        if attribute not in _OWN and _reaches(value):
            raise PlanError(
                f"optimizer is {name}; its {attribute} holds parameters, a module or an optimizer, by which its step may reach "
                f"the whole model: that is not supported; where it stands around another one (accelerator.prepare), wrap that"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise PlanError("optimizer: differentiable=True is not supported")
    for state in optimizer.state.values():
        check_on_cpu(optimizer, state)


def _reaches(value: Any, depth: int = 3) -> bool:
    """Whether parameters can be had from an attribute."""
    if isinstance(value, (nn.Parameter, nn.Module, torch.optim.Optimizer)):
        return True
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    return depth > 0 and isinstance(value, (list, tuple, set)) and any(_reaches(item, depth - 1) for item in value)


def check_on_cpu(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Whether all tensors of a state are on the CPU.

    Raises:
        PlanError: one is on another device, or has no data.
    """
    for tensor in tensors_of(state):
        if tensor.device.type != "cpu":
            raise PlanError(
                f"optimizer is {type(optimizer).__name__}; its state is on {tensor.device}: it must be on the CPU, made over "
                f"parameters there"
            )


# ---- small stand-ins ----


def _small(shape: torch.Size) -> tuple[int, ...]:
    """Equal sides stay equal: state that is there already tells them by their length alone."""
    return tuple(min(side, SIDES[shape.index(side) % len(SIDES)]) for side in shape)


def _stand_in_state(optimizer: torch.optim.Optimizer, p: nn.Parameter, shape: tuple[int, ...], device: str) -> Any:
    """What a class that makes its state when it is constructed has for this parameter, for a stand-in of that shape."""

    def fit(value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 0:
            return value.detach().clone()
        part = value.detach()
        for dim, side in enumerate(value.shape):
            place = dim if value.shape == p.shape else list(p.shape).index(side) if side in p.shape else -1
            if place >= 0:
                part = part.narrow(dim, 0, shape[place])
        if device == "meta" or part.device.type == "meta":
            return torch.empty(part.shape, dtype=part.dtype, device=device)
        return part.clone()

    return map_tensors(optimizer.state[p], fit, copy.deepcopy) if p in optimizer.state else None


@dataclass
class _Tried:
    """Small stand-ins of an optimizer's parameters, with a copy of it."""

    optimizer: torch.optim.Optimizer
    groups: list[Group]
    states: dict[nn.Parameter, Any]
    idle: nn.Parameter | None  # one that gets no gradient

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Tried:
        generator = torch.Generator().manual_seed(0)
        groups, states, idle = [], {}, None
        for known in optimizer.param_groups:
            made: list[nn.Parameter] = []
            counts: dict[tuple[int, ...], int] = {}
            for p in known["params"]:
                shape = _small(p.shape)
                counts[shape] = counts.get(shape, 0) + 1
                if not p.requires_grad or counts[shape] > TRIED_OF_A_SHAPE:
                    continue
                made.append(nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32)))
                states[made[-1]] = _stand_in_state(optimizer, p, shape, "cpu")
            if made and idle is None:
                idle = nn.Parameter(made[0].detach().clone())
                states[idle] = clone(states[made[0]])
                made.append(idle)
            groups.append({**known, "params": made})
        return cls(copy_of(optimizer), groups, states, idle)

    def parameters(self) -> Iterator[tuple[int, nn.Parameter]]:
        for number, group in enumerate(self.groups):
            for p in group["params"]:
                yield number, p

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for _, p in self.parameters():
            p.grad = None if p is self.idle else torch.randn(p.shape, generator=generator, dtype=torch.float32)

    def all_at_once(self) -> Shared:
        shared = Shared.of(self.optimizer)
        shared.put_into(self.optimizer, self.groups)
        self.optimizer.state.update({p: state for p, state in self.states.items() if state is not None})
        for step in range(TRIED_STEPS):
            self.set_gradients(step)
            own_step(self.optimizer)(self.optimizer)
        self.states = {p: self.optimizer.state.get(p) for p in self.states}
        return Shared.of(self.optimizer)

    def one_by_one(self) -> Shared:
        shared = Shared.of(self.optimizer)
        for step in range(TRIED_STEPS):
            self.set_gradients(step)
            after: Shared | None = None
            for number, p in self.parameters():
                if p.grad is None:
                    continue
                self.states[p], made = run_narrowed(self.optimizer, shared, self.groups, number, p, self.states[p])
                after = after or made
                if not made.equals(after):
                    raise PlanError("what its step keeps for all parameters depends on each of them")
            shared = after or shared
        return shared

    def results(self) -> list[Any]:
        return [[p.detach(), self.states[p] or {}] for _, p in self.parameters()]


def check_independent(optimizer: torch.optim.Optimizer) -> None:
    """Whether a step of all parameters at once gives what a step of each gives, bit for bit, on small stand-ins.

    Raises:
        PlanError: it does not, or the class's step fails on them.
    """
    name, number = type(optimizer).__name__, optimizer.param_groups
    if not number:
        return
    before, python_state = torch.get_rng_state(), random.getstate()
    try:
        optimizer = in_training(optimizer)
        results = []
        for which in ("all_at_once", "one_by_one"):
            torch.set_rng_state(before)
            random.setstate(python_state)
            tried = _Tried.of(optimizer)
            with without_hooks(tried.optimizer):
                shared = getattr(tried, which)()
            results.append((tried.results(), shared))
            if tried.idle is not None:
                fresh = _Tried.of(optimizer)
                assert fresh.idle is not None
                if not same([tried.idle.detach(), tried.states[tried.idle]], [fresh.idle.detach(), fresh.states[fresh.idle]]):
                    raise PlanError("it changes parameters that have no gradient")
        (first, first_shared), (second, second_shared) = results
        if not (same(first, second) and first_shared.equals(second_shared)):
            raise PlanError("its step of one parameter depends on the others")
    except PlanError as error:
        raise PlanError(f"optimizer is {name}; {error}, so it needs the whole model at once, which is not supported") from None
    except Exception as error:
        raise PlanError(
            f"optimizer is {name}; its step fails on small parameters, on which it is tried first: {one_line(error)}"
        ) from error
    finally:
        torch.set_rng_state(before)
        random.setstate(python_state)


def one_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ---- stand-ins of full size ----


class _Watch(TorchDispatchMode):
    """Counts the live bytes of the storages that operations make; values of tensors without data are ones."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        result = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided]
        for tensor in made if not getattr(func, "is_view", False) else ():  # else state that is there already, looked at
            self._count(tensor.untyped_storage())
        inside = workspace_bytes(func, args, kwargs or {}, made) if made else 0
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + inside)
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, _core.rounded_bytes(max(storage.nbytes(), 1))
        if key in self._known:
            return

        def drop(_: Any) -> None:
            self._known.pop(key)
            self.live_bytes -= size

        self._known[key] = weakref.ref(storage, drop)
        self.live_bytes += size


def _bytes_of(tensor: torch.Tensor) -> int:
    return _core.rounded_bytes(max(tensor.numel() * tensor.element_size(), 1))


def _measure(optimizer: torch.optim.Optimizer, group: int, p: nn.Parameter, device: str) -> tuple[int, int, int]:
    """(large state, small state, memory of the step) of one parameter, in bytes."""
    other = copy_of(optimizer)
    groups = [{**known, "params": []} for known in optimizer.param_groups]
    shared = Shared.of(optimizer)
    watch = _Watch()
    with watch, without_hooks(other):
        stand_in = nn.Parameter(dense_like(p, device=device).zero_())
        stand_in.grad = dense_like(p, device=device).zero_()
        state = _stand_in_state(optimizer, p, tuple(p.shape), device)
        for _ in range(MEASURED_STEPS):  # a part of the state may come later than with the first step
            state, shared = run_narrowed(other, shared, groups, group, stand_in, state)
    tensors = tensors_of(state)
    large = sum(_bytes_of(tensor) for tensor in tensors if is_large(tensor))
    return large, sum(_bytes_of(tensor) for tensor in tensors if not is_large(tensor)), watch.peak_bytes


def measure(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], folder: str, budget_bytes: int) -> Footprint:
    """What the optimizer takes for the model's parameters; without data where its step works so, else one at a time in memory,
    within the budget.

    Raises:
        BudgetError: the step of one parameter alone does not fit.
        DiskError: the folder cannot be used.
        PlanError: its step fails.
    """
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found: dict[Any, tuple[int, int, int]] = {}
    before, python_state = torch.get_rng_state(), random.getstate()
    rows = []
    optimizer = in_training(optimizer)
    try:
        for p in params:
            if not p.requires_grad or id(p) not in group_of:
                rows.append((0, 0, 0))
                continue
            key = (tuple(p.shape), dense_strides(p), p.dtype, group_of[id(p)])
            if key not in found:
                found[key] = _measured(optimizer, group_of[id(p)], p, folder, budget_bytes)
            rows.append(found[key])
    finally:
        torch.set_rng_state(before)
        random.setstate(python_state)
    trained = {id(p): number for number, p in enumerate(params) if p.requires_grad and id(p) in group_of}
    values = tuple(_bytes_of(p) if id(p) in trained else 0 for p in params)
    return Footprint(
        state_bytes=tuple(large for large, _, _ in rows),
        value_bytes=values,
        work_bytes=tuple(max(peak - large - 2 * value, 0) for value, (large, _, peak) in zip(values, rows, strict=True)),
        small_bytes=sum(small for _, small, _ in rows),
        kept_bytes=sum(_bytes_of(p) for p in params if id(p) in trained and not is_large(p)),
        order=tuple(trained[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in trained),
    )


def _measured(
    optimizer: torch.optim.Optimizer, group: int, p: nn.Parameter, folder: str, budget_bytes: int
) -> tuple[int, int, int]:
    try:
        return _measure(optimizer, group, p, "meta")
    except Exception:  # it looks at values, or has a kernel of its own
        pass
    try:
        with suppress(BudgetError), counted_alone(folder, budget_bytes):
            return _measure(optimizer, group, p, "cpu")
        with counted_alone(folder, measuring_bytes(budget_bytes)):  # the plan is what is refused, with the smallest that works
            return _measure(optimizer, group, p, "cpu")
    except Error:  # which says nothing of the optimizer
        raise
    except Exception as error:
        raise PlanError(
            f"optimizer is {type(optimizer).__name__}; its step fails on a parameter of shape {tuple(p.shape)}: {one_line(error)}"
        ) from error
