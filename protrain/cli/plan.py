"""`protrain plan`: what a training of these words would look like, without training."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING

from protrain.cli.words import CommandError, size_text

if TYPE_CHECKING:
    from protrain.cli.train import Words


def run(words: Words) -> None:
    """Plan and print. The plan depends on shapes alone: the model stays on meta and the tokens are arbitrary."""
    from protrain.cli.train import fields_of, prepare

    setup = prepare(words)
    if words.precision != "fp32":
        raise CommandError(f"--precision {words.precision}: only fp32 can be planned yet; leave the option out")
    import torch

    import protrain
    from protrain.cli.model import build

    model = build(copy.deepcopy(setup.config))
    ids = torch.zeros((words.batch, setup.seq), dtype=torch.long)
    plan = protrain.plan(
        model,
        {"input_ids": ids, "labels": ids, "use_cache": False},
        memory=words.memory,
        accumulate=words.accumulate,
        max_grad_norm=words.max_grad_norm,
    )
    if words.as_json:
        print(json.dumps(fields_of(plan)))
        return
    parameters = sum(parameter.numel() for parameter in model.parameters())
    budget = "what is free now" if words.memory is None else size_text(words.memory)
    print(
        f"{words.model_name}: {parameters:,} parameters, {size_text(16 * parameters)} of states, "
        f"batch {words.batch} x {setup.seq} tokens, "
        f"budget {budget}"
    )
    text = plan.explain()
    print(text if isinstance(text, str) else "\n".join(text))
