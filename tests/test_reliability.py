"""Faults, crashes, hostile input, ends and leaks: programs of their own, which `make soak` runs for longer, here on all cores."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ahead import Ahead

HERE = Path(__file__).resolve().parent
COMPILER = shlex.split(os.environ.get("CC", "gcc"))
FUZZ_SECONDS = os.environ.get("PROTRAIN_FUZZ_SECONDS", "3")
LONGEST_SECONDS = 1200 + 2 * float(FUZZ_SECONDS)

#: What runs, and what its last line says where all holds.
PROGRAMS = {
    "crashes": (["crashes.py", "--runs", "20", "--seed", "1"], r"20 runs killed"),
    "faults": (["faults.py", "--share", "0.001", "--begins", "8"], r'"faults": (?:[6-9]\d|1\d\d)\D'),
    "exits": (["exits.py"], r'"ways": 13'),
    "interrupts": (["interrupts.py", "--share", "0.005"], r'"interrupts": [1-9]\d\d'),
    "leaks": (["leaks.py", "--rounds", "8", "--steps", "80"], r'"rounds": 8.*"steps": 80'),
    "training": (["random_training.py", "--seed", "2", "--count", "5", "--seconds", "600"], r"training: 5 cases, [1-9]"),
    **{
        f"fuzz {kind}": (["fuzz.py", kind, "--seconds", FUZZ_SECONDS], rf"fuzz {kind}: [1-9]\d* inputs, [1-9]")
        for kind in ("plan", "profile", "hardware", "safetensors", "optimizer", "checkpoint", "modules")
    },
}


@pytest.fixture(scope="module")
def fake_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The disk that fails as it is told, as a library."""
    library = tmp_path_factory.mktemp("fake") / "fake_disk.so"
    flags = ["-std=c11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run([*COMPILER, *flags, str(HERE / "c" / "fake_disk.c"), "-o", str(library)], check=True)
    return library


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, request: pytest.FixtureRequest, ahead: Ahead, fake_disk: Path, disk: Path) -> None:
    def run(params: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        words = PROGRAMS[params["name"]][0]
        environment = {**os.environ, "PROTRAIN_DISK": str(disk), "PYTHONWARNINGS": "ignore:protrain"}
        if params["name"] == "faults":
            environment["LD_PRELOAD"] = str(fake_disk)
        return subprocess.run(
            [sys.executable, str(HERE / words[0]), *words[1:]],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=LONGEST_SECONDS,
        )

    result = ahead.result(request, run)
    assert result.returncode == 0, result.stderr[-4000:]
    assert re.search(PROGRAMS[name][1], result.stdout), result.stdout[-2000:]
