"""`protrain plan --sweep`: time and peak of a step against the budget, from the smallest that works to where nothing more helps.

The largest budget of the sweep is one that has the plan for memory without end, where all is kept and persistent (but for several
devices, among which moving may be faster): its peak, or a little more, as plans leave part of a budget free. The smallest is what
the planner's refusals name, and is looked for where they name none. Between them budgets rise by one factor.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from protrain.cli.words import CommandError, duration_text, json_text, size_text, writing

if TYPE_CHECKING:
    from protrain.planner.plans import Plan

N_BUDGETS = 12
#: More than any device has, and no more than the planner takes for a step.
ENDLESS_BYTES = 1 << 45
#: Looking for the smallest budget ends when it is known to one part in so many.
FINENESS = 256
TABLE_CHARACTERS = 110


def sweep(plan_for: Callable[[int], Plan], ceiling_bytes: int = ENDLESS_BYTES, count: int = N_BUDGETS) -> list[Plan]:
    """The plans for at most `count` budgets, smallest first.

    Args:
        plan_for: the plan for a budget in bytes; raises BudgetError.
        ceiling_bytes: no budget is larger: what the device has.

    Raises:
        BudgetError: the ceiling is too low.
    """
    from protrain.errors import BudgetError

    smallest, found = smallest_budget(plan_for, ceiling_bytes), []
    for budget in budgets(smallest, enough_budget(plan_for, ceiling_bytes), count):
        with contextlib.suppress(BudgetError):  # of another tier: the plan that is faster here puts more there
            found.append(plan_for(budget))
    return found


def enough_budget(plan_for: Callable[[int], Plan], ceiling_bytes: int) -> int:
    """A budget that has the ceiling's plan, little above the smallest that has; at most a sixteenth above its peak. Of a device's
    budget a part is not for tensors, so that its peak is lower in a smaller one."""
    from protrain.errors import BudgetError

    wanted, budget = plan_for(ceiling_bytes), ceiling_bytes

    def same(found: Plan) -> bool:
        return (found.n_persist, found.n_buffer, found.block_modes) == (wanted.n_persist, wanted.n_buffer, wanted.block_modes)

    tried = wanted
    while same(tried) and tried.peak_bytes < budget:
        budget = tried.peak_bytes
        try:
            tried = plan_for(budget)
        except BudgetError:  # of another tier
            break
    most = min(budget + budget // 16, ceiling_bytes)
    while budget < most and not same(tried):
        budget += budget // FINENESS + 1
        with contextlib.suppress(BudgetError):
            tried = plan_for(budget)
    return min(budget, most)


def budgets(smallest: int, largest: int, count: int) -> list[int]:
    """Bytes from the smallest to the largest, each the same multiple of the one before; fewer where they are too close."""
    if smallest >= largest or count < 2:
        return [smallest]
    steps = count - 1
    between = [round(smallest * (largest / smallest) ** (i / steps)) for i in range(1, steps)]
    return sorted({smallest, *(size for size in between if smallest < size < largest), largest})


def smallest_budget(plan_for: Callable[[int], Plan], ceiling_bytes: int = ENDLESS_BYTES) -> int:
    """The smallest budget that works: the one that refusals name, or to one part in FINENESS where they name none.

    Raises:
        BudgetError: not even the ceiling works.
    """
    from protrain.errors import BudgetError

    works = plan_for(ceiling_bytes).peak_bytes
    refused, asked = 0, 1
    while asked <= works:
        try:
            plan_for(asked)
            return asked
        except BudgetError as error:
            refused = asked
            if error.budget_bytes != asked or error.smallest_bytes <= asked:
                break  # another tier is too small for it, and no figure of this one is named
            asked = error.smallest_bytes
    while works - refused > max(works // FINENESS, 1):
        middle = (works + refused) // 2
        try:
            plan_for(middle)
            works = middle
        except BudgetError:
            refused = middle
    return works


def show(title: str, plans: list[Plan], as_json: bool, out: str | None) -> None:
    """Print the sweep as a table, or as JSON lines, and draw it. Raises OSError, CommandError."""
    from protrain.planner.explain import limit_of

    if not plans:
        raise CommandError("--sweep: no budget works")
    if as_json:
        for plan in plans:
            print(json_text({**json.loads(plan.to_json()), "limit": limit_of(plan)}), flush=True)
    else:
        print(title)
        _print(plans)
    if out is not None:
        from protrain.cli.plan_plot import draw

        with writing("--out", out):
            draw(out, title, plans)
        if not as_json:
            print(f"drawn to {out}")


def rows(plans: list[Plan]) -> list[list[str]]:
    """The table: a row for each plan."""
    from protrain.planner.explain import LETTERS, limit_of

    shown = []
    for plan in plans:
        waits = sum(plan.forecast.wait_seconds.values()) if plan.forecast else 0.0
        timed = plan.step_seconds > 0
        away = plan.host_bytes + plan.disk_bytes
        shown.append(
            [
                size_text(plan.budget_bytes),
                size_text(plan.peak_bytes),
                duration_text(plan.step_seconds) if timed else "not timed",
                f"{100 * waits / plan.step_seconds:.1f} %" if timed else "",
                limit_of(plan) or "",
                f"{plan.n_persist}/{plan.n_chunks}",
                str(plan.n_buffer),
                *(str(plan.block_modes.count(mode)) for mode in LETTERS),
                size_text(away) if away else "nothing",
            ]
        )
    return shown


def _print(plans: list[Plan]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from protrain.planner.explain import LETTERS

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("budget", "peak", "step", "waits", "limit", "persistent", "slots", *LETTERS.values(), "away"):
        table.add_column(heading, justify="left" if heading == "limit" else "right", no_wrap=True)
    for row in rows(plans):
        table.add_row(*row)
    console = Console(highlight=False)
    console.width = max(console.width if sys.stdout.isatty() else 0, TABLE_CHARACTERS)  # a narrower one would lose figures
    console.print(table)
    letters = ", ".join(f"{letter} {mode}" for mode, letter in LETTERS.items())
    print(f"persistent: chunks at home in memory; blocks of each mode: {letters}; away: on host and disk")
