"""The night's programs: one that hangs is noticed, one that is busy or stopped is not; each has the night's seed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import soak

DEADLOCK = "import threading; lock = threading.Lock(); lock.acquire(); print(flush=True); lock.acquire()"
BUSY = "print(flush=True)\nwhile True: pass"


@contextmanager
def running(code: str) -> Iterator[int]:
    """In a session of its own; it has begun what it does."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_deadlock_is_noticed_after_some_looks() -> None:
    with running(DEADLOCK) as process:
        watch, looks = soak.Watch(process), 1
        while not watch.hangs():  # where it were not noticed, this would not end
            looks += 1
        assert looks > soak.ASLEEP_TICKS


@pytest.mark.parametrize("code", [BUSY, DEADLOCK])
def test_what_is_busy_or_stopped_does_not_hang(code: str) -> None:
    with running(code) as process:
        if code == DEADLOCK:
            os.kill(process, signal.SIGSTOP)
            os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOWAIT)
        watch = soak.Watch(process)
        assert not any(watch.hangs() for _ in range(3 * soak.ASLEEP_TICKS))


def test_one_that_hangs_is_ended_and_tells_where(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(soak, "ASLEEP_TICKS", 3)
    assert soak.run(["-c", DEADLOCK], {**os.environ, "PYTHONFAULTHANDLER": "1"}) != 0
    out, err = capfd.readouterr()
    assert "it hangs" in out
    assert 'File "<string>", line 1' in err


def test_each_night_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: list[tuple[list[str], str]] = []

    def run(words: list[str], environment: dict[str, str]) -> int:
        given.append((words, environment["PROTRAIN_FUZZ_SEED"]))
        return 0

    monkeypatch.setattr(soak, "run", run)
    for words in ([], [], ["--seed", "7"]):
        monkeypatch.setattr(sys, "argv", ["soak.py", *words])
        assert soak.main() == 0
    count = len(soak.PROGRAMS)
    first, second, third = ({seed for _, seed in given[part : part + count]} for part in (0, count, 2 * count))
    assert len(first) == len(second) == 1
    assert first != second
    assert third == {"7"}
    assert [words[-2:] for words, _ in given[2 * count :] if words[0].endswith(soak.SEEDED)] == [["--seed", "7"]] * 3
    assert "--seed 7" in capsys.readouterr().out


def test_growth_with_changing_lengths_is_an_error() -> None:
    """300 steps of the record, 72 here; what is higher in the last third than in the first ends the program with a word."""
    program = Path(__file__).parent.parent / "benchmarks/soak.py"
    ended = subprocess.run([sys.executable, program, "--steps", "72"], check=False, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(ended.stdout)
    assert record["disk_write_mib_per_step"] > 1
    spec = importlib.util.spec_from_file_location("soak_of_lengths", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flat, mib = [600 << 20] * 48, 1 << 20
    assert module.grown(flat, flat, 16) == []
    assert module.grown([600 * mib + step * mib // 4 for step in range(48)], flat, 16) == [
        "resident memory grew from 603.8 to 611.8 MiB"
    ]
    assert module.grown(flat, [128 * mib] * 40 + [129 * mib] * 8, 16) == ["the store's file grew from 128.0 to 129.0 MiB"]
