"""The programs of test_reliability.py for as long as a night has: what `make soak` runs.

    PROTRAIN_FUZZ_SECONDS=3600 python tests/soak.py

One after the other, their last lines told; ends with the number of those that did not hold.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILER = shlex.split(os.environ.get("CC", "gcc"))

PROGRAMS = [
    ["tests/faults.py", "--share", "1", "--begins", "300"],
    ["tests/crashes.py", "--runs", "200"],
    ["tests/leaks.py", "--rounds", "50", "--steps", "1000"],
    ["benchmarks/soak.py", "--steps", "1000"],
    ["tests/exits.py"],
    ["tests/interrupts.py", "--share", "1"],
    *(["tests/fuzz.py", kind] for kind in ("plan", "profile", "hardware", "safetensors", "checkpoint", "modules")),
]


def main() -> int:
    chosen = sys.argv[1:]  # parts of names
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        library = Path(work) / "fake_disk.so"
        flags = ["-std=c11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
        subprocess.run([*COMPILER, *flags, str(HERE / "c" / "fake_disk.c"), "-o", str(library)], check=True)
        for words in PROGRAMS:
            if chosen and not any(part in " ".join(words) for part in chosen):
                continue
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
            if words[0].endswith("faults.py"):
                environment["LD_PRELOAD"] = str(library)
            print("$ python", *words, flush=True)
            failed += subprocess.run([sys.executable, *words], env=environment, cwd=HERE.parent, check=False).returncode != 0
    print(f"soak: {failed} did not hold")
    return failed


if __name__ == "__main__":
    sys.exit(main())
