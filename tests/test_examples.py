"""Each example runs as it is written, in a process of its own, and stays inside the budget it names."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from ahead import Ahead

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {"lora": ["peft"], "sft": ["peft", "trl", "datasets"], "lightning_trainer": ["pytorch_lightning"]}


NAMES = ["plain_loop", "trainer", "accelerate_loop", "lightning_trainer", "lora", "sft", "vision"]
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


Output = Callable[..., str]


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest, ahead: Ahead, disk: Path) -> Output:
    """What an example prints, of its name and words. Those that the chosen tests ask for have begun, each of them once."""

    def begin(name: str, words: tuple[str, ...] = ()) -> Future[str]:
        return ahead.begin((name, words), run, name, words, disk)

    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            for name, words in NEEDED_BY.get(item.originalname, []):
                begin(name or item.callspec.params["name"], words)
    return lambda *given: begin(*given).result()


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_inside_its_budget(name: str, output: Output) -> None:
    text = output(name)
    found = re.search(r"peak ([\d.]+) MiB of ([\d.]+)MiB, read from disk (\d+) MiB", text)
    assert found, text
    assert 0 < float(found[1]) <= float(found[2])
    assert int(found[3]) > 0
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", text)]
    assert len(losses) >= 3
    assert all(0 < loss < 10 for loss in losses)


def test_another_budget_gives_the_same_losses(output: Output) -> None:
    losses = [re.findall(r"loss ([\d.]+)", output("plain_loop", words)) for words in ((), AMPLE)]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def test_resuming_is_going_on(output: Output) -> None:
    assert "equal, bit for bit" in output("resume")


#: The examples of each test, with their words; "": the one that its parameter names.
NEEDED_BY: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "test_it_trains_inside_its_budget": [("", ())],
    "test_another_budget_gives_the_same_losses": [("plain_loop", ()), ("plain_loop", AMPLE)],
    "test_resuming_is_going_on": [("resume", ())],
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "plain_loop", "trainer", "accelerate_loop", "lightning_trainer", "lora", "sft", "vision", "resume",
    }  # fmt: skip
