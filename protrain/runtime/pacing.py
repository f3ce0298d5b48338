"""Pacing: the first steps of a session are measured, its plan is made by time, and steps that depart from it are noticed.

A dry run says before the first step what fits memory, and a fixed rule makes the first plan from that alone. The first two
steps under it are a profile: what each phase computed, without waits and without what lanes cost compute. Then the planner
searches with times, and where its plan is better than the one in use the session changes over, between two steps. The next
steps confirm it (confirming.py): what they take corrects the profile, how they wait the disk's speed, and the planner searches
again; and so do later ones, ever more seldom while they take what was foretold, for machines and disks do not stay as fast as
they were. A longer batch starts this anew: its memory is foreseen first, and it is profiled as it runs. Steps of shorter
batches, as padding to the longest sequence makes them, are a profile too: what they computed is taken for so many more
elements. They depart where they take longer than the whole step that was planned, or less than their share of it.

Over a device a step's length is known when a later step asks for it, and profiling takes moments that a step that was not
profiled lacks. So steps that departed are noticed a step or more later, and the next one is profiled. Lanes are not taken to
cost a device compute, and its plans are not confirmed.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..device.compute import Accelerator
from ..dryrun.phases import DryRun
from ..errors import BudgetError, DeviceError, DiskError
from ..model.layout import first_blocks
from ..planner.plans import Plan
from ..planner.profiles import DEVICE_UPDATE_BYTES_PER_SECOND, Machine, Profile, Times
from ..planner.requests import with_memory
from ..profiling.blockclock import BlockClock
from ..profiling.calibration import measure_device, measure_machine
from ..profiling.confirming import (
    MOST_DISK_FACTOR,
    WAIT_DOUBT,
    Sum,
    apart,
    disk_factor,
    factors,
    least_disk_factor,
    middle,
    scaled_disk,
    scaled_drag,
    scaled_times,
    sum_of,
)
from ..profiling.device_clock import DeviceClock
from ..profiling.observed import DiskWork, disk_work, drag_seconds, least, observe, of_whole, without_drag
from ..profiling.timeline import Raw, StepTrace
from .batches import Shapes, covers, elements
from .carrying import Carrier
from .deciding import Decider
from .homes import Homes
from .wrapped import Wrapped

#: In the first of them memory is touched for the first time and threads start; of each phase the shorter time counts.
PROFILED_STEPS = 2
#: A step of a smaller share of the planned batch's elements is no profile, unless so many steps brought none that is.
LEAST_SHARE, MOST_PASSED_OVER = 0.5, 8
#: Another plan must be so much better than the one in use: homes that move cost time, and predictions err.
LEAST_GAIN = 0.02
#: Steps that depart by more than this share, so many in a row, are profiled and planned for again.
DEPARTURE, DEPARTED_STEPS = 0.2, 5
#: Steps of a whole batch that confirm a plan, after one in which memory is touched; how often that is done at once; and the steps
#: that pass before the next time, four times as many each time, up to the last number.
CONFIRMING_STEPS, CONFIRMED_AT_ONCE, FIRST_PAUSE, LONGEST_PAUSE = 3, 2, 4, 1024
#: Where such steps took so much more or less than foretold the machine has changed, and the first pause comes again.
CHANGED = 0.05
#: Steps by which the speed of the disk is found between what it was taken to be and what its waits say.
HALVINGS = 5
#: Lanes are not believed to cost so many times as much as was measured, nor so many times less.
MOST_DRAG_FACTOR = 4.0
#: Bytes updated in memory from which on their time says how fast that goes; and what is taken where nothing was timed.
TELLING_BYTES = 8 << 20
UPDATE_BYTES_PER_SECOND = 1e10


@dataclass(frozen=True)
class Measured:
    """What steps have shown, and what measures lanes that they had no use for; nothing of the session."""

    _profile: Profile
    _measure: Callable[[], Machine]

    def profile(self) -> Profile:
        """With lanes to the disk, for budgets in which there is something on it.

        Raises:
            DiskError, DeviceError, BudgetError: they cannot be measured.
        """
        found = self._profile.machine
        if found.disk_read.bytes_per_second > 0:
            return self._profile
        machine = replace(
            self._measure(), step_fixed_seconds=found.step_fixed_seconds,
            step_update_bytes_per_second=found.step_update_bytes_per_second,
        )  # fmt: skip
        return replace(self._profile, machine=machine)


class Pacer:
    """Of one session; called on the thread that drives the step."""

    def __init__(self, wrapped: Wrapped, homes: Homes, decider: Decider, carrier: Carrier, clock: BlockClock) -> None:
        self._wrapped, self._homes, self._decider, self._carrier, self._clock = wrapped, homes, decider, carrier, clock
        self._run: DryRun | None = None
        self._shapes: Shapes | None = None  # of the batch that was planned for
        self._times: Times | None = None
        self._timed: tuple[Times, Machine] | None = None  # by which the last plan was made
        self._parameters: tuple[tuple[int, int, bool], ...] | None = None  # as a profile has them
        self._rest_seconds = 0.0
        self._profiled = 0  # steps
        self._passed_over = 0  # steps in a row that were too short to be a profile
        #: Of steps in a row, the last ones, their batches, which the one that decides does not cover.
        self._not_covered: deque[list[Shapes]] = deque(maxlen=MOST_PASSED_OVER)
        self._departed = self._steady = 0  # steps in a row that departed, or did not
        self._patience = DEPARTED_STEPS
        self._told, self._told_steps = False, 0
        self._kept_from = 0  # how often in a row a better plan could not be carried out
        self._next_try = 0  # steps until that is planned for again; 0: nothing is
        self._seen: list[Sum] = []  # of steps that may confirm the plan in use
        self._works: list[DiskWork] = []  # of the same steps, but for the first
        self._confirmed = 0  # how often
        self._pause = 0  # steps until the next confirm it
        self._drag_factor = 1.0  # what lanes cost this model, to what was measured beside other computation
        self._disk_factor = 1.0  # what the disk carries by now, to what was measured
        #: Steps of a device: planned seconds, share of the planned batch, begin and end.
        self._ordered: deque[tuple[float, float, tuple[Any, Any]]] = deque()
        self._departure: tuple[float, float] | None = None  # planned and taken, where the next step is profiled for it

    def begin(self, run: DryRun | None, shapes: Shapes) -> None:
        """The session's plan was made for this batch from memory alone."""
        self._run, self._shapes = run, shapes
        self._times, self._departure, self._drag_factor, self._disk_factor = None, None, 1.0, 1.0
        self._timed = None
        self._profiled = self._passed_over = self._departed = self._kept_from = self._next_try = 0
        self._patience = DEPARTED_STEPS
        self._not_covered.clear()
        self._confirm_anew()
        self._ordered.clear()
        if self._clock.device is not None:
            self._clock.device.running = True

    def foresaw(self, run: DryRun | None, shapes: Shapes) -> None:
        """A plan was made anew from memory. What was measured of the batch that was planned for stands, where blocks run in the
        same order still: the next step that is leads to a plan by time."""
        if shapes != self._shapes or run is None or self._run is None or not run.same_phases(self._run):
            self.begin(run, shapes)
            return
        self._run = run
        self._profiled = min(self._profiled, PROFILED_STEPS - 1)
        self._departed = 0
        self._confirm_anew()

    def measured(self) -> Measured | None:
        """What the last plan by time was made from, of the batch that decides; None: no step was measured yet."""
        if self._run is None or self._timed is None:
            return None
        run, wrapped, (times, machine) = self._decider.foretold(self._run), self._wrapped, self._timed
        compute, disk = wrapped.compute, wrapped.settings.disk
        if self._parameters is None:
            self._parameters = wrapped.layout.described(first_blocks(wrapped.params, [block for _, block in wrapped.blocks]))
        profile = Profile(
            parameters=self._parameters,
            n_blocks=len(wrapped.blocks),
            n_states=wrapped.state_arrays,
            chunk_bytes=wrapped.layout.chunk_bytes,
            run=run,
            times=times,
            machine=machine,
            n_passes=wrapped.settings.accumulate,
            grads_outlive_backward=wrapped.grads_outlive_backward,
            model=type(wrapped.model).__name__,
            overhead=compute.overhead if compute.separate else None,
            widening=wrapped.layout.widening,
        )
        if isinstance(compute, Accelerator):
            return Measured(profile, partial(measure_device, compute, disk))
        return Measured(profile, partial(measure_machine, disk, wrapped.fused))

    def after_step(
        self,
        batches: Counter[Shapes],
        step_seconds: float,
        update_seconds: float,
        update_bytes: int,
        *,
        behind_backward: bool,
    ) -> None:
        """A step is complete. batches: how many passes it had of each shape. update_*: of what step() updated in memory.
        behind_backward: whether the last gradients of chunks on disk were used as they came."""
        device = self._clock.device
        if device is not None and (self._run is None or self._wrapped.settings.plan is not None):
            device.running = False
        share = self._share(batches)
        self._look_at_others(batches, share)
        if self._run is None or share is None or self._wrapped.settings.plan is not None:
            return
        if self._profiled < PROFILED_STEPS:
            if share < LEAST_SHARE and self._passed_over < MOST_PASSED_OVER:
                self._passed_over += 1
                return
            update_seconds = device.update_seconds() if device is not None else update_seconds
            if self._observe(self._run, update_seconds, share):
                self._profiled, self._passed_over = self._profiled + 1, 0
                if self._profiled == PROFILED_STEPS:
                    self._confirm_anew()
                    self._plan(self._run, update_seconds, update_bytes)
                if device is not None:
                    device.running = self._profiled < PROFILED_STEPS
                if self._departure is not None:
                    self._tell(*self._departure)
                    self._departure = None
            return
        if self._next_try > 0:
            self._next_try -= 1
            if self._next_try == 0:
                self._profiled = PROFILED_STEPS - 1
                if device is not None:
                    device.running = True
        planned = self._homes.arrangement.plan.step_seconds
        if self._clock.step is not None and len(self._clock.step.passes) != self._wrapped.settings.accumulate:
            planned = 0.0  # of a step with more or fewer passes nothing was foretold
        if device is not None:
            self._watch(device, planned, share)
        elif planned > 0 and self._departs(planned, step_seconds, share):
            if self._observe(self._run, update_seconds, share):
                self._confirm_anew()
                self._learn_disk_again(self._run, update_seconds, update_bytes)
                self._plan(self._run, update_seconds, update_bytes)
                self._tell(planned, step_seconds)
            else:  # the next one that shows what blocks take
                self._profiled, self._departure = PROFILED_STEPS - 1, (planned, step_seconds)
        elif planned > 0 and not self._departed and share == 1.0:
            if self._pause > 0:
                self._pause -= 1
            else:
                self._confirm(self._run, update_seconds, update_bytes, behind_backward)

    def _look_at_others(self, batches: Counter[Shapes], share: float | None) -> None:
        """Where steps in a row are of batches that the one that decides does not cover, and all that another one does, as where
        other parameters are trained by now, that is measured in its place. Plans have room for all of them."""
        if self._run is None or not batches or share is not None:
            self._not_covered.clear()
            return
        self._not_covered.append(list(batches))
        if len(self._not_covered) < MOST_PASSED_OVER:
            return
        for shapes, run in reversed(self._decider.dry_runs):
            if run is not None and all(covers(shapes, one) for step in self._not_covered for one in step):
                self.begin(run, shapes)
                return

    def _confirm_anew(self) -> None:
        self._seen.clear()
        self._works.clear()
        self._confirmed = self._pause = 0

    def _disk_works(self, step: StepTrace, events: Sequence[Raw]) -> list[DiskWork]:
        """Of one step; none where it is not known what the disk carries."""
        machine = self._machine()
        if machine is None or machine.disk_read.bytes_per_second == 0:
            return []
        return [disk_work(events, step.begin_ns, step.end_ns, machine)]

    def _learn_disk(self, run: DryRun, works: list[DiskWork], seen: Sum, update_seconds: float, update_bytes: int) -> None:
        """How fast the disk is by now: so fast that the plan in use would wait as its steps did, and no further from what it was
        taken to be than what it carried says: in their waits, or, where it is faster, in all of them."""
        if not works:
            return
        before, whole = self._disk_factor, 1.0

        def foretold(part: float) -> float:
            self._disk_factor = min(max(before * whole**part, 1 / MOST_DISK_FACTOR), MOST_DISK_FACTOR)
            machine = self._timed_machine(update_seconds, update_bytes)
            forecast = self._decider.decide(run, times=self._times, machine=machine, as_now=True).plan.forecast
            return sum(forecast.wait_seconds.values()) if forecast is not None else 0.0

        low, high = 0.0, 1.0
        try:
            longer = seen.wait_seconds - foretold(low)
        except BudgetError:  # the plan in use has no room for all that was learned: nothing can be foretold of it
            return
        whole = disk_factor(works, seen.seconds)
        if longer < 0:
            whole = max(whole, least_disk_factor(works))
        if abs(longer) <= WAIT_DOUBT * seen.seconds or whole == 1.0 or (longer > 0) != (whole < 1):
            return
        for _ in range(HALVINGS):
            half = (low + high) / 2
            if (seen.wait_seconds > foretold(half)) == (whole < 1):
                low = half
            else:
                high = half
        foretold(high)

    def _learn_disk_again(self, run: DryRun, update_seconds: float, update_bytes: int) -> None:
        """The same by the last step alone."""
        step, modes = self._clock.step, self._homes.arrangement.plan.block_modes
        if step is None:
            return
        events = step.raw()
        seen = sum_of(events, step.passes, step.begin_ns, step.end_ns, modes)
        if seen is not None:
            self._learn_disk(run, self._disk_works(step, events), seen, update_seconds, update_bytes)

    def _confirm(self, run: DryRun, update_seconds: float, update_bytes: int, behind_backward: bool) -> None:
        """A step as it was planned, nearly. With enough of them the profile is corrected, and planned by once more."""
        step, plan = self._clock.step, self._homes.arrangement.plan
        as_simulated = plan.n_persist == plan.n_chunks or behind_backward != self._wrapped.grads_outlive_backward
        if step is None or plan.forecast is None or self._times is None or not as_simulated:
            return
        if len(step.passes) != self._wrapped.settings.accumulate:
            return
        events = step.raw()
        found = sum_of(events, step.passes, step.begin_ns, step.end_ns, plan.block_modes)
        if found is None:
            return
        self._seen.append(replace(found, rest_seconds=max(found.rest_seconds - update_seconds, 0.0)))
        self._works += self._disk_works(step, events) if len(self._seen) > 1 else []
        if len(self._seen) <= CONFIRMING_STEPS:
            return
        sums, works = self._seen[1:], [*self._works]
        self._seen.clear()
        self._works.clear()
        seen = middle(sums)
        bounds = 1 / MOST_DRAG_FACTOR / self._drag_factor, MOST_DRAG_FACTOR / self._drag_factor
        of_compute, of_drag = factors(plan.forecast, seen.passes_seconds, apart(sums), *bounds)
        before = self._times, self._drag_factor, self._disk_factor, self._rest_seconds
        self._times = scaled_times(self._times, of_compute)
        self._drag_factor *= of_drag
        self._rest_seconds = seen.rest_seconds
        changed = abs(seen.seconds + update_seconds - plan.step_seconds) > CHANGED * plan.step_seconds
        try:
            self._learn_disk(run, works, seen, update_seconds, update_bytes)
            self._plan(run, update_seconds, update_bytes, seen.wait_seconds)
        except BaseException:  # homes could not move: what the plan in use foretells is of the profile before
            self._times, self._drag_factor, self._disk_factor, self._rest_seconds = before
            changed = False  # as nothing is foretold anew the next would only tell the same
            raise
        finally:
            self._pause_before_next(changed)

    def _pause_before_next(self, changed: bool) -> None:
        """Behind a confirmation. changed: its steps took something else than was foretold, so the next is to come soon."""
        self._confirmed = min(self._confirmed + 1, CONFIRMED_AT_ONCE) if changed else self._confirmed + 1
        if self._confirmed >= CONFIRMED_AT_ONCE:
            self._pause = min(FIRST_PAUSE * 4 ** (self._confirmed - CONFIRMED_AT_ONCE), LONGEST_PAUSE)

    def _share(self, batches: Counter[Shapes]) -> float | None:
        """The elements of a step's batches to those of the batch that was planned for, in the mean over them: 1 where all have
        its shapes, and where it has no tensor that is seen; None where there was none, or one that it does not cover."""
        if self._shapes is None or not batches or not all(covers(self._shapes, shapes) for shapes in batches):
            return None
        planned = elements(self._shapes)
        found = sum(count * elements(shapes) for shapes, count in batches.items())
        return found / (planned * batches.total()) if planned else 1.0

    def _departs(self, planned: float, taken: float, share: float) -> bool:
        """Whether this step is one too many that departs from its plan. Of a step with less to compute it is known only that it
        takes no more, and no less than its share: what moves is as much as ever. It becomes a profile, so a step of a small
        share is the last of them only where none of a larger one came."""
        departs = not share / (1 + DEPARTURE) <= taken / planned <= 1 + DEPARTURE
        self._departed, self._steady = (self._departed + 1, 0) if departs else (0, self._steady + 1)
        if self._steady > self._patience:
            self._patience = DEPARTED_STEPS
        if self._departed < self._patience + (0 if share >= LEAST_SHARE else MOST_PASSED_OVER):
            return False
        self._told_steps = self._departed
        self._departed, self._patience, self._times = 0, 2 * self._patience, None
        self._drag_factor = self._disk_factor = 1.0
        return True

    def _watch(self, device: DeviceClock, planned: float, share: float) -> None:
        """The same over a device: of steps whose ends it has come to. The next one is profiled where they depart."""
        while self._ordered and (taken := device.seconds(self._ordered[0][2])) is not None:
            expected, part, _ = self._ordered.popleft()
            if self._departs(expected, taken, part):
                self._ordered.clear()
                self._departure, self._profiled, device.running = (expected, taken), PROFILED_STEPS - 1, True
                return
        step = device.take_step()
        if planned > 0 and step is not None:
            self._ordered.append((planned, share, step))

    def _tell(self, planned: float, taken: float) -> None:
        """Once in a session."""
        if not self._told:
            self._told = True
            warnings.warn(
                f"protrain: steps took {taken:.3f} s where {planned:.3f} s were planned, for {self._told_steps} steps; they were "
                f"measured and planned again",
                stacklevel=9,
            )

    def _observe(self, run: DryRun, update_seconds: float, share: float) -> bool:
        step, device = self._clock.step, self._clock.device
        events = step.raw() if step is not None else []
        if step is None or not events:
            return False
        if device is None:
            found = observe(events, step.passes, step.begin_ns, step.end_ns, run)
        else:
            seen = device.events(step)
            found = observe(*seen, run) if seen is not None else None
        if found is None:
            return False
        machine = self._machine()
        if machine is None:
            return False
        rest = max(found.rest_seconds - update_seconds, 0.0)
        lost = drag_seconds(events, step.passes, with_memory(machine, run.counted()))
        times = of_whole(without_drag(found, lost), share)
        self._rest_seconds = rest if self._times is None else min(rest, self._rest_seconds)
        self._times = times if self._times is None else least(self._times, times)
        return True

    def _machine(self) -> Machine | None:
        """What lanes carry here; measured where something of the model leaves memory, or could do so to win time. None where that
        is not possible: the plan stays as memory alone made it."""
        plan, settings = self._homes.arrangement.plan, self._wrapped.settings
        decided = settings.block_modes is not None or all(mode == "keep" for mode in plan.block_modes)
        if decided and plan.n_persist == plan.n_chunks and not plan.n_swap and "checkpoint_swap" not in plan.block_modes:
            return Machine()
        compute = self._wrapped.compute
        try:
            if isinstance(compute, Accelerator):
                return measure_device(compute, settings.disk)
            machine = measure_machine(settings.disk, self._wrapped.fused)
        except (DiskError, DeviceError, BudgetError, MemoryError):
            return None
        return scaled_disk(scaled_drag(machine, self._drag_factor), self._disk_factor)

    def _timed_machine(self, update_seconds: float, update_bytes: int) -> Machine | None:
        """With what steps have shown of their own."""
        machine = self._machine()
        if machine is None:
            return None
        machine = replace(machine, step_fixed_seconds=self._rest_seconds)
        known = machine.step_update_bytes_per_second
        if update_seconds > 0 and update_bytes >= (TELLING_BYTES if known else 1):
            known = update_bytes / update_seconds
        unknown = UPDATE_BYTES_PER_SECOND if self._clock.device is None else DEVICE_UPDATE_BYTES_PER_SECOND
        return replace(machine, step_update_bytes_per_second=known or unknown)

    def _plan(self, run: DryRun, update_seconds: float, update_bytes: int, waited: float | None = None) -> None:
        """Where no plan has room for all that was learned the one in use stays. waited: seconds of a step by it. As far as they
        are not those foretold, waits of other plans are not known either, and one must be better by more than that."""
        decider, machine = self._decider, self._timed_machine(update_seconds, update_bytes)
        if machine is None:
            return
        try:
            now = decider.decide_for_all(run, times=self._times, machine=machine, as_now=True)
        except BudgetError:
            return
        self._timed = (self._times, machine) if self._times is not None else None
        if machine.disk_read.bytes_per_second > 0:
            try:
                best = decider.decide_for_all(run, times=self._times, machine=machine)
            except BudgetError:  # of host memory beside a device: the one in use has room there
                best = now
            gain = 1 - best.plan.step_seconds / now.plan.step_seconds if now.plan.step_seconds > 0 else 0.0
            if gain > LEAST_GAIN + _unexplained(now.plan, waited):
                if self._carrier.can_carry_out(best):
                    now, self._kept_from = best, 0
                else:
                    self._try_again()
        self._homes.rearrange(now)

    def _try_again(self) -> None:
        """Something else is in memory. It may be gone behind the next step, or be what the user keeps: ever more seldom."""
        if self._kept_from == 0:
            self._profiled = PROFILED_STEPS - 1
        else:
            self._next_try = min(2**self._kept_from, LONGEST_PAUSE)
        self._kept_from += 1


def _unexplained(plan: Plan, waited: float | None) -> float:
    """The part of a step that waits take more, or less, than foretold."""
    if waited is None or plan.forecast is None:
        return 0.0
    return abs(waited - sum(plan.forecast.wait_seconds.values())) / plan.step_seconds
