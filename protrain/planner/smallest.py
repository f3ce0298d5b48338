"""The smallest budget that works, for a budget that is refused: chunks hang on the budget, and what a plan needs on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ..base.sizes import format_bytes
from ..device.overhead import Overhead
from ..errors import BudgetError

NO_OVERHEAD = Overhead()


@dataclass(frozen=True)
class Anew:
    """A plan as it would be asked for anew in another budget, which decides how parameters are packed.

    packed: how they are in a budget. needed: the smallest budget in which a plan fits with the chunks of this one; None: another
    tier is too small.
    """

    packed: Callable[[int], Hashable]
    needed: Callable[[int], int | None]


#: What a plan needs falls and grows as chunks grow with the budget. Those above one that works are looked at by this part of it:
#: larger chunks need more by less than the budget that they come with.
_LOOKED_AT = 8
_STEPS = 256  # in which packings are told apart


def _begin_of(packed: Callable[[int], Hashable], budget_bytes: int) -> int:
    """The smallest budget from which on to this one parameters are packed as in this one."""
    same, here, step = budget_bytes, packed(budget_bytes), max(budget_bytes // _STEPS, 1)
    other = same - step
    while other >= 0 and packed(other) == here:
        same, other = other, other - step
    if other < 0:
        return 0
    while same - other > 1:
        middle = (same + other) // 2
        same, other = (middle, other) if packed(middle) == here else (same, middle)
    return same


def _smallest(anew: Anew, refused_bytes: int, needed_bytes: int) -> int:
    """The smallest budget from which on all work.

    Args:
        refused_bytes: a budget that does not. needed_bytes: what is needed with its chunks.
    """
    known: dict[Hashable, int | None] = {anew.packed(refused_bytes): needed_bytes}

    def needed(budget_bytes: int) -> int | None:
        packing = anew.packed(budget_bytes)
        if packing not in known:
            known[packing] = anew.needed(budget_bytes)
        return known[packing]

    smallest = needed_bytes
    while (found := needed(smallest)) is not None and found > smallest:
        smallest = found
    high = smallest + smallest // _LOOKED_AT
    while (found := needed(high)) is not None and found > high:
        high = found
    while (found := needed(high)) is not None:
        begin = _begin_of(anew.packed, high)
        if found > high:
            return high + 1
        if found > begin:
            return found
        high = begin - 1
    return smallest


def refuse(
    error: BudgetError,
    what: str,
    overhead: Overhead = NO_OVERHEAD,
    anew: Anew | None = None,
    *,
    knows_batch: bool = True,
) -> BudgetError:
    """The planner's refusal in the words of the interface.

    Args:
        overhead: that it counted, which grows with the budget.
        anew: who asks again in another budget, where chunks hang on it.
        knows_batch: else it is of the states alone, and what works may be more.
    """
    smallest = overhead.around(error.smallest_bytes - overhead.of(error.budget_bytes))
    if anew is not None:
        smallest = _smallest(anew, error.budget_bytes, smallest)
    needed = min(error.needed_bytes, smallest)  # that was with the chunks of this budget, which others may do better than
    named = f"{format_bytes(smallest)} ({smallest} bytes)"
    smallest_text = f"the smallest budget that works is {named}"
    if not knows_batch:
        smallest_text = f"the smallest budget for that is {named}, and a batch takes more: protrain.plan(model, batch) tells"
    return BudgetError(
        f"memory: {what} needs {format_bytes(needed)}, the budget is {format_bytes(error.budget_bytes)}; {smallest_text}",
        needed_bytes=needed,
        budget_bytes=error.budget_bytes,
        smallest_bytes=smallest,
    )


def naming(error: BudgetError, named_bytes: int) -> BudgetError:
    """The same, which names no less than what was named before: where nobody knows all that a step will ask for, less is worth no
    try than what was named, whatever the smallest plan needs."""
    if error.smallest_bytes >= named_bytes:
        return error
    return BudgetError(
        f"memory: a step as the one that was refused has no room in the budget of {format_bytes(error.budget_bytes)}; give a "
        f"budget of at least {format_bytes(named_bytes)} ({named_bytes} bytes)",
        needed_bytes=error.needed_bytes,
        budget_bytes=error.budget_bytes,
        smallest_bytes=named_bytes,
    )
