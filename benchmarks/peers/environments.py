"""A peer's environment, made at its first use: a venv without pip below build/peers, which sees this interpreter's packages.

torch and transformers are thus the same files for everybody, and only what requirements.txt locks is installed, with
`pip --no-deps`. A peer without that file needs no more than torch and runs under this interpreter.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import iglob
from pathlib import Path

INSTALL_SECONDS = 1500


class InstallError(Exception):
    """An environment cannot be made; one line says why."""


@dataclass(frozen=True)
class Environment:
    """The interpreter, and how long it took to make when it was made; 0.0 where there was nothing to make."""

    python: Path
    install_seconds: float


@contextmanager
def alone(build: Path) -> Iterator[None]:
    """Who is in here is the only one that makes environments in `build` and compiles in them: extensions that two compile at once
    are compiled again whenever they are loaded. Raises InstallError where another one is."""
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "in-use", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InstallError(f"another comparison uses {build}: wait for its end, or end it") from None
        yield


def drop_dead_extensions(extensions: Path) -> None:
    """Remove what was being compiled when who compiled it was killed: torch would wait for its lock for ever, and what is half
    made may be compiled again whenever it is loaded. Who compiles now has the lock open."""
    for lock in extensions.glob("*/lock"):
        if not _is_open(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)


def _is_open(path: Path) -> bool:
    """By a process that this one may look at."""
    for link in iglob("/proc/[0-9]*/fd/*"):  # which overlooks processes that end meanwhile
        with suppress(OSError):
            if os.readlink(link) == str(path.resolve()):
                return True
    return False


def environment(peer: Path, build: Path) -> Environment:
    """Args: peer, its folder; build, where environments are kept. Raises InstallError."""
    requirements = peer / "requirements.txt"
    if not requirements.is_file():
        return Environment(Path(sys.executable), 0.0)
    folder = build / peer.name
    stamp, key = folder / "made.json", _key(requirements)
    if stamp.is_file() and (made := json.loads(stamp.read_text()))["key"] == key:
        drop_dead_extensions(folder / "extensions")
        return Environment(folder / "bin" / "python", made["seconds"])
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.monotonic()
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    own = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(paths["purelib"]) / "parent.pth").write_text("".join(f"{path}\n" for path in sorted(own)))
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    _run([*pip, "--no-deps", "--no-build-isolation", "-r", str(requirements)], folder)
    seconds = time.monotonic() - begin
    stamp.write_text(json.dumps({"key": key, "seconds": seconds}))
    return Environment(python, seconds)


def _key(requirements: Path) -> str:
    from importlib.metadata import version

    parts = (requirements.read_text(), sys.version, sys.executable, version("torch"), version("transformers"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _run(command: list[str], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InstallError(f"does not install: not done after {INSTALL_SECONDS} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        named = [line for line in lines if "rror" in line] or lines or [f"exit code {done.returncode}"]
        raise InstallError(f"does not install: {named[-1]}"[:400])
