"""What a person, or a program, sees of a training: a live panel on a terminal, plain lines in a file, JSON lines with --json.

All three are told the same things: `stage` (what is being prepared), `note` (a warning, as it comes), `step` (a finished step),
`saving` (how much is written) and `finish` (the summary).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from protrain.cli.words import count, duration_text, json_text, size_text


@dataclass(frozen=True)
class Step:
    """One finished step. Bytes read and written on disk are this step's alone; the peak is since the beginning."""

    step: int
    loss: float
    seconds: float
    tokens_per_second: float
    memory_bytes: int
    peak_memory_bytes: int
    wait_seconds: float
    step_read_bytes: int
    step_write_bytes: int


@dataclass(frozen=True)
class Summary:
    """A finished training. `fields` is what the library's status says, by its names, such as the steps in all; `steps_made` are
    those of this run, which may have gone on from a checkpoint."""

    steps_made: int
    first_loss: float
    last_loss: float
    seconds: float
    parameters: int
    budget_bytes: int | None
    out: str | None
    saved_bytes: int
    warnings: list[str]
    fields: dict[str, Any]
    trace: str | None = None
    report: str | None = None
    save_profile: str | None = None


class Display(Protocol):
    """The three ways to show a training."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *_: object) -> None: ...
    def stage(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def saving(self, done_bytes: int, total_bytes: int) -> None: ...
    def step(self, step: Step) -> None: ...
    def finish(self, summary: Summary) -> None: ...


def make_display(title: str, steps: int, budget_bytes: int | None, as_json: bool) -> Display:
    """The display for this stdout. Args: steps, in all; budget_bytes, None where the library chooses it."""
    if as_json:
        return _Json()
    live = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")  # on which nothing can be drawn in place
    return _Live(title, steps, budget_bytes) if live else _Plain(title, steps, budget_bytes)


class _Json:
    def __enter__(self) -> _Json:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stage(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass  # a line of stdout is a step, or the summary, which has them all

    def saving(self, done_bytes: int, total_bytes: int) -> None:
        pass

    def step(self, step: Step) -> None:
        print(json_text(asdict(step)), flush=True)

    def finish(self, summary: Summary) -> None:
        values = asdict(summary)
        print(json_text(values | values.pop("fields")), flush=True)


class _Plain:
    def __init__(self, title: str, steps: int, budget_bytes: int | None) -> None:
        self._title, self._steps, self._budget_bytes = title, steps, budget_bytes

    def __enter__(self) -> _Plain:
        print(self._title, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stage(self, text: str) -> None:
        print(text, flush=True)

    def note(self, text: str) -> None:
        print(f"note: {text}", flush=True)

    def saving(self, done_bytes: int, total_bytes: int) -> None:
        pass  # lines of a file: one for all of it is enough

    def step(self, step: Step) -> None:
        print(
            f"step {step.step}/{self._steps}  loss {step.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s  "
            f"memory {_of_budget(step.memory_bytes, self._budget_bytes)}  waited {_share(step)}  "
            f"disk {_rates(step)}  {step.seconds:.2f} s",
            flush=True,
        )

    def finish(self, summary: Summary) -> None:
        for label, text in _summary_rows(summary):
            print(f"{label}: {text}", flush=True)


class _Live:
    """A panel that is drawn in place, then the summary below it."""

    def __init__(self, title: str, steps: int, budget_bytes: int | None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.markup import escape

        self._title, self._steps, self._budget_bytes = escape(title), steps, budget_bytes
        self._stage, self._first_loss, self._begin = "getting ready", 0.0, time.monotonic()
        self._recent: list[float] = []
        self._last: Step | None = None  # before Live, which draws at once
        self._console = Console(highlight=False)
        self._live = Live(
            get_renderable=self._panel, console=self._console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False
        )

    def __enter__(self) -> _Live:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def stage(self, text: str) -> None:
        self._stage = text

    def note(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.assemble(("note  ", "bold"), text))  # stays above the panel

    def saving(self, done_bytes: int, total_bytes: int) -> None:
        whole = done_bytes >= total_bytes
        self._stage = "" if whole else f"saving, {done_bytes / total_bytes:.0%} of {size_text(total_bytes)}"

    def step(self, step: Step) -> None:
        if self._last is None:
            self._first_loss = step.loss
        self._last, self._stage = step, ""
        self._recent = [*self._recent[-9:], step.seconds]
        self._live.refresh()

    def finish(self, summary: Summary) -> None:
        from rich.table import Table
        from rich.text import Text

        self._stage = ""
        self._live.refresh()
        self._live.__exit__(None, None, None)
        table = Table.grid(padding=(0, 2))
        for label, text in _summary_rows(summary):
            table.add_row(Text(label, style="bold"), Text(text))
        self._console.print(table)

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        last = self._last
        if last is None:
            elapsed = duration_text(time.monotonic() - self._begin)
            return Panel(Text(f"{self._stage} ... {elapsed}"), title=self._title, title_align="left")
        left = self._steps - last.step
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        until = self._stage or (f"{duration_text(left * _median(self._recent))} to go" if left else "done")
        head.add_row(f"step {last.step}/{self._steps}", ProgressBar(total=self._steps, completed=last.step), until)
        body = Table.grid(padding=(0, 2))
        body.add_row("loss", Text(f"{last.loss:.4f}", style="bold"), f"from {self._first_loss:.4f}")
        body.add_row("speed", f"{last.tokens_per_second:,.0f} tokens/s", f"{last.seconds:.2f} s a step")
        body.add_row(
            "memory", f"{size_text(last.memory_bytes)} now", f"peak {_of_budget(last.peak_memory_bytes, self._budget_bytes)}"
        )
        body.add_row(
            "disk", f"read {_rate(last.step_read_bytes, last.seconds)}", f"write {_rate(last.step_write_bytes, last.seconds)}"
        )
        body.add_row("waiting", _share(last), "of the step's time")
        return Panel(Group(head, body), title=self._title, title_align="left")


def _of_budget(size_bytes: int, budget_bytes: int | None) -> str:
    """As "612 of 1,024 MiB"."""
    size = f"{size_bytes / (1 << 20):,.0f}"
    return f"{size} MiB" if budget_bytes is None else f"{size} of {budget_bytes / (1 << 20):,.0f} MiB"


def _rate(size_bytes: int, seconds: float) -> str:
    return f"{size_bytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else "0.00 GB/s"


def _rates(step: Step) -> str:
    return f"{_rate(step.step_read_bytes, step.seconds)} read, {_rate(step.step_write_bytes, step.seconds)} written"


def _share(step: Step) -> str:
    return f"{100 * step.wait_seconds / step.seconds:.1f} %" if step.seconds > 0 else "0.0 %"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _summary_rows(summary: Summary) -> list[tuple[str, str]]:
    fields = summary.fields
    states_bytes = 16 * summary.parameters
    made, steps = summary.steps_made, int(fields["steps"])
    in_all = f", {steps:,} with those of the checkpoint" if steps != made else ""
    rows = [
        ("trained", f"{count(made, 'step')} in {duration_text(summary.seconds)}{in_all}"),
        ("loss", f"{summary.first_loss:.4f} -> {summary.last_loss:.4f}"),
        ("states", f"{size_text(states_bytes)} of parameters, gradients and moments"),
        ("peak", f"{_of_budget(int(fields['peak_memory_bytes']), summary.budget_bytes)} of memory"),
        ("disk", f"{size_text(int(fields['disk_read_bytes']))} read, {size_text(int(fields['disk_write_bytes']))} written"),
    ]
    rows.append(
        (
            "saved",
            f"{summary.out} ({size_text(summary.saved_bytes)} of weights)"
            if summary.out
            else "nothing; --out FOLDER keeps the model",
        )
    )
    if summary.trace is not None:
        rows.append(("trace", f"{summary.trace} (ui.perfetto.dev shows it)"))
    if summary.report is not None:
        rows.append(("report", summary.report))
    if summary.save_profile is not None:
        rows.append(("profile", summary.save_profile))
    return rows


@contextmanager
def status_line(as_json: bool) -> Iterator[Callable[[str], None]]:
    """A line that says what goes on: on a terminal it changes, elsewhere lines on stderr would be errors, so there is none."""
    if as_json or not sys.stdout.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(highlight=False).status("getting ready") as line:
        yield line.update
