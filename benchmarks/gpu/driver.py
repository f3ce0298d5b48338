"""What the GPU's driver says that a process has of its memory, context and kernels among it: by NVML, which nvidia-smi asks."""

from __future__ import annotations

import os
import subprocess

import torch

MIB = 1 << 20
SECONDS = 30.0


class NotTold(Exception):  # noqa: N818 - no error: what is not told is said and left out
    """The driver says nothing of this process here; the message says why, in one line."""


def process_bytes(number: int = 0) -> int:
    """Of this process, on torch's GPU of this number, which CUDA_VISIBLE_DEVICES may have renumbered.

    Raises:
        NotTold: nvidia-smi is not there, or does not tell.
    """
    unique = str(torch.cuda.get_device_properties(number).uuid)
    return told_bytes(unique if unique.startswith(("GPU-", "MIG-")) else f"GPU-{unique}", os.getpid())


def told_bytes(unique: str, process: int) -> int:
    """The same for any GPU, by the name that is no other's, and any process.

    Raises:
        NotTold: as above.
    """
    words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", f"--id={unique}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotTold(f"nvidia-smi cannot be asked: {error}") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise NotTold(f"nvidia-smi ended with exit code {done.returncode} and said {said[0]}")
    sizes = [
        size.strip() for line in done.stdout.splitlines() for pid, _, size in [line.partition(",")] if pid.strip() == str(process)
    ]
    if not sizes:
        raise NotTold(f"nvidia-smi lists no process {process}: in a container numbers of processes are often others")
    if not all(size.isdecimal() for size in sizes):
        raise NotTold(f"nvidia-smi says {sizes[0]} of the memory of process {process}")
    return sum(int(size) for size in sizes) * MIB
