"""Loops over a device that differ from a plain one in one thing, against plain torch; as in test_device.py without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from nets import TIGHT, Chain, inputs, steps
from standin import StandIn
from torch import nn
from twins import MIB, adamw, assert_equal, run

import protrain
from protrain import _core
from protrain.device import compute
from protrain.model.placing import Places
from protrain.runtime import pacing


@pytest.fixture(autouse=True)
def device(disk: Any, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    monkeypatch.setattr(compute, "stand_in", made)
    monkeypatch.setattr(pacing, "PROFILED_STEPS", 1 << 30)  # homes stay where they are
    return made


@pytest.mark.parametrize("host", [24 * MIB, 1 << 30])
def test_denormal_numbers_are_flushed_where_the_loop_says_so(host: int) -> None:
    """By the threads that update chunks of the host too, behind backward and after commit, whatever the loop says then."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, plain: bool) -> list[Any]:
        for x in inputs(4):
            torch.set_flush_denormal(True)
            (1e-18 * model(x)).backward()
            optimizer.step()
            torch.set_flush_denormal(False)
            optimizer.zero_grad()
        return []

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # those of a team that is there already flush nothing
    try:
        assert_equal(run(Chain, loop, memory=TIGHT, host_memory=host), run(Chain, loop), TIGHT)
    finally:
        torch.set_num_threads(threads)


class Changing(torch.autograd.Function):
    """Its backward changes what its forward saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return grads[0]


class SavedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x)
        y: torch.Tensor = x.sin()
        y = y + Changing.apply(x)  # which backward comes to first
        return y


class ChangingChain(Chain):
    block = SavedTwice


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_backward_that_changes_what_another_one_needs_is_an_error(wrapped: bool) -> None:
    model: Any = ChangingChain()
    if wrapped:
        options: dict[str, Any] = {"memory": 64 * MIB, "host_memory": 64 * MIB}
        model, _ = protrain.wrap(model, adamw(model), block_modes=["swap"] * 8, **options)
    loss = model(inputs(1, rows=256)[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    if wrapped:
        protrain.unwrap(model)


class Drawing(StandIn):
    """It has a generator of its own, as a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def own_random_state(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_own_random_state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)

    def draw(self) -> torch.Tensor:
        return torch.rand(8, generator=self.generator)


def test_a_run_that_goes_on_draws_on_the_device_what_it_would_have_drawn(
    fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing = Drawing()
    monkeypatch.setattr(compute, "stand_in", drawing)
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, host_memory=24 * MIB)
    drawing.draw()
    protrain.save(model, optimizer, fresh_disk / "saved")
    want = drawing.draw()
    drawing.draw()
    protrain.load(model, optimizer, fresh_disk / "saved")
    assert torch.equal(drawing.draw(), want)
    monkeypatch.setattr(Drawing, "own_random_state", lambda self: torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(protrain.PlanError, match=r"device_random_state has \d+ bytes, that of cpu 16: load it with the torch"):
        protrain.load(model, optimizer, fresh_disk / "saved")
    protrain.unwrap(model)


class Looking(SavedTwice):
    """It notes which kernels it would choose on a GPU."""

    seen: ClassVar[list[tuple[bool, bool, bool]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernels = torch.backends.cudnn
        self.seen.append((kernels.enabled, kernels.benchmark, kernels.deterministic))
        y: torch.Tensor = self.down(x).sin()
        return y


class LookingChain(Chain):
    block = Looking


def test_kernels_that_are_chosen_around_a_forward_alone_recompute_it() -> None:
    model: Any = LookingChain()
    options: dict[str, Any] = {"memory": 64 * MIB, "host_memory": 64 * MIB}
    model, optimizer = protrain.wrap(model, adamw(model), block_modes=["checkpoint"] * 8, **options)
    (x,) = inputs(1)
    model(x).backward()
    optimizer.zero_grad()
    Looking.seen.clear()
    with torch.backends.cudnn.flags(enabled=False, benchmark=True, deterministic=True):
        loss = model(x)
    loss.backward()
    assert Looking.seen == [(False, True, True)] * 16
    assert (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark) == (True, False)
    protrain.unwrap(model)


def test_buffers_that_modules_share_are_shared_when_they_are_back() -> None:
    """On meta here, where everything can go."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    places = Places(model, [])
    table = torch.zeros(3)
    for module in model:
        module.register_buffer("table", table)
        places._moved.append((module, "table", torch.device("meta")))
    places.give_back()
    assert model[0].table is model[1].table
    assert model[0].table.device.type == "meta"


class Noting:
    """An engine, and the most host memory that it had after one of its calls."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self.most_bytes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._engine, name)

        def call(*arguments: Any) -> Any:
            result = method(*arguments)
            self.most_bytes = max(self.most_bytes, self._engine.stats()["host_bytes"])
            return result

        return call


def test_homes_move_within_the_budget_of_the_host() -> None:
    """From an arrangement with activations and three chunks on the host to one with five other chunks there, and back."""
    sessions = []
    for mode, rows in (("swap", 256), ("checkpoint", 2048)):
        model: Any = Chain()
        options: dict[str, Any] = {"memory": 36 * MIB, "host_memory": 40 * MIB, "block_modes": [mode] * 8}
        model, optimizer = protrain.wrap(model, adamw(model), **options)
        steps(inputs(1, rows=rows))(model, optimizer, False)
        sessions.append(protrain.session_of(model))
    one, other = (session.homes.arrangement for session in sessions)
    assert set(one.shadow_of_chunk).isdisjoint(other.shadow_of_chunk)
    assert one.stash_pool_bytes > other.stash_pool_bytes
    for session, wanted in zip(sessions, (other, one), strict=True):
        noting = Noting(session.engine)
        session.homes._engine = noting  # type: ignore[assignment]
        session.homes.rearrange(wanted)
        assert 0 < noting.most_bytes <= 40 * MIB
        protrain.unwrap(session.model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_homes_that_leave_the_device_are_not_held_by_their_updates(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an update has made over a chunk's memory goes when the chunk does, also where the model is given back."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 * MIB, host_memory=1 << 30, precision=precision)
    session = protrain.session_of(model)
    dtype = model.head.weight.dtype
    steps([x.to(dtype) for x in inputs(2)])(model, optimizer, False)
    assert session.homes.arrangement.plan.n_persist == session.homes.arrangement.plan.n_chunks
    seen: list[dict[str, int]] = []
    rearrange = session.homes.rearrange

    def rearranged(arrangement: Any) -> None:
        rearrange(arrangement)
        seen.append(session.engine.stats())

    monkeypatch.setattr(session.homes, "rearrange", rearranged)
    more = steps(inputs(1, rows=4096 if precision == "bf16" else 2048), lambda model, x: model(x.to(dtype)))
    more(model, optimizer, False)
    assert seen[0]["live_bytes"] == seen[0]["device_bytes"] < 8 * MIB
    assert session.homes.arrangement.plan.n_persist < session.homes.arrangement.plan.n_chunks
    more(model, optimizer, False)
    protrain.unwrap(model)
    assert not session.residency.over_homes


def test_what_is_kept_for_later_is_free_for_first_homes(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator keeps what a program gave back, and the driver has no room for homes meanwhile."""
    trimmed: list[int] = []
    monkeypatch.setattr(device, "trim", lambda: trimmed.append(len(made)))
    made: list[int] = []
    base = device.base

    def bound(engine: _core.Engine, chunk: int, dtype: torch.dtype) -> torch.Tensor:
        made.append(chunk)
        return base(engine, chunk, dtype)

    monkeypatch.setattr(device, "base", bound)
    model: Any = Chain()
    model, _ = protrain.wrap(model, adamw(model), memory=TIGHT, host_memory=24 * MIB)
    assert trimmed == [0]
    protrain.unwrap(model)
