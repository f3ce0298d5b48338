"""Hooks: what wrapping puts into a model, in four places, and takes out of it again: around the forward of the model (a step
begins) and of each block (its mode), at each trained parameter (its gradient is about to come, has come), and at the state dict
of each module that owns parameters. Beside them stand the methods by which users change, copy and pickle a model (changes.py).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import changes
from .parameters import DisableTorchFunction
from .precision import before_load

if TYPE_CHECKING:
    from .session import Session

#: Under this name a wrapped model has its session in its `__dict__`.
KEY = "_protrain_session"

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class ModelHooks:
    """What was put into one model. Hooks are functions and not methods: a deep copy of a module shares them, so that a copied
    one still belongs to this session."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._replaced: list[tuple[nn.Module, str]] = []

    def install(self, session: Session) -> None:
        """Everything that the module's head names."""
        wrapped = session.wrapped
        self._wrap_forward(wrapped.model, session.run_model)
        for number, (_, block) in enumerate(wrapped.blocks):
            if block is not wrapped.model:
                self._wrap_forward(block, functools.partial(session.runner.run_block, number))
        for number, (p, entry) in enumerate(zip(wrapped.params, wrapped.layout.entries, strict=True)):
            if entry.group >= 0:
                self._watch_gradient(session, number, p)
        for module in wrapped.model.modules():
            own = {leaf: wrapped.number_of[id(p)] for leaf, p in module._parameters.items() if p is not None}
            if own:
                self._watch_state(session, module, own)
            if own or "forward" in self.put_in(module):
                for name, method in changes.guard(module, wrapped.layout.dtype, wrapped.compute.device, self.put_in).items():
                    self._replace(module, name, method)
        self._replace(wrapped.model, "zero_grad", _zero_grad(session))

    def put_in(self, module: nn.Module) -> set[str]:
        """Names of what wrapping put into the module's `__dict__`."""
        return {KEY} | {name for owner, name in self._replaced if owner is module}

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module, name in self._replaced:
            module.__dict__.pop(name, None)
        self._handles.clear()
        self._replaced.clear()

    def _replace(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        module.__dict__[name] = method
        self._replaced.append((module, name))

    def _wrap_forward(self, module: nn.Module, around: Around) -> None:
        forward = module.forward

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            changes.check_not_compiled(module)
            return around(forward, args, kwargs)

        self._replace(module, "forward", wrapped)

    def _watch_gradient(self, session: Session, number: int, p: nn.Parameter) -> None:
        found = weakref.ref(session.gradients)  # torch keeps the second hook where a model that is dropped is not looked for

        def before(_grad: torch.Tensor) -> None:
            if (gradients := found()) is not None:
                gradients.before()

        def accumulated(p: torch.Tensor) -> None:
            if (gradients := found()) is not None:
                gradients.accumulated(number, p)

        with DisableTorchFunction():
            self._handles.append(p.register_hook(before))
            self._handles.append(p.register_post_accumulate_grad_hook(accumulated))

    def _watch_state(self, session: Session, module: nn.Module, own: dict[str, int]) -> None:
        """own: the module's own parameters by their names in it."""
        values, states = session.values, session.states

        def loads(_module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
            before_load(values, own, state_dict, prefix)

        def fill(_module: nn.Module, state_dict: Any, prefix: str, _metadata: Any) -> None:
            states.fill_state_dict(own, state_dict, prefix)

        def check(_module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
            changes.check_load(session.engine, metadata)

        self._handles.append(module.register_load_state_dict_pre_hook(check))
        if session.wrapped.master_array:
            self._handles.append(module.register_load_state_dict_pre_hook(loads))
        self._handles.append(module.register_state_dict_post_hook(fill))


def _zero_grad(session: Session) -> Callable[..., None]:
    def zero_grad(set_to_none: bool = True) -> None:
        """As nn.Module.zero_grad; gradients that left memory are dropped too."""
        if not set_to_none:
            raise ValueError("zero_grad(set_to_none=False) is not supported: gradients leave memory; use zero_grad()")
        session.zero_grad()

    return zero_grad
