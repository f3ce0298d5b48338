"""Profiles of a device: what its streams did, apart from what the thread that orders did; and plans by those times.

The device that stands for a GPU has a time of its own here, which goes on where a test says so and nowhere else.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TIGHT, Block, Chain, inputs, steps
from standin import StandIn
from torch import nn
from twins import MIB, adamw, assert_equal, run

import protrain
from protrain import api
from protrain.device import compute
from protrain.dryrun.phases import DryRun
from protrain.planner.profiles import DEVICE_UPDATE_BYTES_PER_SECOND, Machine, Speed
from protrain.profiling import calibration
from protrain.profiling.device_clock import DeviceClock
from protrain.runtime import pacing

MS = 1_000_000
ROWS = 256  # of a batch: what a block saves is then 2.5 MiB


class Timed(StandIn):
    """A device whose time is `now_ns`, and which is behind what is ordered by `behind_ns`. waited: how often somebody asked for a
    time that it had not come to."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = self.behind_ns = self.waited = self.moments = 0

    def moment(self) -> int:
        self.moments += 1
        return self.now_ns

    def passed(self, moment: int) -> bool:
        return moment <= self.now_ns - self.behind_ns

    def elapsed_ns(self, first: int, last: int) -> int:
        self.waited += not (self.passed(first) and self.passed(last))
        return super().elapsed_ns(first, last)


@pytest.fixture
def device(disk: Any, monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Whatever makes its stream wait takes 7 ms."""
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    made = Timed()
    monkeypatch.setattr(compute, "stand_in", made)
    waiting = DeviceClock.waiting

    @contextmanager
    def slow(clock: DeviceClock) -> Iterator[None]:
        with waiting(clock):
            made.now_ns += 7 * MS
            yield

    monkeypatch.setattr(DeviceClock, "waiting", slow)
    return made


class Tick(torch.autograd.Function):
    """An identity that takes the device one time forward and another backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: Timed, forward_ns: int, backward_ns: int) -> torch.Tensor:
        ctx.device, ctx.backward_ns = device, backward_ns
        device.now_ns += forward_ns
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.device.now_ns += ctx.backward_ns
        return grads[0], None, None, None


def chain_of(device: Timed) -> Any:
    """Makes a Chain whose blocks take 2 ms forward and 5 ms backward."""

    class Ticking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(Tick.apply(x, device, 2 * MS, 0))
            return Tick.apply(y, device, 0, 5 * MS)  # type: ignore[no-any-return]

    class Made(Chain):
        block: type[nn.Module] = Ticking

    return Made


def planned(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Plans are made for this machine."""
    monkeypatch.setattr(pacing, "measure_device", lambda accelerator, folder: machine)
    monkeypatch.setattr(api, "measure_device", lambda accelerator, folder: machine)


def machine(link_bytes_per_second: float) -> Machine:
    disk = Speed(1e9)
    link = Speed(link_bytes_per_second)
    return Machine(upload=link, offload=link, disk_read=disk, disk_write=disk, update=Speed(1e10))


def train(make: Any, count: int, disk: Path, **options: Any) -> Any:
    model = make()
    model, optimizer = protrain.wrap(model, adamw(model), disk=disk, **options)
    steps(inputs(count, rows=ROWS))(model, optimizer, False)
    return model


def check_times(run: DryRun, found: Sequence[tuple[float, float]], modes: Sequence[str]) -> None:
    """A block's forward takes 2 ms, its backward 5; recomputation what was seen of it, or of a block that was not recomputed the
    part of its forward that ends with the last tensor it saved."""
    parts = run.recomputed_parts()
    assert len(parts) == 8
    for number, (phase, times) in enumerate(zip(run.phases, found, strict=True)):
        want = (0.0, 0.0)
        if phase.block >= 0 and phase.backward:
            assert 0.5 < parts[number] < 0.9
            want = (0.005, 0.002 if modes[phase.block].startswith("checkpoint") else 0.002 * parts[number])
        elif phase.block >= 0:
            want = (0.002, 0.0)
        assert times == pytest.approx(want, abs=1e-6), (phase.block, phase.backward)


@pytest.mark.parametrize("modes", [["keep"] * 8, ["checkpoint"] * 8, ["swap", "checkpoint_swap"] * 4])
def test_times_are_the_devices_without_its_waits(
    modes: list[str], device: Timed, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the thread took, and whatever was waited for, in two passes of each step."""
    planned(monkeypatch, machine(1e12))
    model = chain_of(device)()
    model, optimizer = protrain.wrap(
        model, adamw(model), memory=64 * MIB, host_memory=24 * MIB, disk=fresh_disk, block_modes=modes, accumulate=2
    )
    before = device.now_ns
    for x in inputs(2, rows=ROWS):
        for _ in range(2):
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    session = protrain.session_of(model)
    (_, foreseen), *_ = session.decider.dry_runs
    assert foreseen is not None
    check_times(foreseen, session.pacer._times.phases, modes)
    assert device.now_ns - before > 2 * 2 * 8 * 7 * MS  # there were waits
    assert not session.clock.device.running  # later steps record nothing
    forecast = protrain.status(model).plan.forecast
    assert forecast is not None
    assert forecast.compute_seconds == pytest.approx(2 * 8 * 0.007, rel=1e-3)
    protrain.unwrap(model)


@pytest.mark.parametrize(("link", "mode"), [(1e12, "swap"), (1e7, "checkpoint")])
def test_modes_follow_from_the_link(
    link: float, mode: str, device: Timed, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that do not fit swap over a fast link, and are recomputed where it is slow; in plain torch's bits."""
    planned(monkeypatch, machine(link))
    make = chain_of(device)
    loop = steps([x.clone() for x in inputs(5, rows=2 * ROWS)])
    got = run(make, loop, memory=TIGHT, host_memory=96 * MIB, disk=fresh_disk)
    status = assert_equal(got, run(make, loop), TIGHT)
    assert set(status.plan.block_modes) - {"keep"} == {mode}
    assert status.plan.step_seconds > 0
    assert status.plan.n_host > 0


@pytest.mark.parametrize("link", [1e12, 1e7])
@pytest.mark.parametrize("host", [24 * MIB, 96 * MIB])
def test_a_plan_without_training_is_that_of_training(
    link: float, host: int, device: Timed, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rehearsal's times are the device's, and homes lie in the same of the three tiers."""
    planned(monkeypatch, machine(link))
    model = chain_of(device)()
    values, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    batch = inputs(3, rows=ROWS)[0]  # of the storage that all three share, as in training
    plan = protrain.plan(model, batch, memory=TIGHT, host_memory=host, optimizer=adamw(model))
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    found = protrain.profile(model, batch, memory=TIGHT, optimizer=adamw(model))
    check_times(found.run, found.times.phases, ["keep"] * 8)
    trained = train(chain_of(device), 3, fresh_disk, memory=TIGHT, host_memory=host)
    session = protrain.session_of(trained)
    timed = replace(machine(link), step_update_bytes_per_second=DEVICE_UPDATE_BYTES_PER_SECOND)
    best = session.decider.decide(session.pacer._run, times=found.times, machine=timed).plan
    assert plan == best
    assert plan.step_seconds == pytest.approx(best.step_seconds, rel=1e-6)
    assert protrain.status(trained).plan.step_seconds < 1.03 * plan.step_seconds  # it moves no homes for less than 2 %
    protrain.unwrap(trained)
    assert (plan.host_bytes <= host, plan.ring_bytes) == (True, 0)
    assert plan.n_host > 0


def test_what_cannot_be_planned_for_over_a_device(device: Timed) -> None:
    model, batch = Chain(), inputs(1)[0]
    with pytest.raises(protrain.PlanError, match="RMSprop; over a device it can be Adam, AdamW or SGD yet"):
        protrain.plan(model, batch, memory=TIGHT, optimizer=torch.optim.RMSprop(model.parameters()))
    with pytest.raises(protrain.BudgetError, match=r"host_memory of 1\.00 MiB does not hold what gradients"):
        protrain.plan(model, batch, memory=TIGHT, host_memory=MIB)
    with pytest.raises(protrain.BudgetError, match=r"^memory: a step of this batch needs"):
        protrain.plan(model, batch, memory=MIB, host_memory=96 * MIB)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused_in_one_line() -> None:
    model, batch = Chain(), inputs(1)[0]
    for wanted, message in (
        ("cuda", "device is 'cuda'; torch .* finds no GPU here"),
        ("mps", "device is 'mps'; give 'cpu' or 'cuda'"),
        ("gpu", "device is 'gpu'; give 'cpu' or 'cuda'"),
    ):
        with pytest.raises(protrain.PlanError, match=message) as caught:
            protrain.plan(model, batch, memory=TIGHT, device=wanted)
        assert "\n" not in str(caught.value)
    optimizer = adamw(model)
    with torch.device("cuda"), pytest.raises(protrain.PlanError, match=r"torch's default device cannot be used: |finds no GPU"):
        protrain.wrap(model, optimizer, memory=TIGHT)


def test_a_plan_that_is_given_is_not_profiled(device: Timed, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, machine(1e12))
    make = chain_of(device)
    first = train(make, 3, fresh_disk, memory=TIGHT, host_memory=96 * MIB)
    plan = protrain.status(first).plan
    protrain.unwrap(first)
    again = train(make, 3, fresh_disk, memory=TIGHT, host_memory=96 * MIB, plan=plan)
    session = protrain.session_of(again)
    assert session.pacer._times is None
    assert not session.clock.device.running
    assert protrain.status(again).plan.block_modes == plan.block_modes
    protrain.unwrap(again)


class Slow:
    """Makes the forward of a block take the device so much longer, from a step on."""

    def __init__(self, device: Timed, block: nn.Module) -> None:
        self.device, self.ns = device, 0
        block.register_forward_pre_hook(self.pass_time)

    def pass_time(self, *_: Any) -> None:
        self.device.now_ns += self.ns


@pytest.mark.parametrize("behind", [0, 2], ids=["in time", "two steps behind"])
def test_steps_that_depart_on_a_device_are_planned_again(
    behind: int, device: Timed, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the device's own time, whatever the thread took; seen in later steps, with no wait but for the one that is profiled."""
    planned(monkeypatch, machine(1e12))
    model = chain_of(device)()
    slow = Slow(device, model.blocks[3])
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 * MIB, host_memory=96 * MIB, disk=fresh_disk)
    pacer = protrain.session_of(model).pacer
    (x,) = inputs(1, rows=ROWS)

    def step() -> float:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        return protrain.status(model).plan.step_seconds

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first = [step() for _ in range(pacing.PROFILED_STEPS)][-1]
        assert first == pytest.approx(8 * 0.007, rel=0.05)  # everything is in memory
        device.waited, device.behind_ns = 0, behind * round(first * 1e9)
        slow.ns = round(first * 1e9)
        before = device.moments
        for _ in range(pacing.DEPARTED_STEPS - 1):
            step()
        assert device.moments - before == 2 * (pacing.DEPARTED_STEPS - 1)
        slow.ns = 0
        device.behind_ns = 0
        step()  # as planned: those before it do not count
        assert step() == first
        device.behind_ns = behind * 2 * round(first * 1e9)
        slow.ns = round(first * 1e9)
        taken = [step() for _ in range(pacing.DEPARTED_STEPS + behind)]
        assert taken == [first] * len(taken)
        assert not pacer._clock.device.running
        assert device.waited == 0
        assert step() == first  # in which the last of them is seen
        assert pacer._clock.device.running
        assert device.waited == 0
        again = step()
        assert again == pytest.approx(2 * first, rel=0.05)
        assert not pacer._clock.device.running
        slow.ns = 0
        device.behind_ns = 0
        for _ in range(2 * pacing.DEPARTED_STEPS + 1):
            assert step() == again
        assert step() == pytest.approx(first, rel=0.05)
    assert [str(w.message).split(";")[-1] for w in said if "planned again" in str(w.message)] == [
        " they were measured and planned again"
    ]
    assert "took 0.112 s where 0.056 s were planned" in str(said[-1].message)
    assert said[-1].filename == __file__
    protrain.unwrap(model)


def test_a_link_that_cannot_be_measured_keeps_the_plan_by_memory(
    device: Timed, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(accelerator: Any, folder: str) -> Machine:
        raise protrain.DeviceError("cuMemAlloc_v2 failed")

    monkeypatch.setattr(pacing, "measure_device", failing)
    model = train(chain_of(device), 4, fresh_disk, memory=TIGHT, host_memory=96 * MIB)
    plan = protrain.status(model).plan
    assert plan.step_seconds == 0.0
    assert "swap" not in plan.block_modes
    protrain.unwrap(model)


def test_the_machine_of_a_device(disk: Path) -> None:
    """The core's host device is one: its copies are measured, each way and both, and once."""
    device = StandIn()
    found = calibration.measure_device(device, str(disk))
    assert found.upload.bytes_per_second > 0
    assert found.offload.bytes_per_second > 0
    assert 1.0 <= found.link_overlap <= 2.0
    assert found.disk_read.bytes_per_second > 0
    assert found.update.bytes_per_second > 0
    assert found.disk_read.drag_seconds_per_byte == found.disk_write.drag_seconds_per_byte == 0.0
    assert calibration.measure_device(device, str(disk)) == found


def test_the_ring_is_the_hosts(device: Timed, fresh_disk: Path) -> None:
    """No budget of the device has it, and what is told of the device's memory neither."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, host_memory=96 * MIB, disk=fresh_disk)
    samples = protrain.session_of(model).watch_memory()
    steps(inputs(1))(model, optimizer, False)
    session = protrain.session_of(model)
    found, plan = session.homes.arrangement, protrain.status(model).plan
    assert found.host_ring_bytes > 0
    assert plan.ring_bytes == 0
    assert plan.peak_bytes >= plan.persistent_bytes + plan.slot_bytes == found.static_bytes
    assert samples.last is not None
    assert {sample.ring_bytes for sample in samples.last.samples} == {0}
    assert all(sample.parameter_bytes + sample.slot_bytes <= sample.live_bytes for sample in samples.last.samples)
    protrain.unwrap(model)
