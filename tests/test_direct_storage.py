"""GPUDirect Storage is looked for, told of and not used: what is found of its library and of the kernel's part."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - before the core, which links to it

from protrain import _core
from protrain.cli import doctor

HERE = Path(__file__).resolve().parent


def library(folder: Path, *defines: str) -> str:
    """One that is none, of these traits."""
    out = folder / "libcufile.so.0"
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    words = ["-std=c11", "-fPIC", "-shared", *(f"-D{define}" for define in defines), str(HERE / "c" / "fake_cufile.c")]
    subprocess.run([*compiler, *words, "-o", str(out)], check=True)
    return str(out)


def row(monkeypatch: pytest.MonkeyPatch, found: Any) -> doctor.Row:
    """What the doctor says of it."""
    with monkeypatch.context() as patch:
        patch.setattr(_core, "direct_storage", lambda: found)
        return doctor._direct_storage()


def test_the_library_and_the_kernels_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, module = library(tmp_path), tmp_path / "nvidia_fs"
    found = _core.direct_storage(path, str(module))
    assert found == {"library": True, "version": 1130, "module": False, "module_version": "", "reason": ""}
    said = row(monkeypatch, found)
    assert said.found == "libcufile 1.13, without the kernel's nvidia-fs"
    module.mkdir()
    found = _core.direct_storage(path, str(module))
    assert (found["module"], found["module_version"]) == (True, "")
    (module / "version").write_text("2.17.5\n")
    found = _core.direct_storage(path, str(module))
    assert found["module_version"] == "2.17.5"
    said = row(monkeypatch, found)
    assert said.found == "libcufile 1.13, nvidia-fs 2.17.5"
    assert "not used" in said.meaning
    assert said.values["used"] is False


def test_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _core.direct_storage(str(tmp_path / "libcufile.so.0"), str(tmp_path))
    assert not found["library"]
    assert str(tmp_path) in found["reason"]
    assert "\n" not in found["reason"]
    said = row(monkeypatch, found)
    assert said.found == "none"
    assert "not used" in said.meaning


@pytest.mark.parametrize(
    ("traits", "version"),
    [(["FAKE_CUFILE_OLD"], 0), (["FAKE_CUFILE_ERROR=5001"], 0), (["FAKE_CUFILE_VERSION=1070"], 1070)],
)
def test_versions(traits: list[str], version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _core.direct_storage(library(tmp_path, *traits), str(tmp_path / "nowhere"))
    assert (found["library"], found["version"]) == (True, version)
    said = row(monkeypatch, found)
    assert said.found.startswith("libcufile 1.7," if version else "libcufile,")


def test_a_library_that_lacks_something_is_none(tmp_path: Path) -> None:
    found = _core.direct_storage(library(tmp_path, "FAKE_CUFILE_NO_WRITE"), str(tmp_path / "nowhere"))
    assert not found["library"]
    assert "has no cuFileWrite" in found["reason"]


def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Looking makes no file where the process stands."""
    monkeypatch.chdir(tmp_path)
    said = doctor._direct_storage()
    assert said.what == "GPUDirect Storage"
    assert list(tmp_path.iterdir()) == []
