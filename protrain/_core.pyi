"""The C core. What each call means stands in the header that its comment names."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from torch import Tensor, UntypedStorage
from typing_extensions import CapsuleType

from .optim.optimizers import Hyper

class Stats(TypedDict):
    """Bytes are bytes, times nanoseconds since the engine was made."""

    wait_ns: int
    update_ns: int
    loaded_bytes: int
    loads: int
    hits: int
    torn_writes: int
    disk_bytes: int
    host_bytes: int
    device_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    disk_read_ns: int
    disk_write_ns: int
    disk_unwritten_bytes: int
    disk_checksum_ns: int
    live_bytes: int
    peak_bytes: int
    refused_bytes: int
    limit_bytes: int
    disk_engine: str
    goal_bytes: int
    stash_put_count: int
    stash_record_count: int
    stash_put_bytes: int
    stash_written_bytes: int
    stash_read_bytes: int
    stash_forwarded_bytes: int
    stash_memory_bytes: int
    stash_disk_bytes: int
    stash_most_disk_bytes: int
    stash_wait_ns: int
    # over a device, where the others of the stash but forwarded and memory are those of csrc/runtime/device_stash.h
    stash_brought_bytes: int
    stash_host_bytes: int

class Held(TypedDict):
    """What the account's live bytes are of: csrc/runtime/engine.h, and the memory of the stash."""

    live_bytes: int
    parameter_bytes: int
    state_bytes: int
    slot_bytes: int
    ring_bytes: int
    gradient_bytes: int
    stash_memory_bytes: int
    yielded_bytes: int  # not among them

class MemoryStats(TypedDict):
    live_bytes: int
    cached_bytes: int
    resident_bytes: int
    high_water_bytes: int
    mapped_count: int

class DiskBench(TypedDict):
    write_seconds: float
    read_seconds: float
    bytes: int
    engine: str

class ForecastResult(TypedDict):
    step_ns: int
    compute_ns: int
    recompute_ns: int
    fixed_ns: int
    drag_ns: int
    update_ns: int
    wait_ns: list[int]
    busy_ns: list[int]
    moved_bytes: list[int]

class PlanResult(TypedDict):
    n_persist: int
    n_host: int
    n_buffer: int
    n_ahead: int
    piece_bytes: int
    n_pieces: int
    slot_bytes_total: int
    ring_bytes: int
    static_bytes: int
    peak_bytes: int
    computed_bytes: int
    smallest_bytes: int
    safest_bytes: int
    stash_bytes: int
    rise_bytes: int
    headroom_bytes: int
    recompute_bytes: int
    pending_bytes: int
    disk_bytes: int
    host_bytes: int
    slot_of_chunk: list[int]
    slot_bytes: list[int]
    modes: list[int]
    forecast: ForecastResult

class Features(TypedDict):
    best: str
    avx2: bool
    avx512: bool
    neon: bool

class DirectStorage(TypedDict):
    library: bool
    version: int
    module: bool
    module_version: str
    reason: str

class Region:
    """Memory of a chunk or a slot: a writable buffer, so that torch.frombuffer makes tensors over it; on a device it is none."""

    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Device:
    """What computes, csrc/device/device.h: the GPU of this number, or with -1 the host as a device, which tests use. library: the
    driver's, "" for the system's own. There as long as the process."""

    @property
    def name(self) -> str: ...
    def __init__(self, number: int, library: str = "") -> None: ...
    # csrc/profile/link.h: bytes each second up and down, each alone, and the overlap of both at once
    def measure_link(self, piece_bytes: int, count: int, /) -> tuple[float, float, float]: ...

class Engine:
    """csrc/runtime/engine.h. Addresses are those of memory that the caller keeps alive during the call: of bf16 for parameters
    and gradients where the engine is for those, else of fp32.

    With a device limit_bytes is of ordinary memory beside it, device_limit_bytes of the device's, which stats then tell of; the
    addresses that `gradient` takes are the device's, all others those of ordinary memory; current_stream is asked for the compute
    stream's handle in each call of the driving thread, None stands for the thread itself.
    """

    def __init__(
        self,
        folder: str,
        limit_bytes: int,
        chunks: list[tuple[int, bool]],
        params: list[tuple[int, int, int, bool, int]],
        n_groups: int,
        n_states: int,
        disk_engine: int = 0,
        bf16: bool = False,
        device: Device | None = None,
        device_limit_bytes: int = 0,
        current_stream: Callable[[], int] | None = None,
    ) -> None: ...
    def close(self) -> None: ...
    # homes and slots
    def in_memory(self, chunk: int, /) -> bool: ...
    def to_memory(self, chunk: int, with_state: bool, /) -> None: ...
    def to_disk(self, chunk: int, /) -> None: ...
    # over a device alone
    def to_host(self, chunk: int, with_shadow: bool, /) -> None: ...
    def set_gradient_memory(self, n_bytes: int, /) -> None: ...
    def set_staging(self, piece_bytes: int, n_pieces: int, /) -> None: ...
    def set_stash_memory(self, n_bytes: int, /) -> None: ...
    def put(self, address: int, n_bytes: int, block: int, /) -> DeviceRecord: ...
    def unlocked_reason(self) -> str: ...
    # flat tensors over the device's memory: where a chunk's parameters lie; an fp32 array of a chunk in memory, not to be used
    # after the chunk has moved
    def base(self, chunk: int, /) -> Tensor | None: ...
    def state(self, chunk: int, array: int, /) -> Tensor | None: ...
    # slots and the ring, single values
    def set_slots(self, slot_of_chunk: list[int], slot_bytes: list[int], /) -> None: ...
    def drop_slots(self) -> None: ...
    def own_slot(self, chunk: int, /) -> None: ...
    def set_ring(self, piece_bytes: int, n_pieces: int, with_grads: bool, /) -> None: ...
    def drop_ring(self) -> None: ...
    def set_pending(self, pending_bytes: int, /) -> None: ...
    def region(self, chunk: int, /) -> Region | None: ...
    def guard(self, chunk: int, storage: UntypedStorage | None, /) -> None: ...
    def transfer(self, param: int, array: int, address: int, write: bool, /) -> None: ...
    def transfer_part(self, param: int, array: int, first: int, count: int, address: int, write: bool, /) -> None: ...
    def begin_fill(self, chunk: int, /) -> None: ...
    def end_fill(self, chunk: int, /) -> None: ...
    def steps(self, param: int, /) -> int: ...
    def set_steps(self, param: int, steps: int, /) -> None: ...
    # residency
    def set_order(self, accesses: list[int], /) -> None: ...
    def seek(self, moment: int, /) -> None: ...
    def demand(self, chunk: int, /) -> bool: ...
    def unuse(self, chunk: int, /) -> None: ...
    def unuse_all(self) -> None: ...
    # gradients and updates
    def set_hyper(self, group: int, hyper: Hyper, /) -> None: ...
    def gradient(self, param: int, address: int, owner: object, use: int, /) -> None: ...
    def spilled(self, param: int, address: int, /) -> bool: ...
    def read_ahead(self, on: bool, /) -> None: ...
    def yield_states(self, on: bool, /) -> None: ...
    def flush(self) -> None: ...
    def update_spilled(self, grad_scale: float, /) -> None: ...
    def wait(self) -> None: ...
    # calls: (function of C, arguments, by name) that come first, in the same call
    def make_step(
        self,
        updates: list[tuple[int, int]],
        grad_scale: float,
        calls: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = ...,
        /,
    ) -> None: ...
    def commits(self) -> int: ...
    # updates that the caller computes, and extents (offset, bytes) of the same file for its state
    def stage(self, param: int, address: int, /) -> None: ...
    def stage_rest(self) -> None: ...
    def reserve(self, n_bytes: int, /) -> tuple[int, int]: ...
    def release(self, offset: int, n_bytes: int, /) -> None: ...
    def move(self, offset: int, address: int, n_bytes: int, write: bool, /) -> None: ...
    def drop(self) -> None: ...
    def has_gradients(self) -> bool: ...
    # memory and figures
    def charge(self, n_bytes: int, /) -> None: ...
    def use_account(self, on: bool, /) -> None: ...
    def stats(self) -> Stats: ...
    def held(self) -> Held: ...
    def mark(self) -> int: ...
    def mark_yielded(self) -> int: ...
    # the stash, csrc/runtime/stash.h
    def set_goal(self, goal_bytes: int, /) -> None: ...
    def set_named(self, named_bytes: int, /) -> None: ...
    def set_growth(self, from_bytes: int, /) -> None: ...
    def set_headroom(self, headroom_bytes: int, recompute_bytes: int, /) -> None: ...
    def stash_begin(self) -> None: ...
    def stash_end(self) -> None: ...
    def stash_go_on(self) -> None: ...
    def stash_near(self, number: int, /) -> None: ...
    def stash_check(self) -> None: ...

class Saved:
    """What SavedTensors.pack gives for a tensor that is no parameter's: kept in memory, or stashed."""

    @property
    def stashed(self) -> bool: ...

class SavedTensors:
    """Saved-tensor hooks, csrc/python/saved_type.c: tensors in blocks of least_bytes or more are stashed; 0: none are.

    What saved_parameter returns for a tensor in memory that lives on is packed as it is, and given to unpack_parameter again;
    None means that it is no parameter on disk. saved_parameter is None where there is none. Over a device stash_tensor is asked
    for plain tensors that lie in no chunk, in the same way; None means that the tensor is kept.
    """

    block: int

    def __init__(
        self,
        engine: Engine,
        saved_parameter: Callable[[Tensor], object] | None,
        unpack_parameter: Callable[[Any], Tensor],
        least_bytes: int,
        stash_tensor: Callable[[Tensor], object] | None = None,
    ) -> None: ...
    def pack(self, tensor: Tensor, /) -> object: ...
    def unpack(self, packed: object, /) -> Tensor: ...
    def order(self, frame: object, /) -> SavedOrder: ...

class SavedOrder:
    """Saved-tensor hooks of one forward of a block that is recomputed, csrc/python/recomputed_type.c; made by SavedTensors.order.

    The frame's `recompute` is called for the first tensor or parameter that backward asks for: it runs the block's forward again
    between `begin_again` and setting `over`, inside of `pack_again`. stop: raised there when all that was saved is back; None: no
    end.
    """

    over: bool
    @property
    def stopped(self) -> bool: ...
    def pack(self, tensor: Tensor, /) -> object: ...
    def unpack(self, packed: object, /) -> Tensor: ...
    def begin_again(self, hooks: SavedTensors, stop: type[BaseException] | None, /) -> None: ...
    def pack_again(self, tensor: Tensor, /) -> object: ...

class DeviceRecord:
    """Memory of a device that the stash has a copy of, csrc/runtime/device_stash.h; made by Engine.put."""

    @property
    def near(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    def bring(self, address: int, /) -> None: ...
    def follow(self) -> None: ...
    def let_go(self) -> None: ...
    def want(self, wanted: bool, /) -> None: ...

class MachineBench:
    """Lanes to run beside compute, csrc/python/machine_bench.c and csrc/profile/measure.h: one at a time, from start to stop.

    memory_bytes of its own, in no budget: a multiple of 4 MiB. file_bytes of the folder's disk, given back by close.
    """

    @property
    def engine(self) -> str: ...
    @property
    def first_write_ns(self) -> int: ...
    # fused: of updates, how they round
    def __init__(self, folder: str, memory_bytes: int, file_bytes: int, fused: bool = True) -> None: ...
    # request_bytes: whole pages, 1 MiB at most, which they are without it
    def start_disk(self, reads: bool, writes: bool, request_bytes: int = ..., /) -> None: ...
    def start_update(self, rest: float, /) -> None: ...
    # (now_ns, read bytes, write bytes, ns of the disk's threads, bytes they were for; of updates: bytes, ns, ns of the thread)
    def look(self) -> tuple[int, int, int, int, int, int, int, int]: ...
    def stop(self) -> None: ...
    # (bytes, ns): of one update of all memory by every core
    def update_in_memory(self) -> tuple[int, int]: ...
    # (bytes, ns of the thread): the checksums of all memory, page by page, out of no cache and out of one
    def checksums(self) -> tuple[int, int]: ...
    def close(self) -> None: ...

def install_allocator() -> None: ...
def rounded_bytes(number: int, /) -> int: ...
def memory_stats() -> MemoryStats: ...
def trim(keep_bytes: int, /) -> None: ...
def mark_static(address: int, /) -> None: ...
def move_apart(apart: bool, /) -> None:
    """For tests: engines made from now on move each short record by itself, or short ones together, as they do otherwise."""

def swap_account(account: CapsuleType | None, /) -> CapsuleType | None: ...
def set_apart(on: bool, /) -> bool: ...

# csrc/base/checksum.h: of these bytes behind others, whose sum is `before`
def checksum(data: Any, before: int = ..., /) -> int: ...
def cpu_features() -> Features: ...
def direct_storage(library: str = ..., module: str = ..., /) -> DirectStorage: ...
def update(
    kind: str,
    hyper: dict[str, Any],
    step: int,
    grad_scale: float,
    param: Any,
    state: list[Any],
    grad: Any,
    simd: str = "auto",
    master: Any = ...,
) -> None: ...
def layout(params: list[tuple[int, int]], chunk_bytes: int, /) -> list[tuple[int, int]]: ...
def layout_size(params: list[tuple[int, int]], least_bytes: int, most_bytes: int, /) -> int: ...
def make_plan(
    budget_bytes: int,
    fixed_bytes: int,
    chunks: list[tuple[int, ...]],
    phases: list[tuple[int, ...]],
    accesses: list[int],
    access_phases: list[int],
    n_together: int,
    n_arrays: int,
    n_blocks: int,
    modes: Sequence[int] | None,
    n_persist: int,
    n_buffer: int,
    n_ahead: int,
    grads_outlive_backward: bool,
    n_passes: int,
    host_budget_bytes: int,
    n_ranks: int,
    profile: tuple[Any, ...] | None,
    ring_host_bytes: int = 0,
    update_bytes: int = 0,
    /,
) -> PlanResult: ...
def disk_bench(folder: str, n_bytes: int = ..., /) -> DiskBench: ...

# csrc/base/trace.h: an event is (start_ns, end_ns, bytes, number, lane, kind), the clock is now_ns
def trace_events(engine: Engine, since_ns: int, /) -> list[tuple[int, int, int, int, int, int]]: ...
def trace_add(engine: Engine, lane: int, kind: int, number: int, start_ns: int, end_ns: int, /) -> None: ...
def now_ns() -> int: ...
