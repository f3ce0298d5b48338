"""A plan for hardware that is not there: a model on meta, a machine from a file, and the same planner.

Three parts of a profile come from counting instead of measuring. Memory: a dry run (dryrun.py), with parameters and gradients of
two bytes for mixed precision and 12 bytes of state beside them (fp32 master weight and two moments), or of four bytes and 8 of
state. Times: the operations of each phase against what the device computes and what its memory carries. Lanes: the file's
(hardware.py).

A dry run counts CPU kernels. For a device of another kind three things are counted differently, and the rest as it is:
  - Attention is fused there with dropout too, so it runs without dropout here: with it the CPU would hold every score.
  - The workspace of kernels is that of `gpu_workspace_bytes`, not the table of CPU kernels (workspace.py).
  - What the driver and libraries hold for themselves is the file's reserved_bytes, which the planner never gets.
Known to be counted high: a mask of dropout, in the activations' own type here, in one byte there.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _core
from ..base.reading import given_as
from ..base.sizes import check_count, format_bytes, parse_bytes
from ..dryrun.phases import DryRun, DryRunError
from ..dryrun.repetition import dry_run_alike
from ..dryrun.workspace import workspace_bytes
from ..errors import BudgetError, PlanError
from ..model.blocks import find_blocks
from ..model.layout import STATE_BYTES, chunk_size, describe, pack
from ..model.strides import dense_like
from .hardware import Hardware, load_hardware
from .planning import anew_from_profiles, plan_from_profile
from .plans import Plan, check_modes
from .profiles import Profile, Times
from .smallest import refuse

#: precision -> (type of parameters, bytes of a parameter and of its gradient, bytes of optimizer state beside it).
PRECISIONS = {"fp32": (torch.float32, 4, 8), "mixed": (torch.bfloat16, 2, 12), "bf16": (torch.bfloat16, 2, 12)}

_ENDLESS_BYTES = 1 << 50


# ---- memory ----


def gpu_workspace_bytes(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]) -> int:
    """What a GPU's kernel of an operation holds beside its outputs while it runs, where it grows with the batch. Matrix products
    have workspaces of a fixed size, which reserved_bytes is for; a convolution's is the library's choice: the CPU's stands here.
    """
    match operation._schema.name:
        case "aten::_scaled_dot_product_flash_attention_for_cpu_backward":  # the gradient of queries, summed in fp32; a sum a row
            batch, heads, rows, size = args[1].shape
            return 4 * batch * heads * (-(-rows // 128) * 128) * (-(-size // 32) * 32 + 1)
        case "aten::embedding_dense_backward":  # indices, sorted, with their origins
            return 4 * args[1].numel() * args[1].element_size()
        case "aten::convolution" | "aten::convolution_backward":
            return workspace_bytes(operation, args, kwargs, outputs)
    return 0


def _without_dropout(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def fused(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return fused


@contextmanager
def _no_attention_dropout() -> Iterator[None]:
    """Inside, attention is fused as a GPU's is, whose kernels drop out inside themselves. (A mode of torch would miss what
    backward recomputes.)"""
    attention = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = _without_dropout(attention)
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = attention


def _on_meta(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy without data whose floating-point parameters are of this type; the model stays as it is."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        kind = dtype if p.is_floating_point() else p.dtype
        memo[id(p)] = nn.Parameter(dense_like(p, kind, "meta"), requires_grad=p.requires_grad)
        memo[id(p.grad)] = None
    memo.pop(id(None), None)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise PlanError(f"model: this {type(model).__name__} cannot be copied: {type(error).__name__}: {error}") from error


def _built(model_or_config: Any, dtype: torch.dtype) -> nn.Module:
    """A model in training mode on meta; only read where one is given."""
    if isinstance(model_or_config, nn.Module):
        return _on_meta(model_or_config, dtype).train()
    if not hasattr(model_or_config, "model_type"):
        raise TypeError(f"model is {given_as(model_or_config)}; give a torch.nn.Module, or a config of transformers")
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(model_or_config, dtype=dtype)
    except ValueError as error:
        raise PlanError(f"model: transformers has no causal language model of this config: {error}") from None
    return model.train()


# ---- times ----


def counted_times(run: DryRun, hardware: Hardware, precision: str = "mixed") -> Times:
    """What each phase takes, in seconds: its matrix products at the device's rate or its bytes at the rate of its memory,
    whichever is more, and what lies between operations. Recomputation is the forward up to the last tensor that the block saved.

    Raises:
        PlanError: the file has no rate for the precision.
    """
    rate = hardware.device.flops(_operand_type(hardware, precision), hardware.source or hardware.name)
    memory, between = hardware.device.memory_bytes_per_second, hardware.device.operation_seconds

    def seconds(flops: int, moved_bytes: int, operations: int) -> float:
        return max(flops / rate, moved_bytes / memory) + operations * between

    again = {number: seconds(*counts) for number, counts in run.recomputed().items()}
    own = [seconds(phase.flops, phase.moved_bytes, phase.operations) for phase in run.phases]
    return Times(tuple((taken, again.get(number, 0.0)) for number, taken in enumerate(own)))


def _operand_type(hardware: Hardware, precision: str) -> str:
    """ "mixed" is bf16 where the device has it, else fp16."""
    if precision != "mixed":
        return precision
    return "bf16" if "bf16" in hardware.device.flops_per_second or "fp16" not in hardware.device.flops_per_second else "fp16"


# ---- plans ----


def profile_offline(
    model_or_config: Any,
    hardware: Hardware | str | Path,
    *,
    memory: int | str | None = None,
    batch: int = 1,
    seq: int = 1024,
    precision: str = "mixed",
    n_devices: int | None = None,
) -> Profile:
    """What `plan_offline` plans from: counted memory and times, and the file's lanes. `to_json` keeps it.

    Args: as those of `plan_offline`; memory decides about the size of chunks alone.

    Raises:
        PlanError: the hardware's file is wrong, or the model cannot be counted; the reason is named.
        TypeError, ValueError: an argument is wrong; it is named.
    """
    hardware = _resolve(hardware, n_devices)
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; allowed are {', '.join(map(repr, PRECISIONS))}")
    dtype, param_bytes, state_bytes = PRECISIONS[precision]
    check_count(batch, "batch")
    check_count(seq, "seq")
    model = _built(model_or_config, dtype)
    blocks = find_blocks(model)
    parameters = describe(model.parameters(), [block for _, block in blocks])
    chunks = pack(parameters, chunk_size(parameters, _device_budget(hardware, memory)))
    ids = torch.empty((batch, seq), dtype=torch.long, device="meta")
    kwargs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs["use_cache"] = False
    try:
        gpu = hardware.host is not None
        with _no_attention_dropout() if gpu else nullcontext():
            run, _ = dry_run_alike(
                model, kwargs, blocks, chunks, round_bytes=_core.rounded_bytes,
                workspace=gpu_workspace_bytes if gpu else workspace_bytes,
            )  # fmt: skip
    except DryRunError as error:
        raise PlanError(f"model: its memory cannot be foreseen: {error}") from error
    return Profile(
        parameters=parameters,
        n_blocks=len(blocks),
        n_states=state_bytes // param_bytes,
        chunk_bytes=chunks.chunk_bytes,
        run=run,
        times=counted_times(run, hardware, precision),
        machine=hardware.machine(param_bytes, state_bytes),
        model=type(model).__name__,
        widening=STATE_BYTES // param_bytes,
    )


def plan_offline(
    model_or_config: Any,
    hardware: Hardware | str | Path,
    *,
    memory: int | str | None = None,
    host_memory: int | str | None = None,
    batch: int = 1,
    seq: int = 1024,
    precision: str = "mixed",
    n_devices: int | None = None,
    block_modes: list[str] | None = None,
) -> Plan:
    """The plan, with its forecast, that a training on this hardware would have; nothing of the model's size is allocated.

    Args:
        model_or_config: a causal language model on any device, or a config of transformers; only read.
        hardware: a description, the name of one that ships, or the path of a TOML file.
        memory: the budget of one device, in bytes or as "20GiB"; None: all that it has.
        host_memory: of the host, for all devices together; None: all that it has.
        batch: sequences in a step of one device. seq: tokens of a sequence.
        precision: "mixed" (bf16 or fp16 parameters and gradients, 12 bytes of fp32 state), "bf16" (the same), or "fp32".
        n_devices: use so many of the devices; None: all.
        block_modes: the mode of each block, for experiments.

    Raises:
        BudgetError: nothing fits memory and host memory, and there is no disk, or not enough of it.
        PlanError: the hardware's file is wrong, or the model cannot be counted; the reason is named.
        TypeError, ValueError: an argument is wrong; it is named.
    """
    hardware = _resolve(hardware, n_devices)

    def profiled(asked: int | str | None) -> Profile:
        return profile_offline(model_or_config, hardware, memory=asked, batch=batch, seq=seq, precision=precision)

    profile = profiled(memory)
    try:
        return plan_for(profile, hardware, memory=memory, host_memory=host_memory, block_modes=block_modes)
    except BudgetError as error:
        if error.budget_bytes != _device_budget(hardware, memory) or str(error).startswith(("host_memory", "disk")):
            raise  # another tier is too small
        n = hardware.n_devices
        host = hardware.host_bytes if host_memory is None else parse_bytes(host_memory, "host_memory")
        anew = anew_from_profiles(
            profiled, profile.parameters, most_bytes=hardware.device_bytes, host_budget_bytes=host // n,
            disk_budget_bytes=_disk_budget(hardware), n_ranks=n, modes=check_modes(block_modes, profile.n_blocks),
        )  # fmt: skip
        raise refuse(error, "a step of this batch", anew=anew) from None


def plan_for(
    profile: Profile,
    hardware: Hardware,
    *,
    memory: int | str | None = None,
    host_memory: int | str | None = None,
    block_modes: list[str] | None = None,
) -> Plan:
    """The plan of a profile that `profile_offline` made for this hardware and as many devices, for other budgets of it as well.

    Raises:
        BudgetError: as `plan_offline`.
    """
    budget, host = _device_budget(hardware, memory), hardware.host_bytes
    if host_memory is not None:
        host = parse_bytes(host_memory, "host_memory")
        if hardware.host is None or host > hardware.host_bytes:
            raise ValueError(
                f"host_memory is {host_memory!r}; {hardware.source or hardware.name} has {format_bytes(hardware.host_bytes)}"
            )
    n = hardware.n_devices
    modes = check_modes(block_modes, profile.n_blocks)
    try:
        return plan_from_profile(
            profile, budget, host_budget_bytes=host // n, disk_budget_bytes=_disk_budget(hardware), n_ranks=n, modes=modes
        )
    except BudgetError as error:
        raise _named(error, profile, hardware, budget, host, modes) from None


def _named(
    error: BudgetError, profile: Profile, hardware: Hardware, budget: int, host: int, modes: list[str] | None
) -> BudgetError:
    """The refusal, in the words of the disk or of the host where it is that which is full."""
    if str(error).startswith("host_memory"):
        return error
    if hardware.disk is not None and (smallest := _smallest_disk(profile, hardware, budget, host, modes)):
        all_bytes = hardware.n_devices * smallest
        return BudgetError(
            f"disk: a step of this batch fits a device, but its states do not fit {format_bytes(hardware.disk.capacity_bytes)} "
            f"of disk; the smallest disk that works is {format_bytes(all_bytes)} ({all_bytes} bytes); or give more memory or "
            f"host_memory, or a smaller model",
            needed_bytes=all_bytes,
            budget_bytes=hardware.disk.capacity_bytes,
            smallest_bytes=all_bytes,
        )
    if hardware.host is None:
        return error
    try:
        plan_from_profile(profile, budget, host_budget_bytes=_ENDLESS_BYTES, n_ranks=hardware.n_devices, modes=modes)
    except BudgetError:
        return error
    rest = "the disk" if hardware.disk else "no disk"
    return BudgetError(
        f"host_memory: a step of this batch fits a device, but its states do not fit {format_bytes(host)} of host memory "
        f"and {rest}; give more of it, or a device with {format_bytes(error.smallest_bytes)}",
        needed_bytes=error.needed_bytes,
        budget_bytes=error.budget_bytes,
        smallest_bytes=error.smallest_bytes,
    )


def _smallest_disk(profile: Profile, hardware: Hardware, budget: int, host: int, modes: list[str] | None) -> int | None:
    """Bytes of disk for each device from which on there are plans; None: it is not the disk that is too small."""

    def disk_bytes(disk_budget: int) -> int | None:
        try:
            return plan_from_profile(
                profile, budget, host_budget_bytes=host // hardware.n_devices, disk_budget_bytes=disk_budget,
                n_ranks=hardware.n_devices, modes=modes,
            ).disk_bytes  # fmt: skip
        except BudgetError:
            return None

    smallest, refused = disk_bytes(0), _disk_budget(hardware)
    while smallest is not None and smallest - refused > 1:
        middle = (smallest + refused) // 2
        found = disk_bytes(middle)
        smallest, refused = (smallest, middle) if found is None else (found, refused)
    return smallest if smallest is not None and smallest > _disk_budget(hardware) else None


def _disk_budget(hardware: Hardware) -> int:
    """Of one device."""
    return max(hardware.disk.capacity_bytes // hardware.n_devices, 1) if hardware.disk else 0


def _resolve(hardware: Hardware | str | Path, n_devices: int | None) -> Hardware:
    if not isinstance(hardware, Hardware):
        return load_hardware(hardware, n_devices=n_devices)
    return hardware if n_devices is None else hardware.with_devices(n_devices)


def _device_budget(hardware: Hardware, memory: int | str | None) -> int:
    if memory is None:
        return hardware.device_bytes
    budget = parse_bytes(memory)
    if budget > hardware.device_bytes:
        raise ValueError(
            f"memory is {memory!r}; a device of {hardware.source or hardware.name} has {format_bytes(hardware.device_bytes)}"
        )
    return budget
