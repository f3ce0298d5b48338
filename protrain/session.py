"""A session: one wrapped model, its optimizer's state, and the engine that moves them.

Wrapping hooks the model in four places, all taken back by `close`: the forward of the model (a step begins, the plan is
made), the forward of each block (its mode), two hooks on each trained parameter (its gradient is about to come, has come),
and the state dict of each module that owns parameters.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from . import _core, changes
from .activations import (
    STASH_LEAST_BYTES,
    BlockHabits,
    SavedParameter,
    check_not_nested,
    check_outer_hooks,
    check_version,
    no_outer_hooks,
    release_failed_backward,
    run_checkpointed,
    run_operation,
    run_swapped,
)
from .counting import counted, uncounted
from .dryrun import DryRun, DryRunError, dry_run
from .errors import BudgetError, PlanError, StepError
from .foreign import Foreign
from .layout import Layout
from .optimizers import Hyper, hyper_of, n_states_of, state_names
from .pacing import Pacer
from .parameters import DisableTorchFunction, enchain, mark_views, release
from .planning import Arrangement, Plan, arrange, refuse
from .precision import before_load, master, state_arrays, write_master
from .profiles import Machine, Times
from .sizes import format_bytes
from .timeline import BlockClock

UPDATE, SPILL, SPILL_TOTAL = 0, 1, 2

#: The first steps update in step(), to see whether this loop sets learning rates between backward and step. A loop that does
#: shows it in its first two steps, since a schedule changes rates from one step to the next.
PROBED_STEPS = 2

#: What a block does where nothing may leave memory: outside of a training step's forward.
WITHOUT_STASH = {"keep": "keep", "swap": "checkpoint", "checkpoint": "checkpoint", "checkpoint_swap": "checkpoint"}


@dataclass(frozen=True)
class Settings:
    """What `wrap` was asked for, checked."""

    memory_bytes: int
    disk: str
    accumulate: int
    max_grad_norm: float | None
    plan: Plan | None
    block_modes: list[str] | None


class Session:
    """See the module's head. All methods are called on the thread that drives the step."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        params: list[nn.Parameter],
        blocks: list[tuple[str, nn.Module]],
        kind: type[torch.optim.Optimizer],
        groups: list[dict[str, Any]],
        settings: Settings,
        foreign: Foreign | None = None,
    ) -> None:
        self.foreign, self.footprint = foreign, foreign.footprint if foreign else None
        self.model, self.layout, self.params, self.blocks = model, layout, params, blocks
        self.kind, self.groups, self.settings = kind, groups, settings
        hypers = self._hypers_now()
        self.n_states = max((n_states_of(hyper) for hyper in hypers), default=0)
        self.element_bytes = layout.dtype.itemsize
        self.state_arrays = state_arrays(self.n_states, layout.dtype)
        self.master_array = 1 + self.n_states if layout.dtype == torch.bfloat16 else 0  # 0: parameters are their own masters
        self.masters_given: set[int] = set()  # masters that came with the optimizer's state, since the last step
        self.arrangement = self._first_arrangement()
        self.engine = _core.Engine(
            settings.disk,
            settings.memory_bytes,
            [(size, trained) for size, trained in zip(layout.sizes, layout.trained, strict=True)],
            [(e.chunk, e.offset_bytes, e.count, e.group >= 0, max(e.group, 0)) for e in layout.entries],
            len(groups),
            self.n_states,
            bf16=self.master_array > 0,
        )
        if foreign is not None:
            foreign.open(self)
        self.clock = BlockClock(self.engine, self._backward_begins)
        self.closed = False
        self.frame: Any = None  # of the block whose forward runs, or runs again
        self.innermost: Any = None  # the pack hook that it pushed
        self.habits = [BlockHabits() for _ in blocks]
        self.stashing = False
        self.pacer = Pacer(self)
        self._goal = self._headroom = 0  # bytes: see _set_goal
        self.filling = False
        self.known = {id(p) for p in params}
        self._bases: dict[int, torch.Tensor] = {}  # chunk -> its region as one flat tensor
        self._offsets = [[layout.entries[i].offset_bytes for i in members] for members in layout.members]
        self._address_chunk: dict[int, int] = {}  # first byte of a slot -> the chunk demanded there last
        self._node: Any = None
        self._node_chunks: set[int] = set()
        self._handles: list[Any] = []
        self._wrapped: list[tuple[nn.Module, str]] = []
        self._dry_runs: list[tuple[tuple[tuple[int, ...], ...], DryRun | None]] = []
        self._measured_bytes = 0
        self._takes_use_cache = takes_use_cache(model)
        self.modes: tuple[str, ...] = self.arrangement.plan.block_modes
        self.planned = False
        # the step under way
        self._task = -1
        self.passes = 0
        self._taken: set[int] = set()
        self._left: set[int] = set()  # parameters whose gradients were used by step() and are not dropped yet
        self._norms: dict[int, torch.Tensor] = {}
        self._hypers: list[Hyper] = hypers
        self.late: bool | None = True if foreign else None  # updates wait for step(); None: not known yet
        self._began: float | None = None
        self._wait_ns = 0
        self._shapes: tuple[tuple[int, ...], ...] | None = None  # of its batches; (): they differ
        self._update_seconds, self._update_bytes = 0.0, 0  # of what step() updated in memory
        # figures
        self.steps = 0
        self.step_seconds = 0.0
        self.wait_seconds = 0.0

    # ---- arrangement ----

    def _first_arrangement(self) -> Arrangement:
        """Before any batch is known: parameters in memory where they take a quarter of the budget at most, else away.

        Raises:
            BudgetError: even the safest plan for the states alone does not fit.
        """
        layout, budget = self.layout, self.settings.memory_bytes
        try:
            safest = self._arrange_away()
        except BudgetError as error:
            raise refuse(error, "the model with its largest chunks in turn") from None
        own = self.footprint
        with_masters = 3 if self.master_array else 1  # masters come with the values, other state with the first update
        if 4 * with_masters * sum(layout.sizes) > budget or (own and 2 * sum(layout.sizes) + own.bytes > budget):
            return safest
        everything = Plan(
            layout.chunk_bytes, layout.n_chunks, layout.n_chunks, 0, safest.plan.block_modes, 0, len(self.blocks), 0.0,
            with_masters * sum(layout.sizes), 0, 0, budget,
        )  # fmt: skip
        return Arrangement(everything, [-1] * layout.n_chunks, [], 0, 0, [], everything.peak_bytes, safest.smallest_bytes)

    def _arrange_away(self, unknown_bytes: int = 0) -> Arrangement:
        """Every chunk on disk, and unknown_bytes for what a pass needs."""
        return arrange(
            self.layout, len(self.blocks), self.state_arrays, self.settings.memory_bytes, None, n_persist=0,
            unknown_bytes=unknown_bytes, footprint=self.footprint,
        )  # fmt: skip

    def begin_fill(self) -> None:
        """Give every chunk its first home and slot; the parameters' values come next, chunk by chunk."""
        for number, slot in enumerate(self.arrangement.slot_of_chunk):
            if slot < 0:
                self.engine.to_memory(number, False)
            else:
                self.engine.to_disk(number)
        self._set_slots()

    def _set_slots(self) -> None:
        found = self.arrangement
        self.engine.set_slots(found.slot_of_chunk, found.slot_bytes)
        if found.piece_bytes:
            self.engine.set_ring(found.piece_bytes, found.n_pieces, True)
        budget, plan = self.settings.memory_bytes, found.plan
        self.engine.set_pending(max(budget - plan.peak_bytes, max(self.layout.grad_bytes, default=0)))
        self.engine.set_order([c for c in found.accesses if not self.engine.in_memory(c)])
        self._set_goal()
        self._make_hooks()

    def _set_goal(self) -> None:
        """What the plan means to have in memory at most is what the stash works for. Where nothing goes to the stash, or nothing
        is known of activations, there is no goal."""
        found = self.arrangement
        swaps = any(mode.endswith("swap") for mode in found.plan.block_modes)
        self._goal = found.plan.peak_bytes if swaps and found.plan.peak_bytes > found.static_bytes else 0
        self._headroom = found.headroom_bytes
        self.engine.set_goal(self._goal)
        self.engine.set_headroom(self._headroom)

    def _adjust_headroom(self) -> None:
        """What the step left unused under the goal goes to reading ahead, between the two bounds that the plan knows."""
        peak = self.engine.mark()
        if self._goal:
            unused = self._goal - peak
            found = self.arrangement
            wanted = self._headroom - (unused * 3 // 4 if unused > 0 else unused)
            self._headroom = min(max(wanted, found.rise_bytes), found.headroom_bytes)
            self.engine.set_headroom(self._headroom)

    def _make_hooks(self) -> None:
        """Saved-tensor hooks: of operations outside of blocks, which keep, and of blocks that swap. What lives on anyway, the
        model's buffers, is not to be written."""
        on_disk = any(slot >= 0 for slot in self.arrangement.slot_of_chunk)
        saved_parameter = self.saved_parameter if on_disk else None
        keep = _core.SavedTensors(self.engine, saved_parameter, self.unpack_parameter, 0)
        self.hooks = keep.pack, keep.unpack
        least_bytes = STASH_LEAST_BYTES * self.element_bytes // 4  # what is stashed in fp32 is stashed in bf16
        self.stash = _core.SavedTensors(self.engine, saved_parameter, self.unpack_parameter, least_bytes)
        self.stash_hooks = self.stash.pack, self.stash.unpack
        for buffer in self.model.buffers():
            if type(buffer) is torch.Tensor and buffer.layout == torch.strided and buffer.device.type == "cpu":
                _core.mark_static(buffer.data_ptr())

    def bind(self, chunk: int) -> None:
        """Make the chunk's parameters views of where the chunk lies now."""
        region = self.engine.region(chunk)
        self._bases[chunk] = torch.frombuffer(region, dtype=self.layout.dtype)
        in_memory = self.engine.in_memory(chunk)
        for index in self.layout.members[chunk]:
            p = self.params[index]
            with DisableTorchFunction():
                p.data = self.place(index)
            if in_memory:
                release(p)
            else:
                enchain(p, self, index)

    def place(self, number: int) -> torch.Tensor:
        """A view of where the values of parameter `number` lie, of its shape."""
        entry = self.layout.entries[number]
        first = entry.offset_bytes // self.element_bytes
        return self._bases[entry.chunk][first : first + entry.count].view(entry.shape)

    def bind_all(self) -> None:
        for chunk in range(self.layout.n_chunks):
            self.bind(chunk)

    def _unbind_all(self) -> None:
        """Parameters keep their shapes over one shared element, so that slots can go."""
        nothing = torch.zeros((), dtype=self.layout.dtype)
        with DisableTorchFunction():
            for p in self.params:
                p.data = nothing.expand(p.shape)
        self._bases.clear()
        self._address_chunk.clear()

    def rearrange(self, arrangement: Arrangement) -> None:
        """Carry out another plan, between steps. Homes move one chunk at a time, those that leave memory first."""
        old = self.arrangement
        same_slots = arrangement.slot_of_chunk == old.slot_of_chunk and arrangement.slot_bytes == old.slot_bytes
        if same_slots and arrangement.piece_bytes == old.piece_bytes and arrangement.n_pieces == old.n_pieces:
            self.arrangement, self.modes = arrangement, arrangement.plan.block_modes
            self.engine.set_order([c for c in arrangement.accesses if not self.engine.in_memory(c)])
            for number, slot in enumerate(arrangement.slot_of_chunk):
                if slot < 0:  # state now, not at the first update: what is free in the first step tells of the others
                    self.engine.to_memory(number, self.layout.trained[number])
            self._set_goal()
            return
        self.release_node()
        self.engine.drop()
        self._unbind_all()
        self.engine.drop_slots()
        self.engine.drop_ring()
        _core.trim(0)
        for number, slot in enumerate(arrangement.slot_of_chunk):
            if slot >= 0:
                self.engine.to_disk(number)
        if self.foreign is not None:
            self.foreign.leave()
        for number, slot in enumerate(arrangement.slot_of_chunk):
            if slot < 0:
                self.engine.to_memory(number, self.layout.trained[number])
        if self.foreign is not None:
            self.foreign.arrive()
        self.arrangement, self.modes = arrangement, arrangement.plan.block_modes
        self._set_slots()
        self.bind_all()

    # ---- planning ----

    def decide(
        self,
        run: DryRun | None,
        unknown_bytes: int = 0,
        *,
        times: Times | None = None,
        machine: Machine | None = None,
        as_now: bool = False,
    ) -> Arrangement:
        """The arrangement for what a dry run foresaw; as_now: with the decisions of the one in use.

        Raises:
            BudgetError: nothing fits.
        """
        settings = self.settings
        modes: Sequence[str] | None = settings.block_modes
        given = settings.plan if settings.plan is not None else self.arrangement.plan if as_now else None
        n_persist, n_buffer = None, 0
        if given is not None:
            modes, n_persist, n_buffer = modes or given.block_modes, given.n_persist, given.n_buffer
        elif run is None:
            n_persist = None if unknown_bytes else 0
        try:
            found = arrange(
                self.layout, len(self.blocks), self.state_arrays, settings.memory_bytes, run, modes=modes, n_persist=n_persist,
                n_buffer=n_buffer, grads_outlive_backward=self.grads_outlive_backward, n_passes=settings.accumulate,
                unknown_bytes=unknown_bytes + self._widened_bytes, times=times, machine=machine, footprint=self.footprint,
            )  # fmt: skip
        except BudgetError as error:
            raise refuse(error, "a step of this batch") from None
        if settings.plan is not None:  # what was foretold stands
            plan = replace(found.plan, step_seconds=settings.plan.step_seconds, forecast=settings.plan.forecast)
            found = replace(found, plan=plan)
        return found

    @property
    def _widened_bytes(self) -> int:
        """What the norm of a bf16 gradient takes while it is computed: the largest of them in fp32."""
        if not self.master_array or self.settings.max_grad_norm is None:
            return 0
        return _core.rounded_bytes(max((4 * entry.count for entry in self.layout.entries if entry.group >= 0), default=0))

    @property
    def grads_outlive_backward(self) -> bool:
        return self.settings.accumulate > 1 or self.settings.max_grad_norm is not None or self.foreign is not None

    def plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make or change the plan where this batch is larger than those planned for.

        Raises:
            BudgetError: no plan fits; nothing was allocated, and the plan in use stays.
        """
        shapes = shapes_of(args, kwargs)
        self._shapes = shapes if self._shapes in (None, shapes) else ()
        if any(covers(known, shapes) for known, _ in self._dry_runs):
            return
        if self.passes and self.planned:
            self.modes = tuple("checkpoint" for _ in self.blocks)  # gradients are under way: nothing else can move now
            return
        try:
            with no_outer_hooks():
                run: DryRun | None = dry_run(
                    self.model, args, kwargs, [block for _, block in self.blocks],
                    {id(p): entry.chunk for p, entry in zip(self.params, self.layout.entries, strict=True)},
                    round_bytes=_core.rounded_bytes,
                )  # fmt: skip
        except DryRunError as error:
            run = None
            warnings.warn(
                f"protrain cannot foresee the memory of this model ({error}); its first step runs with the safest plan",
                stacklevel=4,
            )
        best = self.decide(run)
        largest = run, shapes
        for known, other in self._dry_runs:
            again = self.decide(other)
            if again.smallest_bytes > best.smallest_bytes:
                best, largest = again, (other, known)
        if not self.fits_now(best):
            self._refuse_held(best)
        self.rearrange(best)
        self._dry_runs.append((shapes, run))
        self.planned = True
        if self.foreign is None:  # what the update of another takes, and when, is not simulated: its plan is by memory alone
            self.pacer.begin(*largest)

    def __deepcopy__(self, _memo: Any) -> Session:
        """A copied hook still belongs to this session."""
        return self

    def _replan_measured(self) -> None:
        """After a step that no dry run foresaw: what it took beside states and slots is known now."""
        peak = self.engine.stats()["peak_bytes"]
        unknown = max(peak - self.arrangement.static_bytes, 0)
        if not self.planned or any(run is not None for _, run in self._dry_runs) or unknown <= self._measured_bytes:
            return
        self._measured_bytes = unknown
        try:
            self.rearrange(self.decide(None, unknown_bytes=unknown * 9 // 8))
        except BudgetError:
            return  # the safest plan stays

    # ---- what the forward pass calls ----

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.engine.use_account(True)
        self.release_node()
        changes.check_parameters(self)
        changes.adopt(self)
        self._leftover()  # what was dropped is known while its chunk is still in memory
        if self._began is None:
            self._began = time.perf_counter()
            self._wait_ns = self.engine.stats()["wait_ns"]
            self._shapes = None
            self.clock.begin_step()
        self.modes = self.arrangement.plan.block_modes
        if torch.is_grad_enabled() and self.model.training:
            self.plan_for(args, kwargs)
            self._make_room()
            self.clock.begin_pass()
            self.engine.read_ahead(self.settings.accumulate == 1 and self._updates_behind_backward)
        else:
            self.engine.read_ahead(False)
        self.engine.seek(0)

    def _make_room(self) -> None:
        """What a user still holds, such as the graph of a step that was not made, may leave too little for what is planned: then
        the blocks of this forward are recomputed."""
        if self.passes:
            return
        foreseen = max((run.fixed_bytes for _, run in self._dry_runs if run is not None), default=0)
        room = self.settings.memory_bytes - self.arrangement.plan.peak_bytes + foreseen
        if self._held_bytes(room) > room and self.settings.block_modes is None:
            self.modes = tuple("checkpoint" for _ in self.blocks)

    def _held_bytes(self, room: int) -> int:
        """What is in memory beside states and slots. Where it is more than `room`, a backward that failed may have left it."""
        held = int(self.engine.stats()["live_bytes"]) - self.arrangement.static_bytes
        if held <= room:
            return held
        release_failed_backward()
        return int(self.engine.stats()["live_bytes"]) - self.arrangement.static_bytes

    def _refuse_held(self, arrangement: Arrangement) -> NoReturn:
        held, budget = self._held_bytes(0), self.settings.memory_bytes
        needed = held + arrangement.static_bytes
        raise BudgetError(
            f"{format_bytes(held)} of earlier steps are still in memory, beside which this batch's plan has no room: it needs "
            f"{format_bytes(needed)}, the budget is {format_bytes(budget)}; drop what holds them (losses, outputs, graphs)",
            needed_bytes=needed, budget_bytes=budget, smallest_bytes=needed,
        )  # fmt: skip

    def fits_now(self, arrangement: Arrangement) -> bool:
        """Whether it can be carried out now, with what else is in memory."""
        room = self.settings.memory_bytes - arrangement.static_bytes
        return self._held_bytes(room) <= room

    def _backward_begins(self) -> None:
        self.engine.use_account(True)  # another model's step may have come between
        self.engine.stash_end()

    def run_block(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.frame is not None:
            return forward(*args, **kwargs)  # it belongs to the block around it
        begin_ns = _core.now_ns()
        result = self._run_in_mode(number, forward, args, kwargs)
        self.clock.forward_done(number, begin_ns, args, kwargs, result)
        return result

    def _run_in_mode(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = self.modes[number] if self.stashing else WITHOUT_STASH[self.modes[number]]
        if mode == "keep" or not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return forward(*args, **kwargs)  # inside of torch.func's transforms, which take no saved-tensor hooks, too
        check_outer_hooks(*self.blocks[number], mode)
        if mode == "swap":
            return run_swapped(self, number, forward, args, kwargs)
        again = self.clock.recomputable(number, forward)
        return run_checkpointed(self, number, again, args, kwargs, mode == "checkpoint_swap")

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes more fit the budget now."""
        return int(self.engine.stats()["live_bytes"]) + 2 * size_bytes <= self.settings.memory_bytes

    def _bring(self, number: int) -> None:
        """The chunk of parameter `number` is in its slot and in use when this returns."""
        chunk = self.layout.entries[number].chunk
        if not self.engine.demand(chunk):
            self.engine.own_slot(chunk)  # its slot is taken by what this same operation reads
            self.bind(chunk)
            self.engine.demand(chunk)
        self._address_chunk[self._bases[chunk].data_ptr()] = chunk

    def call(self, func: Callable[..., Any], found: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call that reads parameters of chunks on disk, or views of them.

        Raises:
            PlanError: it is inside a transform of torch.func, whose tensors do not say whose memory they show.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise PlanError(
                "a transform of torch.func (grad, vmap, jvp) reads parameters that are on disk: pass parameters of your own by "
                "torch.func.functional_call"
            )
        numbers: list[int] = []
        chunks: list[int] = []
        versions = [tensor._version for tensor in found] if not self.filling else []
        try:
            for tensor in found:
                number = tensor._protrain[1]
                numbers.append(number)
                chunk = self.layout.entries[number].chunk
                if chunk not in chunks and not self.filling:
                    self._bring(number)
                    chunks.append(chunk)
            with DisableTorchFunction():
                if torch.is_grad_enabled():
                    result = run_operation(self, func, args, kwargs)
                else:
                    result = func(*args, **kwargs)
            for tensor, version in zip(found, versions, strict=False):
                if tensor._version != version:
                    self._write_back(tensor._protrain[1])
        finally:
            for chunk in chunks:
                self.engine.unuse(chunk)
        return mark_views(result, self, numbers)

    def _write_back(self, number: int) -> None:
        """A parameter was changed in place outside of an update: its home follows at once."""
        p, entry = self.params[number], self.layout.entries[number]
        with DisableTorchFunction():
            self.engine.transfer(number, 0, p.data_ptr(), True)
        assert entry.count == p.numel()

    def owner_of_memory(self, tensor: torch.Tensor, numbers: list[int]) -> int | None:
        """Which of these parameters' chunks the tensor's storage is the slot of; None for any other memory."""
        address = tensor.untyped_storage().data_ptr()
        if address == 0:
            return None
        for number in numbers:
            if self._bases[self.layout.entries[number].chunk].data_ptr() == address:
                return number
        return None

    # ---- what saved tensors call ----

    def saved_parameter(self, tensor: torch.Tensor) -> SavedParameter | None:
        """The record of a tensor that lies in the memory of a parameter on disk; None for any other tensor."""
        with DisableTorchFunction():
            if tensor.layout != torch.strided or not self._address_chunk:
                return None
            chunk = self._address_chunk.get(tensor.untyped_storage().data_ptr())
            if chunk is None:
                return None
            offset = int(tensor.storage_offset())
            place = bisect.bisect_right(self._offsets[chunk], offset * self.element_bytes) - 1
            number = self.layout.members[chunk][place]
            first = self.layout.entries[number].offset_bytes // self.element_bytes
            return SavedParameter(number, tensor, offset - first, self.params[number])

    def unpack_parameter(self, saved: SavedParameter) -> torch.Tensor:
        """The tensor again, its chunk in place. It stays there until the node of the graph that asked is done."""
        entry = self.layout.entries[saved.number]
        chunk = entry.chunk
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self.release_node()
            self._node = node
        with DisableTorchFunction():
            owner = saved.owner()
            if owner is not None:
                check_version(owner._version, saved.version, saved.size)
            if not self.engine.in_memory(chunk) and torch.is_grad_enabled():
                return self._copy_of(saved)  # this backward has a graph of its own, which holds on to what it is given
            if chunk not in self._node_chunks and not self.engine.in_memory(chunk):
                if not self.engine.demand(chunk):
                    return self._copy_of(saved)  # the slot is taken by what this same node reads
                self._node_chunks.add(chunk)
            base = self._bases[chunk]
            self._address_chunk[base.data_ptr()] = chunk
            return base.as_strided(saved.size, saved.stride, saved.offset + entry.offset_bytes // self.element_bytes)

    def _copy_of(self, saved: SavedParameter) -> torch.Tensor:
        """The tensor again, in memory of its own, from the parameter's home."""
        copy = torch.empty(self.layout.entries[saved.number].count, dtype=self.layout.dtype)
        self.engine.transfer(saved.number, 0, copy.data_ptr(), False)
        return copy.as_strided(saved.size, saved.stride, saved.offset)

    def release_node(self) -> None:
        """The node of the graph whose parameters are held in place is done."""
        for chunk in self._node_chunks:
            self.engine.unuse(chunk)
        self._node_chunks.clear()
        self._node = None

    # ---- gradients ----

    def before_gradient(self, _grad: torch.Tensor) -> None:
        """A gradient is about to be accumulated: is this backward pass one that the step has room for?

        Raises:
            StepError: it is one too many, or the last step's gradients were not dropped.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        check_not_nested()
        allowed = self.settings.accumulate
        if self.passes >= allowed:
            raise StepError(
                f"backward pass {self.passes + 1} of a step that was wrapped with accumulate={allowed}: call optimizer.step() "
                f"first, or wrap with a larger accumulate"
            )
        if self.passes == 0 and self._leftover():
            raise StepError("the gradients of the last step are still there: call optimizer.zero_grad() after optimizer.step()")

    def _leftover(self) -> bool:
        """Whether gradients that step() used were not dropped; those in memory may have been, one by one."""
        with DisableTorchFunction():
            self._left = {
                number
                for number in self._left
                if self.params[number].grad is not None or not self.engine.in_memory(self.layout.entries[number].chunk)
            }
        return bool(self._left)

    def _begin_pass(self, task: int) -> None:
        self._task = task
        self.clock.watch_backward()
        if self.passes:
            self.engine.flush()
        self.passes += 1
        if self.passes == self.settings.accumulate:
            self._hypers = self._hypers_now()
            self._set_hypers()

    def _hypers_now(self) -> list[Hyper]:
        """The groups' values as the kernels take them; none where no kernel does."""
        return [] if self.foreign else [hyper_of(self.kind, group) for group in self.groups]

    def _set_hypers(self) -> None:
        for number, hyper in enumerate(self._hypers):
            self.engine.set_hyper(number, hyper)

    @property
    def _updates_behind_backward(self) -> bool:
        return self.late is False and self.settings.max_grad_norm is None

    def after_gradient(self, number: int, p: torch.Tensor) -> None:
        """A gradient was accumulated: take it out of `.grad`."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin_pass(task)
        entry = self.layout.entries[number]
        self.release_node()
        if self.engine.in_memory(entry.chunk) or entry.count == 0:
            return
        with DisableTorchFunction():
            grad = p.grad
            p.grad = None
            if grad is None:
                return
            grad = self._dense(number, grad)
            last = self.passes == self.settings.accumulate
            use = UPDATE if last and self._updates_behind_backward else SPILL
            if last and self.settings.max_grad_norm is not None:
                grad, use = self._total(number, grad), SPILL_TOTAL
                self._norms[number] = self._norm(grad)
            self.engine.gradient(number, grad.data_ptr(), grad, use)
            self._taken.add(number)

    def _dense(self, number: int, grad: torch.Tensor) -> torch.Tensor:
        """A gradient as the kernels take it.

        Raises:
            PlanError: it is sparse, or not of the parameters' type.
        """
        if grad.layout != torch.strided or grad.dtype != self.layout.dtype:
            name, wanted = self.layout.entries[number].name, str(self.layout.dtype).removeprefix("torch.")
            raise PlanError(f"the gradient of {name} is {grad.layout} {grad.dtype}; only dense {wanted} gradients are supported")
        return grad.contiguous()

    def _norm(self, grad: torch.Tensor) -> torch.Tensor:
        """The 2-norm of one gradient, as clip_grad_norm_ computes it; of a bf16 gradient that of the widened one, which is what
        the update takes."""
        return torch._foreach_norm([grad.float()], 2.0)[0]

    def _total(self, number: int, grad: torch.Tensor) -> torch.Tensor:
        """The sum of this step's gradients of one parameter: those on disk came first."""
        if self.settings.accumulate == 1 or number not in self._taken:
            return grad
        before = torch.empty_like(grad)
        return before.add_(grad) if self.engine.spilled(number, before.data_ptr()) else grad

    def check_grad_access(self, number: int, drops: bool = False) -> None:
        """`.grad` of a parameter on disk is looked at; drops: it is set to None.

        Raises:
            StepError: its gradient left memory; None would be a wrong answer.
        """
        if drops:
            self._left.discard(number)
        if number in self._taken or number in self._left:
            raise StepError(
                f"the gradient of {self.layout.entries[number].name} has left memory; to clip pass max_grad_norm to wrap and "
                f"read optimizer.grad_norm, to drop gradients call optimizer.zero_grad()"
            )

    # ---- the end of a step ----

    def step(self) -> torch.Tensor | None:
        self.release_node()
        changes.adopt(self)
        norm: torch.Tensor | None = None
        if self.passes or self._has_gradients():
            try:
                norm = self._make_step()
            except BaseException:
                self.forget()
                raise
        self.passes = 0
        self._left |= self._taken
        self._taken.clear()
        self._norms.clear()
        self.masters_given.clear()
        self.steps += 1
        now = time.perf_counter()
        wait_ns = self.engine.stats()["wait_ns"]
        if self._began is not None:
            self.step_seconds = now - self._began
            self.wait_seconds = (wait_ns - self._wait_ns) / 1e9
            self.clock.end_step(self.steps)
        timed, self._began = self._began is not None, None
        self._adjust_headroom()
        self._replan_measured()
        if timed:
            self.pacer.after_step(self._shapes, self._update_seconds, self._update_bytes)
        self.engine.seek(0)
        self.engine.use_account(False)
        return norm

    def _has_gradients(self) -> bool:
        """Whether a parameter has a gradient that no backward pass made.

        Raises:
            StepError: there are those of the last step, which plain torch would use again.
        """
        if self._leftover():
            raise StepError("the gradients of the last step are still there, and used: call optimizer.zero_grad() after step()")
        with DisableTorchFunction():
            return any(p.grad is not None for p, entry in zip(self.params, self.layout.entries, strict=True) if entry.group >= 0)

    def _take_given(self) -> None:
        """Gradients that the user set for parameters on disk."""
        for number, (p, entry) in enumerate(zip(self.params, self.layout.entries, strict=True)):
            if entry.group < 0 or not entry.count or self.engine.in_memory(entry.chunk):
                continue
            with DisableTorchFunction():
                grad, p.grad = p.grad, None
            if grad is not None:
                grad = self._dense(number, grad)
                self.engine.gradient(number, grad.data_ptr(), grad, SPILL)
                self._taken.add(number)

    def _make_step(self) -> torch.Tensor | None:
        self._take_given()
        in_memory = [  # looked at before anything is updated: updates in memory are not undone
            (number, self._dense(number, p.grad))
            for number, (p, entry) in enumerate(zip(self.params, self.layout.entries, strict=True))
            if entry.group >= 0 and self.engine.in_memory(entry.chunk) and p.grad is not None and entry.count
        ]
        self.engine.flush()
        norm, scale = self._clip() if self.settings.max_grad_norm is not None else (None, 1.0)
        if self.foreign is not None:
            self.engine.wait()
            self.foreign.step(scale)
            self._left.update(number for number, _ in in_memory)
            self.engine.commit()
            return norm
        hypers = self._hypers_now()
        same = self.passes < self.settings.accumulate or hypers == self._hypers  # fewer passes: no update began with the old ones
        if self._updates_behind_backward and not same and self._taken:
            self.late = True
            raise StepError(
                "a parameter group was changed between backward() and step(), after updates had begun with the old values; this "
                "step was not made, the model is as it was before it; from now on updates wait for step()"
            )
        self._hypers = hypers
        self._set_hypers()
        self.engine.update_spilled(scale)
        self.engine.wait()
        began = time.perf_counter()
        for number, grad in in_memory:
            self.engine.update_in_memory(number, grad.data_ptr(), scale)
        self._left.update(number for number, _ in in_memory)
        self._update_seconds = time.perf_counter() - began
        updated = sum(self.layout.entries[number].count for number, _ in in_memory)
        self._update_bytes = self.element_bytes * (1 + self.state_arrays) * updated
        self.engine.commit()
        for entry in self.layout.entries:
            if entry.group >= 0 and not entry.count and self.params[entry.index].grad is not None:
                self.engine.set_steps(entry.index, self.engine.steps(entry.index) + 1)  # of no elements: there is only a count
        if self.late is None and (not same or self.steps + 1 >= PROBED_STEPS):
            self.late = not same
        return norm

    def _clip(self) -> tuple[torch.Tensor, float]:
        """The global norm and the factor of the gradients, as torch.nn.utils.clip_grad_norm_ computes them."""
        norms = []
        for number, (p, entry) in enumerate(zip(self.params, self.layout.entries, strict=True)):
            if number in self._norms:
                norms.append(self._norms[number])
            elif number in self._taken:
                norms.append(self._norm_on_disk(number))
            elif entry.group >= 0 and p.grad is not None:
                norms.append(self._norm(p.grad))
        if not norms:
            return torch.tensor(0.0), 1.0
        total = torch.linalg.vector_norm(torch.stack(norms), 2.0)
        factor = torch.clamp(self.settings.max_grad_norm / (total + 1e-6), max=1.0)
        return total, float(factor)

    def _norm_on_disk(self, number: int) -> torch.Tensor:
        """The norm of a gradient that is whole on disk: the step's last pass added nothing, or there were fewer passes."""
        grad = torch.empty(self.layout.entries[number].shape, dtype=self.layout.dtype)
        self.engine.spilled(number, grad.data_ptr())
        return self._norm(grad)

    def change_step(self, accumulate: int, max_grad_norm: float | None) -> None:
        """Other passes in each step, or another norm, from here on; gradients are dropped, the next batch is planned for anew."""
        self.zero_grad()
        self.settings = replace(self.settings, accumulate=accumulate, max_grad_norm=max_grad_norm)
        self._dry_runs.clear()

    def leave_room(self) -> Arrangement | None:
        """Nothing stays in memory but what is in use, for a forward pass that no step was planned for.

        Returns the arrangement to go back to with `rearrange`; None where gradients are under way, which cannot move now.
        """
        if self.passes:
            return None
        before, budget = self.arrangement, self.settings.memory_bytes
        room = budget
        try:
            self._arrange_away(room)
        except BudgetError as error:
            room -= error.smallest_bytes - budget  # what the states take at least
        self.rearrange(self._arrange_away(room))
        return before

    def forget(self) -> None:
        """Drop the gradients and updates of a step that is not made."""
        self.release_node()
        self.engine.drop()
        self.passes = 0
        self._task = -1
        self._taken.clear()
        self._norms.clear()
        self._began = None
        self.clock.forget()

    def zero_grad(self) -> None:
        if self.passes or self.engine.has_gradients():
            self.forget()
        self._left.clear()
        with DisableTorchFunction():
            for p in self.params:  # also where the chunk has left memory since its gradients were made
                p.grad = None

    # ---- values and state ----

    def value(self, number: int, array: int = 0) -> torch.Tensor:
        """An owned copy of a parameter (array 0), of one of its state arrays or of its master, in no budget."""
        entry = self.layout.entries[number]
        if array == 0:
            changes.adopt(self, number)
        elif array == self.master_array:
            return master(self, number)
        with uncounted(), DisableTorchFunction():
            tensor = torch.empty(entry.shape, dtype=torch.float32 if array else self.layout.dtype)
            if entry.count:
                self.engine.transfer(number, array, tensor.data_ptr(), False)
        return tensor

    def set_value(self, number: int, value: torch.Tensor, array: int = 0) -> None:
        """Set a parameter, its master with it where it has one, or one of its arrays alone."""
        with uncounted(), DisableTorchFunction():
            tensor = value.detach().to(dtype=torch.float32 if array else self.layout.dtype, device="cpu").contiguous()
            if tensor.numel():
                self.engine.transfer(number, array, tensor.data_ptr(), True)
            if array == 0:
                write_master(self, number, value)

    def set_data(self, number: int, value: torch.Tensor) -> None:
        """As `p.data = value`; see changes.set_data."""
        changes.set_data(self, number, value)

    def put_in(self, module: nn.Module) -> set[str]:
        """Names of what wrapping put into the module's `__dict__`."""
        return {"_protrain_session"} | {name for owner, name in self._wrapped if owner is module}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, owned copy) for each entry of the model's state dict, one at a time; tied names after the first are left out."""
        index = {id(p): number for number, p in enumerate(self.params)}
        seen: set[int] = set()
        for prefix, module in self.model.named_modules():
            for leaf, p in module._parameters.items():
                if p is not None and id(p) not in seen:
                    seen.add(id(p))
                    yield f"{prefix}.{leaf}" if prefix else leaf, self.value(index[id(p)])
            for leaf, buffer in module._buffers.items():
                if buffer is not None and leaf not in module._non_persistent_buffers_set and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield f"{prefix}.{leaf}" if prefix else leaf, buffer.detach().clone()

    def optimizer_state(self, value: Callable[[int, int], torch.Tensor] | None = None) -> dict[str, Any]:
        """Of torch's form; value(parameter, array) gives each state array of a kernel, an owned copy unless given."""
        if self.foreign is not None:
            return self.foreign.state_dict()
        value = value or self.value
        packed: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        index = {id(p): number for number, p in enumerate(self.params)}
        place = 0
        for group in self.groups:
            names = state_names(hyper_of(self.kind, group))
            for offset, p in enumerate(group["params"]):
                number = index[id(p)]
                steps = self.engine.steps(number)
                untouched = steps == 0 or (self.kind is torch.optim.SGD and not names)
                if self.layout.entries[number].group < 0 or (untouched and not self.master_array):
                    continue
                known = names if steps or self.kind is not torch.optim.SGD else ()  # a buffer that no step has made is none
                entry = {name: value(number, 1 + array) for array, name in enumerate(known)}
                if self.master_array:
                    entry["master"] = value(number, self.master_array)
                if self.kind is not torch.optim.SGD:
                    entry = {"step": torch.tensor(float(steps))} | entry
                state[place + offset] = entry
            packed.append(
                {k: v for k, v in group.items() if k != "params"} | {"params": list(range(place, place + len(group["params"])))}
            )
            place += len(group["params"])
        return {"state": state, "param_groups": packed}

    def load_optimizer_state(self, state_dict: dict[str, Any]) -> None:
        if self.foreign is not None:
            self.foreign.load_state_dict(state_dict)
            return
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.groups]:
            raise ValueError("optimizer.load_state_dict: the parameter groups are of other sizes than this optimizer's")
        for group, given in zip(self.groups, saved, strict=True):
            group.update({k: v for k, v in given.items() if k != "params"})
        order = [number for g in saved for number in g["params"]]
        owners = [p for g in self.groups for p in g["params"]]
        self.import_state({id(p): state_dict["state"][n] for n, p in zip(order, owners, strict=True) if n in state_dict["state"]})

    def import_state(self, states: dict[int, dict[str, Any]]) -> None:
        """Optimizer state of torch's form, by id of the parameter."""
        if self.foreign is not None:
            self.foreign.import_state(states)
            return
        for number, (p, entry) in enumerate(zip(self.params, self.layout.entries, strict=True)):
            if entry.group < 0:
                continue
            names = state_names(hyper_of(self.kind, self.groups[entry.group]))
            state = states.get(id(p), {})
            for array, name in enumerate(names):
                value = state.get(name)
                if value is not None:
                    self.set_value(number, value, 1 + array)
                elif self.engine.steps(number):
                    self.set_value(number, torch.zeros(entry.shape), 1 + array)
            if self.master_array and state.get("master") is not None:
                self.set_value(number, state["master"], self.master_array)
                self.masters_given.add(number)
            step = state.get("step", 1 if any(state.get(name) is not None for name in names) else 0)
            self.engine.set_steps(number, int(step))

    # ---- hooking the model ----

    def hook(self) -> None:
        """Install everything that the class's head names."""
        self._wrap_forward(self.model, self._model_forward)
        for number, (_, block) in enumerate(self.blocks):
            if block is not self.model:
                self._wrap_forward(block, functools.partial(self.run_block, number))
        for number, (p, entry) in enumerate(zip(self.params, self.layout.entries, strict=True)):
            if entry.group >= 0:
                with DisableTorchFunction():
                    self._handles.append(p.register_hook(self.before_gradient))
                    self._handles.append(p.register_post_accumulate_grad_hook(functools.partial(self.after_gradient, number)))
        index = {id(p): number for number, p in enumerate(self.params)}
        for module in self.model.modules():
            own = {leaf: index[id(p)] for leaf, p in module._parameters.items() if p is not None}
            if own and self.master_array:
                self._handles.append(module.register_load_state_dict_pre_hook(functools.partial(self._before_load, own)))
            if own:
                self._handles.append(module.register_state_dict_post_hook(functools.partial(self._fill_state_dict, own)))
                self._handles.append(module.register_load_state_dict_pre_hook(changes.refuse_assign))
            if own or "forward" in self.put_in(module):
                for name, method in changes.guard(self, module).items():
                    module.__dict__[name] = method
                    self._wrapped.append((module, name))
        self.model.__dict__["zero_grad"] = self._model_zero_grad
        self._wrapped.append((self.model, "zero_grad"))

    def _wrap_forward(self, module: nn.Module, around: Callable[..., Any]) -> None:
        forward = module.forward

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            changes.check_not_compiled(module)
            return around(forward, args, kwargs)

        module.__dict__["forward"] = wrapped
        self._wrapped.append((module, "forward"))

    def _model_forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._takes_use_cache and torch.is_grad_enabled() and self.model.training:
            kwargs.setdefault("use_cache", False)  # keys kept for generation cost memory and would be kept twice by recomputation
        if not torch.is_grad_enabled() or not self.model.training:
            with counted(self.engine):
                self.begin_forward(args, kwargs)
                return forward(*args, **kwargs)
        self.begin_forward(args, kwargs)
        self.engine.stash_begin()
        self.stashing = True
        try:
            return forward(*args, **kwargs)
        finally:
            self.stashing = False

    def _model_zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module.zero_grad; gradients that left memory are dropped too."""
        if not set_to_none:
            raise ValueError("zero_grad(set_to_none=False) is not supported: gradients leave memory; use zero_grad()")
        self.zero_grad()

    def _before_load(self, own: dict[str, int], _module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
        before_load(self, own, state_dict, prefix)

    def _fill_state_dict(self, own: dict[str, int], _module: nn.Module, state_dict: Any, prefix: str, _metadata: Any) -> None:
        """Each entry becomes a full, separately owned tensor; tied parameters share one."""
        copies = state_dict.__dict__.setdefault("_protrain_copies", {}) if hasattr(state_dict, "__dict__") else {}
        for leaf, number in own.items():
            if prefix + leaf in state_dict:
                if number not in copies:
                    copies[number] = self.value(number)
                state_dict[prefix + leaf] = copies[number]

    def close(self, restore: bool = True) -> None:
        """Take everything back; with `restore` the parameters are ordinary tensors of their own again."""
        if self.closed:
            return
        self.forget()
        for handle in self._handles:
            handle.remove()
        for module, name in self._wrapped:
            module.__dict__.pop(name, None)
        self._handles.clear()
        self._wrapped.clear()
        if restore:
            for chunk in list(self._bases):  # those that were bound
                for number in self.layout.members[chunk]:
                    value, p = self.value(number), self.params[number]
                    with DisableTorchFunction():
                        p.data = value
                    release(p)
        self._bases.clear()
        self._address_chunk.clear()
        self.closed = True
        self.clock.close()
        self.engine.close()
        _core.trim(0)


def takes_use_cache(model: nn.Module) -> bool:
    """Whether it is a transformers model that keeps keys for generation unless told not to."""
    return hasattr(model, "config") and "use_cache" in inspect.signature(model.forward).parameters


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The shapes of all tensors of a batch, in order."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))


def covers(known: tuple[tuple[int, ...], ...], shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether a batch of these shapes needs no more than one of the known shapes."""
    if len(known) != len(shapes):
        return False
    return all(len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True)) for a, b in zip(known, shapes, strict=True))
