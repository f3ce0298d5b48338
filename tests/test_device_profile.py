"""Profiles of a device: what its streams did, apart from what the thread that orders did; and plans by those times.

The device that stands for a GPU has a time of its own here, which goes on where a test says so and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TIGHT, Block, Chain, inputs, steps
from standin import StandIn
from torch import nn
from twins import MIB, adamw, assert_equal, run

import protrain
from protrain import calibration, compute, pacing
from protrain.device_clock import DeviceClock
from protrain.profiles import Machine, Speed

MS = 1_000_000
ROWS = 256  # of a batch: what a block saves is then 2.5 MiB


class Timed(StandIn):
    """A device whose time is `now_ns`."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0

    def moment(self) -> int:
        return self.now_ns


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


def machine(link_bytes_per_second: float) -> Machine:
    disk = Speed(1e9)
    link = Speed(link_bytes_per_second)
    return Machine(upload=link, offload=link, disk_read=disk, disk_write=disk, update=Speed(1e10))


def train(make: Any, count: int, disk: Path, **options: Any) -> Any:
    model = make()
    model, optimizer = protrain.wrap(model, adamw(model), disk=disk, **options)
    steps(inputs(count, rows=ROWS))(model, optimizer, False)
    return model


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
    (_, foreseen), *_ = session.fitter.dry_runs
    assert foreseen is not None
    for phase, times in zip(foreseen.phases, session.pacer._times.phases, strict=True):
        want = (0.0, 0.0) if phase.block < 0 else (0.005, 0.002) if phase.backward else (0.002, 0.0)
        assert times == pytest.approx(want, abs=1e-6), (phase.block, phase.backward)
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
