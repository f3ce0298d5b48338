"""Optimizers: what the C kernels take from a torch optimizer, and the torch optimizer that `wrap` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .errors import PlanError

if TYPE_CHECKING:
    from .session import Session

Group = dict[str, Any]
Hyper = tuple[int, float, float, bool, float, float, float, bool, float, float, bool]

ADAM, ADAMW, SGD = 0, 1, 2
#: Names of the state arrays in torch's state dicts, in the order of the kernels' arrays.
ADAM_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
SGD_STATE = ("momentum_buffer",)


def kind_of(optimizer: Any) -> type[torch.optim.Optimizer]:
    """The optimizer's class, where the C kernels serve it.

    Raises:
        TypeError: it is no torch optimizer.
        PlanError: it is one that is not supported yet.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {optimizer!r}; give a torch.optim optimizer over the model's parameters")
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        if type(optimizer) is kind:
            return kind
    raise PlanError(f"optimizer is {type(optimizer).__name__}; supported are torch.optim.Adam, AdamW and SGD")


def hyper_of(kind: type[torch.optim.Optimizer], group: Group) -> Hyper:
    """A parameter group's values as the kernels take them.

    Raises:
        PlanError: an option that the kernels do not have.
    """
    for option in ("differentiable",):
        if group.get(option):
            raise PlanError(f"optimizer: {option}=True is not supported")
    lr, decay, maximize = float(group["lr"]), float(group["weight_decay"]), bool(group["maximize"])
    if kind is torch.optim.SGD:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        return (SGD, lr, decay, maximize, 0.0, 0.0, 0.0, False, momentum, dampening, bool(group["nesterov"]))
    code = ADAMW if kind is torch.optim.AdamW or group.get("decoupled_weight_decay") else ADAM
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return (code, lr, decay, maximize, beta1, beta2, float(group["eps"]), bool(group["amsgrad"]), 0.0, 0.0, False)


def n_states_of(hyper: Hyper) -> int:
    """Arrays of optimizer state for each parameter of a group."""
    if hyper[0] == SGD:
        return int(hyper[8] != 0)
    return 3 if hyper[7] else 2


def state_names(hyper: Hyper) -> tuple[str, ...]:
    """Their names in torch's state dicts."""
    return (SGD_STATE if hyper[0] == SGD else ADAM_STATE)[: n_states_of(hyper)]


class Optimizer(torch.optim.Optimizer):
    """What `wrap` returns for the user's optimizer: the same parameter groups, updates made by the engine.

    `grad_norm` is the global 2-norm of the gradients before clipping, of the last step, where `max_grad_norm` was given.
    """

    def __init__(self, session: Session, inner: torch.optim.Optimizer) -> None:
        self._session: Session | None = None
        super().__init__([{**group} for group in inner.param_groups], inner.defaults)
        self.param_groups = inner.param_groups
        self._session = session
        self.grad_norm: torch.Tensor | None = None

    def _open(self) -> Session:
        if self._session is None or self._session.closed:
            raise PlanError("optimizer: the model was unwrapped; make a torch optimizer over its parameters again")
        return self._session

    def add_param_group(self, param_group: Group) -> None:
        """Refused once the model is wrapped: chunks and their state are laid out by then."""
        if getattr(self, "_session", None) is not None:
            raise PlanError("optimizer: a parameter group cannot be added after wrap; unwrap, add the group, and wrap again")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Commit the step: waits for the updates that run behind backward, then turns them into the model's state.

        Raises:
            StepError: hyperparameters were changed after backward had started updates with the old ones.
            DiskError: an update failed on the disk; the model is as it was before this step's backward.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.grad_norm = self._open().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, and updates made from them that no `step()` committed.

        Raises:
            ValueError: set_to_none is False; gradients do not stay in memory, so there is nothing to fill with zeros.
        """
        if not set_to_none:
            raise ValueError("zero_grad(set_to_none=False) is not supported: gradients leave memory; use zero_grad()")
        self._open().zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As torch's: full, separately owned tensors, which plain torch loads. They are not counted in the budget."""
        return self._open().optimizer_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes plain torch's, or one of another wrapped optimizer."""
        self._open().load_optimizer_state(state_dict)
