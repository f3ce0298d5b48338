"""Hooks: what wrapping puts into a model, in four places, and takes out of it again: around the forward of the model (a step
begins), of each block (its mode) and of what reads its parameters at once, at each trained parameter (its gradient is about to
come, has come), and at the state dict of each module that owns parameters. Beside them stand the methods by which users change,
copy and pickle a model (changes.py).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..model import compiled, fused
from ..model.parameters import DisableTorchFunction, mark_views
from ..model.precision import before_load
from ..optim.optimizers import check_set_to_none
from . import changes
from .loads import PARAMETERS
from .running import Together

if TYPE_CHECKING:
    from ..session import Session

#: Under this name a wrapped model has its session in its `__dict__`.
KEY = "_protrain_session"

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class ModelHooks:
    """What was put into one model. Hooks are functions and not methods: a deep copy of a module shares them, so that a copied
    one still belongs to this session."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._replaced: dict[int, tuple[nn.Module, dict[str, Any]]] = {}  # by id: modules, names and what stood there before

    def install(self, session: Session) -> None:
        """Everything that the module's head names."""
        wrapped = session.wrapped
        compiled.keep_out()
        self._wrap_calls(session)
        for number, (p, entry) in enumerate(zip(wrapped.params, wrapped.layout.entries, strict=True)):
            if entry.group >= 0:
                self._watch_gradient(session, number, p)
        for module in wrapped.model.modules():
            if any(p is not None for p in module._parameters.values()):
                self._watch_state(session, module)
            if next(module.parameters(), None) is not None:
                for name, method in changes.guard(module, wrapped.layout.dtype, wrapped.compute.device, self.put_in).items():
                    self._replace(module, name, method)
                self._replace(module, "load_state_dict", _load_state_dict(session, module))
                self._replace(module, "compile", self._compile(session, module))
        self._replace(wrapped.model, "zero_grad", _zero_grad(session))

    def _wrap_calls(self, session: Session) -> None:
        """The forward of the model, of each block and of torch's own layers, and what is compiled."""
        for layer in fused.find_fused(session.model):
            self._wrap_fused(session, layer)
        parts = {id(module): module for _, module in compiled.find_compiled(session.model)}
        for number, (_, block) in enumerate(session.wrapped.blocks):
            around = functools.partial(session.runner.run_block, number)
            if id(block) in parts:
                self._wrap_compiled(session, parts.pop(id(block)), around)
            elif block is not session.model:
                self._wrap_forward(block, around)
        for module in parts.values():
            self._wrap_compiled(session, module, _call)
        for encoder in fused.find_encoders(session.model):
            self._wrap_encoder(session, encoder)
        self._wrap_forward(session.model, session.run_model)

    def _compile(self, session: Session, module: nn.Module) -> Callable[..., None]:
        """`module.compile()` of a wrapped model, between two steps: as before wrap, and what comes next is planned for anew."""

        def compile_part(*args: Any, **kwargs: Any) -> None:
            with session.turn:
                session.check_between_steps("compile()")
                for other, names in self._replaced.values():
                    _put_back(other, {name: names.pop(name) for name in ("forward", compiled.CALL) if name in names})
                before = module.__dict__.get(compiled.CALL, changes.ABSENT)
                try:
                    type(module).compile(module, *args, **kwargs)
                    compiled.check_compiled(session.model, session.wrapped.blocks, session.wrapped.compute.separate)
                except BaseException:
                    _put_back(module, {compiled.CALL: before})
                    raise
                finally:
                    self._wrap_calls(session)
                session.runner.forget_habits()
                session.fitter.forget_batches()

        return compile_part

    def put_in(self, module: nn.Module) -> dict[str, Any]:
        """What wrapping put into the module's `__dict__`: names, and what stood there before."""
        return {KEY: changes.ABSENT} | self._replaced.get(id(module), (module, {}))[1]

    def are_in(self, module: nn.Module) -> bool:
        """Whether wrapping put something into the module."""
        return id(module) in self._replaced

    def keep(self, *handles: Any) -> None:
        """Of hooks that were put elsewhere: they go when these go."""
        self._handles.extend(handles)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, names in self._replaced.values():
            _put_back(module, names)
        self._replaced.clear()

    def _replace(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        self._replaced.setdefault(id(module), (module, {}))[1].setdefault(name, module.__dict__.get(name, changes.ABSENT))
        module.__dict__[name] = method

    def _wrap_forward(self, module: nn.Module, around: Around) -> None:
        forward = module.forward

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            changes.check_not_compiled(module)
            return around(forward, args, kwargs)

        self._replace(module, "forward", wrapped)

    def _wrap_compiled(self, session: Session, module: nn.Module, around: Around) -> None:
        """What `module.compile()` made takes all parameters of the module in one call; `around` is around that."""
        call = module.__dict__[compiled.CALL]
        numbers = session.wrapped.numbers_in(module)

        def run_compiled(*args: Any, **kwargs: Any) -> Any:
            return session.runner.call_compiled(call, args, kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            return _call_together(session, numbers, run_compiled, args, kwargs)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            changes.check_not_compiled(module)
            return around(run, args, kwargs)

        self._replace(module, compiled.CALL, wrapped)

    def _wrap_fused(self, session: Session, module: nn.Module) -> None:
        """Where it may run as one operation it takes all of its parameters in one call."""
        numbers = session.wrapped.numbers_in(module)

        def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if fused.runs_fused(module, args, kwargs):
                with torch.no_grad():  # nothing asks for a gradient
                    return _call_together(session, numbers, forward, args, kwargs)
            return forward(*args, **kwargs)

        self._wrap_forward(module, around)

    def _wrap_encoder(self, session: Session, encoder: nn.TransformerEncoder) -> None:
        """Its first layer is in place, where that may run as one operation, before the encoder looks, until the layer has run."""
        first = encoder.layers[0]
        numbers, held = session.wrapped.numbers_in(first), list[Together]()
        name = compiled.CALL if compiled.is_compiled(first) else "forward"
        run_first = getattr(first, name)

        @functools.wraps(run_first)
        def wrapped_first(*args: Any, **kwargs: Any) -> Any:
            try:
                return run_first(*args, **kwargs)
            finally:
                while held:
                    held.pop().release()

        def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            held.clear()
            if not fused.runs_fused(first, args, kwargs):
                return forward(*args, **kwargs)
            with session.together(numbers) as together:
                held.append(together)
                return forward(*args, **kwargs)

        self._replace(first, name, wrapped_first)
        self._wrap_forward(encoder, around)

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

    def _watch_state(self, session: Session, module: nn.Module) -> None:
        values, states, wrapped = session.values, session.states, session.wrapped

        def loads(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
            before_load(values, wrapped.own_numbers(module), state_dict, prefix)

        def fill(module: nn.Module, state_dict: Any, prefix: str, _metadata: Any) -> None:
            states.fill_state_dict(wrapped.own_numbers(module), state_dict, prefix)

        def check(_module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
            changes.check_load(session.engine, metadata)

        self._handles.append(module.register_load_state_dict_pre_hook(check))
        if session.wrapped.master_array:
            self._handles.append(module.register_load_state_dict_pre_hook(loads))
        handle = module.register_state_dict_post_hook(fill)
        order: Any = module._state_dict_hooks
        order.move_to_end(handle.id, last=False)  # hooks of the program see what they would without us
        self._handles.append(handle)


def _put_back(module: nn.Module, names: dict[str, Any]) -> None:
    """What stood in the module's `__dict__` before stands there again."""
    for name, before in names.items():
        module.__dict__.pop(name, None)
        if before is not changes.ABSENT:
            module.__dict__[name] = before


def _call_together(
    session: Session, numbers: list[int], call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call what reads these parameters at once."""
    with session.together(numbers) as together:
        result = call(*args, **kwargs)
    return mark_views(result, session, together.found)


def _call(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(*args, **kwargs)


def _load_state_dict(session: Session, module: nn.Module) -> Callable[..., Any]:
    load, loads = module.load_state_dict, session.values.loads

    @functools.wraps(load)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        with loads.of_state_dict():
            found = load(*args, **kwargs)
        if module is session.model and _has_all_parameters(module, getattr(found, "missing_keys", None)):
            loads.end(PARAMETERS)
        return found

    return load_state_dict


def _has_all_parameters(model: nn.Module, missing: Sequence[str] | None) -> bool:
    """Whether what was loaded had every parameter, by one of its names: files have a tied one but once. None: nobody says."""
    if missing is None:
        return False
    named = list(model.named_parameters(remove_duplicate=False))
    loaded = {id(p) for name, p in named if name not in missing}
    others = set(missing).difference(
        (name for name, _ in named), (name for name, _ in model.named_buffers(remove_duplicate=False))
    )
    return not others and all(id(p) in loaded for _, p in named)


def _zero_grad(session: Session) -> Callable[..., None]:
    def zero_grad(set_to_none: bool = True) -> None:
        """As nn.Module.zero_grad; gradients that left memory are dropped too."""
        check_set_to_none(set_to_none)
        session.zero_grad()
        with DisableTorchFunction():
            for p in session.params:  # those that are no parameter of the optimizer's too
                p.grad = None

    return zero_grad
