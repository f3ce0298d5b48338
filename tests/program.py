"""The command line as a user starts it, in a process of its own, and its answers in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protrain.cli import main

ROOT = Path(__file__).resolve().parent.parent
#: A program that takes this long hangs: a machine that is busy, or stopped for minutes, is no failure.
HUNG_SECONDS = 600

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of tests that a shell runs in the background; what they start would too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "protrain", *map(str, arguments)]


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The program in a folder, to its end."""
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=HUNG_SECONDS, check=False
    )


def interrupted(folder: Path, *arguments: object) -> tuple[int, str]:
    """A training that is told Ctrl-C when it has shown its second step: its exit code, and what it said on stderr."""
    process = subprocess.Popen(
        command(*arguments), cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line.startswith("step 2/"):
                break
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=HUNG_SECONDS)
    finally:
        process.kill()
    return process.returncode, errors


def answer(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: object
) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr in this process, of words that are answered before anything is trained."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["protrain", *map(str, arguments)])
    capfd.readouterr()
    code = main._run()
    said = capfd.readouterr()
    return code, said.out, said.err
