"""The engine and torch's segments over a CUDA driver, as far as a driver that is none (tests/c/fake_cuda.h) shows it."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import protrain
from protrain import _core
from protrain.device import compute, gpupool
from protrain.device.overhead import Overhead

HERE = Path(__file__).resolve().parent
MIB = 1 << 20


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library, loaded; its machine has one GPU."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so"
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    flags = ["-std=c11", "-O1", "-fPIC", "-shared", "-pthread", f"-I{HERE.parent / 'csrc'}", f"-I{HERE / 'c'}"]
    sources = [str(path) for path in sorted((HERE / "c").glob("fake_*.c")) if "disk" not in path.name]
    base = [str(HERE.parent / "csrc" / "base" / name) for name in ("status.c", "threads.c")]
    subprocess.run([*compiler, *flags, *sources, *base, "-o", str(library), "-ldl"], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.fake_complaint.restype = ctypes.c_char_p
    loaded.fake_reset(ctypes.c_uint64(1), 0)
    loaded.path = str(library)
    return loaded


@pytest.fixture
def malloc() -> Callable[[int], int | None]:
    """What torch's caching allocator calls."""
    function = ctypes.CDLL(_core.__file__).ptn_cuda_malloc
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return lambda size: function(size, 0, None)


@pytest.fixture
def free() -> Callable[[int, int], None]:
    function = ctypes.CDLL(_core.__file__).ptn_cuda_free
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return lambda address, size: function(address, size, 0, None)


def engine_over(driver: Any, folder: Path) -> _core.Engine:
    """One chunk of 1 MiB, with two arrays of state, and 8 MiB of the GPU."""
    params = [(0, 0, 1000, True, 0), (0, 4096, 5000, True, 0)]
    return _core.Engine(
        str(folder), 64 * MIB, [(MIB, True)], params, 1, 2, device=_core.Device(0, driver.path), device_limit_bytes=8 * MIB,
        current_stream=lambda: 0,
    )  # fmt: skip


def test_homes_keep_their_values(driver: Any, fresh_disk: Path) -> None:
    """Whatever the home, and through all of them."""
    engine = engine_over(driver, fresh_disk)
    values, found = torch.randn(5000), torch.empty(5000)
    state = values + 1
    engine.to_memory(0, True)
    engine.transfer(1, 0, values.data_ptr(), True)
    engine.transfer(1, 2, state.data_ptr(), True)
    moves: list[Callable[[], None]] = [
        lambda: engine.to_host(0, True), lambda: engine.to_disk(0), lambda: engine.to_host(0, False),
        lambda: engine.to_memory(0, True), lambda: engine.to_disk(0), lambda: engine.to_memory(0, False),
    ]  # fmt: skip
    for move in moves:
        move()
        engine.transfer(1, 0, found.data_ptr(), False)
        assert torch.equal(found, values)
        engine.transfer(1, 2, found.data_ptr(), False)
        assert torch.equal(found, state)
    assert engine.unlocked_reason() == ""
    base, region = engine.base(0), engine.region(0)
    assert base is not None
    assert region is not None
    assert (base.device, base.dtype, base.numel()) == (torch.device("cuda", 0), torch.float32, MIB // 4)
    assert base.data_ptr() == region.address
    engine.close()
    assert driver.fake_complaint() == b""  # the tensor has its memory still
    del base, region
    assert driver.fake_complaint() == b""


def test_one_budget_for_the_engine_and_torch(
    driver: Any, malloc: Callable[[int], int | None], free: Callable[[int, int], None], fresh_disk: Path
) -> None:
    engine, other = engine_over(driver, fresh_disk), engine_over(driver, fresh_disk)
    engine.use_account(True)
    first = malloc(4 * MIB)
    assert first
    engine.to_memory(0, True)
    assert engine.stats()["device_bytes"] == 3 * MIB
    assert engine.stats()["live_bytes"] == 7 * MIB
    assert malloc(2 * MIB) is None  # torch frees what it keeps, or raises OutOfMemoryError
    second = malloc(MIB)
    assert second
    engine.to_host(0, False)
    with pytest.raises(protrain.BudgetError) as caught:
        engine.set_slots([0], [4 * MIB])
    assert caught.value.budget_bytes == 8 * MIB
    assert engine.stats()["host_bytes"] >= 4 * MIB  # parameters, state, and gradients that wait for their update
    other.use_account(True)
    free(first, 4 * MIB)  # counted where it was taken
    third = malloc(2 * MIB)
    assert third
    assert engine.stats()["live_bytes"] == MIB
    assert engine.stats()["peak_bytes"] == 8 * MIB
    assert other.stats()["live_bytes"] == 2 * MIB
    other.use_account(False)
    fourth = malloc(64 * MIB)  # nobody's
    assert fourth
    engine.close()
    other.close()
    for address, size in ((second, MIB), (third, 2 * MIB), (fourth, 64 * MIB)):
        free(address, size)
    assert driver.fake_complaint() == b""


def test_activations_leave_and_come_back(driver: Any, fresh_disk: Path) -> None:
    """Through the host, and through the disk where their memory on the host goes."""
    engine = engine_over(driver, fresh_disk)
    values, found = torch.randn(5000), torch.empty(5000)
    engine.to_memory(0, False)
    engine.set_stash_memory(3 * MIB)
    assert engine.stats()["host_bytes"] == 3 * MIB
    region = engine.region(0)
    assert region is not None
    for memory in (3 * MIB, 0):
        engine.transfer(1, 0, values.data_ptr(), True)
        record = engine.put(region.address, MIB, 3)
        record.let_go()
        engine.transfer(1, 0, torch.zeros(5000).data_ptr(), True)
        engine.set_stash_memory(memory)  # the largest record fits in any case
        record.bring(region.address)
        record.follow()
        record.want(False)
        engine.transfer(1, 0, found.data_ptr(), False)
        assert torch.equal(found, values)
        while not record.ended:
            pass
        assert record.near
        del record  # nothing of it is in flight: its memory is free at once
    stats = engine.stats()
    assert stats["stash_put_bytes"] == stats["stash_brought_bytes"] == 2 * MIB
    assert stats["stash_written_bytes"] == stats["stash_read_bytes"] == MIB
    assert stats["stash_disk_bytes"] == stats["stash_host_bytes"] == 0
    with pytest.raises(ValueError, match="do not fit the"):
        engine.put(region.address, 2 * MIB, 0)
    record = engine.put(region.address, MIB, 3)
    engine.close()
    with pytest.raises(protrain.StepError, match="not wrapped any more"):
        record.bring(region.address)
    del record, region
    assert driver.fake_complaint() == b""


def test_pools_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one takes a GPU's allocations, what begins is ended, and segments go with their pool."""
    calls: list[tuple[Any, ...]] = []
    made = iter(range(10))

    class Pool:
        def __init__(self, _allocator: Any, use_on_oom: bool) -> None:
            assert use_on_oom  # allocations outside of steps that find no memory may have what is free
            self.id = (0, next(made))

        def __del__(self) -> None:
            calls.append(("gone", self.id[1]))

    def told(name: str) -> Callable[[int, tuple[int, int]], None]:
        return lambda number, pool: calls.append((name, number, pool[1]))

    names = {"begin": "_cuda_beginAllocateToPool", "end": "_cuda_endAllocateToPool", "release": "_cuda_releasePool"}
    bytes_of = {"allocated_bytes": {"all": {"current": 512}}, "active_bytes": {"all": {"current": 512}}}
    entries: dict[str, Any] = {name: told(word) for word, name in names.items()}
    monkeypatch.setattr(gpupool, "_C", SimpleNamespace(**entries, _cuda_memoryStats=lambda _: bytes_of))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda number: calls.append(("wait", number)))
    monkeypatch.setattr(gpupool, "_allocator", lambda: SimpleNamespace(allocator=lambda: None))
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(("empty",)))
    first, second = gpupool.GpuPool(3), gpupool.GpuPool(3)
    first.begin()
    first.begin()
    second.begin()
    first.end()  # it is not its turn
    assert (first.running, second.running) == (False, True)
    second.renew()
    assert second.running
    second.end()
    second.renew()
    assert not second.running
    ended = [("end", 3, 0), ("release", 3, 0), ("begin", 3, 1), ("end", 3, 1), ("release", 3, 1), ("gone", 1), ("empty",)]
    again = [("begin", 3, 2), ("end", 3, 2), ("release", 3, 2), ("gone", 2), ("empty",)]
    assert calls == [("begin", 3, 0), *ended, *again]
    calls.clear()
    second.begin()
    bytes_of["active_bytes"]["all"]["current"] = 1024  # freed, and another stream was recorded on it
    second.end()
    assert calls == [("begin", 3, 3), ("wait", 3), ("end", 3, 3), ("release", 3, 3)]
    calls.clear()

    def fail(_number: int) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    second.begin()
    with pytest.raises(RuntimeError, match="a kernel failed"):
        second.end()
    assert calls == [("begin", 3, 3), ("end", 3, 3), ("release", 3, 3)]


def test_a_full_budget_is_one_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan leaves little, what is left is taken at once, for the stream that computes; small tensors have their room."""
    made: list[int] = []
    stream, refuses, address = [1], [False], [1 << 40]

    def empty(size: int, **_: Any) -> Any:
        if refuses[0]:
            raise torch.OutOfMemoryError
        made.append(size // MIB)
        return SimpleNamespace(data_ptr=lambda: address[0], nbytes=size)

    ordinary = torch.empty
    names = ("_cuda_beginAllocateToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
    entries: dict[str, Any] = dict.fromkeys(names, lambda *_: None)
    told: dict[str, Any] = {kind: {"all": {"current": 0}} for kind in ("active_bytes", "allocated_bytes")}
    entries["_cuda_memoryStats"] = lambda _: told
    monkeypatch.setattr(gpupool, "_C", SimpleNamespace(**entries, _cuda_getCurrentRawStream=lambda _: stream[0]))
    monkeypatch.setattr(gpupool, "_allocator", lambda: SimpleNamespace(allocator=lambda: None))
    pool = SimpleNamespace(id=(0, 1), snapshot=lambda: segments)
    segments: list[dict[str, int]] = []
    monkeypatch.setattr(torch.cuda, "MemPool", lambda _allocator, use_on_oom: pool)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: stats.update(live_bytes=100 * MIB))
    monkeypatch.setattr(torch, "empty", empty)
    cuda = compute.Cuda.__new__(compute.Cuda)
    cuda.number, cuda.pool, cuda.device = 0, gpupool.GpuPool(0), torch.device("cpu")
    cuda.overhead = Overhead(part=32, between_part=4)
    stats = {"limit_bytes": 1000 * MIB, "live_bytes": 100 * MIB}
    engine: Any = SimpleNamespace(stats=lambda: stats)

    def begin_step(room: int, recomputed: int = 800) -> list[int]:
        cuda.pool.begin()
        cuda.make_whole(engine, room * MIB, recomputed * MIB, 8 * MIB)
        cuda.pool.end()
        found = made.copy()
        made.clear()
        return found

    assert begin_step(400) == []  # as much as half of what a step holds: segments as they come
    assert begin_step(399, recomputed=0) == []  # nothing was foreseen
    assert begin_step(399, recomputed=900) == []  # small tensors leave less than it needs
    refuses[0] = True
    assert begin_step(399) == []
    refuses[0] = False
    assert begin_step(399) == []  # it was in vain, and not everything goes back for it in each step
    told["max_split_size"] = 512 * MIB
    assert begin_step(398) == []  # a block that torch is told not to cut
    told["max_split_size"] = -1
    cuda.trim()  # homes move
    stats["live_bytes"] = 300 * MIB  # with what lies free in pieces, which goes first
    assert begin_step(399) == [1000 - 100 - 10 - 24]
    assert begin_step(0) == []
    stream[0] = 2
    assert begin_step(399) == [866]  # the other stream's has gone back
    monkeypatch.setattr(torch, "empty", ordinary)
    output, other = torch.arange(6.0, requires_grad=True) * 2, torch.zeros(3)
    view = output[1:5:2]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    want, elsewhere = view.tolist(), other.data_ptr()
    cuda.pool._range = output.data_ptr(), output.data_ptr() + 1
    before, address_of_output = cuda.pool._whole_stream, output.data_ptr()
    cuda.trim()  # homes move: what the program holds lies elsewhere, and a view of it with it
    assert before == 2
    assert not cuda.pool.is_whole()
    assert output.data_ptr() != address_of_output
    assert view.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    assert view.tolist() == want
    assert other.data_ptr() == elsewhere
    output.sum().backward()  # of the graph nothing has changed
    monkeypatch.setattr(torch, "empty", empty)
    assert begin_step(399) == [866]
    segments.append({"address": address[0], "allocated_size": 512})
    cuda.trim()  # nobody can be told to let go of this: the range stays what tensors are cut from
    assert cuda.pool.is_whole()
    segments[0]["allocated_size"] = 0
    cuda.trim()
    assert not cuda.pool.is_whole()

    class Workspaces(TorchDispatchMode):
        """What cuBLAS takes with the first product of a thread, and keeps."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            stats["live_bytes"] += 32 * MIB * (func is torch.ops.aten.mm.default)
            return func(*args, **(kwargs or {}))

    with Workspaces():
        assert begin_step(300, recomputed=700) == [866 - 64]  # one in forward and one in backward, beside the range


def test_whatever_a_program_keeps_of_a_range_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detached, in an object of its own, as a gradient, or as a view whose base nobody has: all of it lies elsewhere behind a
    trim, and the memory has gone."""

    @dataclass
    class Kept:
        values: list[torch.Tensor]

    cuda = compute.Cuda.__new__(compute.Cuda)
    cuda.number, cuda.pool, cuda.device = 0, gpupool.GpuPool(0), torch.device("cpu")
    monkeypatch.setattr(gpupool.GpuPool, "renew", lambda _: None)
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: waited.append(find().untyped_storage().data_ptr() == begin))
    weight = torch.ones(3, requires_grad=True)
    weight.sum().backward()
    detached = {"logits": Kept([(weight * 2).detach()])}
    biased = nn.functional.linear(torch.ones(2, 2, 3), torch.ones(4, 3), torch.ones(4).requires_grad_())  # a view of a sum
    assert biased._is_view()
    kept: list[Callable[[], Any]] = [lambda: weight.grad, lambda: detached["logits"].values[0], lambda: biased]
    for find in kept:
        want, storage = find().tolist(), find().untyped_storage()
        begin, memory = storage.data_ptr(), StorageWeakRef(storage)
        cuda.pool._range = begin, begin + 1
        del storage
        cuda.trim()
        assert memory.expired()
        assert find().untyped_storage().data_ptr() != begin
        assert find().tolist() == want
    assert waited == [True] * 3  # for the stream that wrote them, before they are read on another
    conjugate = torch.tensor([1 + 2j]).conj()
    begin = conjugate.data_ptr()
    cuda.pool._range = begin, begin + 1
    cuda.trim()  # such views cannot be put elsewhere
    assert conjugate.tolist() == [1 - 2j]
    assert conjugate.data_ptr() == begin


def test_what_was_lifted_is_put_back_where_a_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = compute.Cuda.__new__(compute.Cuda)
    cuda.number, cuda.pool, cuda.device = 0, gpupool.GpuPool(0), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    put: list[Any] = []
    lifted = SimpleNamespace(put=put.append)
    monkeypatch.setattr(compute, "_Lifted", lambda _: lifted)
    kept = torch.ones(3)
    cuda.pool._range = kept.data_ptr(), kept.data_ptr() + 1

    def fail(_pool: Any) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(gpupool.GpuPool, "renew", fail)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        cuda.trim()
    assert put == [cuda.device]
