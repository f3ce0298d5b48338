"""What libraries take of a GPU's budget: workspaces of cuBLAS, by the environment, the GPU and what torch says itself."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from protrain.device import compute

MIB, KIB = 1 << 20, 1 << 10
HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)
LT = MIB  # of cuBLASLt, where it does not share the other's


@pytest.mark.parametrize(
    ("environment", "capability", "told_bytes", "want"),
    [
        ({}, HOPPER, None, 32 * MIB + LT),
        ({}, BLACKWELL, None, 32 * MIB + LT),
        ({}, AMPERE, None, 8 * MIB + 128 * KIB + LT),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, AMPERE, None, 32 * MIB + LT),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, HOPPER, None, 128 * KIB + LT),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, HOPPER, None, 8 * MIB + 128 * KIB + LT),
        ({"CUBLAS_WORKSPACE_CONFIG": "much"}, AMPERE, None, 8 * MIB + 128 * KIB + LT),
        ({"CUBLASLT_WORKSPACE_SIZE": "4096"}, HOPPER, None, 36 * MIB),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, HOPPER, None, 32 * MIB),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, HOPPER, 48 * MIB, 48 * MIB),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, HOPPER, 48 * MIB, 48 * MIB + LT),
    ],
)
def test_workspaces(environment: dict[str, str], capability: tuple[int, int], told_bytes: int | None, want: int) -> None:
    assert compute.workspace_bytes(environment, capability, told_bytes) == want


@pytest.mark.parametrize("told_bytes", [None, 32 * MIB])
def test_plans_leave_room_for_forward_and_backward(told_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a workspace; torch is asked where it can tell."""

    def tell() -> Any:
        return told_bytes

    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    monkeypatch.setattr(torch._C, "_cuda_getCublasWorkspaceSize", tell, raising=False)
    if told_bytes is None:
        monkeypatch.delattr(torch._C, "_cuda_getCublasWorkspaceSize")
    overhead = compute._cuda_overhead(0)
    assert overhead.fixed_bytes == compute.SEGMENT_ENDS_BYTES + 2 * (32 * MIB + (LT if told_bytes is None else 0))
    assert overhead.of(1 << 30) >= (64 + 24 + 32) * MIB
    assert overhead.between(1 << 30) == 256 * MIB
