"""Sizes in bytes, and counts: read from what users write, shown as people read them, found on this machine."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from .reading import MOST_COUNT, MOST_INT, shown

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

#: Blocks of memory of fewer elements are not stashed: what a direct write and a read cost besides their bytes is then more than
#: the bytes are worth, and all of them together are a small part of what a block saves.
STASH_LEAST_ELEMENTS = 16 << 10

#: Backward passes of a step (csrc/plan/request.c).
MOST_PASSES = 1 << 16

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
_MOST_PLACES = 40  # behind the point; more are less than a byte of the largest unit
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # a pathlib.Path of one has a single slash
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)


def check_count(value: object, name: str, most: int = MOST_COUNT) -> int:
    """`value`, a whole number of at least 1, and of at most this.

    Raises:
        TypeError, ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; give a whole number, at least 1")
    if value < 1:
        raise ValueError(f"{name} is {shown(value)}; give a whole number, at least 1")
    if value > most:
        raise ValueError(f"{name} is {shown(value)}; give a whole number, at most {most}")
    return value


def check_folder(value: Any, name: str) -> str:
    """The path of a folder as a str, "~" in it the home folder; whether there is one is not looked at.

    Raises:
        TypeError, ValueError: it is no path of this machine.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"{name} is {value!r}; give the path of a folder as str")
    if "\0" in path:
        raise ValueError(f"{name} is {path!r}; give a path without null characters")
    if _URL.match(path):
        raise ValueError(f"{name} is {path!r}, a URL; give a folder of this machine's file system")
    return os.path.expanduser(path)


def parse_bytes(value: object, name: str = "memory") -> int:
    """Bytes of `value`: a positive integer, or words as "4GiB", "512 MiB", "1.5GB".

    Raises:
        TypeError: value is neither an int nor a str.
        ValueError: it is not positive, or beyond 4 EiB, or not a size.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} is {value!r}; give bytes as an int, or words as '4GiB' or '512MiB'")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if not match:
            raise ValueError(f"{name} is {value!r}; give bytes as an int, or words as '4GiB' or '512MiB'")
        found = scaled(match[1], UNITS[(match[2] or "").upper()])
    else:
        found = value
    if found > MOST_INT:
        raise ValueError(f"{name} is {shown(value)}; it must be at most {MOST_INT} bytes")
    if found < 1:
        raise ValueError(f"{name} is {shown(value)}; it must be more than 0 bytes")
    return found


def scaled(digits: str, unit_bytes: int) -> int:
    """Bytes of a decimal number of units, exactly, rounded down; what has more digits than any size is `MOST_INT` + 1."""
    whole, _, part = digits.partition(".")
    whole, part = whole.lstrip("0") or "0", part[:_MOST_PLACES]
    if len(whole) > len(str(MOST_INT)):
        return MOST_INT + 1
    return int(whole) * unit_bytes + int(part or "0") * unit_bytes // 10 ** len(part)


def format_bytes(value: float) -> str:
    """Bytes as people read them, in binary units: 3221225472 is "3.00 GiB"."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(value) >= unit:
            return f"{value / unit:.{2 if value < 100 * unit else 0}f} {name}"
    return f"{int(value)} bytes" if int(value) != 1 else "1 byte"


def _groups(listing: str, root: str) -> Iterator[tuple[str, str, str]]:
    """(folder, name of the limit, name of the usage) of the memory control groups that this process is in, its own and those
    above, of either version."""
    for line in listing.splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base = os.path.join(root, "memory") if controllers else root
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        parts = [part for part in path.split("/") if part not in ("", "..")]  # above the root of the namespace nothing is seen
        for length in range(len(parts), -1, -1):
            yield os.path.join(base, *parts[:length]), *names


def _limited_groups(listing: str, root: str) -> Iterator[tuple[str, int, str]]:
    """(folder, limit in bytes, name of the usage) of those of them that have a limit; none where the system tells of none."""
    try:
        with open(listing) as lines:
            groups = list(_groups(lines.read(), root))
    except OSError:
        return
    for folder, name, usage in groups:
        try:
            words = _read(folder, name).strip()
            if words != "max" and int(words) < 1 << 60:
                yield folder, int(words), usage
        except (OSError, ValueError):
            continue


def cgroup_free_bytes(listing: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """What the memory control groups of this process still allow, with the caches of files that the kernel can drop; None where
    there is no limit."""
    found: list[int] = []
    for folder, limit, usage in _limited_groups(listing, root):
        try:
            cache = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(folder, "memory.stat"), re.MULTILINE)
            used = int(_read(folder, usage)) - (int(cache[1]) if cache else 0)
            found.append(max(0, limit - max(0, used)))
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def cgroup_limit(listing: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> tuple[int, str] | None:
    """The lowest limit of the memory control groups of this process, in bytes, and the folder of the group that has it; None
    where there is no limit."""
    return min(((limit, folder) for folder, limit, _ in _limited_groups(listing, root)), default=None)


def warn_above_limit(budget_bytes: int, name: str, stacklevel: int) -> None:
    """Warn of a budget that is above the limit of a memory control group of this process, or above all memory of the machine;
    name: of the argument that gave it.

    A warning and no error: a budget is what may be taken at most, and a model that is smaller than it never comes near the limit,
    which may be raised while the process runs, too. Nothing else tells of it: where the limit is reached the kernel ends the
    process without a word. Budgets below the limit pass, whatever else holds memory now, as that may go.
    """
    limits: list[tuple[int, str, str]] = []
    with suppress(OSError):  # no descriptor is left to open it, say
        limits.append((memory_sizes()["MemTotal"], "this machine's memory", ""))
    if (group := cgroup_limit()) is not None:
        limits.append((group[0], f"the limit of the control group {group[1]}", ", or raise the limit"))
    limit, of, more = min(limits, default=(budget_bytes, "", ""))
    if budget_bytes <= limit:
        return
    warnings.warn(
        f"protrain: {name} is {format_bytes(budget_bytes)} ({budget_bytes} bytes), above {of}, {format_bytes(limit)} ({limit} "
        f"bytes): the kernel ends this process where it takes more than that; give {name} below that by what Python and torch "
        f"need, or leave {name} out for what is free less a reserve{more}",
        stacklevel=stacklevel + 1,
    )


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name)) as file:
        return file.read()


def memory_sizes() -> dict[str, int]:
    """What the kernel tells of the machine's memory, in bytes."""
    with open("/proc/meminfo") as lines:
        return {name: int(words.split()[0]) * KIB for name, words in (line.split(":", 1) for line in lines)}


def free_memory_bytes() -> int:
    """Memory that can be had now: what the kernel calls available, or the control group's limit where that is less."""
    available, group = memory_sizes().get("MemAvailable", 0), cgroup_free_bytes()
    return available if group is None else min(available, group)


def default_memory_bytes() -> int:
    """The budget where none is given: what is free less a reserve of an eighth, at least 256 MiB, for everything else. Where that
    leaves less than 64 MiB, these, or half of what is free."""
    free = free_memory_bytes()
    return max(free - max(free // 8, 256 * MIB), min(64 * MIB, free // 2))


def measuring_bytes(budget_bytes: int) -> int:
    """For a kernel that is measured beside a budget, for a step that does not fit it: four times as much, at least a GiB, where
    that is free. What takes more is foreseen by a formula: who is refused by so much need not wait for it, nor have it taken."""
    return min(default_memory_bytes(), max(4 * budget_bytes, GIB))


def default_disk_folder() -> str:
    """`$PROTRAIN_DISK`, else the temporary directory, "~" in it the home folder. The store's file has no name there, so nothing
    else is needed."""
    return os.path.expanduser(os.environ.get("PROTRAIN_DISK") or os.environ.get("TMPDIR") or "/tmp")


def stash_least_bytes(element_bytes: int) -> int:
    """The smallest block of memory that the stash takes, of a model whose parameters have such elements: what is stashed in fp32
    is stashed in bf16."""
    return STASH_LEAST_ELEMENTS * element_bytes
