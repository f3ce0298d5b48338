"""The comparison: what can run, each row's best setting, then rounds in which all take turns, one step each.

1. Environments are made, and what does not install or is not offered here is said in its row.
2. The search runs each setting of a row that has several, in a quick run the first two, by itself for a few steps. A setting
   counts where its losses are the reference's. Of those that keep to the budget the fastest is kept; where none does, the fastest
   of all and the fastest of those whose peak is nearly the least, as two rows where they differ. What was found is kept in
   build/peers for the same words, as long as nobody asks for a new search.
3. Rounds: as many processes as memory holds live at once, always with the reference and protrain among them, and take turns, each
   round beginning with another one. Times are of these alone, and ratios of the same rounds. Losses are compared again at every
   step: a row whose losses are wrong has no time.

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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from layers import next_layers
from peers import listing, swap
from peers.environments import InstallError, alone, environment
from peers.listing import Row
from peers.process import ANSWER_SECONDS, BENCHMARKS, PeerError, PeerProcess

from protrain.cli import interrupt
from protrain.cli.bench import LATE_SECONDS, WRITE_SECONDS
from protrain.cli.words import MIB, count, duration_text

WARM_STEPS = 3  # protrain's first plans, its next two update in step()
QUICK_SETTINGS = 2  # of each row, that a quick run searches
SEARCH_STEPS = 2  # timed, after the warm ones, for each setting
OVER = 1.10  # of the budget: the process's pages are not the tensors' alone
NEAR = 1.05  # of the least peak, or of the least time: as good as the least
TOLERANCE = 1e-3  # relative: a loss further off is wrong. Other orders of summation differ by 1e-6
LAYERS_MOST = 256
GROW_SECONDS = 600.0  # of one row: after it no larger model is begun
FASTEST, LEANEST = "fastest", "leanest"


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
    """A row of the table. setting is "fastest" or "leanest" where the peer has two, and ends the name. peak_bytes and seconds are
    None where the row has none, and reason says why; counted_bytes: the peak as protrain counts it. ratios are to the reference,
    round by round, and ratio is their median; to_ours to protrain, none where that was not there; setup_seconds: from the
    model's making to steady steps, beyond what those take. largest_... is of the model with the most layers that the budget
    holds, 0 where it holds none of a layer, None where none was tried; at_least: more were not tried; ended: why not more."""

    name: str
    peer: str
    documented: str
    offloads: str
    note: str
    verdict: str
    reason: str = ""
    setting: str = ""
    knobs: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    searched: list[Setting] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    largest_difference: float | None = None
    seconds: list[float] | None = None
    median_seconds: float | None = None
    ratio: float | None = None
    ratios: list[float] = field(default_factory=list)
    to_ours: list[float] = field(default_factory=list)
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    whole_peak_bytes: int | None = None
    counted_bytes: int | None = None
    within_budget: bool | None = None
    setup_seconds: float | None = None
    install_seconds: float = 0.0
    largest_layers: int | None = None
    largest_parameters: int | None = None
    largest_at_least: bool = False
    largest_ended: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Entry:
    """What takes turns in the rounds: a row in one of its settings, and where its figures go."""

    row: Row
    setting: Setting
    result: Result


Say = Callable[[str], None]


def compare(words: Words, say: Say, folder: Path = listing.FOLDER) -> dict[str, Any]:
    """Everything but the machine's description.

    Raises:
        ValueError: a name that no peer has.
        PeerError: the reference fails, or another comparison is under way.
        KeyboardInterrupt: Ctrl-C came before anything was measured; after that, what was measured is returned, and "interrupted"
            is true.
    """
    rows = [_settings(row, words) for row in _chosen(listing.read_rows(folder), words)]
    with _scratch(words) as scratch:
        bench = _Bench(words, say, Path(scratch))
        bench.write_model("model", 0)
        results = bench.run(rows)
        if bench.interrupted and not any(result.seconds for result in results):
            raise KeyboardInterrupt
        about = json.loads((Path(scratch) / "model" / "about.json").read_text())
    return {
        "model": words.model_name, "quick": words.quick, "dropout": 0.0, **about,
        "budget_bytes": words.memory, "seq": words.seq, "batch": words.batch, "rounds": words.rounds, "seed": words.seed,
        "interrupted": bench.interrupted, "kept_searches": bench.kept_searches,
        "warm_steps": WARM_STEPS, "tolerance": TOLERANCE, "over": OVER,
        "rows": [asdict(result) for result in results],
    }  # fmt: skip


def grow(words: Words, say: Say, layers_most: int = LAYERS_MOST, folder: Path = listing.FOLDER) -> list[Result]:
    """Of each of `words.peers` the largest model that the budget holds, by the first of its settings; nothing is compared.

    Raises:
        ValueError: a name that no peer has.
        PeerError: another comparison is under way.
    """
    rows = [row for row in _chosen(listing.read_rows(folder), words) if {row.name, row.peer} & set(words.peers)]
    results = []
    with _scratch(words) as scratch:
        bench = _Bench(words, say, Path(scratch))
        for row in rows:
            result = _result(row, "not compared")
            if bench.prepare(row, result):
                result.knobs = row.knobs | row.settings[0]
                bench.grow(row, row.settings[0], result, layers_most)
            results.append(result)
    return results


@contextmanager
def _scratch(words: Words) -> Iterator[str]:
    """A folder on the disk, and the environments to itself. Raises PeerError."""
    try:
        with alone(Path(words.build)), tempfile.TemporaryDirectory(prefix="protrain-bench-", dir=words.disk) as folder:
            yield folder
    except InstallError as error:
        raise PeerError(str(error)) from None


def _chosen(rows: list[Row], words: Words) -> list[Row]:
    unknown = [name for name in words.peers if not any(name in (row.name, row.peer) for row in rows)]
    if unknown:
        raise ValueError(f"no peer {unknown[0]!r}; give some of {', '.join(sorted({row.peer for row in rows}))}")
    if words.peers:
        return [row for row in rows if row.name == listing.REFERENCE or row.name in words.peers or row.peer in words.peers]
    return [row for row in rows if row.quick or not words.quick]


def _settings(row: Row, words: Words) -> Row:
    """A quick run searches the first of its settings alone."""
    return replace(row, settings=row.settings[:QUICK_SETTINGS]) if words.quick else row


class _Bench:
    """The model's folder, what the reference's losses are, and what was found so far."""

    def __init__(self, words: Words, say: Say, scratch: Path) -> None:
        self._words, self._say, self._scratch = words, say, scratch
        self._reference: list[float] = []
        self._base_bytes = self._usual_bytes = 0
        self._pythons: dict[Path, Path] = {}
        self._rounds: list[dict[str, float]] = []  # of each round the seconds by row
        self.interrupted, self.kept_searches = False, 0

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
        """A row of results each, two where the fastest and the leanest setting differ; after Ctrl-C those that it came before say
        so."""
        results = {row.name: [_result(row, "not run")] for row in rows}
        try:
            self._run(rows, results)
        except KeyboardInterrupt:
            self.interrupted = True
        found = [result for several in results.values() for result in several]
        for result in found:
            if self.interrupted and result.seconds is None and not result.reason:
                result.verdict, result.reason = "not run", "interrupted before it was measured"
        return found

    def _run(self, rows: list[Row], results: dict[str, list[Result]]) -> None:
        ready = [row for row in rows if self.prepare(row, results[row.name][0])]
        self._refer(ready[0])
        entries: list[Entry] = []
        for row in ready:
            found = self._search(row, results[row.name][0])
            results[row.name] = [entry.result for entry in found] or results[row.name]
            entries += found
        if not entries or entries[0].row.name != listing.REFERENCE:
            raise PeerError(f"{listing.REFERENCE}: {results[listing.REFERENCE][0].reason}")
        self._all_rounds(entries)
        for several in results.values():
            _merge(several)
        if not self._words.quick:
            for row in ready:
                if results[row.name][-1].seconds is not None:
                    self.grow(row, leanest_setting(results[row.name][0].searched) or row.settings[0], results[row.name][-1])

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

    def _search(self, row: Row, result: Result) -> list[Entry]:
        """Its best settings, of which result gets the first; none where none counts, and then result says why. A single one is
        tried in the rounds, and its resident bytes are guessed."""
        if len(row.settings) == 1:
            result.knobs = row.knobs | row.settings[0]
            return [Entry(row, Setting(row.settings[0], "not compared", resident_bytes=self._usual_bytes), result)]
        result.searched = self._kept(row)
        if result.searched:
            self.kept_searches += 1
        else:
            for number, knobs in enumerate(row.settings):
                self._say(f"{row.name}: setting {number + 1} of {len(row.settings)}")
                result.searched.append(self._try(row, knobs))
            if all(setting.verdict != "failed" for setting in result.searched):  # what failed may have been stopped from outside
                self._keep(row, result.searched)
        best = best_settings(result.searched, self._words.memory)
        if not best:
            last = next((setting for setting in result.searched if setting.verdict == "wrong"), result.searched[-1])
            result.verdict, result.reason, result.knobs = last.verdict, last.reason, row.knobs | last.knobs
        if row.name == listing.REFERENCE:
            best = best[:1]
        entries = []
        for number, setting in enumerate(best):
            own = replace(result, searched=[]) if number else result
            own.knobs = row.knobs | setting.knobs
            if len(best) > 1:
                own.setting = (FASTEST, LEANEST)[number]
                own.name = f"{row.name}, {own.setting}"
            entries.append(Entry(row, setting, own))
        return entries

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
        verdict, reason, _ = judge(losses, self._reference if check else losses)
        if not check:
            verdict, reason = ("wrong", "a loss that is no number") if verdict == "wrong" else ("not compared", "")
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

    def _all_rounds(self, entries: list[Entry]) -> None:
        """In groups that memory holds, each with the reference and protrain, with which all are compared in the same rounds."""
        steady = [_Runner(self, entry) for entry in entries if entry.row.name in (listing.REFERENCE, listing.OURS)]
        waiting = [entry for entry in entries if entry.row.name not in (listing.REFERENCE, listing.OURS)]
        with ExitStack() as stack:
            try:
                for runner in steady:
                    stack.enter_context(runner)
                    runner.warm()
                while waiting or not self._rounds:
                    room = _free_bytes() * 4 // 5
                    group: list[_Runner] = []
                    while waiting and (not group or waiting[0].setting.resident_bytes <= room):
                        room -= waiting[0].setting.resident_bytes
                        group.append(_Runner(self, waiting.pop(0)))
                    self._group(steady, group)
            except KeyboardInterrupt:
                if not self.interrupted:
                    self._interrupt()
            for runner in steady:
                runner.finish(self._rounds)
        if self.interrupted:
            raise KeyboardInterrupt

    def _interrupt(self) -> None:
        self.interrupted = True
        interrupt.extend(LATE_SECONDS + WRITE_SECONDS)

    def _group(self, steady: list[_Runner], group: list[_Runner]) -> None:
        """After Ctrl-C: the rounds that were complete."""
        with ExitStack() as stack:
            try:
                for runner in group:
                    stack.enter_context(runner)
                    runner.warm()
                for number in range(self._words.rounds):
                    self._round(number, [runner for runner in (*steady, *group) if runner.alive])
            except KeyboardInterrupt:
                self._interrupt()
            for runner in group:
                runner.finish(self._rounds)
        if self.interrupted:
            raise KeyboardInterrupt

    def _round(self, number: int, alive: list[_Runner]) -> None:
        """Another one begins each time, since a step may leave something for the next one to wait for."""
        self._say(f"round {number + 1} of {self._words.rounds}: {', '.join(runner.name for runner in alive)}")
        seconds: dict[str, float] = {}
        begin = number % len(alive)
        for runner in alive[begin:] + alive[:begin]:
            took = runner.round()
            if took is not None:
                seconds[runner.name] = took
            os.sync()  # what one wrote through the page cache is not left for the next one to wait for
        self._rounds.append(seconds)

    def losses_until(self, count: int) -> list[float]:
        """The reference's losses; it has made more steps than others where there are several groups."""
        return self._reference[:count]

    # ---- the largest model ----

    def grow(self, row: Row, knobs: dict[str, Any], result: Result, most: int = LAYERS_MOST) -> None:
        """The most layers that the budget holds, and that model's parameters: doubled up to `most`, then by bisection, as long as
        there is time for a row. Making the models takes none of it, since all rows share them."""
        fits, fails, spent = 0, None, 0.0
        while (layers := next_layers(fits, fails, most)) is not None and spent < GROW_SECONDS:
            try:
                self._model_of(layers)
            except PeerError as error:
                result.largest_at_least, result.largest_ended = fits > 0, str(error)
                break
            begin = _now()
            reason = self._too_large(row, knobs, layers)
            spent += _now() - begin
            if reason:
                fails, result.largest_ended = layers, f"{count(layers, 'layer')}: {reason}"
            else:
                fits = layers
        else:
            result.largest_at_least = fits > 0 and (layers is not None or fails is None)
            if layers is not None:
                verb = "was" if layers == 1 else "were"
                result.largest_ended = f"{count(layers, 'layer')} {verb} not begun after {duration_text(GROW_SECONDS)}"
            elif fails is None:
                result.largest_ended = f"more than {count(most, 'layer')} were not tried"
        result.largest_layers, result.largest_parameters = fits, self._parameters_of(fits) if fits else 0

    def _parameters_of(self, layers: int) -> int:
        parameters: int = json.loads((self._model_of(layers) / "about.json").read_text())["parameters"]
        return parameters

    def _model_of(self, layers: int) -> Path:
        folder = self._scratch / f"layers{layers}"
        return folder if folder.is_dir() else self.write_model(folder.name, layers)

    def _too_large(self, row: Row, knobs: dict[str, Any], layers: int) -> str:
        """Why a model of so many layers cannot be trained in the budget; empty where it can."""
        self._say(f"{row.name}: {layers} layers")
        found = self._try(row, knobs, self._model_of(layers).name, check=False)
        if found.verdict != "not compared":
            return found.reason
        return f"a peak of {found.peak_bytes / MIB:,.0f} MiB" if found.peak_bytes > OVER * self._words.memory else ""


class _Runner:
    """A row's process while rounds go on; what fails ends it, and not the others."""

    def __init__(self, bench: _Bench, entry: Entry) -> None:
        self.row, self._bench, self._result = entry.row, bench, entry.result
        self.name, self._knobs = entry.result.name, entry.setting.knobs
        self._process: PeerProcess | None = None
        self._losses: list[float] = []
        self._warm_seconds: list[float] = []
        self._make_seconds = 0.0
        self.alive = True

    def __enter__(self) -> _Runner:
        self._process = self._bench._start(self.row, self._knobs)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()

    def warm(self) -> None:
        self._bench._say(f"{self.name}: warming up")
        with self._guard():
            self._make_seconds = self._ask("make")["seconds"]
            self._warm_seconds = [self._step() for _ in range(WARM_STEPS)]
            self._ask("reset")

    def round(self) -> float | None:
        """The seconds of a step; None where it fails."""
        with self._guard():
            return self._step()
        return None

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

    def finish(self, rounds: list[dict[str, float]]) -> None:
        """The row's figures, of the rounds that it was in. Args: rounds, of each the seconds by row."""
        own = [found for found in rounds if self.name in found]
        end: dict[str, Any] = {}
        if self.alive and own:
            with self._guard():
                end = self._ask("end")
        if not self.alive or not own:
            return
        result, words = self._result, self._bench._words
        result.losses, result.versions = self._losses, end["versions"]
        expected = self._bench.losses_until(len(self._losses))
        result.verdict, result.reason, result.largest_difference = judge(self._losses[: len(expected)], expected)
        if result.verdict == "wrong":
            return
        result.seconds = [found[self.name] for found in own]
        result.ratios = [found[self.name] / found[listing.REFERENCE] for found in own if listing.REFERENCE in found]
        result.to_ours = [found[self.name] / found[listing.OURS] for found in own if listing.OURS in found]
        result.median_seconds, result.ratio = statistics.median(result.seconds), statistics.median(result.ratios)
        result.tokens_per_second = words.batch * words.seq / result.median_seconds
        result.peak_bytes = end["peak_bytes"] - end["base_bytes"]
        result.whole_peak_bytes = end["whole_peak_bytes"] - end["base_bytes"]
        result.counted_bytes = end.get("counted_bytes")
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


def best_settings(found: list[Setting], budget_bytes: int) -> list[Setting]:
    """Of those whose losses are right: the fastest that keeps to the budget. Where none does: the fastest, and the fastest of
    those near the least peak, in this order; the latter alone where it is nearly as fast."""
    right = [setting for setting in found if setting.verdict in ("equal", "close")]
    if not right:
        return []
    kept = [setting for setting in right if setting.peak_bytes <= OVER * budget_bytes]
    if kept:
        return [min(kept, key=_seconds)]
    least = min(setting.peak_bytes for setting in right)
    fastest = min(right, key=_seconds)
    leanest = min((setting for setting in right if setting.peak_bytes <= NEAR * least), key=_seconds)
    return [leanest] if leanest.seconds <= NEAR * fastest.seconds else [fastest, leanest]


def leanest_setting(found: list[Setting]) -> dict[str, Any] | None:
    """The knobs with the least peak among those whose losses are right; None where nothing was searched."""
    right = [setting for setting in found if setting.verdict in ("equal", "close")]
    return min(right, key=lambda setting: setting.peak_bytes).knobs if right else None


def _merge(results: list[Result]) -> None:
    """The leanest row goes where the rounds found it no leaner than the fastest, which then is the peer's one row."""
    if len(results) == 2 and None not in (peaks := [result.peak_bytes for result in results]) and peaks[1] >= peaks[0]:
        results.pop()
        results[0].name, results[0].setting = results[0].name.removesuffix(f", {FASTEST}"), ""


def _seconds(setting: Setting) -> float:
    return setting.seconds


def _result(row: Row, verdict: str) -> Result:
    return Result(row.name, row.peer, row.documented, row.offloads, row.note, verdict, row.refused, defaults=row.defaults)


def _free_bytes() -> int:
    from protrain.cli import machine

    _, available = machine.memory()
    return available


def _now() -> float:
    return time.monotonic()


def now() -> str:
    """The date, as results carry it."""
    return time.strftime("%Y-%m-%d")
