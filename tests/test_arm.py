"""64-bit ARM: the C core compiles for it; the update kernels, with those for NEON among them, and the checksums run in an
emulator and give the bits of the portable code. Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user-static."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_c import ROOT, STRICT, named

COMPILER = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
LIBRARIES = Path("/usr/aarch64-linux-gnu")
PROGRAMS = ("test_optim", "test_checksum")
CORE = sorted(path for path in (ROOT / "csrc").rglob("*.c") if path.parent.name not in ("python", "torch"))  # those want Python.h

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no compiler for 64-bit ARM: apt install gcc-aarch64-linux-gnu")


def compiled(words: list[str]) -> None:
    assert COMPILER is not None
    done = subprocess.run(
        [COMPILER, *STRICT, "-O2", "-Icsrc", "-Itests/c", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_core_compiles(tmp_path: Path) -> None:
    for number, source in enumerate(CORE):
        compiled(["-c", str(source), "-o", str(tmp_path / f"{number}.o")])


@pytest.mark.skipif(EMULATOR is None or not LIBRARIES.is_dir(), reason="no emulator of 64-bit ARM, or no libraries for it")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs(name: str, tmp_path: Path) -> None:
    program = ROOT / "tests" / "c" / f"{name}.c"
    sources = [program, *named(program, "sources", ("csrc/base/*.c",))]
    compiled(["-rdynamic", *map(str, sources), "-o", str(tmp_path / name), "-lm", "-ldl"])
    assert EMULATOR is not None
    done = subprocess.run(
        [EMULATOR, "-L", str(LIBRARIES), str(tmp_path / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
