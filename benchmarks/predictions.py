"""How right are plans? For many models, batches and budgets: the step and peak that `protrain.plan` says, and those of a run.

    python benchmarks/predictions.py --out benchmarks/results/predictions.json

Every model and batch has a process of its own. For three budgets it plans, each time from a new rehearsal, and carries the plan
out at once, in rounds; the middle round counts. How fast a machine is changes within seconds, so times are told in units of a
fixed amount of computation that allocates nothing, measured right before and after the plan was made, and beside the steps of the
run. Prints a line for each case and, at the end, how many lie within 3 % of the peak and 5 % of the step time; --table FILE
writes the cases as a Markdown table.
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
WARM_STEPS, TURNS, TURN_STEPS = 6, 2, 4
CLOCK_SECONDS = 0.3


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


class _Clock:
    """How fast the machine is just now: seconds of a fixed amount of computation, the mix of a transformer's block without its
    memory: nothing is allocated."""

    def __init__(self) -> None:
        import torch

        self._x, self._y = (torch.full((512, 512), 0.5) for _ in range(2))
        self._rise, self._fall = torch.full((512, 2048), 0.01), torch.full((2048, 512), 0.01)
        self._inner = torch.zeros(512, 2048)
        self.unit_seconds()

    def unit_seconds(self) -> float:
        """The middle of what CLOCK_SECONDS show."""
        seconds: list[float] = []
        while sum(seconds) < CLOCK_SECONDS:
            begin = time.perf_counter()
            self._pass()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)

    def _pass(self) -> None:
        import torch

        with torch.no_grad():
            for _ in range(4):
                torch.mm(self._x, self._rise, out=self._inner)
                torch.ops.aten.gelu_(self._inner)
                torch.mm(self._inner, self._fall, out=self._y)
                self._y.add_(self._x)


def _loss(output: Any) -> Any:
    return output.loss if hasattr(output, "loss") else output.square().mean()


def _measure(name: str, n_rounds: int) -> list[dict[str, Any]]:
    """For each share of what training in memory takes: plans, made anew, and at once what carrying them out took."""
    import torch

    import protrain

    make, batch = CASES[name]
    torch.manual_seed(0)
    clock = _Clock()
    whole_bytes = protrain.plan(make().train(), batch(0), memory=1 << 40).peak_bytes
    return [_case(make, batch, int(share * whole_bytes), clock, n_rounds) for share in SHARES]


def _case(
    make: Callable[[], Any], batch: Callable[[int], dict[str, Any]], budget: int, clock: _Clock, n_rounds: int
) -> dict[str, Any]:
    import protrain

    rounds = []
    for _ in range(n_rounds):
        model = make().train()  # a new one: what a model was planned with is remembered
        before = clock.unit_seconds()
        try:
            plan = protrain.plan(model, batch(0), memory=budget)
        except protrain.BudgetError as error:
            budget, model = error.smallest_bytes, make().train()
            before = clock.unit_seconds()
            plan = protrain.plan(model, batch(0), memory=budget)
        planned_units = plan.step_seconds / ((before + clock.unit_seconds()) / 2)
        run = _run(model, batch, budget, plan, clock)
        rounds.append({"plan": plan.to_json(), "planned_units": planned_units, **run})
    rounds.sort(key=lambda one: one["planned_units"] / one["step_units"])
    ratios = [one["planned_units"] / one["step_units"] for one in rounds]
    return {"budget_bytes": budget, "round_ratios": ratios, **rounds[len(rounds) // 2]}


def _run(model: Any, batch: Callable[[int], dict[str, Any]], budget: int, plan: Any, clock: _Clock) -> dict[str, Any]:
    """Carry the plan out: what a step took, in seconds and in units of the clock beside it."""
    import torch

    import protrain

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = protrain.wrap(model, optimizer, memory=budget, plan=plan)
    seconds, units = [], []
    beside = clock.unit_seconds()
    for turn in range(1 + TURNS):
        steps = []
        for number in range(TURN_STEPS if turn else WARM_STEPS):
            output = model(**batch(number))
            loss = _loss(output)
            loss.backward()
            del output, loss
            optimizer.step()
            optimizer.zero_grad()
            steps.append(protrain.status(model).step_seconds)
        before, beside = beside, clock.unit_seconds()
        if turn:  # the first is for what happens once: memory is touched, and put on huge pages
            counted = steps[1:]  # lanes were idle before the first of a turn
            seconds += counted
            units.append(statistics.median(counted) / ((before + beside) / 2))
    peak = protrain.status(model).peak_memory_bytes
    protrain.unwrap(model)
    return {"step_seconds": statistics.median(seconds), "step_units": statistics.median(units), "peak_bytes": peak}


def _in_child(function: Callable[..., Any], *words: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, words)


def _table(cases: list[dict[str, Any]]) -> str:
    lines = [
        "| model and batch | budget | modes | in memory | step planned | measured | ratio | peak planned | measured | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        modes = ", ".join(f"{case['modes'].count(mode)} {mode}" for mode in dict.fromkeys(case["modes"]))
        lines.append(
            f"| {case['case']} | {case['budget_bytes'] >> 20} MiB | {modes} | {case['n_persist']}/{case['n_chunks']} chunks "
            f"| {case['planned_units']:.2f} | {case['step_units']:.2f} "
            f"| {case['step_ratio']:.3f} "
            f"| {case['planned_bytes'] / 2**20:.0f} MiB | {case['peak_bytes'] / 2**20:.0f} MiB | {case['peak_ratio']:.3f} |"
        )
    return "Steps are told in units of a fixed amount of computation, measured beside each.\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Measure every case; print a line for each and write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--rounds", type=int, default=3, help="plans made and carried out for each budget")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    cases = []
    for name in CASES:
        if arguments.only not in name:
            continue
        for found in _in_child(_measure, name, arguments.rounds):
            plan, budget = json.loads(found.pop("plan")), found["budget_bytes"]
            case = {
                "case": name,
                "n_persist": plan["n_persist"],
                "n_chunks": plan["n_chunks"],
                "modes": plan["block_modes"],
                "planned_seconds": plan["step_seconds"],
                "planned_bytes": plan["peak_bytes"],
                **found,
                "step_ratio": found["planned_units"] / found["step_units"],
                "peak_ratio": plan["peak_bytes"] / found["peak_bytes"],
                "forecast": plan["forecast"],
            }
            cases.append(case)
            print(
                f"{name}, {budget >> 20} MiB: step {case['step_ratio']:.3f} of {found['step_seconds']:.3f} s, peak "
                f"{case['peak_ratio']:.3f} of {found['peak_bytes'] >> 20} MiB, {plan['n_persist']}/{plan['n_chunks']} chunks in "
                f"memory, {','.join(plan['block_modes'])}",
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
