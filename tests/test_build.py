"""The build: folders in their order, what the extension shows, what the archives hold, one line for what is missing."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["base", "device", "disk", "memory", "profile", "plan", "optim", "runtime", "torch", "python"]
PACKAGE = ["base", "device", "model", "dryrun", "optim", "planner", "profiling", "runtime", "state"]
MODULES = sorted(path for folder in PACKAGE for path in (ROOT / "protrain" / folder).glob("*.py"))
FILES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".c", ".h", ".cpp", ".cu"})
CHECKOUT = ("csrc", "docs", "protrain", "tests", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "Makefile")
CHECKOUT += ("requirements.txt", "requirements-bench.txt", "requirements-report.txt")
CHECKOUT += ("requirements-trainer.txt", "requirements-dev.txt")


def build(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py of a folder."""
    command = [sys.executable, "setup.py", "-q", *words]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def only_line(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failed build says."""
    assert result.returncode == 1, result.stdout + result.stderr
    lines = (result.stdout + result.stderr).splitlines()
    assert len(lines) == 1, "\n".join(lines)
    assert lines[0].startswith("protrain: ")
    return lines[0]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository with nothing built in it."""
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__", "*.new")
    for name in CHECKOUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=unbuilt)
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def keep_two_files(checkout: Path) -> None:
    """Leave so little of the core that it builds at once; what is linked then is no module."""
    for path in (checkout / "csrc").rglob("*"):
        if path.suffix in {".c", ".cpp"} and path.name not in {"status.c", "threads.c"}:
            path.unlink()


# ---- the order of the folders ----


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(ROOT / "csrc").as_posix() for path in FILES])
def test_includes_come_from_earlier_folders(path: Path) -> None:
    """A file includes from its own folder and those before it, by names that begin with the folder."""
    folder = path.relative_to(ROOT / "csrc").parts[0]
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
        assert name.split("/")[0] in FOLDERS[: FOLDERS.index(folder) + 1], f"{path.name} includes {name}"


def imported(node: ast.AST) -> Iterator[str]:
    """The modules of the package that a file imports, as they are named from `protrain` on; not what types alone need."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.level == 2:
            yield from [child.module] if child.module else [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom | ast.Import):
            names = [child.module or ""] if isinstance(child, ast.ImportFrom) else [alias.name for alias in child.names]
            yield from (name.removeprefix("protrain.") for name in names if name.startswith("protrain."))
        yield from imported(child)


@pytest.mark.parametrize("path", MODULES, ids=[path.relative_to(ROOT / "protrain").as_posix() for path in MODULES])
def test_modules_import_from_earlier_folders(path: Path) -> None:
    """Of the package, a file imports from its own folder, those before it, the core and the errors."""
    allowed = {*PACKAGE[: PACKAGE.index(path.parent.name)], "errors", "_core"}
    for name in imported(ast.parse(path.read_text())):
        assert name.split(".")[0] in allowed, f"{path.name} imports protrain.{name}"


def test_every_folder_of_the_package_has_its_place() -> None:
    """None is left out of the order above; what the user calls, other libraries and the command line come after all of them."""
    folders = {path.parent.name for path in (ROOT / "protrain").glob("*/__init__.py")}
    assert folders == {*PACKAGE, "integrations", "cli"}


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(ROOT / "csrc").as_posix() for path in FILES])
def test_only_the_last_folders_know_torch_and_python(path: Path) -> None:
    """The engine runs without either: no header of theirs is included outside csrc/torch and csrc/python."""
    if path.relative_to(ROOT / "csrc").parts[0] in {"torch", "python"}:
        return
    known = re.findall(r'^\s*#\s*include\s*[<"](?:Python\.h|torch/|ATen/|c10/)', path.read_text(), re.MULTILINE)
    assert not known


def test_one_cpp_file() -> None:
    """C++ is where torch has no other door, in one file."""
    assert [path.relative_to(ROOT).as_posix() for path in FILES if path.suffix == ".cpp"] == ["csrc/torch/c10.cpp"]


# ---- what is built ----


def test_extension_shows_one_name() -> None:
    """Nothing but the module's entry point can be called or replaced from outside, and no path to torch is burnt in."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    library = ROOT / "protrain" / "_core.abi3.so"
    table = subprocess.run(["readelf", "--wide", "--dyn-syms", str(library)], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in table.splitlines() if line.strip()[:1].isdigit()]
    shown = {row[7] for row in rows if row[3] == "FUNC" and row[4] == "GLOBAL" and row[6] != "UND"}
    assert shown == {"PyInit__core", "ptn_cuda_malloc", "ptn_cuda_free"}  # the latter two torch looks up
    dynamic = subprocess.run(["readelf", "--wide", "--dynamic", str(library)], capture_output=True, text=True, check=True).stdout
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_archives_hold_what_they_should(checkout: Path) -> None:
    """The source archive builds by itself; the wheel it gives fits every Python from 3.11 and holds no sources."""
    made = build(checkout, "sdist")
    assert made.returncode == 0, made.stderr
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    unpacked = checkout / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "xzf", str(archive), "-C", str(unpacked)], check=True)
    (folder,) = unpacked.iterdir()
    for path in [
        *FILES,
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "tests").rglob("*.[ch]"),
        *(ROOT / "protrain").rglob("*.json"),
    ]:
        assert (folder / path.relative_to(ROOT)).is_file(), f"{path.relative_to(ROOT)} is not in the source archive"
    made = build(folder, "bdist_wheel", CFLAGS="-O0", CXXFLAGS="-O0")  # what is in it matters here, not how fast it is
    assert made.returncode == 0, made.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    assert re.fullmatch(r"protrain-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "protrain").rglob("*") if path.suffix in {".py", ".pyi", ".json"}
    }
    assert package | {"protrain/_core.abi3.so", "protrain/py.typed"} <= names
    assert not [name for name in names if name.endswith((".c", ".h", ".cpp")) or name.startswith(("csrc", "tests"))]


def test_what_a_killed_link_leaves_is_not_committed() -> None:
    """setup.py links beside the extension, under its name with another end."""
    assert 'target.with_suffix(".new")' in (ROOT / "setup.py").read_text()
    left = Path("_core.abi3.so").with_suffix(".new").name
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert any(fnmatch.fnmatch(left, pattern) for pattern in ignored)


def test_second_build_compiles_what_changed(checkout: Path) -> None:
    """Nothing where nothing changed; after a changed file, that file alone."""
    keep_two_files(checkout)
    first = build(checkout, "build_ext", "--inplace", CFLAGS="-O0")
    lines = first.stdout.splitlines()
    assert sorted(lines[:-1]) == ["compiled csrc/base/status.c", "compiled csrc/base/threads.c"]  # at a time, done in any order
    assert lines[-1] == "linked _core.abi3.so"
    assert build(checkout, "build_ext", "--inplace", CFLAGS="-O0").stdout == ""
    changed_file = checkout / "csrc" / "base" / "threads.c"
    changed_file.write_text(changed_file.read_text() + "/* changed */\n")
    changed = build(checkout, "build_ext", "--inplace", CFLAGS="-O0")
    assert changed.stdout.splitlines() == ["compiled csrc/base/threads.c", "linked _core.abi3.so"]


# ---- what is missing ----


def test_missing_compiler_is_one_line(checkout: Path) -> None:
    """It names the compiler, where the name came from, and what to install."""
    line = only_line(build(checkout, "build_ext", "--inplace", CC="no-such-gcc"))
    assert "no-such-gcc (from CC)" in line
    assert "install gcc" in line


def test_missing_torch_is_one_line(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An environment with setuptools and without torch, as pip's isolated builds are."""
    import setuptools

    folder = tmp_path_factory.mktemp("packages")
    installed = Path(setuptools.__file__).parent.parent
    for name in ("setuptools", "_distutils_hack"):
        (folder / name).symlink_to(installed / name)
    command = [sys.executable, "-S", "setup.py", "-q", "bdist_wheel"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    line = only_line(subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False))
    assert "torch is missing" in line
    assert "pip install torch" in line


def test_missing_headers_are_one_line(checkout: Path) -> None:
    """Python.h is asked of the interpreter that builds."""
    script = checkout / "setup.py"
    moved = script.read_text().replace('sysconfig.get_paths()["include"]', '"/nowhere/include"')
    assert moved != script.read_text()
    script.write_text(moved)
    line = only_line(build(checkout, "build_ext", "--inplace"))
    assert "Python.h is missing in /nowhere/include" in line


def test_wrong_source_ends_in_one_line_after_the_compilers(checkout: Path) -> None:
    """The compiler's words stay whole; the last line names the file."""
    keep_two_files(checkout)
    source = checkout / "csrc" / "base" / "status.c"
    source.write_text(source.read_text() + "int broken = nothing_of_this_name;\n")
    result = build(checkout, "build_ext", "--inplace", CFLAGS="-O0")
    assert result.returncode == 1
    assert "nothing_of_this_name" in result.stderr
    assert result.stderr.splitlines()[-1].endswith("did not compile: csrc/base/status.c")
    assert "Traceback" not in result.stderr


def test_preflight_refuses_another_version_of_python(tmp_path: Path) -> None:
    """An environment made from one Python is not taken for another's."""
    (tmp_path / "pyvenv.cfg").write_text("home = /usr\nversion = 3.9.2\n")
    command = [sys.executable, "setup.py", "preflight", str(tmp_path)]
    line = only_line(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False))
    assert "holds Python 3.9" in line
