"""Models in training whose single steps take turns in one process, and the file that keeps what they took."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

import protrain


def gpt2(hidden: int, layers: int) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=hidden // 64, vocab_size=1024, use_cache=False, resid_pdrop=0, attn_pdrop=0,
            embd_pdrop=0, bos_token_id=0, eos_token_id=0,
        )
    ).train()  # fmt: skip


class Run:
    """A model in training, at a budget, with the blocks' modes as given or as the planner takes them."""

    def __init__(self, make: Any, memory: int, modes: list[str] | None) -> None:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.model, self.optimizer = protrain.wrap(model, optimizer, memory=memory, block_modes=modes)
        self.seconds: list[float] = []
        self.losses: list[torch.Tensor] = []

    def step(self, ids: torch.Tensor) -> None:
        begin = time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.detach())


def show(row: dict[str, Any]) -> None:
    print(*(f"{key} {value}" for key, value in row.items()), sep="; ", flush=True)


def keep_rows(
    name: str, about: str | None, models: Iterable[str], measure: Callable[[str], dict[str, Any]], show: Callable[[Any], None]
) -> None:
    """The command line of benchmarks/`name`.py: measure each model, show its row, and write all rows where --out says."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for model in models:
        rows.append(measure(model))
        show(rows[-1])
    if given.out:
        command = f"python -m benchmarks.{name} --out benchmarks/results/{name}.json"
        found = {"command": command, "threads": torch.get_num_threads(), "models": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n")
