"""What a user does to a wrapped model other than training it: values put in through `.data`, conversions, copies, pickles.

Values are taken over where they fit. What would leave the model half in the hands of torch, or copy what is in a slot instead of
a parameter, is refused by name.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from .. import _core
from ..base.counting import uncounted
from ..errors import PlanError, StepError
from ..model.compiled import CALL
from ..model.parameters import DisableTorchFunction, without_gradients
from ..model.precision import has_master
from ..model.recording import refuse_recording
from ..model.strides import dense_strides
from ..optim.optimizers import check_set_to_none
from .residency import storage_of

if TYPE_CHECKING:
    from ..state.values import Values
    from .wrapped import Wrapped

#: In place of what stood under a name where nothing did.
ABSENT: Any = object()

_AGAIN = "call protrain.unwrap(model), change it, and wrap it again"
_KEPT = f"a wrapped model's parameters keep their shape, type and device: {_AGAIN}"


def check_value(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, value: torch.Tensor) -> None:
    """Whether a parameter can be given this value by `.data`.

    Raises:
        PlanError: it is of another shape, type or device.
    """
    if value.shape != shape or value.dtype != dtype or value.device != device or value.layout != torch.strided:
        raise PlanError(
            f"parameter {name} of shape {tuple(shape)}, {dtype} on {device}, was given data of shape {tuple(value.shape)}, "
            f"{value.dtype} on {value.device}; {_KEPT}"
        )


def set_data(values: Values, number: int, value: torch.Tensor) -> None:
    """`p.data = value` of a parameter on disk: its values are taken over, and its strides.

    Raises:
        PlanError: the value is of another shape, type or device.
        StepError: a step is under way.
    """
    p, layout = values.wrapped.params[number], values.wrapped.layout
    if value is p or values.residency.shows(value, number):
        return
    check_value(layout.entries[number].name, p.shape, layout.dtype, values.wrapped.compute.device, value)
    with torch.no_grad(), uncounted():
        value = value.clone()
        for other in values.residency.who_shows(number):  # that are in memory, and have what this one was from here on
            shows = values.wrapped.params[other]
            shows.data = _taken(values, shows.data, set())
        values.residency.part_views(number, lambda: values.get(number))
        _take_over(values, number, value)
    torch.autograd.graph.increment_version(p)  # what autograd saved of it is gone


def adopt(values: Values, only: int | None = None) -> None:
    """Parameters in memory whose `.data` was set lie somewhere else now, or otherwise: their values are taken over, and their
    strides, and their place is again that in their chunk. What showed their memory shows what it did. only: those of the chunk
    of this one.

    Raises:
        PlanError: they are of another shape, type or device, or their memory is another one; or something shows memory of their
            chunk, and others of it were given no other values, so that it cannot be told whose it shows.
        StepError: a step is under way.
    """
    layout = values.wrapped.layout
    if only is None:
        _check_places(values)
    found: dict[int, list[int]] = {}
    for chunk in range(layout.n_chunks) if only is None else (layout.entries[only].chunk,):
        begin = values.residency.begin(chunk)
        if begin is not None and values.engine.in_memory(chunk):
            elsewhere = [number for number in layout.members[chunk] if not _lies(values, number, begin)]
            if elsewhere:
                found[chunk] = elsewhere
    if found:
        _adopt(values, found)


def _lies(values: Values, number: int, begin: int) -> bool:
    """Whether a parameter is where it is in its chunk, which begins at this address."""
    p, layout = values.wrapped.params[number], values.wrapped.layout
    entry = layout.entries[number]
    if not entry.count:
        return True
    try:
        here = p.data_ptr() == begin + entry.offset_bytes
    except RuntimeError:  # it has the memory of one that is on disk, which is shut
        return False
    return here and p.dtype == layout.dtype and p.stride() == entry.strides


def _adopt(values: Values, found: dict[int, list[int]]) -> None:
    params, layout = values.wrapped.params, values.wrapped.layout
    with DisableTorchFunction(), torch.no_grad(), uncounted():
        shown = _shown(values, found)
        given = {number: params[number].data for numbers in found.values() for number in numbers}
        for number, tensor in given.items():
            check_value(
                layout.entries[number].name, layout.entries[number].shape, layout.dtype, values.wrapped.compute.device, tensor
            )
        ours = {storage_of(values.residency.base(chunk)) for chunk in found}
        taken = {number: _taken(values, tensor, ours) for number, tensor in given.items()}
        try:
            for chunk in shown:
                values.residency.part(chunk)
            for number in given:
                params[number].data = values.residency.place(number)
                _take_over(values, number, taken[number])
                del taken[number]
        except BaseException:
            for number in taken:
                params[number].data = given[number]
            raise


def _taken(values: Values, given: torch.Tensor, ours: set[int]) -> torch.Tensor:
    """What a tensor shows that a parameter was given, in memory that is not about to be written; ours: storages that are."""
    shown = values.residency.shown(given)
    if shown is None:
        return given.clone() if storage_of(given) in ours else given
    whole = values.wrapped.compute.to_device(values.get(shown))  # of a parameter on disk
    first = given.storage_offset() - values.wrapped.layout.entries[shown].offset_bytes // given.element_size()
    return whole.as_strided(given.shape, given.stride(), first)


def _shown(values: Values, found: dict[int, list[int]]) -> list[int]:
    """Of chunks some of whose parameters lie elsewhere, those whose memory something else shows.

    Raises:
        PlanError: others of such a chunk lie where they did.
    """
    layout = values.wrapped.layout
    own = Counter(storage_of(p) for p in values.wrapped.params)
    shown = [chunk for chunk in found if values.residency.is_shown(chunk, own)]
    for chunk in shown:
        others = [number for number in layout.members[chunk] if layout.entries[number].count and number not in found[chunk]]
        if others:
            raise PlanError(
                f"parameter {layout.entries[found[chunk][0]].name} was given other data while a tensor over memory of its chunk "
                f"is alive, as p.data and p.detach() make one, and {layout.entries[others[0]].name} beside it was given none: "
                "keep copies, p.detach().clone()"
            )
    return shown


def _check_places(values: Values) -> None:
    """Whether torch has parameters where the engine has them. It moves the memory that a tensor shows to share it with other
    processes, unseen by us, and what lay there with it.

    Raises:
        PlanError: it does not.
    """
    moved = values.residency.moved()
    if moved is not None:
        name = values.wrapped.layout.entries[values.wrapped.layout.members[moved][0]].name
        raise PlanError(
            f"the memory of parameter {name} was moved, as share_memory_() does and giving a parameter to another process: give "
            f"away copies, p.detach().clone(); {_AGAIN}"
        )


def _take_over(values: Values, number: int, value: torch.Tensor) -> None:
    """The parameter has these values, of memory of their own, and lies as they do; its state and its master lie likewise."""
    entry, strides = values.wrapped.layout.entries[number], dense_strides(value)
    if strides == entry.strides:
        values.write(number, value)
        return
    before = entry.strides
    states = [(array, values.get(number, array)) for array in _arrays(values, number)]
    entry.strides = strides
    try:
        for array, tensor in (*states, (0, value)):
            values.write(number, tensor, array)
    except BaseException as error:
        entry.strides = before
        if not isinstance(error, StepError):  # which refuses the first
            values.loads.mix(f"{entry.name} was to lie otherwise, which failed half-way")
        raise
    values.strides_changed = True
    if values.residency.address(number) is not None:
        with DisableTorchFunction():
            values.wrapped.params[number].data = values.residency.place(number)


def _arrays(values: Values, number: int) -> list[int]:
    """The parameter's state and its master, as far as there is something in them."""
    entry, wrapped = values.wrapped.layout.entries[number], values.wrapped
    trained = entry.group >= 0 and values.engine.steps(number) > 0
    masters = [wrapped.master_array] if has_master(wrapped, number) else []
    return [*range(1, wrapped.n_states + 1), *masters] if trained else masters


def check_parameters(wrapped: Wrapped) -> None:
    """Whether the model still has the parameters that were wrapped.

    Raises:
        PlanError: one was added or replaced; it is named.
    """
    known = wrapped.number_of
    for prefix, module in wrapped.model.named_modules():
        for leaf, p in module._parameters.items():
            if id(p) not in known and isinstance(p, nn.Parameter):
                name = f"{prefix}.{leaf}" if prefix else leaf
                raise PlanError(f"parameter {name} was added or replaced after wrap: {_AGAIN}")


def name_parameters(wrapped: Wrapped) -> set[int]:
    """Parameters have the names that the model gives them now, by which a checkpoint knows them: they may have been tied, or have
    changed places, since wrap. Returns those that are no part of the model any more, whose names are their own all the same.

    Raises:
        PlanError: a parameter was added or replaced; it is named.
    """
    check_parameters(wrapped)
    names = {wrapped.number_of[id(p)]: name for name, p in wrapped.model.named_parameters()}
    taken, gone = set(names.values()), set[int]()
    for number, entry in enumerate(wrapped.layout.entries):
        if number not in names:
            gone.add(number)
            names[number] = entry.name if entry.name not in taken else f"{entry.name} before"
        entry.name = names[number]
    return gone


def check_frozen(wrapped: Wrapped) -> None:
    """Whether the optimizer has no more to train than it had at wrap.

    Raises:
        PlanError: a parameter was unfrozen, or given a gradient; it is named.
    """
    with DisableTorchFunction():
        frozen = [(number, wrapped.params[number]) for number in wrapped.frozen]
        thawed = next((number for number, p in frozen if p.requires_grad or p.grad is not None), None)
    if thawed is not None:
        raise PlanError(
            f"parameter {wrapped.layout.entries[thawed].name} was frozen at wrap, so that it has no state, and is to be trained "
            f"now: {_AGAIN}; or wrap the model with it unfrozen, and freeze it then"
        )


def check_groups(wrapped: Wrapped) -> None:
    """Whether the optimizer's groups have the parameters that they had at wrap.

    Raises:
        PlanError: some were added, taken out or given to another group.
    """
    if [[id(p) for p in group["params"]] for group in wrapped.groups] != wrapped.grouped:
        raise PlanError(
            f"optimizer: parameters were added to its groups, or taken out, after wrap: {_AGAIN}; to leave some untrained, call "
            "requires_grad_(False) of them"
        )


def check_load(engine: _core.Engine, metadata: dict[str, Any]) -> None:
    """Before load_state_dict changes a module.

    Raises:
        PlanError: assign=True, which would put other parameters into the model.
        StepError: gradients wait for a step; parameters on disk cannot be written, and those in memory alone are not to be.
    """
    if engine.has_gradients():
        raise StepError("load_state_dict in the middle of a step: call optimizer.step() or optimizer.zero_grad() first")
    if metadata.get("assign_to_params_buffers"):
        raise PlanError("load_state_dict(assign=True) would replace the parameters of a wrapped model; load without assign")


def check_not_compiled(module: nn.Module) -> None:
    """Whether the module's forward runs as torch has it, not inside torch.compile.

    Raises:
        PlanError: something around it was compiled.
    """
    if torch._C._dynamo.eval_frame.get_eval_frame_callback():
        raise PlanError(
            f"a wrapped {type(module).__name__} runs inside torch.compile, which is not supported: call it uncompiled, and "
            "compile its blocks in place, block.compile()"
        )


def guard(
    module: nn.Module, own: torch.dtype, device: torch.device, put_in: Callable[[nn.Module], dict[str, Any]]
) -> dict[str, Callable[..., Any]]:
    """Methods that stand in front of the module's own while it is wrapped: conversions, copies, pickles.

    Args:
        own: the type of parameters. device: where they are computed with.
        put_in: gives the names of what wrapping put into a module's `__dict__`, and what stood there before.
    """

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for dtype in {own} | {buffer.dtype for buffer in module.buffers()}:
            probe = torch.empty(0, dtype=dtype, device=device)
            found = fn(probe)
            if found.device.type == "cpu" and found.is_shared():
                raise PlanError(f"a wrapped {type(module).__name__} cannot be put into shared memory: {_AGAIN}")
            if found.device != probe.device or (dtype == own and found.dtype != dtype):
                raise PlanError(f"the {type(module).__name__} cannot become {found.dtype} on {found.device}: {_KEPT}")
        with without_gradients():  # as it changes neither type nor device
            return type(module)._apply(module, fn, recurse)

    def reduce(_protocol: Any = None) -> NoReturn:
        raise PlanError(
            f"a wrapped {type(module).__name__} cannot be pickled, nor copied by copy.copy: take its state_dict(), call "
            "protrain.save, or copy.deepcopy, which gives a plain model"
        )

    def duplicate(memo: dict[int, Any]) -> nn.Module:
        own = getattr(type(module), "__deepcopy__", None)
        if own is None:
            return copied(module, memo, put_in(module))
        with as_before(module, put_in(module)), uncounted():
            made: nn.Module = own(module, memo)
            return made

    def zero_grad(set_to_none: bool = True) -> None:
        check_set_to_none(set_to_none)
        for p in module.parameters():
            p.grad = None  # without a look at it, which would be an error where it has left memory

    return {
        "_apply": apply, "__reduce_ex__": reduce, "__deepcopy__": duplicate, "__prepare_scriptable__": refuse_recording,
        "zero_grad": zero_grad,
    }  # fmt: skip


def is_own(hook: Any) -> bool:
    """Whether a module's hook is one of a session's."""
    hook = getattr(hook, "hook", hook)
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith("protrain.")


def _has_hooks(name: str, value: Any) -> bool:
    """Whether an attribute of a module is one of torch's tables of hooks."""
    return name.endswith("_hooks") and isinstance(value, dict)


def _without_own(hooks: dict[Any, Any]) -> dict[Any, Any]:
    """Those of the user."""
    return type(hooks)((key, hook) for key, hook in hooks.items() if not is_own(hook))


@contextmanager
def as_before(module: nn.Module, ours: dict[str, Any]) -> Iterator[None]:
    """Inside, the module is without what wrapping put into it, for a class that copies its objects itself: a parametrized one, or
    the user's. A copy with a forward of the session's would run the module that it is a copy of. ours: as `copied` has it."""
    now, own = dict(module.__dict__), module.__dict__
    try:
        for name, before in ours.items():
            own.pop(name, None)
            if before is not ABSENT:
                own[name] = before
        own.update((name, _without_own(value)) for name, value in now.items() if _has_hooks(name, value))
        yield
    finally:
        own.update(now)


def copied(module: nn.Module, memo: dict[int, Any], ours: dict[str, Any]) -> nn.Module:
    """A deep copy of a wrapped module: a plain one, its parameters in memory that counts in no budget, not compiled, as in
    torch. ours: the names in its `__dict__` that wrapping put there, and what stood there before."""
    made: nn.Module = type(module).__new__(type(module))
    memo[id(module)] = made
    for name, value in module.__dict__.items():
        value = ours.get(name, value)
        if value is ABSENT or name == CALL:
            continue
        if _has_hooks(name, value) and id(value) not in memo:
            value = _without_own(value)
        with uncounted():
            made.__dict__[name] = copy.deepcopy(value, memo)
    return made
