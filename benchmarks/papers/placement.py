"""Where a virtual machine's cores are, as far as it can be told from inside.

A host may move the cores of a virtual machine, to one group of cores that share a cache, or apart; nothing inside says so. On 2
cores of an EPYC a copy of 32 MiB between two steps took 1.1 ms in the one state and 1.8 ms in the other (1.5 and 2.2 ms beside
what a session reads ahead then), and a step of a small model 0.184 s and 0.156 s, for seconds or minutes at a time: cores that
are apart have more bandwidth together, and each barrier between them takes longer. A time of one state says nothing of the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

COPIED_BYTES, COPIES = 32 << 20, 3
APART = 1.25  # two copies that differ by more are of two states


class Placement:
    """Copies the same bytes whenever it is asked. Its memory was made before, and is in no budget that begins later."""

    def __init__(self) -> None:
        import torch

        self._source, self._target = (torch.ones(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))

    def seconds(self) -> float:
        """Of a copy with all of torch's threads, the shortest of a few."""
        found = []
        for _ in range(COPIES):
            begin = time.perf_counter()
            self._target.copy_(self._source)
            found.append(time.perf_counter() - begin)
        return min(found)


def same_state(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the middles of two series of copies are of one state."""
    one, other = statistics.median(first), statistics.median(second)
    return max(one, other) <= APART * min(one, other)
