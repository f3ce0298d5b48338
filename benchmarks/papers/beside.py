"""protrain beside other ways to train, as the experiments use it: by benchmarks/peers on the CPU, by benchmarks/gpu on a GPU."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.papers.records import Settings, say
from benchmarks.papers.training import Shape
from protrain.base.sizes import default_disk_folder

BENCHMARKS = Path(__file__).resolve().parent.parent
ON_GPU = {
    "plain torch": "plain torch",
    "all-checkpoint": "all checkpointed",
    "save_on_cpu": "save_on_cpu",
    "protrain": "protrain",
}
SECONDS = 120.0  # for a system on a GPU


def largest(settings: Settings, shape: Shape, memory: int, names: Sequence[str], layers_most: int) -> list[dict[str, Any]]:
    """Of each the most layers of this shape that `memory` bytes hold, and whether more were not tried."""
    if settings.device == "cpu":
        with _words(settings, shape, memory, names, rounds=1) as words:
            found = _peers("runner").grow(words, say, layers_most)
        return [
            {
                "name": one.name,
                "layers": one.largest_layers or 0,
                "at_least": one.largest_at_least,
                "reason": one.reason or one.largest_ended,
            }
            for one in found
        ]
    return [_largest_on_gpu(settings, shape, memory, name, layers_most) for name in names]


def compared(settings: Settings, shape: Shape, memory: int, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Of each, steps in turns: tokens_per_second, peak_bytes and whether that keeps to `memory` bytes; or why there are none."""
    if settings.device == "cpu":
        with _words(settings, shape, memory, names, rounds) as words:
            rows = _peers("runner").compare(words, say)["rows"]
        kept = ("name", "tokens_per_second", "peak_bytes", "within_budget", "ratio", "verdict", "reason", "seconds")
        return [{field: row[field] for field in kept} for row in rows]
    return [_measured_on_gpu(settings, shape, memory, name) for name in names]


def _peers(name: str) -> Any:
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return import_module(f"peers.{name}")


@contextmanager
def _words(settings: Settings, shape: Shape, memory: int, names: Sequence[str], rounds: int) -> Iterator[Any]:
    """What benchmarks/peers is asked for; the model's config is in a folder as long as it is asked."""
    with tempfile.TemporaryDirectory() as folder:
        shape.config().save_pretrained(folder)
        disk = settings.disk or default_disk_folder()
        os.makedirs(disk, exist_ok=True)
        yield _peers("runner").Words(
            model_name=folder, memory=memory, seq=shape.seq, batch=shape.batch, rounds=rounds, seed=0, disk=disk, quick=True,
            search=False, build=str(BENCHMARKS.parent / "build" / "peers"), peers=tuple(names),
        )  # fmt: skip


def _run_on_gpu(settings: Settings, shape: Shape, memory: int, name: str) -> dict[str, Any]:
    run = import_module("benchmarks.gpu.run")
    words: argparse.Namespace = run.parser().parse_args([])
    changed = {
        "memory": str(memory), "device": settings.device, "disk": settings.disk, "layers": shape.layers, "hidden": shape.hidden,
        "vocabulary": shape.vocabulary, "batch": shape.batch, "seq": shape.seq,
    }  # fmt: skip
    for field, value in changed.items():
        setattr(words, field, value)
    found: dict[str, Any] = run.run_apart(words, ON_GPU[name], SECONDS)
    return found


def _measured_on_gpu(settings: Settings, shape: Shape, memory: int, name: str) -> dict[str, Any]:
    found = _run_on_gpu(settings, shape, memory, name)
    seconds = found.get("step_seconds")
    reason = "" if seconds else "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in found.items())
    return {
        "name": name,
        "tokens_per_second": found.get("tokens_per_second"),
        "peak_bytes": found.get("peak_bytes"),
        "within_budget": bool(seconds),  # torch was kept to it
        "reason": reason,
    }


def _largest_on_gpu(settings: Settings, shape: Shape, memory: int, name: str, layers_most: int) -> dict[str, Any]:
    fits, fails, reason = 0, 1, ""
    while fails <= layers_most:
        found = _run_on_gpu(settings, replace(shape, layers=fails), memory, name)
        if "step_seconds" not in found:
            reason = "; ".join(found.values())
            break
        fits, fails = fails, 2 * fails
    at_least = fails > layers_most
    while not at_least and fails - fits > max(1, fits // 8):
        middle = (fits + fails) // 2
        held = "step_seconds" in _run_on_gpu(settings, replace(shape, layers=middle), memory, name)
        fits, fails = (middle, fails) if held else (fits, middle)
    return {"name": name, "layers": fits, "at_least": at_least, "reason": reason}
