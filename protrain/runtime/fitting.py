"""Fitting: an arrangement for each batch, made before its first operation, that keeps to the budget.

Before any batch is known there is one for the states alone. A batch larger than those before is foreseen by a dry run, and
planned for from memory, as are all that came before it; one of a model that cannot run without data makes its first step by the
safest plan, and what that took is planned with from then on. What a block saves its recomputation shows: where all chunks are in
memory blocks are kept, the last ones first, in a half of what is left.

What the program around the model does is not foreseen, only guessed. Where it makes the loss that is cross entropy, and a first
step leaves room for one that takes more. It holds the model's output while backward runs, until a step shows that it does not. It
runs one forward before each backward, and what else it does with them is not known before a step was made: the first one leaves
most of the room that there is. Whatever a step held, or was refused, beyond what was foreseen counts in later plans.

What is in memory beside states and slots, because a user holds on to it, counts: where it leaves too little room blocks that keep
are recomputed, or the batch is refused. What room is left for decides deciding.py, what is carried out carrying.py; plans by time
come later (pacing.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from .. import _core
from ..dryrun.phases import DryRun, DryRunError, swaps
from ..errors import BudgetError, Error
from ..model.compiled import find_compiled
from ..planner.planning import first_room, most_room, second_bytes
from ..planner.plans import Arrangement
from ..planner.smallest import naming, refuse
from .arranging import anew_of
from .batches import Batch, Batches, Shapes, covers, tensors_of, without_words
from .carrying import Carrier, HeldError
from .deciding import Decider
from .foreseeing import Foreseer
from .homes import Homes
from .unforeseen import Unforeseen, with_more
from .wrapped import Wrapped

#: What is left at first for a loss outside of the model, in times of its outputs, where there is room: the most that fits.
ROOM_FOR_LOSS = (4, 2, 0)
#: Of the planned peak; outputs of a smaller share are planned for as if the program held them.
LEAST_OUTPUT_SHARE = 0.02
#: A request that is refused where nobody knows what else the step will ask for names a budget that is larger by this part.
NAMED_PART = 8
#: Of the size of chunks is what the smallest plan takes beside slots for what one operation reads.
_OTHER_CHUNKS = 2
#: Blocks swap in the first step of a model whose dry run failed where the budget has no room for as much as this beside chunks,
#: in times of what was seen where they are recomputed.
SEEN_TIMES = 2
#: What a program may hold when a step begins, beside outputs of the one before, for that step still to tell what it takes.
HELD_BYTES = 1 << 20


def _is_within(one: DryRun | None, other: DryRun | None) -> bool:
    """Whether a batch was foreseen to hold no more than another one, by what both hold at most."""
    if one is None or other is None:
        return one is other
    more_bytes = one.fixed_bytes - other.fixed_bytes
    keeps = one.keep_peak_bytes + more_bytes <= other.keep_peak_bytes
    return keeps and one.checkpoint_peak_bytes + more_bytes <= other.checkpoint_peak_bytes


class Fitter:
    """Of one session. planned: whether a batch was planned for; differentiates: whether a backward made a graph for another one;
    penalizes: whether a loss outside of the model has read parameters; batches: what batches are known by; foresees: their dry
    runs."""

    def __init__(self, wrapped: Wrapped, engine: _core.Engine, homes: Homes, decider: Decider, carrier: Carrier) -> None:
        self._wrapped, self._homes, self._decider, self._carrier = wrapped, homes, decider, carrier
        self.planned = self.differentiates = self.penalizes = False
        self.batches = Batches(wrapped.model, wrapped.params)
        self.foresees = Foreseer(wrapped, engine)
        self._unforeseen = Unforeseen()
        self._held_before = 0  # when the step under way began
        self._lasting_bytes = 0  # that a program held when a step began that was refused, and goes on holding
        self._largest: Batch = (None, ())  # of those planned for
        self._refused = 0  # steps in a row
        self._named: tuple[Arrangement | None, int, int] = (None, 0, 0)  # in which, with so much more, what is needed
        self._told_bytes = 0  # the budget that the last step under way was to name
        self._later: list[tuple[Shapes, DryRun | None]] = []  # batches to plan for before the next step
        self._heard: Shapes | None = None  # of them, the one that was foreseen by what its forward was answered
        self._told = False  # that the model cannot be foreseen

    def _is_same(self, shapes: Shapes, run: DryRun | None) -> bool:
        """Whether a batch of these shapes and other words was foreseen to need just this: from here on it is that one."""
        for known, other in self._decider.dry_runs:
            if run is not None and run == other and tensors_of(known) == tensors_of(shapes):
                self.batches.note_same(shapes, known)
                return True
        return False

    def knows(self, shapes: Shapes) -> bool:
        """Whether a batch of these shapes needs no more than one that was planned for. Of a model that cannot be foreseen words
        are not looked at: a first step under the safest plan for each would take time."""
        alone, known = without_words(shapes), self._decider.dry_runs
        if any(covers(one, shapes) for one, run in known if run is not None):
            self.foresees.note_used()
            return True
        return any(covers(without_words(one), alone) for one, run in known if run is None)

    def plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> Batch | None:
        """Plan for this batch, of these shapes, and those before; returns the one that needs the most, which decided. None: it
        needs what another one did, or needs less, and the plan in use has room for it.

        Raises:
            BudgetError: no plan fits, or what else is in memory leaves it no room; the plan in use stays.
            DiskError: a chunk could not be moved; likewise.
        """
        before, unseen_bytes = self._homes.arrangement, self._decider.unseen_bytes
        try:
            run: DryRun | None = self._foresee(args, kwargs)
        except DryRunError as error:
            run, self._unforeseen.seen_bytes = None, error.seen_bytes
            self.foresees.listen(args, kwargs)
            if not self._told:
                self._told = True
                warnings.warn(
                    f"protrain cannot foresee the memory of this model ({error}); its first step runs with the safest plan",
                    stacklevel=6,
                )
        if self._homes.arrangement is before and run is not None:
            if self._is_same(shapes, run):
                return None
            if self._needs_no_more(run):
                self._add(shapes, run)
                return None
        try:
            best, largest = self._first(run, args, kwargs), (run, shapes)
            if run is None and not self._has_room_seen(best):
                best = self._swapping() or best
            elif run is not None and self._decider.measured:
                best, largest = self._decide_measured(run), (None, shapes)
            elif run is not None:
                best, largest = self._decider.with_others(self._with_first_room(run, best), largest)
            self._carrier.carry_out(best)
        except BaseException:
            self._decider.unseen_bytes, self._decider.first_room_bytes = unseen_bytes, 0
            self._go_back_to(before)
            raise
        self._unforeseen.shows, self._largest, self.planned = run is None, largest, True
        self._add(shapes, run)
        return largest

    def _needs_no_more(self, run: DryRun) -> bool:
        """Whether under the decisions in use this batch takes no more than the one that decided. What was measured of their plan
        stands then, too."""
        known = [other.outside_bytes for _, other in self._decider.dry_runs if other is not None]
        now = self._homes.arrangement
        if self._largest[0] is None or self._decider.measured or not known or run.outside_bytes > max(known):
            return False
        try:
            found = self._decider.decide(run, like=now.plan)
        except BudgetError:
            return False
        return found.needed_bytes - found.static_bytes + now.static_bytes <= now.needed_bytes

    def _go_back_to(self, before: Arrangement) -> None:
        """What chunks left memory for did not come to an end."""
        if self._homes.arrangement is not before:
            with suppress(Error):  # the first one tells
                self._homes.rearrange(before)

    def _add(self, shapes: Shapes, run: DryRun | None) -> None:
        """This batch was planned for. What it covers comes to no plan any more, unless it takes more: where lengths grow with
        every step there would be ever more to plan for."""
        kept = [
            (known, other) for known, other in self._decider.dry_runs if not (covers(shapes, known) and _is_within(other, run))
        ]
        self._decider.dry_runs = [*kept, (shapes, run)]

    def _first(self, run: DryRun | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arrangement:
        """The arrangement for a batch alone; the first one leaves room for a loss that nobody has seen yet.

        Raises:
            BudgetError: nothing fits.
        """
        outside, self._decider.first_room_bytes = run.outside_bytes if run is not None else 0, 0
        if outside and not self._decider.loss.known:
            for times in ROOM_FOR_LOSS:
                self._decider.unseen_bytes = times * outside
                with suppress(BudgetError):
                    return self._decider.decide(run)
        known = max((run.outside_bytes for _, run in self._decider.dry_runs if run is not None), default=0)
        if outside > known > 0:
            self._decider.unseen_bytes = -(-self._decider.unseen_bytes * outside // known)
        try:
            return self._decider.decide(run)
        except BudgetError as error:
            raise self._refusal(error, run, args, kwargs) from None

    def _with_first_room(self, run: DryRun, best: Arrangement) -> Arrangement:
        """The arrangement for the batch of the first step of all, where `best` would be that of the ones behind it: with room for
        a program that runs several forwards before a backward, or goes through a backward again, to show it."""
        settings = self._wrapped.settings
        if not self._decider.is_first or self._decider.dry_runs or settings.plan is not None or self._wrapped.compute.separate:
            return best
        return self._with_room(run, best)

    def _with_room(self, run: DryRun, best: Arrangement) -> Arrangement:
        """The arrangement for a step that is to show what the program does, where `best` is that of those that keep to it."""
        wanted = first_room(run, self._wrapped.layout, self._wrapped.settings.memory_bytes, best, self._refused)
        self._decider.first_room_bytes = wanted
        try:
            return self._decider.decide_for_all(run)
        except BudgetError:
            self._decider.first_room_bytes = 0
            return best

    def end_first(self) -> bool:
        """A step was made, or refused: nothing is left for the first one any more. Returns whether something was."""
        was, self._decider.first_room_bytes, self._decider.is_first = self._decider.first_room_bytes, 0, False
        return was > 0

    # ---- batches that no dry run foresaw ----

    def learn_measured(self, highest_bytes: int, saved_bytes: dict[int, int]) -> None:
        """A step was made that had so much in memory at most; blocks that were recomputed have saved so much."""
        if not self.planned or not self._decider.measured:
            return
        more = self._unforeseen.note_step(self._beside_known(highest_bytes), saved_bytes)
        if self._heard:  # plans are made by what was foreseen since
            return
        if not more and not self._unforeseen.shows:
            return
        with suppress(BudgetError):  # else the plan in use stays
            try:
                found = self._decide_measured()
            except BudgetError:
                self._unforeseen.forget_refused()
                found = self._decide_measured()
            self._carrier.carry_out(found)
            self._unforeseen.shows = False

    def _has_room_seen(self, best: Arrangement) -> bool:
        """Whether the safest plan of a batch that no dry run foresaw has room for what was seen of it and as much again."""
        seen_bytes = SEEN_TIMES * self._unforeseen.seen_bytes[0]
        return best.smallest_bytes + seen_bytes <= self._wrapped.settings.memory_bytes

    def _swapping(self) -> Arrangement | None:
        """The safest plan of a batch that no dry run foresaw, with blocks that swap, as those of others like it do from here on.
        None: they may not, or it does not fit."""
        if not self._may_choose() or find_compiled(self._wrapped.model):
            return None
        self._decider.swaps = True
        try:
            return self._decider.decide(None)
        except BudgetError:
            self._decider.swaps = False
            return None

    def _refused_measured(self, needed_bytes: int) -> Batch:
        """A step was not made that would have had so much in memory: the next one is under the safest plan again."""
        self._unforeseen.note_refused(self._beside_known(needed_bytes))
        with suppress(BudgetError):
            self._carrier.carry_out(self._swapping() or self._decider.decide(None))
        return self._largest

    def _beside_known(self, n_bytes: int) -> int:
        """Of so much in memory, what kept blocks do not save and chunks do not take in the arrangement in use: of those here
        also the gradients, until step()."""
        found = self._homes.arrangement
        return n_bytes - self._decider.chunk_bytes(found) - self._unforeseen.kept_bytes(found.plan)

    def _decide_measured(self, also: DryRun | None = None) -> Arrangement:
        """By what steps took; blocks are kept where all chunks are in memory.

        Raises:
            BudgetError: not even the chunks can all be away.
        """
        settings, beside_bytes = self._wrapped.settings, self._unforeseen.beside_bytes
        found = self._decider.decide_for_all(None, also, unknown_bytes=beside_bytes)
        plan = found.plan
        if plan.n_persist < plan.n_chunks or settings.plan is not None or settings.block_modes is not None:
            return found
        kept = self._unforeseen.keeping(plan, settings.memory_bytes)
        saved_bytes = with_more(self._unforeseen.kept_bytes(kept))
        with suppress(BudgetError):  # a batch that was foreseen may have no room then
            return self._decider.decide_for_all(None, also, unknown_bytes=beside_bytes + saved_bytes, like=kept)
        return found

    # ---- what steps tell ----

    def begin_step(self) -> int:
        """What a program holds now it may let go of before the step is at its highest; returns how much it is."""
        self._decider.several.begin_step()
        self._held_before = self._carrier.held_now_bytes()
        self._lasting_bytes = min(self._lasting_bytes, max(self._held_before, 0))
        return self._held_before

    def _is_whole(self, batches: Iterable[Shapes]) -> bool:
        """Whether what a step of these batches takes between model and backward is the loss of one like that which decided."""
        return not self._decider.several.hold_bytes and all(shapes == self._largest[1] for shapes in batches)

    def measures_loss(self, batches: Iterable[Shapes]) -> bool:
        """Whether the step under way, of these batches, is to show what the loss takes, and its blocks swap: what they write
        would leave memory meanwhile."""
        unknown = self._largest[0] is not None and not self._decider.loss.known
        any_swaps = any(map(swaps, self._homes.arrangement.plan.block_modes))
        return unknown and any_swaps and self._learns() and self._is_whole(batches)

    def learn(self, highest_bytes: int, loss_bytes: int | None, batches: Iterable[Shapes]) -> Batch | None:
        """A step of these batches was made that had so much in memory at most, and between model and backward so much more than
        before (None: not known). Where that was more than foreseen, and than the gradients that may wait beyond it, or the loss
        has left room that was kept for it, plans are made anew; returns the batch that decided where they may be others now."""
        batches, run, before = list(batches), self._largest[0], self._homes.arrangement
        room_bytes, unseen_bytes = self._decider.first_room_bytes, self._decider.unseen_bytes
        roomy = room_bytes > 0
        if run is None or not self._learns() or not all(covers(self._largest[1], shapes) for shapes in batches):
            return self.plan_anew() if self.end_first() else None
        loss_bytes_before = self._decider.loss.more_than(run)
        fits, self._refused = True, 0
        self.end_first()
        # Where a backward goes through several forwards autograd holds all gradients until the last: none of them waits on top.
        several = self._decider.several
        pending_bytes = 0 if several.hold_bytes else before.pending_bytes
        several.note_kept()
        whole = self._is_whole(batches)
        if whole and not self._decider.loss.known and self._decider.loss.note_first(loss_bytes or 0, run):
            self._decider.unseen_bytes = self._lasting_bytes
        # Where blocks swap a later step tells little: what they write leaves memory while the loss is made.
        if whole and self._decider.loss.known and not any(map(swaps, before.plan.block_modes)):
            self._decider.loss.note_light(loss_bytes or 0, run)
        more_loss_bytes = self._decider.loss.more_than(run) - loss_bytes_before
        if unseen_bytes > self._decider.unseen_bytes or more_loss_bytes:
            fits = self._plan_as_now()
        now = self._homes.arrangement
        more = highest_bytes - now.needed_bytes - pending_bytes - (0 if fits else max(more_loss_bytes, 0))
        if more > 0:  # beside what this plan has room for, whatever was learned that it has not
            planned_bytes = now.unseen_bytes - (room_bytes if now is before else 0)
            self._decider.unseen_bytes = max(self._decider.unseen_bytes, planned_bytes + more)
            fits = self._plan_as_now()
        if not roomy and fits and self._decider.unseen_bytes >= unseen_bytes and more_loss_bytes >= 0:
            return None
        return self.plan_anew()

    def plan_anew(self) -> Batch | None:
        """A step was made: plans are made anew, by what it has shown; returns the batch that decided. None: the plan in use
        stays, which did."""
        try:
            return self._plan_again()
        except BudgetError:
            return None

    def plan_beside_graphs(self) -> Batch | None:
        """The first step was made, and graphs of it are alive whose backward may come, as may be in each step from here on. Plans
        are made anew with what these hold, once, unless a chunk would leave memory, where they may have saved parameters. Where
        a backward retained its graph what was recomputed is in it too. Returns the batch that decided."""
        run, now = self._largest[0], self._homes.arrangement
        if not self.end_first() or run is None or not self._learns():
            return None
        self.note_several(now.plan.block_modes)
        all_kept = run.kept_bytes(("keep",) * len(now.plan.block_modes))
        several = self._decider.several
        if several.hold_bytes < all_kept:
            several.note_kept()
        else:
            several.kept_bytes = max(several.kept_bytes, all_kept)
        self._decider.unseen_bytes = max(self._decider.unseen_bytes, several.hold_bytes)
        try:
            return self._plan_again(now.plan.n_persist)
        except BudgetError:
            return None

    def learn_within(self, highest_bytes: int) -> Batch | None:
        """Forwards without gradients between the backward of a step and its end had so much in memory at most, or one was refused
        that would have had. Where the plan in use has no room for what they take, plans are made anew; returns the batch that
        decided."""
        if highest_bytes and not self._decider.measured and self._learns():
            beside_bytes = highest_bytes - self._decider.chunk_bytes(self._homes.arrangement)
            self._decider.within_bytes = max(self._decider.within_bytes, beside_bytes)
            if self._decider.lacks_within(self._homes.arrangement) > 0:
                try:
                    return self._plan_again()
                except BudgetError:  # no plan has
                    self._decider.within_bytes = 0
        return None

    def learn_refused(self, needed_bytes: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch | None:
        """A step was not made, as so much would have been in memory; args, kwargs: what the next is about to be made of. Plans
        are made anew, with room for it; and as the step has not shown all, the next one leaves room as a first one does, each
        time in a row twice as much. Returns the batch that decided.

        Raises:
            BudgetError: nothing fits any more. What was learned is forgotten, for the next step to show it again.
        """
        if self._decider.measured:
            return self._refused_measured(needed_bytes)
        if self._homes.arrangement.between_bytes and self._wrapped.settings.plan is None:
            return self._lose_more(args, kwargs)
        if self._goes_another_way(args, kwargs):
            return None
        run = self._largest[0]
        self._decider.several.note_kept()
        lasting_bytes = min(self._held_before, self._carrier.held_now_bytes())
        more = needed_bytes - (self._held_before - lasting_bytes) - self._homes.arrangement.needed_bytes
        self.end_first()
        if run is None or not self._may_learn() or more <= 0:
            return None
        self._lasting_bytes = 0 if self._holds_little() else lasting_bytes
        unseen_bytes = self._decider.unseen_bytes + self._decider.loss.note_refused(more, run)
        self._decider.unseen_bytes = max(unseen_bytes, self._lasting_bytes)
        self._refused += 1
        try:
            return self._plan_again(leaves_room=True)
        except BudgetError as error:
            more_bytes, known_bytes = self._more_bytes(run), self._decider.unseen_bytes
            self._decider.unseen_bytes = self._refused = 0
            if not covers(without_words(self.batches.batch_of(args, kwargs)), without_words(self._largest[1])):
                return self._let_go()
            self._decider.unseen_bytes = max(known_bytes, more_bytes)
            refused = self._refusal(error, run, args, kwargs)
            self._decider.unseen_bytes = 0
            if not isinstance(refused, HeldError):
                refused = naming(refused, max(needed_bytes, self._told_bytes))
            raise refused from None

    def _goes_another_way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a batch like the one that comes now runs through other blocks than it did when it was foreseen, and did not run
        through all then, as of a model that grows by an attribute. What was foreseen of those like it is forgotten: it is planned
        for as a new one."""
        run, before = self._largest[0], self._homes.arrangement
        if run is None or {phase.block for phase in run.phases} >= set(range(len(self._wrapped.blocks))):
            return False
        try:
            anew = self._foresee(args, kwargs)
        except DryRunError:
            return False
        self._go_back_to(before)
        shapes = self.batches.batch_of(args, kwargs)
        kept = [(known, other) for known, other in self._decider.dry_runs if not covers(known, shapes)]
        if anew.same_phases(run) or len(kept) == len(self._decider.dry_runs):
            return False
        self.end_first()
        self._decider.dry_runs, self._decider.unseen_bytes, self._refused = kept, 0, 0
        self.batches.forget_same()
        return True

    def _let_go(self) -> Batch | None:
        """The batch that decided has no plan any more, and the one that comes is a smaller one, or of other shapes: as if the
        first had not come, until it comes again. Returns the batch that decides of the others."""
        self._decider.dry_runs = [known for known in self._decider.dry_runs if known[1] is not self._largest[0]]
        shapes, run = self._decider.dry_runs[-1] if self._decider.dry_runs else ((), None)
        self._largest = run, shapes
        if run is None:  # the next batch is planned for
            return None
        with suppress(BudgetError):  # the plan in use has room for them
            return self._plan_again()
        return None

    def _lose_more(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch | None:
        """Over a device: more was lost between tensors than a plan left for it, which leaves twice as much from here on.

        Raises:
            BudgetError: nothing fits any more. The next step is tried with what was left before.
        """
        self._decider.lost_times *= 2
        try:
            return self._plan_again()
        except BudgetError as error:
            refused = self._refusal(error, self._largest[0], args, kwargs)
            self._decider.lost_times = 1
            raise refused from None

    def note_several(self, modes: Sequence[str]) -> None:
        """Another forward of a step begins whose backward comes with that of those before; modes: of the blocks in the last of
        them. What they hold has no room in this step but what its plan leaves; from the next one on it is planned with."""
        self._decider.several.note(self._carrier.waiting_bytes(), self._largest[0], modes)

    def note_waiting(self) -> None:
        """Another forward begins, and no more wait than waited before; but they may be others, and hold more."""
        several = self._decider.several
        several.hold_bytes = max(several.hold_bytes, self._carrier.waiting_bytes())

    def must_swap(self) -> bool:
        """Whether forwards wait in the step under way that no plan knows of, and what more of them would hold has no room: then
        what blocks save in this one leaves memory."""
        run, now, settings = self._largest[0], self._homes.arrangement, self._wrapped.settings
        if run is None or not self._may_choose():
            return False
        held_bytes = self._decider.several.more_to_come(run.kept_bytes(now.plan.block_modes))
        grads_bytes = max(sum(self._wrapped.layout.grad_bytes) - now.pending_bytes, 0)
        return held_bytes > 0 and now.needed_bytes + held_bytes + grads_bytes > settings.memory_bytes

    def _may_choose(self) -> bool:
        """Whether blocks may swap that were not given a mode."""
        settings = self._wrapped.settings
        return settings.plan is None and settings.block_modes is None and not self._wrapped.compute.separate

    @property
    def knows_nothing(self) -> bool:
        """Whether the step under way, or to come, was not foreseen, and nothing was seen of it."""
        return self._unforeseen.shows and not self._unforeseen.seen_bytes[0]

    def named_bytes(self) -> int:
        """The budget that a request is to name at least which is refused in the step under way. The request alone is the first of
        many that a larger budget would have refused."""
        self._told_bytes = 0 if self._wrapped.compute.separate else self._worth_trying_bytes()  # there it is another budget's
        return self._told_bytes

    def _worth_trying_bytes(self) -> int:
        run, wrapped = self._largest[0], self._wrapped
        named = wrapped.settings.memory_bytes + wrapped.settings.memory_bytes // NAMED_PART
        if self._unforeseen.shows:
            recomputed_bytes, swapped_bytes = self._unforeseen.seen_bytes
            needed = self._homes.arrangement.smallest_bytes + (swapped_bytes if self._decider.swaps else recomputed_bytes)
            return max(named, self._with_larger_chunks(needed, wrapped.n_together))
        if run is None or not (more_bytes := self._more_bytes(run)):
            return named
        if self._named[0] is not self._homes.arrangement or self._named[1] != more_bytes:
            self._named = self._homes.arrangement, more_bytes, self._needed_with(run, more_bytes)
        return max(named, self._named[2])

    def _needed_with(self, run: DryRun, more_bytes: int) -> int:
        """The smallest budget, about, whose first step has room for so much more, as `first_room` leaves it."""
        found, wrapped, given = self._homes.arrangement, self._wrapped, self._wrapped.settings.block_modes
        needed = found.smallest_bytes - found.unseen_bytes + more_bytes
        if given is not None:  # what these hold has no room made for it
            others_bytes = self._decider.several.needed_bytes(wrapped.layout, run.kept_bytes(given))
            needed = self._decider.smallest_bytes(run) + max(more_bytes, others_bytes)
        elif needed + found.unseen_bytes - found.safest_bytes >= second_bytes(run, wrapped.layout):
            saved_bytes = run.kept_bytes(("checkpoint",) * len(found.plan.block_modes))
            several_bytes = self._decider.several.needed_bytes(wrapped.layout, saved_bytes)
            needed = found.safest_bytes - found.unseen_bytes + max(more_bytes, several_bytes)
        return self._with_larger_chunks(needed, run.n_together)

    def _with_larger_chunks(self, needed: int, n_together: int) -> int:
        """What a budget as large as that needs. Chunks grow with the budget, and what the smallest plan takes with them."""
        wrapped = self._wrapped
        larger = wrapped.within(max(needed, wrapped.settings.memory_bytes)).layout
        return needed + (larger.chunk_bytes - wrapped.layout.chunk_bytes) * (n_together + _OTHER_CHUNKS)

    def _more_bytes(self, run: DryRun) -> int:
        """What a step of this program may take beside one with a single forward and its backward."""
        layout, more_bytes = self._wrapped.layout, self._decider.several.needed_bytes(self._wrapped.layout)
        if self.penalizes:  # its gradients come before those of the model, and wait for them
            more_bytes = max(more_bytes, sum(layout.grad_bytes))
        return max(more_bytes, most_room(run, layout)) if self.differentiates else more_bytes

    def note_beside(self, needed_bytes: int) -> None:
        """A forward without gradients between a forward of a step and its backward would have had so much in memory: it was
        refused, or state gave way to it. From the next step on that is planned with."""
        more_bytes = needed_bytes - self._homes.arrangement.needed_bytes
        several, run = self._decider.several, self._largest[0]
        several.hold_bytes = max(several.hold_bytes, self._decider.unseen_bytes + more_bytes)
        if run is not None:
            several.kept_bytes = max(several.kept_bytes, run.kept_bytes(self._homes.arrangement.plan.block_modes))

    def note_dropped(self, output_bytes: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch | None:
        """The program did not hold the output of the step before, so many bytes, while backward ran; args, kwargs: what the next
        is about to be made of. Where that is worth it, a batch like the last is foreseen anew, and planned for."""
        shapes, planned = self.batches.batch_of(args, kwargs), [known for known, _ in self._decider.dry_runs]
        little = output_bytes < LEAST_OUTPUT_SHARE * self._homes.arrangement.plan.peak_bytes
        if little or not self.foresees.holds_output or planned != [shapes] or not self._learns():
            return None
        self.foresees.holds_output = False
        try:
            run = self._foresee(args, kwargs)
        except DryRunError:
            return None
        if (before := self._largest[0]) is not None:
            self._decider.loss.note_anew(before, run)
        self._decider.dry_runs, self._largest = [(shapes, run)], (run, shapes)
        with suppress(BudgetError):  # something else is in memory
            self._plan_again()
        return self._largest

    def foresee_later(self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> None:
        """A batch that came when gradients were under way: nothing can move for it now, but before the next step."""
        if any(covers(known, shapes) for known, _ in self._later):
            return
        try:
            run = self.foresees.step_under_way(args, kwargs)
        except DryRunError:
            self.foresees.listen(args, kwargs)
            return
        if not self._is_same(shapes, run):
            self._later.append((shapes, run))

    @contextmanager
    def listening(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Around a forward of training. One of a batch that could not be foreseen is listened to, and when it has returned the
        batch is foreseen by what it was answered."""
        with self.foresees.listening(args, kwargs) as batch:
            shapes = self.batches.batch_of(args, kwargs) if batch is not None else ()
            yield
        if batch is not None and (run := self.foresees.heard(*batch)) is not None:
            self._heard = shapes
            self._later.append((shapes, run))

    def plan_later(self) -> Batch | None:
        """Between steps: plan for what came in the last one; returns the batch that decides where plans may be others now. Where
        nothing fits what came it is forgotten."""
        new, before, largest_before = self._later, self._decider.unseen_bytes, self._largest
        dry_runs, self._later, heard, self._heard = self._decider.dry_runs, [], self._heard, None
        if heard is not None:
            self._decider.dry_runs = [(known, run) for known, run in dry_runs if run is not None or known != heard]
        for shapes, run in new:
            self._add(shapes, run)
            if self._largest[0] is None and not self._decider.measured:
                self._largest = run, shapes
        if self._learns():
            self._decider.unseen_bytes = max(before, self._decider.several.hold_bytes)
        if not new and self._decider.unseen_bytes == before:
            return None
        held_bytes = self._decider.several.hold_bytes
        for unseen_bytes in (self._decider.unseen_bytes, before if self._decider.loss.known else held_bytes):
            self._decider.unseen_bytes = unseen_bytes
            with suppress(BudgetError):
                largest = None if not new and self._plan_as_now() else self._plan_again()
                self._unforeseen.shows &= heard is None
                return largest
        self._decider.unseen_bytes, self._decider.dry_runs, self._largest = before, dry_runs, largest_before
        return None

    def _may_learn(self) -> bool:
        """Whether plans are made by what was foreseen and what steps show beside it."""
        foresees = bool(self._decider.dry_runs) and all(run is not None for _, run in self._decider.dry_runs)
        return foresees and self._wrapped.settings.plan is None and not self._wrapped.compute.separate

    def _learns(self) -> bool:
        """Whether the step under way tells what it takes: a program holds little of steps before it, or one of them was refused
        beside what it holds."""
        return self._may_learn() and (self._refused > 0 or self._holds_little())

    def _holds_little(self) -> bool:
        """Whether a program held little more than outputs of the step before when the one under way began."""
        return self._held_before <= HELD_BYTES + max(run.outside_bytes for _, run in self._decider.dry_runs if run is not None)

    def _plan_as_now(self) -> bool:
        """Whether the decisions in use can stand; what is foretold of memory is put right."""
        now = self._homes.arrangement.plan
        try:
            found = self._decider.decide_for_all(self._largest[0], as_now=True)
        except BudgetError:
            return False
        self._homes.rearrange(replace(found, plan=replace(found.plan, step_seconds=now.step_seconds, forecast=now.forecast)))
        return True

    def _plan_again(self, least_persist: int = 0, *, leaves_room: bool = False) -> Batch | None:
        """Plans are made anew, by what is known now; returns the batch that decided. None: fewer chunks than least_persist would
        stay in memory, so the plan in use does. leaves_room: in the next step, for what it is to show."""
        largest = self._largest
        if self._decider.measured:
            best = self._decide_measured()
        else:
            best, largest = self._decider.with_others(self._decider.decide(largest[0]), largest)
            if leaves_room and largest[0] is not None:
                best = self._with_room(largest[0], best)
        if best.plan.n_persist < least_persist:
            return None
        self._carrier.carry_out(best)
        self._largest = largest
        return largest

    def _foresee(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DryRun:
        before = self._homes.arrangement
        try:
            return self.foresees.step(args, kwargs, lambda: self._homes.rearrange(self._carrier.emptied()))
        except BaseException:
            self._go_back_to(before)
            raise

    def _refusal(self, error: BudgetError, run: DryRun | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BudgetError:
        """With a smallest budget that works for who wraps the model anew."""
        if run is None or error.budget_bytes != self._wrapped.settings.memory_bytes:  # host memory is what is too small
            return error
        if isinstance(error, HeldError):
            return error

        def arranged(other: Wrapped) -> Arrangement:
            return self._decider.decide(self.foresees.step_within(other, args, kwargs), wrapped=other)

        return refuse(error, "a step of this batch", anew=anew_of(self._wrapped, arranged))

    def forget_batches(self) -> None:
        """The next batch is planned for anew."""
        self._decider.dry_runs.clear()
        self.batches.forget_same()

    def must_recompute(self) -> bool:
        """Whether what a user still holds, such as the graph of a step that was not made, leaves too little for what is planned:
        then the blocks of this forward are recomputed. Where none is kept that would spare nothing."""
        settings = self._wrapped.settings
        if "keep" not in self._homes.arrangement.plan.block_modes:
            return False
        foreseen = max((run.fixed_bytes for _, run in self._decider.dry_runs if run is not None), default=0)
        room = settings.memory_bytes - self._homes.arrangement.needed_bytes + foreseen + self._lasting_bytes
        return self._carrier.held_bytes(room) > room and settings.block_modes is None
