"""The engine by itself: what it holds of gradients, and who drives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from twins import MIB

import protrain
from protrain import _core
from protrain.optim.optimizers import Hyper

ADAM = Hyper(0, 1e-3, 0.0, False, 0.9, 0.999, 1e-8, False, 0.0, 0.0, False, True, False)
UPDATE = 0  # the last gradient of a step
SPILL = 1  # a gradient that is added to those on disk


class Rig:
    """An engine of n_chunks chunks on disk, each of so many parameters of `count` elements."""

    def __init__(self, folder: Path, limit_bytes: int, n_chunks: int, n_each: int, count: int) -> None:
        size = 4 * -(-count // 16) * 16
        chunk_bytes = -(-n_each * size // 4096) * 4096
        params = [(chunk, number * size, count, True, 0) for chunk in range(n_chunks) for number in range(n_each)]
        self.n_params = len(params)
        _core.install_allocator()
        self.engine = _core.Engine(str(folder), limit_bytes, [(chunk_bytes, True)] * n_chunks, params, 1, 2)
        for chunk in range(n_chunks):
            self.engine.to_disk(chunk)
        self.engine.set_slots(list(range(n_chunks)), [chunk_bytes] * n_chunks)
        self.engine.set_ring(1 << 16, 2)
        self.engine.set_hyper(0, ADAM)

    def give(self, gradient: torch.Tensor) -> None:
        """As that of every parameter, for one pass that is not the last."""
        for number in range(self.n_params):
            self.engine.gradient(number, gradient.data_ptr(), gradient, SPILL)
        self.engine.flush()


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.engine.use_account(False)
        rig.engine.close()


def test_gradients_of_many_passes_may_wait(disk: Path, rigs: list[Rig]) -> None:
    """Under a goal nobody waits for the lane as long as memory allows it."""
    rigs.append(Rig(disk, 1 << 30, n_chunks=64, n_each=8, count=16))
    engine = rigs[0].engine
    engine.set_goal(1 << 29)
    gradient = torch.ones(16)
    for _ in range(8):
        rigs[0].give(gradient)
    engine.wait()
    total = torch.empty(16)
    assert engine.spilled(0, total.data_ptr())
    assert total.eq(8).all()


def test_who_only_asks_does_not_drive(disk: Path, rigs: list[Rig]) -> None:
    """The thread that drives the step gets what the lane is done with when it needs memory, whoever looked on meanwhile."""
    rigs.append(Rig(disk, 24 * MIB, n_chunks=1, n_each=1, count=2 * MIB))
    engine = rigs[0].engine
    engine.use_account(True)
    gradient = torch.ones(2 * MIB)
    rigs[0].give(gradient)
    del gradient  # 8 MiB that only the engine holds

    def look_on() -> None:
        assert engine.commits() == 0
        assert engine.has_gradients()
        assert not engine.in_memory(0)
        assert engine.steps(0) == 0

    other = threading.Thread(target=look_on)
    other.start()
    other.join()
    room = 24 * MIB - engine.stats()["live_bytes"]
    assert torch.zeros(room + MIB, dtype=torch.uint8).numel() > room  # with what the gradient had


def test_what_was_read_ahead_in_vain_is_no_step(disk: Path, rigs: list[Rig]) -> None:
    """Values may be written while its reads are still on their way: nobody waits for what they bring."""
    rigs.append(Rig(disk, 1 << 30, n_chunks=1, n_each=1, count=4 * MIB))
    engine, values = rigs[0].engine, torch.ones(4 * MIB)
    engine.set_ring(8 * MIB, 2)
    engine.gradient(0, values.data_ptr(), values, UPDATE)
    engine.wait()
    engine.make_step([], 1.0)
    for _ in range(8):
        engine.read_ahead(True)
        engine.read_ahead(False)
        engine.transfer(0, 0, values.data_ptr(), True)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, address: engine.steps(2),
        lambda engine, address: engine.steps(-1),
        lambda engine, address: engine.steps(1 << 32),
        lambda engine, address: engine.in_memory(2),
        lambda engine, address: engine.region(2),
        lambda engine, address: engine.unuse(2),
        lambda engine, address: engine.spilled(2, address),
        lambda engine, address: engine.transfer_part(0, 0, -1, 1, address, False),
        lambda engine, address: engine.gradient(0, address, None, 7),
        lambda engine, address: engine.set_order([1 << 32]),
        lambda engine, address: engine.set_headroom(-1, 0),
        lambda engine, address: (engine.drop_slots(), engine.set_slots([0], [4096, 4096])),
        lambda engine, address: engine.set_ring(1 << 62, 1 << 15),
        lambda engine, address: engine.make_step([(2, 0)], 1.0),
    ],
)
def test_numbers_that_the_engine_does_not_have_are_refused(
    call: Callable[[_core.Engine, int], object], disk: Path, rigs: list[Rig]
) -> None:
    rigs.append(Rig(disk, 1 << 30, n_chunks=2, n_each=1, count=16))
    with pytest.raises((ValueError, OverflowError)):
        call(rigs[0].engine, torch.empty(16).data_ptr())


@pytest.mark.parametrize(
    ("chunk", "param", "n_groups"),
    [
        ((4096, True), (0, (1 << 64) - 64, 16, True, 0), 1),
        ((4096, True), (0, 0, 1 << 62, True, 0), 1),
        ((1 << 63, True), (0, 0, 16, True, 0), 1),
        ((4096, False), (0, 0, 16, True, 0), 1),
        ((4096, True), (0, 0, 16, True, 0), -1),
    ],
)
def test_a_description_whose_sizes_overflow_is_refused(
    chunk: tuple[int, bool], param: tuple[int, int, int, bool, int], n_groups: int, disk: Path
) -> None:
    with pytest.raises((ValueError, OverflowError)):
        _core.Engine(str(disk), 1 << 30, [chunk], [param], n_groups, 2)


def test_an_engine_closed_by_a_call_within_its_step_says_so(disk: Path, rigs: list[Rig]) -> None:
    rigs.append(Rig(disk, 1 << 30, n_chunks=1, n_each=1, count=16))
    with pytest.raises(RuntimeError, match="closed"):
        rigs[0].engine.make_step([], 1.0, [(rigs[0].engine.close, (), {})])
    rigs.clear()


def test_an_engine_closed_inside_of_a_call_ends_behind_it(disk: Path, rigs: list[Rig]) -> None:
    """By the end of what held a gradient, which the call gives back, or by another thread."""

    class Owner:
        def __del__(self) -> None:
            engine.close()

    engine = Rig(disk, 1 << 30, n_chunks=1, n_each=2, count=16).engine
    gradient = torch.ones(16)
    for number in range(2):
        engine.gradient(number, gradient.data_ptr(), Owner(), SPILL)
    engine.flush()
    engine.wait()
    with pytest.raises(RuntimeError, match="closed"):
        engine.steps(0)


def put_until_it_fails(engine: _core.Engine, began: threading.Event, said: list[str]) -> None:
    """Each record fills the memory for them, and waits for the one before to be on the disk."""
    region = engine.region(0)
    assert region is not None
    records = []
    try:
        while True:
            records.append(engine.put(region.address, 16 * MIB, 0))
            began.set()
    except (RuntimeError, protrain.Error) as error:
        said.append(str(error))


def test_an_engine_closed_while_another_thread_copies_activations(fresh_disk: Path) -> None:
    """The copy that is under way, which waits for the disk, is made to its end; the next one is told."""
    for _ in range(4):
        engine = _core.Engine(
            str(fresh_disk), 1 << 30, [(16 * MIB, True)], [(0, 0, 16, True, 0)], 1, 2, device=_core.Device(-1),
            device_limit_bytes=1 << 30,
        )  # fmt: skip
        engine.to_memory(0, False)
        engine.set_stash_memory(16 * MIB)  # room for one record
        began, said = threading.Event(), list[str]()
        other = threading.Thread(target=put_until_it_fails, args=(engine, began, said))
        other.start()
        began.wait()
        engine.close()
        other.join()
        assert said == ["this model's engine is closed"]
