"""What the kernel says of this machine: memory, limits, the file system of a folder, direct disk speed.

Reads /proc and /sys alone. The disk is measured with direct I/O from a few threads, as the engine moves bytes, for a second
each way at most, in an unlinked file: nothing stays.
"""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REQUEST_BYTES = 4 << 20
FILE_BYTES = 256 << 20
SECONDS = 1.0  # each way
THREADS = 4


@dataclass(frozen=True)
class DiskSpeed:
    """Direct bandwidth in bytes per second, and how many bytes each figure rests on."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    written_bytes: int
    read_bytes: int


def memory() -> tuple[int, int]:
    """Total and available memory in bytes."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    return values["MemTotal"], values["MemAvailable"]


def cgroup_limit() -> int | None:
    """The smallest memory limit of the process's control groups, version 1 or 2, in bytes; None without a limit."""
    limits = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for above in (folder, *folder.parents):  # a limit above binds as well
            if above != root and root not in above.parents:
                break
            try:
                text = (above / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)


def locked_limit() -> int | None:
    """How much memory the process may lock, in bytes; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def cpu_name() -> str:
    """The processor's name, and which of the vector extensions that matter it has."""
    name, flags = "unknown", set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    known = [flag for flag in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd") if flag in flags]
    return f"{name} ({', '.join(known) or 'no vector extension that is used'})"


def huge_pages() -> str:
    """The kernel's setting of transparent huge pages: always, madvise, never or unknown."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"


def file_system(folder: str) -> tuple[str, int]:
    """The type of a folder's file system and the bytes free there for this user."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kind, longest = "unknown", -1
    real = os.path.realpath(folder)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        point = fields[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and (fields[2] == number or kind == "unknown") and len(point) >= longest:
            kind, longest = right.split()[0], len(point)
    space = os.statvfs(folder)
    return kind, space.f_bavail * space.f_frsize


def uring_allowed() -> str:
    """Whether the kernel offers io_uring, as its settings say."""
    try:
        value = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
    except OSError:
        return (
            "not switched off" if tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (5, 6) else "too old a kernel"
        )
    return {"0": "allowed", "1": "for a group only", "2": "switched off"}.get(value, value)


def disk_speed(folder: str) -> DiskSpeed:
    """Measure direct writes, then reads, of REQUEST_BYTES from THREADS threads. Raises OSError."""
    handle, path = tempfile.mkstemp(prefix="protrain-doctor-", dir=folder)
    os.unlink(path)
    try:
        direct = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_DIRECT)
    finally:
        os.close(handle)
    try:
        os.posix_fallocate(direct, 0, FILE_BYTES)
        written, write_seconds = _timed(
            lambda buffer, offset: os.pwrite(direct, buffer, offset), [FILE_BYTES // THREADS] * THREADS
        )
        read, read_seconds = _timed(lambda buffer, offset: os.preadv(direct, [buffer], offset), written)
    finally:
        os.close(direct)
    return DiskSpeed(sum(written) / write_seconds, sum(read) / read_seconds, sum(written), sum(read))


def _timed(move: Callable[[mmap.mmap, int], int], limits: list[int]) -> tuple[list[int], float]:
    """Each thread moves requests through its own part of the file, in order, until it has moved its limit or time is over.

    Returns the bytes that each moved, and the seconds. Reads are limited to what was written: a hole costs the disk nothing.
    """
    begin = time.monotonic()

    def work(thread: int) -> int:
        moved = 0
        with mmap.mmap(-1, REQUEST_BYTES) as buffer:  # page-aligned, as direct I/O wants it
            buffer.write(os.urandom(REQUEST_BYTES))
            while moved < limits[thread] and (moved == 0 or time.monotonic() - begin < SECONDS):
                moved += move(buffer, thread * (FILE_BYTES // THREADS) + moved)
        return moved

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS))), time.monotonic() - begin
