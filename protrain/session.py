"""A session: one wrapped model, its optimizer's state, and the engine that moves them.

Here stands what a step is: forward begins, gradients come, `step()` makes it or an error ends it. Each part of the work is an
object of its own, in the order the data flows:

    runtime/wrapped.py     what was wrapped, which all others share
    runtime/hooks.py       what is put into the model, so that a step is noticed
    runtime/fitting.py     an arrangement for each batch, as steps show what they take; pacing.py changes it by measured times
    runtime/deciding.py    an arrangement for what was foreseen, that keeps to the budget
    runtime/carrying.py    whether it has room beside what else is in memory; homes.py carries it out
    runtime/evaluation.py  an arrangement for forwards without gradients, where training's leaves them no room
    runtime/residency.py   where each parameter lies, and that it lies there when it is looked at
    runtime/running.py     blocks and operations
    runtime/gradients.py   gradients as they come; updates.py says when parameters are updated from them
    state/values.py        each parameter's arrays, read and written; states.py gives them torch's forms
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from .base.counting import counted, uncounted
from .device.compute import Accelerator
from .dryrun.passes import output_tensors
from .errors import BudgetError, DiskError, Error, PlanError, StepError
from .model import keycaches
from .model.parameters import ChunkTensor, DisableTorchFunction, release
from .model.precision import has_master
from .model.recording import check_not_recorded
from .profiling.blockclock import BlockClock
from .profiling.device_clock import DeviceClock
from .runtime import changes
from .runtime.arranging import first_arrangement
from .runtime.awaited import Awaited
from .runtime.batches import Batch, Shapes
from .runtime.carrying import Carrier
from .runtime.deciding import Decider
from .runtime.evaluation import Evaluation
from .runtime.fitting import Fitter
from .runtime.gradients import Gradients
from .runtime.homes import Homes
from .runtime.hooks import ModelHooks
from .runtime.marks import Marks
from .runtime.otherhooks import release_failed_backward
from .runtime.outside import inside_transform
from .runtime.pacing import Pacer
from .runtime.residency import Residency
from .runtime.running import Runner, Together
from .runtime.samples import MemorySamples
from .runtime.updates import Updates
from .runtime.wrapped import Wrapped
from .state.states import States
from .state.values import Values


class Session:
    """See the module's head. Methods are called on the thread that drives the step.

    turn: held by who runs a forward, makes or drops a step, saves, loads or unwraps, so that other threads wait for it.
    step_seconds, wait_seconds: of the last step that was completed, without what was planned before it.
    """

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped, self.model, self.layout, self.params = wrapped, wrapped.model, wrapped.layout, wrapped.params
        self.foreign = wrapped.foreign
        arrangement = first_arrangement(wrapped)
        self.engine = wrapped.make_engine()
        self.marks = Marks(self.engine)
        device_clock = DeviceClock(wrapped.compute) if isinstance(wrapped.compute, Accelerator) else None
        self.clock = BlockClock(self.engine, self._backward_begins, self._block_is_back, device_clock)
        self.residency = Residency(wrapped, self.engine, self, device_clock)
        self.runner = Runner(wrapped, self.engine, self.residency, self.clock, arrangement.plan.block_modes)
        self.homes = Homes(wrapped, self.engine, self.residency, self.runner, arrangement)
        self.decider = Decider(wrapped, self.homes)
        self.carrier = Carrier(wrapped, self.engine, self.homes)
        self.fitter = Fitter(wrapped, self.engine, self.homes, self.decider, self.carrier)
        self.evaluation = Evaluation(wrapped, self.homes, self.carrier, self.fitter.foresees)
        self.pacer = Pacer(wrapped, self.homes, self.decider, self.carrier, self.clock)
        self.updates = Updates(wrapped, self.engine, self.residency, device_clock)
        self.gradients = Gradients(wrapped, self.engine, self.residency, self.updates, self.clock)
        self.turn = threading.RLock()
        self.values = Values(wrapped, self.engine, self.residency, self.turn)
        self.states = States(self.values)
        self.hooks = ModelHooks()
        if self.foreign is not None:
            self.foreign.open(self)
        self.closed = False
        self.driver = threading.get_ident()  # the thread that made the last forward
        self._caches_are_of_no_use = keycaches.are_of_no_use(wrapped.model)
        self._awaited = Awaited(self._differentiates)
        self._graphs = False  # forwards recorded gradients, since the last step or awaited: what autograd keeps lies where it lay
        self._in_eval = False  # the last forward that recorded gradients was in eval mode
        self._trains_in_eval: bool | None = None  # not known before a backward, or a forward in train mode
        # the step under way
        self._began: float | None = None
        self._held_before: int | None = None  # when the last step began; None: several forwards began before a backward
        self._wait_ns = 0
        self._batches: Counter[Shapes] = Counter()  # of the step under way
        self._told_unplanned = False
        self._tells = False  # a step began as it was planned, and nothing else counted since
        self._needed_beside = 0  # in memory with a forward without gradients in it that was refused, or state gave way to
        self._output: tuple[weakref.ref[torch.Tensor], int] | None = None  # the largest of the last forward, and bytes of all
        self._dropped_bytes = 0  # of outputs that the program did not hold when the last backward began
        self._stray_slots = False  # chunks got slots of their own for an operation of no step
        self.samples: MemorySamples | None = None  # where `watch_memory` was called
        self._steps_before = 0
        # figures
        self.step_seconds = 0.0
        self.wait_seconds = 0.0

    @property
    def steps(self) -> int:
        """That were completed. The engine counts those it makes: no interrupt comes between a step and its count."""
        return self._steps_before + self.engine.commits()

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps_before = count - self.engine.commits()

    def __deepcopy__(self, _memo: Any) -> Session:
        """What is copied still belongs to this session."""
        return self

    # ---- first values ----

    def begin_fill(self) -> None:
        """Every chunk has its first home and slot; the parameters' values come next, chunk by chunk."""
        self.homes.begin_fill()

    # ---- forward ----

    def run_model(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward of the whole model.

        Raises:
            BudgetError: no plan fits this batch; the plan in use stays.
            PlanError: torch.jit or torch.export records it.
            StepError: the last load failed half-way.
        """
        check_not_recorded()
        of_no_use = self._caches_are_of_no_use and self._is_training() and self._wants_no_cache(kwargs)
        with self.turn, keycaches.dropped(kwargs, of_no_use) as dropping:
            try:
                self.values.loads.check("forward")
                if self._is_beside_backward():
                    raise StepError(
                        "forward while another thread's backward uses parameters on disk: let it end first; where it has failed, "
                        "call optimizer.zero_grad()"
                    )
                return self._run_model(forward, args, kwargs)
            finally:
                self._caches_are_of_no_use &= not dropping.read_again

    def _is_beside_backward(self) -> bool:
        """Whether another thread runs a backward, for which chunks are in use. Over a device torch runs backward on a thread of
        its own, and nobody can tell."""
        by_another = not self.wrapped.compute.separate and self.residency.held_by_another()
        return by_another and not self.clock.is_backward_over()

    def _is_training(self) -> bool:
        """Whether a forward that begins now is taken for one of training. One in eval mode may be, in which `from_pretrained`
        leaves a model: where gradients are recorded, until one in train mode was made, or if the last one had a backward."""
        return torch.is_grad_enabled() and (self.model.training or self._trains_in_eval is not False)

    def _wants_no_cache(self, kwargs: dict[str, Any]) -> bool:
        """Of a forward of training: in eval mode it may still be one that generates, and forgot to turn gradients off."""
        return self.model.training or self._trains_in_eval is True or kwargs.get("labels") is not None

    def _run_model(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        training, stashing, graphs, begun = self._is_training(), self.runner.stashing, self._graphs, False
        self.runner.depth += 1
        try:
            if not training:
                with counted(self.engine, self.wrapped.compute):
                    self.begin_forward(args, kwargs)
                    begun = True
                    if self.runner.depth == 1 and self._began is not None and not torch.is_grad_enabled():
                        return self._run_in_step(forward, args, kwargs)
                    output = forward(*args, **kwargs)
                    if self.runner.depth == 1 and torch.is_grad_enabled():
                        self._awaited.add(output_tensors(output))
                    return output
            self.begin_forward(args, kwargs)
            begun = True
            self.engine.stash_begin()
            self._settle_stash()
            self.runner.stashing = True
            with self.fitter.listening(args, kwargs) if self.runner.depth == 1 else nullcontext():
                output = forward(*args, **kwargs)
            if self.runner.depth == 1:
                tensors = output_tensors(output)
                self._awaited.add(tensors)
                leaves = [leaf for leaf in tensors if leaf.dim()]
                largest = max(leaves, key=torch.Tensor.numel, default=None)
                self._output = (weakref.ref(largest), sum(leaf.nbytes for leaf in leaves)) if largest is not None else None
                if self.fitter.measures_loss(self._batches):
                    self.engine.stash_flush()
                self.marks.model_returned()
                if largest is not None and not self.wrapped.blocks:
                    self.clock.watch_model(largest)
            return output
        except BaseException:
            self._graphs = self._graphs if begun else graphs
            self.runner.forget()
            if self.gradients.passes:
                self.engine.unuse_all()
            else:  # no step is under way: what is allocated from here on is the user's
                self.engine.drop()
                if training:
                    self._began = None
                    self.wrapped.compute.count(self.engine, False)
            raise
        finally:
            self.runner.depth -= 1
            self.runner.stashing = stashing

    def _may_move(self) -> bool:
        """Whether nobody looks at parameters where they lie: neither a forward that runs nor one whose backward may come."""
        return self.runner.depth <= 1 and not self._graphs and not self._under_way()

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.driver = threading.get_ident()
        self._note_commit()
        self.wrapped.compute.count(self.engine, True)
        if not self._is_beside_backward():
            self.residency.release_nodes()
        self.homes.settle()
        changes.check_parameters(self.wrapped)
        if torch.is_grad_enabled():
            changes.check_frozen(self.wrapped)
            changes.check_groups(self.wrapped)
        changes.adopt(self.values)
        if self.values.strides_changed:
            self.values.strides_changed = False
            self.fitter.forget_batches()
            self.evaluation.forget()
        self.gradients.leftover()  # what was dropped is known while its chunk is still in memory
        waits = self._awaited.any()
        if self._began is None and self._stray_slots and not waits and not self._under_way():
            self._stray_slots = False
            self.homes.drop_own_slots()
        begins = self._began is None and torch.is_grad_enabled()  # an evaluation is no part of the step that comes after it
        if begins:
            self._batches.clear()
        modes_before = self.runner.modes
        if self.runner.depth <= 1:
            self.runner.modes = self.homes.arrangement.plan.block_modes
        may_move = self._may_move()
        if torch.is_grad_enabled():
            self._graphs, self._in_eval = True, not self.model.training
            if self.model.training:
                self._trains_in_eval = False
        if self._is_training():
            if may_move:
                self.evaluation.end()
            if self.runner.depth <= 1 and not self._under_way() and not (begins and waits):
                self._prepare(begins, modes_before, args, kwargs)
            self._fit(args, kwargs)
            if begins:
                now = self.homes.arrangement
                room_bytes = self.wrapped.settings.memory_bytes - now.plan.peak_bytes + now.between_bytes
                self.wrapped.compute.make_whole(self.engine, room_bytes, *self.decider.recomputed_bytes())
                self._tells = True
                self._held_before = self.fitter.begin_step()
                self._name_budget()
                self.marks.begin()
                if self.fitter.knows_nothing:
                    self.marks.grows()
                self._begin_clocks()  # behind the planning, which is no part of what every step takes
            self.runner.begin_pass(self.decider.measured)
            self.clock.begin_pass()
            self.engine.read_ahead(self.wrapped.settings.accumulate == 1 and self.updates.behind_backward)
            self.homes.yield_states()
        else:
            self._tells = self._is_within_step()
            if self._tells and not self.decider.within_bytes:  # what is seen first is its own: no gradient waits for its update
                with suppress(DiskError, StepError):  # step() tells of it
                    self.engine.wait()
            if may_move and not torch.is_grad_enabled():
                self.evaluation.begin(args, kwargs)
            if begins:
                self._begin_clocks()
            self.engine.read_ahead(False)
        self.engine.seek(0)

    def _is_within_step(self) -> bool:
        """Whether the forward that begins records no gradients, and comes between a backward of a step and its end."""
        behind_backward = self._began is not None and self._under_way() and not self.marks.in_loss
        return self._tells and self.runner.depth == 1 and not torch.is_grad_enabled() and behind_backward

    def _run_in_step(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward without gradients in the middle of a step. What one takes that is refused is foreseen: it has not shown all
        of it."""
        before, within = self.engine.held(), self._is_within_step()
        with self.marks.within() if within else nullcontext():
            try:
                result = forward(*args, **kwargs)
            except BudgetError as error:
                needed_bytes = max(error.needed_bytes, before["live_bytes"] + self.evaluation.need_within(args, kwargs))
                if within:
                    self.marks.note_within(needed_bytes)
                else:
                    self._needed_beside = max(self._needed_beside, needed_bytes)
                raise
        yielded_bytes = self.engine.held()["yielded_bytes"]
        if yielded_bytes > before["yielded_bytes"] and not within:  # it found room, but no plan has it
            self._needed_beside = max(self._needed_beside, self.wrapped.settings.memory_bytes + yielded_bytes)
        return result

    def _begin_clocks(self) -> None:
        """What a step takes is measured from here on."""
        self._began = time.perf_counter()
        self._wait_ns = self.engine.stats()["wait_ns"]
        self.clock.begin_step()

    def _fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """This batch of a training step has its plan, or no block keeps what it saves where that must do."""
        shapes, under_way = self.fitter.batches.batch_of(args, kwargs), self.gradients.passes > 0
        if not self.fitter.knows(shapes):
            if inside_transform():  # where nothing is foreseen, and blocks run as they are
                self._tells = False
                return
            waits = self._awaited.any() and torch._C._current_graph_task_id() == -1  # else one goes on, which is another matter
            if (under_way or waits) and self.fitter.planned:
                self._tells = False
                self.fitter.foresee_later(args, kwargs, shapes)
                self._batches[shapes] += 1
                self.runner.recompute_all()  # gradients are under way, or graphs wait: nothing else can move now
                return
            self.evaluation.end()  # else it would put back what this plan replaces
            self._foresaw(self.fitter.plan_for(args, kwargs, shapes))
            shapes = self.fitter.batches.batch_of(args, kwargs)  # it may need what another one does
        self._batches[shapes] += 1
        beyond_plan = self.gradients.passes >= self.gradients.wanted  # gradients wait for a step
        self._tells = self._tells and not beyond_plan
        if (beyond_plan or not under_way) and self.fitter.must_recompute():
            self.runner.recompute_all()

    def _foresaw(self, largest: Batch | None) -> None:
        """Plans were made anew, for this batch. What the update of another optimizer takes, and when, is not simulated: plans are
        by memory alone then."""
        if largest is not None and self.foreign is None:
            self.pacer.foresaw(*largest)

    def _prepare(self, begins: bool, modes_before: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward, with no gradients under way: plans are made anew by what the step before has shown. begins: the
        forward is its step's first; modes_before: of the blocks in the one before."""
        if not begins:
            n_waiting = self._awaited.count()
            if n_waiting > self.decider.several.n_waiting:  # else what one of them recorded is gone
                self.fitter.note_several(modes_before)
            elif n_waiting > 0:
                self.fitter.note_waiting()
            if self.fitter.must_swap():
                self.runner.swap_all()
            self._name_budget()
            self._held_before = None
            return
        refused_bytes = self.marks.refused_bytes if self._tells else 0  # the last step was not made
        within_bytes = self.marks.within_bytes if self._tells else 0
        if self._needed_beside:
            self.fitter.note_beside(self._needed_beside)
        self._tells, self._needed_beside = False, 0
        self.evaluation.end()
        self.marks.begin()
        self._foresaw(self.fitter.plan_later())
        self._foresaw(self.fitter.learn_within(within_bytes))
        if refused_bytes:
            release_failed_backward()
            self._foresaw(self.fitter.learn_refused(refused_bytes, args, kwargs))
        if self._dropped_bytes:
            self._foresaw(self.fitter.note_dropped(self._dropped_bytes, args, kwargs))
            self._dropped_bytes = 0
        self.homes.bring_states()

    def _backward_begins(self) -> None:
        self.wrapped.compute.count(self.engine, True)  # another model's step may have come between
        if self._output is not None:
            largest, n_bytes = self._output
            self._dropped_bytes = n_bytes if largest() is None else 0
            self._output = None
        self.marks.backward_begins()
        self.engine.stash_end()
        self._trains_in_eval = self._in_eval

    def _name_budget(self) -> None:
        """What is refused in the step under way names what is known of it by now."""
        self.engine.set_named(self.fitter.named_bytes())

    def _differentiates(self) -> None:
        """A backward begins that another one may go through."""
        self.fitter.differentiates = True
        self._name_budget()

    def _penalizes(self) -> None:
        """The loss that the program makes reads parameters itself."""
        self.fitter.penalizes = True
        self._name_budget()

    def _block_is_back(self, number: int, recomputed: bool) -> None:
        self.runner.block_is_back(number, recomputed)

    def _settle_stash(self) -> None:
        """What copies from a device are done with is free; what failed of them is told."""
        if self.runner.device_stash is not None:
            self.runner.device_stash.settle()
            self.engine.stash_check()

    # ---- the end of a step ----

    def step(self) -> torch.Tensor | None:
        """Make the step of all gradients that there are; returns their norm where it was asked for.

        Raises:
            StepError, DiskError, PlanError: it was not made; the model is as it was before this step's backward.
        """
        with self.turn:
            self.values.loads.check("optimizer.step()")
            return self._step()

    def optimizer_mode(self, name: str) -> None:
        """Call the own `train` or `eval` of an optimizer without a kernel, for all parameters that it has state of.

        Raises:
            StepError, DiskError: parameters and state are what they were.
        """
        assert self.foreign is not None
        with self.turn:
            self.values.loads.check(f"optimizer.{name}()")
            self._note_commit()
            if not self.foreign.changes_mode(name):
                return
            self.check_between_steps(f"optimizer.{name}()")
            changes.check_groups(self.wrapped)
            changes.adopt(self.values)
            steps = self.steps
            try:
                self.engine.wait()
                changed = self.foreign.change_mode(name)
                self._note_commit()
            except BaseException:
                if not self._note_commit():  # else an interrupt came just after it was made
                    self.forget()
                raise
            finally:
                self.steps = steps  # the engine's commit is none of these
            self.runner.note_changed(changed, self.engine.commits())
            self.residency.note_changed(changed)
            torch.autograd.graph.increment_version([self.params[number] for number in changed])

    def _step(self) -> torch.Tensor | None:
        self._note_commit()
        self.residency.release_nodes()
        changes.check_frozen(self.wrapped)
        changes.check_groups(self.wrapped)
        changes.adopt(self.values)
        norm: torch.Tensor | None = None
        found = self.gradients.to_use()
        if self.marks.refused_bytes and not found:  # nothing is made, and what was refused not forgotten
            self.zero_grad()
            return None
        if found:
            self._check_whole()
        try:
            if found:
                if self._began is None and self.runner.unplanned:
                    self._tell_unplanned()
                norm = self._make_step()
                self._note_commit()
                self._awaited.step_made()
            else:
                self.steps += 1
            self._after_step()
        except BaseException:
            if not self._note_commit():  # else an interrupt came just after it was made
                self.forget()
            raise
        finally:
            self._began, self.clock.in_backward = None, False
            self.engine.set_named(0)
            self.wrapped.compute.count(self.engine, False)
        self._graphs = self._awaited.any()
        return norm

    def _check_whole(self) -> None:
        """Whether no backward of this step has lost gradients to an error.

        Raises:
            StepError: one has, and there is a part of its gradients.
        """
        failed = self.clock.backward_failed()
        if self.marks.refused_bytes and (failed or self.marks.in_loss):  # a head's backward is not told from a loss
            what = "the memory budget refused a backward of this step"
        elif failed and self.marks.lost:
            what = "a backward of this step failed for want of the disk or of memory"
        else:
            return
        raise StepError(
            f"optimizer.step(): {what}, and a part of its gradients is missing: call optimizer.zero_grad(), and run forward and "
            f"backward again"
        )

    def _tell_unplanned(self) -> None:
        """Once: what plans begin with, a call of the model, did not come in this step."""
        if not self._told_unplanned:
            self._told_unplanned = True
            warnings.warn(
                "protrain: blocks were trained in a step without a call of the model itself, for which alone there are plans: "
                "they are recomputed, whatever memory there is. Call model(...), with what you call of it inside of its forward",
                stacklevel=6,
            )

    def _make_step(self) -> torch.Tensor | None:
        settings, gradients = self.wrapped.settings, self.gradients
        self._settle_stash()
        in_memory = gradients.collect()  # looked at before anything is updated: updates in memory are not undone
        norm, scale = gradients.clip(settings.max_grad_norm) if settings.max_grad_norm is not None else (None, 1.0)
        gradients.using(in_memory)
        if self.foreign is not None:
            self.engine.wait()
            self.marks.update_begins()
            self.foreign.step(scale)
        else:
            all_passes = gradients.passes >= gradients.wanted
            self.updates.make(in_memory, scale, all_passes=all_passes, taken=bool(gradients.taken))
        return norm

    def _note_commit(self) -> bool:
        """What follows from a step that the engine has made; here, or, where an interrupt came between, when a step or a forward
        begins or gradients are dropped. Returns whether there was one."""
        commits = self.engine.commits()
        if commits == self.runner.noted_commits:
            return False
        if self.foreign is not None:
            self.foreign.finish()
        changed = self.gradients.changed()
        self.runner.note_changed(changed, commits)
        self.residency.note_changed(changed)
        self.gradients.end_step()
        self.values.masters_given.clear()
        self.runner.noted_commits = commits  # last: an interrupt before it has all of this done again
        return True

    def _after_step(self) -> None:
        """Figures, and better plans."""
        now = time.perf_counter()
        timed = self._began is not None
        if self._began is not None:
            self.step_seconds = now - self._began
            self.wait_seconds = (self.engine.stats()["wait_ns"] - self._wait_ns) / 1e9
            self.clock.end_step(self.steps)
        self.marks.step_made(self._foretold_bytes())
        self.homes.adjust_headroom(self.marks.highest_bytes)
        saved_bytes = self.runner.saved_bytes()
        try:
            if self.evaluation.is_under_way:  # the step shows nothing of training's arrangement
                pass
            elif self._awaited.any():
                self._foresaw(self.fitter.plan_beside_graphs())
            else:
                self._learn(saved_bytes, timed)
        except Error as error:  # the step is made all the same
            warnings.warn(f"protrain: a better plan could not be carried out, the one in use stays: {error}", stacklevel=6)
        self._tells = False
        self.marks.begin()
        self.engine.seek(0)

    def _learn(self, saved_bytes: dict[int, int], timed: bool) -> None:
        """What the step that was made shows, and the plans that follow from it."""
        self.fitter.learn_measured(max(self.marks.planned_bytes, self.marks.within_bytes), saved_bytes)
        if self._tells:
            within_bytes = self.marks.within_bytes
            self._foresaw(self.fitter.learn(self.marks.planned_bytes, self.marks.loss_bytes, self._batches))
            self._foresaw(self.fitter.learn_within(within_bytes))
        elif self.fitter.end_first():
            self._foresaw(self.fitter.plan_anew())
        if timed:
            self.pacer.after_step(
                self._batches, self.step_seconds, self.updates.seconds, self.updates.bytes,
                behind_backward=self.updates.behind_backward,
            )  # fmt: skip

    def forget(self) -> None:
        """Drop the gradients and updates of a step that is not made."""
        self.runner.forget()
        self.residency.release_nodes()
        self.gradients.forget()
        self._began, self.clock.in_backward = None, False
        self.clock.forget()
        self.engine.set_named(0)
        self.wrapped.compute.count(self.engine, False)

    def zero_grad(self) -> None:
        """Drop all gradients, and the step under way; one that has made none yet goes on, unless something was refused in it, or
        no backward can come any more."""
        with self.turn:
            self._note_commit()
            if self.marks.refused_bytes:
                release_failed_backward()
                self._awaited.forget()
            dropped = self._began is not None and self._awaited.count() == 0
            if self._under_way() or self.marks.refused_bytes or dropped:
                self.forget()
            if not self._under_way():  # also where a forward failed
                self._graphs = self._awaited.any()
            self.gradients.drop()

    # ---- between steps ----

    def _under_way(self) -> bool:
        """Whether a step has gradients, or makes them."""
        return self.gradients.passes > 0 or self.clock.in_backward or self.engine.has_gradients()

    def check_between_steps(self, what: str) -> None:
        """Whether no step is under way.

        Raises:
            StepError: one is.
        """
        made_none = self.gradients.passes == 0 and not self.engine.has_gradients() and self.clock.is_backward_over()
        if self._under_way() and not made_none:  # a backward is over that made none, as one to the inputs alone
            raise StepError(f"{what} in the middle of a step: call optimizer.step() or optimizer.zero_grad() first")

    def change_step(self, accumulate: int, max_grad_norm: float | None) -> None:
        """Other passes in each step, or another norm, from here on; gradients are dropped, the next batch is planned for anew."""
        self.zero_grad()
        self.wrapped.settings = replace(self.wrapped.settings, accumulate=accumulate, max_grad_norm=max_grad_norm)
        self.fitter.forget_batches()

    def lengthen_step(self) -> None:
        """The step under way takes as many backward passes as another one beside those that it had, if none of them was to be its
        last. Plans are for the others."""
        with self.turn:
            if self.gradients.passes < self.gradients.wanted:
                self.gradients.more = self.gradients.passes

    @property
    def predicted_peak_bytes(self) -> int:
        """Of a step under the arrangement in use, or under the one of the step that had the most in memory since wrap, where that
        is more: steps before a plan by time may be higher than those after it."""
        return max(self._foretold_bytes(), self.marks.foretold_bytes)

    def _foretold_bytes(self) -> int:
        """Of a step under the arrangement in use. Its plan has room for the batch; one that was made between steps, where nothing
        is counted, is in no measured peak either, and not in this."""
        found, memory_bytes = self.homes.arrangement, self.homes.stash_goal_bytes or self.wrapped.settings.memory_bytes
        if self.foreign is None:
            return max(found.plan.peak_bytes - self._outside_bytes(), self.decider.within_peak_bytes(found))
        computed_bytes, held_bytes = self.decider.without_update()
        computed_bytes -= self.foreign.made_bytes(found.plan.n_persist)
        copies_bytes = self.foreign.highest_bytes(found, memory_bytes, held_bytes)
        return max(max(computed_bytes, copies_bytes) - self._outside_bytes(), self.decider.within_peak_bytes(found))

    def _outside_bytes(self) -> int:
        """Of the batch, what was made while nothing was counted. Those of later passes are made while the step counts; and where
        activations go to disk to keep to a goal, they fill what the batch leaves of it."""
        if self.homes.stash_goal_bytes:
            return 0
        if self._held_before is None or self.wrapped.settings.accumulate > 1 or self.wrapped.compute.separate:
            return 0
        batches = [run.batch_bytes if run is not None else 0 for _, run in self.decider.dry_runs]
        return max(min(batches, default=0) - self._held_before, 0)

    def watch_memory(self) -> MemorySamples:
        """From the next step on, what memory is of is noted at every begin and end of a block. Returns where it is found."""
        if self.samples is None:
            self.samples = self.clock.sampler = MemorySamples(self)
        return self.samples

    def leave_room(self) -> bool:
        """Every chunk is away, for a forward that was not foreseen, until `end_evaluation` or training goes on. Returns whether
        that is new; it cannot be in the middle of a step."""
        with self.turn:
            if not self._may_move():
                return False
            changes.adopt(self.values)
            return self.evaluation.leave_room()

    def end_evaluation(self) -> None:
        """What was made room for an evaluation is training's again."""
        with self.turn:
            if self._may_move():
                changes.adopt(self.values)
                self.evaluation.end()

    def close(self, restore: bool = True, as_given: bool = False) -> None:
        """Take everything back; with `restore` the parameters are ordinary tensors of their own again, `as_given`: of the types
        that they came in, with what their masters have kept of them."""
        with self.turn:
            if self.closed:
                return
            self.forget()
            self.homes.settle()
            # All are read before anything changes: a disk that fails leaves a model that is wrapped.
            bound = self.residency.bound() if restore else []
            values = [(self.params[number], self._given_back(number, as_given)) for number in bound]
            self.hooks.remove()
            for p, value in values:
                with DisableTorchFunction():
                    p.data = value
                release(p)
            self.residency.forget()
            self.closed = True
            self.clock.close()
            self.engine.close()
            if self.runner.device_stash is not None:
                self.runner.device_stash.close()
            self.wrapped.compute.trim()
            if restore:
                self.wrapped.places.give_back()

    def _given_back(self, number: int, as_given: bool) -> torch.Tensor:
        """What the parameter has when all is taken back: its values, of the type that it came with where that is asked for; or
        what a user set its `.data` to and is refused while the model is wrapped, as a tensor of another shape, which is why the
        model is to be unwrapped."""
        array = self.wrapped.master_array if as_given and has_master(self.wrapped, number) else 0
        try:
            value = self.values.get(number, array)
        except PlanError:
            with DisableTorchFunction(), uncounted():
                value = self.params[number].data.clone()
        return value.to(dtype=self.wrapped.given_dtypes[number]) if as_given else value

    # ---- what parameters on disk call (parameters.Owner) ----

    def call(
        self, func: Callable[..., Any], found: list[Any], numbers: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.homes.settled:
            self.homes.settle()
        own_slots = self.residency.own_slots
        if self.marks.in_loss and not self.fitter.penalizes and torch.is_grad_enabled():
            self._penalizes()
        try:
            return self.runner.call(func, found, numbers, args, kwargs)
        except DiskError as error:
            self.values.loads.note(error)
            raise
        finally:
            self._stray_slots |= self._began is None and self.residency.own_slots > own_slots

    def together(self, numbers: Sequence[int]) -> Together:
        """A context in which these parameters are read at once."""
        if not self.homes.settled:
            self.homes.settle()
        return Together(self.runner, numbers)

    def check_grad_access(self, number: int, drops: bool) -> None:
        self.gradients.check_access(number, drops)

    def owner_of_memory(self, tensor: torch.Tensor, numbers: list[int]) -> int | None:
        return self.residency.owner_of_memory(tensor, numbers)

    def note_view(self, view: torch.Tensor, number: int) -> None:
        self.residency.note_view(view, number)

    def has_place(self, number: int) -> bool:
        return self.residency.address(number) is not None

    def set_data(self, number: int, value: torch.Tensor) -> None:
        if self.layout.entries[number].chunk not in self.residency.filling:
            changes.set_data(self.values, number, value)
            return
        value = value.clone() if isinstance(value, ChunkTensor) else value
        with DisableTorchFunction():  # what it shall begin with: taken over when the function that initialises it is done
            self.params[number].data = value

    def value(self, number: int) -> torch.Tensor:
        return self.values.get(number)
