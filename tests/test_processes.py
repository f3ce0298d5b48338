"""Two processes that compute the same get the same bits."""

from __future__ import annotations

import subprocess
import sys

# The first vector function that the process calls, on a tensor that threads share, and then again: halves that differ are those
# of a thread that got other functions. Without the import one process in five finds some, on processors with AVX-512.
FIRST = """
import sys
import torch
calls = []
first = torch.exp
torch.exp = lambda tensor: calls.append(tensor.numel()) or first(tensor)
import protrain.api
torch.exp = first
matrix = torch.randn(512, 512)
matrix @ matrix  # threads stand ready
values = torch.randn(4 * 384 * 2048, generator=torch.Generator().manual_seed(0)) * 0.3
differs = torch.tanh(values) != torch.tanh(values)
print(calls, int(differs.sum()))
"""


def test_first_vector_function_is_called_by_one_thread() -> None:
    found = [subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True).stdout for _ in range(5)]
    assert found == ["[16] 0\n"] * 5
