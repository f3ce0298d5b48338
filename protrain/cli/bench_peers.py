"""`protrain bench`: protrain beside other ways to train in little memory. What runs is in benchmarks/peers of a checkout."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from protrain.base.sizes import default_disk_folder
from protrain.cli import machine
from protrain.cli.bench import end_early, saying_what_is_missing
from protrain.cli.display import status_line
from protrain.cli.report import check_report
from protrain.cli.words import CommandError, json_text, writing

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@dataclass(frozen=True)
class Words:
    """The options of `bench` by itself. Sizes in bytes, sequences in tokens; peers: those that are run, none: all of them."""

    model_name: str
    memory: int
    seq: int
    batch: int
    rounds: int
    seed: int
    disk: str | None
    quick: bool
    search: bool
    peers: tuple[str, ...]
    out: str | None
    as_json: bool
    report: str | None = None


def run(words: Words) -> None:
    """Compare, print, write. Raises CommandError."""
    from protrain.cli.model import check_batch, read_config

    check_report(words.report)
    if words.out is not None:
        _check_folder(words.out)
    config, _ = read_config(words.model_name)
    check_batch(config, words.batch, words.seq)
    if not (BENCHMARKS / "peers" / "runner.py").is_file():
        raise CommandError(
            "the comparison is part of a checkout, and this protrain is installed without it; bench step works here"
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    begin = time.monotonic()
    runner, process, show = (import_module(f"peers.{name}") for name in ("runner", "process", "show"))
    disk = os.path.abspath(words.disk or default_disk_folder())  # peers run in folders of their own
    asked = runner.Words(
        words.model_name, words.memory, words.seq, words.batch, words.rounds, words.seed, disk, words.quick, words.search,
        str(BENCHMARKS.parent / "build" / "peers"), words.peers,
    )  # fmt: skip
    with saying_what_is_missing(), status_line(words.as_json) as say:
        try:
            found = {"date": runner.now(), "command": _command(), "machine": _machine(disk), **runner.compare(asked, say)}
        except (ValueError, process.PeerError) as error:
            raise CommandError(str(error)) from None
    found["took_seconds"] = time.monotonic() - begin
    if words.as_json:
        print(json_text(found))
    else:
        show.print_table(found)
    if words.out is not None:
        with writing("--out", words.out, "give a folder with room for it"):
            written = show.write(Path(words.out), found)
        if not words.as_json:
            print(f"in {words.out}: {', '.join(written)}")
    if words.report is not None:
        with writing("--report", words.report):
            import_module("peers.page").write(words.report, found)
        if not words.as_json:
            print(f"report in {words.report}")
    if found["interrupted"]:
        measured = sum(row["seconds"] is not None for row in found["rows"])
        end_early(f"with {measured} of {len(found['rows'])} rows measured", words.as_json)


def _check_folder(name: str) -> None:
    """Whether files can be written there, tried before all that takes time; the folder is made. Raises CommandError."""
    with writing("--out", name, "give a folder that can be written to"):
        Path(name).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=name).close()


def _command() -> str:
    return " ".join(["protrain", *sys.argv[1:]])


def _machine(disk: str) -> dict[str, Any]:
    import torch
    import transformers

    total, _ = machine.memory()
    swap = import_module("peers.swap")
    return {
        "cpu": machine.cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": total,
        "cgroup_bytes": machine.cgroup_limit(),
        "swap_bytes": swap.swap_total(),
        "file_system": machine.file_system(disk)[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
