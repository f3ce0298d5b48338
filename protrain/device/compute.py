"""What computes, and where: the CPU in ordinary memory, or an accelerator with memory of its own beside the host's.

The rest of the package asks here what depends on that: tensors over the engine's memory, ways between the device and the host,
random and stream state, what memory is free. Addresses given to the engine go through `on_host` and `on_device`, since the
core cannot tell whose an address is: one of the wrong memory would end the process.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._C import DisableTorchFunction

from .. import _core
from ..base.sizes import KIB, MIB, default_memory_bytes
from ..errors import PlanError
from .gpupool import GpuPool
from .overhead import AMPLE_TIMES, Overhead


class Compute:
    """The CPU in ordinary memory, which is device and host in one.

    device: where torch's tensors are; separate: whether the device has memory beside the host's; backward_depth: how many
    Python frames of a backward pass are around a hook of it; overhead: what is taken of a budget beside tensors.
    """

    device = torch.device("cpu")
    separate = False
    backward_depth = 1
    overhead = Overhead()

    # ---- memory ----

    def default_memory_bytes(self) -> int:
        """The budget where none is given."""
        return default_memory_bytes()

    def engine_options(self, memory_bytes: int, host_bytes: int) -> dict[str, Any]:
        """Arguments of an Engine: its budget, and its device where it has one."""
        return {"limit_bytes": memory_bytes}

    def trim(self) -> None:
        """Memory that is kept for later goes back to the system; between steps."""
        _core.trim(0)

    def make_whole(self, engine: _core.Engine, room_bytes: int, recomputed_bytes: int, small_bytes: int) -> None:
        """A step begins: where its plan leaves little of the budget the allocator takes what is left as one range, from which it
        cuts tensors.

        Args:
            room_bytes: that the plan leaves, beside what it has for memory lost between tensors or together with that.
            recomputed_bytes: that the step would hold at most if all blocks were recomputed.
            small_bytes: of small tensors (DryRun) at once.
        """

    def count(self, engine: _core.Engine, on: bool) -> None:
        """Tensors made where it is computed count against this engine's budget from now on, or against none."""
        engine.use_account(on)

    def counts(self) -> bool:
        """Whether what is made on a GPU counts now; `_core.swap_account` tells of ordinary memory."""
        return False

    def will_compile(self) -> None:
        """Parts of the model are compiled by torch: their first calls here take what choosing kernels takes."""

    def held_bytes(self, engine: _core.Engine) -> int:
        """What is live now of the budget, the engine's own memory among it."""
        return int(engine.stats()["live_bytes"])

    # ---- tensors ----

    def base(self, engine: _core.Engine, chunk: int, dtype: torch.dtype) -> torch.Tensor:
        """Where a chunk's parameters lie, as one flat tensor."""
        region = engine.region(chunk)
        assert region is not None
        return torch.frombuffer(region, dtype=dtype)

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        """Ordinary memory, for the engine to read or write; contiguous without strides."""
        if strides is None:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="cpu")

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in ordinary memory, lying as they do where they are dense; the tensor itself where it is there."""
        return tensor.detach().to(device="cpu")

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values where it is computed."""
        return tensor.to(device=self.device)

    def on_host(self, tensor: torch.Tensor) -> int:
        """The address of a tensor in ordinary memory."""
        assert tensor.device.type == "cpu", f"a tensor in ordinary memory is wanted, this one is on {tensor.device}"
        return tensor.data_ptr()

    def on_device(self, tensor: torch.Tensor) -> int:
        """The address of a tensor where it is computed."""
        assert tensor.device == self.device, f"a tensor on {self.device} is wanted, this one is on {tensor.device}"
        return tensor.data_ptr()

    def used_here(self, tensor: torch.Tensor) -> None:
        """The current stream uses a tensor that another may have been made for."""

    # ---- state ----

    def random_state(self) -> Any:
        """Of all generators that a forward draws from; `set_random_state` puts it back."""
        return torch.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def own_random_state(self) -> torch.Tensor | None:
        """Bytes of the device's own generator, in ordinary memory; None: it draws from the host's."""
        return None

    def set_own_random_state(self, state: torch.Tensor) -> None:
        """Only where there is one."""


class Accelerator(Compute):
    """A device with memory of its own: `core`, as the engine knows it."""

    separate = True
    backward_depth = 0  # autograd has a thread for each device

    def __init__(self, device: torch.device, core: _core.Device) -> None:
        self.device, self.core = device, core

    def cache_bytes(self) -> int:
        """The size of the device's last cache; 0: not known."""
        return 0

    def current_stream(self) -> Callable[[], int] | None:
        """What gives the handle of the stream on which torch orders now."""
        return None

    def moment(self) -> Any:
        """The point of the current stream at which all that is ordered on it so far is done; `elapsed_ns` tells when that was."""
        return _core.now_ns()

    def elapsed_ns(self, first: Any, last: Any) -> int:
        """From one moment to another, which may be before it. Waits until both were."""
        return int(last - first)

    def passed(self, moment: Any) -> bool:
        """Whether the device has come to it; asks, and waits for nothing."""
        return True

    def engine_options(self, memory_bytes: int, host_bytes: int) -> dict[str, Any]:
        return {
            "limit_bytes": host_bytes,
            "device": self.core,
            "device_limit_bytes": memory_bytes,
            "current_stream": self.current_stream(),
        }

    def base(self, engine: _core.Engine, chunk: int, dtype: torch.dtype) -> torch.Tensor:
        found = engine.base(chunk)
        assert found is not None
        return found


#: What the caching allocator may leave unused at the ends of its last segments: it takes 20 MiB for tensors below 10 MiB, 2 MiB
#: for those below one, and for larger ones what they need in steps of 2 MiB.
SEGMENT_ENDS_BYTES = 24 * MIB
#: A step's products run on two threads, that of forward and that of backward, each with a handle of cuBLAS of its own.
BLAS_THREADS = 2
#: What inductor takes a GPU's last cache for where torch does not tell.
UNKNOWN_CACHE_BYTES = 256 * MIB


def workspace_bytes(environment: Mapping[str, str], capability: tuple[int, int], told_bytes: int | None = None) -> int:
    """What torch takes of its caching allocator, and so of the budget, for each pair of a handle of cuBLAS and a stream: it is
    taken with the first product and never given back.

    Args:
        capability: of the GPU, which says how much it is where the environment does not.
        told_bytes: what torch says itself; None where it is too old for that.
    """
    size = told_bytes
    if size is None:
        parts = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
        default = 32 * MIB if capability[0] >= 9 else 8 * MIB + 128 * KIB
        size = sum(int(each) * int(count) * KIB for each, count in parts) if parts else default
    shared = environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    if shared == "1" or (shared != "0" and told_bytes is not None):
        return size
    given = environment.get("CUBLASLT_WORKSPACE_SIZE", "")  # of cuBLASLt, beside the other
    return size + (int(given) if given.isdecimal() else 1024) * KIB


def _cuda_overhead(number: int) -> Overhead:
    with torch.cuda.device(number):
        ask: Callable[[], int] | None = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
        told_bytes = None if ask is None else int(ask())
    workspace = workspace_bytes(os.environ, torch.cuda.get_device_capability(number), told_bytes)
    return Overhead(SEGMENT_ENDS_BYTES + BLAS_THREADS * workspace, part=32, between_part=4)


class _Product(torch.autograd.Function):
    """One forward, on the thread that calls it, and one backward, on the device's; nothing is saved, which hooks would see."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad @ grad


class _Lifted:
    """Tensors that share a storage on the GPU, in ordinary memory until `put`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        with torch.no_grad():
            storage = tensors[0].untyped_storage()
            here = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            self._bytes = here.to(device="cpu", copy=True)
            del here
            self._lay(self._bytes)

    def put(self, device: torch.device) -> None:
        with torch.no_grad():
            self._lay(self._bytes.to(device))

    def _lay(self, flat: torch.Tensor) -> None:
        for tensor in self._tensors:
            over = torch.empty(0, dtype=tensor.dtype, device=flat.device)
            tensor.data = over.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]


class Cuda(Accelerator):
    """A GPU, in the context and on the streams that torch uses there.

    overhead: two workspaces of cuBLAS, on one stream; each further stream that a step runs on takes as many again, which the
    plan does not know. Beside them the ends of segments, and what is lost between tensors.
    """

    _in_vain: tuple[int, int, int] | None = None  # a step's figures for which there was no range, until homes move

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        number = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device("cuda", number), _core.Device(number))
        self.number = number
        self.overhead = _cuda_overhead(number)
        self.pool = GpuPool(number)

    def default_memory_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.number)
        free += torch.cuda.memory_reserved(self.number) - torch.cuda.memory_allocated(self.number)
        return int(max(free - max(free // 8, 256 * MIB), 64 * MIB))

    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.number).L2_cache_size)

    def will_compile(self) -> None:
        """Between two runs of a kernel that is timed inductor writes over the GPU's last cache, from a tensor as large."""
        self.overhead = replace(
            self.overhead, fixed_bytes=self.overhead.fixed_bytes + (self.cache_bytes() or UNKNOWN_CACHE_BYTES)
        )

    def current_stream(self) -> Callable[[], int]:
        return functools.partial(torch._C._cuda_getCurrentRawStream, self.number)  # type: ignore[attr-defined]

    def moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.number))
        return event

    def elapsed_ns(self, first: torch.cuda.Event, last: torch.cuda.Event) -> int:
        first.synchronize()
        last.synchronize()
        return round(first.elapsed_time(last) * 1e6)

    def passed(self, moment: torch.cuda.Event) -> bool:
        return moment.query()

    def trim(self) -> None:
        """One range goes back as a whole: what is held of it, as outputs that the program keeps and gradients that it has not
        dropped, lies elsewhere behind this."""
        super().trim()
        self._in_vain = None
        lifted: list[_Lifted] = []
        with DisableTorchFunction():
            held = self.pool.held_of_range()
            if held:
                torch.cuda.synchronize(self.number)  # they may be another stream's than the one that copies
            try:
                for tensors in held:
                    lifted.append(_Lifted(tensors))
                self.pool.renew()
            finally:
                for one in lifted:
                    one.put(self.device)

    def make_whole(self, engine: _core.Engine, room_bytes: int, recomputed_bytes: int, small_bytes: int) -> None:
        """From segments as they come, each for a tensor that is gone by then, a large one often cannot be cut although enough is
        free: up to nearly half of what a step holds is lost so, of one range a quarter. Small tensors have segments of their own,
        for which room is left."""
        if self.pool.is_whole():
            return
        figures = room_bytes, recomputed_bytes, small_bytes
        ample = not recomputed_bytes or room_bytes >= AMPLE_TIMES * self.overhead.between(recomputed_bytes)
        if (ample or figures == self._in_vain) and not self.pool.is_whole_elsewhere():
            return
        self.trim()  # also what lies free in pieces, as that of gradients that were there when homes moved
        if ample:
            return
        # Workspaces of cuBLAS come with the first product of each thread and stay: one in the range would hold it for good.
        x = torch.ones(32, 32, device=self.device, requires_grad=True)
        torch.autograd.grad(_Product.apply(x), x, torch.ones_like(x))
        stats = engine.stats()
        left_bytes = stats["limit_bytes"] - stats["live_bytes"] - small_bytes * 5 // 4 - SEGMENT_ENDS_BYTES
        if left_bytes >= recomputed_bytes:
            self.pool.make_whole(left_bytes)
        self._in_vain = None if self.pool.is_whole() else figures

    def count(self, engine: _core.Engine, on: bool) -> None:
        if on:
            engine.use_account(True)
            self.pool.begin()
        elif self.counts():
            self.pool.end()
            engine.use_account(False)

    def counts(self) -> bool:
        return self.pool.running

    def held_bytes(self, engine: _core.Engine) -> int:
        """Segments that torch keeps for later are not held: what torch says of them is what it could give out again."""
        stats = torch._C._cuda_memoryStats(self.number)  # torch.cuda's own makes a flat dict of all of it, each time
        kept = int(stats["reserved_bytes"]["all"]["current"]) - int(stats["allocated_bytes"]["all"]["current"])
        return max(super().held_bytes(engine) - kept, int(engine.stats()["device_bytes"]))

    def used_here(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.number))

    def random_state(self) -> Any:
        return torch.get_rng_state(), self.own_random_state()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        self.set_own_random_state(state[1])

    def own_random_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.number)

    def set_own_random_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.number)


#: Set by tests alone: an accelerator that stands for the one of any model, where there is none.
stand_in: Accelerator | None = None


def choose(named: list[tuple[str, torch.nn.Parameter]], device: Any = None) -> Compute:
    """What is to compute a model with these parameters: the GPU that they are on. Where they are on the CPU or on meta it is
    `device`; where that is None too, what torch's default device is (`with torch.device("cuda"):` around wrap).

    Raises:
        PlanError: they are on several devices, on another than `device`, or on one that is not supported; or no GPU is there.
        DeviceError: the GPU's driver cannot be used.
    """
    wanted = None if device is None else _known_device(device)
    if stand_in is not None:
        return stand_in
    place, owner = torch.device("cpu"), ""
    for name, p in named:
        if p.device.type in ("cpu", "meta"):
            continue
        if p.device.type != "cuda":
            raise PlanError(f"model: parameter {name} is on {p.device}; cpu, cuda and meta are supported")
        if owner and p.device != place:
            raise PlanError(f"model: {owner} is on {place} and {name} on {p.device}; one device computes: move the model to it")
        place, owner = p.device, name
    left = next((name for name, p in named if p.device.type == "cpu"), None)
    if owner and left is not None:
        raise PlanError(f"model: {owner} is on {place} and {left} on the CPU; move the model to one of them")
    if owner and wanted is not None and (wanted.type != place.type or wanted.index not in (None, place.index)):
        raise PlanError(f"device is {device!r} and parameter {owner} is on {place}; leave device out, or move the model there")
    if not owner:
        default = _default_device()
        place = wanted or (default if default.type == "cuda" else place)
    if place.type == "cpu":
        return Compute()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (place.index or 0) >= count:
        raise PlanError(f"device is {str(place)!r}; torch {torch.__version__} finds {count or 'no'} GPU{'s' * (count > 1)} here")
    return Cuda(place)


def _default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except (RuntimeError, AssertionError) as error:  # it asks the device for its number
        raise PlanError(f"torch's default device cannot be used: {str(error).partition(chr(10))[0]}") from error


def _known_device(device: Any) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"device is {device!r}; give 'cpu' or 'cuda'") from error
    if found.type not in ("cpu", "cuda"):
        raise PlanError(f"device is {device!r}; give 'cpu' or 'cuda'")
    return found
