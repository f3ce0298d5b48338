"""`protrain doctor`: what was found on this machine, and what it means for training.

A row is what, what was found and a sentence. A thing that cannot be found out is a row that says why; the doctor itself
does not fail.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from protrain import _core
from protrain.base.sizes import default_disk_folder, default_memory_bytes
from protrain.cli import machine
from protrain.cli.words import json_text, size_text
from protrain.profiling import calibration

BENCH_BYTES = 256 << 20


@dataclass(frozen=True)
class Row:
    """One finding. `values` holds the bare numbers (bytes, bytes per second, counts) for programs."""

    what: str
    found: str
    meaning: str
    values: dict[str, Any]


def run(disk: str | None, as_json: bool) -> None:
    """Find out and print."""
    rows = [*_versions(), *_processor(), *_memory(), *_disk(disk)]
    if as_json:
        print(json_text({row.what: {"found": row.found, "meaning": row.meaning, **row.values} for row in rows}))
        return
    _print(rows)


def _print(rows: list[Row]) -> None:
    """A table on a terminal and in a file alike, as wide as the terminal, else 120 columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("what", "found", "what it means"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(Text(row.what, style="bold"), Text(row.found), Text(row.meaning))
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


def _versions() -> list[Row]:
    rows = []
    needed = {"protrain": "this package", "torch": "runs the model", "transformers": "models by name, and their tokenizers"}
    for name, meaning in needed.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # A source tree that was not installed has no metadata; the package itself may still be there.
            version = "not installed" if name != "protrain" else "run from its sources, not installed"
        rows.append(Row(name, version, meaning, {"version": version}))
    rows.insert(
        1, Row("python", platform.python_version(), f"{platform.system()} {platform.release()}, {platform.machine()}", {})
    )
    return rows


def _processor() -> list[Row]:
    cores, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    features = _core.cpu_features()
    there = ", ".join(key for key, value in features.items() if value is True)
    name = f"{machine.cpu_name()} ({there or 'no vector extension that is used'})"
    rows = [
        Row("processor", name, f"the optimizer's kernels use {features['best']}", {}),
        Row("cores", f"{cores} of {all_cores}", "compute and updates share them; the disk needs next to none", {"cores": cores}),
    ]
    try:
        count = torch.cuda.device_count()
        gpu = torch.cuda.get_device_name(0) if count else "none"
    except Exception as error:  # a broken driver must not end the doctor
        count, gpu = 0, f"cannot ask torch: {' '.join(str(error).split())[:80]}"
    meaning = "train --device cuda uses it" if count else "models train on the CPU; memory is the device, the disk takes the rest"
    return [*rows, Row("GPU", gpu, meaning, {"count": count}), _direct_storage()]


def _direct_storage() -> Row:
    """Between GPUs and disks without host memory: what is there, and that it is not used."""
    found = _core.direct_storage()
    text = "none"
    if found["library"]:
        version = f" {found['version'] // 1000}.{found['version'] % 1000 // 10}" if found["version"] else ""
        module = f"nvidia-fs {found['module_version']}".strip() if found["module"] else "without the kernel's nvidia-fs"
        text = f"libcufile{version}, {module}"
    meaning = "not used: what goes between a GPU and the disk passes host memory, where every page is checksummed"
    return Row("GPUDirect Storage", text, meaning, {**found, "used": False})


def _memory() -> list[Row]:
    total, available = machine.memory()
    limit, pages = machine.cgroup_limit(), machine.huge_pages()
    return [
        Row(
            "memory",
            f"{size_text(total)}, {size_text(available)} available",
            f"without --memory a budget is {size_text(default_memory_bytes())}, what is free less a reserve",
            {"total_bytes": total, "available_bytes": available},
        ),
        Row(
            "cgroup limit",
            "none" if limit is None else size_text(limit),
            "memory ends where the machine's does"
            if limit is None
            else "the kernel kills a process past it; --memory must stay below",
            {"limit_bytes": limit},
        ),
        Row(
            "huge pages",
            pages,
            {
                "always": "large buffers get them",
                "madvise": "large buffers get them where asked for",
                "never": "large buffers use small pages; compute may be a little slower",
            }.get(pages, "the kernel does not say"),
            {},
        ),
    ]


def _disk(disk: str | None) -> list[Row]:
    folder = default_disk_folder() if disk is None else disk
    if not os.path.isdir(folder):
        todo = "give" if os.path.lexists(folder) else "make it, or give"
        return [Row("disk folder", folder, f"is no folder; {todo} another with --disk or $PROTRAIN_DISK", {})]
    kind, free = machine.file_system(folder)
    memory_kind = kind in machine.IN_MEMORY
    rows = [
        Row(
            "disk folder",
            f"{os.path.abspath(folder)} ({kind})",
            "lies in memory and will be refused; give a folder on a disk with --disk or $PROTRAIN_DISK"
            if memory_kind
            else "where chunks and activations go that do not fit memory",
            {"file_system": kind},
        ),
        Row(
            "disk space",
            f"{size_text(free)} free",
            f"holds the states of {free / 32 / 1e9:.1f} billion parameters, with room for updates in flight",
            {"free_bytes": free},
        ),
    ]
    if memory_kind:
        return rows
    if free < 2 * BENCH_BYTES:
        return [*rows, Row("disk speed", "not measured", f"too little space for a file of {size_text(BENCH_BYTES)}", {})]
    try:
        figures = _core.disk_bench(folder, BENCH_BYTES)
    except OSError as error:
        return [*rows, Row("disk speed", "not measured", " ".join(str(error).split()), {"errno": error.errno})]
    write, read = figures["bytes"] / figures["write_seconds"], figures["bytes"] / figures["read_seconds"]
    meaning = f"direct, by the engine itself; a billion parameters' states (16 GB) pass in about {16e9 / min(write, read):.0f} s"
    values = {"write_bytes_per_second": write, "read_bytes_per_second": read, "measured_bytes": figures["bytes"]}
    rows.append(Row("disk engine", figures["engine"], "what moves bytes to the disk and back", {}))
    rows.append(Row("disk speed", f"write {write / 1e9:.2f} GB/s, read {read / 1e9:.2f} GB/s", meaning, values))
    return [*rows, *_lanes(folder)]


def _lanes(folder: str) -> list[Row]:
    """What the disk carries, and updates take, while compute runs, and what that costs it: what the planner reckons with."""
    try:
        found = calibration.measure_machine(folder)
    except OSError as error:
        return [Row("disk beside compute", "not measured", " ".join(str(error).split()), {"errno": error.errno})]
    read, write, update = found.disk_read, found.disk_write, found.update
    write_ms, read_ms, update_ms = (lane.drag_seconds_per_byte * 1e12 for lane in (write, read, update))  # for each GB
    return [
        Row(
            "disk beside compute",
            f"write {write.bytes_per_second / 1e9:.2f} GB/s, read {read.bytes_per_second / 1e9:.2f} GB/s",
            f"each GB takes compute {write_ms:.0f} ms to write and {read_ms:.0f} ms to read",
            {"write": asdict(write), "read": asdict(read), "overlap": found.disk_overlap},
        ),
        Row(
            "updates beside compute",
            f"{update.bytes_per_second / 1e9:.1f} GB/s on one thread",
            f"a billion parameters' Adam (12 GB) takes compute {12 * update_ms / 1e3:.1f} s",
            asdict(update),
        ),
    ]
