"""Every block of code in the README and in docs/ does what it says: Python runs, words of the command line are parsed as they
stand and run small, machines are read. A block of output is marked `text`. Also: tables of options, links, that every page is
found.

Python blocks of a page run in order, in one process and one folder, and find what a reader has: a model, an optimizer, batches.
Budgets stay as they are written; what is large, long or elsewhere is made small by `TINY` and `SMALL`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import transformers
from click.testing import CliRunner

import protrain
from protrain import api
from protrain.cli.main import commands
from protrain.planner.hardware import load_hardware
from protrain.planner.profiles import Machine, Speed
from protrain.runtime import pacing

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *(ROOT / "docs").rglob("*.md"),
                *(ROOT / "benchmarks" / name / "README.md" for name in ("peers", "papers"))])  # fmt: skip
BLOCK = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
#: Blocks that are looked at and not run: output, patterns of files, C.
SHOWN = {"text", "markdown", "c"}
#: In Python blocks: a reader's path.
TINY = {'"/path/on/nvme"': '"scratch"'}
#: On the command line: option -> what it is here, where it stands.
SMALL = {"--model": "tiny", "--seq": "16", "--steps": "2", "--batch": "1", "--save-every": "1", "--rounds": "1"}
#: What is added to a command that leaves it out: without a model there is a large one, without peers all of them.
ADDED = {
    "train": {"--data": "text.txt", "--seq": "16", "--steps": "2"},
    "bench": {"--model": "tiny", "--seq": "16", "--rounds": "1", "--peers": "checkpoint"},
    "bench step": {"--model": "tiny", "--seq": "16", "--rounds": "1", "--memory": "8MiB"},
    "bench activations": {"--model": "tiny", "--seq": "16", "--rounds": "1", "--mixes": "0"},
}
#: Lines of a shell block that are no command of ours.
OTHERS = ("git clone ", "cd ", "pip install ")


@dataclass(frozen=True)
class Block:
    """One block of a page; line counts from 1."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            yield Block(page, text.count("\n", 0, match.start()) + 1, match[2], match[3])


BLOCKS = list(blocks())
WITH_PYTHON = sorted({block.page for block in BLOCKS if block.language == "python"})


def named(language: str) -> Any:
    found = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


def config() -> Any:
    return transformers.GPT2Config(n_embd=32, n_layer=4, n_head=2, n_positions=64, vocab_size=300, use_cache=False)


def tiny() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config()).train()


def test_there_are_blocks_and_each_is_of_a_kind_that_is_looked_at() -> None:
    assert len(WITH_PYTHON) >= 6
    kinds = {block.language for block in BLOCKS}
    assert kinds == {"python", "sh", "toml", *SHOWN}, [block.name for block in BLOCKS if block.language not in kinds - {""}]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=[page.stem for page in WITH_PYTHON])
def test_python(page: Path, disk: Path, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fresh_disk)
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))  # one folder for all: it is measured once
    ids = torch.randint(300, (8, 16))
    tiny().save_pretrained("weights")
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if block.page != page or block.language != "python":
            continue
        if "model" in names:
            leave(names)
        names |= {"torch": torch, "protrain": protrain, "model": (model := tiny())}
        names |= {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "batch": {"input_ids": ids[:2], "labels": ids[:2]}}
        names |= {"loader": [names["batch"]] * 2, "rows": [{"input_ids": row, "labels": row} for row in ids]}
        names |= {"fresh_model": tiny, "make_model": Mlp}
        if not Path("checkpoint").exists():
            checkpoint(fresh_disk / "checkpoint")
        text = block.text
        for there, here in TINY.items():
            text = text.replace(there, here)
        exec(compile("\n" * block.line + text, str(page), "exec"), names)
    leave(names)


class Mlp(torch.nn.Sequential):
    """A model whose modules can all be reset."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))


def checkpoint(folder: Path) -> None:
    """As a reader has one from before."""
    model: Any = tiny()
    model, optimizer = protrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), memory="64MiB")
    protrain.save(model, optimizer, folder)
    protrain.unwrap(model)


def leave(names: dict[str, Any]) -> None:
    """What a block wrapped becomes ordinary again."""
    trainer = names.get("trainer")
    for model in (names["model"], trainer.model if trainer else None):
        if isinstance(model, torch.nn.Module) and api.find_session(model):
            protrain.unwrap(model)


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about how fast this disk is."""
    speed = Speed(1e9, 1e9, 0.0)
    machine = Machine(disk_read=speed, disk_write=speed, update=speed, step_update_bytes_per_second=1e9)
    for module in (api, pacing):
        monkeypatch.setattr(module, "measure_machine", lambda *_: machine)


# ---- the command line ----


def lines(block: Block) -> list[str]:
    joined = block.text.replace("\\\n", " ")
    return [part.strip() for line in joined.splitlines() for part in line.split("&&") if part.strip()]


@pytest.fixture(scope="module")
def workplace(disk: Path) -> Path:
    """A folder with a small model, some text, a profile and a machine, as a reader of these pages has them."""
    folder = disk / "docs"
    folder.mkdir()
    config().save_pretrained(folder / "tiny")
    (folder / "text.txt").write_text(Path(json.__file__).read_text())
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    (folder / "machine.toml").write_text(next(block.text for block in BLOCKS if block.language == "toml"))
    return folder


def small(words: list[str]) -> list[str]:
    """The same command for a small model, a short text and few steps."""
    found = list(words)
    for at, word in enumerate(found[:-1]):
        if word in SMALL:
            found[at + 1] = SMALL[word]
    names = itertools.takewhile(lambda word: not word.startswith("-"), found)
    for option, value in ADDED.get(" ".join(names), {}).items():
        found += [] if option in found else [option, value]
    if "--resume" in found:
        found[found.index("--steps") + 1] = "4"
    return found


_run: dict[str, None] = {}


@named("sh")
def test_shell(block: Block, disk: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    for line in lines(block):
        words = shlex.split(line, comments=True)
        if words[0] == "protrain":
            check_ours(words[1:])
        elif words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            subprocess.run(["make", "-n", "-C", str(ROOT), *targets], check=True, capture_output=True)
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), line
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), line
        else:
            assert line.startswith(OTHERS), f"{block.name}: nothing is known of this line: {line}"


def check_ours(words: list[str]) -> None:
    """Parsed as it stands, and run small; the same command is run once."""
    command, rest = commands, list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        command = command.commands[rest.pop(0)]  # type: ignore[assignment]
    command.make_context("protrain", rest)
    key = " ".join(small(words))
    if key not in _run:
        _run[key] = None
        done = CliRunner().invoke(commands, small(words))
        if "cuda" in words and not torch.cuda.is_available():
            assert "finds no GPU here" in str(done.exception), f"{words}: {done.output}\n{done.exception!r}"
        else:
            assert done.exit_code == 0, f"{words}: {done.output}\n{done.exception!r}"


# ---- machines, tables, links, pages ----


@named("toml")
def test_a_described_machine_is_read(block: Block, tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text(block.text)
    assert load_hardware(tmp_path / "machine.toml").n_devices >= 1


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "benchmarks" / "machines").glob("*.toml")))
def test_machines_of_the_page_on_scale_are_read(name: str) -> None:
    assert load_hardware(ROOT / "benchmarks" / "machines" / name).device_bytes > 0


def test_tables_of_options_are_those_of_the_command_line() -> None:
    spec = importlib.util.spec_from_file_location("options", ROOT / "docs" / "options.py")
    assert spec is not None
    assert spec.loader is not None
    options = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(options)
    page = options.PAGE.read_text()
    assert page.count("<!-- options:") == 6
    assert options.with_tables(page, commands) == page, "python docs/options.py writes them anew"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    broken = [link for link in LINK.findall(text) if "://" not in link and not there(page, link)]
    assert not broken


def there(page: Path, link: str) -> bool:
    """Whether a link's file exists and, where it is Markdown, has the heading or name that it asks for."""
    path, _, anchor = link.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return False
    if not anchor or file.suffix != ".md" or anchor.startswith("protrain."):
        return not anchor.startswith("protrain.") or f"::: {anchor}" in file.read_text()
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", file.read_text()), re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")} | {"decisions/README.md"}


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in protrain.__all__ if name != "session_of" and f"::: protrain.{name}\n" not in page]
    assert not missing
