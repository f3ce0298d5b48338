"""What the core says went wrong, and what Python raises for it."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import protrain
from protrain import errors

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


def test_a_disk_folder_that_cannot_be_made_is_the_disks_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for folder, number in ((tmp_path / "file" / "swap", errno.ENOTDIR), (tmp_path / "file", errno.EEXIST)):
        with pytest.raises(errors.DiskError) as caught:
            protrain.wrap(model, optimizer, memory="16MiB", disk=folder)
        assert (caught.value.errno, caught.value.filename) == (number, str(folder))
        assert str(folder) in str(caught.value)
