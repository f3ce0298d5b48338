"""Each example runs as it is written, in a process of its own, and stays inside the budget it names."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {"lora": ["peft"], "sft": ["peft", "trl", "datasets"]}


NAMES = ["plain_loop", "trainer", "accelerate_loop", "lora", "sft", "vision"]
AMPLE = ("--memory", "1GiB")


def run(name: str, words: tuple[str, ...], disk: Path) -> str:
    """The example's output; it ended well, and left nothing in a folder of its own."""
    missing = [package for package in NEEDS.get(name, []) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    folder = Path(tempfile.mkdtemp(dir=disk))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *words],
        env={**os.environ, "PROTRAIN_DISK": str(folder), "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    left = [path.name for path in folder.iterdir() if path.suffix != ".json"]
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    assert not left, "it left files behind"
    return done.stdout


class Outputs:
    """What examples print. They run on all cores, a thread each, and each of them once."""

    def __init__(self, disk: Path) -> None:
        self.disk, self.pool = disk, ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._begun: dict[tuple[str, tuple[str, ...]], Future[str]] = {}

    def begin(self, name: str, words: tuple[str, ...] = ()) -> Future[str]:
        if (name, words) not in self._begun:
            self._begun[name, words] = self.pool.submit(run, name, words, self.disk)
        return self._begun[name, words]


@pytest.fixture(scope="module")
def outputs(request: pytest.FixtureRequest, disk: Path) -> Iterator[Outputs]:
    """Those that the chosen tests ask for have begun."""
    made = Outputs(disk)
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            for name, words in NEEDED_BY.get(item.originalname, []):
                made.begin(name or item.callspec.params["name"], words)
    yield made
    made.pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_inside_its_budget(name: str, outputs: Outputs) -> None:
    output = outputs.begin(name).result()
    found = re.search(r"peak ([\d.]+) MiB of ([\d.]+)MiB, read from disk (\d+) MiB", output)
    assert found, output
    assert 0 < float(found[1]) <= float(found[2])
    assert int(found[3]) > 0
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", output)]
    assert len(losses) >= 3
    assert all(0 < loss < 10 for loss in losses)


def test_another_budget_gives_the_same_losses(outputs: Outputs) -> None:
    losses = [re.findall(r"loss ([\d.]+)", outputs.begin("plain_loop", words).result()) for words in ((), AMPLE)]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def test_resuming_is_going_on(outputs: Outputs) -> None:
    assert "equal, bit for bit" in outputs.begin("resume").result()


#: The examples of each test, with their words; "": the one that its parameter names.
NEEDED_BY: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "test_it_trains_inside_its_budget": [("", ())],
    "test_another_budget_gives_the_same_losses": [("plain_loop", ()), ("plain_loop", AMPLE)],
    "test_resuming_is_going_on": [("resume", ())],
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "plain_loop", "trainer", "accelerate_loop", "lora", "sft", "vision", "resume",
    }  # fmt: skip
