"""Calibration: what the lanes of this machine carry while a model computes, and what they cost its computation.

A lane beside compute takes processor time, and memory's. Where compute uses every core, a second of a lane's thread is a second
of one of compute's threads, for which the others of its team wait, and for longer: a thread that was set aside is woken late, and
its caches are cold. Training steps lost `EXPECTED_DRAG` times the processor time of the disk's lanes, which the clocks of threads
tell within a few percent, on a busy machine too; of updates, which run for longer at a time, `EXPECTED_UPDATE_DRAG` times. Where
a core is free, nothing need be lost. That is expected, to within `DOUBT` times the processor time. What is seen is how much
longer the same computation takes beside the lane than alone, in turns, several times. On a quiet machine that is known better
than the expectation, on a busy one it says nothing: so the two are joined with weights by their uncertainty. The result is at
least the lane's processor time where no core is free, since the team waits for the member that was set aside, and at most
`MOST_DRAG` times that time.

Updates are a lane's where a core is free. Where none is, compute's threads make them between two operations
(csrc/runtime/lane.c), and compute loses what they take: `EXPECTED_SHARED_DRAG` times what they take alone, out of no cache. (In
operations of many milliseconds the lane takes a core after all; that is not measured here.)

What a disk's lane takes is that of its bytes and that of its requests. Threads' clocks tell them apart, beside compute too, by
what requests of two sizes take. A request costs compute `EXPECTED_REQUEST_DRAG` times its processor time, whatever was seen: here
the next one is always there, while in a training step it comes later, and wakes a thread of the disk's that sleeps.

What goes to the disk goes through memory, and through caches that compute shares. So a second computation, which does nothing
but walk through memory, runs beside reads and writes too. What it loses more by a byte than the first one does, which differs by
a factor of ten among machines, is memory_drag_seconds_per_byte; it is added by how much a model depends on memory (requests.py).
What was seen is joined with an expectation as above, in checksums of that byte: they tell how fast memory is.

It takes one to two seconds, and memory of `BUFFER_BYTES` and what compute needs, in no budget. It is done once in a process for a
disk and a number of compute threads. The disk is moved by the store's own requests, in a file of `FILE_BYTES` that has no name
and is given back. Checksums are no part of what its lanes cost: in a training step the update lane takes those of states, which
is in what that lane costs, and compute's threads together those of activations and of parameters, which
stash_drag_seconds_per_byte is.

access_seconds, checkpoint_seconds, swap_seconds and step_fixed_seconds stay 0.0: they are tens of microseconds of Python that
only a wrapped model spends, and the times of a wrapped model's phases have them in.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import torch
from torch._C import DisableTorchFunction
from torch.nn import functional as F

from .. import _core
from ..base.counting import uncounted
from ..device.compute import Accelerator
from ..planner.profiles import Machine, Speed

#: The memory of requests and updates, and the file they go through.
BUFFER_BYTES = 12 << 20
FILE_BYTES = 64 << 20
#: Of requests: those that are measured, and the smaller ones beside them.
REQUEST_BYTES, SMALL_REQUEST_BYTES = 1 << 20, 128 << 10
#: Of a segment of compute and of an idle one. A slow disk is given longer ones, in which SEGMENT_BYTES are moved.
SEGMENT_SECONDS = 0.02
IDLE_SECONDS = 0.012
LONGEST_SEGMENT_SECONDS = 0.08
SEGMENT_BYTES = 12 << 20
#: Twice as many where compute alone varies by more than MOST_SPREAD; after the first only what ends within MOST_SECONDS.
ROUNDS = 5
MOST_SPREAD = 0.2
MOST_SECONDS = 1.5
#: The update lane sleeps so many times as long as a piece took it: most of the time it waits for the disk.
LANE_REST = 3.0
UPDATE_PASSES = 16
CHECKSUM_PASSES = 3
#: The drag that is expected, how far off it may be, and the most that is believed, in parts of the lane's processor time.
EXPECTED_DRAG, EXPECTED_UPDATE_DRAG = 2.0, 1.0
DOUBT = 1.5
MOST_DRAG = 6.0
#: What updates by compute's threads take in a training step, in parts of what they take alone.
EXPECTED_SHARED_DRAG = 1.2
#: The drag of a request beside its bytes, in parts of its processor time: expected, not seen, so no part of what is doubted.
EXPECTED_REQUEST_DRAG = 2.5
#: What a byte costs compute that walks through memory beside what it costs products, in checksums of it: expected, how far off
#: that may be, and the most that is believed.
EXPECTED_MEMORY_DRAG, MEMORY_DOUBT, MOST_MEMORY_DRAG = 2.0, 2.0, 8.0
#: Of the link to a device: transfers of each direction, and the size of each.
LINK_TRANSFERS, LINK_BYTES = 16, 4 << 20

_known: dict[tuple[int, int, bool], Machine] = {}
_links: dict[_core.Device, tuple[float, float, float]] = {}
_lock = threading.Lock()


def measure_machine(folder: str, fused: bool = True) -> Machine:
    """What lanes carry and cost on this machine, with the disk of `folder` and as many threads of compute as torch has now.
    fused: whether updates round as torch's fused kernels do; those of its loop over parameters take longer.

    The first call for a disk, a number of threads and a rounding takes one to two seconds; later ones give the same object. Of a
    machine whose device is its processor: upload, offload and gather stay empty.

    Raises:
        DiskError: the folder is none or cannot be used, or the disk has no room for the file or fails.
    """
    key = (os.stat(folder).st_dev, torch.get_num_threads(), fused) if os.path.isdir(folder) else None
    with _lock:
        if key is not None and key in _known:
            return _known[key]
        with uncounted(), torch.no_grad(), torch.autocast("cpu", enabled=False), DisableTorchFunction():
            machine = _measure(folder, fused)
        if key is not None:
            _known[key] = machine
        return machine


def measure_device(accelerator: Accelerator, folder: str) -> Machine:
    """The same of a machine whose device has memory of its own beside the host's: upload and offload are those of the engine's
    lanes, each alone; how far both at once share the link is link_overlap. Chunks at home on the host are updated by all cores.
    What the device computes beside its lanes is not taken to lose by them, and step_update_bytes_per_second is 0.0: not known.

    The first call for a device takes some milliseconds more, memory of twice LINK_BYTES of it and as much of the host's, and has
    to come between steps.

    Raises:
        DeviceError, MemoryError: the device cannot be used, or has no memory left.
        DiskError: as `measure_machine`.
    """
    machine = measure_machine(folder)
    with _lock:
        if accelerator.core not in _links:
            _links[accelerator.core] = accelerator.core.measure_link(LINK_BYTES, LINK_TRANSFERS)
        upload, offload, overlap = _links[accelerator.core]
    return Machine(
        upload=Speed(upload),
        offload=Speed(offload),
        disk_read=replace(machine.disk_read, drag_seconds_per_byte=0.0),
        disk_write=replace(machine.disk_write, drag_seconds_per_byte=0.0),
        update=Speed(machine.step_update_bytes_per_second),
        disk_overlap=machine.disk_overlap,
        link_overlap=overlap,
    )


def _measure(folder: str, fused: bool) -> Machine:
    bench = _core.MachineBench(folder, BUFFER_BYTES, FILE_BYTES, fused)  # what cannot be used ends here
    try:
        return _Calibration(bench).run()
    finally:
        bench.close()


class _Counts(NamedTuple):
    """What `_core.MachineBench.look` gives, or how two of them differ."""

    at_ns: int
    read_bytes: int
    write_bytes: int
    disk_processor_ns: int
    disk_processor_bytes: int
    work_bytes: int
    work_busy_ns: int
    work_processor_ns: int


def _between(before: _Counts, after: _Counts) -> _Counts:
    return _Counts(*(b - a for a, b in zip(before, after, strict=True)))


def _sum(counts: Iterable[_Counts]) -> _Counts:
    return _Counts(*map(sum, zip(*counts, strict=True)))


class _Computation:
    """What is computed so many times in a segment."""

    passes = 1

    def once(self) -> None:
        raise NotImplementedError

    def segment(self) -> float:
        """Seconds of a segment."""
        begin = time.perf_counter()
        for _ in range(self.passes):
            self.once()
        return time.perf_counter() - begin

    def fit(self, seconds: float) -> None:
        """Make a segment about so long."""
        self.segment()  # the first one prepares what the others use
        self.passes = max(1, round(seconds / min(self.segment() for _ in range(4))))


class _Products(_Computation):
    """The mix of a transformer's block: two products with a GELU between them, an addition and a norm. 9.75 MiB of its own."""

    TOKENS, WIDTH, INNER = 512, 384, 1536

    def __init__(self) -> None:
        def filled(rows: int, columns: int, value: float) -> torch.Tensor:
            return torch.full((rows, columns), value, dtype=torch.float32, device="cpu")

        self.x, self.y = (filled(self.TOKENS, self.WIDTH, 0.5) for _ in range(2))
        self.rise, self.fall = filled(self.WIDTH, self.INNER, 0.01), filled(self.INNER, self.WIDTH, 0.01)
        self.inner = filled(self.TOKENS, self.INNER, 0.0)

    def once(self) -> None:
        torch.mm(self.x, self.rise, out=self.inner)
        torch.ops.aten.gelu_(self.inner)
        torch.mm(self.inner, self.fall, out=self.y)
        self.y.add_(self.x)
        F.layer_norm(self.y, (self.WIDTH,))


class _Walk(_Computation):
    """What waits for memory: additions and GELUs over 12 MiB, of which no core's own cache holds much."""

    ROWS, COLUMNS, PARTS = 512, 1536, 4

    def __init__(self) -> None:
        self.parts = torch.full((self.PARTS, self.ROWS, self.COLUMNS), 0.5, dtype=torch.float32, device="cpu").unbind()

    def once(self) -> None:
        for part, other in zip(self.parts, self.parts[1:] + self.parts[:1], strict=True):
            other.add_(part, alpha=0.0)
            F.gelu(part)


@dataclass
class _Segment:
    """Some time in which a lane ran."""

    seconds: float  # that what ran beside it took
    counts: _Counts  # in these
    whole: _Counts  # from start to stop: with what was in flight at the end


@dataclass
class _Lane:
    """A lane and its segments: beside compute, and with nothing else."""

    start: Callable[[], None]
    moved_bytes: Callable[[_Counts], int]
    busy_ns: Callable[[_Counts], int]
    processor: Callable[[_Counts], tuple[int, int]]  # time in ns, and the bytes that it was for
    expected: float = EXPECTED_DRAG
    beside: list[_Segment] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)  # seconds of compute, in each of these
    idle: list[_Segment] = field(default_factory=list)

    def bytes_per_second(self, segments: list[_Segment]) -> float:
        counts = _sum(segment.counts for segment in segments)
        return self.moved_bytes(counts) / self.busy_ns(counts) * 1e9

    @property
    def lost_per_byte(self) -> list[float]:
        """Seconds of what ran beside it."""
        return [lost / self.moved_bytes(segment.counts) for lost, segment in zip(self.lost, self.beside, strict=True)]

    @property
    def processor_seconds_per_byte(self) -> float:
        nanoseconds, size = self.processor(_sum(segment.whole for segment in self.beside + self.idle))
        return nanoseconds / size / 1e9


def _spread(values: list[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _joined(expected: float, doubt: float, seen: list[float], least_spread: float) -> float:
    """What was expected, to within `doubt`, and the median of what was seen, with weights by their uncertainty: that of the
    median from how the values vary, or, where few of them happen to agree, from `least_spread`."""
    spread = max(_spread(seen), least_spread)
    noise = 1.86 * spread / math.sqrt(len(seen))  # from a median of distances to the standard error of a median
    weight = doubt**2 / (doubt**2 + noise**2) if doubt > 0 else 0.0
    return expected + weight * (median(seen) - expected)


def _disk_lane(bench: _core.MachineBench, reads: bool, writes: bool, request_bytes: int = REQUEST_BYTES) -> _Lane:
    return _Lane(
        lambda: bench.start_disk(reads, writes, request_bytes),
        lambda counts: counts.read_bytes * reads + counts.write_bytes * writes,
        lambda counts: counts.at_ns,
        lambda counts: (counts.disk_processor_ns, counts.disk_processor_bytes),
    )


def _update_lane(bench: _core.MachineBench) -> _Lane:
    return _Lane(
        lambda: bench.start_update(LANE_REST),
        lambda counts: counts.work_bytes,
        lambda counts: counts.work_busy_ns,
        lambda counts: (counts.work_processor_ns, counts.work_bytes),
        EXPECTED_UPDATE_DRAG,
    )


class _Calibration:
    """One measurement."""

    def __init__(self, bench: _core.MachineBench) -> None:
        self.bench = bench
        self.products, self.walk = _Products(), _Walk()
        self.alone: list[float] = []  # seconds of segments of products
        self.walk_alone: list[float] = []
        self.read, self.write = _disk_lane(bench, True, False), _disk_lane(bench, False, True)
        self.both, self.update = _disk_lane(bench, True, True), _update_lane(bench)
        self.small = _disk_lane(bench, True, True, SMALL_REQUEST_BYTES)
        slow = min(LONGEST_SEGMENT_SECONDS, bench.first_write_ns / 1e9 * SEGMENT_BYTES / FILE_BYTES)
        self.products.fit(max(SEGMENT_SECONDS, slow))
        self.walk.fit(max(SEGMENT_SECONDS, slow))
        self.idle_seconds = max(IDLE_SECONDS, slow)
        threads = torch.get_num_threads()
        self.full = threads >= len(os.sched_getaffinity(0))  # no core is free
        # That products run beside.
        self.lanes = [self.read, self.write] if bench.shares_updates else [self.read, self.write, self.update]

    def run(self) -> Machine:
        begin = time.perf_counter()
        rounds, spent = 0, 0.0
        while rounds == 0 or (rounds < self._wanted_rounds() and spent * (rounds + 1) / rounds < MOST_SECONDS):
            self._round()
            rounds += 1
            spent = time.perf_counter() - begin
        return self._machine()

    # ---- measuring ----

    def _wanted_rounds(self) -> int:
        return ROUNDS if _spread(self.alone) <= MOST_SPREAD * median(self.alone) else 2 * ROUNDS

    def _round(self) -> None:
        self._in_turns(self.products, self.alone, self.lanes)
        self._in_turns(self.walk, self.walk_alone, (self.both,))
        self.small.beside.append(self._with(self.small, self.products.segment))
        for lane in (*self.lanes, self.both):
            lane.idle.append(self._with(lane, self._wait))

    def _wait(self) -> float:
        time.sleep(self.idle_seconds)
        return self.idle_seconds

    def _in_turns(self, what: _Computation, alone: list[float], lanes: Iterable[_Lane]) -> None:
        """Segments with nothing beside them, which go to `alone`, and between them one beside each lane."""
        alone.append(what.segment())
        for lane in lanes:
            lane.beside.append(self._with(lane, what.segment))
            alone.append(what.segment())
            lane.lost.append(lane.beside[-1].seconds - (alone[-2] + alone[-1]) / 2)

    def _look(self) -> _Counts:
        return _Counts(*self.bench.look())

    def _with(self, lane: _Lane, what: Callable[[], float]) -> _Segment:
        begin = self._look()
        lane.start()
        try:
            before = self._look()
            seconds = what()
            counts = _between(before, self._look())
            while lane.moved_bytes(counts) == 0:  # a request may take longer: nothing moved would be no lane
                time.sleep(self.idle_seconds)
                counts = _between(before, self._look())
        finally:
            self.bench.stop()
        return _Segment(seconds, counts, _between(begin, self._look()))

    # ---- conclusions ----

    def _drag(self, lane: _Lane) -> float:
        """Seconds of products lost for each byte: see the head of this file."""
        processor = lane.processor_seconds_per_byte
        expected, least = (lane.expected * processor, processor) if self.full else (0.0, 0.0)
        found = _joined(expected, DOUBT * processor, lane.lost_per_byte, self._noise(lane, self.alone))
        return min(max(found, least), MOST_DRAG * processor)

    def _memory_drag(self, checksum_seconds: float) -> float:
        """Seconds that what walks through memory loses for each byte more than products."""
        products = [sum(lost) / 2 for lost in zip(self.read.lost_per_byte, self.write.lost_per_byte, strict=True)]
        seen = [of_walk - of_products for of_walk, of_products in zip(self.both.lost_per_byte, products, strict=True)]
        expected = EXPECTED_MEMORY_DRAG * checksum_seconds if self.full else 0.0
        found = _joined(expected, MEMORY_DOUBT * checksum_seconds, seen, self._noise(self.both, self.walk_alone))
        return min(max(found, 0.0), MOST_MEMORY_DRAG * checksum_seconds)

    def _request_seconds(self) -> float:
        """Of processor time, for a request beside its bytes."""
        large = (self.read.processor_seconds_per_byte + self.write.processor_seconds_per_byte) / 2
        more = self.small.processor_seconds_per_byte - large
        return min(max(more, 0.0) / (1 / SMALL_REQUEST_BYTES - 1 / REQUEST_BYTES), large * REQUEST_BYTES)

    def _by_request(self, read: Speed, write: Speed) -> tuple[float, Speed, Speed]:
        """The drag of a request, and the lanes with that of bytes alone."""
        request = EXPECTED_REQUEST_DRAG * self._request_seconds() if self.full else 0.0

        def of_bytes(speed: Speed) -> Speed:
            return replace(speed, drag_seconds_per_byte=max(speed.drag_seconds_per_byte - request / REQUEST_BYTES, 0.0))

        return request, of_bytes(read), of_bytes(write)

    @staticmethod
    def _noise(lane: _Lane, alone: list[float]) -> float:
        """From how the same computation varies with nothing beside it, in seconds for each of the lane's bytes; see `_joined`."""
        return _spread(alone) / median(lane.moved_bytes(segment.counts) for segment in lane.beside)

    def _machine(self) -> Machine:
        read, write, *own = [
            Speed(lane.bytes_per_second(lane.beside), lane.bytes_per_second(lane.idle), self._drag(lane)) for lane in self.lanes
        ]
        request, read_bytes, write_bytes = self._by_request(read, write)
        both = _sum(segment.counts for segment in self.both.idle)
        overlap = (both.read_bytes / read.idle_bytes_per_second + both.write_bytes / write.idle_bytes_per_second) / (
            both.at_ns / 1e9
        )
        checksum = self._checksum_seconds() / torch.get_num_threads()
        updates = self._best(self.bench.update_in_memory)
        return Machine(
            disk_read=read_bytes,
            disk_write=write_bytes,
            update=own[0] if own else self._shared_update(),
            disk_overlap=min(max(overlap, 1.0), 2.0),
            stash_drag_seconds_per_byte=checksum,
            memory_drag_seconds_per_byte=self._memory_drag(checksum),
            request_drag_seconds=request,
            step_update_bytes_per_second=1 / updates,
        )

    @staticmethod
    def _best(update: Callable[[], tuple[int, int]]) -> float:
        """Seconds for each byte. It needs all cores at once for a millisecond, and others that use the machine only make it
        slower."""
        return min(spent_ns / size for size, spent_ns in (update() for _ in range(UPDATE_PASSES))) / 1e9

    def _shared_update(self) -> Speed:
        taken = EXPECTED_SHARED_DRAG * self._best(self.bench.update_shared)
        return Speed(1 / taken, 1 / taken, taken)

    def _checksum_seconds(self) -> float:
        """Of one thread, for a byte that comes past the caches on its way in, and lies in one on its way out."""
        return median(spent_ns / size for size, spent_ns in (self.bench.checksums() for _ in range(CHECKSUM_PASSES))) / 1e9
