"""On a GPU: losses and parameters are plain torch's bit for bit, the budget holds by two measures, streams and long runs.

    python -m pytest tests/gpu

What was seen to hold on a GPU, and when, is in docs/decisions/0013-cuda-from-python.md.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Chain, inputs
from references import Plain, train, values
from torch import nn

import protrain
from protrain.profiling import calibration
from protrain.runtime import pacing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from gpu import driver

# Before cuBLAS begins: results then do not depend on streams. Of the two settings that torch takes for deterministic this one has
# workspaces of 128 KiB; those of the other are 32 MiB, for each thread and each stream, out of budgets that are small here.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

MIB = 1 << 20
MEMORY = 192 * MIB  # of which 36 are left for libraries, and for what is cut badly
STATES = 8  # of a Wide, in chunks' worth: enough that a part does not persist
BLOCKS = 8 + 2 * STATES  # of a Wide, as protrain finds them


@pytest.fixture(autouse=True)
def deterministic(disk: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that give the same bits each time, in fp32 as it is named."""
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    monkeypatch.setattr(pacing, "PROFILED_STEPS", 1 << 30)  # homes stay where they are: the plain loop has the same
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.cuda.empty_cache()


class Wide(Chain):
    """A Chain of 42 M parameters: 670 MiB of parameters, gradients and moments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.widen = nn.ModuleList([nn.Linear(256, 10240, bias=False) for _ in range(STATES)])
        self.narrow = nn.ModuleList([nn.Linear(10240, 256, bias=False) for _ in range(STATES)])

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        for widen, narrow in zip(self.widen, self.narrow, strict=True):
            x = x + narrow(torch.tanh(widen(x)))
        return super().forward(x, **options)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True)


HOMES: dict[str, dict[str, Any]] = {
    "device": {"memory": 4 << 30},
    "host": {"memory": MEMORY, "host_memory": 4 << 30},
    "mixed": {"memory": MEMORY, "host_memory": 300 * MIB},
    "disk": {"memory": MEMORY, "host_memory": 64 * MIB},
}


def wrap(model: nn.Module, on: str = "cuda", **options: Any) -> tuple[Any, Any]:
    """Wrapped over the GPU, from there or from the CPU."""
    if on == "cuda":
        model = model.cuda()
    with torch.device("cuda"):
        return protrain.wrap(model, adamw(list(model.parameters())), **options)


def on_gpu(model: Any) -> set[str]:
    """The names of the parameters whose chunk persists on the GPU."""
    session = protrain.session_of(model)
    return {entry.name for entry in session.layout.entries if session.engine.in_memory(entry.chunk)}


def equal(
    make: Callable[[], nn.Module], batches: list[torch.Tensor], stream: torch.cuda.Stream | None = None, **options: Any
) -> protrain.Status:
    """Trained wrapped and plainly: the same losses and parameters."""
    bf16 = options.get("precision") == "bf16"
    if bf16:
        batches = [x.bfloat16() for x in batches]
    model, optimizer = wrap(make(), on="cpu", **options)
    try:
        losses = train(model, optimizer, batches, stream)
        persistent, found, status = on_gpu(model), values(model), protrain.status(model)
    finally:
        protrain.unwrap(model)
    plain = Plain(make(), adamw, persistent, bf16)
    assert losses == train(plain.model, plain, batches, stream)
    want = values(plain.model)
    assert [name for name in want if found[name] != want[name]] == []
    assert 0 < status.peak_memory_bytes <= options["memory"]
    return status


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("homes", HOMES)
def test_homes(homes: str, precision: str) -> None:
    status = equal(Wide, inputs(5, rows=64), precision=precision, **HOMES[homes])
    plan = status.plan
    on_disk = plan.n_chunks - plan.n_persist - plan.n_host
    assert (plan.n_persist == plan.n_chunks) == (homes == "device")
    assert (on_disk > 0) == (homes in ("mixed", "disk"))


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint", "checkpoint_swap"])
def test_modes(mode: str) -> None:
    status = equal(Wide, inputs(4, rows=256), block_modes=[mode] * BLOCKS, **HOMES["mixed"])
    assert set(status.plan.block_modes) == {mode}


def test_activations_leave_and_come_back() -> None:
    """All that swapping blocks save, through the host and, where that is short, through the disk."""
    for host_memory in (4 << 30, 160 * MIB):
        model, optimizer = wrap(Chain(), on="cpu", memory=512 * MIB, host_memory=host_memory, block_modes=["swap"] * 8)
        try:
            train(model, optimizer, inputs(4, rows=4096))
            stats = protrain.session_of(model).engine.stats()
            assert stats["stash_put_bytes"] > 4 * 8 * 4096 * 256 * 4
            assert stats["stash_brought_bytes"] > stats["stash_put_bytes"] // 2
            assert (stats["stash_written_bytes"] > 0) == (host_memory < 1 << 30)
        finally:
            protrain.unwrap(model)


def test_swapping_takes_less_than_keeping() -> None:
    """By torch's own count of tensors."""
    peaks = {}
    for mode in ("keep", "swap", "checkpoint"):
        model, optimizer = wrap(Chain(), on="cpu", memory=2 << 30, host_memory=4 << 30, block_modes=[mode] * 8)
        try:
            x = inputs(1, rows=1 << 14)
            train(model, optimizer, x)
            torch.cuda.reset_peak_memory_stats()
            train(model, optimizer, x)
            peaks[mode] = torch.cuda.max_memory_allocated()
        finally:
            protrain.unwrap(model)
    assert peaks["swap"] < (peaks["keep"] + peaks["checkpoint"]) / 2


def test_dropout_is_drawn_again() -> None:
    """A recomputed block draws from the GPU's generator what its forward drew."""

    class Dropped(Wide):
        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            return super().forward(nn.functional.dropout(x, 0.2), **options)

    def make() -> nn.Module:
        model = Dropped()
        for block in model.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.2))
        torch.manual_seed(5)
        return model

    equal(make, inputs(4, rows=64), block_modes=["checkpoint"] * BLOCKS, **HOMES["host"])


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint", "checkpoint_swap"])
def test_compiled_blocks(mode: str) -> None:
    """By inductor: kernels of Triton, which both loops compile from the same code."""

    def make() -> nn.Module:
        model = Wide()
        for block in model.blocks:
            block.compile()
        return model

    torch._dynamo.reset()
    timing = torch.cuda.get_device_properties(0).L2_cache_size  # choosing kernels takes as much, the first time
    equal(make, inputs(4, rows=256), block_modes=[mode] * BLOCKS, **{**HOMES["mixed"], "memory": MEMORY + timing})


# ---- streams ----


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint_swap"])
def test_a_stream_that_is_not_the_default(mode: str) -> None:
    equal(Wide, inputs(5, rows=256), torch.cuda.Stream(), block_modes=[mode] * BLOCKS, **HOMES["mixed"])


def test_streams_that_change() -> None:
    """Each step on another one, ordered by the caller as torch asks for. torch keeps for each stream what it had there, so the
    budget has room for as many steps; the plan is that of one."""
    batches, modes = inputs(6, rows=64), ["swap", "keep", "checkpoint", "checkpoint_swap"] * (BLOCKS // 4)

    def run(model: Any, trainer: Any) -> list[float]:
        losses, before = [], torch.cuda.current_stream()
        for x in batches:
            stream = torch.cuda.Stream()
            stream.wait_stream(before)
            losses += train(model, trainer, [x], stream)
            before = stream
        torch.cuda.current_stream().wait_stream(before)
        return losses

    model, optimizer = wrap(Wide(), on="cpu", block_modes=modes, **HOMES["mixed"])
    try:
        train(model, optimizer, batches[:1])
        plan = protrain.status(model).plan
    finally:
        protrain.unwrap(model)
    assert plan.n_persist < plan.n_chunks
    room = (1 + len(batches)) * MEMORY
    model, optimizer = wrap(Wide(), on="cpu", **{**HOMES["mixed"], "memory": room, "plan": plan})
    try:
        losses, persistent = run(model, optimizer), on_gpu(model)
        assert protrain.status(model).plan.n_persist == plan.n_persist
    finally:
        protrain.unwrap(model)
    plain = Plain(Wide(), adamw, persistent)
    assert losses == run(plain.model, plain)


# ---- memory ----


def used_by_process() -> int | None:
    """What the driver says that this process has; None, with a warning, where it does not say, as in many containers."""
    try:
        return driver.process_bytes(torch.cuda.current_device())
    except driver.NotTold as error:
        warnings.warn(f"not checked by NVML: {error}", stacklevel=2)
        return None


def warm_up() -> None:
    """Both threads, forward's and backward's, have what libraries keep for as long as the process lives: workspaces of cuBLAS."""
    model = Chain().cuda()
    model(inputs(1, rows=64)[0].cuda()).backward()
    del model
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("homes", ["host", "disk"])
def test_the_budget_holds(homes: str) -> None:
    """By torch's own count of tensors and the engine's of its memory, and by what the whole GPU has less free."""
    warm_up()
    before = torch.cuda.memory_allocated()
    free_before, process_before = torch.cuda.mem_get_info()[0], used_by_process()
    model, optimizer = wrap(Wide(), on="cpu", **HOMES[homes])
    torch.cuda.reset_peak_memory_stats()
    least_free = free_before
    try:
        for x in inputs(6, rows=256):
            train(model, optimizer, [x])
            least_free = min(least_free, torch.cuda.mem_get_info()[0])
        stats = protrain.session_of(model).engine.stats()
        live = torch.cuda.max_memory_allocated() - before + stats["device_bytes"]
        batch = 2 * 256 * 256 * 4  # and its loss: they are the caller's
        assert live <= MEMORY + batch
        assert stats["peak_bytes"] >= live - batch  # what was there was counted
        slack = 64 * MIB  # kernels that the driver loads meanwhile
        assert stats["device_bytes"] <= free_before - least_free <= MEMORY + slack
        process_after = used_by_process() if process_before is not None else None
        if process_before is not None and process_after is not None:
            assert stats["device_bytes"] <= process_after - process_before <= MEMORY + slack
    finally:
        protrain.unwrap(model)


def test_torch_counts_what_it_always_counts() -> None:
    """memory_stats tells of tensors in the pool too, and the pool's segments are gone after unwrap."""
    warm_up()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    model, optimizer = wrap(Wide(), on="cpu", **HOMES["host"])
    loss = model(inputs(1, rows=64)[0].cuda())
    assert torch.cuda.memory_allocated() > allocated
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del loss
    protrain.unwrap(model)
    del model, optimizer
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() <= reserved


def test_a_batch_that_does_not_fit_leaves_the_model() -> None:
    model, optimizer = wrap(Wide(), on="cpu", **HOMES["host"])
    want = values(model)
    with pytest.raises((protrain.BudgetError, torch.OutOfMemoryError)):
        model(inputs(1, rows=1 << 17)[0].cuda()).backward()
    optimizer.zero_grad()
    assert values(model) == want
    train(model, optimizer, inputs(2, rows=64))
    protrain.unwrap(model)


# ---- where a model comes from, and goes ----


def test_places() -> None:
    """From the GPU back to it, from the CPU back there; buffers go along."""
    for on in ("cuda", "cpu"):
        model = Wide()
        model.register_buffer("table", torch.arange(5))
        model, optimizer = wrap(model, on=on, **HOMES["mixed"])
        assert model.table.device.type == "cuda"
        train(model, optimizer, inputs(1, rows=64))
        protrain.unwrap(model)
        assert {p.device.type for p in model.parameters()} == {on}
        assert model.table.device.type == on


# ---- a long run ----


def test_a_thousand_steps() -> None:
    """In turn over all homes and modes, values going from one wrapped model to the next, beside one plain model."""
    make, batches = Chain, inputs(1000, rows=16)
    state = {name: value.clone() for name, value in make().state_dict().items()}
    modes = ("keep", "swap", "checkpoint", "checkpoint_swap")
    kinds = [(homes, mode) for homes in ("host", "mixed", "disk") for mode in modes]
    for number, begin in enumerate(range(0, 1000, 50)):
        homes, mode = kinds[number % len(kinds)]
        options = {
            **HOMES[homes],
            "memory": 64 * MIB,
            "host_memory": {"host": 1 << 30, "mixed": 24 * MIB, "disk": 10 * MIB}[homes],
        }
        model, plain_model = make(), make()
        model.load_state_dict(state)
        plain_model.load_state_dict(state)
        model, optimizer = wrap(model, on="cpu", block_modes=[mode] * 8, **options)
        losses = train(model, optimizer, batches[begin : begin + 50])
        plain = Plain(plain_model, adamw, on_gpu(model))
        protrain.unwrap(model)
        assert losses == train(plain.model, plain, batches[begin : begin + 50]), f"steps {begin} to {begin + 50}: {homes}, {mode}"
        state = {name: value.detach().cpu().clone() for name, value in plain_model.state_dict().items()}
        assert all(torch.equal(value.cpu(), state[name]) for name, value in model.state_dict().items())


def test_plans_by_time(monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> None:
    """The first two steps are timed on the GPU; the plan foretells later ones, and they are held to the budget.

    How well it does is reported, by `python -m pytest -rP`; a test is no place to judge it, benchmarks/gpu is.
    """
    monkeypatch.setattr(pacing, "PROFILED_STEPS", 2)
    model, optimizer = wrap(Wide(), **HOMES["mixed"])
    train(model, optimizer, inputs(6, rows=256))
    session, status = protrain.session_of(model), protrain.status(model)
    times = session.pacer._times
    assert times is not None
    assert all(compute >= 0 for compute, _ in times.phases)
    assert times.compute_seconds > 0
    assert session.clock.device is not None
    assert not session.clock.device.running
    assert status.plan.forecast is not None
    assert status.plan.step_seconds > times.compute_seconds
    seconds = []
    for x in inputs(4, rows=256, seed=2):
        begin = time.perf_counter()
        train(model, optimizer, [x])  # it ends with a loss that is read
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    assert protrain.status(model).peak_memory_bytes <= MEMORY
    ratio = status.plan.step_seconds / statistics.median(seconds)
    record_property("planned_over_measured_seconds", ratio)
    print(f"planned {status.plan.step_seconds:.4f} s, measured {statistics.median(seconds):.4f} s, {ratio:.3f} of it")
    protrain.unwrap(model)


def test_the_link(disk: Any) -> None:
    """Both lanes carry something, and both at once no less than one."""
    model, _ = wrap(Wide(), **HOMES["mixed"])
    found = calibration.measure_device(protrain.session_of(model).wrapped.compute, str(disk))
    assert min(found.upload.bytes_per_second, found.offload.bytes_per_second) > 1e9
    assert 1.0 <= found.link_overlap <= 2.0
    protrain.unwrap(model)
