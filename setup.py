"""Builds the one extension module, protrain._core, from csrc.

Metadata is in pyproject.toml; this file holds what cannot be said there: which files are compiled with which flags. The build
drives the compilers itself, a few files at a time, and knows from the compiler's own dependency files what a changed header
touches, so that a second build takes a moment. What is missing on a machine is said in one line, without a traceback.

    python setup.py preflight [VENV]      says what a build lacks on this machine (needs no package installed)
    python setup.py build_ext --inplace   builds protrain/_core.abi3.so

Environment: CC and CXX choose the compilers, CFLAGS, CXXFLAGS and LDFLAGS are added last, PROTRAIN_WERROR=1 turns warnings
into errors.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

TORCH_OLDEST = (2, 11)
ROOT = Path(__file__).resolve().parent
WARNINGS = ["-Wall", "-Wextra", "-Wconversion"]
COMMON = ["-O3", "-g1", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-Icsrc"]
LINK = ["-shared", "-pthread", "-Wl,--as-needed", "-Wl,-z,relro,-z,now"]


def refuse(line: str) -> NoReturn:
    """End the build with one line on stderr."""
    sys.stdout.flush()
    print(f"protrain: {line}", file=sys.stderr, flush=True)
    os._exit(1)  # neither distutils nor a build front end inside this process shall print a traceback over the line


# ---- what a build needs of the machine ----


def compiler(variable: str, name: str, package: str) -> list[str]:
    """The command of a compiler, from the environment or by its usual name, found on PATH."""
    command = shlex.split(os.environ.get(variable, "")) or [name]
    if shutil.which(command[0]) is None:
        given = f" (from {variable})" if variable in os.environ else ""
        refuse(f"the compiler {command[0]}{given} is missing: install {package}, or set {variable} to a compiler")
    return command


def python_headers() -> str:
    """The folder of Python.h."""
    folder = sysconfig.get_paths()["include"]
    if not Path(folder, "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        refuse(f"Python.h is missing in {folder}: install Python's headers (Debian, Ubuntu: python{version}-dev)")
    return folder


def torch_folder() -> tuple[Path, str]:
    """The folder of the installed torch and its version; torch is not imported, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        refuse(
            "torch is missing here: pip install torch==2.13.0, then build with pip's --no-build-isolation (make demo does both)"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = re.search(r"__version__ = ['\"]([^'\"]+)", (folder / "version.py").read_text())
    version = found.group(1) if found else "0"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < TORCH_OLDEST:
        refuse(f"torch {version} is too old: pip install 'torch>={TORCH_OLDEST[0]}.{TORCH_OLDEST[1]}'")
    return folder, version


def preflight(venv: str | None) -> None:
    """Refuse what cannot work before anything is downloaded: the system, the compilers, Python's headers and its venv module."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not sys.platform.startswith("linux"):
        refuse(f"this system is {sys.platform}: protrain runs on Linux")
    compiler("CC", "gcc", "gcc")
    compiler("CXX", "g++", "g++")
    python_headers()
    if venv is None:
        return
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        refuse(f"{sys.executable} has no venv module: install it (Debian, Ubuntu: python{version}-venv), or make PYTHON=another")
    config = Path(venv, "pyvenv.cfg")
    found = re.search(r"^version\s*=\s*(\d+\.\d+)", config.read_text(), re.MULTILINE) if config.is_file() else None
    if found and found.group(1) != version:
        refuse(f"{venv} holds Python {found.group(1)} and PYTHON is {version}: remove {venv}, or make VENV=another folder")


if __name__ == "__main__" and sys.argv[1:2] == ["preflight"]:
    preflight(sys.argv[2] if len(sys.argv) > 2 else None)
    sys.exit(0)

try:  # not above: preflight runs where setuptools may be missing
    from setuptools import Extension, setup
    from setuptools.command.build_ext import build_ext
except ImportError:
    refuse(f"setuptools is missing for {sys.executable}: pip install 'setuptools>=77'")

# ---- the build ----


def sources() -> list[str]:
    """The files of the extension, relative to the root: every C file, and the C++ files of csrc/torch."""
    return sorted(str(path.relative_to(ROOT)) for pattern in ("**/*.c", "torch/*.cpp") for path in (ROOT / "csrc").glob(pattern))


def dependencies(rule: Path) -> list[Path]:
    """The files that a compiler's dependency file names."""
    text = rule.read_text().replace("\\\n", " ")
    return [Path(name.replace("\\ ", " ")) for name in re.split(r"(?<!\\)\s+", text.partition(": ")[2].strip())]


class BuildCore(build_ext):
    """Compiles and links as the head of this file says."""

    def finalize_options(self) -> None:
        """Objects in one folder whoever builds (in place, editable, wheel): what is made once is used by all."""
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / "objects")

    def build_extension(self, ext: Extension) -> None:
        """Compile what is out of date, link if anything was."""
        os.chdir(ROOT)
        c, cxx, headers = compiler("CC", "gcc", "gcc"), compiler("CXX", "g++", "g++"), python_headers()
        torch, version = torch_folder()
        # c10 is the C++ part of torch that allocates; its allocator class may differ between minor versions of torch.
        common = [*COMMON, *WARNINGS, f'-DPTN_TORCH_VERSION="{version}"', "-isystem", headers]
        if os.environ.get("PROTRAIN_WERROR") == "1":
            common.append("-Werror")
        c += ["-std=c11", "-DPy_LIMITED_API=0x030B0000", *common, *shlex.split(os.environ.get("CFLAGS", ""))]
        cxx += ["-std=c++20", *common, "-isystem", str(torch / "include"), *shlex.split(os.environ.get("CXXFLAGS", ""))]
        files = [str(name) for name in ext.sources]
        if not files:
            refuse(f"no source files under {ROOT / 'csrc'}: the checkout or the archive is not whole")
        objects = [Path(self.build_temp, f"{name}.o") for name in files]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = [
                pool.submit(self.compile, [*(cxx if name.endswith(".cpp") else c), "-c", name], Path(name), out)
                for name, out in zip(files, objects, strict=True)
            ]
            done = [job.result() for job in jobs]
        failed = [name for name, fine in zip(files, done, strict=True) if not fine]
        if failed:
            refuse(f"{len(failed)} of {len(files)} files did not compile: {', '.join(failed)}")
        libraries = [f"-L{torch / 'lib'}", *("-lc10", "-ltorch_cpu", "-ltorch_python", "-ldl", "-lm")]
        linker = [compiler("CXX", "g++", "g++")[0], *LINK, *map(str, objects), *libraries]
        self.link([*linker, *shlex.split(os.environ.get("LDFLAGS", ""))], Path(self.get_ext_fullpath(ext.name)), objects)

    def compile(self, command: list[str], source: Path, out: Path) -> bool:
        """Whether out is there and right. The compiler's words go to stderr as they are."""
        rule, stamp = out.with_suffix(".d"), out.with_suffix(".command")
        key = hashlib.sha256(shlex.join(command).encode()).hexdigest()
        if not self.force and out.is_file() and rule.is_file() and stamp.is_file() and stamp.read_text() == key:
            made = out.stat().st_mtime_ns
            if all(path.is_file() and path.stat().st_mtime_ns < made for path in dependencies(rule)):
                return True
        out.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        result = run([*command, "-MMD", "-MF", str(rule), "-o", str(out)])
        if result.stderr:
            print(result.stderr, end="", file=sys.stderr, flush=True)
        if result.returncode == 0:
            stamp.write_text(key)
            print(f"compiled {source}", flush=True)
        return result.returncode == 0

    def link(self, command: list[str], target: Path, objects: list[Path]) -> None:
        """Link into target unless it is newer than every object and made by the same command."""
        stamp = Path(self.build_temp, f"{target.name}.{hashlib.sha256(str(target.resolve()).encode()).hexdigest()[:12]}.command")
        key = hashlib.sha256(shlex.join(command).encode()).hexdigest()
        if target.is_file() and stamp.is_file() and stamp.read_text() == key:
            made = target.stat().st_mtime_ns
            if all(path.stat().st_mtime_ns < made for path in objects):
                return
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(".new")  # replaced in one go: a running process keeps the file that it has mapped
        result = run([*command, "-o", str(fresh)])
        if result.returncode != 0:
            print(result.stderr, end="", file=sys.stderr, flush=True)
            refuse(f"linking {target.name} failed: the linker's words are above")
        os.replace(fresh, target)
        stamp.write_text(key)
        print(f"linked {target.name}", flush=True)

    def get_source_files(self) -> list[str]:
        """For the sdist: the sources; the headers come by MANIFEST.in."""
        return sources()


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler in the C locale, its output taken as text."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except OSError as error:
        refuse(f"{command[0]} cannot be run: {error.strerror}")


if {"bdist_wheel", "build_ext", "editable_wheel"} & set(sys.argv):
    # Before setuptools prints a page about what it copies.
    compiler("CC", "gcc", "gcc"), compiler("CXX", "g++", "g++"), python_headers(), torch_folder()

core: Any = Extension("protrain._core", sources=sources(), py_limited_api=True)
setup(ext_modules=[core], cmdclass={"build_ext": BuildCore}, options={"bdist_wheel": {"py_limited_api": "cp311"}})
