"""A model on meta: what of it is put back where filling it failed, and the buffers that are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..base.counting import uncounted
from ..errors import PlanError


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on meta and their buffers real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and param.device.type != "meta":
            module._parameters[name] = type(param)(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class OnMeta:
    """What of a model is on meta before it is filled: there it is put back where filling fails, so that it can be filled anew."""

    def __init__(self, model: nn.Module) -> None:
        self._params = [(name, p, torch.empty_like(p)) for name, p in model.named_parameters() if p.device.type == "meta"]
        self._buffers = [
            (module, leaf, buffer)
            for module in model.modules()
            for leaf, buffer in module._buffers.items()
            if buffer is not None and buffer.device.type == "meta"
        ]

    def put_back(self, error: BaseException) -> None:
        """error: why filling failed; it is noted there what cannot be put back."""
        for module, leaf, buffer in self._buffers:
            module._buffers[leaf] = buffer
        for name, p, as_it_was in self._params:
            try:
                become(p, nn.Parameter(as_it_was, requires_grad=p.requires_grad))
            except RuntimeError:  # torch does so only where nothing else refers to it, a view for instance
                error.add_note(f"protrain: parameter {name} is referred to, and cannot be on meta again: make the model anew")
                return


def become(p: nn.Parameter, other: nn.Parameter) -> None:
    """The same Python object, with its attributes, is now what the other is."""
    attributes = dict(p.__dict__)
    torch.utils.swap_tensors(p, other)
    p.__dict__.update(attributes)


# ---- buffers ----


def fill_meta_buffers(model: nn.Module, initialised: bool) -> None:
    """Buffers that were left on meta: transformers models recompute theirs, modules that own parameters get theirs from
    param_init_fn.

    Raises:
        PlanError: a buffer is on meta and nothing can fill it.
    """
    names = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    if not names:
        return
    known = transformers_buffers(model)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if name in known:
            module._buffers[leaf] = known[name]
        elif not (initialised and any(True for _ in module.parameters(recurse=False))):
            raise PlanError(
                f"model: buffer {name} is on meta and it is not known how to compute it; give it its values before wrap"
            )


def transformers_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a transformers model as its constructor makes them of a config; empty for other models."""
    if not hasattr(model, "config") or not hasattr(type(model), "_from_config"):
        return {}
    try:
        with torch.random.fork_rng(devices=[]), uncounted(), parameters_on_meta():
            fresh = type(model)(model.config)
    except Exception:  # a class of the user's that takes more than a config
        return {}
    return {name: buffer for name, buffer in fresh.named_buffers() if buffer.device.type != "meta"}
