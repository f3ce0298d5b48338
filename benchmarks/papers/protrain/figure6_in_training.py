"""Figures 6 and 8 of ProTrain for a training itself: the step and the peak that it foretells from its first steps.

    python -m benchmarks.papers.protrain.figure6_in_training --out benchmarks/results

Nobody plans beforehand: a model is wrapped with a budget, its first steps are the profile, the next ones confirm the plan, and
what `status` then foretells is compared with the steps after them, in the same process. What it foretold before it was
confirmed is beside it, where the plan stayed. So there is no rehearsal between, and no other moment of the machine
(figure6_prediction_error.py has both). Thirteen models and batches, three budgets each. The peak is that of all steps, and what
was foretold the highest of the plans that they ran by. Where the machine's cores were moved between the steps that a plan
follows from and those that it is compared with (placement.py), the training is made again.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Generator
from contextlib import closing
from itertools import combinations, takewhile
from typing import Any

from benchmarks.papers.placement import Placement, same_state
from benchmarks.papers.protrain import figure6_prediction_error as planned
from benchmarks.papers.records import Experiment, Settings, mib, say
from benchmarks.papers.training import Shape, Way, train
from benchmarks.papers.turns import Turns, quartiles

WHOLE_BYTES = 16 << 30  # a budget in which all stays in memory
#: Three confirmations of four steps each, the last behind a pause.
PROFILED_STEPS, CONFIRMING_STEPS, WARM_STEPS, MEASURED_STEPS = 2, 16, 1, 9
MOST_TRAININGS = 3  # of one case, until the machine stays as it is
MOST_REFUSALS = 4  # each names the smallest budget that is known to work by then


def trainings(shape: Shape, disk: str | None, device: str) -> Generator[Any, Any, None]:
    """Asked with a budget in bytes and a number of steps, trains; answers with the budget, or the smallest that works where it is
    more, and with the plan and the seconds of each step."""
    import protrain

    answer = None
    while True:
        budget_bytes, n_steps = yield answer
        for _ in range(MOST_REFUSALS):
            try:
                answer = {"budget_bytes": budget_bytes} | training(shape, Way(budget_bytes, disk=disk, device=device), n_steps)
                break
            except protrain.BudgetError as error:
                budget_bytes = error.smallest_bytes
        else:
            raise RuntimeError(f"{shape.name}: no budget was found that works")


def training(shape: Shape, way: Way, n_steps: int) -> dict[str, Any]:
    """One, from its first step on."""
    placement, copies, answers = Placement(), [], []
    with closing(train(shape, way)) as steps:
        next(steps)
        for _ in range(n_steps):
            answers.append(steps.send(1))
            copies.append(placement.seconds())
    return {
        "copy_seconds": copies,
        "plans": [answer["status"]["plan"] for answer in answers],
        "step_seconds": [answer["step_seconds"][0] for answer in answers],
        "peak_bytes": answers[-1]["status"]["peak_memory_bytes"],
    }


def steady(copy_seconds: list[float]) -> bool:
    """Whether the steps that are compared were made in one state of the machine, that of those that the plan follows from."""
    first, second = copy_seconds[:-MEASURED_STEPS], copy_seconds[-MEASURED_STEPS:]
    if not first:
        return True
    half = MEASURED_STEPS // 2
    parts = (first[:PROFILED_STEPS], first, second[:half], second[-half:])
    return all(same_state(one, other) for one, other in combinations(parts, 2))


def decisions(plan: dict[str, Any]) -> tuple[Any, ...]:
    """What a plan decides; plans that differ in their forecasts alone are one."""
    return tuple(plan[name] for name in ("n_persist", "n_buffer", "block_modes"))


def case_of(shape: Shape, found: dict[str, Any]) -> dict[str, Any]:
    """The last steps by one plan, but for one in which homes may have moved, beside what was foretold before them."""
    plans, first = found["plans"], found["plans"][PROFILED_STEPS - 1]
    in_force = plans[:-1]  # in each step but the first
    same = [None for _ in takewhile(lambda other: decisions(other) == decisions(in_force[-1]), reversed(in_force))]
    n_steps = min(MEASURED_STEPS, max(len(same) - 1, 1))
    plan, seconds = plans[-n_steps - 1], found["step_seconds"][-n_steps:]
    ratios = [plan["step_seconds"] / taken for taken in seconds]
    stayed = all(decisions(one) == decisions(first) for one in plans[PROFILED_STEPS:])
    planned_bytes = max(other["peak_bytes"] for other in found["plans"])
    return {
        "case": shape.name,
        "plan": plan | {"budget_bytes": found["budget_bytes"]},
        "planned_seconds": plan["step_seconds"],
        "step_seconds": statistics.median(seconds),
        "step_ratio": statistics.median(ratios),
        "first_step_ratio": first["step_seconds"] / statistics.median(seconds) if stayed else None,
        "quartiles": quartiles(ratios),
        "planned_bytes": planned_bytes,
        "peak_bytes": found["peak_bytes"],
        "peak_ratio": planned_bytes / found["peak_bytes"],
        "copy_seconds": found["copy_seconds"],
        "planned_seconds_of_each": [one["step_seconds"] for one in plans],
        "step_seconds_of_each": found["step_seconds"],
        "n_trainings": found["n_trainings"],
    }


def compared(shape: Shape, settings: Settings) -> list[dict[str, Any]]:
    """A process for each training: one that has measured models before is another machine."""
    found: list[dict[str, Any]] = []
    for share in (None, *planned.SHARES):
        budget_bytes = WHOLE_BYTES if share is None else int(share * found[0]["peak_bytes"])
        n_steps = 1 if share is None else PROFILED_STEPS + CONFIRMING_STEPS + WARM_STEPS + MEASURED_STEPS
        for number in range(MOST_TRAININGS):
            with Turns(trainings, shape, settings.disk, settings.device) as process:
                answer = process.ask((budget_bytes, n_steps))
            answer["n_trainings"] = number + 1
            if steady(answer["copy_seconds"]):
                break
            say(f"{shape.name}: the machine's cores were moved")
        found.append(answer)
    return [case_of(shape, one) for one in found[1:]]


def measure(settings: Settings) -> dict[str, Any]:
    if settings.device == "cuda":
        shapes = planned.GPU_SHAPES
    else:
        shapes = (Shape("gpt2", 64, 2, 1, 32),) if settings.tiny else planned.ALL_SHAPES
    cases = planned.gather(shapes, lambda shape: compared(shape, settings), "foretold to taken")
    return {"steps": MEASURED_STEPS, "cases": cases}


def body(record: dict[str, Any]) -> str:
    before = [abs(case["first_step_ratio"] - 1) for case in record["cases"] if case["first_step_ratio"] is not None]
    about = (
        f"Three budgets for each model: {', '.join(map(str, planned.SHARES))} of what training in memory takes, or the smallest "
        f"that works. Ratios: foretold by `status` before the last {record['steps']} steps, to their median, in brackets from "
        "quartile to quartile; and foretold to counted peak of all steps."
    )
    if before:
        within = sum(error <= planned.STEP_WITHIN for error in before)
        about += (
            f" {len(before)} plans were still in use that the first {PROFILED_STEPS} steps had led to; what was foretold with "
            f"those alone is within {planned.STEP_WITHIN:.0%} for {within}, its median error {statistics.median(before):.1%}."
        )
    moved = [case for case in record["cases"] if not steady(case["copy_seconds"])]
    again = sum(case["n_trainings"] > 1 for case in record["cases"])
    if again:
        about += f" The machine's cores were moved in the first training of {again} cases, which were trained again."
    if moved:
        names = ", ".join(f"{case['case']} in {mib(case['plan']['budget_bytes'])} MiB" for case in moved)
        about += f" They were moved in the last training of {len(moved)} too, whose steps mean less: {names}."
    return planned.page_of(record["cases"], about)


EXPERIMENT = Experiment(
    "protrain/figure6_in_training", "ProTrain, figures 6 and 8: prediction error in a training", measure, body
)


if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
