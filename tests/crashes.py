"""Runs that are killed at random moments, and what they leave.

    python tests/crashes.py --runs 200 --seed 1

A run wraps a model, goes on from the last checkpoint, trains, saves, unwraps and begins again, until SIGKILL ends it in a phase
and at a moment that the seed chooses. After each kill: the last checkpoint is whole, that of the last save or of the one under
way, read by plain tools; nothing lies in the folder of the store; the next run loads the checkpoint, goes on with plain torch's
loss and leaves nothing of the dead one beside it. A neighbour trains in the same folder all the time: its losses are plain
torch's, and its own checkpoint is whole at the end.

Runs are forked off a process that has imported all there is to import, so each begins at once.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rows import Rows, adamw

import protrain

MIB = 1 << 20
MEMORY = 4 * MIB  # of 6.3 MiB of states
STEPS = 6
PHASES = ("wrap", "load", "first step", "training", "save", "unwrap")
PATIENCE_SECONDS = 600
LONGEST_PHASE_SECONDS = 5.0  # what took longer was stopped meanwhile
PR_SET_PDEATHSIG = 1


def make() -> Rows:
    return Rows(256)


def batch(number: int) -> torch.Tensor:
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(number))


def train_one(model: Any, optimizer: Any, number: int) -> float:
    loss = model(batch(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def reference() -> dict[str, Any]:
    """What plain torch gives: the loss of each step, and the weights after it."""
    torch.set_num_threads(1)
    model = make()
    optimizer = adamw(model)
    losses, digests = [], [digest(model.state_dict())]
    for number in range(STEPS + 1):
        losses.append(train_one(model, optimizer, number))
        digests.append(digest(model.state_dict()))
    return {"losses": losses, "digests": digests}


# ---- processes ----


def readable(descriptor: int, patience_seconds: int = PATIENCE_SECONDS) -> bool:
    """Whether something comes to read in time; the time in which this process was stopped (SIGSTOP) is not counted."""
    return any(select.select([descriptor], [], [], 1.0)[0] for _ in range(patience_seconds))


class Child:
    """A function in a forked process. What it tells is a JSON value a line; leaving the block kills it."""

    def __init__(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody stays when this program is ended
                os.close(self._reader)
                work(lambda value: os.write(writer, json.dumps(value).encode() + b"\n") and None)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        self._rest = b""
        self._status: int | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._reader)

    def next(self) -> Any:
        """What it tells next; None where it has ended."""
        while b"\n" not in self._rest:
            if not readable(self._reader):
                raise TimeoutError(f"process {self.pid} hangs")
            found = os.read(self._reader, 65536)
            if not found:
                return None
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def rest(self) -> list[Any]:
        found = []
        while (value := self.next()) is not None:
            found.append(value)
        return found

    def kill(self) -> int:
        """The status with which it ended."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        return self._status


def in_child(work: Callable[[], Any]) -> Any:
    with Child(lambda tell: tell(work())) as child:
        value = child.next()
        if child.wait() != 0:
            raise AssertionError(f"a process ended with status {child.wait()}")
        return value


# ---- what runs do ----


def warm_up(disk: Path) -> None:
    """Import what a first step imports, in one thread, so that children can be forked after it."""
    torch.set_num_threads(1)
    model: Any = make()
    model, optimizer = protrain.wrap(model, adamw(model), memory=MEMORY, disk=disk)
    train_one(model, optimizer, 0)
    protrain.unwrap(model)


def live(tell: Callable[[Any], None], disk: Path, folder: Path, stop: Path, pause_seconds: float = 0) -> None:
    """Wrap, load, train and save after each step, unwrap, again; until killed, or until `stop` is there."""
    torch.set_num_threads(1)
    losses: dict[int, float] = {}
    while not stop.exists():
        tell("wrap")
        model: Any = make()
        model, optimizer = protrain.wrap(model, adamw(model), memory=MEMORY, disk=disk)
        begin = 0
        if folder.exists():
            tell("load")
            protrain.load(model, optimizer, folder)
            begin = protrain.status(model).steps
        if begin >= STEPS:
            protrain.unwrap(model)
            model = make()
            model, optimizer = protrain.wrap(model, adamw(model), memory=MEMORY, disk=disk)
            begin = 0
        for number in range(begin, STEPS):
            tell("training" if number > begin else "first step")
            losses[number] = train_one(model, optimizer, number)
            tell("save")
            protrain.save(model, optimizer, folder)
            tell(number + 1)
            time.sleep(pause_seconds)
        tell("unwrap")
        protrain.unwrap(model)
        tell(losses)


def go_on(disk: Path, folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """What the next run finds: the step of the checkpoint, by plain tools and by ours, and the loss of one more."""
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    step = json.loads((folder / "protrain.json").read_text())["steps"]
    if digest(load_file(folder / "model.safetensors")) != expected["digests"][step]:
        raise AssertionError(f"the weights of step {step} are not those of plain torch")
    model: Any = make()
    model, optimizer = protrain.wrap(model, adamw(model), memory=MEMORY, disk=disk)
    protrain.load(model, optimizer, folder)
    if protrain.status(model).steps != step:
        raise AssertionError(f"loaded as step {protrain.status(model).steps}, not {step}")
    loss = train_one(model, optimizer, step)
    return {"step": step, "loss": loss, "disk_read_bytes": protrain.status(model).disk_read_bytes}


@dataclass
class Found:
    """What so many kills have shown."""

    kills: Counter[str] = field(default_factory=Counter)
    leftovers: int = 0  # kills that left a folder which was being written
    saved: int = 0  # checkpoints that were read
    neighbour_steps: int = 0


@dataclass
class Crashes:
    """Kills runs one after the other in one folder."""

    work: Path
    seed: int
    expected: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.02))  # what a phase takes

    def run(self, count: int) -> Found:
        disk, folder, found = self.work / "disk", self.work / "saved" / "checkpoint", Found()
        disk.mkdir()
        folder.parent.mkdir()
        warm_up(disk)
        self.expected = in_child(reference)
        chance = random.Random(self.seed)
        never, stop = self.work / "never", self.work / "stop"
        with Child(lambda tell: live(tell, disk, folder.parent / "neighbour", stop, 0.05)) as neighbour:
            for number in range(count):
                phase = PHASES[number % len(PHASES)]
                fraction = chance.random()
                try:
                    self._kill_one(disk, folder, never, phase, fraction, found)
                except Exception as error:
                    error.add_note(f"seed {self.seed}, run {number}, killed in {phase} after {fraction:.3f} of its time")
                    raise
            stop.touch()
            figures = [told for told in neighbour.rest() if isinstance(told, dict)]
            assert neighbour.wait() == 0, f"the neighbour ended with status {neighbour.wait()}"
            for losses in figures:
                assert all(loss == self.expected["losses"][int(step)] for step, loss in losses.items())
                found.neighbour_steps += len(losses)
        assert found.neighbour_steps > 0
        assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoint", "neighbour"]
        assert not list(disk.iterdir())
        return found

    def _kill_one(self, disk: Path, folder: Path, never: Path, phase: str, fraction: float, found: Found) -> None:
        saved = last_saved(folder)
        saving: int | None = None
        before, began = "", time.monotonic()
        with Child(lambda tell: live(tell, disk, folder, never)) as victim:
            while True:
                told = victim.next()
                assert told is not None, f"the run ended by itself, with status {victim.wait()}"
                now = time.monotonic()
                if before in self.seconds:
                    self.seconds[before] = 0.7 * self.seconds[before] + 0.3 * min(now - began, LONGEST_PHASE_SECONDS)
                before, began = str(told), now
                if isinstance(told, int):
                    saved, saving = told, None
                elif told == "save":
                    saving = 1 + (saved or 0) if (saved or 0) < STEPS else 1
                if told == phase:
                    break
            time.sleep(fraction * self.seconds[phase])
            assert os.WIFSIGNALED(victim.kill())
            for told in victim.rest():
                if isinstance(told, int):
                    saved, saving = told, None
                elif told == "save":
                    saving = 1 + (saved or 0) if (saved or 0) < STEPS else 1
        found.kills[phase] += 1
        assert not list(disk.iterdir()), f"the store left {os.listdir(disk)}"
        beside = [path.name for path in folder.parent.iterdir() if path.name.startswith(".checkpoint.")]
        found.leftovers += bool(beside)
        if not folder.exists():
            assert saved is None, f"the checkpoint of step {saved} is gone, {beside} is there"
            return
        seen = in_child(lambda: go_on(disk, folder, self.expected))
        assert seen["step"] in {saved, saving}, f"the checkpoint is of step {seen['step']}, saved was {saved}, then {saving}"
        assert seen["loss"] == self.expected["losses"][seen["step"]]
        assert seen["disk_read_bytes"] > 0
        left = [path.name for path in folder.parent.iterdir() if path.name.startswith(".checkpoint.")]
        assert not left, f"the next run left {left}"
        found.saved += 1


def last_saved(folder: Path) -> int | None:
    return json.loads((folder / "protrain.json").read_text())["steps"] if folder.exists() else None


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--runs", type=int, default=200)
    words.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = words.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=os.environ.get("PROTRAIN_DISK")) as work:
        found = Crashes(Path(work), given.seed).run(given.runs)
    print(
        f"crashes: {sum(found.kills.values())} runs killed ({', '.join(f'{n} {p}' for p, n in found.kills.items())}), "
        f"{found.saved} checkpoints whole, {found.leftovers} leftovers removed, {found.neighbour_steps} steps of the neighbour "
        f"equal; seed {given.seed}, {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
