"""Running: each block of a forward in its mode, and each operation outside of blocks with the parameters it reads in place.

Both run inside saved-tensor hooks, so that what autograd saves of a parameter on disk is recognised and passed through. The
hooks of a block also see to its activations (activations.py); those of a single operation keep everything else as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any

import torch
from torch import nn

from .. import _core
from ..base.sizes import stash_least_bytes
from ..dryrun.phases import recomputes
from ..errors import PlanError, StepError
from ..model import keycaches
from ..model.compiled import frozen, functions_behind, grad_fns, has_compiled
from ..model.parameters import ADDRESSES, ChunkParameter, DisableTorchFunction
from ..model.recording import check_not_recorded
from ..profiling.blockclock import BlockClock
from .activations import (
    BlockHabits,
    leave,
    run_checkpointed,
    run_operation,
    run_swapped,
)
from .device_stash import DeviceStash, Stashed
from .otherhooks import Hooks, check_outer_hooks
from .outside import inside_transform
from .residency import Residency
from .wrapped import Wrapped

#: What a block does where nothing may leave memory: outside of a training step's forward.
WITHOUT_STASH = {"keep": "keep", "swap": "checkpoint", "checkpoint": "checkpoint", "checkpoint_swap": "checkpoint"}


def _check_may_read() -> None:
    """Whether parameters on disk may be read here.

    Raises:
        PlanError: they may not, inside a transform of torch.func, or where operations are recorded.
    """
    check_not_recorded()
    if inside_transform():
        raise PlanError(
            "a transform of torch.func (grad, vmap, jvp) reads parameters that are on disk: pass parameters of your own by "
            "torch.func.functional_call"
        )


@functools.lru_cache(maxsize=16)
def _last_recomputed(modes: tuple[str, ...]) -> list[int]:
    """Of each block the last one before it that is recomputed, or 0."""
    last, found = 0, []
    for number, mode in enumerate(modes):
        found.append(last)
        last = number if recomputes(mode) else last
    return found


def _parents(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules of the model that a module of this name is in."""
    parts = name.split(".") if name else []
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]


def writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a torch call is one that changes what it is given, by torch's names."""
    name = getattr(func, "__name__", "")
    return "out" in kwargs or name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and name[-2:] != "__")


class Together:
    """A context in which parameters are read at once, wherever they are: their chunks stay, and they are plain ones. Interrupts
    may come anywhere; what was begun is ended then.

    Attributes:
        found: numbers of those that were not plain before.

    Raises:
        PlanError: on entering, inside a transform of torch.func.
        StepError: on entering, another thread is inside of a block or of an operation.
    """

    def __init__(self, runner: Runner, numbers: Sequence[int]) -> None:
        self._runner, self._params = runner, runner._wrapped.params
        self.found = [number for number in numbers if isinstance(self._params[number], ChunkParameter)]
        self._chunks: list[int] = []
        self._depth = len(runner.plain)

    def __enter__(self) -> Together:
        if self.found:
            _check_may_read()
            self._runner.thread = self._runner.come_in()
            self._runner.residency.end_loans()
        self._versions = [self._params[number]._version for number in self.found]
        try:
            for chunk in self._runner.residency.bring(self.found):
                self._chunks.append(chunk)
            for number in self.found:
                self._runner.plain.append(self._params[number])
                self._params[number].__class__ = nn.Parameter  # type: ignore[assignment]
        except BaseException:
            self.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if self._chunks:
                self._write_back()
        except BaseException:
            if kind is None:  # else what came out of the context tells
                raise
        finally:
            self.release()

    def _write_back(self) -> None:
        """What was changed in place."""
        versions = zip(self.found, self._versions, strict=True)
        self._runner.residency.write_back(number for number, was in versions if self._params[number]._version != was)

    def release(self) -> None:
        """The context is over, whether it is left or not."""
        if self._chunks:
            self._runner._end_plain(self._depth)
        while self._chunks:
            self._runner._engine.unuse(self._chunks.pop())


class Runner:
    """Of one session's blocks and operations. Any thread may run them, one at a time: torch's hooks are each thread's own, what
    is known of them here is not.

    stashing: whether a forward of a training step goes on. unplanned: whether a block recorded gradients outside of one. depth:
    forwards of the model that run, one inside another.
    """

    def __init__(
        self, wrapped: Wrapped, engine: _core.Engine, residency: Residency, clock: BlockClock, modes: tuple[str, ...]
    ) -> None:
        self.blocks, self.residency, self.modes = wrapped.blocks, residency, modes
        self.parents = [_parents(wrapped.model, name) for name, _ in wrapped.blocks]
        self.compute = wrapped.compute
        self._wrapped, self._engine, self._clock = wrapped, engine, clock
        self.device_stash = (
            DeviceStash(engine, wrapped.compute, lambda: self.modes, clock.device) if clock.device is not None else None
        )
        self.forget_habits()
        self._noisy = [[part for part in block.modules() if isinstance(part, nn.RReLU)] for _, block in self.blocks]
        self.frame: Any = None  # of the block whose forward runs, or runs again
        self.innermost: Any = None  # the pack hook that it pushed
        self.thread: int | None = None  # that is inside of a block or of an operation
        self.pushed: list[Hooks] = []  # the saved-tensor hooks that blocks and operations are inside of, the innermost last
        self.plain: list[nn.Parameter] = []  # parameters on disk that are plain while compiled code reads them
        self.stashing = self.unplanned = False
        self.depth = 0
        self._saved: dict[int, int] | None = None  # in this pass, by blocks that were recomputed; None: nobody asks
        self._most_saved: dict[int, int] = {}  # in one of the passes before
        self._commits_of: dict[int, int] = {}  # of each parameter by number: how many steps there were when one last changed it
        self._params_in: dict[int, list[nn.Parameter]] = {}  # each block
        self.noted_commits = 0  # steps that the engine has made, and all that follows from them is done

    def forget_habits(self) -> None:
        """What is known of blocks is found out anew."""
        self.habits = [BlockHabits(has_compiled(block)) for _, block in self.blocks]

    def make_hooks(self, on_disk: bool) -> None:
        """Saved-tensor hooks: of operations outside of blocks, which keep, and of blocks that swap. What lives on anyway, the
        model's buffers, is not to be written. on_disk: there are parameters on disk."""
        saved_parameter = self.residency.saved_parameter if on_disk else None
        keep = _core.SavedTensors(self._engine, saved_parameter, self._unpack, 0)
        self.operation_hooks = keep.pack, keep.unpack
        least_bytes = stash_least_bytes(self._wrapped.element_bytes)
        over_device = self.device_stash
        stash_tensor = over_device.pack if over_device is not None else None
        self.stash = _core.SavedTensors(self._engine, saved_parameter, self._unpack, least_bytes, stash_tensor)
        self.stash_hooks = self.stash.pack, self.stash.unpack
        plain = [b for b in self._wrapped.model.buffers() if type(b) is torch.Tensor and b.layout == torch.strided]
        for buffer in plain:
            if buffer.device.type == "cpu":
                _core.mark_static(buffer.data_ptr())
        if over_device is not None:
            over_device.hooks, over_device.least_bytes = self.stash, least_bytes
            over_device.mark_static(plain)

    def _unpack(self, saved: Any) -> torch.Tensor:
        """What the hooks gave autograd and do not know themselves."""
        if type(saved) is Stashed:
            return saved.record.stash.unpack(saved)
        return self.residency.unpack_parameter(saved)

    def begin_pass(self, measures: bool) -> None:
        """A forward of a training step begins. measures: what blocks save is to be known, as no dry run told."""
        self._most_saved = self.saved_bytes()
        self._saved = {} if measures and not self.compute.separate else None

    def bytes_in_use(self) -> int:
        """Without gradients, which the update lane takes when it comes to them; 0: nobody asks."""
        if self._saved is None:
            return 0
        held = self._engine.held()
        return held["live_bytes"] - held["gradient_bytes"]

    def note_saved(self, number: int, before_bytes: int) -> None:
        """Block `number` was recomputed, and so much was in use before."""
        if self._saved is not None:
            self._saved[number] = self._saved.get(number, 0) + max(self.bytes_in_use() - before_bytes, 0)

    def saved_bytes(self) -> dict[int, int]:
        """The step is over, or a pass: of each block that was recomputed what it saved in a pass, at most."""
        before, now = self._most_saved, self._saved or {}
        self._most_saved, self._saved = {}, None
        return {number: max(before.get(number, 0), now.get(number, 0)) for number in before | now}

    def recompute_all(self) -> None:
        """No block of this forward keeps what it saves: those that would are recomputed; over a device those that swap too, for
        its host has room for what was planned."""
        as_they_are = () if self._wrapped.compute.separate else ("swap",)
        self.modes = tuple(mode if mode in as_they_are else "checkpoint" for mode in self.modes)

    def swap_all(self) -> None:
        """What blocks save in this forward leaves memory."""
        self.modes = ("swap",) * len(self.modes)

    def block_is_back(self, number: int, recomputed: bool) -> None:
        """The backward of block `number` has begun, or goes on with what it has recomputed: what is asked for before the next
        recomputation has no more than backward itself to leave room for."""
        waits = not recomputed and recomputes(self.modes[number])
        self._engine.stash_near(number if waits else _last_recomputed(self.modes)[number])

    def come_in(self) -> int | None:
        """A block or an operation begins on this thread. Returns what `thread` is when that is over.

        Raises:
            StepError: another thread is inside of one. Over a device it may wait there for a backward, which runs on others.
        """
        here = get_ident()
        before = self.thread
        if before is None or before == here:
            self.thread = here  # no thread gives way to another between the lines above and this one
        elif not (self.compute.separate and torch._C._current_graph_task_id() != -1):
            raise StepError(
                "a block, or an operation on parameters on disk, runs on one thread while another thread is inside of one: run "
                "the blocks of a model one after another; a whole forward may run on any thread, and so may its backward"
            )
        return before

    def forget(self) -> None:
        """No block runs and no hooks are pushed any more: what was under way has ended, whatever its ends did not come to. What
        another thread is inside of that one ends itself: its hooks are out of reach here."""
        if self.thread is not None and self.thread != get_ident():
            return
        self.thread = None
        self.frame = self.innermost = None
        leave(self)
        self._end_plain()

    def commits(self) -> int:
        """Steps that were made."""
        return self._engine.commits()

    def note_changed(self, numbers: Iterable[int], commits: int) -> None:
        """The step that made them so many has changed these parameters."""
        self._commits_of.update(dict.fromkeys(numbers, commits))

    def changed_since(self, block: nn.Module, commits: int) -> bool:
        """Whether a step after so many has changed a parameter of the block."""
        now = self._engine.commits()
        if now != commits and now != self.noted_commits:  # an interrupt came between a step and what follows from it
            return True
        number_of, commits_of = self._wrapped.number_of, self._commits_of
        return now != commits and any(commits_of.get(number_of.get(id(p), -1), 0) > commits for p in block.parameters())

    def versions_in(self, number: int) -> list[int]:
        """The versions of block `number`'s parameters, which change where somebody writes to them."""
        if number not in self._params_in:
            self._params_in[number] = list(self.blocks[number][1].parameters())
        with DisableTorchFunction():
            return [p._version for p in self._params_in[number]]

    def can_copy(self, size_bytes: int) -> bool:
        """Whether the budget has room now for copies of so many bytes, and for as much again."""
        return self.compute.held_bytes(self._engine) + 2 * size_bytes <= self._wrapped.settings.memory_bytes

    def run_block(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of block `number` in its mode.

        Raises:
            PlanError: hooks of others are around it, which its mode cannot be inside of, or it has what its mode cannot serve.
            StepError: another thread is inside of a block or of an operation, or it reads keys that were dropped.
        """
        thread = self.come_in()
        try:
            if self.frame is not None:
                return forward(*args, **kwargs)  # it belongs to the block around it
            begin_ns = self._clock.now()
            if keycaches.note(number, args, kwargs):
                raise StepError(
                    f"block {self.blocks[number][0]} runs twice in one forward, and would read keys that it added to a cache and "
                    "that were dropped: call the model again, from now on they stay, or pass use_cache"
                )
            result = self._run_in_mode(number, forward, args, kwargs)
            keycaches.drop(args, kwargs)
            self._clock.forward_done(number, begin_ns, args, kwargs, result)
            return result
        finally:
            self.thread = thread

    def _run_in_mode(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = self.modes[number] if self.stashing else WITHOUT_STASH[self.modes[number]]
        self.unplanned |= not self.stashing and torch.is_grad_enabled()
        if mode == "keep" or not torch.is_grad_enabled() or inside_transform():  # which takes no saved-tensor hooks
            return forward(*args, **kwargs)
        check_outer_hooks(*self.blocks[number], mode)
        if any(part.training for part in self._noisy[number]):
            raise PlanError(
                f"block {self.blocks[number][0]} of mode {mode} has an nn.RReLU, whose noise torch saves before it has drawn "
                "it, so that it could neither be swapped nor recomputed: pass block_modes with keep for this block"
            )
        if mode == "swap":
            return run_swapped(self, number, forward, args, kwargs)
        again = self._clock.recomputable(number, forward)
        return run_checkpointed(self, number, again, args, kwargs, mode == "checkpoint_swap")

    def call(
        self, func: Callable[..., Any], found: list[Any], numbers: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a torch call that reads parameters of chunks on disk, or views of them: `found`, of the parameters `numbers`.

        Raises:
            PlanError: it is inside a transform of torch.func, whose tensors do not say whose memory they show.
            StepError: another thread is inside of a block or of an operation.
        """
        _check_may_read()
        chunks: list[int] = []
        versions = [tensor._version for tensor in found]
        thread = self.come_in()
        try:
            lends = func in ADDRESSES
            if not (lends and (thread is not None or self.depth > 0 or torch._C._current_graph_task_id() != -1)):
                self.residency.end_loans()  # outside of a forward and a backward each ends those before
            for chunk in self.residency.bring(numbers):
                chunks.append(chunk)
            try:
                with DisableTorchFunction():
                    if torch.is_grad_enabled():
                        result = run_operation(self, func, args, kwargs)
                    else:
                        result = func(*args, **kwargs)
            except BaseException:
                with suppress(BaseException):  # the first one tells
                    part_done = writes(func, kwargs)  # which shows in no version where it ended in the middle
                    self.residency.write_back(numbers if part_done else self._changed(found, numbers, versions))
                raise
            silent = getattr(func, "__name__", "").startswith("_fused_")  # updates of torch's, which leave versions as they were
            self.residency.write_back(numbers if silent else self._changed(found, numbers, versions))
            if lends:
                self.residency.lend(chunks)
        finally:
            self.thread = thread
            for chunk in chunks:
                self._engine.unuse(chunk)
        return result

    @staticmethod
    def _changed(found: list[Any], numbers: list[int], versions: list[int]) -> list[int]:
        """Numbers of those whose versions are others now."""
        return [number for tensor, number, was in zip(found, numbers, versions, strict=True) if tensor._version != was]

    def call_compiled(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what was compiled, whose parameters are plain ones.

        Raises:
            PlanError: it would keep parameters where nobody sees them.
        """
        thread = self.come_in()
        try:
            if torch.is_grad_enabled():
                ends = grad_fns((args, kwargs))
                result = run_operation(self, call, args, kwargs)
                self._check_saved(result, ends)
                return result
            if frozen():
                raise PlanError("torch._inductor.config.freezing is on, which keeps parameters as constants: turn it off")
            return call(*args, **kwargs)
        finally:
            self.thread = thread

    def _end_plain(self, depth: int = 0) -> None:
        """No more than `depth` parameters on disk are plain, wherever an interrupt came between."""
        while len(self.plain) > depth:
            self.plain[-1].__class__ = ChunkParameter
            self.plain.pop()

    def _check_saved(self, result: Any, ends: set[Any]) -> None:
        """Whether compiled code keeps parameters on disk for backward only where hooks see it.

        Raises:
            PlanError: it does not: an autograd function in it has a parameter as an attribute of its context.
        """
        for node in functions_behind(result, ends):
            for tensor in getattr(node, "_tensors_no_vc_check", None) or ():
                if self.residency.saved_parameter(tensor) is not None:
                    raise PlanError(
                        "a compiled torch.autograd.Function keeps a parameter on disk as an attribute of its context, unseen by "
                        "hooks: give it to ctx.save_for_backward, or leave this module uncompiled"
                    )
