"""What every experiment shares: its settings, its command line, and its record, written as JSON and, made from that, Markdown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """device: "cpu" or "cuda"; tiny: the smallest sizes, which try a script and mean nothing; disk: the folder for what does not
    fit, None for protrain's default; rounds: instead of the script's own number; every: all the cases that a script has."""

    device: str = "cpu"
    tiny: bool = False
    disk: str | None = None
    rounds: int | None = None
    every: bool = False


@dataclass(frozen=True)
class Experiment:
    """measure gives the figures, or a "reason" why there are none; body their page below the title; draw a PNG of them.
    name: PAPER/SCRIPT, as its file is."""

    name: str
    title: str
    measure: Callable[[Settings], dict[str, Any]]
    body: Callable[[dict[str, Any]], str]
    draw: Callable[[dict[str, Any]], bytes] | None = None

    def command(self, settings: Settings) -> str:
        """What makes its record."""
        words = [f"python -m benchmarks.papers.{self.name.replace('/', '.')} --out benchmarks/results"]
        words += [f"--device {settings.device}"] if settings.device != "cpu" else []
        words += [f"--rounds {settings.rounds}"] if settings.rounds else []
        return " ".join([*words, *(["--all"] if settings.every else []), *(["--tiny"] if settings.tiny else [])])

    def record(self, settings: Settings) -> dict[str, Any]:
        """Its figures, with when, where and how they were made."""
        begin = time.monotonic()
        found = self.measure(settings)
        return {
            "title": self.title,
            "command": self.command(settings),
            "date": time.strftime("%Y-%m-%d"),
            "device": settings.device,
            "machine": machine(settings),
            "took_seconds": round(time.monotonic() - begin, 1),
            **found,
        }

    def page(self, record: dict[str, Any], picture: str | None = None) -> str:
        """A record as Markdown. picture: the name of its file, where there is one."""
        where = record["machine"]
        parts = [
            f"# {record['title']}",
            f"By `{record['command']}` on {record['date']}: {where['cpu']}, {where['cores']} cores, torch {where['torch']}"
            + (f", {where['gpu']}" if "gpu" in where else "")
            + ".",
            *([f"![{record['title']}]({picture})"] if picture else []),
            self.body(record),
        ]
        return "\n\n".join(parts).rstrip() + "\n"

    def write(self, record: dict[str, Any], out: Path) -> list[Path]:
        """PAPER/SCRIPT.json, .md and perhaps .png below out/papers; on a GPU with _cuda in their names."""
        suffix = "" if record["device"] == "cpu" else f"_{record['device']}"
        base = out / "papers" / f"{self.name}{suffix}"
        base.parent.mkdir(parents=True, exist_ok=True)
        files: dict[Path, bytes] = {base.with_suffix(".json"): (json.dumps(record, indent=1) + "\n").encode()}
        picture = None
        if self.draw is not None and "reason" not in record and find_spec("matplotlib") is not None:
            picture = base.with_suffix(".png")
            files[picture] = self.draw(record)
        files[base.with_suffix(".md")] = self.page(record, picture.name if picture else None).encode()
        for path, content in files.items():
            path.write_bytes(content)
        return list(files)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure, print the page, write it where --out says. Without the device asked for: one line."""
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
        parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to try the script")
        parser.add_argument("--disk", help="the folder for what does not fit")
        parser.add_argument("--rounds", type=int, help="instead of the script's own number")
        parser.add_argument("--all", action="store_true", dest="every", help="all cases, where the script has more")
        parser.add_argument("--out", type=Path, help="the folder in which papers/ is written")
        words = parser.parse_args(arguments)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # for this process and those that it starts
        if words.device == "cuda" and not has_gpu():
            print(f"{self.name}: skipped: no GPU")
            return 0
        record = self.record(Settings(words.device, words.tiny, words.disk, words.rounds, words.every))
        print(self.page(record))
        if words.out is not None:
            print(*self.write(record, words.out), sep="\n")
        return 0


def say(text: str) -> None:
    """What goes on, beside the figures."""
    print(text, file=sys.stderr, flush=True)


def has_gpu() -> bool:
    """Whether torch can compute on one."""
    import torch

    return torch.cuda.is_available()


def machine(settings: Settings) -> dict[str, Any]:
    """What a reader of the figures asks for."""
    import torch

    from protrain.base.sizes import default_disk_folder
    from protrain.cli.machine import cpu_name, file_system, memory

    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory()[0],
        "file_system": file_system(settings.disk or default_disk_folder())[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if settings.device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first are of figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    """Of a share of one."""
    return f"{100 * share:.0f} %"


def mib(n_bytes: float) -> str:
    """In MiB, without the unit."""
    return f"{n_bytes / MIB:,.0f}"
