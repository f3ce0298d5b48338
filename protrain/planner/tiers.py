"""Tiers beside a device: which chunks that are not persistent are at home in host memory, which on disk, and what passes
through.

The plan says which chunks persist. Activations of blocks that swap have a pool of host memory, half of the budget for it at
most while chunks could have it: what the pool does not hold goes on to disk. Of the chunks the first in execution order come
to host memory, as many as what is left holds, and the rest to disk. What then is left gives chunks on the host a shadow, so
that they are updated behind backward and not behind the next forward: again the first first, which the next forward asks for
first; and then more to activations. Last of all gradients have room for three of the largest chunks instead of two: while one
is updated and one waits, small ones beside them would hold up the last tensor of the second, and with it the next update.
"""

from __future__ import annotations

from dataclasses import replace

from ..base.sizes import MIB, format_bytes
from ..dryrun.phases import swaps
from ..errors import BudgetError
from ..model.layout import PAGE_BYTES, Chunks
from .plans import Arrangement

STAGING_PIECE_BYTES = 4 * MIB
STAGING_PIECES = 4


#: For activations of which nothing is known, because the model cannot run without data.
UNKNOWN_STASH_BYTES = 64 * MIB


def _in_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _stash_needs(found: Arrangement) -> tuple[int, int]:
    """What activations take of host memory: at least, for those of one block, and in all, with as much again: what was brought
    back is given back behind compute, and may still be there when the next step's first are put."""
    n_swapping = sum(map(swaps, found.plan.block_modes))
    if n_swapping == 0:
        return 0, 0
    total = found.stash_bytes * 9 // 8 or UNKNOWN_STASH_BYTES  # their storages may hold more than what is saved
    return _in_pages(total // n_swapping), _in_pages(total + total // n_swapping)


def host_room(chunks: Chunks, n_states: int, host_bytes: int) -> int:
    """About how much of host memory homes of chunks, activations and the ring can have, in bytes, for a plan by time: what
    gradients and loads pass through is not theirs, nor what keeps gradients for updates after commit."""
    sums = [size * trained for size, trained in zip(chunks.sizes, chunks.trained, strict=True)]
    homes = sum(chunks.sizes) + n_states * sum(sums)
    ways = 2 * max(sums, default=0) + STAGING_PIECES * STAGING_PIECE_BYTES
    return max(host_bytes - ways, 0) * homes // max(homes + sum(sums), 1)


def place_away(found: Arrangement, chunks: Chunks, n_states: int, budget: int) -> Arrangement:
    """The arrangement with the homes of chunks that are not persistent, and what the host's memory is used for.

    Args:
        n_states: arrays of state beside each parameter, counted in arrays of parameters. budget: of host memory, in bytes.

    Raises:
        BudgetError: host memory does not hold what gradients, loads and activations pass through.
    """
    away = [chunk for chunk, slot in enumerate(found.slot_of_chunk) if slot >= 0]
    homes = [chunks.sizes[c] * (1 + n_states * chunks.trained[c]) for c in away]
    sums = [chunks.sizes[c] * chunks.trained[c] for c in away]
    gradients = 2 * max(sums, default=0)
    staging = min(STAGING_PIECE_BYTES, max((chunks.sizes[c] for c in away), default=0))
    ring = found.host_ring_bytes if away else 0
    least_stash, all_stash = _stash_needs(found)
    ways = gradients + ring + STAGING_PIECES * staging + least_stash  # as if one were on disk
    if ways > budget:
        raise BudgetError(
            f"host_memory of {format_bytes(budget)} does not hold what gradients, parameters and activations pass through: give "
            f"at least {format_bytes(ways)}",
            needed_bytes=ways, budget_bytes=budget, smallest_bytes=ways,
        )  # fmt: skip
    room, n_host = budget - ways, 0
    stash = least_stash + min(all_stash - least_stash, (room // 2 if away else room) // PAGE_BYTES * PAGE_BYTES)
    room -= stash - least_stash
    while n_host < len(away) and homes[n_host] + sums[n_host] <= room:
        room -= homes[n_host] + sums[n_host]
        n_host += 1
    shadows: dict[int, bool] = {}
    for chunk, home in zip(away[:n_host], homes, strict=False):
        shadows[chunk] = chunks.trained[chunk] and home <= room
        room -= home if shadows[chunk] else 0
    on_disk = n_host < len(away)
    room += 0 if on_disk else STAGING_PIECES * staging
    more = min(all_stash - stash, room // PAGE_BYTES * PAGE_BYTES)
    stash, room = stash + more, room - more
    third = min(gradients // 2, room) // PAGE_BYTES * PAGE_BYTES
    gradients, room = gradients + third, room - third
    disk_bytes = sum(2 * home + total if total else home for home, total in zip(homes[n_host:], sums[n_host:], strict=True))
    host_bytes = budget - room
    return replace(
        found,
        plan=replace(found.plan, n_host=n_host, host_bytes=host_bytes, disk_bytes=disk_bytes + max(found.stash_bytes - stash, 0)),
        shadow_of_chunk=shadows,
        gradient_memory_bytes=gradients,
        staging_bytes=staging if on_disk else 0,
        stash_pool_bytes=stash,
        stash_window_bytes=least_stash // 2,
    )
