"""`--report FILE.html`: what a report is made of, collected while steps are made, and written as one page.

`Recorder` watches a wrapped model; what it found is a `Recorded`, which goes through JSON, since benchmarks train in processes of
their own. `Page` adds what the command knows: title, facts, comparisons. report_charts.py draws, report_page.py lays it out.
"""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protrain.base.thinning import kept
from protrain.cli import machine
from protrain.cli.words import CommandError, check_file, size_text

#: Of a lane's events, gaps shorter than this part of the step are no gaps that a page could show.
FINEST_PART = 2000
MOST_STEPS = 2000  # that are kept of a training, about


@dataclass(frozen=True)
class StepFigures:
    """One completed step. Predicted figures are of the plan that it was made under, 0 where there is none; bytes and seconds."""

    step: int
    loss: float
    seconds: float
    wait_seconds: float
    predicted_seconds: float
    peak_bytes: int
    predicted_peak_bytes: int


@dataclass(frozen=True)
class Row:
    """What one kind of events of a lane took in the step: spans in seconds from its beginning, none of which overlap."""

    lane: str
    name: str
    bytes: int
    busy_seconds: float
    spans: list[list[float]]


@dataclass(frozen=True)
class Recorded:
    """The steps, and of the last one its plan, memory (fields of MemorySample) and lanes; missing says why there are no lanes.
    Of very many steps and samples some are left out, of which there are so many."""

    steps: list[StepFigures]
    budget_bytes: int
    plan: dict[str, Any]
    last_step: int
    step_seconds: float
    samples: list[dict[str, Any]]
    rows: list[Row]
    missing: str = ""
    n_steps_left_out: int = 0
    n_samples_left_out: int = 0

    @property
    def n_steps(self) -> int:
        """How many were made."""
        return len(self.steps) + self.n_steps_left_out

    @property
    def n_samples(self) -> int:
        """How many were taken of the last step."""
        return len(self.samples) + self.n_samples_left_out

    @classmethod
    def from_fields(cls, found: dict[str, Any]) -> Recorded:
        """What `fields_of` made of one."""
        steps, rows = [StepFigures(**s) for s in found["steps"]], [Row(**r) for r in found["rows"]]
        return cls(**found | {"steps": steps, "rows": rows})


@dataclass(frozen=True)
class Side:
    """One of what is compared: its name, seconds of each round, and figures for the table by heading."""

    name: str
    seconds: list[float]
    figures: dict[str, str]


@dataclass(frozen=True)
class Point:
    """A configuration in the picture of speed against memory."""

    name: str
    mode: str
    activation_peak_bytes: int
    tokens_per_second: float
    figures: dict[str, str]


@dataclass(frozen=True)
class Compared:
    """A row of the comparison with peers. kind: "ours", "reference" or "peer"; seconds: of each round."""

    name: str
    kind: str
    tokens: int
    seconds: list[float]
    peak_bytes: int

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Of the seconds, the median in the middle."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0], self.seconds[0]
        low, middle, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, middle, high

    @property
    def rates(self) -> tuple[float, float, float]:
        """Tokens per second, from slow to fast: at the quartiles of the seconds."""
        low, middle, high = self.quartiles
        return self.tokens / high, self.tokens / middle, self.tokens / low


@dataclass(frozen=True)
class Page:
    """What the page says. recorded: by the name of what was trained; several where configurations are compared."""

    title: str
    subtitle: str
    facts: list[tuple[str, str]]
    recorded: dict[str, Recorded]
    sides: list[Side] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_report(name: str | None) -> None:
    """Whether a report can be made there, before anything slow begins; None: none is wanted. Raises CommandError."""
    if name is None:
        return
    if not name.lower().endswith(".html"):
        raise CommandError(f"--report {name!r} is no HTML; give a name that ends in .html")
    if importlib.util.find_spec("vl_convert") is None:
        raise CommandError("--report needs vl-convert-python, which is not installed: pip install 'protrain[report]'")
    check_file("--report", name)


def write(name: str, page: Page) -> None:
    """Write the page, as a whole or not at all. Raises OSError."""
    from protrain.base.replacing import write_file
    from protrain.cli.report_page import html

    write_file(name, html(page).encode())


def machine_facts(disk: str | None) -> list[tuple[str, str]]:
    """The machine and what runs on it."""
    import torch

    import protrain

    total, _ = machine.memory()
    limit = machine.cgroup_limit()
    memory = f"{size_text(total)} of memory" + (f", limited to {size_text(limit)}" if limit is not None and limit < total else "")
    facts = [("Processor", f"{machine.cpu_name()}, {torch.get_num_threads()} threads"), ("Machine", memory)]
    if disk is not None:
        kind, free = machine.file_system(disk)
        facts.append(("Disk", f"{kind}, {size_text(free)} free"))
    return [*facts, ("Software", f"protrain {_version(protrain)}, torch {torch.__version__}")]


def _version(package: Any) -> str:
    return str(getattr(package, "__version__", "")) or "without a version"


class Recorder:
    """Of one wrapped model. Call `after` when a step is complete."""

    def __init__(self, model: Any) -> None:
        import protrain

        self._model = model
        self._samples = protrain.session_of(model).watch_memory()
        self._status: Any = None
        self._n_steps = 0
        self.steps: list[StepFigures] = []

    @property
    def disk(self) -> str:
        """The folder of what does not fit memory."""
        import protrain

        return os.fspath(protrain.session_of(self._model).wrapped.settings.disk)

    def after(self, loss: float, status: Any) -> None:
        """A step is complete. Args: status, of the model, right after it."""
        memory = self._samples.last
        if memory is None or memory.step != status.steps:
            return
        self._status = status
        self._n_steps += 1
        if len(self.steps) >= 2 * MOST_STEPS:
            self.steps = thinned(self.steps, MOST_STEPS)
        plan = memory.plan
        self.steps.append(
            StepFigures(
                status.steps, loss, status.step_seconds, status.wait_seconds, plan.step_seconds, memory.peak_bytes,
                plan.peak_bytes,
            )
        )  # fmt: skip

    def recorded(self) -> Recorded | None:
        """What there is so far; None before the first complete step. The last one's lanes are asked for now."""
        from protrain.cli.train import fields_of
        from protrain.errors import StepError

        memory, status = self._samples.last, self._status
        if memory is None or status is None or memory.step != status.steps:
            return None
        rows: list[Row] = []
        missing = ""
        try:
            rows = _rows(status.timeline())
        except StepError as error:
            missing = str(error)
        steps = thinned(self.steps, MOST_STEPS)
        return Recorded(
            steps, status.budget_bytes, fields_of(memory.plan), memory.step, memory.samples[-1].seconds,
            [fields_of(sample) for sample in memory.samples], rows, missing, self._n_steps - len(steps), memory.n_left_out,
        )  # fmt: skip


def thinned(steps: Sequence[StepFigures], most: int) -> list[StepFigures]:
    """About so many of the steps at most, evenly; and the highest loss, peak and time of all. A loss that is no number is the
    highest."""

    def size(step: StepFigures, name: str) -> float:
        value: float = getattr(step, name)
        return value if math.isfinite(value) else math.inf

    sizes = [[0.0, *(size(step, name) for name in ("loss", "peak_bytes", "seconds"))] for step in steps]
    return [steps[number] for number in kept([step.step for step in steps], sizes, most)]


def _rows(timeline: Any) -> list[Row]:
    """A row for each kind of events of each lane, those that touch as one span, cut to the step."""
    from protrain.profiling.timeline import KINDS, LANES, length, union

    found: dict[tuple[int, int], list[Any]] = {}
    for event in timeline.events:
        if event.lane != "step":
            found.setdefault((LANES.index(event.lane), KINDS.index(event.name.split(" ")[0])), []).append(event)
    rows = []
    for (lane, kind), events in sorted(found.items()):
        cut = [(max(e.start_seconds, 0.0), min(e.end_seconds, timeline.seconds)) for e in events]
        spans = union((start, end) for start, end in cut if start < end)
        if spans:
            name = _row_name(LANES[lane], KINDS[kind])
            shown = _joined(spans, timeline.seconds / FINEST_PART)
            rows.append(Row(LANES[lane], name, sum(e.bytes for e in events), length(spans), shown))
    return rows


def _row_name(lane: str, kind: str) -> str:
    if lane == "compute":
        return {"recompute": "compute again"}.get(kind, kind)
    if lane == "wait":
        return f"wait for {'updates' if kind == 'update' else kind}"
    return lane if lane == kind else f"{lane} {kind}"


def _joined(spans: Iterable[tuple[float, float]], gap: float) -> list[list[float]]:
    """The spans, those joined that are closer than a gap: what a page shows as one."""
    joined: list[list[float]] = []
    for start, end in spans:
        if joined and start - joined[-1][1] < gap:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    return joined
