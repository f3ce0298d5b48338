"""How right are plans? For many models, batches and budgets: the step and peak that `protrain.plan` says, and those of a run.

    python benchmarks/predictions.py --out benchmarks/results/predictions.json

For each model and batch one process plans for three budgets, and three carry the plans out. How fast a machine is changes
within seconds, so they take turns, in rounds: the planner rehearses the model anew and foretells with that what the plans take,
then each of the others makes some steps. What counts is the middle of the ratios. Prints a line for each case and, at the end,
how many lie within 3 % of the peak and 5 % of the step time; --table FILE writes the cases as a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARES = (0.3, 0.55, 0.9)  # of what training in memory takes: states, and activations of blocks that are kept
WARM_STEPS, TURN_STEPS = 6, 5


def _gpt2(hidden: int, layers: int, vocabulary: int = 1024, dropout: float = 0.1) -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=hidden // 64, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    )  # fmt: skip


def _llama(hidden: int, layers: int) -> Any:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128,
            intermediate_size=hidden * 3, vocab_size=1024, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _vit(hidden: int, layers: int) -> Any:
    import transformers

    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64, intermediate_size=4 * hidden,
            image_size=224, patch_size=16, num_labels=10,
        )
    )  # fmt: skip


def _encoder(hidden: int, layers: int) -> Any:
    import torch

    layer = torch.nn.TransformerEncoderLayer(hidden, hidden // 64, 4 * hidden, batch_first=True)
    return torch.nn.Sequential(torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.nn.Linear(hidden, 8))


def _tokens(batch: int, length: int, vocabulary: int = 1024) -> Callable[[int], dict[str, Any]]:
    def make(number: int) -> dict[str, Any]:
        import torch

        ids = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}

    return make


def _images(batch: int) -> Callable[[int], dict[str, Any]]:
    def make(number: int) -> dict[str, Any]:
        import torch

        random = torch.Generator().manual_seed(number)
        return {
            "pixel_values": torch.randn(batch, 3, 224, 224, generator=random),
            "labels": torch.randint(0, 10, (batch,), generator=random),
        }

    return make


def _floats(batch: int, length: int, hidden: int) -> Callable[[int], dict[str, Any]]:
    def make(number: int) -> dict[str, Any]:
        import torch

        return {"input": torch.randn(batch, length, hidden, generator=torch.Generator().manual_seed(number))}

    return make


#: name -> (the model, its batches)
CASES: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    "gpt2 384x6, 2x256": (lambda: _gpt2(384, 6, 256), _tokens(2, 256, 256)),
    "gpt2 384x12, 4x128": (lambda: _gpt2(384, 12), _tokens(4, 128)),
    "gpt2 512x8, 1x512": (lambda: _gpt2(512, 8), _tokens(1, 512)),
    "gpt2 512x8, 4x256": (lambda: _gpt2(512, 8), _tokens(4, 256)),
    "gpt2 768x6, 1x256": (lambda: _gpt2(768, 6), _tokens(1, 256)),
    "gpt2 256x24, 2x128": (lambda: _gpt2(256, 24), _tokens(2, 128)),
    "llama 512x8, 2x256": (lambda: _llama(512, 8), _tokens(2, 256)),
    "llama 768x6, 1x512": (lambda: _llama(768, 6), _tokens(1, 512)),
    "vit 384x8, 4 images": (lambda: _vit(384, 8), _images(4)),
    "torch encoder 512x6, 4x128": (lambda: _encoder(512, 6), _floats(4, 128, 512)),
    "gpt2 768x6, 2x512": (lambda: _gpt2(768, 6), _tokens(2, 512)),
    "gpt2 768x4, 2x512, vocabulary 16384": (lambda: _gpt2(768, 4, 16384), _tokens(2, 512, 16384)),
}


def _loss(output: Any) -> Any:
    return output.loss if hasattr(output, "loss") else output.square().mean()


# ---- processes that take turns ----


class _Peer:
    """A process whose generator goes on to its next yield whenever it is asked to."""

    def __init__(self, function: Callable[..., Any], *words: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function, words), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self) -> Any:
        """What the generator yields next."""
        self._pipe.send("go on")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, function: Callable[..., Any], words: tuple[Any, ...]) -> None:
    pipe.recv()
    try:
        for value in function(*words):
            pipe.send(("value", value))
            pipe.recv()
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise


def _planner(name: str) -> Any:
    """Yields plans for the budgets, as JSON; from then on what they take by another rehearsal, of a new model, in seconds."""
    import torch

    import protrain
    from protrain.api import profile
    from protrain.planning import plan_from_profile

    make, batch = CASES[name]
    torch.manual_seed(0)
    whole_bytes = protrain.plan(make().train(), batch(0), memory=1 << 40).peak_bytes
    plans, model = [], make().train()
    for share in SHARES:
        try:
            plans.append(protrain.plan(model, batch(0), memory=int(share * whole_bytes)))
        except protrain.BudgetError as error:
            plans.append(protrain.plan(model, batch(0), memory=error.smallest_bytes))
    yield [plan.to_json() for plan in plans]
    while True:
        model = make().train()  # a new one: what a model was planned with is remembered
        profiles = [profile(model, batch(0), memory=plan.budget_bytes) for plan in plans]
        yield [
            plan_from_profile(found, plan.budget_bytes, given=plan).step_seconds
            for plan, found in zip(plans, profiles, strict=True)
        ]


def _runner(name: str, plan: str) -> Any:
    """Carries a plan out: yields the median seconds of a few steps, and the peak so far."""
    import torch

    import protrain

    make, batch = CASES[name]
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    given = protrain.Plan.from_json(plan)
    model, optimizer = protrain.wrap(model, optimizer, memory=given.budget_bytes, plan=given)
    warm = True  # what happens once: memory is touched, and put on huge pages
    while True:
        seconds = []
        for number in range(WARM_STEPS if warm else TURN_STEPS):
            output = model(**batch(number))
            loss = _loss(output)
            loss.backward()
            del output, loss
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(protrain.status(model).step_seconds)
        warm = False
        # lanes were idle before the first of a turn
        yield statistics.median(seconds[1:]), protrain.status(model).peak_memory_bytes


def _measure(name: str, n_rounds: int) -> list[dict[str, Any]]:
    """For each share of what training in memory takes: a plan, and in rounds what it takes by a new rehearsal and really."""
    planner = _Peer(_planner, name)
    peers = [planner]
    try:
        plans = planner.ask()
        for plan in plans:
            peers.append(_Peer(_runner, name, plan))
            peers[-1].ask()
        rounds = [(planner.ask(), [runner.ask() for runner in peers[1:]]) for _ in range(n_rounds)]
    finally:
        for peer in peers:
            peer.end()
    found = []
    for number, plan in enumerate(plans):
        planned = [one[number] for one, _ in rounds]
        taken = [one[number][0] for _, one in rounds]
        ratios = [p / t for p, t in zip(planned, taken, strict=True)]
        found.append(
            {
                "plan": json.loads(plan),
                "planned_seconds": statistics.median(planned),
                "step_seconds": statistics.median(taken),
                "step_ratio": statistics.median(ratios),
                "round_ratios": ratios,
                "peak_bytes": rounds[-1][1][number][1],
            }
        )
    return found


def _table(cases: list[dict[str, Any]]) -> str:
    lines = [
        "| model and batch | budget | modes | in memory | step planned | measured | ratio | peak planned | measured | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        modes = ", ".join(f"{case['modes'].count(mode)} {mode}" for mode in dict.fromkeys(case["modes"]))
        lines.append(
            f"| {case['case']} | {case['budget_bytes'] >> 20} MiB | {modes} | {case['n_persist']}/{case['n_chunks']} chunks "
            f"| {case['planned_seconds']:.3f} s | {case['step_seconds']:.3f} s | {case['step_ratio']:.3f} "
            f"| {case['planned_bytes'] / 2**20:.0f} MiB | {case['peak_bytes'] / 2**20:.0f} MiB | {case['peak_ratio']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every case; print a line for each and write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names contain this; others that --out holds stay there")
    parser.add_argument("--rounds", type=int, default=5, help="of plans made and steps taken in turns")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only in name]
    before = json.loads(arguments.out.read_text())["cases"] if arguments.out and arguments.out.exists() else []
    cases = [case for case in before if case["case"] not in names]
    for name in names:
        for found in _measure(name, arguments.rounds):
            plan = found.pop("plan")
            case = {
                "case": name,
                "budget_bytes": plan["budget_bytes"],
                "n_persist": plan["n_persist"],
                "n_chunks": plan["n_chunks"],
                "modes": plan["block_modes"],
                "planned_bytes": plan["peak_bytes"],
                **found,
                "peak_ratio": plan["peak_bytes"] / found["peak_bytes"],
                "forecast": plan["forecast"],
            }
            cases.append(case)
            print(
                f"{name}, {plan['budget_bytes'] >> 20} MiB: step {case['step_ratio']:.3f} of {found['step_seconds']:.3f} s "
                f"({', '.join(f'{ratio:.2f}' for ratio in found['round_ratios'])}), peak {case['peak_ratio']:.3f} of "
                f"{found['peak_bytes'] >> 20} MiB, {plan['n_persist']}/{plan['n_chunks']} chunks in memory, "
                f"{','.join(plan['block_modes'])}",
                flush=True,
            )
        _write(cases, arguments.out, arguments.table)  # what was measured is not lost where a later case fails
    steps, peaks = _right(cases)
    middle = statistics.median(abs(case["step_ratio"] - 1) for case in cases)
    print(f"{len(cases)} cases: step within 5 %: {steps}, peak within 3 %: {peaks}; median error of the step {middle:.3f}")


def _right(cases: list[dict[str, Any]]) -> tuple[int, int]:
    """How many have a step within 5 %, a peak within 3 %."""
    return sum(abs(c["step_ratio"] - 1) <= 0.05 for c in cases), sum(abs(c["peak_ratio"] - 1) <= 0.03 for c in cases)


def _write(cases: list[dict[str, Any]], out: Path | None, table: Path | None) -> None:
    cases = sorted(cases, key=lambda case: (list(CASES).index(case["case"]), case["budget_bytes"]))
    steps, peaks = _right(cases)
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "benchmarks/predictions.py",
        "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "system": platform.machine()},
        "steps_within_5_percent": steps,
        "peaks_within_3_percent": peaks,
        "cases": cases,
    }
    if out:
        out.write_text(json.dumps(results, indent=1) + "\n")
    if table:
        table.write_text(_table(cases))


if __name__ == "__main__":
    main()
