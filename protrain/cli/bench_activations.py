"""`protrain bench activations`: the curve of SSDTrain's paper on this machine, speed against the memory of activations.

Every configuration (keep, swap, checkpoint, checkpoint_swap, and mixes whose first blocks leave memory) is a process of its
own that holds the same model with the same weights, every state in memory, so that activations are all that moves. They take
turns, one step each, so that what else the machine does meets them all. A step counts only where its loss is that of keep.

Memory: a process holds what its largest step took, so not all of them may fit at once. Keep needs the most; it starts first,
and as many others as the memory that is then free has room for run beside it. The rest follows in groups of their own, each
beside keep, whose process goes on: times are compared within a group.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from protrain.cli import interrupt, machine
from protrain.cli.bench import LATE_SECONDS, WARM_STEPS, WRITE_SECONDS, Child, end_early, saying_what_is_missing
from protrain.cli.display import status_line
from protrain.cli.report import Page, Point, Recorded, check_report, machine_facts, write
from protrain.cli.words import MIB, CommandError, check_picture, duration_text, json_text, size_text, writing

KEEP = "keep"


@dataclass(frozen=True)
class Words:
    """The options of `bench activations`. Sizes in bytes, sequences in tokens."""

    model_name: str
    memory: int
    seq: int
    batch: int
    rounds: int
    mixes: int
    seed: int
    disk: str | None
    out: str | None
    as_json: bool
    report: str | None = None


@dataclass(frozen=True)
class Configuration:
    """Modes for the blocks: the first n_moved of them mode, the others keep."""

    mode: str
    n_moved: int
    n_blocks: int

    @property
    def name(self) -> str:
        """As "swap", or "swap 2/8" for a mix."""
        return self.mode if self.n_moved == self.n_blocks else f"{self.mode} {self.n_moved}/{self.n_blocks}"

    @property
    def block_modes(self) -> list[str]:
        """The mode of each block."""
        return [self.mode] * self.n_moved + [KEEP] * (self.n_blocks - self.n_moved)


@dataclass(frozen=True)
class Measured:
    """A configuration's figures. The activation peak is what the peak had above what is held between steps; bytes read and
    written are of a step, on average; seconds are of each round, keep_seconds those of keep in the same rounds."""

    name: str
    block_modes: list[str]
    tokens_per_second: float
    median_seconds: float
    ratio_to_keep: float
    activation_peak_bytes: int
    peak_memory_bytes: int
    memory_bytes: int
    wait_seconds: float
    step_read_bytes: float
    step_write_bytes: float
    seconds: list[float]
    keep_seconds: list[float]


def configurations(n_blocks: int, n_mixes: int) -> list[Configuration]:
    """Keep first, then each curve from little to all that leaves memory."""
    moved = sorted({round(n_blocks * part / (n_mixes + 1)) for part in range(1, n_mixes + 1)} - {0, n_blocks})
    found = [Configuration(KEEP, n_blocks, n_blocks)]
    for mode in ("swap", "checkpoint"):
        found += [Configuration(mode, n, n_blocks) for n in (*moved, n_blocks)]
    return [*found, Configuration("checkpoint_swap", n_blocks, n_blocks)]


def run(words: Words) -> None:
    """Measure, print, draw. Raises CommandError."""
    from protrain.cli.model import check_batch, read_config

    if words.out is not None:
        check_picture("--out", words.out)
    check_report(words.report)
    config, _ = read_config(words.model_name)
    check_batch(config, words.batch, words.seq)
    wanted = configurations(_count_blocks(config), words.mixes)
    found: list[Measured] = []
    with saying_what_is_missing(), status_line(words.as_json) as say:
        bench = _Bench(words, say)
        for measured in bench.measure(wanted):
            found.append(measured)
            if words.as_json:
                print(json_text(asdict(measured)), flush=True)
    summary = _summary(words, found)
    if words.as_json:
        print(json_text(summary), flush=True)
    else:
        _print(found, summary)
    if words.out is not None:
        from protrain.cli.bench_plot import draw

        with writing("--out", words.out):
            draw(words.out, found, summary)
    if words.report is not None:
        with writing("--report", words.report):
            write(words.report, _page(words, found, summary["rounds"], bench.recorded))
    if not words.as_json:
        for done, name in (("drawn to", words.out), ("report in", words.report)):
            if name is not None:
                print(f"{done} {name}")
    if bench.interrupted:
        end_early(f"with {len(found)} of {len(wanted)} configurations measured", words.as_json)


def _count_blocks(config: Any) -> int:
    from protrain.cli.model import build
    from protrain.model.blocks import find_blocks

    count = len(find_blocks(build(config)))
    if count == 0:
        raise CommandError(f"no blocks were found in this {config.model_type} model; give a model of repeated layers")
    return count


class _Bench:
    """The processes and what they told."""

    def __init__(self, words: Words, say: Any) -> None:
        self._words, self._say = words, say
        self._losses: list[float] = []  # of keep, step by step
        self._seconds: list[float] = []  # of keep, every measured round
        self.recorded: dict[str, Recorded] = {}  # for a report, of the pure modes
        self.interrupted = False

    def measure(self, wanted: list[Configuration]) -> Iterator[Measured]:
        """Keep's figures come last, when all its rounds are over. wanted[0] is keep. After Ctrl-C: of the rounds until then;
        raises KeyboardInterrupt where there are none."""
        keep, waiting = self._start(wanted[0]), wanted[1:]
        try:
            resident = self._warm(wanted[0], keep, is_keep=True)
            while waiting and not self.interrupted:
                done = yield from self._group(keep, resident, waiting)
                waiting = waiting[done:]
            if len(wanted) == 1:
                self._rounds({}, keep)
            if not self._seconds:
                raise KeyboardInterrupt
            yield self._figures(wanted[0], keep, self._seconds, self._seconds)
        finally:
            keep.end()

    def _group(self, keep: Child, resident: int, waiting: list[Configuration]) -> Generator[Measured, None, int]:
        """As many of the waiting as memory has room for beside keep, which holds `resident` bytes; returns how many."""
        children: dict[Configuration, Child] = {}
        try:
            for configuration in waiting:
                free_bytes = _free_bytes(resident * (1 + len(children)))
                if free_bytes < resident * 5 // 4:
                    if not children:
                        raise CommandError(
                            f"keep holds {size_text(resident)}, {size_text(free_bytes)} are free for a second process beside it; "
                            f"give a smaller --batch or --seq, or a smaller --model"
                        )
                    break
                children[configuration] = self._start(configuration)
                self._warm(configuration, children[configuration])
            first = len(self._seconds)
            seconds = self._rounds(children, keep)
            for configuration, child in children.items():
                if seconds[configuration]:
                    yield self._figures(configuration, child, seconds[configuration], self._seconds[first:])
        except KeyboardInterrupt:
            self._stop()
        finally:
            for child in children.values():
                child.end()
        return len(children)

    def _start(self, configuration: Configuration) -> Child:
        return Child("protrain", asdict(self._words) | {"block_modes": configuration.block_modes}, configuration.name)

    def _warm(self, configuration: Configuration, child: Child, is_keep: bool = False) -> int:
        """The steps before those that are measured; the process's resident bytes after them."""
        self._say(f"{configuration.name}: starting")
        child.ask("ready")
        for number in range(WARM_STEPS):
            self._step(configuration.name, child, number, is_keep)
        resident_bytes: int = child.ask("end")["peak_resident_bytes"]
        return resident_bytes

    def _step(self, name: str, child: Child, number: int, is_keep: bool = False) -> float:
        """One step, its number counted from 0 in its process; its seconds."""
        answer = child.ask("step")
        if is_keep:
            self._losses.append(answer["loss"])
        elif answer["loss"] != self._losses[number]:
            raise CommandError(
                f"step {number + 1}: the loss is {self._losses[number]} with keep, {answer['loss']} with {name}; "
                f"they must be equal"
            )
        seconds: float = answer["seconds"]
        return seconds

    def _rounds(self, children: dict[Configuration, Child], keep: Child) -> dict[Configuration, list[float]]:
        """The seconds of each round that was complete."""
        seconds: dict[Configuration, list[float]] = {configuration: [] for configuration in children}
        try:
            for number in range(self._words.rounds):
                self._say(f"round {number + 1} of {self._words.rounds}: keep and {', '.join(c.name for c in children)}")
                of_keep = self._step(KEEP, keep, len(self._losses), is_keep=True)
                of_round = [self._step(one.name, child, WARM_STEPS + number) for one, child in children.items()]
                self._seconds.append(of_keep)
                for configuration, taken in zip(children, of_round, strict=True):
                    seconds[configuration].append(taken)
        except KeyboardInterrupt:
            self._stop()
        return seconds

    def _stop(self) -> None:
        self.interrupted = True
        interrupt.extend(LATE_SECONDS + WRITE_SECONDS)

    def _figures(self, configuration: Configuration, child: Child, seconds: list[float], keep_seconds: list[float]) -> Measured:
        answer = child.ask("end", LATE_SECONDS if self.interrupted else None)
        words, status = self._words, answer["status"]
        if "recorded" in answer and configuration.n_moved == configuration.n_blocks:
            self.recorded[configuration.name] = Recorded.from_fields(answer["recorded"])
        plan = status["plan"]
        if plan["n_persist"] != plan["n_chunks"]:
            raise CommandError(
                f"{configuration.name}: states leave memory with a budget of {size_text(words.memory)}, which would be measured "
                f"as well; give a larger --memory"
            )
        if list(plan["block_modes"]) != configuration.block_modes:
            raise CommandError(f"{configuration.name}: the plan that was used has other modes, {plan['block_modes']}")
        median = statistics.median(seconds)
        return Measured(
            configuration.name,
            configuration.block_modes,
            words.batch * words.seq / median,
            median,
            statistics.median(a / b for a, b in zip(seconds, keep_seconds, strict=True)),
            status["peak_memory_bytes"] - status["memory_bytes"],
            status["peak_memory_bytes"],
            status["memory_bytes"],
            status["wait_seconds"],
            status["disk_read_bytes"] / status["steps"],
            status["disk_write_bytes"] / status["steps"],
            seconds,
            keep_seconds,
        )


def _free_bytes(used_bytes: int) -> int:
    """Memory that another process may take. Args: used_bytes, of our processes, which count against the control group."""
    _, available = machine.memory()
    limit = machine.cgroup_limit()
    return available if limit is None else min(available, limit - used_bytes)


def _summary(words: Words, found: list[Measured]) -> dict[str, Any]:
    return {
        "model": words.model_name,
        "batch": words.batch,
        "seq": words.seq,
        "rounds": min(len(measured.seconds) for measured in found),
        "seed": words.seed,
        "budget_bytes": words.memory,
        "cpu": machine.cpu_name(),
        "configurations": [measured.name for measured in found],
        "equal_losses": True,  # or there were no figures
        "out": words.out,
        "report": words.report,
    }


def _page(words: Words, found: list[Measured], rounds: int, recorded: dict[str, Recorded]) -> Page:
    ordered = [found[-1], *found[:-1]]
    points = [
        Point(
            m.name,
            m.name.split(" ")[0],
            m.activation_peak_bytes,
            m.tokens_per_second,
            {
                "activation peak": size_text(m.activation_peak_bytes),
                "tokens/s": f"{m.tokens_per_second:,.0f}",
                "median step": duration_text(m.median_seconds),
                "time to keep's": f"{m.ratio_to_keep:.3f}",
                "waited": duration_text(m.wait_seconds),
            },
        )
        for m in ordered
    ]
    facts = [
        ("Model", f"{words.model_name}, random weights of seed {words.seed}"),
        ("Step", f"{words.batch} × {words.seq} random tokens, median of {rounds} rounds that take turns"),
        ("Budget", f"{size_text(words.memory)} of memory, which holds every state"),
        ("Knobs", "block modes, as named; all else was chosen by protrain"),
        *machine_facts(None),
    ]
    subtitle = f"{words.model_name}, {words.batch} × {words.seq} tokens, every state in memory, equal losses"
    modes = {m.name: recorded[m.name] for m in ordered if m.name in recorded}
    return Page("protrain bench activations", subtitle, facts, modes, points=points)


def _print(found: list[Measured], summary: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("modes of blocks")
    for heading in ("activation peak", "of keep's", "tokens/s", "median step", "time to keep's", "waited"):
        table.add_column(heading, justify="right")
    keep_bytes = found[-1].activation_peak_bytes
    for row in [found[-1], *found[:-1]]:
        table.add_row(
            row.name,
            f"{row.activation_peak_bytes / MIB:,.0f} MiB",
            f"{row.activation_peak_bytes / keep_bytes:.2f}",
            f"{row.tokens_per_second:,.0f}",
            duration_text(row.median_seconds),
            f"{row.ratio_to_keep:.3f}",
            duration_text(row.wait_seconds),
        )
    print(
        f"{summary['model']}, batch {summary['batch']} x {summary['seq']} tokens, {summary['rounds']} rounds, every state in "
        f"memory, equal losses"
    )
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)
    print("time to keep's is the median over rounds; 2/8: the first 2 of 8 blocks, the others keep")
