"""What of a budget is not for tensors: what a device's libraries hold, and what rounding loses."""

from __future__ import annotations

from dataclasses import dataclass

#: So many times what is lost between tensors that are cut from one range is lost, at most, in segments as they come.
AMPLE_TIMES = 2


@dataclass(frozen=True)
class Overhead:
    """What libraries and the allocator take of a device's budget beside tensors: fixed_bytes, one part in `part` of the budget,
    and one in `between_part` of what a step holds that recomputes all blocks, lost between tensors; 0: none.

    What is lost between tensors is nearly as much where blocks are kept: large ones that come and go, such as logits, lose it
    (docs/decisions/0020-memory-of-a-gpu.md)."""

    fixed_bytes: int = 0
    part: int = 0
    between_part: int = 0

    def of(self, budget_bytes: int) -> int:
        """What is taken of this budget."""
        return self.fixed_bytes + (budget_bytes // self.part if self.part else 0)

    def between(self, recomputed_bytes: int) -> int:
        """What is lost between the tensors of a step that would hold so much if all blocks were recomputed."""
        return recomputed_bytes // self.between_part if self.between_part else 0

    def around(self, needed_bytes: int) -> int:
        """The smallest budget that leaves so much beside what is taken of it."""
        found = needed_bytes + self.fixed_bytes
        if self.part:
            found = -(-found * self.part // (self.part - 1))
            while found > 0 and found - 1 - self.of(found - 1) >= needed_bytes:
                found -= 1
        return found
