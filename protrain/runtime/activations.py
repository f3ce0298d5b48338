"""Activations: what becomes of the tensors that autograd saves.

Saved-tensor hooks see each of them. Memory of a parameter on disk is recognised and passed through: autograd gets a small record,
and unpacking it in backward is the demand for the parameter's chunk. For everything else a block's mode decides:

    keep             it stays
    swap             it goes to the stash (csrc/runtime/stash.h), and comes back before backward asks for it
    checkpoint       only its place in the order of saved tensors is noted; the block's forward runs again, with the same random
                     numbers, when the first of them is asked for
    checkpoint_swap  the same, and the block's inputs go to the stash until then

The hooks themselves are C (csrc/python/saved_type.c, of recomputed blocks recomputed_type.c). As torch's own non-reentrant
checkpoint does, recomputation stops at the last tensor that was saved.

The innermost hooks are the only ones that torch calls. Those that others push inside a block (torch.utils.checkpoint, for a part
of it) get what is saved there, parameters too; a block inside hooks of others is refused, because both would claim the same
tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .. import _core
from ..base.counting import uncounted
from ..errors import PlanError
from ..model import keycaches, randomness, surroundings
from ..model.compiled import functions_behind, grad_fns
from ..model.modulestate import ModuleState, objects_as_now
from ..model.parameters import ChunkTensor, DisableTorchFunction, mark_views
from ..model.strides import copied_bytes
from .blockinputs import Input, aliases, bring_inputs, copied_inputs, is_leaf, no_leaves, stash_inputs, versions_of
from .otherhooks import Hooks, pop, push, top

if TYPE_CHECKING:
    from ..device.compute import Compute
    from .running import Runner


class SavedParameter:
    """A saved tensor that lies in a parameter's memory: which parameter, and how the tensor shows it."""

    __slots__ = ("conj", "dtype", "neg", "number", "offset_bytes", "owner", "size", "stride", "version")

    def __init__(self, number: int, tensor: torch.Tensor, offset_bytes: int, owner: torch.Tensor) -> None:
        self.number = number
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()
        self.offset_bytes = offset_bytes  # from the parameter's first
        self.owner = weakref.ref(owner)
        self.version = owner._version

    def over(self, memory: torch.Tensor, first_bytes: int) -> torch.Tensor:
        """The tensor again, over memory in which the parameter begins at this byte."""
        found = memory if self.dtype == memory.dtype else memory.new_empty(0, dtype=self.dtype).set_(memory.untyped_storage())
        found = found.as_strided(self.size, self.stride, (first_bytes + self.offset_bytes) // found.element_size())
        found = found.conj() if self.conj else found
        return torch._neg_view(found) if self.neg else found


def check_version(now: int, saved: int, shape: Any) -> None:
    """As autograd does, which does not look at versions where hooks are set.

    Raises:
        RuntimeError: the tensor was changed in place after it was saved.
    """
    if now != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(shape)} is at version {now}; expected version {saved} instead"
        )


class Stop(BaseException):
    """Ends a recomputation that has brought back all that was saved."""


class _Until:
    """A recomputation inside ends by `Stop`, or by what the interpreter of TorchScript makes of it: a RuntimeError of its own."""

    def __init__(self, order: _core.SavedOrder) -> None:
        self._order = order

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> bool:
        return kind is not None and (kind is Stop or (self._order.stopped and issubclass(kind, RuntimeError)))


def over_nothing(tensor: torch.Tensor) -> torch.Tensor | None:
    """An alias that shares the tensor's version counter and lies over no memory; None of a sparse or nested tensor and of a class
    with dispatch of its own, which have none."""
    with DisableTorchFunction():
        alias = tensor.detach()
        if type(alias) is not torch.Tensor or alias.layout is not torch.strided or alias.is_nested:
            return None
        alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias


class BlockHabits:
    """What is known of how a block's forward treats what it is given.

    in_place: whether it changes its inputs, so that a recomputation needs copies of them; None: not known yet, and one forward
    on copies, where the budget has room for them, finds out. compiled: it, or a part of it, is. large: see ModuleState.
    """

    __slots__ = ("compiled", "in_place", "large")

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.in_place: bool | None = None
        self.large: set[str] = set()


class Frame:
    """One forward of one recomputed block: its inputs, the random and module state it started from, and what it saved.

    stash: hooks by which inputs leave memory until the recomputation; None: they stay.
    """

    def __init__(
        self,
        runner: Runner,
        number: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stash: _core.SavedTensors | None,
    ) -> None:
        self.runner, self.forward = runner, forward
        self.number, (self.name, self.block) = number, runner.blocks[number]
        self.commits = runner.commits()
        self.habits = runner.habits[number]
        leaves, spec = tree_flatten((args, kwargs))
        leaves, self.caches = keycaches.copied(leaves)
        leaves, objects = objects_as_now(leaves)
        self.given: Any = tree_unflatten(leaves, spec)  # forward may change its containers; None: it is over
        self.given_versions = versions_of(leaf for leaf in leaves if type(leaf) is torch.Tensor)
        copied = self.habits.in_place
        if copied is None:
            copied = runner.can_copy(copied_bytes(leaf for leaf, _ in self.given_versions))
        inputs, kept = self.given, leaves
        if copied:
            views = self.habits.in_place is True or not self.habits.compiled  # compiled code can depend on what is a view
            inputs = copied_inputs(self.given, views)
        if stash is not None:
            inputs = stash_inputs(stash, inputs, self.habits.compiled, copied)
        if inputs is not self.given:
            kept = tree_leaves(inputs)
        self.copied, self.stashes = copied, stash is not None
        self.inputs: Any = inputs  # None: the block was recomputed, or cannot be
        self.changed = False  # forward changed its inputs, and there is no copy of them
        self.versions = versions_of(kept)
        self.parameters = runner.versions_in(number)
        self.compute = runner.compute
        others = list(leaves)
        for parent in runner.parents[number]:
            others += vars(parent).values()
        self.state: Any = ModuleState(self.block, self.habits.large, others, objects, compared=not self.compute.separate)
        self.random_state = _random_state(self.compute)
        self.drawn = randomness.now()  # what generators outside of torch were; None of those that forward did not draw from
        kind = self.compute.device.type
        self.autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        self.surroundings = surroundings.now()
        self.order = runner.stash.order(self)  # of what it saves
        self.ends = grad_fns(self.given) if self.habits.compiled else set()
        self.code: list[type] = []  # classes of what the forward ran of compiled code

    # ---- forward ----

    def settle(self, result: Any, failed: bool) -> None:
        """Forward is over: copies of what it left alone go. failed: it has not come to its end."""
        if self.inputs is None:  # it has asked for what it had saved
            self.given, self.given_versions = None, []
            return
        self.state.settle()
        keycaches.settle(self.caches)
        self.drawn = randomness.drawn_since(self.drawn)
        if self.habits.compiled:
            self.code = [type(node) for node in functions_behind(result, self.ends)]
            self.ends = set()
        in_place = any(leaf._version != version for leaf, version in self.given_versions)
        if self.copied and not in_place:
            if self.stashes and any(type(leaf) is Input for leaf in tree_leaves(self.inputs, is_leaf=is_leaf)):
                owners = [(over_nothing(leaf), version) for leaf, version in self.given_versions]
                self.versions = [(owner, version) for owner, version in owners if owner is not None]
            else:
                self.inputs, self.copied = self.given, False
                self.versions = versions_of(tree_leaves(self.inputs))
        if in_place and not self.copied:
            # They have this forward in their graph: they would hold the frame, and it them, for ever.
            self.inputs, self.versions, self.changed = None, [], True
        if in_place or (self.habits.in_place is None and not failed):
            self.habits.in_place = in_place
        self.given, self.given_versions = None, []

    def give_up(self) -> None:
        """Settling failed. What forward had changed in place has it in its graph, and must not be held by it."""
        self.given, self.given_versions = None, []
        self.inputs, self.versions, self.caches, self.state, self.changed = None, [], [], None, True

    # ---- recomputation ----

    def recompute(self) -> None:
        if self.changed or any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: block "
                f"{self.name} is recomputed, and its input was changed after its forward began; wrap with block_modes that "
                "keep this block, or change a copy of its input"
            )
        if self.runner.changed_since(self.block, self.commits):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: block "
                f"{self.name} is recomputed, and optimizer.step() changed its parameters after its forward; call backward() "
                "before step(), or wrap with block_modes that keep this block"
            )
        if self.runner.versions_in(self.number) != self.parameters:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: block "
                f"{self.name} is recomputed, and a parameter of it was changed in or behind its forward; change it behind "
                "backward, or wrap with block_modes that keep or swap this block"
            )
        inputs = bring_inputs(self.inputs)
        if not (self.habits.in_place or self.habits.compiled):  # compiled code looks at what is a view, and puts no hooks on
            with torch.enable_grad():
                inputs = aliases(inputs)
        before_bytes = self.runner.bytes_in_use()
        now = _random_state(self.compute)
        enabled, dtype, cache = self.autocast
        self.order.begin_again(self.runner.stash, None if self.habits.compiled else Stop)

        def unpack(_saved: Any) -> torch.Tensor:
            raise RuntimeError("backward inside a recomputed block is not supported")

        thread = self.runner.come_in()
        try:
            self.compute.set_random_state(self.random_state)
            with (
                self.runner.residency.node_waits(),
                _Until(self.order),
                randomness.kept(self.drawn),
                self.state.restored(),
                torch.enable_grad(),
                torch._C._EnableTorchFunction(),  # which a loss of a subclass turns off around its backward
                surroundings.restored(self.surroundings),
                torch.autocast(self.compute.device.type, dtype=dtype, enabled=enabled, cache_enabled=cache),
            ):
                args, kwargs = no_leaves(inputs) if self.habits.in_place else inputs
                ends = grad_fns((args, kwargs)) if self.habits.compiled else set()
                result = _run_inside(self.runner, self, (self.order.pack_again, unpack), self.forward, args, kwargs)
            if self.habits.compiled and [type(node) for node in functions_behind(result, ends)] != self.code:
                raise RuntimeError(
                    f"block {self.name} ran other compiled code when it was recomputed than in its forward, as it may where "
                    "several shapes are under way: compile it with dynamic=True, or wrap with block_modes that keep or swap it"
                )
        finally:
            self.runner.thread = thread
            self.compute.set_random_state(now)
        self.runner.note_saved(self.number, before_bytes)
        self.order.over = True
        self.inputs, self.versions, self.caches, self.state = None, [], [], None


def _random_state(compute: Compute) -> Any:
    """Counts in no budget, as Python's own does not: 5 KB for each block."""
    with uncounted():
        return compute.random_state()


# ---- running a block ----


def _run_block(
    runner: Runner,
    number: int,
    frame: object,
    hooks: Hooks,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the forward of block `number` inside of its hooks.

    Raises:
        PlanError: it uses a transform of torch.func that torch refuses inside of saved-tensor hooks.
    """
    try:
        return _run_inside(runner, frame, hooks, forward, args, kwargs)
    except RuntimeError as error:
        text = str(error)
        if not (text.startswith("torch.func.") and "saved tensor hooks" in text):
            raise
        raise PlanError(
            f"block {runner.blocks[number][0]} of mode {runner.modes[number]} uses a transform of torch.func (grad, vjp, jacrev, "
            "hessian), which torch does not allow where saved tensors go through hooks: pass block_modes with keep for this block"
        ) from error


def _run_inside(
    runner: Runner, frame: object, hooks: Hooks, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a block's forward with its hooks; `frame` says that they, not those of operations, see what is saved."""
    before = runner.frame, runner.innermost
    depth = len(runner.pushed)
    try:
        _enter(runner, hooks)
        runner.frame, runner.innermost = frame, hooks[0]
        return forward(*args, **kwargs)
    finally:
        runner.frame, runner.innermost = before
        leave(runner, depth)


def _enter(runner: Runner, hooks: Hooks) -> None:
    runner.pushed.append(hooks)
    push(*hooks)


def leave(runner: Runner, depth: int = 0) -> None:
    """No more than the `depth` outermost of the runner's hooks are left, wherever an interrupt came between."""
    while len(runner.pushed) > depth:
        innermost = top(True)
        if innermost is not None and innermost[0] is runner.pushed[-1][0]:
            pop()
        runner.pushed.pop()


def run_swapped(runner: Runner, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of block `number` so that what it saves goes to the stash."""
    runner.stash.block, runner.stash.compiled = number, runner.habits[number].compiled
    return _run_block(runner, number, runner.stash, runner.stash_hooks, forward, args, kwargs)


def run_checkpointed(
    runner: Runner,
    number: int,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stash_inputs: bool,
) -> Any:
    """Run the forward of block `number` so that backward runs it again instead of keeping what it saves.

    Args:
        stash_inputs: its inputs go to the stash until then.
    """
    runner.stash.block, runner.stash.compiled = number, runner.habits[number].compiled
    frame = Frame(runner, number, forward, args, kwargs, runner.stash if stash_inputs else None)
    result, failed = None, True
    try:
        result = _run_block(runner, number, frame, (frame.order.pack, frame.order.unpack), forward, args, kwargs)
        failed = False
    finally:  # one that fails may have changed its inputs, or left somebody what is differentiated through
        try:
            frame.settle(result, failed)
        except BaseException:
            frame.give_up()
            raise
    return result


# ---- running one operation outside of blocks ----


class _SavedByOuter:
    """What the hooks around an operation packed, and how they unpack it. parameter: the one on disk that they were given."""

    __slots__ = ("packed", "parameter", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor], parameter: SavedParameter | None) -> None:
        self.packed, self.unpack, self.parameter = packed, unpack, parameter


def _hooks_within(runner: Runner, outer: Hooks) -> Hooks:
    """All that is saved goes to the hooks of others that are around the operation, a parameter on disk as a view of it: whatever
    they do with that, now or later, finds its bytes. What they give back of it as it is stays a record, as without them."""
    outer_pack, outer_unpack = outer
    residency = runner.residency

    def pack(tensor: torch.Tensor) -> Any:
        parameter = residency.saved_parameter(tensor)
        if parameter is None:
            return _SavedByOuter(outer_pack(tensor), outer_unpack, None)
        with DisableTorchFunction():
            view = mark_views(tensor.detach(), residency.owner, [parameter.number])
        with torch._C._EnableTorchFunction():
            return _SavedByOuter(outer_pack(view), outer_unpack, parameter)

    def unpack(saved: _SavedByOuter) -> torch.Tensor:
        found = saved.unpack(saved.packed)
        if not isinstance(found, ChunkTensor) or found._protrain[0] is not residency.owner:
            return found
        record = residency.saved_view(found, found._protrain[1])
        if saved.parameter is not None:
            record.version = saved.parameter.version
        return residency.unpack_parameter(record)

    return pack, unpack


def run_operation(runner: Runner, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation on parameters on disk with hooks that recognise their memory."""
    outer = top(True)
    if outer is not None and outer[0] is runner.innermost:
        return func(*args, **kwargs)  # the block's own hooks do
    depth = len(runner.pushed)
    try:
        _enter(runner, runner.operation_hooks if outer is None else _hooks_within(runner, outer))
        return func(*args, **kwargs)
    finally:
        leave(runner, depth)
