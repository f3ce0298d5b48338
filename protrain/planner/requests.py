"""What a model's bytes and requests to the disk cost its own compute.

What goes to the disk goes through memory, and through caches that compute shares. Compute that waits for memory much of its
time loses by that what the products that lanes are measured beside do not. How much of a step that is follows from what the dry
run counts. And compute's threads take the checksums of what they compute with: of activations, and of parameters that are
fetched.

A request takes a disk thread's time beside that of its bytes: system calls, an interrupt, and the waking of threads that compute
shares its cores with. Where requests are small, that is most of what they cost. The planner counts bytes; so a lane's drag for a
byte, given to it, has in it the drag of the requests that carry so many of this model's bytes: chunks as they are fetched, their
state in pieces of the update lane's ring, records of activations. What lies side by side on the disk and is short goes together:
the arrays of a chunk that is one piece of the ring, and as many records as the store moves at once. Where a plan leaves the ring
smaller pieces, the core adds what their requests cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..base.sizes import KIB, MIB
from ..dryrun.flops import ordinary_seconds
from .profiles import Machine, Speed

#: Of the store: a larger request is made as several, smaller ones side by side as one.
PIECE_BYTES = 4 * MIB
#: Of them in one, at most.
MOST_PARTS = 64
#: Of the update lane's ring, as csrc/plan/room.c has it: the largest piece that a budget of so many of it allows.
LEAST_RING_PIECE_BYTES, MOST_RING_PIECE_BYTES, BUDGET_PER_RING_PIECE = 64 * KIB, 2 * MIB, 192


#: The share of memory in what counted operations take, up to which a byte costs what it costs products, and from which on it
#: costs what it costs a walk through memory. Steps of six models, all swapped beside all kept:
#: docs/decisions/0007-plans-by-time.md.
LEAST_MEMORY_SHARE, MOST_MEMORY_SHARE = 0.16, 0.25


def with_memory(machine: Machine, counted: Sequence[tuple[int, int, int]]) -> Machine:
    """The machine whose disk's lanes cost this model's compute what they do by how much it depends on memory. Of one where walks
    through memory lose nothing more, as where a file describes it, all is as it was.

    Args:
        counted: of each phase of a step: floating-point operations, bytes that operations read and write, operations.
    """
    if machine.memory_drag_seconds_per_byte == 0:
        return machine
    flops, moved, operations = (sum(column) for column in zip(*counted, strict=True)) if counted else (0, 0, 0)
    whole = ordinary_seconds(flops, moved, operations)
    share = ordinary_seconds(0, moved, 0) / whole if whole else 0.0
    part = min(max((share - LEAST_MEMORY_SHARE) / (MOST_MEMORY_SHARE - LEAST_MEMORY_SHARE), 0.0), 1.0)
    more = part * machine.memory_drag_seconds_per_byte
    read, write = (_more(lane, more) for lane in (machine.disk_read, machine.disk_write))
    return replace(machine, disk_read=read, disk_write=write, memory_drag_seconds_per_byte=0.0)


def with_requests(
    machine: Machine,
    chunk_bytes: Sequence[int],
    n_states: int,
    record_bytes: int,
    budget_bytes: int,
    widening: int = 1,
    trained: Sequence[bool] | None = None,
) -> Machine:
    """The machine with drags for a byte that have its requests in them, and the checksums of parameters. Of one whose requests
    cost nothing all is as it was.

    Args:
        chunk_bytes: parameters of each chunk.
        n_states: arrays of state, counted in arrays of parameters.
        record_bytes: the mean size of a record of activations; 0: there are none, or nothing is known of them.
        budget_bytes: what the pieces of the ring follow.
        widening: bytes of an array of state beside one of parameters, 2 where fp32 is beside bf16.
        trained: of each chunk, whether it has state and is written; None: all are.
    """
    request, total = machine.request_drag_seconds, sum(chunk_bytes)
    if request == 0 or total == 0:
        return machine
    ring_piece = _ring_piece_bytes(budget_bytes)
    fetches = sum(_requests(size, PIECE_BYTES) for size in chunk_bytes)
    updated = [size for size, one in zip(chunk_bytes, trained or [True] * len(chunk_bytes), strict=True) if one]
    updates = [update_requests(size, n_states, ring_piece, widening) for size in updated]
    # In a step parameters are fetched for forward and for backward; of those that are trained state is read, both are written.
    read_bytes, written_bytes = 2 * total + n_states * sum(updated), (1 + n_states) * sum(updated)
    checksums = machine.checksum_seconds_per_byte * 2 * total / read_bytes
    read = request * (2 * fetches + sum(reads for reads, _ in updates)) / read_bytes
    write = request * sum(writes for _, writes in updates) / written_bytes if written_bytes else 0.0
    disk_read, disk_write = _more(machine.disk_read, read + checksums), _more(machine.disk_write, write)
    of_record = request / _gathered_bytes(record_bytes) if record_bytes else (read + write) / 2
    least = -min(disk_read.drag_seconds_per_byte, disk_write.drag_seconds_per_byte)
    stash = max(machine.stash_drag_seconds_per_byte + of_record - (read + checksums + write) / 2, least)
    return replace(machine, disk_read=disk_read, disk_write=disk_write, stash_drag_seconds_per_byte=stash)


def _requests(size: int, most: int) -> int:
    return -(-size // most)


def update_requests(size: int, n_states: int, ring_piece: int, widening: int = 1) -> tuple[int, int]:
    """Requests with which the update lane reads the state of a chunk whose parameters have `size` bytes, and writes both.

    Args:
        ring_piece: bytes of a piece of the ring, of parameters. n_states, widening: as those of `with_requests`.
    """
    states = [widening * size] * (n_states // widening)
    if size > ring_piece:  # an array of a piece is one request, and no other lies beside it
        pieces = _requests(size, ring_piece)
        return len(states) * pieces, (1 + len(states)) * pieces
    return _side_by_side(states), _side_by_side([size, *states])


def _side_by_side(arrays: Sequence[int]) -> int:
    """Requests for arrays that lie one behind the other: each goes with those before it, where all of it fits."""
    count, left = 0, 0
    for size in arrays:
        if size > left:
            count += 1
            left = PIECE_BYTES
        left -= size
    return count


def _gathered_bytes(record: int) -> int:
    """Of activations, in a request: whole records, or parts of one."""
    if record > PIECE_BYTES:
        return -(-record // _requests(record, PIECE_BYTES))
    return min(PIECE_BYTES // record, MOST_PARTS) * record


def _ring_piece_bytes(budget_bytes: int) -> int:
    piece = MOST_RING_PIECE_BYTES
    while piece > LEAST_RING_PIECE_BYTES and piece * BUDGET_PER_RING_PIECE > budget_bytes:
        piece //= 2
    return piece


def _more(speed: Speed, drag_seconds_per_byte: float) -> Speed:
    return replace(speed, drag_seconds_per_byte=speed.drag_seconds_per_byte + drag_seconds_per_byte)
