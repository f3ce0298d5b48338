"""The ROK curve of SSDTrain (recompute, offload, keep): throughput against the activation peak, by `bench activations`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.papers.records import Experiment, Settings, mib, table
from benchmarks.papers.training import Shape

PAPER = (
    "In the paper the point of offloading lies left of full recomputation, a smaller peak, at the throughput of keeping; so at "
    "equal memory the batch can be doubled."
)


def measure(settings: Settings) -> dict[str, Any]:
    if settings.device != "cpu":
        return {"reason": "no curve: protrain bench activations trains on the CPU; figure6_step_and_peak has its modes on a GPU"}
    model, seq, batch, rounds, mixes, memory = "gpt2-bytes", 384, 4, 4, 1, "4GiB"
    with tempfile.TemporaryDirectory() as folder:
        if settings.tiny:
            Shape("gpt2", 64, 2, 1, 32).config().save_pretrained(folder)
            model, seq, batch, rounds, mixes, memory = folder, 32, 2, 1, 0, "64MiB"
        rounds = settings.rounds or rounds
        words = {"model": model, "seq": seq, "batch": batch, "rounds": rounds, "mixes": mixes, "memory": memory}
        if settings.disk:
            words["disk"] = settings.disk
        command = [sys.executable, "-m", "protrain", "bench", "activations", "--json"]
        command += [word for name, value in words.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {"summary": lines[-1] | {"model": "a tiny GPT-2" if settings.tiny else model}, "points": [lines[-2], *lines[:-2]]}


def body(record: dict[str, Any]) -> str:
    if "reason" in record:
        return str(record["reason"])
    keep = record["points"][0]
    rows = [
        [
            one["name"], mib(one["activation_peak_bytes"]), f"{one['activation_peak_bytes'] / keep['activation_peak_bytes']:.2f}",
            f"{one['tokens_per_second']:,.0f}", f"{one['ratio_to_keep']:.3f}", mib(one["step_write_bytes"]),
        ]
        for one in record["points"]
    ]  # fmt: skip
    summary = record["summary"]
    about = (
        f"{summary['model']}, {summary['batch']} x {summary['seq']} tokens, every state in memory, {summary['rounds']} "
        f"rounds of a step each in turns, equal losses. 4/8: the first 4 of 8 blocks, the others keep. {PAPER}"
    )
    head = ["modes", "activation peak, MiB", "of keep's", "tokens/s", "step to keep's", "written, MiB a step"]
    return "\n\n".join([about, table(head, rows), verdict({one["name"]: one for one in record["points"]})])


def verdict(points: dict[str, Any]) -> str:
    """Where the points of this machine lie to one another, beside where the paper's do."""
    keep, swap, checkpoint = (points[name] for name in ("keep", "swap", "checkpoint"))
    peak = swap["activation_peak_bytes"] / checkpoint["activation_peak_bytes"]
    where = "left of" if peak < 0.99 else "at" if peak <= 1.01 else "right of"
    why = (
        ": blocks are recomputed one at a time here, and what a recomputed block holds is what a swapped one has in memory while "
        "it is computed backward; beside that swap has what is on its way, and tensors too small to go"
    )
    times = f"{swap['ratio_to_keep']:.2f} of keep's step, recomputation {checkpoint['ratio_to_keep']:.2f}"
    return (
        f"Swap lies {where} full recomputation, at {peak:.2f} of its peak{why if peak >= 0.99 else ''}. It takes {times}. Keep's "
        f"peak has room for {keep['activation_peak_bytes'] / swap['activation_peak_bytes']:.1f} of swap's; the larger batch that "
        "fits so is not tried here."
    )


def draw(record: dict[str, Any]) -> bytes:
    """The curve as `protrain bench activations --out` draws it."""
    from protrain.cli.bench_activations import Measured
    from protrain.cli.bench_plot import draw as draw_curve

    points = [Measured(**one) for one in record["points"]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "curve.png"
        draw_curve(str(file), [*points[1:], points[0]], record["summary"])
        return file.read_bytes()


EXPERIMENT = Experiment("ssdtrain/rok_curve", "SSDTrain: the recompute-offload-keep curve", measure, body, draw)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
