"""Whether the kernel may swap a process at the budget here, and the command that makes it so: a control group by systemd-run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class NoSwapError(Exception):
    """Why not, in one line."""


def prefix(limit_bytes: int) -> list[str]:
    """The command that runs another with so much memory, and swap for the rest. Raises NoSwapError."""
    swap_bytes = swap_total()
    if swap_bytes == 0:
        raise NoSwapError("not run: this machine has no swap (SwapTotal is 0)")
    command = ["systemd-run", "--scope", "--quiet", "-p", f"MemoryMax={limit_bytes}", "-p", "MemorySwapMax=infinity"]
    if os.geteuid() != 0:
        command.insert(1, "--user")
    try:
        done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoSwapError(f"not run: no control group can be made: {error}") from None
    if done.returncode != 0:
        raise NoSwapError(f"not run: no control group can be made: {' '.join(done.stderr.split())[:200]}")
    return command


def swap_total(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of swap that this machine has."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("SwapTotal:"):
            return int(line.split()[1]) * 1024
    return 0
