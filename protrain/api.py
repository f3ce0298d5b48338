"""The public calls: wrap, plan, status, unwrap. Arguments are checked here; everything else is done elsewhere."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from . import _core
from .base.counting import counted, counted_alone
from .base.reading import given_as
from .base.sizes import (
    MOST_PASSES,
    check_count,
    check_folder,
    default_disk_folder,
    default_memory_bytes,
    format_bytes,
    free_memory_bytes,
    measuring_bytes,
    parse_bytes,
    warn_above_limit,
)
from .device.compute import Accelerator, Compute, choose
from .dryrun.dryrun import dry_run
from .dryrun.phases import DryRun, DryRunError
from .dryrun.workspace import MeasuredWorkspace, Workspace, workspace_bytes
from .errors import BudgetError, DiskError, Error, PlanError, StepError
from .model import keycaches, onmeta
from .model.blocks import find_blocks
from .model.compiled import check_compiled, find_compiled
from .model.layout import describe, make_layout
from .model.precision import check_dtypes, check_grads, converted, dtype_of, loose_grads_bytes, state_arrays, widened_bytes
from .model.strides import shared_memory
from .optim.footprint import Footprint
from .optim.foreign import Foreign
from .optim.optimizers import Optimizer, footprint_of, has_kernel, hyper_of, kind_of, n_states_for
from .planner.planning import anew_from_profiles, plan_from_profile
from .planner.plans import Plan, check_modes, check_numbers, check_plan
from .planner.profiles import Machine, Profile, Times
from .planner.smallest import refuse
from .profiling.calibration import measure_device, measure_machine
from .profiling.rehearsal import OtherWayError, RehearsalError, rehearse
from .profiling.timeline import StepTrace, Timeline
from .runtime.hooks import KEY
from .runtime.pacing import Measured
from .runtime.wrapped import Settings, Wrapped
from .session import Session
from .state import materialise

Model = TypeVar("Model", bound=nn.Module)

_open: weakref.WeakSet[Session] = weakref.WeakSet()


@dataclass(frozen=True)
class Status:
    """What really happened. Bytes are bytes, times are seconds.

    plan is the one in use; steps were completed; step_seconds and wait_seconds (of waiting for chunks, updates and memory)
    are of the last step, which begins when its first batch is planned for; memory_bytes counts now, peak_memory_bytes since
    wrap, all that counts against the budget; disk_read_bytes and disk_write_bytes since wrap, as the kernel counts them.
    budget_bytes is the hard budget; host_bytes (over a GPU) and disk_bytes are taken now; disk_engine names what moves bytes,
    "threads" or "io_uring". predicted_peak_bytes stands beside peak_memory_bytes: a batch made between steps, where nothing
    counts, is in plan.peak_bytes and not in it. predicted_step_seconds (0.0: no prediction) stands beside
    step_seconds.
    """

    plan: Plan
    steps: int
    step_seconds: float
    wait_seconds: float
    budget_bytes: int
    memory_bytes: int
    peak_memory_bytes: int
    host_bytes: int
    disk_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    disk_engine: str
    predicted_peak_bytes: int
    predicted_step_seconds: float

    # No field: figures can be compared, copied and written down, a step's events only be asked for.
    _step = cast("StepTrace | None", None)
    _measured = cast("Measured | None", None)

    def timeline(self) -> Timeline:
        """What the lanes did in the last completed step; ask soon, its events give way to those of later steps.

        Raises:
            StepError: no step is complete, its events or its model are gone, or this is a copy of what `status` gave.
        """
        if self._step is None:
            raise StepError(
                "timeline: no step is complete yet; call it after optimizer.step()"
                if self.steps == 0
                else "timeline: no events came with this status; call protrain.status(model).timeline() after optimizer.step()"
            )
        return self._step.timeline()

    def profile(self) -> Profile:
        """What real steps have shown of the batch that decides, and of the machine: what the plans in use come from. `to_json`
        keeps it, and `protrain plan --profile` plans by it, here or elsewhere.

        Raises:
            StepError: no plan was made from measured steps yet: two have to be like the largest batch; nor is one where `plan`
                was given to wrap, or the optimizer has no kernel; or this is a copy of what `status` gave.
            DiskError, DeviceError, BudgetError: everything was in memory, and what the disk carries cannot be measured now.
        """
        if self._measured is None:
            raise StepError(
                "profile: no plan was made from measured steps yet; call protrain.status(model).profile() after some steps, of a "
                "model that was wrapped without a plan, with an optimizer that has a kernel"
            )
        return self._measured.profile()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_step", "_measured")}


def session_of(model: Any) -> Session:
    """The session of a wrapped model.

    Raises:
        PlanError: the model is not wrapped.
    """
    session = find_session(model)
    if session is None:
        raise PlanError(f"this {type(model).__name__} is not wrapped; call protrain.wrap(model, optimizer) first")
    return session


def find_session(model: Any) -> Session | None:
    """The session of a wrapped model; None for anything else."""
    return model.__dict__.get(KEY) if isinstance(model, nn.Module) else None


def _check_model(model: Any) -> list[tuple[str, nn.Parameter]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {given_as(model)}; give a torch.nn.Module")
    if KEY in model.__dict__ or any(KEY in module.__dict__ for module in model.modules()):
        raise PlanError("model is wrapped already; unwrap it first")
    _check_not_shared(model)
    check_compiled(model, find_blocks(model))
    named = list(model.named_parameters())
    if not named:
        raise PlanError(f"model: this {type(model).__name__} has no parameter to train")
    scripted = next((name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise PlanError(
            f"model: {scripted or 'it'} is TorchScript, whose operations nobody sees; give the module that it is made of"
        )
    unmade = next((name for name, p in named if nn.parameter.is_lazy(p)), None)
    if unmade is not None:
        raise PlanError(f"model: parameter {unmade} has no shape yet; run the model once on a batch first")
    classes = ((name, type(p)) for name, p in named if type(p) is not nn.Parameter)
    if (other := next(classes, None)) is not None:
        raise PlanError(
            f"model: parameter {other[0]} is of the class {other[1].__name__}, which it could not be while it is on disk; train "
            "a model whose parameters are plain ones, not quantised or distributed"
        )
    return named


def _check_not_shared(model: nn.Module) -> None:
    """Whether no other model that is wrapped has a part of this one: each would move and update it as its own alone."""
    for session in list(_open):
        if session.closed:
            continue
        found = next((name for name, module in model.named_modules() if session.hooks.are_in(module)), None)
        if found is None:
            number_of = session.wrapped.number_of
            found = next((name for name, p in model.named_parameters() if id(p) in number_of), None)
        if found is None:
            continue
        raise PlanError(
            f"model: {found or 'it'} is a part of another model that is wrapped, a {type(session.model).__name__}: unwrap that "
            "first, wrap one model that has both as its parts, or give this one modules and parameters of its own"
        )


def _check_shared_memory(model: nn.Module, named: list[tuple[str, nn.Parameter]]) -> None:
    """Whether each parameter that is trained has memory of its own: it gets another place, where nothing else follows it."""
    trained = {name for name, p in named if p.requires_grad}
    for one, other in shared_memory([*named, *model.named_buffers()]):
        if one in trained or other in trained:
            raise PlanError(
                f"model: {one} and {other} share memory and are tensors of their own, which would part them: tie parameters by "
                "giving both modules the same nn.Parameter, or give one of the two memory of its own"
            )


def _check_over_device(optimizer: torch.optim.Optimizer) -> None:
    """What works in ordinary memory, and not yet over a device."""
    if not has_kernel(optimizer):
        raise PlanError(f"optimizer is {type(optimizer).__name__}; over a device it can be Adam, AdamW or SGD yet")


def _check_optimizer(optimizer: Any, named: list[tuple[str, nn.Parameter]]) -> dict[int, int]:
    """Group of each of the optimizer's parameters, by id."""
    kind_of(optimizer)
    owned = {id(p) for _, p in named}
    groups: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in owned:
                raise ValueError("optimizer: it holds a parameter that the model does not have; make it over model.parameters()")
            groups[id(p)] = number
    return groups


def _footprint(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], folder: str, budget: int, dtype: torch.dtype
) -> Footprint | None:
    found = footprint_of(optimizer, [p for _, p in named], folder, budget)
    if found is not None and dtype != torch.float32:
        raise PlanError(
            f"optimizer is {type(optimizer).__name__}; with precision='bf16' it can be Adam, AdamW or SGD: give one "
            f"of them, or precision='fp32'"
        )
    return found


def _check_norm(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"max_grad_norm is {value!r}; give a number above 0, or None")
    return float(value)


def _check_disk(disk: Any) -> str:
    if disk is None:
        disk = default_disk_folder()
    folder = check_folder(disk, "disk")
    if not os.path.isdir(folder):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            reason = f"disk is {folder!r}, which is no folder and cannot be made: {error.strerror}; name one on a disk"
            raise DiskError(reason, errno=error.errno or 0, filename=folder) from None
    return folder


def wrap(
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: str | os.PathLike[str] | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    precision: str = "fp32",
    plan: Plan | None = None,
    block_modes: list[str] | None = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> tuple[Model, Optimizer]:
    """Wrap a model and its optimizer: the same model object, and a torch optimizer over the same parameter groups.

    Training then is the ordinary loop, bit for bit that of plain torch, inside `memory`.

    Args:
        model: on the CPU, a GPU or meta; not compiled as a whole.
        optimizer: any torch optimizer over parameters of the model; the others are not trained.
        memory: hard budget in bytes, or as "4GiB": parameters, gradients, activations, buffers, workspace, all together. None:
            what is free now less a reserve, or the control group's limit. Where the budget given is above that limit, a
            UserWarning says so: it works as long as less is taken, and at the limit the kernel ends the process.
        host_memory: over a GPU, the budget of host memory for chunks and for activations of blocks that swap, and for what
            gradients and updates pass through. None: what is free now less a reserve. Host and device are one where the CPU
            computes.
        disk: folder for what does not fit. None: $PROTRAIN_DISK, else the temporary directory. A tmpfs is refused.
        accumulate: backward passes in each optimizer step; one more is a StepError, which backward raises.
        max_grad_norm: clip the global 2-norm as torch.nn.utils.clip_grad_norm_ does; optimizer.grad_norm is the norm before.
        precision: "fp32", or "bf16": bf16 parameters and gradients beside an fp32 master and moments, with Adam 16 bytes a
            parameter as in fp32, but half of the bytes that forward and backward read. An update widens the gradient, updates the
            master and rounds it to the parameter; the norm for max_grad_norm is that of the widened gradients. Parameters come as
            fp32, whose values the masters keep, or as bf16; frozen ones have no master. Only parameters change their type:
            buffers, such as rotary tables and running means, stay what they are; convert before wrap those that shall be bf16.
        plan: a Plan to use as it is. None: made from the first batch, before it runs, and again from the times of the first two
            steps.
        block_modes: the mode of each block, one for each: "keep", "swap", "checkpoint" or "checkpoint_swap". None: the plan's.
        param_init_fn: for parameters on meta: called once for each module that owns parameters, in the order of
            model.modules(), its own tensors materialised before, to initialise them in place.
        weights: for parameters on meta: a folder of safetensors, read slice by slice. What transformers saves in another form, as
            experts one by one, is made as it makes it, one parameter at a time within the budget. Persistent buffers that are
            there are read too.

    Returns:
        The model, the same object, and an `Optimizer` in place of the given one.

    Raises:
        BudgetError: the states cannot be trained within `memory`; smallest_bytes can, as far as that is known before a batch.
        PlanError, TypeError, ValueError: an argument is wrong or not supported; it is named, and nothing was changed.
        DiskError: the folder cannot be used.
        DeviceError: the GPU cannot be used.
    """
    named = _check_model(model)
    groups = _check_optimizer(optimizer, named)
    compute = choose(named)
    budget, host_budget = _budgets(compute, memory, host_memory)
    check_count(accumulate, "accumulate", MOST_PASSES)
    norm = _check_norm(max_grad_norm)
    dtype = dtype_of(precision)
    check_dtypes(named, dtype)
    _check_shared_memory(model, named)
    check_grads(named, dtype)
    blocks = find_blocks(model)
    check_compiled(model, blocks, compute.separate)
    if find_compiled(model):
        compute.will_compile()
    modes = check_modes(block_modes, len(blocks))
    if plan is not None:
        check_numbers(plan)
    if compute.separate:
        _check_over_device(optimizer)
    layout = make_layout(named, groups, [block for _, block in blocks], budget, plan.chunk_bytes if plan else None, dtype)
    if plan is not None:
        check_plan(plan, layout, len(blocks))
    if param_init_fn is not None and weights is not None:
        raise ValueError("param_init_fn and weights are both given; give one of them")
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(f"param_init_fn is {given_as(param_init_fn)}; give a function of a module")
    on_meta = next((name for name, p in named if p.device.type == "meta"), None)
    if on_meta and param_init_fn is None and weights is None:
        raise PlanError(f"model: parameter {on_meta} is on meta; give param_init_fn or weights")
    made_apart = next((name for name, p in named if p.is_inference()), None)
    if made_apart:
        raise PlanError(f"model: parameter {made_apart} was made in torch.inference_mode(), and has no version: make it outside")
    if weights is not None:
        weights = check_folder(weights, "weights")
        materialise.weight_files(weights)
    folder = _check_disk(disk)
    footprint = _footprint(optimizer, named, folder, budget, dtype)
    in_host, name = (host_memory, "host_memory") if compute.separate else (memory, "memory")
    if in_host is not None:
        warn_above_limit(host_budget if compute.separate else budget, name, stacklevel=2)
    if not compute.separate:
        _warn_together(budget)

    wrapped = Wrapped(
        model, layout, [p for _, p in named], blocks, kind_of(optimizer), optimizer.param_groups,
        Settings(budget, host_budget, folder, accumulate, norm, plan, modes), compute,
        Foreign(optimizer, footprint) if footprint else None, n_states_for(optimizer) if footprint is None else 0,
    )  # fmt: skip
    meta = onmeta.OnMeta(model)
    session = Session(wrapped)
    try:
        onmeta.fill_meta_buffers(model, param_init_fn is not None)
        wrapped.places.move_buffers(compute.device)
        session.engine.charge(wrapped.buffer_bytes)
        with counted(session.engine, compute):
            _fill(session, optimizer, param_init_fn, weights)
        session.hooks.install(session)
        ours = Optimizer(session, optimizer)
        optimizer.state.clear()  # it has moved; where wrap fails it is still there
    except BaseException as error:
        _close_unfinished(session, error)
        meta.put_back(error)
        raise
    model.__dict__[KEY] = session
    _open.add(session)
    weakref.finalize(ours, _end_counting, weakref.ref(session)).atexit = False
    session.engine.seek(0)
    return model, ours


def _end_counting(of: weakref.ref[Session]) -> None:
    """The optimizer that `wrap` returned is gone, and with it who could end a step: what is made from here on is the user's,
    though a backward that failed holds the model until the next one, wherever that is."""
    session = of()
    if session is not None and not session.closed:
        session.engine.leave_account()


def _budgets(compute: Compute, memory: int | str | None, host_memory: int | str | None) -> tuple[int, int]:
    """In bytes: of what computes, and of the host beside it."""
    budget = compute.default_memory_bytes() if memory is None else parse_bytes(memory)
    if host_memory is not None:
        host_bytes = parse_bytes(host_memory, "host_memory")
        if not compute.separate:
            warnings.warn(
                f"protrain: host_memory is {host_memory!r}, and not used: the model is on a CPU, where host and device are one; "
                f"memory is the budget of both",
                stacklevel=3,
            )
        return budget, host_bytes
    return budget, default_memory_bytes() if compute.separate else 0


def _warn_together(budget_bytes: int) -> None:
    """Where models are wrapped already, each has a budget of its own, and may fill it."""
    others = [session for session in list(_open) if not (session.closed or session.wrapped.compute.separate)]
    if not others:
        return
    theirs = sum(session.wrapped.settings.memory_bytes for session in others)
    try:
        free_bytes = free_memory_bytes() + sum(session.engine.held()["live_bytes"] for session in others)
    except OSError:  # the system doesn't tell, for instance as no file can be opened
        return
    if theirs + budget_bytes > free_bytes:
        wrapped = "the model that is" if len(others) == 1 else f"the {len(others)} models that are"
        warnings.warn(
            f"protrain: memory is {format_bytes(budget_bytes)} for this model and {format_bytes(theirs)} for {wrapped} wrapped "
            f"already, together above the {format_bytes(free_bytes)} that are free for them: the kernel ends this process where "
            f"they take more; give each memory, so that all fit, or unwrap what is not trained any more",
            stacklevel=3,
        )


def _close_unfinished(session: Session, error: BaseException) -> None:
    """The parameters are in memory again after a wrap that failed, as far as the disk gives them back."""
    try:
        session.close(as_given=True)
    except Exception as second:  # the first one tells
        error.add_note(f"protrain: the model's parameters cannot be read back from the disk either ({second}): make it anew")
        session.close(restore=False)


def _fill(
    session: Session,
    optimizer: torch.optim.Optimizer,
    param_init_fn: Callable[[nn.Module], Any] | None,
    weights: str | None,
) -> None:
    session.begin_fill()
    if weights is not None:
        materialise.from_weights(session, weights)
    elif param_init_fn is not None:
        materialise.from_function(session, param_init_fn)
    else:
        materialise.from_memory(session)
    if optimizer.state:
        session.states.import_optimizer({id(p): state for p, state in optimizer.state.items()})


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):  # a tokenizer's BatchEncoding is no dict
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    raise TypeError(f"batch is {type(batch).__name__}; give what the model takes: a dict, a tuple or a tensor")


def plan(
    model: nn.Module,
    batch: Any,
    *,
    memory: int | str | None,
    host_memory: int | str | None = None,
    device: Any = None,
    disk: str | os.PathLike[str] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    precision: str = "fp32",
    block_modes: list[str] | None = None,
) -> Plan:
    """Plan without training: nothing of the model changes, and nothing of its size is allocated.

    What a step computes is timed by a rehearsal: the model's operations with parameters that share a little memory. What the disk
    carries is measured in its folder, what the link to a GPU carries there. All of it once for a model and batch shape, so plans
    for several budgets compare. Where the rehearsal takes another way than was foreseen, the plan is made by memory alone, with a
    warning.

    Args:
        model: as `wrap` takes it, not wrapped; it may be on meta.
        batch: what the model takes: a dict or another mapping (keywords), a tuple (positions) or a tensor.
        memory, host_memory: the budgets, as in `wrap`.
        device: what computes, as "cpu" or "cuda". None: as in `wrap`, where the model is, or torch's default device.
        disk: folder for what does not fit, as in `wrap`.
        optimizer: whose state counts, and whose parameters are trained; None: Adam's two moments for each parameter that requires
            a gradient.
        accumulate, max_grad_norm, precision, block_modes: as in `wrap`.

    Raises:
        BudgetError: nothing fits, with the smallest budget that does.
        PlanError: the model cannot be planned for; the reason is named.
        TypeError, ValueError: the batch, a budget or a mode is wrong; it is named.
        DiskError: the folder cannot be used.
        DeviceError: the GPU cannot be used.
    """
    budget, host_budget = _budgets(choose(_check_model(model), device), memory, host_memory)
    modes = check_modes(block_modes, len(find_blocks(model)))

    def foreseen(asked: int) -> _Foreseen:
        return _foresee(model, batch, asked, device, disk, optimizer, accumulate, max_grad_norm, precision)

    found = foreseen(budget)
    beside = host_budget if found.profile.overhead is not None else 0

    def planned(profile: Profile) -> Plan:
        return plan_from_profile(profile, budget, host_budget_bytes=beside, modes=modes)

    try:
        untimed = planned(found.profile)  # by memory alone: what does not fit is refused before anything is timed
    except BudgetError as error:
        if error.budget_bytes != budget:  # host memory is what is too small
            raise
        anew = anew_from_profiles(
            lambda asked: foreseen(asked).profile, found.profile.parameters, host_budget_bytes=beside, modes=modes
        )
        raise refuse(error, "a step of this batch", anew=anew) from None
    if found.profile.footprint is not None:  # what its update takes, and when, is not simulated
        return untimed
    try:
        return planned(found.timed())
    except PlanError as error:
        if not isinstance(error.__cause__, OtherWayError):
            raise
        warnings.warn(f"protrain: the plan is made by memory alone, and says no time: {error.__cause__}", stacklevel=2)
        return untimed


def profile(
    model: nn.Module,
    batch: Any,
    *,
    memory: int | str | None = None,
    device: Any = None,
    disk: str | os.PathLike[str] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    precision: str = "fp32",
    measured: Profile | None = None,
) -> Profile:
    """What `plan` decides from: the memory of a step of this batch, its times, and the machine's lanes. `to_json` keeps it.

    Args: as those of `plan`; memory decides about the size of chunks alone.
        measured: a profile of the same steps on the same machine, whose times and lanes are taken; None: they are measured. Two
            measurements differ by some percent, so plans compare that come from one.

    Raises:
        PlanError: the model cannot be planned for, or measured is of other steps; the reason is named.
        DiskError: the folder cannot be used.
        DeviceError: the GPU cannot be used.
    """
    if measured is not None and not isinstance(measured, Profile):
        raise TypeError(f"measured is {given_as(measured)}; give a Profile, as protrain.profile returns it, or None")
    budget, _ = _budgets(choose(_check_model(model), device), memory, None)
    found = _foresee(model, batch, budget, device, disk, optimizer, accumulate, max_grad_norm, precision)
    if measured is None:
        return found.timed()
    if not measured.run.computes_as(found.profile.run):
        raise PlanError("measured: a step of this model and batch computes something else; give a profile of the same, or None")
    return replace(found.profile, times=measured.times, machine=measured.machine)


@dataclass(frozen=True)
class _Foreseen:
    """A profile without times and machine, and how they are measured."""

    profile: Profile
    times: Callable[[], Times]
    machine: Callable[[], Machine]

    def timed(self) -> Profile:
        return replace(self.profile, times=self.times(), machine=self.machine())


def _foresee(
    model: nn.Module,
    batch: Any,
    budget: int,
    device: Any,
    disk: str | os.PathLike[str] | None,
    optimizer: torch.optim.Optimizer | None,
    accumulate: int,
    max_grad_norm: float | None,
    precision: str,
) -> _Foreseen:
    """As `profile`, with chunks for this budget."""
    named = _check_model(model)
    compute = choose(named, device)
    if find_compiled(model):
        compute.will_compile()
    args, kwargs = _arguments(batch)
    dtype = dtype_of(precision)
    check_dtypes(named, dtype)
    n_states, fused = 2, True
    groups = {id(p): 0 for _, p in named if p.requires_grad}
    if optimizer is not None:
        groups = _check_optimizer(optimizer, named)
        if compute.separate:
            _check_over_device(optimizer)
    check_count(accumulate, "accumulate", MOST_PASSES)
    norm = _check_norm(max_grad_norm)
    folder = _check_disk(disk)
    footprint = _footprint(optimizer, named, folder, budget, dtype) if optimizer is not None else None
    if footprint is not None:
        n_states = 0
    elif optimizer is not None:
        hypers = [hyper_of(kind_of(optimizer), group) for group in optimizer.param_groups]
        n_states, fused = n_states_for(optimizer), all(hyper.fused for hyper in hypers)
    given, model = model, converted(model, dtype)
    trained = list(model.named_parameters())
    groups = {id(q): groups[id(p)] for (_, p), (_, q) in zip(named, trained, strict=True) if id(p) in groups}
    named = trained
    modules = [block for _, block in find_blocks(model)]
    layout = make_layout(named, groups, modules, budget, None, dtype)
    chunk_of = {id(p): entry.chunk for (_, p), entry in zip(named, layout.entries, strict=True)}
    workspace: Workspace = workspace_bytes
    if not compute.separate:
        workspace = MeasuredWorkspace(partial(counted_alone, folder, measuring_bytes(budget)))
    try:
        with keycaches.dropped(kwargs, keycaches.are_of_no_use(model)):
            run = dry_run(model, args, kwargs, modules, chunk_of, round_bytes=_core.rounded_bytes, workspace=workspace)
    except DryRunError as error:
        raise PlanError(f"model: its memory cannot be foreseen: {error}") from error
    loose_bytes = loose_grads_bytes(layout, [p for _, p in named])
    found = Profile(
        parameters=describe([p for _, p in named], modules, groups),
        n_blocks=len(modules),
        n_states=state_arrays(n_states, dtype),
        chunk_bytes=layout.chunk_bytes,
        run=replace(run, fixed_bytes=run.fixed_bytes + widened_bytes(layout, norm) + loose_bytes),
        times=Times(()),
        machine=Machine(),
        n_passes=accumulate,
        grads_outlive_backward=norm is not None or footprint is not None,
        model=type(model).__name__,
        footprint=footprint,
        overhead=compute.overhead if compute.separate else None,
        widening=layout.widening if footprint is None else 1,
    )
    return _Foreseen(
        found,
        times=lambda: _rehearsed(given, model, args, kwargs, modules, run, compute),
        machine=lambda: measure_device(compute, folder) if isinstance(compute, Accelerator) else measure_machine(folder, fused),
    )


_rehearsals: weakref.WeakKeyDictionary[nn.Module, dict[Any, Times]] = weakref.WeakKeyDictionary()


def _rehearsed(
    given: nn.Module, model: nn.Module, args: Any, kwargs: Any, blocks: list[nn.Module], run: DryRun, compute: Compute
) -> Times:
    """Of a rehearsal, made once for a given model, as it is and will be trained, and a batch of these shapes."""
    described = tree_map_only(torch.Tensor, lambda t: (tuple(t.shape), t.dtype), (args, kwargs))
    key = (
        repr(described),
        tuple((tuple(p.shape), p.stride(), p.dtype, p.requires_grad) for p in model.parameters()),
        tuple(module.training for module in model.modules()),
        torch.get_num_threads(),
        (str(compute.device), compute.separate),
    )
    known = _rehearsals.setdefault(given, {})
    if key not in known:
        try:
            with keycaches.dropped(kwargs, keycaches.are_of_no_use(model)):
                known[key] = rehearse(model, args, kwargs, blocks, run, compute=compute)
        except RehearsalError as error:
            raise PlanError(f"model: its steps cannot be timed by a rehearsal: {error.reason}") from error
    return known[key]


def status(model: nn.Module) -> Status:
    """What really happened so far.

    Raises:
        PlanError: the model is not wrapped.
    """
    session = session_of(model)
    stats = session.engine.stats()
    now = session.homes.arrangement.plan
    found = Status(
        plan=now,
        steps=session.steps,
        step_seconds=session.step_seconds,
        wait_seconds=session.wait_seconds,
        budget_bytes=session.wrapped.settings.memory_bytes,
        memory_bytes=stats["live_bytes"],
        peak_memory_bytes=stats["peak_bytes"],
        host_bytes=stats["host_bytes"],
        disk_bytes=stats["disk_bytes"],
        disk_read_bytes=stats["disk_read_bytes"],
        disk_write_bytes=stats["disk_write_bytes"],
        disk_engine=stats["disk_engine"],
        predicted_peak_bytes=session.predicted_peak_bytes,
        predicted_step_seconds=now.step_seconds,
    )
    object.__setattr__(found, "_step", session.clock.step)
    object.__setattr__(found, "_measured", session.pacer.measured())
    return found


def unwrap(model: Model) -> Model:
    """Make a wrapped model an ordinary torch model again: its parameters in memory, hooks, threads and files gone.

    The optimizer's state goes too: to train on in plain torch take `optimizer.state_dict()` before, which one of its class loads.
    Gradients of a step that was not made are dropped. With precision "bf16" the parameters are bf16, and the fp32 masters go.

    Returns:
        The model, the same object.

    Raises:
        PlanError: the model is not wrapped.
        DiskError: a parameter cannot be read back; the model is wrapped as before.
    """
    session = session_of(model)
    session.close()
    del model.__dict__[KEY]
    _open.discard(session)
    return model


def close_all() -> None:
    """At the end of the interpreter: threads end and files go while Python still can. What another thread is driving is left to
    the end of the process, which is not far: that thread may be inside of the engine."""
    driving = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    for session in list(_open):
        if session.driver in driving:
            continue
        try:
            session.engine.close()
        except Error:
            continue


def _forked() -> None:
    """In a forked child nobody has a turn: what the parent's other threads were doing does not go on here."""
    for session in list(_open):
        session.turn = session.values.turn = threading.RLock()


_core.install_allocator()
os.register_at_fork(after_in_child=_forked)
atexit.register(close_all)
