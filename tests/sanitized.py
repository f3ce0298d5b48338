"""The binding under AddressSanitizer and UndefinedBehaviorSanitizer: the extension module is built with them, and its tests run.

    python tests/sanitized.py                                          builds, and runs all
    PROTRAIN_FUZZ_SECONDS=60 python tests/sanitized.py plan errors     those whose words hold one of these, for so long each

The package lies in build/sanitized with objects of its own, so that the ordinary build stays as it is. Leaks are not looked for:
Python's and torch's own would drown those of the binding. What Python allocates comes from malloc, so that its use after it was
freed is seen. Ends with the number of those that did not hold.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILT = ROOT / "build" / "sanitized"
FUZZ_SECONDS = os.environ.get("PROTRAIN_FUZZ_SECONDS", "5")
#: Added to the flags of the ordinary build; what either sanitizer finds ends the process.
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"

#: Each a script and its words, or tests for pytest.
PROGRAMS = [
    *(
        ["fuzz.py", kind, "--seconds", FUZZ_SECONDS]
        for kind in ("plan", "profile", "hardware", "safetensors", "checkpoint", "modules")
    ),
    ["pytest", "test_errors.py", "test_references.py", "test_allocator.py", "test_threads.py"],
]

#: Runs a program of the tests, or pytest, once it is sure whose extension module it uses.
RUN = """
import runpy, sys
import torch, protrain._core
assert protrain._core.__file__.startswith(sys.argv[1]), protrain._core.__file__
del sys.argv[:2]
if sys.argv[0] == "pytest":
    import pytest
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def runtime(compiler: str, name: str) -> str:
    """The path of a library of the compiler, to be loaded before everything else."""
    words = [*shlex.split(os.environ.get(compiler, "gcc" if compiler == "CC" else "g++")), f"-print-file-name={name}"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        sys.exit(f"sanitized: {shlex.join(words)} finds no {name}: install the compiler's sanitizers, or set {compiler} to GCC")
    return found


def build() -> None:
    """The package as it is now, and its extension module with the sanitizers, in BUILT; what is up to date stays."""
    target = BUILT / "protrain"
    for path in target.rglob("*.py"):
        path.unlink()
    shutil.copytree(ROOT / "protrain", target, ignore=shutil.ignore_patterns("*.so", "__pycache__"), dirs_exist_ok=True)
    for name in ("setup.py", "pyproject.toml", "README.md", *(path.name for path in ROOT.glob("requirements*.txt"))):
        shutil.copy(ROOT / name, BUILT)
    if not (BUILT / "csrc").is_symlink():
        (BUILT / "csrc").symlink_to(ROOT / "csrc", target_is_directory=True)
    flags = {name: f"{os.environ.get(name, '')} {FLAGS}" for name in ("CFLAGS", "CXXFLAGS")} | {
        "LDFLAGS": f"{os.environ.get('LDFLAGS', '')} -fsanitize=address,undefined"
    }
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=BUILT, env={**os.environ, **flags}, check=True
    )


def environment() -> dict[str, str]:
    """What a process needs to load an extension module that was built with the sanitizers."""
    libraries = [runtime("CC", "libasan.so"), runtime("CC", "libubsan.so"), runtime("CXX", "libstdc++.so")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONPATH": os.pathsep.join([str(BUILT), str(HERE)]),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:strict_string_checks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def main() -> int:
    chosen = sys.argv[1:]
    build()
    failed = 0
    for words in PROGRAMS:
        if chosen and not any(part in " ".join(words) for part in chosen):
            continue
        print("$", *words, flush=True)
        arguments = [str(HERE / word) if word.endswith(".py") else word for word in words]
        command = [sys.executable, "-c", RUN, str(BUILT), *arguments]
        failed += subprocess.run(command, env=environment(), cwd=BUILT, check=False).returncode != 0
    print(f"sanitized: {failed} of the programs did not hold")
    return failed


if __name__ == "__main__":
    sys.exit(main())
