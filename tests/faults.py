"""Every call that training, saving and loading make to the disk goes wrong once, in every way that a disk has.

    python tests/faults.py --share 1 --seed 1

A model with its chunks on disk trains beside one of plain torch. Before each step, save, load, wrap or unwrap the disk
(fake_disk.c, which stands before the C library) is told which call fails, and how: an errno, a short transfer, nothing, a late
answer, a wrong bit, a write that was not made. What must hold each time: what can be made good is made good, and the bits are
plain torch's; anything else is a DiskError with path, errno and bytes, after which the model is what it was after its last
complete step, and the same step made again gives plain torch's loss. Figures are printed as one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rows import Rows, adamw
from torch import nn

MIB = 1 << 20
MEMORY = 7 * MIB  # of 13 MiB of states
KINDS = ("pread", "pwrite", "fallocate", "ftruncate", "openat", "write", "fsync", "rename", "mkdir", "open", "read")
LOAD_KINDS = ("pwrite", "fallocate", "open", "read")  # the last two are of the checkpoint's files
SAVE_KINDS = ("write", "fsync", "rename", "mkdir")  # of files that take their name when they are whole
FAULTS = ("none", "fail", "short", "nothing", "late", "wrong", "lost")


class Fault(NamedTuple):
    """A way for a call of some kind to go wrong. harmless: it can be made good, and is. lie: nothing is said."""

    kind: str
    fault: str
    number: int = 0
    harmless: bool = False
    lie: bool = False


STEP_FAULTS = (
    Fault("pread", "fail", errno.EIO),
    Fault("pread", "fail", errno.EINTR, harmless=True),
    Fault("pread", "short", harmless=True),
    Fault("pread", "nothing"),
    Fault("pread", "late", harmless=True),
    Fault("pread", "wrong", lie=True),
    Fault("pwrite", "fail", errno.EIO),
    Fault("pwrite", "fail", errno.ENOSPC),
    Fault("pwrite", "fail", errno.EINTR, harmless=True),
    Fault("pwrite", "short", harmless=True),
    Fault("pwrite", "nothing"),
    Fault("pwrite", "late", harmless=True),
    Fault("pwrite", "wrong", lie=True),
    Fault("pwrite", "lost", lie=True),
    Fault("fallocate", "fail", errno.ENOSPC),
    Fault("fallocate", "fail", errno.EDQUOT),  # the quota of a user or a project
    Fault("fallocate", "fail", errno.EINTR, harmless=True),
    Fault("ftruncate", "fail", errno.EIO, harmless=True),  # what is not given back is used again
)
SAVE_FAULTS = (
    Fault("pread", "fail", errno.EIO),
    Fault("pread", "wrong", lie=True),
    Fault("write", "fail", errno.ENOSPC),
    Fault("write", "fail", errno.EDQUOT),
    Fault("write", "short", harmless=True),
    Fault("write", "fail", errno.EINTR, harmless=True),
    Fault("fsync", "fail", errno.EIO),  # of files, of their folder, of the folder that holds the target
    Fault("rename", "fail", errno.EIO),
    Fault("rename", "fail", errno.EINVAL, harmless=True),  # a filesystem that cannot change two names at once
    Fault("mkdir", "fail", errno.ENOSPC),
)
LOAD_FAULTS = (
    Fault("pwrite", "fail", errno.EIO),
    Fault("fallocate", "fail", errno.ENOSPC),
    Fault("open", "fail", errno.EIO),
    Fault("open", "fail", errno.EMFILE),
    Fault("open", "fail", errno.EINTR, harmless=True),
    Fault("read", "fail", errno.EIO),
    Fault("read", "fail", errno.EINTR, harmless=True),
    Fault("read", "short", harmless=True),
    Fault("read", "nothing", lie=True),
    Fault("read", "wrong", lie=True),
)
WRAP_FAULTS = (
    Fault("openat", "fail", errno.EACCES),
    Fault("openat", "fail", errno.ENOSPC),
    Fault("fallocate", "fail", errno.ENOSPC),
    Fault("fallocate", "fail", errno.EDQUOT),
    Fault("pwrite", "fail", errno.EIO),
    Fault("pread", "fail", errno.EIO),
)


class Disk:
    """The library that stands before the C library in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.disk_count.restype = ctypes.c_long
        self._library.disk_tell.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]

    def tell(self, fault: Fault, first: int, last: int) -> None:
        self._library.disk_tell(KINDS.index(fault.kind), FAULTS.index(fault.fault), fault.number, first, last)

    def calm(self) -> None:
        self._library.disk_tell(-1, 0, 0, 0, 0)

    def count(self, kind: str) -> int:
        """Calls of a kind since it was last told something."""
        return int(self._library.disk_count(KINDS.index(kind)))


def make() -> Rows:
    return Rows(512)  # what a block saves is large enough for the stash


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def same_states(ours: Any, plain: Any) -> bool:
    """Of two optimizers."""
    one, other = ours.state_dict()["state"], plain.state_dict()["state"]
    return all(torch.equal(one[key][name], value) for key in other for name, value in other[key].items())


class Pair:
    """A model of plain torch and one that is wrapped, which make the same steps."""

    def __init__(self, disk: Disk, folder: Path, passes: int, options: dict[str, Any], found: Counter[str]) -> None:
        import protrain

        self.protrain, self.disk, self.folder, self.passes, self.found = protrain, disk, folder, passes, found
        self.store = folder / "store"
        self.store.mkdir(exist_ok=True)
        self.own_options, self.clip = options, options.get("max_grad_norm")
        self.options = {"memory": MEMORY, "disk": self.store, **options}
        self.plain: Any = make()
        self.plain_optimizer = adamw(self.plain)
        self.steps = 0
        self.space: dict[Any, int] = {}
        self.wrap(make())

    def wrap(self, model: Any) -> None:
        self.model, self.optimizer = self.protrain.wrap(model, adamw(model), **self.options)

    def batches(self) -> list[torch.Tensor]:
        return [
            torch.randn(128, 128, generator=torch.Generator().manual_seed(1000 * self.steps + number))
            for number in range(self.passes)
        ]

    def step_plain(self) -> list[float]:
        losses = []
        for x in self.batches():
            loss = self.plain(x)
            loss.backward()
            losses.append(loss.item())
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip)
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        return losses

    def step(self) -> list[float]:
        losses = []
        for x in self.batches():
            loss = self.model(x)
            loss.backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def caught(self, fault: Fault, work: Callable[[], Any], path: Path | None = None) -> bool:
        """Whether work() raises, and then the right error; the disk is well after it, and nothing holds the error any more."""
        try:
            work()
        except Exception as error:
            self.disk.calm()
            self.check_error(error, fault, path)
            return True
        return False

    def check_error(self, error: Exception, fault: Fault, path: Path | None = None) -> None:
        """It is a DiskError that says where, why and how much."""
        path = path or self.store
        assert not fault.harmless, f"{type(error).__name__}: {error}"
        if fault.lie and fault.kind == "read" and isinstance(error, self.protrain.PlanError):
            assert str(path) in str(error), f"names no path: {error}"
            return  # what was read is no file of its format
        assert isinstance(error, self.protrain.DiskError), f"{type(error).__name__}: {error}"
        lies = {errno.EBADMSG, errno.ENODATA} if fault.fault == "nothing" else {errno.EBADMSG}
        wanted = lies if fault.lie else {fault.number} if fault.number else {errno.ENODATA, errno.ENOSPC}
        assert error.errno in wanted, f"errno {error.errno}, not {wanted}: {error}"
        assert fault.lie or not fault.number or os.strerror(fault.number) in str(error), f"says no reason: {error}"
        assert str(path) in str(error), f"names no path: {error}"
        assert str(error.filename).startswith(str(path)), error.filename
        assert fault.kind in ("openat", "open", *SAVE_KINDS) or error.asked_bytes > 0, f"says no bytes: {error}"
        assert "\n" not in str(error)

    def one_step(self, fault: Fault, first: int, last: int) -> bool:
        """A step with these calls going wrong, and what must hold after it. Returns whether the calls came."""
        before = bits(self.plain)
        expected = self.step_plain()
        self.disk.tell(fault, first, last)
        losses: list[float] = []
        failed = self.caught(fault, lambda: losses.extend(self.step()))
        if failed:
            assert bits(self.model) == before, "the parameters are not those of the last complete step"
            self.optimizer.zero_grad()
            losses = self.step()
        came = first > 0 and (failed or self.disk.count(fault.kind) >= first)
        self.disk.calm()
        assert losses == expected, f"losses {losses}, plain torch has {expected}"
        self.steps += 1
        self.found["raised" if failed else "made good"] += came
        return came

    def check_all(self) -> None:
        """Parameters and states are plain torch's, and no space of the store is held that was not held before under this plan."""
        now = self.protrain.status(self.model)
        homes = now.plan.n_persist, now.plan.n_buffer, now.plan.block_modes
        most_bytes = self.space.setdefault(homes, now.disk_bytes)
        assert now.disk_bytes <= most_bytes, f"{now.disk_bytes} bytes of the store are held, {most_bytes} were"
        assert bits(self.model) == bits(self.plain), "parameters differ"
        assert same_states(self.optimizer, self.plain_optimizer), "states differ"


def chosen(count: int, share: float, chance: random.Random) -> list[int]:
    """So many of 1 to count as the share says, one of each equal part of them."""
    wanted = max(1, min(count, round(count * share)))
    return [1 + int((part + chance.random()) * count / wanted) for part in range(wanted)] if count else []


class Run:
    """All faults of one configuration."""

    def __init__(self, folder: Path, share: float, seed: int) -> None:
        self.folder, self.share = folder, share
        self.chance = random.Random(seed)
        self.disk = Disk()
        self.found: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()

    def note(self, where: str, fault: Fault, came: bool) -> None:
        name = errno.errorcode.get(fault.number, "") if fault.number else fault.fault
        self.injected[f"{where} {fault.kind} {name}"] += came

    def counted(self, kinds: tuple[str, ...], work: Callable[[], Any]) -> dict[str, int]:
        """How many calls of each kind work() makes."""
        counts = {}
        for kind in kinds:
            self.disk.tell(Fault(kind, "none"), 0, 0)
            work()
            counts[kind] = self.disk.count(kind)
            self.disk.calm()
        return counts

    def without_faults(self) -> None:
        """A model's life, after which torch has the threads and files that it keeps."""
        pair = Pair(self.disk, self.folder, 1, {}, self.found)
        for _ in range(2):
            pair.one_step(Fault("pread", "none"), 0, 0)
        pair.protrain.save(pair.model, pair.optimizer, self.folder / "saved" / "checkpoint")
        pair.protrain.unwrap(pair.model)

    def train(self, where: str, passes: int, options: dict[str, Any]) -> None:
        pair = Pair(self.disk, self.folder, passes, options, self.found)
        none = Fault("pread", "none")
        for _ in range(5):
            pair.one_step(none, 0, 0)
        counts = dict.fromkeys(KINDS, 0)
        for _ in range(2):
            self.disk.tell(none, 0, 0)
            pair.step_plain()
            pair.step()
            pair.steps += 1
            counts = {kind: max(counts[kind], self.disk.count(kind)) for kind in KINDS}
        self.disk.calm()
        pair.check_all()
        for fault in STEP_FAULTS:
            for first in chosen(counts[fault.kind], self.share, self.chance):
                try:
                    if fault.lie and fault.kind == "pwrite":
                        pair = self.lost_write(where, pair, fault, first)
                        continue
                    self.note(where, fault, pair.one_step(fault, first, first))
                except BaseException as error:
                    error.add_note(f"{where}: call {first} of {counts[fault.kind]}, {fault}")
                    raise
            pair.check_all()
        for fault in (Fault("pread", "fail", errno.EIO), Fault("pwrite", "fail", errno.ENOSPC)):  # the disk is gone for a step
            pair.one_step(fault, 1, 1 << 40)
        pair.check_all()
        self.protrain_unwrap(pair)
        self.saves(where, pair)

    def lost_write(self, where: str, pair: Pair, fault: Fault, first: int) -> Pair:
        """What was not written as told is lost: sooner or later somebody reads it and is told so, or nobody needs it any more.
        Returns the pair to go on with."""

        def steps() -> None:
            for number in range(2):
                expected, losses = pair.step_plain(), pair.step()
                if number == 0:
                    self.disk.calm()
                assert losses == expected, f"losses {losses}, plain torch has {expected}"
                pair.steps += 1
            pair.check_all()

        self.disk.tell(fault, first, first)
        noticed = pair.caught(fault, steps)
        self.found["raised" if noticed else "made good"] += 1
        self.note(where, fault, True)
        if not noticed:
            return pair
        passes, options = pair.passes, pair.own_options
        pair.optimizer.zero_grad()  # the step is given up: what is allocated now counts in no budget
        pair.model = pair.optimizer = None
        gc.collect()
        fresh = Pair(self.disk, self.folder, passes, options, self.found)
        for _ in range(3):
            fresh.one_step(Fault("pread", "none"), 0, 0)
        return fresh

    def begins(self, rounds: int) -> None:
        """The first steps, in which homes move: a disk that fails there, or is gone for that step."""
        none, last_step = Fault("pread", "none"), 3
        faults = [fault for fault in STEP_FAULTS if not fault.lie and not fault.harmless]
        counts: list[dict[str, int]] = []
        for number in range(rounds + 1):
            pair = Pair(self.disk, self.folder, 1, {}, self.found)
            fault, step = self.chance.choice(faults), self.chance.randrange(last_step)
            for now in range(last_step):
                if number == 0:
                    self.disk.tell(none, 0, 0)
                    assert pair.step() == pair.step_plain()
                    pair.steps += 1
                    counts.append({kind: self.disk.count(kind) for kind in KINDS})
                    continue
                count = counts[step][fault.kind]
                first = 1 + self.chance.randrange(count) if now == step and count else 0
                first = 1 if fault.kind == "fallocate" and now == step else first
                last = self.chance.choice((first, 1 << 40)) if first else 0  # once, or from then on
                try:
                    self.note("begin", fault, pair.one_step(fault, first, last))
                except BaseException as error:
                    error.add_note(f"round {number}, step {now}: calls {first} to {last} of {count}, {fault}")
                    raise
            pair.check_all()
            pair.protrain.unwrap(pair.model)
            assert bits(pair.model) == bits(pair.plain)

    def beside_busy_threads(self) -> None:
        """Calls fail while other threads hold the GIL for long stretches: what the lanes' threads tell needs no GIL."""
        modes = ["swap", "checkpoint_swap"] * 3
        pair = Pair(self.disk, self.folder, 1, {"block_modes": modes}, self.found)
        for _ in range(3):
            pair.one_step(Fault("pread", "none"), 0, 0)
        over, interval = threading.Event(), sys.getswitchinterval()

        def hold() -> None:
            while not over.is_set():
                sum(range(100000))

        threads = [threading.Thread(target=hold) for _ in range(2)]
        sys.setswitchinterval(0.01)  # who has the GIL keeps it that long
        for thread in threads:
            thread.start()
        try:
            for kind, number in (("pread", errno.EIO), ("pwrite", errno.EIO), ("pwrite", errno.ENOSPC)):
                for last in (1, 1 << 40):
                    fault = Fault(kind, "fail", number)
                    self.note("busy", fault, pair.one_step(fault, 1, last))
        finally:
            over.set()
            sys.setswitchinterval(interval)
            for thread in threads:
                thread.join()
        pair.check_all()
        pair.protrain.unwrap(pair.model)

    def protrain_unwrap(self, pair: Pair) -> None:
        """A read that fails in unwrap: the model is still wrapped, and trains."""
        fault = Fault("pread", "fail", errno.EIO)
        for first in (1, 5):
            self.disk.tell(fault, first, first)
            assert pair.caught(fault, lambda: pair.protrain.unwrap(pair.model)), "unwrap read nothing"
            self.note("unwrap", fault, True)
            self.found["raised"] += 1
            pair.one_step(Fault("pread", "none"), 0, 0)
        pair.check_all()

    def saves(self, where: str, pair: Pair) -> None:
        """Saving and loading: the checkpoint that was there is there, or the new one is."""
        protrain, target = pair.protrain, self.folder / "saved" / "checkpoint"
        protrain.save(pair.model, pair.optimizer, target)
        counts = self.counted(("pread", *SAVE_KINDS), lambda: protrain.save(pair.model, pair.optimizer, target))
        for fault in SAVE_FAULTS:
            for first in chosen(counts[fault.kind], self.share, self.chance):
                before = (target / "protrain.json").read_bytes()
                pair.one_step(Fault("pread", "none"), 0, 0)
                self.disk.tell(fault, first, first)
                path = target.parent if fault.kind == "mkdir" else target if fault.kind in SAVE_KINDS else None
                failed = pair.caught(fault, lambda: protrain.save(pair.model, pair.optimizer, target), path)
                self.disk.calm()
                self.found["raised" if failed else "made good"] += 1
                if failed:
                    assert (target / "protrain.json").read_bytes() == before, "another checkpoint is there"
                else:
                    self.check_saved(pair, target)
                self.note("save", fault, True)
                assert os.listdir(target.parent) == ["checkpoint"], f"left {os.listdir(target.parent)}"
        protrain.save(pair.model, pair.optimizer, target)
        self.loads(pair, target)

    def check_saved(self, pair: Pair, target: Path) -> None:
        from safetensors.torch import load_file

        loaded = load_file(target / "model.safetensors")
        assert {name: value.numpy().tobytes() for name, value in loaded.items()} == bits(pair.plain), "another model was saved"

    def loads(self, pair: Pair, target: Path) -> None:
        """A load that fails says which file it is about, and can be made again; one that does not has put what was saved."""
        protrain = pair.protrain
        load = partial(protrain.load, pair.model, pair.optimizer, target)
        counts = self.counted(LOAD_KINDS, load)
        for fault in LOAD_FAULTS:
            for first in chosen(counts[fault.kind], self.share, self.chance):
                self.disk.tell(fault, first, first)
                try:
                    failed = pair.caught(fault, load, target if fault.kind in ("open", "read") else None)
                    self.disk.calm()
                    assert failed or fault.harmless or fault.lie, "nothing was raised"
                    if failed:
                        load()
                    pair.one_step(Fault("pread", "none"), 0, 0)
                except BaseException as error:
                    error.add_note(f"load: call {first} of {counts[fault.kind]}, {fault}")
                    raise
                self.found["raised" if failed else "made good"] += 1
                self.note("load", fault, True)
                protrain.save(pair.model, pair.optimizer, target)
        pair.check_all()
        protrain.unwrap(pair.model)
        assert bits(pair.model) == bits(pair.plain)

    def wraps(self) -> None:
        """A wrap that fails leaves an ordinary model, which can be wrapped when the disk is well."""
        import protrain

        store = self.folder / "store"

        def wrap(model: Any) -> None:
            protrain.wrap(model, adamw(model), memory=MEMORY, disk=store)

        models = [make() for _ in WRAP_FAULTS]
        for model, fault in zip(models, WRAP_FAULTS, strict=True):
            before = bits(model)
            count = self.counted((fault.kind,), partial(wrap, model))[fault.kind]
            protrain.unwrap(model)
            for first in range(1, count + 1):
                last = 1 << 40 if fault.kind == "fallocate" else first  # one that asks for less comes after it
                self.disk.tell(fault, first, last)
                error = None
                try:
                    wrap(model)
                except protrain.DiskError as found:
                    error = found.errno, str(found)
                self.disk.calm()
                if error is None:  # a read ahead that failed is made again when it is needed
                    assert fault.kind == "pread", f"{fault}, call {first} of {count}: nothing was raised"
                    protrain.unwrap(model)
                else:
                    assert error[0] == fault.number
                    assert str(store) in error[1]
                self.found["made good" if error is None else "raised"] += 1
                self.note("wrap", fault, True)
                assert bits(model) == before, f"{fault}, call {first}: the model is another one"
                assert all(type(p) is nn.Parameter for p in model.parameters())
                model(torch.ones(2, 128)).backward()
                model.zero_grad()


def held() -> dict[str, int]:
    """What may not grow: threads of Python and of C, descriptors, bytes of tensors in protrain's memory."""
    import protrain

    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "live_bytes": int(protrain._core.memory_stats()["live_bytes"]),
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--share", type=float, default=1.0, help="of the calls of each kind that go wrong, spread evenly")
    words.add_argument("--begins", type=int, default=100, help="models whose first steps meet a fault")
    words.add_argument("--seed", type=int, default=1)
    given = words.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(dir=os.environ.get("PROTRAIN_DISK")))
    run = Run(work, given.share, given.seed)
    modes = ["swap", "checkpoint_swap", "swap", "checkpoint", "swap", "swap"]
    run.without_faults()
    before = held()
    run.train("swap", 1, {"block_modes": modes})
    run.train("clip", 2, {"accumulate": 2, "max_grad_norm": 0.5})
    run.begins(given.begins)
    run.beside_busy_threads()
    run.wraps()
    after = held()
    assert all(after[name] <= before[name] for name in after), f"{after} at the end, {before} before the first fault"
    assert not list((work / "store").iterdir())
    shutil.rmtree(work)
    print(
        json.dumps(
            {
                "faults": sum(run.injected.values()),
                "kinds": dict(sorted(run.injected.items())),
                **run.found,
                **after,
                "seed": given.seed,
                "seconds": round(time.monotonic() - began),
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
