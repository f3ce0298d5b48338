"""Step time of protrain against plain torch on one GPT-2, in the three places that matter: chunks on disk behind compute,
everything in memory, and little compute for the bytes.

    python benchmarks/step.py --out benchmarks/results/step.json

Each case is one run of `protrain bench step`: two processes take turns step by step, and their losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES = {
    "chunks on disk, compute-bound": {"memory": "700MiB", "batch": 2, "seq": 512},
    "everything fits": {"memory": "4GiB", "batch": 2, "seq": 512},
    "chunks on disk, little compute": {"memory": "505MiB", "batch": 1, "seq": 32},
}


def model_folder(folder: Path) -> Path:
    """A GPT-2 of 43 M parameters: hidden 768, 6 layers, 1024 tokens."""
    import transformers

    sizes = {"n_embd": 768, "n_layer": 6, "n_head": 12, "vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # its masks would take memory from the chunks
    transformers.GPT2Config(**sizes, **no_dropout).save_pretrained(folder)
    return folder


def measure(model: Path, rounds: int, case: dict[str, Any]) -> dict[str, Any]:
    """One run of `protrain bench step --json`."""
    words = [word for name, value in case.items() for word in (f"--{name}", str(value))]
    command = [
        sys.executable,
        "-m",
        "protrain",
        "bench",
        "step",
        "--model",
        str(model),
        "--rounds",
        str(rounds),
        "--json",
        *words,
    ]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def main() -> None:
    """Measure every case; print a line for each and write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "system": platform.machine()}
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"benchmarks/step.py --rounds {arguments.rounds}",
        "machine": machine,
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder))
        for name, case in CASES.items():
            found = measure(model, arguments.rounds, case)
            results["cases"][name] = case | found
            print(f"{name}: {found['ratio']:.3f} of plain torch's step time", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
