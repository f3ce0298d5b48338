"""Each example runs as it is written, in a process of its own, and stays inside the budget it names."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {"lora": ["peft"], "sft": ["peft", "trl", "datasets"]}


def run(name: str, disk: Path, *words: str) -> str:
    """The example's output; it ended well."""
    missing = [package for package in NEEDS.get(name, []) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *words],
        env={**os.environ, "PROTRAIN_DISK": str(disk), "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        cwd=disk,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not [path for path in disk.iterdir() if path.suffix != ".json"], "it left files behind"
    return done.stdout


@pytest.mark.parametrize("name", ["plain_loop", "trainer", "accelerate_loop", "lora", "sft", "vision"])
def test_it_trains_inside_its_budget(name: str, fresh_disk: Path) -> None:
    output = run(name, fresh_disk)
    found = re.search(r"peak ([\d.]+) MiB of ([\d.]+)MiB, read from disk (\d+) MiB", output)
    assert found, output
    assert 0 < float(found[1]) <= float(found[2])
    assert int(found[3]) > 0
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", output)]
    assert len(losses) >= 3
    assert all(0 < loss < 10 for loss in losses)


def test_another_budget_gives_the_same_losses(fresh_disk: Path) -> None:
    losses = [re.findall(r"loss ([\d.]+)", run("plain_loop", fresh_disk, "--memory", memory)) for memory in ("20MiB", "1GiB")]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def test_resuming_is_going_on(fresh_disk: Path) -> None:
    assert "equal, bit for bit" in run("resume", fresh_disk)


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "plain_loop", "trainer", "accelerate_loop", "lora", "sft", "vision", "resume",
    }  # fmt: skip
