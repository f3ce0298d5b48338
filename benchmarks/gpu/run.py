"""One model, one GPU, one budget: what each way of training in less memory makes of them, within ten minutes.

    python benchmarks/gpu/run.py --memory 16GiB --out benchmarks/results/gpu.json

Each system runs in a process of its own, which torch keeps to the budget (torch.cuda.set_per_process_memory_fraction); protrain
keeps itself to it. Of each are measured: a step and its memory; for protrain what its plan had said of both, what the lanes to
and from the GPU carried beside what calibration measured of them, and the CPU's updates. Then it looks for the largest model that
it trains, with this width and batch, for its share of the time: a model of which two steps fit. A system that needs more memory
is told as such, one that is not installed too, and one whose time was over before it was measured.

Where there is no GPU nothing is measured, which one line says. `--device cpu --layers 2 --hidden 64` tries the program itself
without one; such figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu import apart, figures, measure
from gpu.systems import SYSTEMS

from protrain.base.sizes import GIB, format_bytes, parse_bytes

WORDS = ("memory", "device", "disk", "host_memory", "layers", "hidden", "vocabulary", "batch", "seq", "steps", "most_layers")
#: Of the time that is left for a system: more than its share is lent to one that is slow to measure, and to no search.
LENT = 1.5
UPDATE_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 22}  # a GiB of parameter, gradient and moments: in no cache


def run_apart(words: argparse.Namespace, system: str, seconds: float) -> dict[str, Any]:
    """One system in a process of its own, whose search is over after so long, and all of it not much later."""
    command = [sys.executable, __file__, "--system", system, "--until", str(time.monotonic() + seconds)]
    for name in WORDS:
        value = getattr(words, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    most = min(LENT * seconds, max(words.end - time.monotonic(), 1.0))
    ended = apart.run(command, most)
    found: dict[str, Any] = {}
    for line in ended.out.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    if found.keys() - {"largest"}:
        if ended.code not in (0, None):
            found["ended"] = ended.reason()
        return found
    return {"not_measured": f"not done in the {most:.0f} s left for it"} if ended.code is None else {"failed": ended.reason()}


def run_all(words: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each system for its share of the time."""
    chosen = [name for name in SYSTEMS if words.only is None or name in words.only]
    missing = {name: SYSTEMS[name].missing() for name in chosen}
    waiting = sum(not why for why in missing.values())
    results: dict[str, dict[str, Any]] = {}
    for name in chosen:
        if missing[name]:
            results[name] = {"skipped": missing[name]}
        elif words.end <= time.monotonic():
            results[name] = {"not_measured": "no time was left for it"}
        else:
            results[name] = run_apart(words, name, (words.end - time.monotonic()) / waiting)
            waiting -= 1
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    return results


# ---- as people read it ----


def size(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.1f} GB/s"


def rows(head: list[str], lines: list[list[str]]) -> list[str]:
    """Columns: the first to the left, the others to the right."""
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    found = []
    for first, *others in [head, *lines]:
        right = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        found.append("  ".join([first.ljust(widths[0]), *right]))
    return found


def step_cells(found: dict[str, Any]) -> dict[str, str]:
    """By the heads of their columns."""
    return {
        "s/step": number(found["step_seconds"], ".3f"),
        "planned": number(found["planned_seconds"], ".3f"),
        "planned/measured": number(found["planned_over_measured_seconds"], ".3f"),
        "tokens/s": number(found["tokens_per_second"], ".0f"),
        "peak": size(found["peak_bytes"]),
        "planned/measured peak": number(found["planned_over_measured_peak"], ".3f"),
        "reserved/live": number(found["reserved_over_live"], ".3f"),
        "NVML": size(found["nvml_bytes"]),
        "last loss": number(found["last_loss"], ".6f"),
    }


def steps_table(results: dict[str, dict[str, Any]]) -> list[str]:
    cells = {name: step_cells(found) for name, found in results.items() if "step_seconds" in found}
    lines = rows(["system", *next(iter(cells.values()))], [[name, *one.values()] for name, one in cells.items()]) if cells else []
    for name, found in results.items():
        lines += [
            f"{name}: {word.replace('_', ' ')}: {found[word]}"[:160]
            for word in ("skipped", "does_not_fit", "not_measured", "failed", "ended")
            if word in found
        ]
    return lines


def lanes_table(results: dict[str, dict[str, Any]], host: dict[str, Any]) -> list[str]:
    """Of protrain: the link, and Adam on the CPU."""
    head = ["lanes", "up", "of calibration", "down", "of calibration", "CPU Adam in steps", "of it alone"]
    lines = []
    for name, found in results.items():
        if "step_seconds" not in found or not SYSTEMS[name].keeps_budget:
            continue
        link, adam = found["link"] or {}, found["adam_bytes_per_second"]
        line = [name]
        for lane in ("upload", "offload"):
            one = link.get(lane, {})
            line += [rate(one.get("bytes_per_second")), number(one.get("share"), ".0%")]
        lines.append([*line, rate(adam), number(adam and adam / host["adam_bytes_per_second"], ".0%")])
    adam, copy = rate(host["adam_bytes_per_second"]), rate(host["copy_bytes_per_second"])
    return (rows(head, lines) if lines else []) + [f"CPU Adam alone, {host['threads']} threads: {adam}; a copy: {copy}"]


def largest_table(results: dict[str, dict[str, Any]], memory: str) -> list[str]:
    head = [f"largest model in {memory}", "layers", "parameters", "too many", "search"]
    lines = []
    for name, found in results.items():
        one = found.get("largest", {})
        if "layers" in one:
            failed = one["fails_at_layers"]
            lines.append([name, str(one["layers"]), f"{one['parameters'] / 1e6:,.1f} M", str(failed or "-"), one["ended"][:80]])
        elif one:
            lines.append([name, "-", "-", "-", one.get("not_measured") or one.get("ended", "-")[:80]])
    return rows(head, lines) if lines else []


def table(results: dict[str, dict[str, Any]], host: dict[str, Any], memory: str) -> str:
    """The figures as people read them."""
    parts = [steps_table(results), lanes_table(results, host), largest_table(results, memory)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"processor": platform.processor(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    return found


# ---- the command ----


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    found.add_argument("--memory", default="16GiB", help="the GPU's budget")
    found.add_argument("--host-memory", default=None, help="protrain's budget of host memory; its default is what is free")
    found.add_argument("--disk", default=None, help="protrain's folder for what fits neither")
    found.add_argument("--layers", type=int, default=48)
    found.add_argument("--hidden", type=int, default=1600)
    found.add_argument("--vocabulary", type=int, default=50257)
    found.add_argument("--batch", type=int, default=4)
    found.add_argument("--seq", type=int, default=1024)
    found.add_argument("--steps", type=int, default=5)
    found.add_argument("--most-layers", type=int, default=4096, help="where the search for the largest model ends; 0: no search")
    found.add_argument("--minutes", type=float, default=9.5, help="all systems together")
    found.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    found.add_argument("--only", nargs="+", default=None, choices=tuple(SYSTEMS), metavar="SYSTEM", help="these systems alone")
    found.add_argument("--out", default=None, help="a file for the figures, as JSON; the table goes beside it, in FILE.txt")
    found.add_argument("--system", default=None, choices=tuple(SYSTEMS), help=argparse.SUPPRESS)
    found.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    return found


def main(arguments: list[str] | None = None) -> int:
    words = parser().parse_args(arguments)
    if words.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    if words.system:
        measure.work(words)
        return 0
    words.end = time.monotonic() + 60 * words.minutes
    host = figures.host_rates(UPDATE_ELEMENTS[words.device])
    results = run_all(words)
    if words.out:
        settings = {name: value for name, value in vars(words).items() if name not in ("out", "system", "until", "end")}
        found = {
            "machine": machine(),
            "settings": settings,
            "memory_gib": parse_bytes(words.memory) / GIB,
            "host": host,
            "systems": results,
        }
        Path(words.out).write_text(json.dumps(found, indent=2) + "\n")
    text = table(results, host, words.memory)
    print(text)
    if words.out:
        Path(f"{words.out}.txt").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
