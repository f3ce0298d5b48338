"""While a pool is in use torch's allocator cuts no large segment, so that it gives back whole ones that lie free where the budget
is full.

Without that a step ends in torch.OutOfMemoryError although enough lies free: what is left of segments is too short for a large
tensor, such as logits, and torch gives no segment back while allocations are sent to a pool (gpupool.py). With
`max_split_size_mb` it does, and asks again: a segment at least as large is then used whole or lies free, and those that lie free
go, the largest first, until there is room. Known of torch 2.11 to 2.13, from its sources.

The setting is torch's own, one for the process, and is in force for blocks that were cut before too, of which torch would then
give back a part: so it is set where the pool begins, and taken back where it ends. In between all allocations on this GPU are the
pool's, which is a fresh one where the setting was another. Where other GPUs have memory of torch's, or the program made this
setting itself, it is left alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch

NAME = "max_split_size_mb"
#: Above 20, which torch takes as a whole for tensors of 1 to 10 MiB, and cuts. Tensors of 20 to 21 MiB get segments of 22, which
#: are not used for such again, and go where the budget is full.
LEAST_MIB = 21
#: As no setting, which torch has no word for: as many MiB as no GPU has.
NONE_MIB = 1 << 30

_C: Any = torch._C
_before: str | None = None  # the settings that are back in force when the pool ends; None: they are


def begin(number: int) -> None:
    """Segments of LEAST_MIB and more are not cut from now on, on GPU `number`, whose allocations go to a pool."""
    global _before
    change = getattr(_C, "_accelerator_setAllocatorSettings", None)
    if change is None or _before is not None or _others_have_memory(number):
        return
    settings = _settings()
    if any(one.startswith(NAME) and one != f"{NAME}:{NONE_MIB}" for one in settings):
        return
    kept = [one for one in settings if not one.startswith(NAME)]
    _before = ",".join([*kept, f"{NAME}:{NONE_MIB}"])
    change(",".join([*kept, f"{NAME}:{LEAST_MIB}"]))


def in_force() -> bool:
    """Whether they are not."""
    return _before is not None


def end() -> None:
    """Everything is cut again, as without a pool."""
    global _before
    if _before is not None:
        settings, _before = _before, None
        _C._accelerator_setAllocatorSettings(settings)


def _settings() -> list[str]:
    """As they are in force, one by one."""
    ask = getattr(_C, "_accelerator_getAllocatorSettings", None)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    text = str(ask()) if ask is not None else next((os.environ[name] for name in names if os.environ.get(name)), "")
    found: list[str] = []
    inside = ""  # of brackets
    for part in text.replace(" ", "").split(","):
        inside = f"{inside},{part}" if inside else part
        if inside.count("[") == inside.count("]"):
            found.append(inside)
            inside = ""
    return [one for one in found if one]


def _others_have_memory(number: int) -> bool:
    count = torch.cuda.device_count()
    return count > 1 and any(torch.cuda.memory_reserved(other) for other in range(count) if other != number)
