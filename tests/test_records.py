"""Figures in the README and on pages of results are those of the records beside them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from peers import show  # noqa: E402

from benchmarks import scale  # noqa: E402

MIB = 1 << 20
#: Rows of the README's comparison, and the peers' rows that they show, the fastest before the leanest.
COMPARED = {
    "plain torch": "plain torch",
    "every block checkpointed": "all-checkpoint",
    "`save_on_cpu`": "save_on_cpu",
    "saved tensors to disk in plain Python": "Python disk hook",
    "FSDP2, CPU offload": "FSDP2, CPU offload",
    "DeepSpeed ZeRO-2, optimizer on the CPU": "DeepSpeed ZeRO-2, CPU",
    "DeepSpeed ZeRO-3, all on the CPU": "DeepSpeed ZeRO-3, CPU",
    "DeepSpeed ZeRO-3, optimizer on NVMe": "DeepSpeed ZeRO-3, optimizer on NVMe",
    "DeepSpeed ZeRO-3, all on NVMe": "DeepSpeed ZeRO-3, all on NVMe",
    "**protrain**": "protrain",
}
STEPS = ("chunks on disk, compute-bound", "everything fits", "chunks on disk, little compute")


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def compared_row(label: str, name: str, rows: list[dict[str, Any]]) -> str:
    """A row of the README's comparison, as the record has it."""
    of_it = [row for row in rows if row["name"] in (name, f"{name}, fastest", f"{name}, leanest") and row["median_seconds"]]
    if not of_it:
        return f"| {label} | – | – | – | – | – |"
    kinds = ", ".join(row["setting"] for row in of_it if row["setting"])
    tokens = ", ".join(f"{row['tokens_per_second']:,.0f}" for row in of_it)
    peaks = ", ".join(f"{row['peak_bytes'] / MIB:,.0f}" for row in of_it)
    ratios = ", ".join(f"{row['ratio']:.2f}" for row in of_it)
    knobs = ", ".join(str(show.n_knobs(row)) for row in of_it)
    largest = next(show.largest(row) for row in reversed(of_it))
    return f"| {label}{': ' if kinds else ''}{kinds} | {tokens} | {peaks} MiB | {ratios} | {knobs} | {largest} |"


@pytest.mark.parametrize("label", COMPARED)
def test_the_comparison_in_the_readme(label: str) -> None:
    assert compared_row(label, COMPARED[label], load("peers.json")["rows"]) in (ROOT / "README.md").read_text().splitlines()


def test_step_times_in_the_readme() -> None:
    cases = load("step.json")["cases"]
    text = (ROOT / "README.md").read_text()
    told = [
        line.rsplit("| ", 1)[1].removesuffix(" |") for line in text.splitlines() if line.endswith("of plain torch's step time |")
    ]
    assert told == [f"{cases[name]['ratio']:.2f} of plain torch's step time" for name in STEPS]


def test_scale_on_paper() -> None:
    assert (RESULTS / "scale.md").read_text() == scale.markdown(load("scale.json")["cases"])
