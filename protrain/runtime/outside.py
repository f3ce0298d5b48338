"""Outside of what a program puts around a call and what would get the tensors that we make for ourselves: transforms of
torch.func and modes of dispatch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


def inside_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[object]:
    """Inside, none is: what is made is no tensor of its."""
    if not inside_transform():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def outside_modes() -> AbstractContextManager[object]:
    """Inside, no TorchDispatchMode is in force, as that of fake tensors is, which have no memory."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    return _disable_current_modes()
