"""PatrickStar's eviction against a static partition: chunks placed by what a step needs, beside a fixed share of memory for them;
and what eviction costs, by the order of chunks that a step recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.papers.records import MIB, Experiment, Settings, mib, table
from benchmarks.papers.training import Shape, Way, train
from benchmarks.papers.turns import WARM_STEPS, Turns, take_turns

SHARES = (0.25, 0.5, 0.75)  # of the budget, for chunks that stay
STATE_ARRAYS = 3  # of a persistent chunk: parameters and two moments
PAPER = (
    "The paper: DeepSpeed, whose partition is static, trains models of 4 B and 30 B where PatrickStar trains 18 B and 68 B. Its "
    "eviction is that of the chunk whose next use is the farthest, by the moments that a warm-up step recorded."
)


def measure(settings: Settings) -> dict[str, Any]:
    if settings.device == "cuda":
        shape, budgets, rounds = Shape("gpt2", 1600, 48, 4, 1024, 50257), (16 << 30, 12 << 30), 5
    else:
        shape, budgets, rounds = Shape("gpt2", 512, 8, 2, 512), (256 * MIB, 160 * MIB), 5
    if settings.tiny:
        shape, budgets, rounds = Shape("gpt2", 128, 4, 1, 32), (12 * MIB,), 1
    rounds = settings.rounds or rounds
    cases = [measure_budget(shape, memory, rounds, settings) for memory in budgets]
    return {"shape": asdict(shape), "rounds": rounds, "cases": cases}


def measure_budget(shape: Shape, memory: int, rounds: int, settings: Settings) -> dict[str, Any]:
    """protrain's own plan in so many bytes, and the same with each share of them for chunks that stay."""
    own = Way(memory, device=settings.device, disk=settings.disk)
    with Turns(train, shape, own) as process:
        answer = process.ask(WARM_STEPS)
    plan = answer["status"]["plan"]
    ways = {"protrain": replace(own, plan=json.dumps(plan))}
    for share in SHARES:
        n_persist = min(int(share * memory / (STATE_ARRAYS * plan["chunk_bytes"])), plan["n_chunks"])
        static = plan | {"n_persist": n_persist, "n_host": min(plan["n_host"], plan["n_chunks"] - n_persist)}
        ways[f"{share:.0%} for chunks"] = replace(own, plan=json.dumps(static))
    eviction = evictions(answer["accesses"], answer["slot_of_chunk"])
    return {"memory": memory, "ways": take_turns(shape, ways, rounds), "eviction": eviction}


# ---- eviction ----


def evictions(accesses: Sequence[int], slot_of_chunk: Sequence[int]) -> dict[str, Any]:
    """How many chunks each policy brings in a step that follows one like it, in as many places as there are slots."""
    n_slots = len({slot_of_chunk[chunk] for chunk in accesses})
    return {
        "chunks": len(set(accesses)),
        "accesses": len(accesses),
        "slots": n_slots,
        "loads": {
            "fixed slots, protrain": loads_by_slots(accesses, slot_of_chunk),
            "farthest next use, PatrickStar": loads_by_choice(accesses, n_slots, farthest_next_use),
            "least recently used": loads_by_choice(accesses, n_slots, least_recently_used),
        },
    }


def loads_by_slots(accesses: Sequence[int], slot_of_chunk: Sequence[int]) -> int:
    """A chunk is brought where its slot has another; the second of two steps is counted."""
    held: dict[int, int] = {}
    loads = 0
    for number, chunk in enumerate([*accesses, *accesses]):
        if held.get(slot_of_chunk[chunk]) != chunk:
            held[slot_of_chunk[chunk]] = chunk
            loads += number >= len(accesses)
    return loads


def loads_by_choice(accesses: Sequence[int], n_places: int, victim: Any) -> int:
    """The same where a full memory gives up whom `victim` names, out of what is held, the whole order and the place in it."""
    order = [*accesses] * 3  # the third is the future that the second sees
    held: set[int] = set()
    loads = 0
    for number, chunk in enumerate(order[: 2 * len(accesses)]):
        if chunk in held:
            continue
        if len(held) == n_places:
            held.remove(victim(held, order, number))
        held.add(chunk)
        loads += number >= len(accesses)
    return loads


def farthest_next_use(held: set[int], order: Sequence[int], now: int) -> int:
    ahead = order[now:]
    return max(sorted(held), key=lambda chunk: ahead.index(chunk) if chunk in ahead else len(ahead))


def least_recently_used(held: set[int], order: Sequence[int], now: int) -> int:
    back = order[:now][::-1]
    return max(sorted(held), key=back.index)


# ---- the page ----


def body(record: dict[str, Any]) -> str:
    shape = record["shape"]
    about = (
        f"GPT-2 {shape['hidden']}x{shape['layers']}, {shape['batch']} x {shape['seq']} tokens, fp32 and AdamW; "
        f"{record['rounds']} rounds, a step each in turns, equal losses. Static: that share of the budget holds chunks that "
        "stay, with parameters and state; modes and slots are those of protrain's plan. What is too small a share leaves memory "
        "unused, what is too large does not fit beside the activations. Eviction: how many chunks a step brings by each "
        "policy, counted by its recorded order, chunks as if of one size; a fixed slot is what lets a parameter be a permanent "
        "view of it."
    )
    return "\n\n".join([about, PAPER, *(part for case in record["cases"] for part in budget_in_words(case))])


def budget_in_words(case: dict[str, Any]) -> list[str]:
    """A budget's table, what it shows, and its eviction."""
    rows, reasons = [], []
    for name, found in case["ways"].items():
        if "reason" in found:
            rows.append([name, *["–"] * 6])
            reasons.append(f"- {name}: {found['reason']}")
            continue
        plan, (low, high) = found["status"]["plan"], found["quartiles"]
        rows.append(
            [
                name, f"{plan['n_persist']}/{plan['n_chunks']}", str(plan["n_buffer"]), f"{found['median_seconds']:.3f}",
                f"{found['ratio']:.2f} ({low:.2f}–{high:.2f})", mib(found["step_read_bytes"]), mib(plan["peak_bytes"]),
            ]
        )  # fmt: skip
    eviction = case["eviction"]
    chosen = (
        f"Eviction: a step of protrain's plan asks {eviction['accesses']} times for {eviction['chunks']} chunks, which share "
        f"{eviction['slots']} slots."
    )
    loads = [[name, str(count)] for name, count in eviction["loads"].items()]
    alike = ["With so many slots no policy brings fewer than another."] if len(set(eviction["loads"].values())) == 1 else []
    return [
        f"## In {mib(case['memory'])} MiB",
        table(["", "persistent", "slots", "step, s", "to protrain", "read, MiB a step", "planned peak, MiB"], rows),
        "\n".join([*reasons, *verdicts(case["ways"])]),
        chosen,
        table(["policy", "chunks brought in a step"], loads),
        *alike,
    ]


def verdicts(ways: dict[str, Any]) -> list[str]:
    """A line for the shares that do not fit, and one for each that is not slower than protrain's plan."""
    refused = [name for name, found in ways.items() if "reason" in found]
    lines = [f"- As in the paper, a share that is too large cannot train at all: {', '.join(refused)}."] if refused else []
    for name, found in ways.items():
        if name == "protrain" or "reason" in found:
            continue
        own = ways["protrain"]
        more = found["step_read_bytes"] - own["step_read_bytes"]
        if found["status"]["plan"]["n_persist"] == own["status"]["plan"]["n_persist"]:
            lines.append(
                f"- {name} is protrain's plan over again: {found['ratio']:.2f} is how far two runs of one plan lie apart."
            )
        elif found["quartiles"][0] <= 1:
            lines.append(
                f"- {name} is no slower than protrain's plan ({found['ratio']:.2f}), though it reads {mib(more)} MiB more a "
                "step: at this batch what is read is hidden behind compute."
            )
    return lines


EXPERIMENT = Experiment("patrickstar/static_partition", "PatrickStar: eviction against a static partition", measure, body)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
