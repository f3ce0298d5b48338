"""What ProTrainTrainer's arguments may be: the words of protrain=dict(...), and the TrainingArguments it works with.

Everything that cannot work is refused here, by name, before a byte is allocated for it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from .. import api
from ..base.sizes import parse_bytes
from ..errors import PlanError

#: wrap's arguments that TrainingArguments have already, with their names there.
FROM_ARGUMENTS = {"accumulate": "gradient_accumulation_steps", "max_grad_norm": "max_grad_norm"}


def wrap_options(given: Any) -> dict[str, Any]:
    """The words of protrain=dict(...), checked.

    Raises:
        TypeError: it is no dict, or has a word that wrap does not know.
        ValueError: a size is none.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"protrain is {given!r}; give a dict of protrain.wrap's arguments, as dict(memory='4GiB')")
    allowed = [name for name in list(inspect.signature(api.wrap).parameters)[2:] if name not in FROM_ARGUMENTS]
    for name in given:
        if name in FROM_ARGUMENTS:
            raise TypeError(f"protrain: {name!r} comes from TrainingArguments; set {FROM_ARGUMENTS[name]} there")
        if name not in allowed:
            close = difflib.get_close_matches(str(name), allowed, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ";"
            raise TypeError(f"protrain: unknown key {name!r}{meant} allowed are {', '.join(allowed)}")
    for name in ("memory", "host_memory"):
        if given.get(name) is not None:
            parse_bytes(given[name], name)
    return dict(given)


def check_arguments(args: Any, options: dict[str, Any]) -> None:
    """Refuse what cannot work.

    Raises:
        PlanError: an argument that does not go together with protrain; it is named.
    """
    if args.fp16 or args.mixed_precision == "fp16":
        raise PlanError("TrainingArguments: fp16=True is not supported by protrain; use bf16=True, or neither")
    if args.bf16 or args.mixed_precision == "bf16":
        _check_bf16(options)
    for name in ("fp16_full_eval", "bf16_full_eval", "torch_compile"):
        if getattr(args, name, False):
            raise PlanError(f"TrainingArguments: {name}=True is not supported by protrain; leave it out")
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if getattr(args, name, None):
            raise PlanError(f"TrainingArguments: {name} does not go together with protrain, which moves the states itself")
    if args.world_size > 1:
        raise PlanError(f"TrainingArguments: this is one of {args.world_size} processes; protrain trains in one")
    if args.device.type not in ("cpu", "cuda"):
        raise PlanError(f"TrainingArguments: the device is {args.device}; protrain trains on cpu and cuda: set use_cpu=True")
    if args.n_gpu > 1:
        raise PlanError(
            f"TrainingArguments: there are {args.n_gpu} GPUs, and protrain trains on one: set CUDA_VISIBLE_DEVICES to it, or "
            "use_cpu=True"
        )


def takes_bf16(args: Any) -> bool:
    """Whether wrap's own bf16 stands in for the autocast that the arguments ask for."""
    return bool(args.bf16 or args.mixed_precision == "bf16")


def _check_bf16(options: dict[str, Any]) -> None:
    if options.get("precision", "bf16") != "bf16":
        raise PlanError(f"TrainingArguments: bf16=True, and protrain's precision is {options['precision']!r}; give one of them")
