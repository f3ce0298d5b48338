"""Activations that leave memory: every mode bit for bit plain torch, and memory and disk space come back whatever a loop does."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import twins
from fixed import with_fixed_times
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import adamw, assert_equal, run

import protrain
from protrain import _core
from protrain.api import session_of
from protrain.planner.planning import plan_from_profile
from protrain.profiling.timeline import requests
from protrain.runtime.activations import over_nothing

N_BLOCKS = 4
AMPLE = 1 << 30
MODES = ["keep", "swap", "checkpoint", "checkpoint_swap"]
MIXES = [*([mode] * N_BLOCKS for mode in MODES), MODES, ["checkpoint_swap", "swap", "swap", "keep"]]
IDS = [*MODES, "mixed", "swap_last_kept"]


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


class Block(nn.Module):
    """Saves its input twice, views, a mask, a transposed weight, and small tensors beside large ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.rise, self.fall = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.ones(()))
        self.inner: Callable[..., Any] | None = None  # called on what lies between
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, scale: dict[str, torch.Tensor]) -> torch.Tensor:
        y = torch.tanh(self.rise(self.norm(x)))
        y = self.inner(y) if self.inner else y * y.view(y.shape)
        return x + self.drop(self.fall(y)) * self.gain + (x * scale["by"]) ** 2 * 1e-2


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(N_BLOCKS))
        self.head = nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 256 * width).view(256, width))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        scale = {"by": self.scale[: x.shape[-2]]}
        for layer in self.layers:
            x = layer(x, scale)
        return SimpleNamespace(loss=(self.head(x) ** 2).mean(), hidden=x)


def inputs(count: int, length: int = 256) -> list[torch.Tensor]:
    """[8, length, 64], a block's input of 512 KiB at full length."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, length, 64, generator=generator) for _ in range(count)]


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def wrap(modes: list[str], make: Callable[[], nn.Module] = Net, **options: Any) -> tuple[Any, Any]:
    model = make()
    return protrain.wrap(model, adamw(model), **{"memory": AMPLE, "block_modes": modes, **options})


def levels(engine: _core.Engine) -> tuple[int, int, int]:
    """(live bytes, bytes on disk for activations, bytes that only the stash holds) when nothing is given up any more.

    What is given up while it is written goes when that has ended, however long the disk takes.
    """
    gc.collect()
    end = time.monotonic() + 60
    while True:
        stats = engine.stats()
        found = stats["live_bytes"], stats["stash_disk_bytes"], stats["stash_memory_bytes"]
        if found[1:] == (0, 0) or time.monotonic() > end:
            return found
        time.sleep(0.01)


def on_disk(modes: list[str], make: Callable[[], nn.Module] = Net) -> dict[str, Any]:
    """Options of wrap by which every chunk comes from disk."""
    model = make()
    plan = protrain.plan(model, inputs(1)[0], memory=AMPLE, optimizer=adamw(model))
    return {"memory": AMPLE, "plan": dataclasses.replace(plan, n_persist=0, block_modes=tuple(modes))}


def fit(count: int) -> Callable[..., list[Any]]:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for number, x in enumerate(inputs(count)):
            loss = model(x[:, : 256 >> number % 2]).loss
            loss.backward()
            figures.append(loss.item())
            step(optimizer)
        return figures

    return loop


def both(loop: Callable[..., list[Any]], modes: list[str], make: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    got = run(make, loop, **{"memory": AMPLE, "block_modes": modes, **options})
    return assert_equal(got, run(make, loop), AMPLE)


@pytest.mark.parametrize("modes", MIXES, ids=IDS)
def test_modes_are_exact(modes: list[str]) -> None:
    status = both(fit(4), modes)
    assert list(status.plan.block_modes) == modes
    assert (status.disk_write_bytes > 0) == any(mode.endswith("swap") for mode in modes)


@pytest.mark.together
@pytest.mark.parametrize("modes", MIXES, ids=IDS)
def test_short_records_go_and_come_together(modes: list[str]) -> None:
    def loop(model: Any, optimizer: Any, plain: bool) -> Any:
        found = fit(4)(model, optimizer, plain)
        if plain or modes.count("swap") < N_BLOCKS:
            return found
        events = [event for event in protrain.status(model).timeline().events if event.name.startswith("activations")]
        writes, reads = ([event for event in events if event.lane == lane] for lane in ("write", "read"))
        assert writes
        for moved in (writes, reads):
            assert len(requests(moved)) <= max(len(moved) / 2, 1)
            assert sum(event.bytes for event in requests(moved)) == sum(event.bytes for event in moved)
        return found

    status = both(loop, modes)
    assert list(status.plan.block_modes) == modes


@pytest.mark.parametrize("modes", MIXES, ids=IDS)
def test_modes_are_exact_with_parameters_on_disk(modes: list[str]) -> None:
    def loop(model: Any, optimizer: Any, plain: bool) -> Any:
        found = fit(4)(model, optimizer, plain)
        if not plain:  # every byte that was read had been written, and was checked
            stats = session_of(model).engine.stats()
            assert stats["disk_read_bytes"] > 0
            assert stats["disk_checksum_ns"] > 0
            assert stats["disk_unwritten_bytes"] == 0
        return found

    status = assert_equal(run(Net, loop, **on_disk(modes)), run(Net, loop), AMPLE)
    assert status.plan.n_persist == 0
    assert list(status.plan.block_modes) == modes


def test_swap_trains_where_keeping_does_not_fit() -> None:
    """Forward is slowed rather than the budget passed."""
    model = Net()
    found = with_fixed_times(protrain.profile(model, inputs(1)[0], memory=AMPLE, optimizer=adamw(model)))
    swap, keep = (plan_from_profile(found, AMPLE, modes=[mode] * N_BLOCKS) for mode in ("swap", "keep"))
    budget = swap.peak_bytes * 9 // 8
    assert budget < keep.peak_bytes

    def loop(model: Any, optimizer: Any, plain: bool) -> Any:
        losses = fit(3)(model, optimizer, plain)
        if not plain:
            events = protrain.status(model).timeline().events
            for lane in ("write", "read"):
                moved = [event for event in events if event.lane == lane and event.name.startswith("activations block ")]
                assert moved
                assert all(event.bytes > 0 for event in moved)
        return losses

    status = assert_equal(run(Net, loop, memory=budget, plan=swap), run(Net, loop), budget)
    assert status.plan.n_swap == N_BLOCKS


class Then(torch.autograd.Function):
    """Calls `what` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: Callable[[], Any]) -> torch.Tensor:
        ctx.what = what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.what()
        return grad, None


class Watched(Block):
    begun: Callable[[], Any] = staticmethod(lambda: None)  # called when its backward begins

    def forward(self, x: torch.Tensor, scale: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = Then.apply(super().forward(x, scale), self.begun)  # type: ignore[no-untyped-call]
        return y


class WatchedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Watched(64) for _ in range(N_BLOCKS))


@pytest.mark.parametrize("frozen", [False, True])
def test_reading_ahead_goes_on_when_a_kept_block_gives_memory_back(frozen: bool) -> None:
    """A block that keeps what it saved asks the stash for nothing."""
    model: Any = WatchedNet()
    model.layers[3].requires_grad_(not frozen)
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 << 20, block_modes=["keep", "keep", "swap", "keep"])
    stats = session_of(model).engine.stats
    held: list[torch.Tensor] = []
    read_bytes: list[int] = []

    def fill(y: torch.Tensor) -> torch.Tensor:
        """What was saved before must leave memory, which is full until the backward of this."""
        now = stats()
        held.append(torch.empty((64 << 20) - now["live_bytes"] + now["stash_memory_bytes"] - (8 << 20), dtype=torch.uint8))
        kept: torch.Tensor = Then.apply(y, give_back)  # type: ignore[no-untyped-call]
        return kept

    def give_back() -> None:
        read_bytes.append(stats()["stash_read_bytes"])
        held.clear()

    def look() -> None:
        for _ in range(1000):
            if stats()["stash_read_bytes"] > read_bytes[0]:
                break
            time.sleep(0.01)
        read_bytes.append(stats()["stash_read_bytes"])

    try:
        for _ in range(2):  # the second is foreseen without the output, which the first let go
            trained(model, optimizer, inputs(1)[0])
        model.layers[3].inner, model.layers[2].begun = fill, look
        trained(model, optimizer, inputs(1)[0])
        before, after = read_bytes
        assert after > before
    finally:
        protrain.unwrap(model)


def test_a_wait_for_what_left_memory_is_counted() -> None:
    """Nothing reads ahead in forward, so what is asked for there comes while the step waits."""
    model, optimizer = wrap(["swap"] * N_BLOCKS, memory=64 << 20)
    try:
        session = session_of(model)
        stats = session.engine.stats

        def leave_and_return(tensor: torch.Tensor) -> torch.Tensor:
            squared, stash = tensor * tensor, session.runner.stash
            saved = stash.pack(torch.ones(1 << 20))
            now = stats()  # of two moments: a record of 1 MiB may leave between them
            rest = torch.empty((64 << 20) - now["live_bytes"] + now["stash_memory_bytes"] - (2 << 20), dtype=torch.uint8)
            assert stats()["stash_memory_bytes"] < 4 << 20
            del rest
            assert torch.equal(stash.unpack(saved), torch.ones(1 << 20))
            return squared

        x = inputs(1)[0]
        trained(model, optimizer, x)
        model.layers[1].inner = leave_and_return
        trained(model, optimizer, x)
        status = protrain.status(model)
        assert 0 < status.wait_seconds < status.step_seconds
        events = status.timeline().events
        assert "activations block 1" in {event.name for event in events if event.lane == "wait"}
        for lane in ("write", "read"):
            moved = [event for event in events if event.lane == lane and event.name == "activations block 1"]
            assert sum(event.bytes for event in moved) >= 4 << 20
    finally:
        protrain.unwrap(model)


def test_a_forward_waits_for_writes_where_memory_presses_and_says_so() -> None:
    """Rather than exceed the budget: what is allocated has room when activations before it are on the disk."""
    model, optimizer = wrap(["swap"] * N_BLOCKS, memory=64 << 20)
    try:
        session = session_of(model)

        def crowd(tensor: torch.Tensor) -> torch.Tensor:
            squared, saved = tensor * tensor, session.runner.stash.pack(torch.ones(1 << 20))
            held = session.engine.stats()
            room = (64 << 20) - held["live_bytes"]
            rest = torch.empty(room + held["stash_memory_bytes"] - (2 << 20), dtype=torch.uint8)
            del rest, saved
            return squared

        x = inputs(1)[0]
        trained(model, optimizer, x)
        model.layers[1].inner = crowd
        waits, status = list[Any](), protrain.status(model)
        while not waits and status.steps < 20:  # on a busy machine a write may have ended before
            trained(model, optimizer, x)
            status = protrain.status(model)
            waits = [event for event in status.timeline().events if event.lane == "wait" and event.name == "memory"]
        assert waits
        assert 0 < status.wait_seconds < status.step_seconds
        assert status.peak_memory_bytes <= 64 << 20
    finally:
        protrain.unwrap(model)


@pytest.mark.parametrize("modes", MIXES, ids=IDS)
def test_backward_twice(modes: list[str]) -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        for x in inputs(2):
            loss = model(x).loss
            loss.backward(retain_graph=True)
            loss.backward()
            step(optimizer)
        return [loss.item()]

    both(loop, modes, accumulate=2)


@pytest.mark.parametrize("modes", MIXES, ids=IDS)
def test_double_backward(modes: list[str]) -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(2):
            x.requires_grad_()
            loss = model(x).loss
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + (slope**2).sum() * 100).backward()
            figures.append(slope.norm().item())
            step(optimizer)
        return figures

    both(loop, modes)


@pytest.mark.parametrize("modes", MIXES, ids=IDS)
@pytest.mark.parametrize("later_first", [False, True])
def test_two_forwards_before_a_backward(modes: list[str], later_first: bool) -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(2):
            losses = [model(x[:, :200]).loss, model(x[:, 100:]).loss]
            for loss in reversed(losses) if later_first else losses:
                loss.backward()
                figures.append(loss.item())
            step(optimizer)
        return figures

    both(loop, modes, accumulate=2)


def trained(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).loss.backward()
    step(optimizer)


class LostError(Exception):
    pass


def _drop_the_graph(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    model(x)


def _fail_in_forward(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    def fail(_tensor: torch.Tensor) -> torch.Tensor:
        raise LostError

    model.layers[2].inner = fail
    with pytest.raises(LostError):
        model(x)
    model.layers[2].inner = None


def _fail_in_backward(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    def fail(_grad: torch.Tensor) -> torch.Tensor:
        raise LostError

    def mark(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(fail)
        return tensor * tensor.view(tensor.shape)

    model.layers[1].inner = mark
    with pytest.raises(LostError):
        model(x).loss.backward()
    model.layers[1].inner = None
    optimizer.zero_grad()


def _backward_of_a_part(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    hidden = model(x).hidden
    hidden[0, 0, 0].backward()
    optimizer.zero_grad()


def _retain_the_graph(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    loss = model(x).loss
    loss.backward(retain_graph=True)
    del loss
    optimizer.zero_grad()


def _differentiate_twice(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).loss, x, create_graph=True)
    (slope**2).sum().backward()
    optimizer.zero_grad()


EVENTS = [
    _drop_the_graph, _fail_in_forward, _fail_in_backward, _backward_of_a_part, _retain_the_graph, _differentiate_twice,
]  # fmt: skip


@pytest.mark.parametrize("modes", MIXES, ids=IDS)
@pytest.mark.parametrize("event", EVENTS)
def test_memory_and_disk_space_come_back(modes: list[str], event: Callable[..., None]) -> None:
    model, optimizer = wrap(modes)
    try:
        x = inputs(1)[0]
        trained(model, optimizer, x)
        engine = session_of(model).engine
        before = levels(engine)
        assert before[1:] == (0, 0)
        event(model, optimizer, x)
        assert levels(engine) == before
        trained(model, optimizer, x)
        assert levels(engine) == before
    finally:
        protrain.unwrap(model)


@pytest.mark.parametrize("event", [_drop_the_graph, _fail_in_forward, _fail_in_backward])
def test_what_is_given_up_leaves_no_trace_in_results(event: Callable[..., None]) -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        first, second, third = inputs(3)
        trained(model, optimizer, first)
        event(model, optimizer, second)
        trained(model, optimizer, third)
        return []

    both(loop, ["swap", "swap", "checkpoint_swap", "swap"])


def test_what_many_operations_save_is_written_once() -> None:
    model, optimizer = wrap(["swap"] * N_BLOCKS)
    try:
        x = inputs(1)[0]
        block_bytes = 8 * 256 * 64 * 4
        stats = session_of(model).engine.stats
        trained(model, optimizer, x)
        before = stats()
        loss = model(x).loss
        records = stats()["stash_record_count"] - before["stash_record_count"]
        put = stats()["stash_put_bytes"] - before["stash_put_bytes"]
        loss.backward()
        # Of a block: its input, the norm's output, tanh's and its square at twice the width, the drop's noise and output, and the
        # input scaled. The scale is a buffer; what is smaller stays.
        assert records == N_BLOCKS * 7
        assert put == N_BLOCKS * 9 * block_bytes
        assert stats()["stash_put_count"] - before["stash_put_count"] > records
    finally:
        protrain.unwrap(model)


def _change_between(tensor: torch.Tensor) -> torch.Tensor:
    squared = tensor * tensor
    tensor.add_(1)
    return squared * squared.sin()


def _change_what_was_saved_last(tensor: torch.Tensor) -> torch.Tensor:
    squared = tensor * tensor
    tensor.add_(1)
    return squared


def _change_through_a_view(tensor: torch.Tensor) -> torch.Tensor:
    raised = tensor.exp()
    raised[:, :1].add_(1)
    return raised


CHANGES = {"between": _change_between, "last": _change_what_was_saved_last, "view": _change_through_a_view}


def _in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.linspace(-1, 1, 64)


class Given(nn.Module):
    """A block that takes a tensor beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.rise(x))
        return y + other if other.layout is torch.strided else torch.mm(other, y.flatten(1)).view(y.shape)


class GivenNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Given() for _ in range(N_BLOCKS))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, other)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:protrain cannot foresee", "ignore:.*[sS]parse:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "make",
    [
        _in_inference_mode,
        lambda: torch.eye(8).roll(1, 0).to_sparse(),
        lambda: torch.eye(8).roll(1, 0).to_sparse_csr(),
        lambda: torch.eye(8).roll(1, 0).to_sparse().requires_grad_(),
    ],
    ids=["inference", "sparse", "sparse_csr", "sparse, trained"],
)
def test_tensors_of_any_kind_are_given_to_blocks(make: Callable[[], torch.Tensor], mode: str) -> None:
    other = make()

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(3):
            loss = model(x, other)
            loss.backward()
            figures.append(loss.item())
            step(optimizer)
        return figures

    both(loop, [mode] * N_BLOCKS, GivenNet)


class Marked(torch.Tensor):
    pass


def test_versions_are_watched_over_no_memory() -> None:
    saved = torch.ones(4).as_subclass(Marked)
    owner = over_nothing(saved)
    assert type(owner) is torch.Tensor
    assert owner.numel() == 0
    saved.add_(1)
    assert owner._version == saved._version == 1
    assert over_nothing(torch.eye(4).to_sparse()) is None


class Changing(nn.Module):
    """A block of one function, after an operation on a parameter."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gain, self.change = nn.Parameter(torch.ones(64)), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(x * self.gain)


class ChangingNet(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Changing(change) for _ in range(N_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")  # the dry run's backward raises as well
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_change_in_place_after_saving_raises(change: str, mode: str) -> None:
    def backward(model: Any) -> None:
        loss = model(inputs(1)[0])
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0 instead"):
            loss.backward()

    make = partial(ChangingNet, CHANGES[change])
    backward(make())
    model, _ = wrap([mode] * N_BLOCKS, make)
    try:
        backward(model)
    finally:
        protrain.unwrap(model)


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")
@pytest.mark.parametrize("mode", MODES)
def test_output_changed_after_it_was_saved_raises(mode: str) -> None:
    """By what follows the block, which a recomputation does not see."""

    class Tail(ChangingNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).mul_(2)
            return x.sum()

    model, _ = wrap([mode] * N_BLOCKS, partial(Tail, torch.tanh))
    try:
        loss = model(inputs(1)[0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    finally:
        protrain.unwrap(model)


def sparse_of(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(x.shape[-1]).to_sparse() * x.detach().mean()


def marked_of(x: torch.Tensor) -> torch.Tensor:
    return (x[0] * 2).as_subclass(Marked)


class OtherKinds(nn.Module):
    """A block that saves a tensor of another kind, and lets others see it."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.make, self.weight = make, nn.Parameter(torch.ones(64, 64))
        self.seen: Callable[[torch.Tensor], None] = lambda _: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.make(x)
        self.seen(made)
        return x + (made @ self.weight).as_subclass(torch.Tensor).sum()


class OtherKindsNet(ChangingNet):
    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList(OtherKinds(make) for _ in range(N_BLOCKS))


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [sparse_of, marked_of])
def test_a_change_of_a_tensor_of_another_kind_raises(make: Callable[[torch.Tensor], torch.Tensor], mode: str) -> None:
    """It has a version counter as all have."""

    def backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
        made: list[torch.Tensor] = []
        model(inputs(1)[0]).backward()
        step(optimizer)
        block = model.layers[1]
        block.seen = made.append
        loss = model(inputs(1)[0])
        block.seen = lambda _: None
        with torch.no_grad():
            made[-1].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    plain = OtherKindsNet(make)
    backward(plain, adamw(plain))
    model, optimizer = wrap([mode] * N_BLOCKS, partial(OtherKindsNet, make))
    try:
        backward(model, optimizer)
    finally:
        protrain.unwrap(model)


def _change_what_was_not_saved(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor + 1).mul_(2).add_(1).tanh_()


def _save_after_the_change(tensor: torch.Tensor) -> torch.Tensor:
    noisy = nn.functional.dropout(tensor, 0.2)
    noisy.add_(1)
    noisy[:, ::2].sub_(2)
    return noisy * noisy.sin()


def _change_a_copy(tensor: torch.Tensor) -> torch.Tensor:
    squared = tensor * tensor
    tensor.clone().add_(1)
    return squared.add_(1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [_change_what_was_not_saved, _save_after_the_change, _change_a_copy])
def test_change_in_place_that_autograd_allows_is_exact(change: Callable[[torch.Tensor], torch.Tensor], mode: str) -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(2):
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward()
            figures.append(loss.item())
            step(optimizer)
        return figures

    both(loop, [mode] * N_BLOCKS, partial(ChangingNet, change), accumulate=2)


def test_input_changed_before_its_recomputation_raises() -> None:
    model, _ = wrap(["checkpoint_swap"] * N_BLOCKS)
    try:
        seen = []
        model.layers[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
        loss = model(inputs(1)[0]).loss
        with torch.no_grad():
            seen[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    finally:
        protrain.unwrap(model)


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")
@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
def test_a_block_that_changed_its_input_where_no_copy_fitted_leaves_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input has the block in its graph: no collector would see that they hold each other."""

    class Changing(Block):
        def forward(self, x: torch.Tensor, scale: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(x.mul_(2), scale)

    def make() -> nn.Module:
        net = Net()
        torch.manual_seed(0)
        net.layers = nn.ModuleList(Changing(64) for _ in range(N_BLOCKS))
        return net

    model, optimizer = wrap([mode] * N_BLOCKS, make)
    session = session_of(model)
    try:
        monkeypatch.setattr(session.runner, "can_copy", lambda _size_bytes: False)
        live = []
        for _ in range(3):
            for habits in session.runner.habits:
                habits.in_place = None
            loss = model(inputs(1)[0]).loss
            with pytest.raises(RuntimeError, match="its input was changed after its forward began"):
                loss.backward()
            del loss
            optimizer.zero_grad()
            live.append(levels(session.engine)[0])
        assert live[2] <= live[1] + (1 << 16)
        loss = model(inputs(1)[0]).loss  # known by now: copied
        loss.backward()
        step(optimizer)
    finally:
        protrain.unwrap(model)


def test_evaluation_stashes_nothing() -> None:
    model, optimizer = wrap(["swap", "checkpoint_swap"] * 2)
    try:
        x = inputs(1)[0]
        trained(model, optimizer, x)
        stats = session_of(model).engine.stats
        before = stats()["stash_put_count"]
        with torch.no_grad():
            model(x)
        model.eval()
        model(x).loss.backward()
        optimizer.zero_grad()
        assert stats()["stash_put_count"] == before
    finally:
        protrain.unwrap(model)


@pytest.mark.parametrize("chunks_on_disk", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_models(family: str, chunks_on_disk: bool, causal_lm: Any, token_batches: Any) -> None:
    make = partial(causal_lm, family)
    batches = token_batches(3, length=256)
    modes = ["swap", "checkpoint_swap", "swap", "keep"]
    options: dict[str, Any] = {"memory": AMPLE, "block_modes": modes}
    if chunks_on_disk:
        model = make()
        batch = {"input_ids": batches[0], "labels": batches[0]}
        plan = protrain.plan(model, batch, memory=AMPLE, optimizer=adamw(model))
        options = {"memory": AMPLE, "plan": dataclasses.replace(plan, n_persist=0, block_modes=tuple(modes))}
    loop = twins.fit(batches)
    status = assert_equal(run(make, loop, **options), run(make, loop), AMPLE)
    assert status.disk_write_bytes > 0


@pytest.mark.parametrize("modes", ["skkk", "skks", "skkc", "sksc", "sskc", "sssk", "cskk"])
def test_small_tensors_that_swap_leaves_are_planned_for(modes: str, causal_lm: Any, token_batches: Any) -> None:
    """Of 64 tokens of 64 numbers most tensors are too small for the stash: the smallest budget has room for them."""
    make, loop = partial(causal_lm, "gpt2", resid_pdrop=0.1, attn_pdrop=0.1), twins.fit(token_batches(2, length=32))
    block_modes = [{"k": "keep", "s": "swap", "c": "checkpoint"}[letter] for letter in modes]
    budget_bytes = 1 << 20
    for least in ("for that", "that works"):  # of the states alone, and with a batch
        with pytest.raises(protrain.BudgetError, match=f"the smallest budget {least} is") as caught:
            run(make, loop, memory=budget_bytes, block_modes=block_modes)
        budget_bytes = caught.value.smallest_bytes
    status = assert_equal(run(make, loop, memory=budget_bytes, block_modes=block_modes), run(make, loop), budget_bytes)
    assert status.peak_memory_bytes <= status.plan.peak_bytes <= budget_bytes


# ---- what swapping cannot do without ----


def _holding(batches: list[torch.Tensor]) -> twins.Loop:
    """A loop that still has the output of the step before when the next forward begins."""

    def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        figures = []
        for ids in batches:
            output = model(input_ids=ids, labels=ids)
            output.loss.backward()
            figures.append(output.loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return figures

    return loop


def _smallest(make: Callable[[], Any], loop: twins.Loop, **options: Any) -> int:
    budget_bytes = 1 << 20
    for _ in ("states", "a batch", "chunks of that budget"):
        try:
            run(make, loop, memory=budget_bytes, **options)
            break
        except protrain.BudgetError as error:
            budget_bytes = error.smallest_bytes
    return budget_bytes


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "max_grad_norm": 1.0}], ids=["plain", "clipped"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_smallest_budget_is_what_swapping_cannot_do_without(
    family: str, options: dict[str, Any], causal_lm: Any, token_batches: Any
) -> None:
    make = partial(causal_lm, family, hidden=128)
    batches = token_batches(8, length=256)
    words = (options["accumulate"], options["max_grad_norm"]) if options else ()
    loop = twins.fit(batches, *words)
    smallest = _smallest(make, loop, **options)
    first = run(make, twins.fit(batches[:2] if options else batches[:1], *words), memory=smallest, **options).status
    assert first is not None
    assert first.peak_memory_bytes <= first.plan.peak_bytes <= smallest
    status = assert_equal(run(make, loop, memory=smallest, **options), run(make, loop), smallest)
    assert set(status.plan.block_modes) == {"swap"}
    assert status.plan.peak_bytes <= smallest, "which has less in it than the first, as the loop holds no output"
    recomputed = _smallest(make, loop, block_modes=["checkpoint"] * 4, **options)
    assert smallest < 0.9 * recomputed
    between = (smallest + recomputed) // 2
    status = assert_equal(run(make, loop, memory=between, **options), run(make, loop), between)
    assert set(status.plan.block_modes) == {"swap"}


def test_gradients_of_several_passes_that_are_clipped_have_room_in_the_smallest_budget(
    causal_lm: Any, token_batches: Any
) -> None:
    """The largest gradient, of the embedding, is more than all that a batch of few tokens holds."""
    make, loop = partial(causal_lm, "gpt2", hidden=128, vocabulary=4096), twins.fit(token_batches(6, length=8), 2, 1.0)
    options: dict[str, Any] = {"accumulate": 2, "max_grad_norm": 1.0}
    smallest = _smallest(make, loop, **options)
    status = assert_equal(run(make, loop, memory=smallest, **options), run(make, loop), smallest)
    assert status.peak_memory_bytes <= status.plan.peak_bytes <= smallest


@pytest.mark.parametrize("optimizer", [twins.adamw, twins.adafactor], ids=["adamw", "adafactor"])
@pytest.mark.parametrize("norm", [None, 1.0], ids=["plain", "clipped"])
def test_gradients_of_one_pass_are_foretold_from_when_they_are_complete(
    optimizer: Any, norm: float | None, causal_lm: Any, token_batches: Any
) -> None:
    """With all states in memory: they had been counted beside the activations too. What a step without a kernel copies counts."""
    make, loop = partial(causal_lm, "gpt2", hidden=128), twins.fit(token_batches(4, batch=4, length=64), 1, norm)
    options: dict[str, Any] = {"memory": AMPLE} | ({"max_grad_norm": norm} if norm else {})
    status = assert_equal(run(make, loop, optimizer, **options), run(make, loop, optimizer), AMPLE)
    assert status.plan.n_persist == status.plan.n_chunks
    assert 0.97 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.05


def test_an_unknown_batch_between_the_passes_of_a_step_swaps_where_its_plan_swaps(causal_lm: Any, token_batches: Any) -> None:
    make = partial(causal_lm, "gpt2", hidden=128)
    first, (other,) = token_batches(2, batch=2, length=256), token_batches(1, batch=4, length=120)
    known = twins.fit(first, 2)
    recomputed = _smallest(make, known, block_modes=["checkpoint"] * 4, accumulate=2)
    budget = (_smallest(make, known, accumulate=2) + recomputed) // 2
    loop = twins.fit([*first, first[0], other], 2)
    status = assert_equal(run(make, loop, memory=budget, accumulate=2), run(make, loop), budget)
    assert set(status.plan.block_modes) == {"swap"}


def test_an_output_that_is_held_into_the_next_step_has_room_in_the_smallest_budget(causal_lm: Any, token_batches: Any) -> None:
    make, loop = partial(causal_lm, "gpt2", vocabulary=2048, attn_pdrop=0.1), _holding(token_batches(4, length=512))
    smallest = _smallest(make, loop)
    status = assert_equal(run(make, loop, memory=smallest), run(make, loop), smallest)
    assert status.peak_memory_bytes <= status.plan.peak_bytes <= smallest


# ---- hooks of others ----


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_.*able:FutureWarning")
def test_checkpointing_by_transformers_is_refused(causal_lm: Any, token_batches: Any) -> None:
    model = causal_lm("gpt2")
    model.gradient_checkpointing_enable()
    model, _ = protrain.wrap(model, adamw(model), memory=AMPLE, block_modes=["swap"] * 4)
    try:
        ids = token_batches(1)[0]
        with pytest.raises(protrain.PlanError, match=r"h\.0 of mode swap .*gradient_checkpointing_disable"):
            twins.loss_of(model, ids)
        model.gradient_checkpointing_disable()
        twins.loss_of(model, ids).backward()
    finally:
        protrain.unwrap(model)


def _pairs(seen: list[Any]) -> Any:
    def pack(tensor: torch.Tensor) -> Any:
        seen.append(tensor.shape)
        return tensor.detach().clone()

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _within(hooks: Any, model: Any, x: torch.Tensor) -> None:
    with hooks:
        model(x)


AROUND: dict[str, Callable[..., Any]] = {
    "hooks": lambda model, x: _within(_pairs([]), model, x),
    "save_on_cpu": lambda model, x: _within(torch.autograd.graph.save_on_cpu(), model, x),
    "checkpoint": lambda model, x: checkpoint(lambda x: model(x).loss, x, use_reentrant=False).backward(),
    "reentrant": lambda model, x: checkpoint(lambda x: model(x).loss, x, use_reentrant=True).backward(),
}


@pytest.mark.parametrize("mode", ["swap", "checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("around", AROUND)
def test_hooks_around_a_block_are_refused(mode: str, around: str) -> None:
    model, _ = wrap(["keep", mode, "keep", "keep"])
    try:
        x = inputs(1)[0].requires_grad_()
        with pytest.raises(protrain.PlanError, match=r"layers\.1 of mode .*gradient_checkpointing_disable") as raised:
            AROUND[around](model, x)
        assert "\n" not in str(raised.value)
    finally:
        protrain.unwrap(model)


@pytest.mark.parametrize("chunks_on_disk", [False, True])
def test_hooks_around_operations_get_all_that_is_saved(chunks_on_disk: bool) -> None:
    seen: list[Any] = []

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(2):
            with _pairs(seen):
                loss = model(x).loss
            loss.backward()
            figures.append(loss.item())
            step(optimizer)
        return figures

    want = run(Net, loop)
    plain = len(seen)
    seen.clear()
    options = on_disk(["keep"] * N_BLOCKS) if chunks_on_disk else {"memory": AMPLE, "block_modes": ["keep"] * N_BLOCKS}
    assert_equal(run(Net, loop, **options), want, AMPLE)
    assert 0 < len(seen) == plain


def _slope(tensor: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: (x.sin() * x).sum())(tensor)


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")  # the dry run recomputes
@pytest.mark.parametrize("modes", [*([mode] * N_BLOCKS for mode in MODES), None], ids=[*MODES, "planned"])
def test_transforms_inside_a_block_want_it_kept(modes: list[str] | None) -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(2):
            loss = model(x)
            loss.backward()
            figures.append(loss.item())
            step(optimizer)
        return figures

    make = partial(ChangingNet, _slope)
    if modes == ["keep"] * N_BLOCKS:
        both(loop, modes, make)
        return
    with pytest.raises(protrain.PlanError, match=r"block layers\.0 of mode .*torch\.func.* block_modes with keep") as raised:
        run(make, loop, memory=AMPLE, block_modes=modes)
    assert "\n" not in str(raised.value)


class Recomputing(nn.Module):
    """A part that its author recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(128, 128)

    def body(self, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.extra(y)) * y

    def forward(self, y: torch.Tensor) -> Any:
        return checkpoint(self.body, y, use_reentrant=False)


@pytest.mark.parametrize("chunks_on_disk", [False, True])
@pytest.mark.parametrize("modes", MIXES, ids=IDS)
def test_user_checkpoint_inside_a_block(modes: list[str], chunks_on_disk: bool) -> None:
    def make() -> Any:
        model = Net()
        for layer in model.layers:
            layer.inner = Recomputing()
        return model

    loop = fit(3)
    options = on_disk(modes, make) if chunks_on_disk else {"memory": AMPLE, "block_modes": modes}
    assert_equal(run(make, loop, **options), run(make, loop), AMPLE)


# ---- the hooks themselves ----


@pytest.fixture
def hooks() -> Any:
    """(SavedTensors that stashes, the model's session): in a pass."""
    model, _ = wrap(["swap"] * N_BLOCKS)
    session = session_of(model)
    session.engine.stash_begin()
    yield session.runner.stash, session
    session.engine.stash_end()
    protrain.unwrap(model)


LARGE = 1 << 16


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(LARGE),
        lambda: torch.randn(300, 400).t(),
        lambda: torch.randn(LARGE)[17:],
        lambda: torch.randn(400, 1, 300).transpose(0, 1),
        lambda: torch.randn(1, LARGE).expand(3, LARGE),
        lambda: torch.randn(LARGE).bfloat16(),
        lambda: torch.randn(LARGE) > 0,
        lambda: torch.arange(LARGE),
        lambda: torch.randn(LARGE, dtype=torch.complex64),
        lambda: torch.randn(LARGE, requires_grad=True),
        lambda: torch.randn(LARGE)[1000],
    ],
)
def test_a_stashed_tensor_comes_back(hooks: Any, make: Callable[[], torch.Tensor]) -> None:
    stash, session = hooks
    session.engine.use_account(True)
    tensor = make()
    want, stride = tensor.detach().clone(), tensor.stride()
    saved = stash.pack(tensor)
    assert saved.stashed
    again = stash.pack(tensor if tensor._base is not None else tensor.detach())  # detached it is no view
    del tensor
    for packed in (saved, again, saved):
        got = stash.unpack(packed)
        assert got.dtype == want.dtype
        assert got.stride() == stride
        assert torch.equal(got, want)
        assert not got.requires_grad
    stats = session.engine.stats()
    assert stats["stash_record_count"] == 1
    assert stats["stash_put_count"] == 2
    del saved, again, got, packed
    assert levels(session.engine)[1:] == (0, 0)


class Strange(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(100),
        lambda: torch.randn(0, 3),
        lambda: torch.randn(LARGE, dtype=torch.complex64).conj(),
        lambda: torch.randn(LARGE, dtype=torch.complex64).conj().imag,
        lambda: torch.eye(400).to_sparse(),
        lambda: torch.empty(LARGE, device="meta"),
        lambda: torch.randn(LARGE).as_subclass(Strange),
        lambda: torch.frombuffer(bytearray(1 << 20), dtype=torch.float32),
    ],
)
def test_what_cannot_be_stashed_is_kept(hooks: Any, make: Callable[[], torch.Tensor]) -> None:
    stash, session = hooks
    session.engine.use_account(True)
    tensor = make()
    saved = stash.pack(tensor)
    assert not saved.stashed
    got = stash.unpack(saved)
    assert type(got) is type(tensor)
    assert got.layout == tensor.layout
    if tensor.device.type != "meta":
        assert torch.equal(got.to_dense(), tensor.to_dense()) if tensor.is_sparse else torch.equal(got, tensor)
    assert session.engine.stats()["stash_put_count"] == 0


def test_buffers_and_parameters_are_not_stashed(hooks: Any) -> None:
    stash, session = hooks
    assert not stash.pack(session.model.scale).stashed
    assert not stash.pack(session.model.head.weight).stashed
    assert not stash.pack(session.model.head.weight.t()).stashed


def test_tensors_outlive_the_engine() -> None:
    model, _ = wrap(["swap"] * N_BLOCKS)
    session = session_of(model)
    session.engine.use_account(True)
    session.engine.stash_begin()
    tensor = torch.randn(LARGE)
    want = tensor.clone()
    saved, asked = session.runner.stash.pack(tensor), session.runner.stash.pack(tensor)
    stash, got = session.runner.stash, session.runner.stash.unpack(asked)
    del tensor
    session.engine.stash_end()
    protrain.unwrap(model)
    assert torch.equal(got, want)
    with pytest.raises(protrain.StepError):
        stash.unpack(saved)
    del saved, asked, got


def test_a_forked_process_leaves_the_stash_alone(hooks: Any) -> None:
    stash, session = hooks
    session.engine.use_account(True)
    saved = stash.pack(torch.ones(LARGE))
    child = os.fork()
    if child == 0:
        try:
            stash.unpack(saved)
        except RuntimeError as error:
            del saved
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(stash.unpack(saved), torch.ones(LARGE))


def test_a_session_is_collected() -> None:
    model, optimizer = wrap(["swap"] * N_BLOCKS)
    trained(model, optimizer, inputs(1)[0])
    seen = weakref.ref(session_of(model))
    protrain.unwrap(model)
    del model, optimizer
    gc.collect()
    assert seen() is None


def test_arguments(hooks: Any) -> None:
    stash, session = hooks
    with pytest.raises(TypeError, match="takes a tensor"):
        stash.pack(5)
    with pytest.raises(TypeError, match="Engine"):
        _core.SavedTensors(5, None, print, 0)
    stash.block = 3
    assert stash.block == 3
    with pytest.raises(TypeError):
        _core.Saved()
    assert session.engine.stats()["goal_bytes"] == 0
