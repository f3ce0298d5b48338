"""What the core says went wrong, and what Python raises for it."""

from __future__ import annotations

import re
from pathlib import Path

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
