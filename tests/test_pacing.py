"""Plans by time while a model trains: the first steps are profiled, departures noticed; what a user holds is no obstacle."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nets import rigid
from torch import nn
from twins import MIB, adamw, assert_equal, loss_of, run

import protrain
from protrain import _core
from protrain import session as session_module
from protrain.api import session_of
from protrain.planner.planning import arrange
from protrain.planner.profiles import Machine, Speed
from protrain.runtime import pacing, updates

BUDGET = 28 * MIB


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


@pytest.fixture
def gpt2(causal_lm: Any) -> Any:
    """GPT-2 of 3.8 M parameters: 61 MB of parameters, gradients and moments."""
    return partial(causal_lm, "gpt2", hidden=192, layers=8)


def machine(disk_bytes_per_second: float) -> Machine:
    lane = Speed(disk_bytes_per_second, disk_bytes_per_second, 0.0)
    return Machine(
        disk_read=lane, disk_write=lane, update=Speed(1e10, 1e10, 0.0), disk_overlap=1.0, step_update_bytes_per_second=1e10
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    loss_of(model, ids).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("speed", [1e5, 1e11], ids=["slow disk", "fast disk"])
def test_the_third_step_runs_by_a_plan_of_the_first_two(
    speed: float, gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "measure_machine", lambda *_: machine(speed))
    monkeypatch.setattr(pacing, "LEAST_GAIN", 0.0)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    plans = []
    for ids in token_batches(4, batch=4):
        step(model, optimizer, ids)
        plans.append(protrain.status(model).plan)
    assert plans[0].forecast is None
    assert plans[0].step_seconds == 0.0
    assert plans[1].forecast is not None
    assert plans[1].step_seconds > 0.0
    assert plans[2] == plans[3] == plans[1]
    first, second = ((plan.n_persist, plan.block_modes) for plan in plans[:2])
    if speed < 1e6:  # nothing that can be recomputed is worth a byte of it
        assert not any(mode.endswith("swap") for mode in plans[1].block_modes)
        assert plans[1].n_persist >= plans[0].n_persist
    else:  # nothing is worth a recomputation
        assert first != second
        assert not any(mode.startswith("checkpoint") for mode in plans[1].block_modes)
    protrain.unwrap(model)


class Clock:
    """Stands for the clocks that steps are timed by, later than all that they have shown; goes on a little where it is looked at,
    and by `block_seconds` in each forward of a block that `slow` was given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.block_seconds = 0.0
        self._ns = _core.now_ns() + 10**15
        patch.setattr(_core, "now_ns", self.now_ns)
        for module in (session_module, updates):
            patch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now_ns() / 1e9))

    def now_ns(self) -> int:
        self._ns += 1000
        return self._ns

    def slow(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(lambda *_: self.go_on(self.block_seconds))

    def go_on(self, seconds: float) -> None:
        self._ns += round(seconds * 1e9)


def clocked(gpt2: Any, patch: pytest.MonkeyPatch, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Clock]:
    """A small model with room for all, whose second block takes as long as the clock says."""
    model, clock = gpt2(layers=2, hidden=64), Clock(patch)
    clock.slow(model.transformer.h[1])
    return *protrain.wrap(model, adamw(model), memory="1GiB", **options), clock


def test_planning_is_no_part_of_what_a_step_takes(gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, clock = clocked(gpt2, monkeypatch)
    session = session_of(model)
    real = session.fitter.plan_for

    def slow(*batch: Any) -> Any:
        clock.go_on(100.0)
        return real(*batch)

    monkeypatch.setattr(session.fitter, "plan_for", slow)
    for length in (16, 32):  # each is planned for
        (ids,) = token_batches(1, length=length)
        step(model, optimizer, ids)
        found = protrain.status(model)
        assert 0 < found.step_seconds < 10
        assert found.timeline().seconds < 10
    step(model, optimizer, ids)
    forecast = protrain.status(model).plan.forecast
    assert forecast is not None
    assert forecast.fixed_seconds < 10
    protrain.unwrap(model)


def test_steps_that_depart_are_planned_again_and_that_is_said_once(
    gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, clock = clocked(gpt2, monkeypatch)
    clock.block_seconds = 0.02
    (ids,) = token_batches(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(pacing.PROFILED_STEPS):
            step(model, optimizer, ids)
        planned = protrain.status(model).plan.step_seconds
        assert planned == pytest.approx(0.02, rel=0.01)
        clock.block_seconds = 0.1
        for _ in range(pacing.DEPARTED_STEPS - 1):
            step(model, optimizer, ids)
        clock.block_seconds = 0.02
        step(model, optimizer, ids)  # as planned: those before it do not count
        clock.block_seconds = 0.1
        for _ in range(pacing.DEPARTED_STEPS - 1):
            step(model, optimizer, ids)
        assert protrain.status(model).plan.step_seconds == planned
        step(model, optimizer, ids)
        again = protrain.status(model).plan.step_seconds
        assert again == pytest.approx(0.1, rel=0.01)
        clock.block_seconds = 0.4
        for _ in range(2 * pacing.DEPARTED_STEPS - 1):
            step(model, optimizer, ids)
        assert protrain.status(model).plan.step_seconds == again
        step(model, optimizer, ids)
        assert protrain.status(model).plan.step_seconds == pytest.approx(0.4, rel=0.01)
    assert [str(w.message).split(";")[-1] for w in said if "planned again" in str(w.message)] == [
        " they were measured and planned again"
    ]
    assert {w.filename for w in said if "planned again" in str(w.message)} == {__file__}
    protrain.unwrap(model)


def test_steps_that_are_faster_are_told_of_too(gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, clock = clocked(gpt2, monkeypatch)
    (ids,) = token_batches(1)
    clock.block_seconds = 0.1
    for _ in range(pacing.PROFILED_STEPS):
        step(model, optimizer, ids)
    clock.block_seconds = 0.02
    for _ in range(pacing.DEPARTED_STEPS - 1):
        step(model, optimizer, ids)
    with pytest.warns(UserWarning, match=r"steps took 0\.02\d s where 0\.1\d\d s were planned, for 5 steps"):
        step(model, optimizer, ids)
    assert protrain.status(model).plan.step_seconds == pytest.approx(0.02, rel=0.01)
    protrain.unwrap(model)


def test_steps_of_fewer_passes_depart_from_nothing(gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, clock = clocked(gpt2, monkeypatch, accumulate=2)
    clock.block_seconds = 0.05
    (ids,) = token_batches(1)
    for _ in range(pacing.PROFILED_STEPS):
        loss_of(model, ids).backward()
        step(model, optimizer, ids)
    planned = protrain.status(model).plan.step_seconds
    assert planned == pytest.approx(0.1, rel=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * pacing.DEPARTED_STEPS):
            step(model, optimizer, ids)
    assert protrain.status(model).plan.step_seconds == planned
    protrain.unwrap(model)


def test_where_the_last_step_that_departs_shows_nothing_the_next_is_a_profile(
    gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, clock = clocked(gpt2, monkeypatch)
    (ids,) = token_batches(1)
    for seconds, count in ((0.02, pacing.PROFILED_STEPS), (0.1, pacing.DEPARTED_STEPS - 1)):
        clock.block_seconds = seconds
        for _ in range(count):
            step(model, optimizer, ids)
    observe = pacing.Pacer._observe
    monkeypatch.setattr(pacing.Pacer, "_observe", lambda *_: False)
    step(model, optimizer, ids)
    monkeypatch.setattr(pacing.Pacer, "_observe", observe)
    with pytest.warns(UserWarning, match="they were measured and planned again"):
        step(model, optimizer, ids)
    assert protrain.status(model).plan.step_seconds == pytest.approx(0.1, rel=0.01)
    protrain.unwrap(model)


def test_a_backward_that_failed_leaves_room_for_the_plan(gpt2: Any, token_batches: Any) -> None:
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    session = session_of(model)
    for ids in token_batches(5):
        loss_of(model, ids).backward()
        with pytest.raises(protrain.StepError, match="accumulate"):
            loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert protrain.status(model).plan.forecast is not None
    held = session.carrier.held_bytes(0)  # the last graph went with the next forward, or goes now
    assert held < MIB
    protrain.unwrap(model)


def test_a_forward_beside_what_is_still_held_recomputes_its_blocks(
    gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigid(monkeypatch)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    session = session_of(model)
    ids = token_batches(1)[0]
    loss_of(model, ids).backward()  # its plan fills the budget: most blocks are kept
    assert session.homes.arrangement.plan.block_modes.count("keep") > 4
    held = torch.zeros(2 * MIB, dtype=torch.uint8)  # within a step; gradients that wait may have left memory by now
    waiting = session.engine.stats()["live_bytes"]
    loss = loss_of(model, ids)
    assert session.engine.stats()["live_bytes"] - waiting < 2 * MIB  # kept, they were ten times as much
    del loss, held
    optimizer.step()
    protrain.unwrap(model)


def test_gradients_do_not_outlive_a_chunk_that_leaves_memory(gpt2: Any, token_batches: Any) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, plain: bool) -> list[Any]:
        figures = []
        for number, ids in enumerate(token_batches(5)):
            loss = loss_of(model, ids)
            loss.backward()
            figures.append(loss.item())
            optimizer.step()
            if number == 2 and not plain:
                session = session_of(model)
                run = session.decider.dry_runs[0][1]
                found = arrange(session.layout, 8, session.wrapped.n_states, 1 << 30, run, modes=["keep"] * 8, n_persist=0)
                session.homes.rearrange(found)
            optimizer.zero_grad()
        return figures

    status = assert_equal(run(gpt2, loop, memory=1 << 30), run(gpt2, loop), 1 << 30)
    assert status.plan.n_persist == 0


def test_a_plan_waits_while_others_hold_its_room(gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rigid(monkeypatch, yields=True)  # a first step that leaves room swaps in this budget, as the plan by time does
    monkeypatch.setattr(pacing, "measure_machine", lambda *_: machine(1e11))
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    session = session_of(model)
    monkeypatch.setattr(session.carrier, "can_carry_out", lambda _arrangement: False)
    batches = token_batches(5, batch=4)
    with pytest.raises(protrain.BudgetError, match="no room"):
        step(model, optimizer, batches[0])
    monkeypatch.setattr(session.carrier, "can_carry_out", lambda _arrangement: session.steps == 0)
    for ids in batches[:2]:
        step(model, optimizer, ids)
    first = protrain.status(model).plan
    monkeypatch.undo()
    monkeypatch.setattr(pacing, "measure_machine", lambda *_: machine(1e11))
    step(model, optimizer, batches[2])
    assert protrain.status(model).plan.block_modes != first.block_modes
    protrain.unwrap(model)


def test_what_a_user_makes_between_steps_is_in_no_budget(gpt2: Any, token_batches: Any) -> None:
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    mine = torch.zeros(2 * BUDGET // 4)
    (ids,) = token_batches(1)
    step(model, optimizer, ids)
    mine = torch.cat([mine, mine])
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    mine = torch.cat([mine, mine])
    assert protrain.status(model).peak_memory_bytes <= BUDGET
    model.train()
    model.transformer.h[1].register_forward_pre_hook(lambda *_: torch.zeros(2 * BUDGET // 4))
    with pytest.raises(protrain.BudgetError):
        step(model, optimizer, ids)
    assert logits.shape[0] == ids.shape[0]
    protrain.unwrap(model)


LENGTHS = (16, 15, 13, 16, 12, 14, 11, 15)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_of_many_lengths_are_a_profile_too(
    accumulate: int, gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is padded to its own longest sequence: the shape that was planned for may never come again."""
    monkeypatch.setattr(pacing, "measure_machine", lambda *_: machine(1e11))
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET, accumulate=accumulate)
    seen = []
    for ids in token_batches(2 * accumulate, batch=4, length=max(LENGTHS)):
        length = LENGTHS[len(seen)]
        loss_of(model, ids[:, :length]).backward()
        seen.append(length)
        if len(seen) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert protrain.status(model).plan.step_seconds > 0
    protrain.unwrap(model)


def test_what_a_shorter_step_computed_is_taken_for_the_whole(
    gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, clock = clocked(gpt2, monkeypatch)
    (ids,) = token_batches(1, length=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length, seconds in ((32, 0.1), (8, 1.0), (24, 0.06)):  # one of a quarter of the elements is no profile
            clock.block_seconds = seconds
            step(model, optimizer, ids[:, :length])
        assert protrain.status(model).plan.step_seconds == pytest.approx(0.08, rel=0.01)
        for length, seconds in [(8, 0.025), (16, 0.08), (8, 0.09), (32, 0.07)] * pacing.DEPARTED_STEPS:
            clock.block_seconds = seconds  # between its share and the whole: no departure
            step(model, optimizer, ids[:, :length])
    clock.block_seconds = 0.16
    for length in [16] * (pacing.DEPARTED_STEPS - 1) + [1]:  # the last is too short to plan for
        step(model, optimizer, ids[:, :length])
    with pytest.warns(UserWarning, match="they were measured and planned again"):
        step(model, optimizer, ids[:, :16])
    assert protrain.status(model).plan.step_seconds == pytest.approx(0.32, rel=0.01)
    protrain.unwrap(model)


def test_only_short_steps_are_a_profile_in_the_end(gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, clock = clocked(gpt2, monkeypatch)
    (ids,) = token_batches(1, length=32)
    clock.block_seconds = 0.1
    step(model, optimizer, ids)
    clock.block_seconds = 0.02
    for _ in range(pacing.MOST_PASSED_OVER):
        step(model, optimizer, ids[:, :8])
        assert protrain.status(model).plan.step_seconds == 0
    step(model, optimizer, ids[:, :8])
    assert protrain.status(model).plan.step_seconds == pytest.approx(0.08, rel=0.01)
    protrain.unwrap(model)


class FromNumbers(nn.Module):
    """Given what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, numbers: list[int]) -> torch.Tensor:
        x: torch.Tensor = self.table(torch.tensor(numbers))
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_batches_without_tensors_are_a_profile_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "measure_machine", lambda *_: machine(1e11))
    model = FromNumbers()
    model, optimizer = protrain.wrap(model, adamw(model), memory="64MiB")
    for first in range(pacing.PROFILED_STEPS):
        model([first, 2, 3]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert protrain.status(model).plan.step_seconds > 0
    protrain.unwrap(model)
