"""Tests that need a GPU: each is marked `gpu`, and skipped where there is none.

    python -m pytest tests/gpu

Nothing here ran when it was written: see docs/decisions/0013-cuda-from-python.md for what was verified, and how.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # nets.py, twins.py

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS begins: results then do not depend on streams


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    here = Path(__file__).resolve().parent
    missing = pytest.mark.skip(reason="no GPU")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture(autouse=True)
def deterministic(disk: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that give the same bits each time, in fp32 as it is named."""
    import torch

    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.cuda.empty_cache()
