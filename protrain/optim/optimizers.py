"""Optimizers: what the C kernels take from a torch optimizer, and the torch optimizer that `wrap` returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ..base.reading import given_as
from ..errors import PlanError, StepError
from .footprint import HOOKS, MODES, Footprint, check_class, check_independent, measure, own_mode
from .stateview import StateView, refuse_state

if TYPE_CHECKING:
    from ..session import Session

Group = dict[str, Any]

ADAM, ADAMW, SGD = 0, 1, 2
#: Names of the state arrays in torch's state dicts, in the order of the kernels' arrays.
ADAM_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
SGD_STATE = ("momentum_buffer",)


class Hyper(NamedTuple):
    """A parameter group's values as the kernels take them, in their order (csrc/optim/optim.h)."""

    kind: int
    lr: float
    weight_decay: float
    maximize: bool
    beta1: float
    beta2: float
    eps: float
    amsgrad: bool
    momentum: float
    dampening: float
    nesterov: bool
    #: Rounded as torch's fused kernels do; else as its loop over parameters, the default on a CPU.
    fused: bool
    #: lr is of fp32, a tensor or a number of NumPy, with which that loop computes in fp32.
    lr_is_float: bool


def kind_of(optimizer: Any) -> type[torch.optim.Optimizer]:
    """The optimizer's class.

    Raises:
        TypeError: it is no torch optimizer.
        PlanError: it is wrapped, its methods were replaced, or its step needs the whole model at once.
    """
    if isinstance(optimizer, Optimizer):
        raise PlanError("optimizer is one that wrap returned; make a torch optimizer over the model's parameters again")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {given_as(optimizer)}; give a torch.optim optimizer over the model's parameters")
    for name in ("step", "zero_grad"):
        replaced = vars(optimizer).get(name)
        if replaced is not None and not getattr(replaced, "_wrapped_by_lr_sched", False):  # a scheduler's, that only counts
            raise PlanError(
                f"optimizer: its {name} was replaced on the object, and protrain, whose own optimizer makes the steps, would not "
                f"call what stands there: replace {name} on the optimizer that wrap returns, or give its class another one"
            )
    if not has_kernel(optimizer):
        check_class(optimizer)
    return type(optimizer)


def has_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the C kernels serve it; a subclass may have a step of its own. All others run their own code (foreign.py)."""
    return type(optimizer) in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def footprint_of(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], folder: str, budget_bytes: int
) -> Footprint | None:
    """What an optimizer without a kernel takes for these parameters; None for one that has a kernel.

    Raises:
        PlanError: its parameters cannot be updated one by one, or its step fails.
        BudgetError: its step of one parameter does not fit.
    """
    if has_kernel(optimizer):
        return None
    check_independent(optimizer)
    return measure(optimizer, params, folder, budget_bytes)


def hyper_of(kind: type[torch.optim.Optimizer], group: Group) -> Hyper:
    """A parameter group's values as the kernels take them.

    Raises:
        PlanError: an option that the kernels do not have, or of a type that torch's loop rounds otherwise with.
    """
    for option in ("differentiable",):
        if group.get(option):
            raise PlanError(f"optimizer: {option}=True is not supported")
    if not group.get("fused"):
        _check_numbers(group)
    lr, decay, maximize = float(group["lr"]), float(group["weight_decay"]), bool(group["maximize"])
    rounding = bool(group.get("fused")), _type_name(group["lr"]) == "float32"
    if kind is torch.optim.SGD:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        return Hyper(SGD, lr, decay, maximize, 0.0, 0.0, 0.0, False, momentum, dampening, bool(group["nesterov"]), *rounding)
    code = ADAMW if group.get("decoupled_weight_decay", kind is torch.optim.AdamW) else ADAM
    beta1, beta2 = (float(beta) for beta in group["betas"])
    eps, amsgrad = float(group["eps"]), bool(group["amsgrad"])
    return Hyper(code, lr, decay, maximize, beta1, beta2, eps, amsgrad, 0.0, 0.0, False, *rounding)


def _type_name(value: Any) -> str:
    """Of a tensor's numbers, or of a number of NumPy, such as "float32"; "" of Python's own."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


def _check_numbers(group: Group) -> None:
    """Whether torch's loop computes with these options in double, and with the rate in double or in fp32.

    Raises:
        PlanError: it does not.
    """
    for option in ("betas", "eps", "weight_decay", "momentum", "dampening"):
        for value in tree_leaves(group.get(option)):
            if isinstance(value, torch.Tensor):
                raise PlanError(f"optimizer: {option} is of tensors, with which torch's loop rounds otherwise; give numbers")
            _check_type(option, value, ("", "float64"))
    _check_type("lr", group["lr"], ("", "float32", "float64"))


def _check_type(option: str, value: Any, known: tuple[str, ...]) -> None:
    name = _type_name(value)
    if "float" in name and name not in known:
        raise PlanError(f"optimizer: {option} is of {name}, with which torch's loop rounds otherwise; give it as a float")


def loaded_groups(kind: type[torch.optim.Optimizer], groups: Sequence[Group], saved: Sequence[Group]) -> list[Group]:
    """The options that groups have once a state dict with `saved` was loaded, as by torch's own load_state_dict: those of the
    dict alone, and for what it lacks what the class puts there (`__setstate__`), as in files of an older torch.

    Raises:
        ValueError: one is missing that the step needs.
    """
    stand_in = kind.__new__(kind)
    given = [{**group, "params": []} for group in saved]
    stand_in.__setstate__({"state": {}, "param_groups": given, "defaults": {}})
    for number, (group, values) in enumerate(zip(groups, given, strict=True)):
        del values["params"]
        if "param_names" in group:
            values.setdefault("param_names", group["param_names"])
        for option in ("lr", "weight_decay", *(("momentum", "dampening") if kind is torch.optim.SGD else ("betas", "eps"))):
            if option not in values:
                raise ValueError(
                    f"optimizer.load_state_dict: group {number} of the given one has no {option}, which step() needs"
                )
    return given


def n_states_of(hyper: Hyper) -> int:
    """Arrays of optimizer state for each parameter of a group."""
    if hyper.kind == SGD:
        return int(hyper.momentum != 0)
    return 3 if hyper.amsgrad else 2


def n_states_for(optimizer: torch.optim.Optimizer) -> int:
    """Arrays of state beside each parameter of an optimizer with a kernel: those that a group's options need now, and those that
    are there since they did."""
    needed = max((n_states_of(hyper_of(type(optimizer), group)) for group in optimizer.param_groups), default=0)
    names = state_names(type(optimizer))
    there = {name for state in optimizer.state.values() for name in state if state[name] is not None}
    return max(needed, *(place + 1 for place, name in enumerate(names) if name in there), 0)


def state_names(kind: type[torch.optim.Optimizer], n_states: int | None = None) -> tuple[str, ...]:
    """Names in torch's state dicts of the first arrays of state (None: of all that there may be), which stay where a group's
    options make no use of them."""
    return (SGD_STATE if kind is torch.optim.SGD else ADAM_STATE)[:n_states]


def check_arrays(name: str, kind: type[torch.optim.Optimizer], group: Group, n_states: int) -> None:
    """Whether there is a place for each array of state that a group with these values has. name: of the group, in an error.

    Raises:
        PlanError: there is none.
    """
    wanted = n_states_of(hyper_of(kind, group))
    if wanted > n_states:
        raise PlanError(
            f"{name} needs {wanted} arrays of optimizer state, the model was wrapped with {n_states}: set amsgrad and momentum "
            "before wrap"
        )


def check_set_to_none(set_to_none: bool) -> None:
    """Whether a zero_grad drops gradients: they do not stay in memory, so there is nothing to fill with zeros.

    Raises:
        ValueError: it does not.
    """
    if not set_to_none:
        raise ValueError("zero_grad(set_to_none=False) is not supported: gradients leave memory; use zero_grad()")


class Optimizer(torch.optim.Optimizer):
    """What `wrap` returns for the user's optimizer: the same parameter groups, updates made by the engine's kernels where they
    know the class, else by the class's own step, parameter by parameter.

    `grad_norm` is the global 2-norm of the gradients before clipping, of the last step: an fp32 tensor without dimensions; None
    before the first step, and without `max_grad_norm`.
    """

    def __init__(self, session: Session, inner: torch.optim.Optimizer) -> None:
        self._session: Session | None = None
        super().__init__([{**group} for group in inner.param_groups], inner.defaults)
        self.param_groups = inner.param_groups
        for hooks in HOOKS:  # theirs and ours: once for each call
            setattr(self, hooks, getattr(inner, hooks))
        self._given = inner
        _refuse_given(inner, session)
        _refuse_others(inner, session)
        self._session = session
        self.grad_norm: torch.Tensor | None = None

    def _open(self) -> Session:
        if self._session is None or self._session.closed:
            raise PlanError("optimizer: the model was unwrapped; make a torch optimizer over its parameters again")
        return self._session

    @property
    def state(self) -> Any:
        """Which parameters have state, and its names. Values are refused, and so is setting any: `state_dict()` gives copies.

        Raises:
            PlanError: the model was unwrapped.
        """
        return StateView(self._open().states.names)

    @state.setter
    def state(self, value: Any) -> None:
        if self._session is not None:  # torch's own constructor sets an empty one
            refuse_state()

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        """The groups, which updates are made by. Others that are set take their place; of other parameters they are refused."""
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        if self._session is None:  # torch's own constructor, and ours
            self._groups = groups
        else:
            self._groups[:] = groups

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Refused: a pickle, and a copy of what it would hold, is of the whole model's state at once."""
        raise PlanError(
            "a wrapped optimizer cannot be copied or pickled: take its state_dict(), which a torch optimizer loads, or call "
            "protrain.save"
        )

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval`, of a class that has them, as schedule-free ones do, which evaluate other values than they train."""
        given = self.__dict__.get("_given")
        if given is not None and own_mode(given, name) is not None:
            return lambda: self._open().optimizer_mode(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def add_param_group(self, param_group: Group) -> None:
        """Refused once the model is wrapped: chunks and their state are laid out by then."""
        if getattr(self, "_session", None) is not None:
            raise PlanError("optimizer: a parameter group cannot be added after wrap; unwrap, add the group, and wrap again")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Commit the step: waits for the updates that run behind backward, then turns them into the model's state.

        Raises:
            StepError: hyperparameters were changed after backward had started updates with the old ones; or the own step of an
                optimizer that has no kernel failed. The model is as it was before the step.
            BudgetError: the own step of an optimizer without a kernel needs more than the budget has; as it was before the step.
            DiskError: an update failed on the disk; the model is as it was before this step's backward.
            PlanError: the model was unwrapped, or the parameters of a group were changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.grad_norm = self._open().step()
        self._given._opt_called = True  # type: ignore[attr-defined] # a scheduler made before wrap is bound to it and asks
        return loss

    def _optimizer_step_code(self) -> None:
        """Not torch's, by which a profiler that records stacks knows an optimizer, and asks it for its state."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, and updates made from them that no `step()` committed.

        Raises:
            ValueError: set_to_none is False.
        """
        check_set_to_none(set_to_none)
        self._open().zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As torch's: full, separately owned tensors, which plain torch loads. They are not counted in the budget."""
        session = self._open()
        if session.foreign is not None:
            return session.states.optimizer()  # the class's own method, which calls hooks
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        found = session.states.optimizer()
        for after in self._optimizer_state_dict_post_hooks.values():
            found = _or(after(self, found), found)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes plain torch's, or one of another wrapped optimizer.

        Raises:
            StepError: a step is under way: call step() or zero_grad() before.
            ValueError: it is one of other groups or parameters.
            DiskError: it cannot be written; load again.
        """
        session = self._open()
        if session.foreign is not None:
            session.states.load_optimizer(state_dict)
            return
        given = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            given = _or(before(self, given), given)
        session.states.load_optimizer(given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _refuse_given(inner: torch.optim.Optimizer, session: Session) -> None:
    """While the model is wrapped, the optimizer that was given to `wrap` makes no step, gives and takes no state, and does not go
    from training to evaluation: its state is the session's, and where all is in memory a step without it would begin anew."""
    of = weakref.ref(session)

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        session = of()
        if optimizer is inner and session is not None and not (session.foreign is not None and session.foreign.asks):
            raise StepError(
                f"optimizer: this is the {type(inner).__name__} that was given to wrap, whose state is wrap's now: use the "
                "optimizer that wrap returned"
            )

    modes = [name for name in MODES if own_mode(inner, name) is not None]
    for name in modes:
        setattr(inner, name, partial(refuse, inner))
        session.hooks.keep(Attribute(inner, name))
    session.hooks.keep(
        inner.register_step_pre_hook(refuse),
        inner.register_state_dict_pre_hook(refuse),
        inner.register_load_state_dict_pre_hook(refuse),
    )


def _refuse_others(inner: torch.optim.Optimizer, session: Session) -> None:
    """While the model is wrapped, no other optimizer steps with what is trained: its state would count nowhere, gradients that
    have left memory would be none to it, and the session's step would never be made. One around another leaves that to it."""
    of, given = weakref.ref(session), weakref.ref(inner)

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        session = of()
        if session is None or isinstance(optimizer, Optimizer) or optimizer is given():  # whose own hook tells more
            return
        if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
            return
        own = {id(p) for p, entry in zip(session.params, session.layout.entries, strict=True) if entry.group >= 0}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise StepError(
                f"optimizer: this {type(optimizer).__name__} is to update parameters of a wrapped model, which the optimizer "
                "that wrap returned does: use that one (of transformers' Trainers ProTrainTrainer takes it), or unwrap the model"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    session.hooks.keep(handle)
    weakref.finalize(session, handle.remove)  # of a model that is dropped as it is


class Attribute:
    """One that stands in an object before what its class has by that name, until it is removed."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def remove(self) -> None:
        """The class's own is there again."""
        vars(self._owner).pop(self._name, None)


def _or(found: dict[str, Any] | None, before: dict[str, Any]) -> dict[str, Any]:
    """What a user's hook returned in the place of a state dict, if it did."""
    return before if found is None else found
