"""Precision: in which numbers parameters, gradients and the optimizer's state are.

"fp32": all of it. "bf16": parameters and gradients are bf16, and each trained parameter has an fp32 master beside its moments. An
update widens the gradient, updates the master as it would update an fp32 parameter, and rounds it to the nearest bf16 (ties to
even). So a step is that of a plain loop with torch's fused optimizer over the masters, where `master.grad = p.grad.float()` comes
before its step and `p.copy_(master)` after it; nothing is drawn at random.

Between updates a parameter is its master, rounded. An element that is not was written from outside, and what was written is its
master from then on; so a master that nobody set is its parameter, widened (csrc/optim/optim.h).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _core
from ..base.counting import uncounted
from ..base.sizes import MIB
from ..errors import PlanError
from .compiled import CALL, find_compiled
from .parameters import DisableTorchFunction
from .strides import dense_like, outermost_first

if TYPE_CHECKING:
    from ..runtime.wrapped import Wrapped
    from ..state.values import Values
    from .layout import Layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SLICE_COUNT = 4 * MIB  # elements that are widened at once


def dtype_of(precision: Any) -> torch.dtype:
    """The type of parameters and gradients.

    Raises:
        ValueError: there is no such precision.
    """
    if precision in ("fp16", "float16", torch.float16):
        raise ValueError(f"precision is {precision!r}, which needs gradients to be scaled and is not supported; use 'bf16'")
    if not isinstance(precision, str) or precision not in DTYPES:
        raise ValueError(f"precision is {precision!r}; allowed are 'fp32' and 'bf16'")
    return DTYPES[precision]


def check_dtypes(named: list[tuple[str, nn.Parameter]], dtype: torch.dtype) -> None:
    """Whether parameters can be trained in this type.

    Raises:
        PlanError: one is of a type that cannot become it.
    """
    known = (torch.float32,) if dtype == torch.float32 else (torch.float32, torch.bfloat16)
    for name, p in named:
        if p.dtype == torch.bfloat16 and p.dtype not in known:
            raise PlanError(f"parameter {name} is {p.dtype}; call model.float() first, or give precision='bf16'")
        if p.dtype not in known:
            raise PlanError(
                f"parameter {name} is {p.dtype}; only {' and '.join(map(str, known))} {'is' if len(known) == 1 else 'are'} "
                f"supported, call model.float() first"
            )


def check_grads(named: list[tuple[str, nn.Parameter]], dtype: torch.dtype) -> None:
    """Whether gradients that are there already can be gone on with.

    Raises:
        PlanError: one is of another type than gradients will be.
    """
    for name, p in named:
        if p.grad is not None and p.grad.dtype != dtype:
            raise PlanError(f"parameter {name} has a gradient of {p.grad.dtype}; call optimizer.zero_grad() before wrap")


def state_arrays(n_states: int, dtype: torch.dtype) -> int:
    """Arrays of the optimizer's state and of the master, counted in arrays of parameters: so the planner counts them."""
    return n_states if dtype == torch.float32 else 2 * (n_states + 1)


def widened_bytes(layout: Layout, max_grad_norm: float | None) -> int:
    """What the norm of a bf16 gradient takes while it is computed: the largest of them in fp32."""
    if layout.dtype != torch.bfloat16 or max_grad_norm is None:
        return 0
    return _core.rounded_bytes(max((4 * entry.count for entry in layout.entries if entry.group >= 0), default=0))


def loose_grads_bytes(layout: Layout, params: Sequence[nn.Parameter]) -> int:
    """What gradients of parameters take that are not the optimizer's, and not frozen: they stay in `.grad` until somebody drops
    them, which the optimizer does not."""
    with DisableTorchFunction():  # that of a parameter on disk takes longer
        loose = [entry.count for p, entry in zip(params, layout.entries, strict=True) if entry.group < 0 and p.requires_grad]
    return sum(_core.rounded_bytes(count * layout.dtype.itemsize) for count in loose if count)


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model as it will be trained: itself, or a copy of it with parameters of this type that have no values, on meta."""
    if all(p.dtype == dtype for p in model.parameters()):
        return model
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(dense_like(p, dtype, "meta"), requires_grad=p.requires_grad)
        memo[id(p.grad)] = None
    memo.pop(id(None), None)
    try:
        with uncounted():
            made = copy.deepcopy(model, memo)
    except Exception as error:
        raise PlanError(f"model: this {type(model).__name__} cannot be copied: {type(error).__name__}: {error}") from error
    for _, module in find_compiled(model):
        memo[id(module)].__dict__[CALL] = module.__dict__[CALL]  # a copy is not compiled, but what is trained will be
    return made


def saved_config(model: nn.Module, config: Any) -> Any:
    """A transformers config to save beside the model's weights: it names their type, in which they are read again."""
    types = {p.dtype for p in model.parameters()}
    if len(types) != 1:
        return config
    config, dtype = copy.deepcopy(config), types.pop()
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    for part in (config, *(part for part in parts if getattr(part, "dtype", None) is not None)):
        part.dtype = dtype
    return config


# ---- masters ----


def has_master(wrapped: Wrapped, number: int) -> bool:
    """Whether the parameter is one of bf16 that is trained."""
    return wrapped.master_array > 0 and wrapped.layout.entries[number].group >= 0


def master(values: Values, number: int) -> torch.Tensor:
    """An owned copy of a parameter's master in fp32, in no budget: what the next update begins from."""
    wrapped = values.wrapped
    entry = wrapped.layout.entries[number]
    with uncounted(), DisableTorchFunction():
        found = wrapped.compute.empty_on_host(entry.shape, torch.float32, entry.strides)
        if entry.count:
            values.engine.transfer(number, wrapped.master_array, wrapped.compute.on_host(found), False)
        rounded, wide = found.bfloat16(), values.get(number)
        written = (rounded.view(torch.int16) != wide.view(torch.int16)) & ~(rounded.isnan() & wide.isnan())
        return torch.where(written, wide.float(), found)


def write_master(values: Values, number: int, given: torch.Tensor, first: int = 0) -> None:
    """Set a part of a master, from element `first` of its memory on, from numbers of any float type: the parameter's, or rows of
    them that lie one after another there. Nothing where there is no master."""
    if not has_master(values.wrapped, number) or not given.numel():
        return
    compute, entry = values.wrapped.compute, values.wrapped.layout.entries[number]
    rows = given.permute(outermost_first(entry.shape, entry.strides)) if given.dim() else given.unsqueeze(0)
    step = max(_SLICE_COUNT * rows.shape[0] // rows.numel(), 1)
    with torch.no_grad(), DisableTorchFunction():
        for row in range(0, rows.shape[0], step):
            part = compute.to_host(rows[row : row + step].detach().to(dtype=torch.float32).contiguous())
            values.engine.transfer_part(number, values.wrapped.master_array, first, part.numel(), compute.on_host(part), True)
            first += part.numel()


def before_load(values: Values, own: dict[str, int], state_dict: Any, prefix: str) -> None:
    """A module's parameters are about to be loaded from a state dict: their masters take what it holds before it is rounded.
    Where it is bf16 too, a master that came from the optimizer's state dict stays."""
    for leaf, number in own.items():
        value = state_dict.get(prefix + leaf)
        if not isinstance(value, torch.Tensor) or value.shape != values.wrapped.layout.entries[number].shape:
            continue  # torch says what is wrong with it
        if value.dtype == torch.bfloat16 and number in values.masters_given:
            continue
        write_master(values, number, value)
