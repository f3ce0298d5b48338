"""`protrain bench step`: a training step of plain PyTorch beside one of protrain, on this machine, now.

Two child processes hold the same model with the same weights, one plain, one wrapped. They take turns, one step each, so
that what else the machine does meets both; the figure is the ratio of the medians. Both must find the same losses, or the
comparison is void and that is the error.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from protrain.cli import interrupt
from protrain.cli.report import Page, Recorded, Side, check_report, machine_facts, write
from protrain.cli.words import CommandError, duration_text, json_text, size_text, writing

WARM_STEPS = 3  # of protrain: the first plans, the first two update in step()
LATE_SECONDS = 20.0  # after Ctrl-C: at most, for the steps that are under way
WRITE_SECONDS = 30.0  # and for what was measured to be written


@dataclass(frozen=True)
class Words:
    """The options of `bench step`. Sizes in bytes, sequences in tokens."""

    model_name: str
    memory: int | None
    seq: int
    batch: int
    rounds: int
    seed: int
    disk: str | None
    as_json: bool
    report: str | None = None


class Child:
    """A worker process that answers each line it is given with one line of JSON. A terminal's Ctrl-C does not reach it."""

    def __init__(self, kind: str, words: dict[str, Any], name: str | None = None) -> None:
        """Args: kind, plain or protrain; words, the worker's; name, by which errors call it, the kind by default."""
        self._kind = name or kind
        self._process = subprocess.Popen(
            [sys.executable, "-m", "protrain.cli.bench_worker", kind, json.dumps(words)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._owes = False  # an answer, to a word that Ctrl-C came behind

    def ask(self, word: str, seconds: float | None = None) -> dict[str, Any]:
        """Raises CommandError with what the child says where it fails, or where it does not answer in so many seconds."""
        if self._process.stdin is None:
            raise CommandError(f"the {self._kind} process has no pipes")
        if self._owes:
            self._answer(seconds)
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; its last line says why
        self._owes = True
        return self._answer(seconds)

    def _answer(self, seconds: float | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        if seconds is not None and not select.select([self._process.stdout], [], [], seconds)[0]:
            raise CommandError(f"{self._kind}: no answer in {seconds:.0f} s")
        line = self._process.stdout.readline()
        self._owes = False
        answer: dict[str, Any] = (
            json.loads(line) if line else {"error": f"the process ended with exit code {self._process.wait()}"}
        )
        if "error" in answer:
            raise CommandError(answer["error"] if self._kind == "protrain" else f"{self._kind}: {answer['error']}")
        return answer

    def end(self) -> None:
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # which closes its pipes and waits
            pass


def run(words: Words) -> None:
    """Measure and print. Raises CommandError."""
    from protrain.cli.model import check_batch, read_config

    check_report(words.report)
    config, _ = read_config(words.model_name)
    check_batch(config, words.batch, words.seq)
    children: dict[str, Child] = {}
    with saying_what_is_missing():
        try:
            for kind in ("plain", "protrain"):
                children[kind] = Child(kind, asdict(words))
            result = _take_turns(words, children)
        finally:
            for child in children.values():
                child.end()
    recorded = result["protrain"].pop("recorded", None)
    if words.as_json:
        print(json_text(result), flush=True)
    else:
        _print(words, result)
    if words.report is not None and recorded is not None:
        with writing("--report", words.report):
            write(words.report, _page(words, result, Recorded.from_fields(recorded)))
        if not words.as_json:
            print(f"report in {words.report}")
    if result["interrupted"]:
        end_early(f"after {result['rounds']} of {words.rounds} rounds", words.as_json)


@contextmanager
def saying_what_is_missing() -> Iterator[None]:
    """Around what measures: where Ctrl-C ends it, a line on stderr says why nothing is shown."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted before there was anything to show", file=sys.stderr, flush=True)
        raise


def end_early(when: str, as_json: bool) -> None:
    """Say that this is not all, and end as Ctrl-C ends a command. Raises KeyboardInterrupt."""
    if not as_json:
        print(f"interrupted {when}: this is what was measured until then", flush=True)
    raise KeyboardInterrupt


def _take_turns(words: Words, children: dict[str, Child]) -> dict[str, Any]:
    for child in children.values():
        child.ask("ready")
    seconds: dict[str, list[float]] = {kind: [] for kind in children}
    interrupted = False
    try:
        for number in range(WARM_STEPS + words.rounds):
            answers = {kind: child.ask("step") for kind, child in children.items()}
            _check_losses(number, answers)
            if number >= WARM_STEPS:
                for kind in children:
                    seconds[kind].append(answers[kind]["seconds"])
    except KeyboardInterrupt:
        if not seconds["protrain"]:
            raise
        interrupted = True
        interrupt.extend(LATE_SECONDS + WRITE_SECONDS)
    ends = {kind: child.ask("end", LATE_SECONDS if interrupted else None) for kind, child in children.items()}
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "ratio": medians["protrain"] / medians["plain"],
        "rounds": len(seconds["plain"]),
        "interrupted": interrupted,
        **{kind: {"median_seconds": medians[kind], "seconds": seconds[kind], **ends[kind]} for kind in children},
    }


def _check_losses(number: int, answers: dict[str, Any]) -> None:
    plain, protrain = (answers[kind]["loss"] for kind in ("plain", "protrain"))
    if plain != protrain:
        raise CommandError(f"step {number + 1}: the loss is {plain} in plain torch, {protrain} in protrain; they must be equal")


def _page(words: Words, result: dict[str, Any], recorded: Recorded) -> Page:
    sides = [
        Side(
            name,
            result[kind]["seconds"],
            {
                "median": duration_text(result[kind]["median_seconds"]),
                "fastest": duration_text(min(result[kind]["seconds"])),
                "slowest": duration_text(max(result[kind]["seconds"])),
                "peak resident": size_text(result[kind]["peak_resident_bytes"]),
                "grew by": size_text(result[kind]["peak_resident_bytes"] - result[kind]["base_resident_bytes"]),
            },
        )
        for kind, name in (("plain", "plain PyTorch"), ("protrain", "protrain"))
    ]
    facts = [
        ("Model", f"{words.model_name}, random weights of seed {words.seed}"),
        ("Step", f"{words.batch} × {words.seq} random tokens"),
        ("Budget", f"{size_text(recorded.budget_bytes)} of memory for protrain"),
        ("Knobs", "none: the plan was chosen by protrain"),
        ("Result", f"protrain takes {result['ratio']:.2f} times as long a step; losses are equal in every step"),
        *machine_facts(None),
    ]
    subtitle = (
        f"{words.model_name} in {size_text(recorded.budget_bytes)}, {words.batch} × {words.seq} tokens, {result['rounds']} "
        f"rounds: "
        f"{result['ratio']:.2f} times the time of plain PyTorch"
    )
    return Page("protrain bench step", subtitle, facts, {"protrain": recorded}, sides=sides)


def _print(words: Words, result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for heading in ("median step", "fastest", "slowest", "peak resident", "grew by"):
        table.add_column(heading, justify="right")
    for kind in ("plain", "protrain"):
        row = result[kind]
        table.add_row(
            kind,
            duration_text(row["median_seconds"]),
            duration_text(min(row["seconds"])),
            duration_text(max(row["seconds"])),
            size_text(row["peak_resident_bytes"]),
            size_text(row["peak_resident_bytes"] - row["base_resident_bytes"]),
        )
    print(
        f"{words.model_name}, batch {words.batch} x {words.seq} tokens, {result['rounds']} rounds, "
        f"budget {size_text(result['protrain']['budget_bytes'])}, equal losses"
    )
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)
    print(
        f"protrain takes {result['ratio']:.2f} times as long a step; "
        "'grew by' is the peak less what python and torch hold before the model"
    )
