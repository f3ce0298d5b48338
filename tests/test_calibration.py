"""Calibration: every figure is one, disk and memory come back, what cannot be used is said. No figure is judged by a clock."""

from __future__ import annotations

import errno
import math
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protrain import _core
from protrain.errors import DiskError
from protrain.planner.profiles import Machine, Speed
from protrain.profiling import calibration
from protrain.profiling.calibration import measure_machine

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known yet, and one round is enough."""
    monkeypatch.setattr(calibration, "_known", {})
    monkeypatch.setattr(calibration, "ROUNDS", 1)


@pytest.fixture
def bench(fresh_disk: Path) -> Iterator[_core.MachineBench]:
    made = _core.MachineBench(str(fresh_disk), 4 * MIB, 8 * MIB)
    yield made
    made.close()


def lanes(machine: Machine) -> list[Speed]:
    return [machine.disk_read, machine.disk_write, machine.update]


# ---- the machine ----


def test_every_figure_is_one_and_nothing_is_left(fresh_disk: Path) -> None:
    machine = measure_machine(str(fresh_disk))
    for lane in lanes(machine):
        assert 0 < lane.bytes_per_second < math.inf
        assert 0 < lane.idle_bytes_per_second < math.inf
        assert 0 <= lane.drag_seconds_per_byte < math.inf
    assert machine.update.drag_seconds_per_byte > 0
    assert machine.upload == machine.offload == machine.gather == Speed()  # a machine without these lanes
    assert 1.0 <= machine.disk_overlap <= 2.0
    assert 0 < machine.stash_drag_seconds_per_byte < math.inf
    assert 0 < machine.step_update_bytes_per_second < math.inf
    assert 0 <= machine.request_drag_seconds < 0.01
    assert 0 <= machine.memory_drag_seconds_per_byte <= calibration.MOST_MEMORY_DRAG * machine.stash_drag_seconds_per_byte
    assert os.listdir(fresh_disk) == []


def test_it_is_measured_once_for_a_disk_and_a_number_of_threads(fresh_disk: Path) -> None:
    machine = measure_machine(str(fresh_disk))
    inner = fresh_disk / "inner"
    inner.mkdir()
    assert measure_machine(str(fresh_disk)) is machine
    assert measure_machine(str(inner)) is machine  # the same disk
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert measure_machine(str(fresh_disk)) is not machine


def test_memory_is_little_and_in_no_budget(fresh_disk: Path) -> None:
    _core.install_allocator()
    engine = _core.Engine(str(fresh_disk), 64 * MIB, [], [], 0, 0)
    try:
        engine.use_account(True)
        _core.trim(0)
        live, in_budget = _core.memory_stats()["live_bytes"], engine.stats()["live_bytes"]
        measure_machine(str(fresh_disk))
        stats = _core.memory_stats()
        assert calibration.BUFFER_BYTES < stats["high_water_bytes"] - live <= 40 * MIB
        assert engine.stats()["peak_bytes"] == engine.stats()["live_bytes"] == in_budget
        tensor = torch.ones(MIB)
        assert engine.stats()["live_bytes"] - in_budget >= tensor.nbytes  # the budget is in force again
    finally:
        engine.close()


def test_neither_random_numbers_nor_modes_are_touched(fresh_disk: Path) -> None:
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu"):
            measure_machine(str(fresh_disk))
            assert torch.empty(1).is_meta
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_its_threads_end(fresh_disk: Path) -> None:
    def ours() -> list[str]:
        names = [Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in os.listdir("/proc/self/task")]
        return sorted(name for name in names if name.startswith("ptn-"))

    before = ours()
    measure_machine(str(fresh_disk))
    assert ours() == before


# ---- what cannot be used ----


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_folder_that_is_none(name: str, fresh_disk: Path) -> None:
    measure_machine(str(fresh_disk))  # a disk that is known does not make it one
    (fresh_disk / "file").write_text("")
    with pytest.raises(DiskError) as caught:
        measure_machine(str(fresh_disk / name))
    assert caught.value.errno in (errno.ENOENT, errno.ENOTDIR)
    assert caught.value.filename == str(fresh_disk / name)


def test_a_folder_in_memory(fresh_disk: Path) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no file system in memory here")
    with pytest.raises(DiskError, match="tmpfs"):
        measure_machine(str(shared))


def test_a_disk_without_room_is_an_error_and_not_remembered(fresh_disk: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (calibration.FILE_BYTES // 2, hard))
    try:
        with pytest.raises(DiskError) as caught:
            measure_machine(str(fresh_disk))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.asked_bytes == calibration.FILE_BYTES
    assert os.listdir(fresh_disk) == []
    assert measure_machine(str(fresh_disk)).disk_read.bytes_per_second > 0


# ---- what is concluded ----


def test_expectation_and_measurement_are_joined_by_their_uncertainty(bench: _core.MachineBench) -> None:
    found = calibration._Calibration(bench)
    counts = calibration._Counts(1000, 0, 0, 0, 0, 100, 1000, 1000)  # 100 bytes, 10 ns of a processor for each

    def drag(lost: list[float], alone: list[float], full: bool) -> float:
        lane = calibration._update_lane(bench)
        lane.expected = 3.5
        lane.beside = [calibration._Segment(1.0, counts, counts)] * len(lost)
        lane.lost, found.alone, found.full = [value * 1e-9 * 100 for value in lost], [value * 1e-9 for value in alone], full
        return found._drag(lane) * 1e9

    quiet, loud = [1000.0] * 6, [1000.0, 9000.0] * 3
    assert drag([12.0] * 5, quiet, True) == pytest.approx(12)  # well measured: as measured
    assert drag([12.0] * 5, quiet, False) == pytest.approx(12)
    assert drag([900.0, -900.0, 12.0, 700.0, -800.0], loud, True) == pytest.approx(35, abs=0.1)  # noise: as expected
    assert drag([900.0, -900.0, 12.0, 700.0, -800.0], loud, False) == pytest.approx(0, abs=0.1)  # a free core: nothing
    assert drag([-3.0] * 5, quiet, True) == pytest.approx(10)  # never less than the lane's own time
    assert drag([-3.0] * 5, quiet, False) == 0
    assert drag([500.0] * 5, quiet, True) == pytest.approx(60)  # nor more than six times the lane's own time
    between = drag([14.0, 10.0, 18.0, 12.0, 16.0], quiet, True)
    assert 14 < between < 35
    assert drag([14.0] * 5, [1000.0, 3000.0] * 3, True) > between  # few values that agree by chance


def test_what_a_walk_through_memory_loses_is_counted_beside_what_products_lose(bench: _core.MachineBench) -> None:
    found = calibration._Calibration(bench)
    counts = calibration._Counts(1000, 50, 50, 0, 0, 0, 0, 0)  # 50 bytes read, 50 written

    def drag(walk: list[float], walk_alone: list[float], full: bool) -> float:
        """By ns for each byte; products lose 1 beside reads and 3 beside writes; a checksum takes 1."""
        for lane, lost in ((found.read, [1.0] * len(walk)), (found.write, [3.0] * len(walk)), (found.both, walk)):
            lane.beside = [calibration._Segment(1.0, counts, counts)] * len(walk)
            lane.lost = [value * 1e-9 * lane.moved_bytes(counts) for value in lost]
        found.walk_alone, found.full = [value * 1e-9 for value in walk_alone], full
        return found._memory_drag(1e-9) * 1e9

    quiet, loud = [1000.0] * 6, [1000.0, 9000.0] * 3
    assert drag([7.0] * 5, quiet, True) == pytest.approx(5)
    assert drag([7.0] * 5, quiet, False) == pytest.approx(5)
    assert drag([1.0] * 5, quiet, True) == 0  # nothing is gained by it
    assert drag([99.0] * 5, quiet, True) == pytest.approx(calibration.MOST_MEMORY_DRAG)
    noise = [900.0, -900.0, 12.0, 700.0, -800.0]
    assert drag(noise, loud, True) == pytest.approx(calibration.EXPECTED_MEMORY_DRAG, abs=0.1)
    assert drag(noise, loud, False) == pytest.approx(0, abs=0.1)


def test_what_a_request_costs_follows_from_two_sizes(bench: _core.MachineBench) -> None:
    found = calibration._Calibration(bench)
    found.full = True
    request_ns, byte_ns = 20_000.0, 0.01

    def fill(lane: calibration._Lane, request_bytes: int) -> None:
        n_requests = 64
        size = n_requests * request_bytes
        spent = int(n_requests * request_ns + size * byte_ns)
        counts = calibration._Counts(1, size // 2, size // 2, spent, size, 0, 0, 0)
        lane.beside, lane.idle = [calibration._Segment(1.0, counts, counts)], []

    for lane in (found.read, found.write):
        fill(lane, calibration.REQUEST_BYTES)
    fill(found.small, calibration.SMALL_REQUEST_BYTES)
    assert found._request_seconds() * 1e9 == pytest.approx(request_ns, rel=1e-3)
    of_request = calibration.EXPECTED_REQUEST_DRAG * request_ns / calibration.REQUEST_BYTES  # ns a byte
    request, read, write = found._by_request(Speed(1e9, 1e9, (of_request + 0.08) * 1e-9), Speed(1e9, 1e9, 0.01e-9))
    assert request * 1e9 == pytest.approx(calibration.EXPECTED_REQUEST_DRAG * request_ns, rel=1e-3)
    assert read.drag_seconds_per_byte * 1e9 == pytest.approx(0.08, rel=1e-3)
    assert write.drag_seconds_per_byte == 0  # it was less than its requests'
    found.full = False
    assert found._by_request(read, write) == (0.0, read, write)


# ---- the bench ----


def test_updates_are_computes_own_where_torch_takes_all_cores(bench: _core.MachineBench) -> None:
    cores = len(os.sched_getaffinity(0))
    for threads in {1, cores}:
        torch.set_num_threads(threads)
        assert bench.shares_updates == (threads >= cores)
        update = calibration._Calibration(bench).run().update
        assert (update.drag_seconds_per_byte * update.bytes_per_second == pytest.approx(1)) or threads < cores
        assert update.bytes_per_second > 0


def test_the_bench_runs_one_thing_at_a_time(bench: _core.MachineBench) -> None:
    assert bench.engine == "threads"
    assert bench.first_write_ns > 0
    bench.start_disk(True, False)
    for start in (
        lambda: bench.start_disk(False, True),
        lambda: bench.start_update(1.0),
        bench.update_in_memory,
        bench.update_shared,
        bench.checksums,
    ):
        with pytest.raises(RuntimeError, match="stop"):
            start()
    bench.stop()
    bench.stop()
    with pytest.raises(ValueError, match="at least one"):
        bench.start_disk(False, False)
    before = bench.look()
    bench.start_update(0.0)
    while bench.look()[5] < before[5] + 64 * MIB:
        time.sleep(0.001)
    bench.stop()
    after = bench.look()
    assert after[1:5] == before[1:5]  # the disk stood still
    assert after[5] >= before[5] + 64 * MIB
    assert after[6] > before[6]
    assert after[7] > before[7]
    for update in (bench.update_in_memory, bench.update_shared):
        size, spent = update()
        assert size == 3 * MIB
        assert spent > 0
    size, spent = bench.checksums()
    assert size == 8 * MIB  # each page twice
    assert spent > 0
    bench.close()
    bench.close()
    with pytest.raises(RuntimeError, match="closed"):
        bench.look()


@pytest.mark.parametrize("memory_bytes", [0, 3 * MIB])
def test_the_bench_refuses_sizes(memory_bytes: int, fresh_disk: Path) -> None:
    with pytest.raises(ValueError, match="memory_bytes"):
        _core.MachineBench(str(fresh_disk), memory_bytes, 8 * MIB)
    with pytest.raises(ValueError, match="room for two"):
        _core.MachineBench(str(fresh_disk), 4 * MIB, MIB)
    assert os.listdir(fresh_disk) == []


def test_two_threads_that_ask_at_a_time_get_one_measurement(fresh_disk: Path) -> None:
    found: list[Machine] = []
    threads = [threading.Thread(target=lambda: found.append(measure_machine(str(fresh_disk)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] is found[1]
