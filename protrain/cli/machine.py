"""What the kernel says of this machine, read from /proc and /sys alone: memory, limits, the file system of a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from protrain.base import sizes

#: File systems whose files stay in memory: those that csrc/disk/file.c refuses, and that of device files.
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
#: Those on which a file takes no less than its bytes; others may compress, or lie on one that does.
AS_WRITTEN = ("ext2", "ext3", "ext4", "xfs", "tmpfs")


def memory() -> tuple[int, int]:
    """Total and available memory in bytes."""
    values = sizes.memory_sizes()
    return values["MemTotal"], values["MemAvailable"]


def cgroup_limit() -> int | None:
    """The lowest memory limit of the process's control groups, version 1 or 2, in bytes; None without a limit."""
    found = sizes.cgroup_limit()
    return found[0] if found else None


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return os.uname().machine


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
    found = [("unknown", (False, -1))]  # a folder's number is not its mount's where that has subvolumes, as Btrfs
    real = os.path.realpath(folder)
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        if real == point or real.startswith(point.rstrip("/") + "/"):
            found.append((right.split(" ")[0], (fields[2] == number, len(point))))
    kind, _ = max(reversed(found), key=lambda mount: mount[1])  # of several at one point the last is seen
    space = os.statvfs(folder)
    return kind, space.f_bavail * space.f_frsize


def room(folder: str) -> tuple[int, float] | None:
    """The bytes that are free at most for this user on a folder's file system, and how many of them a byte of a file takes at
    least; None: it does not say."""
    space = os.statvfs(folder)
    if space.f_blocks == 0:
        return None
    free = (space.f_bfree if os.geteuid() == 0 else space.f_bavail) * space.f_frsize  # some are kept for root
    return free, 1.0 if file_system(folder)[0] in AS_WRITTEN else 0.5
