"""Deciding: the arrangement for what dry runs foresaw, in which there is room for every batch that was planned for.

A plan is made for the batch that needs the most, and made again with more room until each of the others fits beside its slots. It
leaves room for what no dry run sees as well: what steps took beyond what was foreseen, what a loss outside of the model takes,
several forwards before a backward, forwards between backward and step(), and what is lost between tensors over a device. How much
that is finds out who watches the steps (fitting.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ..device.overhead import AMPLE_TIMES
from ..dryrun.phases import DryRun
from ..errors import BudgetError
from ..planner.planning import arrange
from ..planner.plans import Arrangement, Plan
from ..planner.profiles import Machine, Times
from ..planner.smallest import refuse
from ..planner.tiers import host_room
from .arranging import placed
from .batches import Batch, Shapes
from .homes import Homes
from .losses import Losses
from .several import Several
from .wrapped import Wrapped


def _needs_more(one: Arrangement, other: Arrangement, memory_bytes: int) -> bool:
    """Of two batches in this budget; where one of them has to swap, by what that cannot do without."""
    least = max(one.safest_bytes, other.safest_bytes) > memory_bytes
    return one.smallest_bytes > other.smallest_bytes if least else one.safest_bytes > other.safest_bytes


class Decider:
    """Of one session.

    dry_runs: the batches that were planned for, and what was foreseen of each; None: nothing could be.
    loss: what the program's own loss takes.
    several: what forwards hold that wait for their backward beside another one.
    unseen_bytes: in each plan, of what no dry run sees.
    is_first: no step was made, nor refused.
    first_room_bytes: beside it, until then, for the program to show what it does in a step.
    within_bytes: what forwards between backward and step() had in memory beside chunks and their gradients, at most.
    swaps: whether blocks of what no dry run foresaw swap; else they are recomputed.
    lost_times: as much as is lost between tensors where steps were refused.
    """

    def __init__(self, wrapped: Wrapped, homes: Homes) -> None:
        self._wrapped, self._homes = wrapped, homes
        self.dry_runs: list[tuple[Shapes, DryRun | None]] = []
        self.loss, self.several = Losses(), Several()
        self.unseen_bytes = self.first_room_bytes = 0
        self.is_first, self.swaps = True, False
        self.within_bytes = 0
        self.lost_times = 1

    def decide(
        self,
        run: DryRun | None,
        unknown_bytes: int = 0,
        *,
        times: Times | None = None,
        machine: Machine | None = None,
        as_now: bool = False,
        like: Plan | None = None,
        wrapped: Wrapped | None = None,
    ) -> Arrangement:
        """The arrangement for what a dry run foresaw; like: with the decisions of this plan, as_now: of the one in use; wrapped:
        as it would be in another budget.

        Raises:
            BudgetError: nothing fits.
        """
        wrapped = wrapped or self._wrapped
        settings = wrapped.settings
        unfilled_bytes = unseen_bytes = 0
        if run is not None:
            unfilled_bytes = self.first_room_bytes
            unseen_bytes = self.unseen_bytes + unfilled_bytes
            unknown_bytes += unseen_bytes + run.varied_bytes
            run = run.with_loss(self.loss.more_than(run))
        modes: Sequence[str] | None = settings.block_modes
        given = settings.plan if settings.plan is not None else self._homes.arrangement.plan if as_now else like
        beside_bytes = wrapped.widened_bytes + wrapped.loose_grads_bytes + wrapped.compute.overhead.of(settings.memory_bytes)
        between_bytes = wrapped.compute.overhead.between(run.checkpoint_peak_bytes) * self.lost_times if run is not None else 0
        beside_bytes += wrapped.buffer_bytes if run is None and not unknown_bytes else 0  # else they are among what is known
        n_persist, n_buffer, n_ahead = None, 0, 0
        if given is not None:
            modes, n_persist = modes or given.block_modes, given.n_persist
            n_buffer, n_ahead = given.n_buffer, given.n_ahead
        elif run is None:
            n_persist = None if unknown_bytes else 0
            modes = ("swap",) * len(wrapped.blocks) if modes is None and self.swaps else modes

        def arranged(between_bytes: int, more_bytes: int = 0, modes: Sequence[str] | None = modes) -> Arrangement:
            more_bytes += unknown_bytes + beside_bytes + between_bytes
            found = arrange(
                wrapped.layout, len(wrapped.blocks), wrapped.state_arrays, settings.memory_bytes, run, modes=modes,
                n_persist=n_persist, n_buffer=n_buffer, n_ahead=n_ahead, grads_outlive_backward=wrapped.grads_outlive_backward,
                n_passes=settings.accumulate, unknown_bytes=more_bytes, times=times, machine=machine,
                host_budget_bytes=self._host_room() if wrapped.compute.separate and times else 0,
                ring_host_bytes=settings.host_bytes if wrapped.compute.separate else 0,
                footprint=wrapped.footprint, n_together=wrapped.n_together, lasting_bytes=wrapped.buffer_bytes,
                unfilled_bytes=unfilled_bytes,
            )  # fmt: skip
            return replace(found, between_bytes=between_bytes, unseen_bytes=unseen_bytes)

        found: Arrangement | None = None
        if between_bytes and given is None and times is None:  # homes are to move once more: better no range that is one then
            with suppress(BudgetError):
                found = arranged(AMPLE_TIMES * between_bytes)
        try:
            found = found or arranged(between_bytes)
        except BudgetError as error:
            raise refuse(error, "a step of this batch", wrapped.compute.overhead) from None
        several = self.several.hold_bytes and settings.plan is None and not wrapped.compute.separate
        if run and several and (more_bytes := self.several.more_kept(run, found.plan.block_modes)):
            try:
                found = arranged(between_bytes, more_bytes)
            except BudgetError:
                if modes is None:
                    found = arranged(between_bytes, modes=run.keeping_within(found.plan.block_modes, self.several.kept_bytes))
        if self.is_first or settings.plan is not None:  # its first step makes the state
            found = replace(found, plan=replace(found.plan, peak_bytes=max(found.plan.peak_bytes, found.first_peak_bytes)))
        if settings.plan is not None:  # what was foretold stands
            plan = replace(found.plan, step_seconds=settings.plan.step_seconds, forecast=settings.plan.forecast)
            found = replace(found, plan=plan)
        return placed(found, wrapped)

    def foretold(self, run: DryRun) -> DryRun:
        """What a dry run foresaw, with what steps have shown beside it."""
        beside_bytes = self.unseen_bytes + run.varied_bytes + self._wrapped.widened_bytes + self._wrapped.loose_grads_bytes
        return replace(run.with_loss(self.loss.more_than(run)), fixed_bytes=run.fixed_bytes + beside_bytes, varies=False)

    def smallest_bytes(self, run: DryRun) -> int:
        """The smallest budget, with the chunks of this one and the modes that were given, for what a dry run foresaw alone."""
        smaller = self._wrapped.with_memory(1)
        try:
            return self.decide(run, wrapped=smaller).smallest_bytes
        except BudgetError as error:
            return error.smallest_bytes - self.unseen_bytes - self.first_room_bytes

    def decide_for_all(
        self,
        run: DryRun | None,
        also: DryRun | None = None,
        *,
        times: Times | None = None,
        machine: Machine | None = None,
        as_now: bool = False,
        unknown_bytes: int = 0,
        like: Plan | None = None,
    ) -> Arrangement:
        """The arrangement for what a dry run foresaw, as `decide`, in which there is room for every batch that was planned for,
        and for this one. unknown_bytes: where none did.

        Raises:
            BudgetError: there is none.
        """
        budget, more, most, attempts = self._wrapped.settings.memory_bytes, unknown_bytes, 0, 0
        others = [other for other in (also, *(known for _, known in self.dry_runs)) if other is not None and other is not run]
        if self._wrapped.settings.plan is not None:
            others = []
        while True:
            found, lacks = self.decide(run, more, times=times, machine=machine, as_now=as_now, like=like), 0
            for other in others:
                try:
                    again = self.decide(other, like=found.plan)
                except BudgetError as error:
                    lacks = max(lacks, error.smallest_bytes - budget)
                else:  # beside the slots that are there
                    lacks = max(lacks, again.needed_bytes - again.static_bytes + found.static_bytes - budget)
            lacks = max(lacks, self.lacks_within(found))
            if lacks <= 0:
                return found
            if attempts == 0 and like is None and not as_now:
                most = more + budget - found.smallest_bytes  # with that it is the smallest plan, which leaves the others most
            wanted = more + (lacks if attempts < 16 else max(lacks, more))
            more = most if more < most < wanted else wanted
            attempts += 1

    def with_others(self, best: Arrangement, largest: Batch) -> tuple[Arrangement, Batch]:
        """Of this batch and those before the one that needs the most, which decides, with room for the others."""
        also, others = largest[0], [(known, other) for known, other in self.dry_runs if other is not largest[0]]
        if not others and self.lacks_within(best) <= 0:
            return best, largest
        for known, other in others:
            again = self.decide(other)
            if _needs_more(again, best, self._wrapped.settings.memory_bytes):
                best, largest = again, (other, known)
        return self.decide_for_all(largest[0], also), largest

    def without_update(self) -> tuple[int, int]:
        """Of an optimizer without a kernel: the peak of a step under the plan in use before its update, and what is in memory
        beside states and slots in that."""
        now = self._homes.arrangement
        runs = [run for _, run in self.dry_runs if run is not None]
        if not runs or self.measured:
            return now.computed_bytes, self._wrapped.buffer_bytes
        computed_bytes = now.computed_bytes
        with suppress(BudgetError):  # what was learned since has no room beside it
            computed_bytes = max(self.decide(run, as_now=True).computed_bytes for run in runs)
        return computed_bytes, max(run.fixed_bytes + run.left_bytes for run in runs)

    def recomputed_bytes(self) -> tuple[int, int]:
        """What a step holds at most where all blocks are recomputed, and of small tensors in any, of the batches foreseen; none
        where a batch was not: plans are made from what steps take then, and one range would take what is left of the budget."""
        runs = [run for _, run in self.dry_runs if run is not None and not self.measured]
        return max((run.checkpoint_peak_bytes for run in runs), default=0), max((run.small_peak_bytes for run in runs), default=0)

    @property
    def measured(self) -> bool:
        """Whether there is one: then plans are made from what steps took."""
        return any(run is None for _, run in self.dry_runs)

    def within_peak_bytes(self, found: Arrangement) -> int:
        """What is in memory at most in forwards without gradients between backward and step(), by those that were."""
        return self.chunk_bytes(found) + self.within_bytes if self.within_bytes else 0

    def lacks_within(self, found: Arrangement) -> int:
        settings = self._wrapped.settings
        return self.within_peak_bytes(found) - settings.memory_bytes if settings.plan is None else 0

    def chunk_bytes(self, found: Arrangement) -> int:
        """What chunks take, with the gradients of those in memory."""
        return found.static_bytes + sum(self._wrapped.layout.grad_bytes[: found.plan.n_persist])

    def _host_room(self) -> int:
        wrapped = self._wrapped
        return host_room(wrapped.layout, wrapped.state_arrays, wrapped.settings.host_bytes)
