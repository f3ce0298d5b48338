"""Two processes that compute the same get the same bits."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The first vector function that the process calls, on a tensor that threads share, and then again: halves that differ are those
# of a thread that got other functions. Without the import one process in five finds some, on processors with AVX-512.
FIRST = """
import sys
import torch
calls = []
first = torch.exp
torch.exp = lambda tensor: calls.append(tensor.numel()) or first(tensor)
import PROTRAIN
torch.exp = first
matrix = torch.randn(512, 512)
matrix @ matrix  # threads stand ready
values = torch.randn(4 * 384 * 2048, generator=torch.Generator().manual_seed(0)) * 0.3
differs = torch.tanh(values) != torch.tanh(values)
print(calls, int(differs.sum()))
"""


def printed(program: str) -> list[str]:
    """By each of five processes."""
    return [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout for _ in range(5)]


@pytest.mark.parametrize("name", ["protrain", "protrain.api"])
def test_first_vector_function_is_called_by_one_thread(name: str) -> None:
    """Before any name of protrain is used."""
    assert printed(FIRST.replace("PROTRAIN", name)) == ["[16] 0\n"] * 5


def test_it_is_called_as_well_where_torch_is_imported_later() -> None:
    begin, end = FIRST.split("import torch\n", maxsplit=1)[0], FIRST.split("torch.exp = first\n")[1]
    imports = 'import protrain, torch\ncalls = "protrain.base.firstcall" in sys.modules\n'
    assert printed(begin + imports + end) == ["True 0\n"] * 5


def test_importing_protrain_alone_imports_no_torch() -> None:
    program = "import protrain, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"


def test_torch_is_found_as_ever() -> None:
    program = """
import sys
before = list(sys.meta_path)
import protrain, importlib.util
assert importlib.util.find_spec("torch") is not None
import torch
from importlib.machinery import SourceFileLoader
assert sys.meta_path == before, sys.meta_path
assert type(torch.__spec__.loader) is SourceFileLoader
assert "exec_module" not in vars(torch.__spec__.loader)
assert "protrain.base.firstcall" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
