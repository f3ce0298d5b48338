"""What the core says went wrong, and what Python raises for it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain import _core, errors

STATUS = Path(__file__).resolve().parent.parent / "csrc" / "base" / "status.h"
RAISED: dict[str, type[Exception]] = {
    "BUDGET": errors.BudgetError,
    "MEMORY": errors.OutOfMemoryError,
    "DISK": errors.DiskError,
    "STEP": errors.StepError,
    "PLAN": errors.PlanError,
    "INVALID": ValueError,
    "DEVICE": errors.DeviceError,
}


@pytest.mark.parametrize("name", ["ä" * 150, os.fsdecode(b"d\xff")], ids=["cut inside of a letter", "no text"])
def test_names_of_folders_that_cannot_be_told_whole(name: str) -> None:
    with pytest.raises(protrain.DiskError, match="cannot use the folder"):
        _core.disk_bench(f"/nowhere/a{name}")


def test_a_folder_may_have_any_name(fresh_disk: Path) -> None:
    folder = os.path.join(os.fspath(fresh_disk), os.fsdecode(b"d\xff"))
    os.mkdir(folder)
    assert _core.disk_bench(folder, 1 << 20)["bytes"] == 1 << 20
    model: Any = nn.Linear(4, 4)
    model, _ = protrain.wrap(model, torch.optim.AdamW(model.parameters()), memory="8MiB", disk=folder)
    model(torch.ones(2, 4)).sum().backward()
    protrain.unwrap(model)


def test_every_status_of_the_core_has_its_exception() -> None:
    found = re.search(r"typedef enum ptn_status \{(.*?)\}", STATUS.read_text(), re.DOTALL)
    assert found
    codes = re.findall(r"^ *PTN_([A-Z]+)\b", found.group(1), re.MULTILINE)
    assert codes == ["OK", *RAISED]
    for code, name in enumerate(codes[1:], start=1):
        raised = errors.from_record(code, "the GPU: gone", 0, "", 0, 0, 0, 0)
        assert (type(raised), str(raised)) == (RAISED[name], "the GPU: gone")
    assert issubclass(errors.DeviceError, RuntimeError)
    assert issubclass(errors.DeviceError, errors.Error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": 1 << 80}, "memory is a number of 81 bits; it must be at most 4611686018427387904 bytes"),
        (
            {"memory": (1 << 64) + (1 << 30)},
            "memory is a number of 65 bits; it must be at most",
        ),  # what 64 bits show of it is a budget
        ({"memory": "9" * 30}, f"memory is '{'9' * 30}'; it must be at most"),
        ({"memory": "9" * 400}, f"memory is '{'9' * 56}...; it must be at most"),
        ({"memory": "0.1"}, "memory is '0.1'; it must be more than 0 bytes"),
        ({"accumulate": 65537}, "accumulate is 65537; give a whole number, at most 65536"),
        ({"accumulate": (1 << 32) + 1}, "accumulate is 4294967297; give a whole number, at most 65536"),
        ({"memory": 10**5000}, "memory is a number of 16610 bits; it must be at most"),  # more digits than Python prints
        ({"memory": -(10**5000)}, "memory is a number of 16610 bits; it must be more than 0"),
        ({"accumulate": 1 << 70}, "accumulate is a number of 71 bits; give a whole number, at most 65536"),
        ({"disk": "a\0b"}, r"disk is 'a\x00b'; give a path without null characters"),
        ({"disk": "s3://bucket/run"}, "disk is 's3://bucket/run', a URL; give a folder of this machine's file system"),
        ({"disk": Path("s3://bucket/run")}, "disk is 's3:/bucket/run', a URL; give a folder of this machine's file system"),
        ({"disk": b"/tmp"}, "disk is b'/tmp'; give the path of a folder as str"),
        ({"weights": 3}, "weights is 3; give the path of a folder as str"),
    ],
)
def test_arguments_that_are_beyond_what_the_core_takes(arguments: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        protrain.wrap(model, optimizer, **{"memory": "16MiB", **arguments})
    assert type(model.weight) is nn.Parameter


def test_a_tilde_is_the_home_folder(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = disk / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    model = nn.Linear(2, 2)
    model, optimizer = protrain.wrap(model, torch.optim.AdamW(model.parameters()), memory="16MiB", disk="~/below")
    protrain.save(model, optimizer, "~/saved")
    assert {file.name for file in home.iterdir()} == {"below", "saved"}
    protrain.load(model, optimizer, Path("~/saved"))
    protrain.unwrap(model)
    with torch.device("meta"):
        other = nn.Linear(2, 2)
    other, _ = protrain.wrap(other, torch.optim.AdamW(other.parameters()), memory="16MiB", disk=home, weights="~/saved")
    assert torch.equal(protrain.unwrap(other).weight, model.weight)


def test_steps_that_are_beyond_what_the_core_plans() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^accumulate is 65537; give a whole number, at most 65536$"):
        protrain.plan(model, torch.zeros(4, 2), memory="16MiB", accumulate=65537)
    with pytest.raises(ValueError, match=r"^a step of this batch needs more than 32\.00 TiB, the most that there are plans for$"):
        protrain.plan(model, torch.zeros(1).expand(1 << 44, 2), memory="16MiB")


def test_what_stands_in_the_place_of_something_else_is_told_in_a_line() -> None:
    """A state dict, an optimizer or parameters would be shown in a thousand."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for arguments, message in (
        ((optimizer, model), "model is of type AdamW; give a torch.nn.Module"),
        ((model.state_dict(), optimizer), "model is of type OrderedDict; give a torch.nn.Module"),
        ((None, optimizer), "model is None; give a torch.nn.Module"),
        (
            (model, list(model.parameters())),
            "optimizer is of type list; give a torch.optim optimizer over the model's parameters",
        ),
        (
            (model, torch.optim.AdamW),
            "optimizer is <class 'torch.optim.adamw.AdamW'>; give a torch.optim optimizer over the model",
        ),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
            protrain.wrap(*arguments, memory="16MiB")
    with pytest.raises(TypeError, match=r"^plan is of type dict; give a protrain\.Plan or None$"):
        protrain.wrap(model, optimizer, memory="16MiB", plan={"weights": torch.zeros(1000)})  # type: ignore[arg-type]


def test_an_optimizer_around_another_one_is_told_from_it() -> None:
    """As accelerate's: what it stands around is to be wrapped."""

    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, optimizer.defaults)
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> Any:
            return self.optimizer.step(closure)

    model = nn.Linear(2, 2)
    with pytest.raises(protrain.PlanError, match=r"^optimizer is Around; .*another one \(accelerator\.prepare\), wrap that$"):
        protrain.wrap(model, Around(torch.optim.AdamW(model.parameters())), memory="16MiB")


@pytest.mark.parametrize("call", [protrain.save, protrain.load])
@pytest.mark.parametrize("folder", [None, 3, b"/tmp/name", "a\0b"])
def test_folders_that_are_no_paths(call: Any, folder: Any, disk: Path) -> None:
    model = nn.Linear(2, 2)
    model, optimizer = protrain.wrap(model, torch.optim.AdamW(model.parameters(), fused=True), memory="16MiB", disk=disk)
    with pytest.raises((TypeError, ValueError), match=f"^folder is {re.escape(repr(folder))}; give "):
        call(model, optimizer, folder)
    protrain.unwrap(model)


def test_a_disk_folder_that_cannot_be_made_is_the_disks_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for folder, number in ((tmp_path / "file" / "swap", errno.ENOTDIR), (tmp_path / "file", errno.EEXIST)):
        with pytest.raises(errors.DiskError) as caught:
            protrain.wrap(model, optimizer, memory="16MiB", disk=folder)
        assert (caught.value.errno, caught.value.filename) == (number, str(folder))
        assert str(folder) in str(caught.value)
