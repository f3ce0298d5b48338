"""The comparison: what can run, each row's best setting, then rounds in which all take turns, one step each.

1. Environments are made, and what does not install or is not offered here is said in its row.
2. The search runs each setting of a row that has several by itself for a few steps. A setting counts where its losses are the
   reference's. Of those that keep to the budget the fastest is kept; where none does, the fastest of those whose peak is nearly
   the least. What was found is kept in build/peers for the same words, as long as nobody asks for a new search.
3. Rounds: as many processes as memory holds live at once, always with the reference among them, and take turns. Times are of
   these alone, and ratios of the same rounds. Losses are compared again at every step: a row whose losses are wrong has no time.

Memory is the process's resident high-water mark over the measured steps, less what it held before the model was made, for
everybody in the same way, whatever the peer itself counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers import listing, swap
from peers.environments import InstallError, environment
from peers.listing import Row
from peers.process import ANSWER_SECONDS, BENCHMARKS, PeerError, PeerProcess

from protrain.cli import interrupt
from protrain.cli.bench import LATE_SECONDS, WRITE_SECONDS

WARM_STEPS = 3  # protrain's first plans, its next two update in step()
SEARCH_STEPS = 2  # timed, after the warm ones, for each setting
OVER = 1.10  # of the budget: the process's pages are not the tensors' alone
NEAR = 1.05  # of the least peak: as good as the least
TOLERANCE = 1e-3  # relative: a loss further off is wrong. Other orders of summation differ by 1e-6
LAYERS_MOST = 256


@dataclass(frozen=True)
class Words:
    """The options of `protrain bench`. Sizes in bytes, sequences in tokens; peers: names of rows or of folders, none: all;
    build: where environments and searches are kept."""

    model_name: str
    memory: int
    seq: int
    batch: int
    rounds: int
    seed: int
    disk: str
    quick: bool
    search: bool
    build: str
    peers: tuple[str, ...] = ()


@dataclass
class Setting:
    """A setting as the search found it. verdict is "equal", "close" or "wrong" of its losses, "failed" where there are none."""

    knobs: dict[str, Any]
    verdict: str
    reason: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    resident_bytes: int = 0
    base_bytes: int = 0


@dataclass
class Result:
    """A row of the table. peak_bytes and seconds are None where the row has none, and reason says why. The ratio is to the
    reference in the same rounds; setup_seconds: from the model's making to steady steps, beyond what those take. largest_...
    is of the model with the most layers that the budget holds; at_least: more were not tried."""

    name: str
    peer: str
    documented: str
    note: str
    verdict: str
    reason: str = ""
    knobs: dict[str, Any] = field(default_factory=dict)
    searched: list[Setting] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    largest_difference: float | None = None
    seconds: list[float] | None = None
    median_seconds: float | None = None
    ratio: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    whole_peak_bytes: int | None = None
    within_budget: bool | None = None
    setup_seconds: float | None = None
    install_seconds: float = 0.0
    largest_layers: int | None = None
    largest_parameters: int | None = None
    largest_at_least: bool = False
    versions: dict[str, str] = field(default_factory=dict)


Say = Callable[[str], None]


def compare(words: Words, say: Say, folder: Path = listing.FOLDER) -> dict[str, Any]:
    """Everything but the machine's description.

    Raises:
        ValueError: a name that no peer has.
        PeerError: the reference fails.
        KeyboardInterrupt: Ctrl-C came before anything was measured; after that, what was measured is returned, and "interrupted"
            is true.
    """
    rows = _chosen(listing.read_rows(folder), words)
    with tempfile.TemporaryDirectory(prefix="protrain-bench-", dir=words.disk) as scratch:
        bench = _Bench(words, say, Path(scratch))
        bench.write_model("model", 0)
        results = bench.run(rows)
        if bench.interrupted and not any(result.seconds for result in results):
            raise KeyboardInterrupt
        about = json.loads((Path(scratch) / "model" / "about.json").read_text())
    return {
        "model": words.model_name, "quick": words.quick, "dropout": 0.0, **about,
        "budget_bytes": words.memory, "seq": words.seq, "batch": words.batch, "rounds": words.rounds, "seed": words.seed,
        "interrupted": bench.interrupted, "warm_steps": WARM_STEPS, "tolerance": TOLERANCE, "over": OVER,
        "rows": [asdict(result) for result in results],
    }  # fmt: skip


def grow(words: Words, say: Say, layers_most: int = LAYERS_MOST, folder: Path = listing.FOLDER) -> list[Result]:
    """Of each of `words.peers` the largest model that the budget holds, by the first of its settings; nothing is compared.

    Raises:
        ValueError: a name that no peer has.
    """
    rows = [row for row in _chosen(listing.read_rows(folder), words) if {row.name, row.peer} & set(words.peers)]
    results = []
    with tempfile.TemporaryDirectory(prefix="protrain-bench-", dir=words.disk) as scratch:
        bench = _Bench(words, say, Path(scratch))
        for row in rows:
            result = Result(row.name, row.peer, row.documented, row.note, "not compared", row.refused)
            if bench.prepare(row, result):
                result.knobs = row.knobs | row.settings[0]
                bench.grow(row, Setting(row.settings[0], "not compared"), result, layers_most)
            results.append(result)
    return results


def _chosen(rows: list[Row], words: Words) -> list[Row]:
    unknown = [name for name in words.peers if not any(name in (row.name, row.peer) for row in rows)]
    if unknown:
        raise ValueError(f"no peer {unknown[0]!r}; give some of {', '.join(sorted({row.peer for row in rows}))}")
    if words.peers:
        return [row for row in rows if row.name == listing.REFERENCE or row.name in words.peers or row.peer in words.peers]
    return [row for row in rows if row.quick or not words.quick]


class _Bench:
    """The model's folder, what the reference's losses are, and what was found so far."""

    def __init__(self, words: Words, say: Say, scratch: Path) -> None:
        self._words, self._say, self._scratch = words, say, scratch
        self._reference: list[float] = []
        self._base_bytes = self._usual_bytes = 0
        self._pythons: dict[Path, Path] = {}
        self.interrupted = False

    def write_model(self, name: str, layers: int) -> Path:
        folder = self._scratch / name
        words = [self._words.model_name, str(folder), str(self._words.seed), str(layers)]
        paths = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "peers.models", *words],
            env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise PeerError(f"the model cannot be made: {(done.stderr.splitlines() or ['no message'])[-1][:300]}")
        return folder

    def run(self, rows: list[Row]) -> list[Result]:
        """A row of results each; after Ctrl-C those that it came before say so."""
        results = {row.name: Result(row.name, row.peer, row.documented, row.note, "not run", row.refused) for row in rows}
        try:
            self._run(rows, results)
        except KeyboardInterrupt:
            self.interrupted = True
        for result in results.values():
            if self.interrupted and result.seconds is None and not result.reason:
                result.verdict, result.reason = "not run", "interrupted before it was measured"
        return list(results.values())

    def _run(self, rows: list[Row], results: dict[str, Result]) -> None:
        ready = [row for row in rows if self.prepare(row, results[row.name])]
        self._refer(ready[0])
        chosen: dict[str, Setting] = {}
        for row in ready:
            best = self._search(row, results[row.name])
            if best is not None:
                chosen[row.name] = best
        if listing.REFERENCE not in chosen:
            raise PeerError(f"{listing.REFERENCE}: {results[listing.REFERENCE].reason}")
        self._all_rounds([row for row in ready if row.name in chosen], chosen, results)
        if not self._words.quick:
            for row in ready:
                if results[row.name].seconds is not None:
                    self.grow(row, chosen[row.name], results[row.name])

    def prepare(self, row: Row, result: Result) -> bool:
        """Its environment; whether it can run."""
        if row.refused:
            return False
        self._say(f"{row.name}: environment")
        try:
            made = environment(row.folder, Path(self._words.build))
            if row.needs_swap:
                swap.prefix(self._words.memory)
        except (InstallError, swap.NoSwapError) as error:
            result.reason = str(error)
            return False
        self._pythons[row.folder], result.install_seconds = made.python, made.install_seconds
        return True

    def _start(self, row: Row, knobs: dict[str, Any], model: str = "model", memory: int | None = None) -> PeerProcess:
        words = self._words
        job = {
            "model_folder": str(self._scratch / model), "seq": words.seq, "batch": words.batch, "seed": words.seed,
            "memory": memory or words.memory, "disk": str(self._scratch), "knobs": row.knobs | knobs,
        }  # fmt: skip
        prefix = swap.prefix(self._base_bytes + words.memory) if row.needs_swap else None
        return PeerProcess(self._pythons[row.folder], row.folder / "run.py", job, prefix)

    # ---- the search ----

    def _refer(self, row: Row) -> None:
        """The losses that everybody must find."""
        self._say(f"{row.name}: its losses")
        with self._start(row, row.settings[0]) as process:
            process.ask("make")
            self._reference = [process.ask("step")["loss"] for _ in range(WARM_STEPS + max(SEARCH_STEPS, self._words.rounds))]
            end = process.ask("end")
        self._base_bytes, self._usual_bytes = end["base_bytes"], end["whole_peak_bytes"]
        moved = max(abs(loss / self._reference[0] - 1) for loss in self._reference)
        if not moved > 10 * TOLERANCE:
            raise PeerError(f"losses move by {moved:.1e} of the first one in the reference, too little to tell wrong ones")

    def _search(self, row: Row, result: Result) -> Setting | None:
        """The best setting; None where none counts. A single one is tried in the rounds, and its resident bytes are guessed."""
        if len(row.settings) == 1:
            result.knobs = row.knobs | row.settings[0]
            return Setting(row.settings[0], "not compared", resident_bytes=self._usual_bytes)
        result.searched = self._kept(row)
        if not result.searched:
            for number, knobs in enumerate(row.settings):
                self._say(f"{row.name}: setting {number + 1} of {len(row.settings)}")
                result.searched.append(self._try(row, knobs))
            if all(setting.verdict != "failed" for setting in result.searched):  # what failed may have been stopped from outside
                self._keep(row, result.searched)
        best = best_setting(result.searched, self._words.memory)
        if best is None:
            last = result.searched[-1]
            result.verdict, result.reason, result.knobs = last.verdict, last.reason, row.knobs | last.knobs
        else:
            result.knobs = row.knobs | best.knobs
        return best

    def _try(self, row: Row, knobs: dict[str, Any], model: str = "model", check: bool = True) -> Setting:
        try:
            with self._start(row, knobs, model) as process:
                process.ask("make")
                losses = [process.ask("step")["loss"] for _ in range(WARM_STEPS)]
                process.ask("reset")
                answers = [process.ask("step") for _ in range(SEARCH_STEPS)]
                end = process.ask("end")
        except PeerError as error:
            return Setting(knobs, "failed", str(error))
        losses += [answer["loss"] for answer in answers]
        verdict, reason, _ = judge(losses, self._reference) if check else ("not compared", "", 0.0)
        seconds = min(answer["seconds"] for answer in answers)
        peak = end["peak_bytes"] - end["base_bytes"]
        return Setting(knobs, verdict, reason, seconds, peak, end["whole_peak_bytes"], end["base_bytes"])

    def _kept_file(self, row: Row) -> Path:
        """Where what the search found is kept: another for other words, settings, run scripts or packages."""
        words = self._words
        files = [row.folder / "run.py", row.folder / "requirements.txt", BENCHMARKS / "peers" / "worker.py"]
        parts = [words.model_name, words.memory, words.seq, words.batch, words.seed, row.name, row.settings, sys.version]
        text = json.dumps(parts) + "".join(file.read_text() for file in files if file.is_file())
        return Path(words.build) / f"search-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def _kept(self, row: Row) -> list[Setting]:
        file = self._kept_file(row)
        if self._words.search or not file.is_file():
            return []
        return [Setting(**fields) for fields in json.loads(file.read_text())]

    def _keep(self, row: Row, found: list[Setting]) -> None:
        file = self._kept_file(row)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([asdict(setting) for setting in found], indent=1) + "\n")

    # ---- rounds ----

    def _all_rounds(self, rows: list[Row], chosen: dict[str, Setting], results: dict[str, Result]) -> None:
        """In groups that memory holds, each with the reference."""
        reference, *others = rows
        first, waiting = _Runner(self, reference, chosen, results), others
        with first:
            first.warm()
            while not self.interrupted:
                room = _free_bytes() * 4 // 5
                group: list[_Runner] = []
                while waiting and (not group or chosen[waiting[0].name].resident_bytes <= room):
                    room -= chosen[waiting[0].name].resident_bytes
                    group.append(_Runner(self, waiting.pop(0), chosen, results))
                self._rounds(first, group)
                if not waiting:
                    break
            if first.seconds:
                first.finish(None)
        if self.interrupted:
            raise KeyboardInterrupt

    def _rounds(self, first: _Runner, group: list[_Runner]) -> None:
        """After Ctrl-C: the rounds that were complete."""
        begin = len(first.seconds)
        with ExitStack() as stack:
            try:
                for runner in group:
                    stack.enter_context(runner)
                    runner.warm()
                for number in range(self._words.rounds):
                    self._round(number, [first, *(runner for runner in group if runner.alive)])
            except KeyboardInterrupt:
                self.interrupted = True
                interrupt.extend(LATE_SECONDS + WRITE_SECONDS)
            complete = min(len(runner.seconds) for runner in group if runner.alive) if any(r.alive for r in group) else None
            del first.seconds[begin + complete if complete is not None else len(first.seconds) :]
            for runner in group:
                del runner.seconds[complete if complete is not None else 0 :]
                if runner.seconds:
                    runner.finish(first.seconds[begin:])

    def _round(self, number: int, alive: list[_Runner]) -> None:
        self._say(f"round {number + 1} of {self._words.rounds}: {', '.join(runner.row.name for runner in alive)}")
        for runner in alive:
            runner.round()
            os.sync()  # what one wrote through the page cache is not left for the next one to wait for

    def losses_until(self, count: int) -> list[float]:
        """The reference's losses; it has made more steps than others where there are several groups."""
        return self._reference[:count]

    # ---- the largest model ----

    def grow(self, row: Row, best: Setting, result: Result, most: int = LAYERS_MOST) -> None:
        """The most layers that the budget holds, and that model's parameters: doubled up to `most`, then by bisection; None where
        not even one is held."""
        fits, fails = 0, 1
        while fails <= most and self._holds(row, best, fails):
            fits, fails = fails, 2 * fails
        result.largest_at_least = fails > most
        while not result.largest_at_least and fails - fits > max(1, fits // 16):
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self._holds(row, best, middle) else (fits, middle)
        if fits:
            about = json.loads((self._model_of(fits) / "about.json").read_text())
            result.largest_layers, result.largest_parameters = fits, about["parameters"]

    def _model_of(self, layers: int) -> Path:
        folder = self._scratch / f"layers{layers}"
        return folder if folder.is_dir() else self.write_model(folder.name, layers)

    def _holds(self, row: Row, best: Setting, layers: int) -> bool:
        self._say(f"{row.name}: {layers} layers")
        found = self._try(row, best.knobs, self._model_of(layers).name, check=False)
        self._say(f"{row.name}: {layers} layers: {found.reason or f'a peak of {found.peak_bytes >> 20} MiB'}")
        return found.verdict != "failed" and found.peak_bytes <= OVER * self._words.memory


class _Runner:
    """A row's process while rounds go on; what fails ends it, and not the others."""

    def __init__(self, bench: _Bench, row: Row, chosen: dict[str, Setting], results: dict[str, Result]) -> None:
        self.row, self._bench, self._result = row, bench, results[row.name]
        self._knobs = chosen[row.name].knobs
        self._process: PeerProcess | None = None
        self._losses: list[float] = []
        self._warm_seconds: list[float] = []
        self._make_seconds = 0.0
        self.seconds: list[float] = []
        self.alive = True

    def __enter__(self) -> _Runner:
        self._process = self._bench._start(self.row, self._knobs)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()

    def warm(self) -> None:
        self._bench._say(f"{self.row.name}: warming up")
        with self._guard():
            self._make_seconds = self._ask("make")["seconds"]
            self._warm_seconds = [self._step() for _ in range(WARM_STEPS)]
            self._ask("reset")

    def round(self) -> None:
        with self._guard():
            self.seconds.append(self._step())

    def _step(self) -> float:
        answer = self._ask("step")
        self._losses.append(answer["loss"])
        seconds: float = answer["seconds"]
        return seconds

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process is not None
        return self._process.ask(word, LATE_SECONDS if self._bench.interrupted else ANSWER_SECONDS)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            if self.row.name == listing.REFERENCE and not self._bench.interrupted:
                raise
            self.alive = False
            self._result.verdict, self._result.reason = "failed", str(error)

    def finish(self, reference_seconds: list[float] | None) -> None:
        """The row's figures. Args: reference_seconds, of the same rounds; None for the reference itself."""
        end: dict[str, Any] = {}
        if self.alive:
            with self._guard():
                end = self._ask("end")
        if not self.alive:
            return
        result, words = self._result, self._bench._words
        result.losses, result.versions = self._losses, end["versions"]
        expected = self._bench.losses_until(len(self._losses))
        result.verdict, result.reason, result.largest_difference = judge(self._losses[: len(expected)], expected)
        if result.verdict == "wrong":
            return
        result.seconds, result.median_seconds = self.seconds, statistics.median(self.seconds)
        pairs = zip(self.seconds, reference_seconds or self.seconds, strict=True)
        result.ratio = statistics.median(own / other for own, other in pairs)
        result.tokens_per_second = words.batch * words.seq / result.median_seconds
        result.peak_bytes = end["peak_bytes"] - end["base_bytes"]
        result.whole_peak_bytes = end["whole_peak_bytes"] - end["base_bytes"]
        result.within_budget = result.peak_bytes <= OVER * words.memory
        beyond = sum(self._warm_seconds) - len(self._warm_seconds) * result.median_seconds
        result.setup_seconds = self._make_seconds + max(beyond, 0.0)


def judge(losses: list[float], reference: list[float]) -> tuple[str, str, float]:
    """ "equal", "close" or "wrong"; of a wrong one which and how; and the largest relative difference."""
    differences = [
        abs(own - other) / abs(other) if own == own else float("inf")
        for own, other in zip(losses, reference[: len(losses)], strict=True)
    ]
    for number, difference in enumerate(differences):
        if not difference <= TOLERANCE:
            reason = f"step {number + 1}: the loss is {losses[number]:.6g}, plain torch's {reference[number]:.6g}"
            return "wrong", reason, difference
    return ("equal" if losses == reference[: len(losses)] else "close"), "", max(differences)


def best_setting(found: list[Setting], budget_bytes: int) -> Setting | None:
    """Of those whose losses are right: the fastest that keeps to the budget, else the fastest of those near the least peak."""
    right = [setting for setting in found if setting.verdict in ("equal", "close")]
    if not right:
        return None
    kept = [setting for setting in right if setting.peak_bytes <= OVER * budget_bytes]
    if not kept:
        least = min(setting.peak_bytes for setting in right)
        kept = [setting for setting in right if setting.peak_bytes <= NEAR * least]
    return min(kept, key=lambda setting: setting.seconds)


def _free_bytes() -> int:
    from protrain.cli import machine

    _, available = machine.memory()
    return available


def now() -> str:
    """The date, as results carry it."""
    return time.strftime("%Y-%m-%d")
