"""What protrain leaves to others to see, load or share: a store's file without a name, files with names that nobody foresees, no
pickles, one interpreter."""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TIGHT, Chain, inputs, steps
from twins import adamw

import protrain
from protrain.state import torchfiles

ROOT = Path(__file__).resolve().parent.parent


def store_files(folder: Path) -> list[int]:
    """Descriptors of this process whose file lies, or lay, in the folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing itself
            continue
        if target.startswith(str(folder)):
            found.append(int(name))
    return found


def test_the_stores_file_is_nobodys(fresh_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name, mode 0600, closed in programs that are started; and nothing in the temporary directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk)
    steps(inputs(2))(model, optimizer, False)
    (file,) = store_files(fresh_disk)
    about = os.fstat(file)
    assert stat.S_ISREG(about.st_mode)
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert about.st_nlink == 0
    assert about.st_uid == os.geteuid()
    assert not list(fresh_disk.iterdir())
    assert not list(tmp_path.iterdir())
    assert fcntl.fcntl(file, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
    protrain.unwrap(model)
    assert not store_files(fresh_disk)


def test_files_without_a_name_cannot_be_linked_back(fresh_disk: Path) -> None:
    """O_EXCL beside O_TMPFILE: not even the process itself can give the store's file a name, which would outlive it."""
    model: Any = Chain()
    model, _ = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk)
    (file,) = store_files(fresh_disk)
    listing = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(FileNotFoundError):
        os.link(str(file), fresh_disk / "name", src_dir_fd=listing, follow_symlinks=True)
    os.close(listing)
    protrain.unwrap(model)


def test_nothing_that_is_loaded_is_a_pickle() -> None:
    """torch.load with weights_only alone, which runs nothing; no unpickler anywhere."""
    for path in (ROOT / "protrain").rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"pickle\.loads?\(|Unpickler\(|joblib|marshal|\beval\(|\bexec\(", text), path
        for call in re.findall(r"torch\.load\(.*", text):
            assert "weights_only=True" in call, f"{path}: {call}"


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["torch", "pickle", "not a file of torch", "cut", "another thing"])
def test_a_state_that_is_something_else_is_refused(how: str, tmp_path: Path) -> None:
    path, ran = tmp_path / "optimizer.pt", tmp_path / "ran"
    good = {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    if how == "torch":
        torch.save(good | {"extra": Runs(ran)}, path)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Runs(ran)))
    elif how == "not a file of torch":
        path.write_bytes(b"years of work")
    elif how == "cut":
        torch.save(good, path)
        path.write_bytes(path.read_bytes()[:-50])
    else:
        torch.save({"state": 3}, path)
    with pytest.raises(protrain.PlanError, match=r"optimizer\.pt holds no state of an optimizer: .") as caught:
        torchfiles.load_optimizer(str(path))
    assert "\n" not in str(caught.value)
    assert not ran.exists()


def test_another_interpreter_is_refused() -> None:
    program = """
import _xxsubinterpreters as interpreters
import torch
import protrain._core
code = "import sys\\ntry:\\n import protrain._core\\nexcept ImportError as error:\\n print(error, flush=True)"
interpreters.run_string(interpreters.create(), code)
"""
    if sys.version_info >= (3, 13):
        program = program.replace("_xxsubinterpreters", "_interpreters").replace("run_string", "exec")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert re.match(
        r"protrain can be used in the main interpreter of a process only, and this is its subinterpreter \d+", line
    ) or (sys.version_info >= (3, 12) and "does not support loading in subinterpreters" in line)
