"""The update kernels against torch's optimizers, fused and not: paired, interleaved in one process, on arrays in memory.

    python benchmarks/update.py [--elements 16777216 262144] [--rounds 15] [--kinds adamw sgd] [--roundings fused loop]
                                [--out FOLDER]

Each round runs torch and the core, in alternating order, on arrays of their own with equal content; what is reported is the
median over the rounds of torch's seconds divided by ours (above 1: the core is faster), and the best rate of each. Small
parameters, which stay in cache, are updated several times a round, by one thread alone; there torch's Python step, some tens
of microseconds, counts too. Two threads run the core on the two halves of a parameter. A pause before each turn lets torch's
idle threads, which spin for a while, give their core back. The bits of both results are compared at the end; a difference is
an error, not a footnote. Writes update_KIND.json with --out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import itertools
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from protrain import _core

#: Bytes that one element moves: parameter and state read and written, gradient read.
BYTES = {"adamw": 28, "adam": 28, "sgd": 20}
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "weight_decay": 0.01},
    "adam": {"lr": 1e-3},
    "sgd": {"lr": 0.1, "momentum": 0.9},
}
CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def processor() -> str:
    """The name of the CPU as the kernel tells it."""
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


#: From here on a parameter lies in memory, and a second thread is worth waking.
LARGE_ELEMENTS = 4 << 20


def seconds(body: Callable[[], object]) -> float:
    time.sleep(0.02)
    begin = time.perf_counter()
    body()
    return time.perf_counter() - begin


class Pair:
    """The same parameter, gradient and state for torch and for the core; `step` is the number of steps done."""

    def __init__(self, kind: str, fused: bool, n_elements: int, threads: int) -> None:
        torch.manual_seed(0)
        self.kind, self.step = kind, 0
        self.param = torch.nn.Parameter(torch.randn(n_elements))
        self.param.grad = torch.randn(n_elements)
        self.optimizer = CLASSES[kind]([self.param], fused=fused, **OPTIONS[kind])  # type: ignore[call-arg]
        group = self.optimizer.param_groups[0]
        names: tuple[str, ...] = ("lr", "weight_decay", "maximize", "fused")
        names += ("momentum", "dampening", "nesterov") if kind == "sgd" else ("eps", "amsgrad")
        self.hyper = {name: group[name] for name in names}
        if kind != "sgd":
            self.hyper |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        self.ours = self.param.detach().clone()
        self.state = [torch.zeros(n_elements) for _ in range(1 if kind == "sgd" else 2)]
        part = n_elements // threads // 1024 * 1024
        bounds = [part * i for i in range(threads)] + [n_elements]
        arrays = [self.ours.numpy(), self.param.grad.numpy(), *(s.numpy() for s in self.state)]
        self.parts = [[a[begin:end] for a in arrays] for begin, end in zip(bounds, bounds[1:], strict=False)]
        self.pool = concurrent.futures.ThreadPoolExecutor(threads)
        self.repeats = max(1, LARGE_ELEMENTS // n_elements)

    def torch_steps(self) -> None:
        for _ in range(self.repeats):
            self.optimizer.step()

    def core_steps(self) -> None:
        for step in range(self.step + 1, self.step + 1 + self.repeats):
            if len(self.parts) == 1:
                self.core_part(self.parts[0], step)
            else:
                list(self.pool.map(self.core_part, self.parts, [step] * len(self.parts)))

    def core_part(self, part: list[Any], step: int) -> None:
        param, grad, *state = part
        _core.update(self.kind, self.hyper, step, 1.0, param, state, grad)

    def round(self, torch_first: bool) -> tuple[float, float]:
        """Seconds of torch and of the core for the same steps."""
        if torch_first:
            theirs, ours = seconds(self.torch_steps), seconds(self.core_steps)
        else:
            ours, theirs = seconds(self.core_steps), seconds(self.torch_steps)
        self.step += self.repeats
        return theirs, ours


def measure(kind: str, rounding: str, n_elements: int, threads: int, rounds: int) -> dict[str, Any]:
    """Ratio and rates of one kind and rounding with one number of threads. Raises RuntimeError where the bits differ."""
    torch.set_num_threads(threads)
    pair = Pair(kind, rounding == "fused", n_elements, threads)
    for _ in range(2):  # touches the memory, starts the threads
        pair.round(True)
    times = [pair.round(i % 2 == 0) for i in range(rounds)]
    if not torch.equal(pair.ours.view(torch.int32), pair.param.detach().view(torch.int32)):
        raise RuntimeError(f"{kind}, {rounding}: the results of torch and of the core differ")
    moved = BYTES[kind] * n_elements * pair.repeats
    return {
        "kind": kind,
        "rounding": rounding,
        "elements": n_elements,
        "threads": threads,
        "rounds": rounds,
        "ratio_median": round(statistics.median(theirs / ours for theirs, ours in times), 3),
        "torch_gb_per_second": round(moved / min(theirs for theirs, _ in times) / 1e9, 1),
        "core_gb_per_second": round(moved / min(ours for _, ours in times) / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=[16 << 20, 256 << 10], help="multiples of 8192")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", choices=sorted(CLASSES), default=["adamw", "sgd"])
    roundings = ["fused", "loop"]
    parser.add_argument("--roundings", nargs="+", choices=roundings, default=roundings, help="of torch's optimizer")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON files")
    arguments = parser.parse_args()
    load = round(os.getloadavg()[0], 2)  # well above 0: others used the cores, rates are too low and ratios unsure
    for kind in arguments.kinds:
        results = []
        for rounding, n_elements in itertools.product(arguments.roundings, arguments.elements):
            if n_elements % 8192:
                parser.error(f"--elements {n_elements}: give a multiple of 8192")
            for threads in (1, 2) if n_elements >= LARGE_ELEMENTS else (1,):
                result = measure(kind, rounding, n_elements, threads, arguments.rounds)
                results.append(result)
                print(
                    f"{kind:5} {rounding:5} {n_elements:>9} elements, {threads} threads: "
                    f"torch / core {result['ratio_median']:.3f}, torch {result['torch_gb_per_second']} GB/s, "
                    f"core {result['core_gb_per_second']} GB/s"
                )
        if arguments.out:
            report = {
                "machine": processor(),
                "cores": os.cpu_count(),
                "load_average_before": load,
                "torch": torch.__version__,
                "date": datetime.date.today().isoformat(),
                "command": "python benchmarks/update.py " + " ".join(sys.argv[1:]),
                "results": results,
            }
            (arguments.out / f"update_{kind}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
