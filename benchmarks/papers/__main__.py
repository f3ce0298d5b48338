"""Every experiment, one after another, each in a process of its own: python -m benchmarks.papers --out benchmarks/results"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAPERS = ("protrain", "ssdtrain", "patrickstar")


def names() -> list[str]:
    """PAPER.SCRIPT of each."""
    return [f"{paper}.{file.stem}" for paper in PAPERS for file in sorted((FOLDER / paper).glob("[a-z]*.py"))]


def main(words: list[str]) -> int:
    """Words: what every script takes, such as --out, --device and --tiny. One that fails is named, and the others go on."""
    failed = []
    for name in names():
        begin = time.monotonic()
        code = subprocess.call([sys.executable, "-m", f"benchmarks.papers.{name}", *words], cwd=FOLDER.parents[1])
        failed += [name] if code else []
        print(f"{name}: {'failed' if code else 'done'} after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
