"""Tiers beside a device: which chunks that are not persistent are at home in host memory, which on disk, and what passes
through.

The plan says which chunks persist; of the others the first in execution order come to host memory, as many as its budget
holds, and the rest to disk. What then is left of the budget gives chunks on the host a shadow, so that they are updated behind
backward and not behind the next forward: again the first first, which the next forward asks for first.
"""

from __future__ import annotations

from dataclasses import replace

from .errors import BudgetError
from .planning import Arrangement
from .sizes import MIB, format_bytes
from .wrapped import Wrapped

STAGING_PIECE_BYTES = 4 * MIB
STAGING_PIECES = 4


def place_away(found: Arrangement, wrapped: Wrapped) -> Arrangement:
    """The arrangement with the homes of chunks that are not persistent, and what the host's memory is used for.

    Raises:
        BudgetError: host memory does not hold what gradients and loads pass through.
    """
    layout, budget = wrapped.layout, wrapped.settings.host_bytes
    away = [chunk for chunk, slot in enumerate(found.slot_of_chunk) if slot >= 0]
    static = found.static_bytes - found.plan.ring_bytes  # the ring is the host's
    if not away:
        return replace(found, static_bytes=static)
    homes = [layout.sizes[c] * (1 + wrapped.state_arrays * layout.trained[c]) for c in away]
    sums = [layout.sizes[c] * layout.trained[c] for c in away]
    gradients = 2 * max(sums)
    staging = min(STAGING_PIECE_BYTES, max(layout.sizes[c] for c in away))
    ways = gradients + found.plan.ring_bytes + STAGING_PIECES * staging  # as if one were on disk
    if ways > budget:
        raise BudgetError(
            f"host_memory of {format_bytes(budget)} does not hold what gradients and parameters pass through: give at least "
            f"{format_bytes(ways)}",
            needed_bytes=ways, budget_bytes=budget, smallest_bytes=ways,
        )  # fmt: skip
    room, n_host = budget - ways, 0
    while n_host < len(away) and homes[n_host] + sums[n_host] <= room:
        room -= homes[n_host] + sums[n_host]
        n_host += 1
    shadows: dict[int, bool] = {}
    for chunk, home in zip(away[:n_host], homes, strict=False):
        shadows[chunk] = layout.trained[chunk] and home <= room
        room -= home if shadows[chunk] else 0
    on_disk = n_host < len(away)
    host_bytes = budget - room - (0 if on_disk else STAGING_PIECES * staging)
    disk_bytes = sum(2 * home + total if total else home for home, total in zip(homes[n_host:], sums[n_host:], strict=True))
    return replace(
        found,
        plan=replace(found.plan, n_host=n_host, host_bytes=host_bytes, disk_bytes=disk_bytes),
        static_bytes=static,
        shadow_of_chunk=shadows,
        gradient_memory_bytes=gradients,
        staging_bytes=staging if on_disk else 0,
    )
