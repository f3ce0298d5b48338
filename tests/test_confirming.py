"""What the first steps under a plan correct: compute and drag by their uncertainties, the plan, and nothing beyond them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from nets import rigid
from test_pacing import Clock, clocked, step
from twins import MIB, adamw, assert_equal, loss_of, run

import protrain
from protrain.api import session_of
from protrain.planner.plans import Forecast
from protrain.planner.profiles import Machine, Speed, Times
from protrain.profiling.confirming import (
    MOST_COMPUTE_FACTOR,
    MOST_DISK_FACTOR,
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
from protrain.profiling.observed import DiskWork
from protrain.profiling.timeline import COMPUTE, FORWARD, LANES, RECOMPUTE, WAIT, Pass
from protrain.runtime import pacing

SECOND_NS = 10**9


def forecast(compute: float, drag: float, again: float = 0.0) -> Forecast:
    return Forecast(compute, again, 0.0, drag, 0.0, {}, {}, {})


# ---- the division ----


def test_a_step_as_foretold_corrects_nothing() -> None:
    assert factors(forecast(0.8, 0.1, 0.1), 1.0, 0.0) == pytest.approx((1.0, 1.0), abs=1e-12)


@pytest.mark.parametrize(("compute", "drag"), [(1.0, 0.0), (1.0, 0.01), (1.0, 0.1), (0.5, 0.5), (0.001, 0.3)])
@pytest.mark.parametrize("part", [0.85, 0.97, 1.05, 1.19])
@pytest.mark.parametrize("apart_seconds", [0.0, 0.1])
def test_the_sum_comes_nearer_to_what_was_seen(compute: float, drag: float, part: float, apart_seconds: float) -> None:
    seen = part * (compute + drag)
    of_compute, of_drag = factors(forecast(compute, drag), seen, apart_seconds)
    corrected = of_compute * compute + of_drag * drag
    assert min(seen, compute + drag) < corrected < max(seen, compute + drag)
    assert of_compute > 0
    assert of_drag >= 0


def test_the_less_certain_part_takes_more() -> None:
    of_compute, of_drag = factors(forecast(1.0, 0.2), 1.3, 0.05)
    assert (of_drag - 1) * 0.2 == pytest.approx(4 * (of_compute - 1) * 1.0)  # as the squares of 30 % of 0.2 and 3 % of 1
    assert of_compute > 1
    of_compute, of_drag = factors(forecast(1.0, 0.001), 1.1, 0.05)  # so little cannot be the reason
    assert (of_compute - 1) * 1.0 > 100 * (of_drag - 1) * 0.001 > 0


def test_steps_that_lie_apart_are_believed_less() -> None:
    found = [factors(forecast(1.0, 0.1), 1.2, apart_seconds)[0] for apart_seconds in (0.0, 0.005, 0.02, 0.1, 1.0)]
    assert found[0] == found[1] > found[2] > found[3] > found[4] > 1
    assert apart([Sum(1.0, 0.3, 5.0), Sum(1.4, 0.1, 4.0), Sum(1.1, 0.2, 0.0)]) == pytest.approx(0.2)


def test_recomputation_is_compute() -> None:
    assert factors(forecast(0.7, 0.1, 0.3), 1.2, 0.0) == factors(forecast(1.0, 0.1), 1.2, 0.0)


def test_what_drag_may_not_explain_is_compute() -> None:
    """Lanes are not believed to cost next to nothing, nor many times what was measured; steps are all the same."""
    for seen, bounds, expected in ((0.9, (0.5, 2.0), 0.5), (1.7, (0.5, 2.0), 2.0)):
        of_compute, of_drag = factors(forecast(1.0, 0.2), seen, 0.0, *bounds)
        assert of_drag == expected
        foretold = of_compute * 1.0 + of_drag * 0.2
        free_compute, free_drag = factors(forecast(1.0, 0.2), seen, 0.0)
        assert abs(foretold - seen) < 0.5 * abs(free_compute * 1.0 + expected * 0.2 - seen)
        assert not bounds[0] <= free_drag <= bounds[1]
    assert factors(forecast(1.0, 0.2), 1.25, 0.0, 0.5, 2.0) == factors(forecast(1.0, 0.2), 1.25, 0.0)
    assert factors(forecast(1.0, 6.0), 1.1, 0.0, 0.25, 4.0) == (1 / MOST_COMPUTE_FACTOR, 0.25)  # and no less than half


def test_nothing_foretold_and_drag_below_nothing() -> None:
    assert factors(forecast(0.0, 0.0), 0.0, 0.0) == (1.0, 1.0)
    assert factors(forecast(0.0, 1.0), 0.0, 0.0)[1] >= 0.0


# ---- sums of steps ----


def event(lane: int, begin: float, end: float, kind: int = FORWARD) -> tuple[int, int, int, int, int, int]:
    return round(begin * SECOND_NS), round(end * SECOND_NS), 0, 0, lane, kind


def pass_of(begin: float, over: float) -> Pass:
    return Pass(round(begin * SECOND_NS), round(over * SECOND_NS))


def test_waits_are_in_no_sum() -> None:
    events = [
        event(COMPUTE, 1, 5), event(WAIT, 0.5, 1.5), event(WAIT, 2, 2.5), event(WAIT, 2.25, 2.75), event(WAIT, 9.5, 11),
        event(LANES.index("read"), 1, 5),
    ]  # fmt: skip
    found = sum_of(events, [pass_of(1, 5), pass_of(6, 8)], 0, 10 * SECOND_NS, ["keep"])
    assert found is not None
    assert found.passes_seconds == pytest.approx(4 - 0.5 - 0.75 + 2)
    assert found.rest_seconds == pytest.approx(10 - 6 - 0.5 - 0.5)
    assert found.wait_seconds == pytest.approx(1.0 + 0.75 + 0.5)


@pytest.mark.parametrize(
    ("events", "passes"),
    [
        ([event(COMPUTE, 1, 5)], []),
        ([event(COMPUTE, 1, 5)], [pass_of(1, 5), pass_of(6, 11)]),
        ([event(COMPUTE, 1, 5)], [pass_of(1, 5), Pass(6 * SECOND_NS)]),
        ([], [pass_of(1, 5)]),  # the ring has lost them: waits are not known
        ([event(COMPUTE, 1, 2, RECOMPUTE)], [pass_of(1, 5)]),
    ],
    ids=["no pass", "ends too late", "no end", "no events", "recomputed against its mode"],
)
def test_a_step_that_tells_nothing(events: list[Any], passes: list[Pass]) -> None:
    whole = [event(COMPUTE, 1, 5)]
    assert sum_of(whole, [pass_of(1, 5)], 0, 10 * SECOND_NS, ["keep"]) is not None
    assert sum_of([event(COMPUTE, 1, 2, RECOMPUTE)], [pass_of(1, 5)], 0, 10 * SECOND_NS, ["checkpoint_swap"]) is not None
    assert sum_of(events, passes, 0, 10 * SECOND_NS, ["keep"]) is None


def test_the_middle_is_of_each() -> None:
    assert middle([Sum(1.0, 0.3, 5.0), Sum(3.0, 0.1, 4.0), Sum(2.0, 0.2, 0.0)]) == Sum(2.0, 0.2, 4.0)


def test_what_is_scaled_and_what_is_not() -> None:
    assert scaled_times(Times(((1.0, 0.5), (2.0, 0.0))), 1.5) == Times(((1.5, 0.75), (3.0, 0.0)))
    lanes = {lane: Speed(1e9, 2e9, 1e-10) for lane in ("upload", "offload", "gather", "disk_read", "disk_write", "update")}
    dragging = {"stash_drag_seconds_per_byte": -5e-11, "request_drag_seconds": 1e-5, "memory_drag_seconds_per_byte": 3e-11}
    machine = Machine(**lanes, **dragging, step_fixed_seconds=0.1)
    twice = {lane: replace(speed, drag_seconds_per_byte=2e-10) for lane, speed in lanes.items()}
    twice_dragging = {name: 2 * seconds for name, seconds in dragging.items()}
    assert scaled_drag(machine, 2.0) == replace(machine, **twice, **twice_dragging)


@pytest.mark.parametrize(
    ("works", "factor"),
    [
        ([], 1.0),
        ([DiskWork(0.5, 1.0), DiskWork(0.1, 0.5)], 0.4),
        ([DiskWork(0.5, 0.4), DiskWork(0.0, 0.0)], 1.25),
        ([DiskWork(1e-3, 0.02), DiskWork(0.0, 0.0)], 1.0),  # a hundredth of each step tells nothing
        ([DiskWork(9.0, 1.0)], MOST_DISK_FACTOR),
        ([DiskWork(0.0, 1.0)], 1 / MOST_DISK_FACTOR),
    ],
)
def test_the_disk_is_as_fast_as_in_all_waits_together(works: list[DiskWork], factor: float) -> None:
    assert disk_factor(works, 1.0) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("works", "factor"),
    [
        ([DiskWork(0.0, 0.0, 1.0, 0.5), DiskWork(0.0, 0.0, 0.5, 0.5)], 1.5),
        ([DiskWork(0.5, 1.0, 0.5, 1.0)], 1.0),
        ([DiskWork(0.0, 0.0, 9.0, 1.0)], MOST_DISK_FACTOR),
        ([DiskWork(0.0, 0.0)], 1.0),
        ([], 1.0),
    ],
)
def test_the_disk_is_at_least_as_fast_as_in_all_that_it_carried(works: list[DiskWork], factor: float) -> None:
    assert least_disk_factor(works) == pytest.approx(factor)


def test_a_slower_disk_is_slower_both_ways() -> None:
    machine = Machine(disk_read=Speed(4.0, 8.0, 1.0), disk_write=Speed(2.0, 0.0, 1.0), update=Speed(1.0))
    assert scaled_disk(machine, 0.5) == replace(machine, disk_read=Speed(2.0, 4.0, 1.0), disk_write=Speed(1.0, 0.0, 1.0))


# ---- sessions ----


@pytest.fixture
def gpt2(causal_lm: Any, disk: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    return partial(causal_lm, "gpt2", hidden=192, layers=8)


def test_the_steps_after_a_plan_correct_what_it_foretells(gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, clock = clocked(gpt2, monkeypatch)
    (ids,) = token_batches(1, length=32)

    def after(seconds: float, length: int = 32) -> float:
        clock.block_seconds = seconds
        step(model, optimizer, ids[:, :length])
        return protrain.status(model).plan.step_seconds

    for _ in range(pacing.PROFILED_STEPS):
        planned = after(0.1)
    for _ in range(pacing.CONFIRMING_STEPS):
        assert after(0.11) == planned
        assert after(0.3) == planned  # a departure confirms nothing
        assert after(0.06, length=16) == planned  # nor does a part of the batch
    corrected = after(0.11)
    assert planned * 1.01 < corrected < 0.11
    for _ in range(pacing.CONFIRMING_STEPS):
        assert after(0.11) == corrected
    twice = after(0.11)
    assert corrected < twice < 0.11
    foretold = twice
    for pause, seconds in ((1, 0.107), (4, 0.105), (16, 0.095), (1, 0.095), (4, 0.096)):  # ever later, but soon after a change
        for _ in range(pause * pacing.FIRST_PAUSE + pacing.CONFIRMING_STEPS):
            assert after(seconds) == foretold
        corrected = after(seconds)
        assert min(seconds, foretold) < corrected < max(seconds, foretold)
        foretold = corrected
    protrain.unwrap(model)


@pytest.mark.parametrize("what", ["passes", "more", "rates", "neither"])
def test_steps_that_did_not_run_as_simulated_confirm_nothing(
    what: str, gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer passes than were planned for, whose step is no departure; or more, where a stream ended in the middle of a step; and
    updates in the open that were to be behind backward."""
    lane = Speed(1e11, 1e11, 0.0)
    machine = Machine(disk_read=lane, disk_write=lane, update=Speed(1e11, 1e11, 0.0), step_update_bytes_per_second=1e11)
    monkeypatch.setattr(pacing, "measure_machine", lambda *_: machine)
    monkeypatch.setattr(pacing, "sum_of", lambda *_: Sum(1.0, 0.0))
    clock, passes = Clock(monkeypatch), 1 if what == "rates" else 6
    model = gpt2()
    clock.block_seconds = 0.1
    clock.slow(model.transformer.h[1])
    model, optimizer = protrain.wrap(
        model, adamw(model), memory=28 * MIB, accumulate=passes, max_grad_norm=None if what == "rates" else 1.0
    )
    planned = []
    for number in range(pacing.PROFILED_STEPS + pacing.CONFIRMING_STEPS + 1):
        fewer = what == "passes" and number >= pacing.PROFILED_STEPS
        more = what == "more" and number >= pacing.PROFILED_STEPS
        for place, ids in enumerate(token_batches(passes - fewer + more)):
            if more and place == 1:
                session_of(model).lengthen_step()
            loss_of(model, ids).backward()
        if what == "rates":
            optimizer.param_groups[0]["lr"] = 1e-4 * (1 + number % 2)
        optimizer.step()
        optimizer.zero_grad()
        planned.append(protrain.status(model).plan.step_seconds)
    assert planned[-2] == planned[pacing.PROFILED_STEPS - 1] > 0
    assert (planned[-1] == planned[-2]) == (what != "neither")
    protrain.unwrap(model)


@pytest.mark.parametrize("order", ["the same", "another"])
def test_what_was_measured_stands_while_blocks_run_in_its_order(order: str, gpt2: Any, token_batches: Any) -> None:
    """A plan that is made anew from memory, of the same batch: its dry run may have gone another way through the model."""
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=28 * MIB)
    for ids in token_batches(pacing.PROFILED_STEPS):
        step(model, optimizer, ids)
    pacer = session_of(model).pacer
    times, run, shapes = pacer._times, pacer._run, pacer._shapes
    if order == "another":
        assert [phase.block for phase in run.phases[1:3]] == [0, 1]
        run = replace(run, phases=(run.phases[0], run.phases[2], run.phases[1], *run.phases[3:]))
    pacer.foresaw(run, shapes)
    assert (pacer._times, pacer._profiled) == ((times, pacing.PROFILED_STEPS - 1) if order == "the same" else (None, 0))
    protrain.unwrap(model)


def test_a_plan_that_cannot_be_carried_out_leaves_the_profile_as_it_was(
    gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, clock = clocked(gpt2, monkeypatch)
    (ids,) = token_batches(1, length=32)
    clock.block_seconds = 0.1
    for _ in range(pacing.PROFILED_STEPS):
        step(model, optimizer, ids)
    session = session_of(model)
    pacer, plan = session.pacer, session.homes.arrangement.plan
    times = pacer._times

    def fail(_: Any) -> None:
        raise protrain.DiskError("it is full")

    monkeypatch.setattr(session.homes, "rearrange", fail)
    clock.block_seconds = 0.11
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range((pacing.CONFIRMED_AT_ONCE + 1) * (pacing.CONFIRMING_STEPS + 1) + 5 * pacing.FIRST_PAUSE):
            step(model, optimizer, ids)
    assert len([w for w in said if "it is full" in str(w.message)]) == pacing.CONFIRMED_AT_ONCE + 1
    assert pacer._times == times
    assert pacer._drag_factor == 1.0
    assert session.homes.arrangement.plan == plan
    protrain.unwrap(model)


@pytest.mark.parametrize("unexplained", [False, True])
def test_lanes_that_cost_more_than_was_measured_lead_to_another_plan(
    unexplained: bool, gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands but in forwards of blocks, and the sums of the steps under a plan are made up: ten times the drag. Where
    they wait for what nothing explains, as long as they compute, other plans are not known to be better."""
    rigid(monkeypatch)  # by this clock what is recomputed in a first step takes no time
    clock, plans = Clock(monkeypatch), []
    lane = Speed(6e8, 6e8, 6e-10)
    machine = Machine(disk_read=lane, disk_write=lane, update=Speed(1e10, 1e10, 0.0), step_update_bytes_per_second=1e10)
    monkeypatch.setattr(pacing, "measure_machine", lambda *_: machine)
    monkeypatch.setattr(pacing, "DEPARTURE", 1e9)

    def dear(*_: Any) -> Sum:
        found = plans[-1].forecast
        assert found is not None
        compute = found.compute_seconds + found.recompute_seconds
        return Sum(compute + 10 * found.drag_seconds, 0.0, compute if unexplained else 0.0)

    monkeypatch.setattr(pacing, "sum_of", dear)

    def slow_backward(output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        if found.requires_grad:
            found.register_hook(lambda _: clock.go_on(0.02))

    def noting(model: Any, optimizer: Any, plain: bool) -> list[float]:
        losses = []
        clock.block_seconds = 0.01
        for block in model.transformer.h:
            clock.slow(block)
            block.register_forward_hook(lambda _block, _args, output: slow_backward(output))
        for ids in token_batches(pacing.PROFILED_STEPS + 2 * (pacing.CONFIRMING_STEPS + 1) + 1, batch=4):
            loss = loss_of(model, ids)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not plain:
                plans.append(protrain.status(model).plan)
        return losses

    assert_equal(run(gpt2, noting, memory=80 * MIB), run(gpt2, noting), 80 * MIB)
    first, last = plans[pacing.PROFILED_STEPS], plans[-1]
    moved = [sum(plan.forecast.moved_bytes.values()) for plan in (first, last)]
    assert (moved[0] > moved[1]) != unexplained
    assert (first.n_checkpoint < last.n_checkpoint) != unexplained
    assert last.step_seconds > first.step_seconds


@pytest.mark.parametrize("waited", ["as foretold", "longer", "a fifth of the step longer"])
def test_waits_that_were_not_foretold_say_how_fast_the_disk_is(
    waited: str, gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What steps took is made up, and so is what the disk carried while they waited: a quarter of what it should have."""
    clock, lane = Clock(monkeypatch), Speed(1e11, 1e11, 0.0)
    machine = Machine(disk_read=lane, disk_write=lane, update=Speed(1e11, 1e11, 0.0), step_update_bytes_per_second=1e11)
    monkeypatch.setattr(pacing, "measure_machine", lambda *_: machine)
    monkeypatch.setattr(pacing, "disk_work", lambda *_: DiskWork(0.05, 0.2))
    model = gpt2()
    clock.block_seconds = 1.0
    clock.slow(model.transformer.h[1])
    model, optimizer = protrain.wrap(model, adamw(model), memory=28 * MIB)
    pacer = session_of(model).pacer

    def as_planned(*_: Any) -> Sum:
        found = protrain.status(model).plan.forecast
        assert found is not None
        passes = found.compute_seconds + found.recompute_seconds + found.drag_seconds
        return Sum(passes, 0.0, sum(found.wait_seconds.values()) + (0.0 if waited == "as foretold" else 0.1))

    monkeypatch.setattr(pacing, "sum_of", as_planned)
    for ids in token_batches(pacing.PROFILED_STEPS + pacing.CONFIRMING_STEPS, batch=4):
        step(model, optimizer, ids)
    assert pacer._disk_factor == 1.0
    (ids,) = token_batches(1, batch=4)
    if waited == "a fifth of the step longer":
        clock.block_seconds = 1.3
        for _ in range(pacing.DEPARTED_STEPS - 1):
            step(model, optimizer, ids)
        with pytest.warns(UserWarning, match="measured and planned again"):
            step(model, optimizer, ids)
    else:
        step(model, optimizer, ids)
    assert pacer._disk_factor == (1.0 if waited == "as foretold" else 0.25)
    carried = pacer._machine()
    assert carried is not None
    assert carried.disk_write.idle_bytes_per_second == pacer._disk_factor * 1e11
    pacer.begin(session_of(model).decider.dry_runs[0][1], ())  # a longer batch
    assert pacer._disk_factor == 1.0
    protrain.unwrap(model)


@pytest.mark.parametrize(
    ("seen", "work", "factor"),
    [
        (0.2, DiskWork(0.05, 0.2), 0.5),  # as slow as makes the waits those that were seen
        (0.9, DiskWork(0.05, 0.2), 0.25),  # but no slower than what was carried says
        (0.1, DiskWork(0.05, 0.2), 1.0),  # foretold as it was
        (0.05, DiskWork(0.05, 0.2), 1.0),  # slower, and shorter waits: that is another reason
        (0.05, DiskWork(0.8, 0.2), 2.0),
        (0.01, DiskWork(0.8, 0.2), 4.0),
        (0.2, DiskWork(0.8, 0.2), 1.0),
        (0.2, DiskWork(0.0, 0.0), 1.0),
        (0.0, DiskWork(0.0, 0.0, 0.9, 0.6), 1.5),  # no waits: as fast as it was beside compute
        (0.05, DiskWork(0.0, 0.0, 0.9, 0.3), 2.0),  # but no faster than explains it
        (0.05, DiskWork(0.05, 0.2, 0.9, 0.3), 2.0),  # slow in waits, when it had little to do
        (0.0, DiskWork(0.0, 0.0, 0.3, 0.6), 1.0),  # it may have had less to do than it can
        (0.2, DiskWork(0.0, 0.0, 0.9, 0.6), 1.0),  # longer waits: that is another reason
    ],
)
def test_the_disk_is_taken_to_be_as_fast_as_explains_the_waits(
    seen: float, work: DiskWork, factor: float, gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = Speed(1e11, 1e11, 0.0)
    machine = Machine(disk_read=lane, disk_write=lane, update=Speed(1e11, 1e11, 0.0), step_update_bytes_per_second=1e11)
    monkeypatch.setattr(pacing, "measure_machine", lambda *_: machine)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=28 * MIB)
    step(model, optimizer, token_batches(1, batch=4)[0])
    session = session_of(model)

    def decide(_: Any, *, machine: Machine, **__: Any) -> Any:
        found = replace(forecast(0.5, 0.0), wait_seconds={"chunk": 0.1 * 1e11 / machine.disk_read.bytes_per_second})
        return SimpleNamespace(plan=SimpleNamespace(forecast=found))

    monkeypatch.setattr(session.decider, "decide", decide)
    run = session.decider.dry_runs[0][1]
    assert run is not None
    session.pacer._learn_disk(run, [work], Sum(0.5, 0.0, seen), 0.0, 0)
    assert session.pacer._disk_factor == pytest.approx(factor, rel=2 / 2**pacing.HALVINGS)
    monkeypatch.undo()
    protrain.unwrap(model)
