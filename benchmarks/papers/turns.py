"""Processes that take turns. How fast a machine is changes within seconds, so what is to be compared goes on step by step, one
process after the other, and ratios are of the same round."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from benchmarks.papers.records import say
from benchmarks.papers.training import Shape, Way, train

WARM_STEPS = 4  # protrain's first plans, the next two update in step(); one more, behind homes that moved
TOLERANCE = 1e-3  # relative, of losses on a GPU, where updates there and on the host round differently


class RefusedError(Exception):
    """The process cannot do what it was to do; the message says why."""


class Turns:
    """A process with a generator, which goes on to its next yield whenever it is asked to. Use as a context."""

    def __init__(self, function: Callable[..., Any], *words: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function, words), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def ask(self, word: Any = None) -> Any:
        """What the generator yields for a word. Raises RefusedError with what it raises."""
        try:
            self._pipe.send(word)
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise RefusedError(f"the process ended with exit code {self._process.exitcode}") from None
        if kind == "error":
            raise RefusedError(value)
        return value


def _serve(pipe: Any, function: Callable[..., Any], words: tuple[Any, ...]) -> None:
    try:
        generator = function(*words)
        next(generator)
        while True:
            pipe.send(("value", generator.send(pipe.recv())))
    except EOFError:
        pass
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {' '.join(str(error).split())}"))


def take_turns(shape: Shape, ways: Mapping[str, Way], rounds: int, warm: int = WARM_STEPS) -> dict[str, dict[str, Any]]:
    """Train in each way, one step each in every round.

    Returns:
        For each way what `train` says at the end, with the seconds of all rounds, `ratio`, the median of theirs to those of the
        first way, and `step_read_bytes` and `step_write_bytes` of the disk in a round; or {"reason": ...} where it was refused.

    Raises:
        RefusedError: the first way fails.
        RuntimeError: losses differ from the first way's.
    """
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        processes, begun = {}, {}
        for name, way in ways.items():
            say(f"{shape.name}, {name}: {warm} steps before those that count")
            process = stack.enter_context(Turns(train, shape, way))
            try:
                begun[name] = process.ask(warm)
            except RefusedError as error:
                if not begun:
                    raise
                found[name] = {"reason": str(error)}
                continue
            processes[name] = process
        losses = {name: begun[name]["losses"] for name in processes}
        seconds: dict[str, list[float]] = {name: [] for name in processes}
        last: dict[str, dict[str, Any]] = {}
        for number in range(rounds):
            say(f"{shape.name}: round {number + 1} of {rounds}")
            for name, process in processes.items():
                last[name] = process.ask(1)
                seconds[name] += last[name]["seconds"]
                losses[name] += last[name]["losses"]
    first, *others = processes
    for name in others:
        check_losses(losses[first], losses[name], name, exact=ways[name].device == "cpu")
    for name in processes:
        moved = {
            f"step_{way}_bytes": (last[name]["status"][f"disk_{way}_bytes"] - begun[name]["status"][f"disk_{way}_bytes"]) / rounds
            for way in ("read", "write")
        }
        ratios = [own / other for own, other in zip(seconds[name], seconds[first], strict=True)]
        found[name] = {
            **last[name],
            **moved,
            "seconds": seconds[name],
            "losses": losses[name],
            "median_seconds": statistics.median(seconds[name]),
            "ratio": statistics.median(ratios),
            "quartiles": quartiles(ratios),
        }
    return {name: found[name] for name in ways}


def check_losses(expected: list[float], found: list[float], name: str, *, exact: bool) -> None:
    """Raises RuntimeError where they are not the same: figures of a training that goes another way mean nothing."""
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one != other and (exact or not abs(one - other) <= TOLERANCE * abs(one)):
            raise RuntimeError(f"{name}, step {number + 1}: the loss is {other}, and {one} where it is compared with")


def quartiles(values: list[float]) -> list[float]:
    """The lower and the upper one."""
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
