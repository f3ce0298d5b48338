"""Saved-tensor hooks and backward passes of others, around what runs here: of hooks the innermost alone are called, and gradients
of a backward inside another one would be a part of those of the step's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..base.counting import uncounted
from ..errors import PlanError, StepError
from ..model.parameters import DisableTorchFunction
from .outside import inside_transform, outside_modes

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

push = torch._C._autograd._push_saved_tensors_default_hooks
pop = torch._C._autograd._pop_saved_tensors_default_hooks
top = torch._C._autograd._top_saved_tensors_default_hooks

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
#: Where torch's own functions of that name are.
_BACKWARDS = ("torch.autograd", "torch._tensor")


@contextmanager
def no_outer_hooks() -> Iterator[None]:
    """What runs inside is seen by no saved-tensor hooks of others, and by no dispatch modes, which count what runs, for one."""
    outer: list[Hooks] = []
    while (hooks := top(True)) is not None:
        pop()
        outer.append(hooks)
    try:
        with outside_modes():
            yield
    finally:
        for pack, unpack in reversed(outer):
            push(pack, unpack)


def release_failed_backward() -> None:
    """A backward that ended in an exception leaves its graph in torch's queue, with all it saved, until the next backward of the
    thread begins: so make one, of nothing."""
    if torch._C._current_graph_task_id() != -1 or inside_transform():
        return  # this is a backward, or a transform of torch.func, which takes none
    with uncounted(), no_outer_hooks(), torch.inference_mode(False), torch.enable_grad(), DisableTorchFunction():
        torch.zeros((), requires_grad=True).clone().backward()


def check_outer_hooks(name: str, block: nn.Module, mode: str) -> None:
    """Whether a block of a mode other than keep may run here.

    Raises:
        PlanError: it is inside saved-tensor hooks of others, runs in backward, as in a hook on a gradient or in
            torch.utils.checkpoint, or is a layer of transformers that checkpoints itself.
    """
    itself = getattr(block, "gradient_checkpointing", False) and block.training
    in_backward = torch._C._current_graph_task_id() != -1
    if top(True) is None and not in_backward and not itself:
        return
    if in_backward:
        raise PlanError(
            f"block {name} of mode {mode} runs inside a backward pass, as in a hook on a gradient or in torch.utils.checkpoint: "
            "call the model before or after backward(), call model.gradient_checkpointing_disable(), or pass block_modes with "
            "keep for this block"
        )
    raise PlanError(
        f"block {name} of mode {mode} runs inside torch.utils.checkpoint or other saved-tensor hooks, which claim the same "
        f"tensors: call model.gradient_checkpointing_disable(), end the hooks before the model's forward, or pass block_modes "
        f"with keep for this block"
    )


def n_backwards() -> int:
    """So many backward passes run inside one another on this thread."""
    frame, found = sys._getframe(1), 0
    while frame is not None:
        found += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    return found


def check_not_nested(allowed: int) -> None:
    """Whether the backward pass under way is not inside another one: its gradients would be a part of those of the step's pass.

    Args:
        allowed: frames of a backward that a hook is inside of in any case.

    Raises:
        StepError: it is.
    """
    frame, depth, maker = sys._getframe(1), 0, None
    while frame is not None:
        depth += frame.f_code is _RUN_BACKWARD
        where = frame.f_globals.get("__name__", "")
        if maker is None and depth == 1 and frame.f_code.co_name == "backward" and where not in _BACKWARDS:
            maker = frame.f_code.co_qualname, where
        frame = frame.f_back  # type: ignore[assignment]
    if depth <= allowed:
        return
    made = "" if maker is None else f", made by {maker[0]} of {maker[1]}"
    if maker is not None and maker[1] == "torch.utils.checkpoint":
        remedy = "pass use_reentrant=False to torch.utils.checkpoint, or leave recomputation to block_modes"
    else:
        remedy = (
            "a torch.autograd.Function may ask for gradients by torch.autograd.grad, and return them; reversible layers that "
            "accumulate them in its backward, as Reformer's, cannot be trained"
        )
    raise StepError(f"a backward pass runs inside another one{made}: {remedy}")
