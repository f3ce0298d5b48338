"""Gradients: taken out of `.grad` as they come, added up over the passes of a step, measured, and handed to the engine.

Those of parameters in memory stay where torch puts them. One of a parameter on disk goes to the engine by reference: for an
update behind backward if it is the step's last, else to be added to what lies on disk. With `max_grad_norm` the last pass adds
what lies there in memory, so that the whole gradient is seen once and its norm is torch's; the update comes in step().

Invariants:
- A parameter on disk whose gradient has left memory has no `.grad`, and looking at it is an error and not None (`check_access`).
- Gradients that step() has used are dropped before others are used, as those of plain torch would be added to otherwise. A
  backward that comes before that, as a generator's through its discriminator, makes none that anybody can use: those of
  parameters on disk go as they come, and step() is an error until all are dropped.
- Where those that have left memory are dropped the others of their step are too: what is left would be a part of a gradient.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from .. import _core
from ..errors import PlanError, StepError
from ..model.parameters import DisableTorchFunction
from ..model.strides import laid
from ..profiling.blockclock import BlockClock
from .otherhooks import check_not_nested
from .residency import Residency
from .updates import Updates
from .wrapped import Wrapped

UPDATE, SPILL, SPILL_TOTAL = 0, 1, 2  # ptn_gradient_use


class Gradients:
    """Of the step under way. passes: backward passes it had so far; more: those it is to have beside the ones that were planned
    for; taken: the parameters on disk that have a gradient."""

    def __init__(self, wrapped: Wrapped, engine: _core.Engine, residency: Residency, updates: Updates, clock: BlockClock) -> None:
        self._wrapped, self._layout, self._params = wrapped, wrapped.layout, wrapped.params
        self._engine, self._residency, self._updates, self._clock = engine, residency, updates, clock
        self._compute = wrapped.compute
        self.passes = self.more = 0
        self.taken: set[int] = set()
        self._task = -1  # the graph task of the pass under way
        self._stray = -1  # and of a backward that came while gradients of the last step were not dropped
        self._used: set[int] = set()  # parameters in memory whose gradients the step under way takes
        self._left: set[int] = set()  # parameters whose gradients were used by step() and are not dropped yet
        self._lost = False  # those of a step that was not made are gone, and nobody has begun another or called zero_grad
        self._norms: dict[int, torch.Tensor] = {}

    @property
    def wanted(self) -> int:
        """So many passes the step has, at most."""
        return self._wrapped.settings.accumulate + self.more

    # ---- in backward ----

    def before(self) -> None:
        """A gradient is about to be accumulated: is this backward pass one that the step has room for? One that
        torch.autograd.grad hands out needs none.

        Raises:
            StepError: it is one too many.
        """
        task = torch._C._current_graph_task_id()
        if task in (self._task, self._stray):
            return
        try:
            self._check_pass()
        except StepError:
            if not _handed_out():
                raise
        if self.passes == 0 and self.leftover():
            self._stray = task

    def _check_pass(self) -> None:
        """Whether the backward pass under way may be one of the step's.

        Raises:
            StepError: as `before`.
        """
        check_not_nested(self._compute.backward_depth)
        if self.passes >= self.wanted:
            raise StepError(
                f"backward pass {self.passes + 1} of a step that was wrapped with accumulate={self.wanted}: call "
                "optimizer.step() first, or optimizer.zero_grad() where one before it failed, or wrap with a larger accumulate"
            )

    def _begin_pass(self, task: int) -> None:
        self._task = task
        self._lost = False
        self._clock.watch_backward()
        if self.passes:
            self._engine.flush()
        self.passes += 1
        if self.passes == self.wanted:
            self._updates.begin()

    def accumulated(self, number: int, p: torch.Tensor) -> None:
        """A gradient was accumulated: take it out of `.grad`.

        Raises:
            PlanError: it is of another kind than the kernels take.
        """
        task = torch._C._current_graph_task_id()
        if task not in (self._task, self._stray):
            self._begin_pass(task)
        entry, settings = self._layout.entries[number], self._wrapped.settings
        self._residency.release_nodes()
        self._engine.stash_go_on()
        if self._engine.in_memory(entry.chunk) or entry.count == 0:
            return
        with DisableTorchFunction():
            grad = p.grad
            if grad is None:
                return
            if task == self._stray:
                p.grad = None
                self._left.add(number)
                return
            grad = self._dense(number, grad)  # where it is refused it stays where it is, and step() refuses it, too
            p.grad = None
            last = self.passes == self.wanted
            use = UPDATE if last and self._updates.behind_backward else SPILL
            if last and settings.max_grad_norm is not None:
                grad, use = self._total(number, grad), SPILL_TOTAL
                self._norms[number] = _norm(grad)
            with self._clock.device.waiting() if self._clock.device is not None else nullcontext():
                self._engine.gradient(number, self._compute.on_device(grad), grad, use)
            self.taken.add(number)

    def _dense(self, number: int, grad: torch.Tensor) -> torch.Tensor:
        """A gradient as the kernels take it: it lies as its parameter does. One that autograd makes does so already.

        Raises:
            PlanError: it is sparse, or not of the parameters' type.
        """
        self._check_dense(number, grad)
        return laid(grad.resolve_neg(), self._layout.entries[number].strides)

    def _check_dense(self, number: int, grad: torch.Tensor) -> None:
        entry = self._layout.entries[number]
        if grad.layout != torch.strided or grad.dtype != self._layout.dtype:
            wanted = str(self._layout.dtype).removeprefix("torch.")
            raise PlanError(
                f"the gradient of {entry.name} is {grad.layout} {grad.dtype}; only dense {wanted} gradients are supported"
            )

    def _total(self, number: int, grad: torch.Tensor) -> torch.Tensor:
        """The sum of this step's gradients of one parameter: those on disk came first."""
        if self._wrapped.settings.accumulate == 1 or number not in self.taken:
            return grad
        before = self._compute.empty_on_host(grad.shape, grad.dtype, self._layout.entries[number].strides)
        found = self._engine.spilled(number, self._compute.on_host(before))
        return self._compute.to_device(before).add_(grad) if found else grad

    # ---- what a user sees of them ----

    def leftover(self) -> bool:
        """Whether gradients that step() used were not dropped; those in memory may have been, one by one."""
        with DisableTorchFunction():
            self._left = {
                number
                for number in self._left
                if self._params[number].grad is not None or not self._engine.in_memory(self._layout.entries[number].chunk)
            }
        return bool(self._left)

    def check_access(self, number: int, drops: bool = False) -> None:
        """`.grad` of a parameter on disk is looked at; drops: it is set to None.

        Raises:
            StepError: its gradient left memory; None would be a wrong answer.
        """
        if drops:
            self._left.discard(number)
        if number in self.taken or number in self._left:
            raise StepError(
                f"the gradient of {self._layout.entries[number].name} has left memory; to clip pass max_grad_norm to wrap and "
                f"read optimizer.grad_norm, to drop gradients call optimizer.zero_grad()"
            )

    # ---- in step() ----

    def to_use(self) -> bool:
        """Whether there is something to make a step of: a backward pass, or a gradient that none made.

        Raises:
            StepError: there are those of the last step, which plain torch would use again, or those of a step that failed were
                dropped.
        """
        if self.passes:
            return True
        if self._lost:
            raise StepError("the last step was not made, and its gradients are gone: run forward and backward again first")
        if self.leftover():
            raise StepError("the gradients of the last step are still there, and used: call optimizer.zero_grad() after step()")
        with DisableTorchFunction():
            pairs = zip(self._params, self._layout.entries, strict=True)
            return any(p.grad is not None for p, entry in pairs if entry.group >= 0)

    def collect(self) -> list[tuple[int, torch.Tensor]]:
        """All passes are over. Returns the gradients of parameters in memory; those of parameters on disk are the engine's, also
        those that the user set.

        Raises:
            PlanError: one is of another kind than the kernels take; nothing was updated.
        """
        self._take_given()
        in_memory = [
            (number, self._dense(number, p.grad))
            for number, (p, entry) in enumerate(zip(self._params, self._layout.entries, strict=True))
            if entry.group >= 0 and self._engine.in_memory(entry.chunk) and p.grad is not None and entry.count
        ]
        self._engine.flush()
        return in_memory

    def _take_given(self) -> None:
        """Gradients that the user set for parameters on disk. All are looked at before the first is taken."""
        given: list[tuple[int, torch.Tensor]] = []
        with DisableTorchFunction():
            for number, (p, entry) in enumerate(zip(self._params, self._layout.entries, strict=True)):
                if entry.group < 0 or not entry.count or self._engine.in_memory(entry.chunk) or p.grad is None:
                    continue
                self._check_dense(number, p.grad)
                given.append((number, p.grad))
            while given:
                number, grad = given.pop(0)
                self._params[number].grad = None
                grad = self._dense(number, grad)
                self._engine.gradient(number, self._compute.on_device(grad), grad, SPILL)
                self.taken.add(number)

    @torch.no_grad()
    def clip(self, max_grad_norm: float) -> tuple[torch.Tensor, float]:
        """The global norm and the factor of the gradients, as torch.nn.utils.clip_grad_norm_ computes them of all of the model's
        parameters. Those of parameters that are not the optimizer's are scaled here, as there."""
        norms, loose = [], []
        with DisableTorchFunction():
            for number, (p, entry) in enumerate(zip(self._params, self._layout.entries, strict=True)):
                if number in self._norms:
                    norms.append(self._norms[number])
                elif number in self.taken:
                    norms.append(self._norm_on_disk(number))
                elif p.grad is not None:
                    norms.append(_norm(p.grad))
                    loose += [p.grad] if entry.group < 0 else []
            if not norms:
                return torch.tensor(0.0, dtype=torch.float32), 1.0
            total = torch.linalg.vector_norm(torch.stack(norms), 2.0)
            factor = float(torch.clamp(max_grad_norm / (total + 1e-6), max=1.0))
            for grad in loose:
                grad.mul_(factor)
        return total, factor

    def _norm_on_disk(self, number: int) -> torch.Tensor:
        """The norm of a gradient that is whole on disk: the step's last pass added nothing, or there were fewer passes."""
        entry = self._layout.entries[number]
        grad = self._compute.empty_on_host(entry.shape, self._layout.dtype, entry.strides)
        self._engine.spilled(number, self._compute.on_host(grad))
        return _norm(self._compute.to_device(grad))

    def using(self, in_memory: list[tuple[int, torch.Tensor]]) -> None:
        """The step is about to be made with these and with those taken."""
        self._used = {number for number, _ in in_memory}

    def changed(self) -> set[int]:
        """The numbers of the parameters that the step changes; right until `end_step`."""
        return self.taken | self._used

    def end_step(self) -> None:
        """The step was made; the next backward pass is the first of another. A graph from before it has lost what it saved of the
        parameters that it changed, as after torch's optimizers, whose fused kernels alone leave versions as they were."""
        updated = self.changed()
        groups = self._wrapped.groups
        seen = [self._params[n] for n in updated if not groups[self._layout.entries[n].group].get("fused")]
        torch.autograd.graph.increment_version(seen)
        self._left |= updated
        self._used = set()
        self.taken.clear()
        self._norms.clear()
        self.more = 0
        self.passes = 0  # last: until all of this is done no backward is another step's

    # ---- dropping ----

    def forget(self) -> None:
        """The step under way is not made."""
        lost = self._engine.has_gradients()
        self._engine.drop()
        self.passes = self.more = 0
        self._task = -1
        self.taken.clear()
        self._used = set()
        self._norms.clear()
        if lost:
            self.drop()
        self._lost = lost

    def drop(self) -> None:
        """No parameter of the optimizer has a gradient any more, also where its chunk has left memory since it was made."""
        self._left.clear()
        self._lost = False
        with DisableTorchFunction():
            for p, entry in zip(self._params, self._layout.entries, strict=True):
                if entry.group >= 0:  # others are another optimizer's, or nobody's
                    p.grad = None


def _handed_out() -> bool:
    """Whether the gradient that a leaf's hook sees is what torch.autograd.grad returns, and accumulated nowhere."""
    try:
        torch._C._will_engine_execute_node(torch._C._current_autograd_node())  # type: ignore[attr-defined]
    except RuntimeError:  # torch has no answer for such leaves, and for them alone
        return True
    return False


@torch.no_grad()
def _norm(grad: torch.Tensor) -> torch.Tensor:
    """The 2-norm of one gradient, as clip_grad_norm_ computes it, without a graph; of a bf16 gradient that of the widened one,
    which is what the update takes."""
    return torch._foreach_norm([grad.float()], 2.0)[0]
