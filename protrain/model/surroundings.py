"""Switches of torch that stand around a forward and change what its operations compute.

Contexts such as `torch.nn.attention.sdpa_kernel` are often around the forward alone; a block that is recomputed in backward runs
as if it were inside of them. Gradients and autocast are not among them: these are each recomputation's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

#: How each is read, which takes 50 ns, and set.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
)

#: A value of each switch, and the modes that see each torch call, the outermost first.
Surroundings = tuple[list[Any], list[TorchFunctionMode]]


def now() -> Surroundings:
    """What stands around what comes next."""
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
    return [read() for read, _ in _SWITCHES], modes


@contextmanager
def restored(seen: Surroundings) -> Iterator[None]:
    """Inside, `seen` stands."""
    before = now()
    if before == seen:
        yield
        return
    try:
        _stand(seen)
        yield
    finally:
        _stand(before)


def _stand(wanted: Surroundings) -> None:
    values, modes = wanted
    for (read, put), value in zip(_SWITCHES, values, strict=True):
        if read() != value:
            put(value)
    while torch._C._len_torch_function_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
