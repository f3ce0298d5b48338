"""Runs killed at random moments: the last checkpoint is whole, the next run cleans up, a neighbour notices nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RUNS = int(os.environ.get("PROTRAIN_CRASH_RUNS", "20"))


def test_runs_that_are_killed(fresh_disk: Path) -> None:
    """In a process of its own, whose threads are its own: it forks. The seed reproduces what was tried, as far as times do."""
    program = Path(__file__).with_name("crashes.py")
    environment = {**os.environ, "PROTRAIN_DISK": str(fresh_disk), "TMPDIR": str(fresh_disk)}
    command = [sys.executable, str(program), "--runs", str(RUNS), "--seed", "1"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60 + 30 * RUNS)
    assert result.returncode == 0, result.stderr[-4000:]
    assert f"{RUNS} runs killed" in result.stdout
    assert not list(fresh_disk.iterdir())
