"""The peak that is foretold for optimizers without a kernel, beside the one that was measured.

    python -m benchmarks.optimizer_peaks --out benchmarks/results/optimizer_peaks.json

For each model and optimizer the smallest budget that the planner names, half as much again, and one in which everything has
room. In each `protrain.plan` foretells the peak before training, `protrain.status` behind the first step and behind the last; the
program holds the model's output until the step is made, as plans before the first step count it. Ratios are of foretold to
measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import protrain
from benchmarks.turns import keep_rows

MIB = 1 << 20
N_STEPS = 8  # the first makes state; RAdam takes more from its sixth on
#: Of the smallest one.
BUDGETS = {"smallest": 1.0, "half as much again": 1.5, "ample": 16.0}
VOCABULARY = 8192

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """As its paper has it; a class of the user's."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(state["exp_avg"] * beta1 + p.grad * (1 - beta1)), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Subclass(torch.optim.SGD):
    """Which may change anything, so that the kernel of SGD does not serve it."""


def _of(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


OPTIMIZERS: dict[str, Make] = {
    "SGD, subclass, foreach": _of(Subclass, lr=1e-2, momentum=0.9, foreach=True),
    "RMSprop": _of(torch.optim.RMSprop),
    "NAdam": _of(torch.optim.NAdam),
    "RAdam": _of(torch.optim.RAdam),
    "Adagrad": _of(torch.optim.Adagrad),
    "Adafactor": _of(torch.optim.Adafactor),
    "Adadelta, foreach": _of(torch.optim.Adadelta, foreach=True),
    "Adamax": _of(torch.optim.Adamax),
    "ASGD": _of(torch.optim.ASGD),
    "Rprop": _of(torch.optim.Rprop),
    "Muon, of matrices": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]),
    "Lion": _of(Lion),
}


def _gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=192, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=128, use_cache=False, resid_pdrop=0, attn_pdrop=0,
            embd_pdrop=0, bos_token_id=0, eos_token_id=0,
        )
    ).train()  # fmt: skip


def _llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, vocab_size=VOCABULARY,
            tie_word_embeddings=False, use_cache=False,
        )
    ).train()  # fmt: skip


MODELS = {"GPT-2 192x4, tied": _gpt2, "Llama 128x4": _llama}
CASES = {f"{model}, {name}": (MODELS[model], make) for model in MODELS for name, make in OPTIMIZERS.items()}


def _smallest(model: nn.Module, batch: Any, make: Make) -> int:
    try:
        return protrain.plan(model, batch, memory=MIB, optimizer=make(model)).budget_bytes
    except protrain.BudgetError as error:
        return error.smallest_bytes


def compared(make_model: Callable[[], Any], make: Make, batch: Any, budget: int) -> dict[str, Any]:
    """What was foretold and what was measured in one budget."""
    model = make_model()
    plan = protrain.plan(model, batch, memory=budget, optimizer=make(model))
    model, optimizer = protrain.wrap(model, make(model), memory=budget)
    ratios = []
    for _ in range(N_STEPS):
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del output
        status = protrain.status(model)
        ratios.append(round(status.predicted_peak_bytes / status.peak_memory_bytes, 4))
    protrain.unwrap(model)
    return {
        "budget_bytes": budget,
        "peak_bytes": status.peak_memory_bytes,
        "plan": round(plan.peak_bytes / status.peak_memory_bytes, 4),
        "first_step": ratios[0],
        "last_step": ratios[-1],
        "n_persist": status.plan.n_persist,
        "n_chunks": status.plan.n_chunks,
    }


def measure(name: str) -> dict[str, Any]:
    make_model, make = CASES[name]
    ids = torch.randint(VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    smallest = _smallest(make_model(), batch, make)
    found = {kind: compared(make_model, make, batch, int(times * smallest)) for kind, times in BUDGETS.items()}
    return {"model": name, **found}


def show(row: dict[str, Any]) -> None:
    for kind in BUDGETS:
        of = row[kind]
        sizes = f"{of['budget_bytes'] / MIB:6.1f} MiB, peak {of['peak_bytes'] / MIB:5.1f}"
        ratios = f"plan {of['plan']:.3f}, first step {of['first_step']:.3f}, last {of['last_step']:.3f}"
        print(f"{row['model']:46} {kind:18} {sizes}: {ratios}; {of['n_persist']}/{of['n_chunks']} in memory", flush=True)


if __name__ == "__main__":
    keep_rows("optimizer_peaks", __doc__, CASES, measure, show)
