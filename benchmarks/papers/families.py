"""GPT-2 in the sizes that papers use, and the largest of a family for which there is a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from protrain.errors import BudgetError
from protrain.planner.hardware import Hardware
from protrain.planner.offline import plan_offline
from protrain.planner.plans import Plan

_VOCABULARY = 50257


def gpt2_config(hidden: int, layers: int, seq: int = 1024) -> Any:
    """The config of a GPT-2 of these sizes: heads of 64 below a hidden size of 4096, else of 128; GPT-2's own vocabulary, tied
    embeddings, no dropout."""
    from transformers import GPT2Config

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    heads = hidden // (128 if hidden >= 4096 else 64)
    return GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=heads, n_positions=seq, vocab_size=_VOCABULARY, use_cache=False, **none
    )


def gpt2_parameters(hidden: int, layers: int, seq: int = 1024) -> int:
    """How many parameters `gpt2_config` has: 12 h^2 + 13 h in each layer, the embeddings, the last norm."""
    return layers * (12 * hidden * hidden + 13 * hidden) + (_VOCABULARY + seq + 2) * hidden


def most_layers(config_of: Callable[[int], Any], hardware: Hardware | str | Path, **arguments: Any) -> tuple[int, Plan] | None:
    """The most layers of a family for which a plan exists, with that plan; None where one layer has none.

    Args:
        config_of: layers -> a model or config; more layers never need less.
        arguments: of `plan_offline`.
    """

    def plan(layers: int) -> Plan | None:
        try:
            return plan_offline(config_of(layers), hardware, **arguments)
        except BudgetError:
            return None

    works, best, fails = 0, None, 1
    while (found := plan(fails)) is not None:
        works, best, fails = fails, found, 2 * fails
    while fails - works > 1:
        middle = (works + fails) // 2
        found = plan(middle)
        if found is None:
            fails = middle
        else:
            works, best = middle, found
    return None if best is None else (works, best)
