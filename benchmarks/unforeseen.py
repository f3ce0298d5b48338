"""Programs that do what no dry run foresees, and what it costs those that do not.

    python -m benchmarks.unforeseen --out benchmarks/results/unforeseen.json

Six blocks, 201 MiB of parameters, state and gradients, in loops that hold more than one forward before one backward does: by
budget, how many of their steps are refused, with a first step that leaves room, state in memory that gives way and forwards whose
blocks swap when nobody foresaw them, and without these. Then ordinary loops: their first steps in seconds with them and without,
fresh models in turns, medians.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

import protrain
from benchmarks.refusals import NO_FIRST_ROOM, NO_SWAPPING, NO_YIELDING, until_made
from benchmarks.turns import Run, gpt2, keep_rows

WIDTH, ROWS, N_STEPS, MOST_REFUSED = 512, (8, 64), 8, 8
BUDGETS_MIB = (90, 100, 120, 160, 200, 240, 280)
N_ROUNDS, N_FIRST = 5, 4
# With a budget in shares of parameters and AdamW's state.
ORDINARY: dict[str, tuple[Callable[[], Any], tuple[int, int], float]] = {
    "GPT-2 768x6, 2x256": (lambda: gpt2(768, 6), (2, 256), 0.6),
    "GPT-2 384x8, 4x256": (lambda: gpt2(384, 8), (4, 256), 0.8),
}


class Block(nn.Module):
    """2.1 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


def _batch(step: int, number: int) -> torch.Tensor:
    return torch.randn(*ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + number))


def _plain(model: Any, step: int) -> torch.Tensor:
    return F.mse_loss(model(_batch(step, 0)), _batch(step, 1))


def _three(model: Any, step: int) -> torch.Tensor:
    losses = [F.mse_loss(model(_batch(step, number)), _batch(step, 10 + number)) for number in range(3)]
    return torch.stack(losses).sum()


def _triplet(model: Any, step: int) -> torch.Tensor:
    anchor, same, other = (model(_batch(step, number)).mean(1) for number in range(3))
    return F.triplet_margin_loss(anchor, same, other)


def _penalty(model: Any, step: int) -> torch.Tensor:
    x = _batch(step, 0).requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + ((grad.norm(2, dim=-1) - 1) ** 2).mean()


def _now_and_then(loss_of: Callable[[Any, int], torch.Tensor]) -> Callable[[Any, int], torch.Tensor]:
    return lambda model, step: (loss_of if step % 4 == 3 else _plain)(model, step)


LOOPS: dict[str, Callable[[Any, int], torch.Tensor]] = {
    "three forwards": _three,
    "triplet loss": _triplet,
    "gradient penalty": _penalty,
    "three forwards, every fourth step": _now_and_then(_three),
    "gradient penalty, every fourth step": _now_and_then(_penalty),
}


def _train(loss_of: Callable[[Any, int], torch.Tensor], memory: int | None) -> tuple[list[float], int]:
    """The losses of the steps that were made, each until it was, and how often one was refused; fewer where one never was."""
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as disk:
        if memory is not None:
            model, optimizer = protrain.wrap(model, optimizer, memory=memory, disk=disk)
        losses, refused = until_made(model, optimizer, loss_of, N_STEPS, MOST_REFUSED + 1)
        if memory is not None:
            protrain.unwrap(model)
    return losses, refused


def _without(kind: str) -> ExitStack:
    """A context, in which what spares programs a refusal is left out where the kind says so."""
    stack = ExitStack()
    for change in (NO_FIRST_ROOM, NO_YIELDING, NO_SWAPPING) if kind == "without" else ():
        stack.enter_context(patch.object(*change))
    return stack


def _measure_loop(name: str) -> dict[str, Any]:
    loss_of = LOOPS[name]
    want, budgets = _train(loss_of, None)[0], []
    for mib in BUDGETS_MIB:
        found: dict[str, Any] = {"budget_mib": mib}
        for kind in ("with", "without"):
            with _without(kind):
                losses, refused = _train(loss_of, mib << 20)
            if losses != want[: len(losses)]:
                raise SystemExit(f"{name}, {mib} MiB: other losses than plain torch's")
            found[kind] = refused if len(losses) == N_STEPS else "no step" if not losses else "never all"
        budgets.append(found)
    return {"loop": name, "refused_steps": budgets}


def _measure_ordinary(name: str) -> dict[str, Any]:
    make, shape, share = ORDINARY[name]
    ids = torch.randint(1024, shape, generator=torch.Generator().manual_seed(0))
    memory = int(share * 12 * sum(p.numel() for p in make().parameters()))
    seconds: dict[str, list[list[float]]] = {"with": [], "without": []}
    for _ in range(N_ROUNDS):
        for kind, found in seconds.items():
            with _without(kind):
                run = Run(make, memory, None)
                for _ in range(N_FIRST):
                    run.step(ids)
                protrain.unwrap(run.model)
            found.append(run.seconds)
    return {
        "ordinary": name,
        "budget_bytes": memory,
        "first_steps_seconds": {
            kind: [round(statistics.median(step), 3) for step in zip(*found, strict=True)] for kind, found in seconds.items()
        },
    }


def measure(name: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _measure_loop(name) if name in LOOPS else _measure_ordinary(name)


def show(row: dict[str, Any]) -> None:
    if "loop" in row:
        refused = (f"{of['budget_mib']} MiB {of['with']} ({of['without']})" for of in row["refused_steps"])
        print(row["loop"] + ":", *refused, sep="  ")
    else:
        print(row["ordinary"], row["budget_bytes"] >> 20, "MiB", row["first_steps_seconds"])


if __name__ == "__main__":
    keep_rows("unforeseen", __doc__, [*LOOPS, *ORDINARY], measure, show)
