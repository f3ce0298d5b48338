"""Training twice, in plain torch and wrapped, and comparing every bit: what the exactness tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import protrain

MIB = 1 << 20


def adamw(model: torch.nn.Module, **changes: Any) -> torch.optim.Optimizer:
    """The reference optimizer: torch's fused AdamW."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "weight_decay": 0.1, "fused": True, **changes})


def adafactor(model: torch.nn.Module) -> torch.optim.Optimizer:
    """One without a kernel."""
    return torch.optim.Adafactor(model.parameters())


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model's own loss of one batch."""
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@dataclass
class Trained:
    """What a run left: figures in order, copies of all state, the random state."""

    figures: list[Any] = field(default_factory=list)
    tensors: dict[str, bytes] = field(default_factory=dict)
    random_state: bytes = b""
    status: protrain.Status | None = None


Loop = Callable[[torch.nn.Module, torch.optim.Optimizer, bool], list[Any]]


def run(make: Callable[[], Any], loop: Loop, optimizer: Callable[..., Any] = adamw, **options: Any) -> Trained:
    """Train make()'s model by loop(model, optimizer, plain): wrapped where there are options, else in plain torch."""
    model = make()
    made = optimizer(model)
    torch.manual_seed(11)
    seen = Trained()
    if options:
        model, made = protrain.wrap(model, made, **options)
    try:
        seen.figures = loop(model, made, not options)
        seen.random_state = bits(torch.get_rng_state())
        seen.tensors = {name: bits_and_strides(value) for name, value in model.state_dict().items()}
        for index, entries in made.state_dict()["state"].items():
            for key, value in entries.items():
                for place, leaf in enumerate(tree_leaves(value)):
                    if leaf is not None:
                        seen.tensors[f"{index}.{key}.{place}"] = _bits_or_repr(leaf)
        if options:
            seen.status = protrain.status(model)
    finally:
        if options:
            protrain.unwrap(model)
    return seen


def _bits_or_repr(leaf: Any) -> bytes:
    return bits_and_strides(leaf.float()) if isinstance(leaf, torch.Tensor) else repr(leaf).encode()


def bits_and_strides(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, in the order of its elements, and how it lies."""
    return repr(tensor.stride()).encode() + bits(tensor)


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, in Python's memory: what a test keeps must not count in a budget."""
    return tensor.detach().contiguous().numpy().tobytes()


def assert_equal(got: Trained, want: Trained, budget: int) -> protrain.Status:
    """The wrapped run gave what the plain one gave, inside its budget."""
    differing = [(n, a, b) for n, (a, b) in enumerate(zip(got.figures, want.figures, strict=True)) if a != b]
    assert not differing, f"figures (number, wrapped, plain) {differing[:3]} of {len(want.figures)}"
    assert list(got.tensors) == list(want.tensors)
    wrong = [name for name in want.tensors if got.tensors[name] != want.tensors[name]]
    assert not wrong, f"{len(wrong)} of {len(want.tensors)} tensors differ: {wrong[:3]}"
    assert got.random_state == want.random_state
    assert got.status is not None
    assert 0 < got.status.peak_memory_bytes <= budget
    return got.status


def fit(batches: list[torch.Tensor], accumulate: int = 1, clip: float | None = None) -> Loop:
    """The ordinary loop; figures are losses, and norms where gradients are clipped."""

    def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer, plain: bool) -> list[Any]:
        figures: list[Any] = []
        for number, ids in enumerate(batches):
            loss = loss_of(model, ids)
            (loss / accumulate).backward()
            figures.append(loss.item())
            if (number + 1) % accumulate:
                continue
            if clip and plain:
                figures.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            if clip and not plain:
                figures.append(float(optimizer.grad_norm))  # type: ignore[attr-defined]
            optimizer.zero_grad()
        return figures

    return loop
