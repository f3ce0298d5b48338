"""One model, one GPU, one budget: what each way of training in less memory makes of them, within ten minutes.

    python benchmarks/gpu/run.py --memory 16GiB --out benchmarks/results/gpu.json

Each system runs in a process of its own, which torch keeps to the budget (torch.cuda.set_per_process_memory_fraction); protrain
keeps itself to it. A system that needs more is told as such, one that is not installed too. Where there is no GPU nothing is
measured, which one line says. `--device cpu --layers 2 --hidden 64` tries the program itself without one; such figures mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from systems import SYSTEMS, MissingError, Settings

from protrain.sizes import GIB, format_bytes, parse_bytes

WARMUP = 4  # protrain plans before the first step and by the times of the first two, in which it finds out about the loop too


def make_model(words: argparse.Namespace) -> Any:
    """A GPT-2 of these sizes; its parameters in ordinary memory."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=words.hidden, n_layer=words.layers, n_head=max(words.hidden // 64, 1), vocab_size=words.vocabulary,
        n_positions=max(words.seq, 64), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def out_of_memory(error: BaseException) -> bool:
    from protrain import BudgetError

    return isinstance(error, torch.OutOfMemoryError | BudgetError)


def peak_bytes(words: argparse.Namespace, model: Any) -> int:
    """The most that was in use of the GPU's budget."""
    from protrain.api import find_session

    session = find_session(model)
    if session is not None:
        return int(session.engine.stats()["peak_bytes"])
    return torch.cuda.max_memory_reserved() if words.device == "cuda" else 0


def work(words: argparse.Namespace) -> dict[str, Any]:
    """Measure one system, in this process."""
    budget = parse_bytes(words.memory)
    if words.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        total = torch.cuda.get_device_properties(0).total_memory
        if not words.system.startswith("protrain"):
            torch.cuda.set_per_process_memory_fraction(min(budget / total, 1.0))
    model = make_model(words)
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randint(words.vocabulary, (words.batch, words.seq), generator=generator) for _ in range(WARMUP + words.steps)
    ]
    try:
        step = SYSTEMS[words.system](model, Settings(budget, words.device, words.disk, words.host_memory))
        losses = [step(ids.to(words.device)).item() for ids in batches[:WARMUP]]
        begin = time.perf_counter()
        losses += [step(ids.to(words.device)).item() for ids in batches[WARMUP:]]
        seconds = (time.perf_counter() - begin) / words.steps
    except MissingError as error:
        return {"skipped": str(error)}
    except Exception as error:
        if out_of_memory(error):
            return {"does_not_fit": str(error).splitlines()[0]}
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    return {
        "step_seconds": seconds,
        "tokens_per_second": words.batch * words.seq / seconds,
        "planned_seconds": planned_seconds(model),
        "peak_bytes": peak_bytes(words, model),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def planned_seconds(model: Any) -> float:
    """What protrain's plan says of a step; 0.0 where it is not protrain's, or was planned by memory alone."""
    from protrain.api import find_session

    session = find_session(model)
    return session.homes.arrangement.plan.step_seconds if session is not None else 0.0


def run_apart(words: argparse.Namespace, system: str, seconds: float) -> dict[str, Any]:
    """Measure one system in a process of its own."""
    command = [sys.executable, __file__, "--system", system]
    for name in ("memory", "device", "disk", "host_memory", "layers", "hidden", "vocabulary", "batch", "seq", "steps"):
        value = getattr(words, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {seconds:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no answer"])[-1][:300]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """The figures as people read them."""
    lines = [f"{'system':28} {'s/step':>8} {'planned':>8} {'tokens/s':>10} {'peak':>10}  last loss"]
    for name, found in results.items():
        if "step_seconds" in found:
            planned = f"{found['planned_seconds']:8.3f}" if found["planned_seconds"] else f"{'-':>8}"
            lines.append(
                f"{name:28} {found['step_seconds']:8.3f} {planned} {found['tokens_per_second']:10.0f} "
                f"{format_bytes(found['peak_bytes']):>10}  {found['last_loss']:.6f}"
            )
        else:
            reason, words = next(iter(found.items()))
            lines.append(f"{name:28} {reason.replace('_', ' ')}: {words}"[:160])
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"processor": platform.processor(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    return found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    found.add_argument("--memory", default="16GiB", help="the GPU's budget")
    found.add_argument("--host-memory", default=None, help="protrain's budget of host memory; its default is what is free")
    found.add_argument("--disk", default=None, help="protrain's folder for what fits neither")
    found.add_argument("--layers", type=int, default=48)
    found.add_argument("--hidden", type=int, default=1600)
    found.add_argument("--vocabulary", type=int, default=50257)
    found.add_argument("--batch", type=int, default=4)
    found.add_argument("--seq", type=int, default=1024)
    found.add_argument("--steps", type=int, default=5)
    found.add_argument("--minutes", type=float, default=9.5, help="all systems together")
    found.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    found.add_argument("--out", default=None, help="a file for the figures, as JSON")
    found.add_argument("--system", default=None, choices=tuple(SYSTEMS), help=argparse.SUPPRESS)
    return found


def main(arguments: list[str] | None = None) -> int:
    words = parser().parse_args(arguments)
    if words.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    if words.system:
        print(json.dumps(work(words)))
        return 0
    end = time.monotonic() + 60 * words.minutes
    results: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(SYSTEMS):
        left = end - time.monotonic()
        results[name] = run_apart(words, name, left / (len(SYSTEMS) - number) * 2 if number + 1 < len(SYSTEMS) else left)
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    print(table(results))
    if words.out:
        figures = {
            "machine": machine(),
            "settings": vars(words),
            "memory_gib": parse_bytes(words.memory) / GIB,
            "systems": results,
        }
        Path(words.out).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
