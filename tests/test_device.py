"""Training over a device: the bits of plain torch, whatever lies on the device, the host and the disk.

There is no GPU here: the core's host device stands for one (standin.py). What only a GPU can show is in tests/gpu.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_bf16
import torch
from nets import TIGHT, Chain, inputs, steps
from standin import Apart, StandIn
from torch import nn
from twins import MIB, Loop, adamw, assert_equal, fit, run

import protrain
from protrain import _core
from protrain.device import compute
from protrain.device.overhead import AMPLE_TIMES, Overhead
from protrain.model import modulestate
from protrain.planner.tiers import place_away
from protrain.runtime import arranging, device_updates, pacing
from protrain.runtime.marks import Marks


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(compute, "stand_in", made)
    monkeypatch.setattr(pacing, "PROFILED_STEPS", 1 << 30)  # plans stay those by memory; those by time: test_device_profile.py
    return made


@pytest.fixture
def apart(device: StandIn) -> Iterator[None]:
    """Operations on tensors of both memories are errors, which costs time."""
    with Apart(device):
        yield


@pytest.fixture
def gpt2(causal_lm: Any) -> Any:
    """GPT-2 of 2.0 M parameters, with dropout."""
    return partial(causal_lm, "gpt2", hidden=192, layers=4, use_cache=True, resid_pdrop=0.1, embd_pdrop=0.1)


#: Budgets of host memory for a Chain: all that does not persist on the host, a part of it, and nearly nothing.
HOST = {"host": 1 << 30, "mixed": 24 * MIB, "disk": 10 * MIB}


def equal(make: Any, loop: Loop, optimizer: Any = adamw, **options: Any) -> protrain.Status:
    """Trained the same over the device as in plain torch, inside both budgets."""
    status = assert_equal(run(make, loop, optimizer, **options), run(make, loop, optimizer), options["memory"])
    assert status.host_bytes == status.plan.host_bytes <= options["host_memory"]
    return status


# ---- the bits ----


@pytest.mark.parametrize("host", HOST)
def test_homes(host: str, device: StandIn) -> None:
    status = equal(Chain, steps(inputs(4 if host == "mixed" else 3)), memory=TIGHT, host_memory=HOST[host])
    plan = status.plan
    on_disk = plan.n_chunks - plan.n_persist - plan.n_host
    assert plan.n_persist > 0
    assert (plan.n_host > 0, on_disk > 0) == {"host": (True, False), "mixed": (True, True), "disk": (False, True)}[host]
    assert (status.disk_read_bytes > 0) == (on_disk > 0)
    assert device.streams > 0


def test_all_on_the_device(device: StandIn) -> None:
    status = equal(Chain, steps(inputs(3)), memory=1 << 30, host_memory=64 * MIB)
    assert status.plan.n_persist == status.plan.n_chunks
    assert status.host_bytes == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_passes_norms_and_dropout(precision: str, device: StandIn, apart: None, gpt2: Any, token_batches: Any) -> None:
    options: dict[str, Any] = {"memory": 17 * MIB, "host_memory": 20 * MIB, "accumulate": 2, "max_grad_norm": 0.5}
    if precision == "fp32":
        status = equal(gpt2, fit(token_batches(6, length=32), 2, 0.5), **options)
    else:
        status = test_bf16.assert_equal(gpt2, test_bf16.fit(token_batches(6, length=32), 2, 0.5), **options)
    assert 0 < status.plan.n_persist + status.plan.n_host < status.plan.n_chunks


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), amsgrad=True, weight_decay=0.01, maximize=True, fused=True)


@pytest.mark.parametrize("optimizer", [sgd, amsgrad])
def test_optimizers(optimizer: Any, device: StandIn) -> None:
    status = equal(Chain, steps(inputs(3)), optimizer, memory=28 * MIB, host_memory=24 * MIB)
    assert 0 < status.plan.n_persist < status.plan.n_chunks


@pytest.mark.parametrize("slice_count", [None, 5000])
def test_bf16_masters_on_the_device(
    slice_count: int | None, device: StandIn, gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widened many parameters at once, and large ones in several slices."""
    if slice_count is not None:
        monkeypatch.setattr(device_updates, "MOST_SLICE_COUNT", slice_count)
    loop = test_bf16.fit(token_batches(3, length=32), clip=0.5)
    status = test_bf16.assert_equal(gpt2, loop, memory=26 * MIB, host_memory=1 << 30, max_grad_norm=0.5)
    assert 0 < status.plan.n_persist < status.plan.n_chunks


def test_recomputed_blocks(device: StandIn) -> None:
    status = equal(Chain, steps(inputs(3)), memory=TIGHT, host_memory=24 * MIB, block_modes=["checkpoint"] * 8)
    assert set(status.plan.block_modes) == {"checkpoint"}


class Counting(nn.Module):
    """A block that counts its forwards in a buffer, and has one that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.full((256,), 0.5))
        self.down = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y: torch.Tensor = torch.tanh(self.down(x)) * self.count * self.scale
        return y


class Counted(Chain):
    block = Counting


def test_buffers_of_recomputed_blocks_are_not_looked_at(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would wait for the device; they are what they were all the same."""
    want = run(Counted, steps(inputs(3)))

    def looked(*_: Any) -> bool:
        raise AssertionError("buffers were compared")

    monkeypatch.setattr(modulestate.torch, "equal", looked)
    got = run(Counted, steps(inputs(3)), memory=ROOMY, host_memory=64 * MIB, block_modes=["checkpoint"] * 8)
    assert_equal(got, want, ROOMY)


# ---- activations ----

#: Modes of a Chain's blocks; what they save has 256 rows here, which is 0.25 MiB and 0.5 MiB a tensor.
MODES = {
    "swap": ["swap"] * 8,
    "checkpoint_swap": ["checkpoint_swap"] * 8,
    "mixed": ["swap", "keep", "checkpoint", "checkpoint_swap"] * 2,
}
ROOMY = TIGHT + 16 * MIB
ROWS = 256


def stash_of(model: Any) -> tuple[Any, _core.Stats]:
    session = protrain.session_of(model)
    return session.runner.device_stash, session.engine.stats()


def at_rest(model: Any) -> _core.Stats:
    """Figures when what nobody needs any more is gone, which lanes see to after their last copy."""
    stash, stats = stash_of(model)
    stash.settle()
    for _ in range(4000):
        if stats["stash_host_bytes"] == stats["stash_disk_bytes"] == 0:
            return stats
        time.sleep(0.005)
        stats = stash_of(model)[1]
    raise AssertionError(f"the stash still has something: {stats}")


def little_pool(monkeypatch: pytest.MonkeyPatch, size_bytes: int = 3 * MIB // 2) -> None:
    """Activations have so little host memory that most of them go on to disk."""

    def placed(found: Any, *of_model: Any) -> Any:
        found = place_away(found, *of_model)
        return replace(found, stash_pool_bytes=min(found.stash_pool_bytes, size_bytes))

    monkeypatch.setattr(arranging, "place_away", placed)


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("pool", ["all", "little"])
def test_blocks_that_swap(modes: str, pool: str, device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    if pool == "little":
        little_pool(monkeypatch)
    found: dict[str, Any] = {}

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = steps([x.clone() for x in inputs(3, rows=ROWS)])(model, optimizer, plain)
        if not plain:
            found["stats"] = at_rest(model)
        return figures

    got = run(Chain, loop, memory=ROOMY, host_memory=64 * MIB, block_modes=MODES[modes])
    status = assert_equal(got, run(Chain, loop), ROOMY)
    stats = found["stats"]
    assert status.plan.block_modes == tuple(MODES[modes])
    assert stats["stash_put_bytes"] > 3 * 2 * ROWS * 256 * 4
    assert 0 < stats["stash_brought_bytes"] <= stats["stash_put_bytes"]
    if pool == "little" and modes == "swap":
        assert stats["stash_written_bytes"] > stats["stash_put_bytes"] // 2
    if pool == "all":
        assert stats["stash_written_bytes"] == 0  # the disk where the host is short, and only there


def test_swapping_in_passes_with_dropout(device: StandIn, apart: None, gpt2: Any, token_batches: Any) -> None:
    options: dict[str, Any] = {"memory": 40 * MIB, "host_memory": 48 * MIB, "accumulate": 2, "max_grad_norm": 0.5}
    modes = ["swap", "checkpoint_swap", "checkpoint", "swap"]
    equal(gpt2, fit(token_batches(4, length=128), 2, 0.5), block_modes=modes, **options)


def test_swapping_in_bf16(device: StandIn, gpt2: Any, token_batches: Any) -> None:
    loop = test_bf16.fit(token_batches(3, length=128), clip=0.5)
    modes = ["swap", "checkpoint_swap"] * 2
    test_bf16.assert_equal(gpt2, loop, memory=48 * MIB, host_memory=1 << 30, max_grad_norm=0.5, block_modes=modes)


def swapping(disk: Path, modes: list[str] | None = None) -> tuple[Any, Any]:
    """A wrapped Chain whose blocks swap, after one step, and its optimizer."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(
        model, adamw(model), memory=64 * MIB, host_memory=64 * MIB, disk=disk, block_modes=modes or ["swap"] * 8
    )
    steps(inputs(1, rows=ROWS))(model, optimizer, False)
    return model, optimizer


@pytest.mark.parametrize("pool", ["all", "little"])
def test_graphs_that_are_kept_and_dropped(pool: str, device: StandIn, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward twice with another forward between them, and a graph that nobody asks."""
    if pool == "little":
        little_pool(monkeypatch)

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures: list[Any] = []
        for number, x in enumerate(inputs(3, rows=ROWS)):
            dropped = model(x)
            del dropped
            loss = model(x)
            loss.backward(retain_graph=True)
            second = model(x + number)
            second.backward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    options: dict[str, Any] = {"memory": 64 * MIB, "host_memory": 64 * MIB, "disk": fresh_disk, "accumulate": 3}
    assert_equal(run(Chain, loop, **options, block_modes=["swap"] * 8), run(Chain, loop), 64 * MIB)


def test_saved_twice_it_leaves_once(device: StandIn, fresh_disk: Path) -> None:
    model, _ = swapping(fresh_disk)
    stash, _ = stash_of(model)
    engine = protrain.session_of(model).engine
    engine.stash_begin()
    before = engine.stats()["stash_record_count"]
    x = torch.randn(512, 256)
    saved = [stash.pack(x), stash.pack(x.t()), stash.pack(x[256:])]
    assert engine.stats()["stash_record_count"] == before + 1
    stash.settle()
    want = x.clone()
    del x
    views = [stash.unpack(one) for one in saved]
    assert torch.equal(views[0], want)
    assert torch.equal(views[1], want.t())
    assert torch.equal(views[2], want[256:])
    assert [view.stride() for view in views] == [(256, 1), (1, 256), (256, 1)]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    del saved, views
    at_rest(model)
    protrain.unwrap(model)


def test_who_counts_changes_apart_has_a_record_apart(device: StandIn, fresh_disk: Path) -> None:
    model, _ = swapping(fresh_disk)
    session = protrain.session_of(model)
    hooks, engine = session.runner.stash, session.engine
    engine.stash_begin()
    before = engine.stats()["stash_record_count"]
    x = torch.randn(512, 256)
    saved = [hooks.pack(x), hooks.pack(x.t())]
    assert engine.stats()["stash_record_count"] == before + 1
    x.data.add_(1)  # counted by nobody
    want = x.clone()
    saved.append(hooks.pack(x.data))
    assert engine.stats()["stash_record_count"] == before + 2
    del x
    assert torch.equal(hooks.unpack(saved[2]), want)
    del saved
    protrain.unwrap(model)


def test_what_somebody_has_is_not_brought(device: StandIn, fresh_disk: Path) -> None:
    model, _ = swapping(fresh_disk)
    stash, stats = stash_of(model)
    x = torch.randn(512, 256)
    saved = stash.pack(x)
    stash.settle()
    assert stash.unpack(saved).data_ptr() == x.data_ptr()
    assert protrain.session_of(model).engine.stats()["stash_brought_bytes"] == stats["stash_brought_bytes"]
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stash.unpack(saved)
    assert stash.pack(torch.zeros(8)) is None  # small
    assert stash.pack(torch.zeros(100, 64, 256)[5]) is None  # of something large that lives on
    assert stash.pack(torch._efficientzerotensor(64 * 256)) is None  # over no memory
    assert stash.pack(torch.empty(64 * 256, device="meta")) is None  # of another device
    protrain.unwrap(model)


def test_activations_of_a_model_that_was_unwrapped(device: StandIn, fresh_disk: Path) -> None:
    model, _ = swapping(fresh_disk)
    loss = model(inputs(1, rows=ROWS)[0]).sum()
    protrain.unwrap(model)
    with pytest.raises(protrain.StepError, match="not wrapped any more"):
        loss.backward()


def test_activations_move_with_their_pool(device: StandIn, fresh_disk: Path) -> None:
    """A graph that is kept while homes move, and the pool with them."""
    model, optimizer = swapping(fresh_disk)
    session = protrain.session_of(model)
    x = torch.randn(512, 256)
    want = x.clone()
    saved = session.runner.device_stash.pack(x)
    del x
    session.homes.rearrange(replace(session.homes.arrangement, stash_pool_bytes=0))
    assert torch.equal(session.runner.device_stash.unpack(saved), want)
    del saved
    steps(inputs(1, rows=ROWS))(model, optimizer, False)
    protrain.unwrap(model)


def test_a_disk_that_does_not_give_activations_back(device: StandIn, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little_pool(monkeypatch, MIB)
    model, optimizer = swapping(fresh_disk)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    loss = model(inputs(1, rows=ROWS)[0]).square().mean()
    with broken_file(fresh_disk), pytest.raises(protrain.DiskError, match=r"activations of block \d"):
        loss.backward()
    del loss
    optimizer.zero_grad()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
    protrain.unwrap(model)


def test_between_steps(device: StandIn, apart: None, fresh_disk: Path) -> None:
    """Values written in place, a forward without gradients, a step that is skipped, a checkpoint, another wrap."""

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures: list[Any] = []
        for number, x in enumerate(inputs(4)):
            loss = model(x)
            loss.backward()
            if number != 2:
                optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.blocks[number].up.weight.mul_(1.01)
                model.head.bias.add_(0.1)
                figures += [loss.item(), model(x).item()]
        if not plain:
            protrain.save(model, optimizer, str(fresh_disk / "saved"))
            protrain.load(model, optimizer, str(fresh_disk / "saved"))
        return figures

    equal(Chain, loop, memory=TIGHT, host_memory=24 * MIB)


def test_unwrapped_it_is_plain_torch(device: StandIn) -> None:
    model, plain = Chain(), Chain()
    before = copy.deepcopy(plain.state_dict())
    protrain.wrap(model, adamw(model), memory=TIGHT, host_memory=24 * MIB)
    view = model.blocks[3].up.weight.detach()
    protrain.unwrap(model)
    assert view.shape == (512, 256)  # over memory that lives as long as the view
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_models_on_meta(device: StandIn) -> None:
    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.normal_(p)

    with torch.device("meta"):
        model = Chain()
    torch.manual_seed(3)
    protrain.wrap(model, adamw(model), memory=TIGHT, host_memory=24 * MIB, param_init_fn=init)
    plain = Chain()
    torch.manual_seed(3)
    for module in plain.modules():
        init(module)
    want = plain.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
    protrain.unwrap(model)


# ---- what goes wrong ----


def test_a_wrong_byte_on_disk_names_its_chunk(device: StandIn, fresh_disk: Path) -> None:
    model = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, host_memory=10 * MIB, disk=fresh_disk)
    (x,) = inputs(1)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    with broken_file(fresh_disk), pytest.raises(protrain.DiskError, match=r"parameters of chunk \d"):
        model(x).backward()
    optimizer.zero_grad()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
    protrain.unwrap(model)


@contextmanager
def broken_file(folder: Path) -> Iterator[None]:
    """All bytes of the store's file in this folder are wrong meanwhile."""
    files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]
    (file,) = (fd for fd in files if os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder)))
    size = os.fstat(file).st_size
    kept = bytearray(size)
    for at in range(0, size, 1 << 20):
        kept[at : at + (1 << 20)] = _read(file, at, min(1 << 20, size - at))
    _write(file, bytes(byte ^ 1 for byte in kept[:4096]) * (size // 4096))
    yield
    _write(file, bytes(kept))


def _path(file: int) -> str:
    return f"/proc/self/fd/{file}"


def _read(file: int, at: int, count: int) -> bytes:
    with open(_path(file), "rb", buffering=0) as opened:
        opened.seek(at)
        return opened.read(count)


def _write(file: int, data: bytes) -> None:
    with open(_path(file), "r+b", buffering=0) as opened:
        opened.write(data)
        os.fsync(opened.fileno())


def test_gradients_have_room_for_three_chunks_where_the_host_has_it(device: StandIn) -> None:
    """One is updated, one waits whole, and beside them come the next one's first: else the update after it begins late."""

    def times_largest(host_memory: int) -> float:
        model = Chain()
        model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, host_memory=host_memory)
        try:
            steps(inputs(1))(model, optimizer, False)
            session, now = protrain.session_of(model), protrain.session_of(model).homes.arrangement
            assert protrain.status(model).host_bytes <= host_memory
        finally:
            protrain.unwrap(model)
        largest = max(size for size, slot in zip(session.layout.sizes, now.slot_of_chunk, strict=True) if slot >= 0)
        return float(now.gradient_memory_bytes / largest)

    assert times_largest(HOST["host"]) == 3
    smallest, found = MIB, 0.0
    while not found:
        try:
            found = times_largest(smallest)
        except protrain.BudgetError as error:
            smallest = error.smallest_bytes
    assert 2 <= found < 2.1


def test_room_for_what_is_lost_between_tensors(device: StandIn) -> None:
    """Before a plan by time there is room for segments as they come, where the budget has it; else for one range."""
    device.overhead = Overhead(between_part=4)
    told: list[tuple[int, int]] = []

    def make_whole(_engine: Any, room_bytes: int, recomputed_bytes: int, _small_bytes: int) -> None:
        told.append((room_bytes, recomputed_bytes))

    device.make_whole = make_whole  # type: ignore[method-assign]

    def step(memory: int) -> protrain.Status:
        model = Chain()
        model, optimizer = protrain.wrap(model, adamw(model), memory=memory, host_memory=1 << 30)
        try:
            steps(inputs(2, rows=2048))(model, optimizer, False)
            return protrain.status(model)
        finally:
            protrain.unwrap(model)

    with pytest.raises(protrain.BudgetError) as refused:
        step(TIGHT)
    smallest = refused.value.smallest_bytes
    status = step(smallest)
    room, recomputed = told[-1]
    between = device.overhead.between(recomputed)
    assert between > MIB
    assert between <= room < AMPLE_TIMES * between
    assert status.peak_memory_bytes <= smallest - between  # nothing is lost here
    step(smallest + 2 * between)
    assert told[-1][1] == recomputed
    assert told[-1][0] >= AMPLE_TIMES * between


def test_a_step_that_the_allocator_refused_is_planned_with_more_room(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until nothing fits any more, which is said with a budget that would do."""
    device.overhead = Overhead(between_part=4)
    refuses = [False]

    class Refused(Chain):
        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            if refuses[0]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x, **options)

    monkeypatch.setattr(Marks, "refused_bytes", property(lambda _: 64 * MIB * refuses[0]))
    model = Refused()
    model, optimizer = protrain.wrap(model, adamw(model), memory=100 * MIB, host_memory=1 << 30)
    session, x = protrain.session_of(model), inputs(1, rows=2048)[0]
    steps([x])(model, optimizer, False)
    one_range = device.overhead.between(session.decider.recomputed_bytes()[0])
    left = [session.homes.arrangement.between_bytes]
    while len(left) < 8:
        refuses[0] = True
        with pytest.raises((torch.OutOfMemoryError, protrain.BudgetError)) as refused:
            model(x)
        if refused.type is protrain.BudgetError:
            break
        with pytest.raises((torch.OutOfMemoryError, protrain.BudgetError)) as refused:
            model(x)  # it learns of the one before, and is refused as well
        if refused.type is protrain.BudgetError:
            break
        left.append(session.homes.arrangement.between_bytes)
    assert left[0] == AMPLE_TIMES * one_range
    assert left[1] > left[0]
    assert refused.type is protrain.BudgetError
    assert refused.value.smallest_bytes > 100 * MIB
    refuses[0] = False
    assert len(steps([x])(model, optimizer, False)) == 1
    protrain.unwrap(model)


def test_no_range_where_steps_tell_what_they_take(device: StandIn) -> None:
    """Of a model that cannot be foreseen for every batch plans are made from what steps took: a range is all that is left."""
    told: list[int] = []
    device.make_whole = lambda _engine, _room, recomputed, _small: told.append(recomputed)  # type: ignore[method-assign]

    class Looking(Chain):
        def forward(self, x: torch.Tensor, *, looks: bool = False, **options: Any) -> torch.Tensor:
            if looks and x.untyped_storage()[3] > 255:  # past torch, where nobody hears it
                return x.sum()
            return super().forward(x, **options)

    model: Any = Looking()
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 * MIB, host_memory=1 << 30)
    steps(inputs(1))(model, optimizer, False)
    with pytest.warns(UserWarning, match="cannot foresee"):
        steps(inputs(1, rows=16), lambda model, x: model(x, looks=True))(model, optimizer, False)
    steps(inputs(1))(model, optimizer, False)
    protrain.unwrap(model)
    assert told[0] > 0
    assert told[1:] == [0, 0]


def test_refusals(device: StandIn) -> None:
    model = Chain()
    with pytest.raises(protrain.BudgetError, match=r"host_memory of 1\.00 MiB") as caught:
        protrain.wrap(model, adamw(model), memory=TIGHT, host_memory=MIB)
    assert caught.value.smallest_bytes > MIB
    with pytest.raises(protrain.BudgetError, match=r"^memory: "):
        protrain.wrap(model, adamw(model), memory=MIB, host_memory=64 * MIB)
    with pytest.raises(protrain.PlanError, match="RMSprop; over a device it can be Adam, AdamW or SGD yet"):
        protrain.wrap(model, torch.optim.RMSprop(model.parameters()), memory=TIGHT)
    wrapped, optimizer = protrain.wrap(model, adamw(model), memory=caught.value.smallest_bytes + TIGHT, host_memory=64 * MIB)
    session = protrain.session_of(wrapped)
    with pytest.raises(BufferError, match=r"Engine\.base"):
        memoryview(session.engine.region(0))  # type: ignore[arg-type]
    with pytest.raises(protrain.BudgetError):
        wrapped(inputs(1, rows=1 << 15)[0])
    wrapped(inputs(1)[0]).backward()
    optimizer.step()
    protrain.unwrap(wrapped)


def test_a_stream_that_cannot_be_asked(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("no stream")

    monkeypatch.setattr(device, "current_stream", lambda: broken)
    model = Chain()
    with pytest.raises(RuntimeError, match="no stream"):
        protrain.wrap(model, adamw(model), memory=TIGHT, host_memory=24 * MIB)


def test_without_a_driver() -> None:
    """On a machine without a GPU that is said in one line; with one there is nothing to say."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(protrain.DeviceError) as caught:
        _core.Device(0)
    assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="a Device is wanted"):
        _core.Engine("/tmp", 1 << 20, [(4096, True)], [(0, 0, 4, True, 0)], 1, 2, device=object())  # type: ignore[arg-type]
