"""The C core: each program of tests/c under the sanitizers, and every C file under the strictest warnings.

A program names the files it needs beside csrc/base in a line `/* sources: csrc/disk/*.c csrc/plan/rule.c */`, and says with a
line `/* threads */` that it should also run under ThreadSanitizer, with a line `/* plain */` that it should also run without a
sanitizer, where it does more, and with a line `/* one core */` that it should also run, under ThreadSanitizer, where it may use
one core, as a process whose threads take all there are: the driving thread makes the lane's updates then. One that opens a
library at run time (a driver that is none) names what that is made of in a line `/* library: tests/c/fake_cuda.c */`, and is
linked with it too. Objects are kept in build/ctests under a key of everything that
went into them, so that a second run compiles what has changed; every program runs every time. All cores compile and run what the
chosen tests need, and each test waits for its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest
from ahead import Ahead

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "ctests"
KEPT_SECONDS = 7 * 24 * 3600
# A program that takes this long hangs: on a busy machine too the longest take a minute or two. Those of fuzz.h take what they
# are given.
RUN_SECONDS = 600 + 2 * float(os.environ.get("PROTRAIN_FUZZ_SECONDS", "1"))
COMPILER = shlex.split(os.environ.get("CC", "gcc"))
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
SANITIZERS = {
    "address": ["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=thread"],
    "one core": ["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=thread"],
    "plain": ["-g", "-O2"],
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
PROGRAMS = sorted((ROOT / "tests" / "c").glob("test_*.c"))
LIBRARIES = sorted((ROOT / "tests" / "c").glob("fake_*.c"))
TOOLS = sorted(set((ROOT / "tests" / "c").glob("*.c")) - set(PROGRAMS) - set(LIBRARIES))
C_FILES = sorted((ROOT / "csrc").rglob("*.c"))


def sanitizers(program: Path) -> list[str]:
    """What the program runs under: AddressSanitizer, and what its lines ask for."""
    lines = program.read_text().splitlines()
    asked = {"thread": "/* threads */", "one core": "/* one core */", "plain": "/* plain */"}
    return ["address", *(name for name, line in asked.items() if line in lines)]


def named(program: Path, line: str, always: tuple[str, ...] = ()) -> list[Path]:
    """The files that a line of the program names, such as its `/* sources: ... */`, after those that every program has."""
    found = re.search(rf"^/\* {line}: (.*?) ?\*/$", program.read_text(), re.MULTILINE | re.DOTALL)
    patterns = [*always, *(found.group(1).replace("\n", " ").split() if found else [])]
    files: list[Path] = []
    for pattern in (word for word in patterns if word != "*"):  # a comment that goes on in the next line may start it with *
        matches = sorted(ROOT.glob(pattern))
        assert matches, f"{program.name} names {pattern} in its {line} line, and there is no such file"
        files += [path for path in matches if path not in files]
    return files


@functools.cache
def headers_key() -> bytes:
    """A key of the compiler and of every header: one that changes makes everything anew, which takes seconds."""
    key = hashlib.sha256(subprocess.run([*COMPILER, "--version"], capture_output=True, check=True).stdout)
    for header in sorted([*(ROOT / "csrc").rglob("*.h"), *(ROOT / "tests" / "c").glob("*.h")]):
        key.update(header.relative_to(ROOT).as_posix().encode() + b"\0" + header.read_bytes())
    return key.digest()


def compiled(source: Path, flags: list[str]) -> Path:
    """The object file of source, made if it is not there; the compiler's words are the failure."""
    key = hashlib.sha256(headers_key() + shlex.join(flags).encode() + b"\0" + source.read_bytes()).hexdigest()[:16]
    out = KEPT / f"{source.stem}-{key}.o"
    if out.is_file():
        out.touch()
        return out
    run_compiler([*flags, "-c", str(source.relative_to(ROOT))], out)
    return out


def run_compiler(arguments: list[str], out: Path) -> None:
    """Make out in one go, so that two runs at a time do not meet."""
    KEPT.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f"{out.name}.{os.getpid()}.{time.monotonic_ns()}")
    result = subprocess.run([*COMPILER, *arguments, "-o", str(fresh)], capture_output=True, text=True, cwd=ROOT, check=False)
    if result.returncode != 0:
        pytest.fail(result.stderr, pytrace=False)
    fresh.replace(out)


def shared(parts: list[Path], sanitizer: str) -> Path:
    """The library that is made of these objects."""
    library = KEPT / f"lib{parts[0].stem}-{hashlib.sha256(' '.join(map(str, parts)).encode()).hexdigest()[:16]}-{sanitizer}.so"
    if not library.is_file():
        run_compiler([*SANITIZERS[sanitizer], "-shared", "-pthread", *map(str, parts)], library)
    library.touch()
    return library


def built(program: Path, sanitizer: str, objects: list[Path], parts: list[Path]) -> Path:
    """The executable of a test program under a sanitizer, with the library of its parts, if it has any."""
    objects = [*objects, shared(parts, sanitizer)] if parts else objects
    key = hashlib.sha256(" ".join(map(str, objects)).encode()).hexdigest()[:16]
    out = KEPT / f"{program.stem}-{key}-{sanitizer.replace(' ', '-')}"
    if not out.is_file():
        run_compiler([*SANITIZERS[sanitizer], "-pthread", "-rdynamic", *map(str, objects), "-lm", "-ldl"], out)
    out.touch()
    return out


@functools.cache
def fixed_addresses() -> tuple[str, ...]:
    """The words that run a program without random addresses, which ThreadSanitizer cannot bear where they are very random."""
    if shutil.which("setarch") is None:
        return ()
    allowed = subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False).returncode == 0
    return ("setarch", "-R") if allowed else ()


@pytest.fixture(scope="session", autouse=True)
def pruned() -> None:
    """Forget what has not been used for a week."""
    for path in KEPT.glob("*"):
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            path.unlink(missing_ok=True)


CASES = [(program, name) for program in PROGRAMS for name in sanitizers(program)]


def flags_of(kind: str) -> list[str]:
    """What the compiler is told, for a sanitizer or none, for a library under it, or for "release"."""
    sanitizer, library = kind.removesuffix(" library"), kind.endswith(" library")
    if sanitizer in SANITIZERS:
        return [*STRICT, *SANITIZERS[sanitizer], "-Icsrc", "-Itests/c", *(["-fPIC"] if library else [])]
    python = ["-DPy_LIMITED_API=0x030B0000", "-isystem", sysconfig.get_paths()["include"]]
    return [*STRICT, "-O2", "-fPIC", "-Icsrc", *python, '-DPTN_TORCH_VERSION="0"']


class Work:
    """What the tests that were chosen wait for, under way on all cores: every object once, then what is made of objects.

    Nothing that is compiled or run here looks at a clock, but to end what hangs.
    """

    def __init__(self, ahead: Ahead, disk: Path) -> None:
        self.ahead, self.disk = ahead, disk

    def compile(self, source: Path, kind: str) -> Future[Path]:
        """The object of a source; kind as for `flags_of`."""
        return self.ahead.begin((source, kind), compiled, source, flags_of(kind))

    def build(self, program: Path, sanitizer: str, run: bool) -> Future[str]:
        """The executable of a program, and what it said where it is run. It can wait for its objects, begun before it."""
        sources = [program, *named(program, "sources", ("csrc/base/*.c",))]
        objects = [self.compile(source, sanitizer) for source in sources]
        parts = [self.compile(source, f"{sanitizer} library") for source in named(program, "library")]
        return self.ahead.begin((program, sanitizer, run), self._made, program, sanitizer, objects, parts, run)

    def _made(self, program: Path, sanitizer: str, objects: list[Future[Path]], parts: list[Future[Path]], run: bool) -> str:
        executable = built(program, sanitizer, [found.result() for found in objects], [found.result() for found in parts])
        return run_program(program, sanitizer, executable, self.disk) if run else ""


@pytest.fixture(scope="module")
def work(request: pytest.FixtureRequest, ahead: Ahead, disk: Path) -> Work:
    """All of it has begun."""
    made = Work(ahead, disk)
    chosen = [item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module]
    for params in [item.callspec.params for item in chosen if hasattr(item, "callspec")]:
        with suppress(AssertionError):  # which is that of the program's own test
            if "source" in params:
                made.compile(params["source"], "release")
            elif "tool" in params:
                made.build(params["tool"], "address", run=False)
            else:
                made.build(params["program"], params["sanitizer"], run=True)
    return made


def run_program(program: Path, sanitizer: str, executable: Path, disk: Path) -> str:
    """It runs to its end and returns 0, in an empty folder on a disk, and leaves that empty. Returns its stdout."""
    folder = Path(tempfile.mkdtemp(dir=disk))
    alone = ("taskset", "-c", str(min(os.sched_getaffinity(0)))) if sanitizer == "one core" else ()
    command = [*alone, *(fixed_addresses() if sanitizer in ("thread", "one core") else ()), str(executable)]
    environment = {**os.environ, **ENVIRONMENT, "TMPDIR": str(folder), "PROTRAIN_DISK": str(folder)}
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=folder,
            env=environment,
            timeout=RUN_SECONDS,
            check=False,
        )
        left = [path.name for path in folder.iterdir()]
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")[-2000:]
        pytest.fail(f"{program.name} did not end in {RUN_SECONDS} s\n{said}", pytrace=False)
    finally:
        shutil.rmtree(folder)
    if result.returncode != 0:
        pytest.fail(
            f"{program.name} ended with {result.returncode}\n{result.stdout[-1000:]}{result.stderr[-6000:]}", pytrace=False
        )
    assert not left, f"{program.name} left files behind"
    return result.stdout


@pytest.mark.parametrize(("program", "sanitizer"), CASES, ids=[f"{program.stem[5:]}-{kind}" for program, kind in CASES])
def test_program(program: Path, sanitizer: str, work: Work) -> None:
    print(work.build(program, sanitizer, run=True).result())  # of random inputs, how many there were: pytest -rP shows it


@pytest.mark.parametrize("tool", TOOLS, ids=[tool.stem for tool in TOOLS])
def test_tool_builds(tool: Path, work: Work) -> None:
    """A program that measures rather than checks still builds."""
    work.build(tool, "address", run=False).result()


@pytest.mark.parametrize("source", C_FILES, ids=[path.relative_to(ROOT / "csrc").as_posix() for path in C_FILES])
def test_no_warnings(source: Path, work: Work) -> None:
    """It compiles as the release build does, every warning an error."""
    work.compile(source, "release").result()
