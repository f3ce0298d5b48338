"""The programs of test_reliability.py, those of tests/c that take random input or faults, and tests under random plans, for as
long as a night has: what `make soak` runs.

    PROTRAIN_FUZZ_SECONDS=3600 python tests/soak.py --seed 7

Words after that are parts of names, of those to run. One after the other, their last lines told. Each night has a seed of its
own, which is told; `--seed` repeats one. Ends with the number of those that did not hold; one that hangs is ended, and tells
where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILER = shlex.split(os.environ.get("CC", "gcc"))
TICK_SECONDS = 10
ASLEEP_TICKS = 180  # of sleep without an end: half an hour

SEEDED = ("faults.py", "crashes.py", "interrupts.py")  # the others have it from PROTRAIN_FUZZ_SEED
UNDER_RANDOM_PLANS = (
    "exact", "semantics", "semantics_calls", "states", "stash", "homes", "optimizers", "bf16", "compile", "trainer", "limits",
    "evaluation",
)  # fmt: skip
PROGRAMS = [
    ["-m", "pytest", "-q", "-rP", "tests/test_c.py", "-k", "fuzz or disk_space or step_faults or device_faults"],
    ["tests/faults.py", "--share", "1", "--begins", "300"],
    ["tests/crashes.py", "--runs", "200"],
    ["tests/leaks.py", "--rounds", "50", "--steps", "1000"],
    ["benchmarks/soak.py", "--steps", "1000"],
    ["tests/exits.py"],
    ["tests/interrupts.py", "--share", "1"],
    ["tests/random_training.py"],
    ["-m", "pytest", "-q", "-rf", "-p", "random_plans", *(f"tests/test_{name}.py" for name in UNDER_RANDOM_PLANS)],
    *(["tests/fuzz.py", kind] for kind in ("plan", "profile", "hardware", "safetensors", "checkpoint", "optimizer", "modules")),
]


class Watch:
    """Whether the processes of a session hang: each of their threads slept whenever it was looked at, and none used the processor
    in between. It counts looks, and those at which something waits for the processor or is stopped (SIGSTOP) not at all."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._asleep = 0
        self._used: dict[str, str] = {}

    def hangs(self) -> bool:
        """To be called once a tick."""
        states, used = self._look()
        if not states <= set("SZXI") or used != self._used:
            self._asleep = 0
        else:
            self._asleep += 1
        self._used = used
        return self._asleep > ASLEEP_TICKS

    def _look(self) -> tuple[set[str], dict[str, str]]:
        """States of all threads, and ticks of the processor that each has had, to a tenth of a second."""
        states, used = set(), {}
        for task in Path("/proc").glob("[0-9]*/task/*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                words = task.read_text().rpartition(")")[2].split()
                if int(words[3]) == self._session:
                    states.add(words[0])
                    used[str(task)] = str((int(words[11]) + int(words[12])) // 10)
        return states, used


def run(words: list[str], environment: dict[str, str]) -> int:
    """Its exit status; of one that hangs that of the signal that ended it, when it has said where its threads were."""
    process = subprocess.Popen([sys.executable, *words], env=environment, cwd=HERE.parent, start_new_session=True)
    watch = Watch(process.pid)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(TICK_SECONDS)
            if watch.hangs():
                print(f"soak: it hangs: all its threads slept for {ASLEEP_TICKS * TICK_SECONDS} s", flush=True)
                os.killpg(process.pid, signal.SIGABRT)  # faulthandler tells
                time.sleep(TICK_SECONDS)
                return 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    given.add_argument("parts", nargs="*", help="of names: those that have one of them run")
    words = given.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        library = Path(work) / "fake_disk.so"
        flags = ["-std=c11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
        subprocess.run([*COMPILER, *flags, str(HERE / "c" / "fake_disk.c"), "-o", str(library)], check=True)
        for program in PROGRAMS:
            if words.parts and not any(part in " ".join(program) for part in words.parts):
                continue
            environment = {
                "PROTRAIN_FAULT_STRIDE": "1",
                **os.environ,
                "PROTRAIN_FUZZ_SEED": str(words.seed),
                "PYTHONFAULTHANDLER": "1",
                "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]),
            }
            if program[0].endswith("faults.py"):
                environment["LD_PRELOAD"] = str(library)
            seed = ["--seed", str(words.seed)] if program[0].endswith(SEEDED) else []
            print(f"$ PROTRAIN_FUZZ_SEED={words.seed} python", shlex.join([*program, *seed]), flush=True)
            failed += run([*program, *seed], environment) != 0
    print(f"soak: {failed} did not hold, with seed {words.seed}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
