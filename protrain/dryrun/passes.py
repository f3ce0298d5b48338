"""What a dry run (dryrun.py) and a rehearsal (rehearsal.py) share of the way through a model and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..model import keycaches, randomness
from ..model.held import tensors_held
from ..model.modulestate import Beginning, objects_as_now


def starts_of(output: Any) -> list[torch.Tensor]:
    """What backward starts from: the loss where there is one, or several, which are added up then; else every float output that
    requires a gradient. A single number behind other outputs is the loss where it is made of them."""

    def is_loss(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad

    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if is_loss(loss):
        return [loss]  # type: ignore[list-item]
    first = output
    if isinstance(output, dict) and output:
        first = next(iter(output.values()))
    elif isinstance(output, (tuple, list)) and output:
        first = output[0]
    leaves = [leaf for leaf in output_tensors(output) if leaf.requires_grad and leaf.is_floating_point()]
    losses = [leaf for leaf in leaves if is_loss(leaf)]
    return losses if is_loss(first) or (losses and _made_of(losses, leaves)) else leaves


def _made_of(losses: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether all the outputs are among what the losses were computed from."""
    wanted = {output.grad_fn for output in outputs}
    seen = {loss.grad_fn for loss in losses}
    queue = deque(seen)
    while queue and not wanted <= seen:
        for node, _ in getattr(queue.popleft(), "next_functions", ()):
            if node is not None and node not in seen:
                seen.add(node)
                queue.append(node)
    return wanted <= seen


def output_tensors(output: Any) -> list[torch.Tensor]:
    return [tensor for leaf in tree_flatten(output)[0] for tensor in tensors_held(leaf)]


def watch_backward(
    outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], begins: Callable[[], None], ends: Callable[[], None]
) -> None:
    """Of a module that was just called: `begins` is called once, when the first gradient of its outputs comes in backward, `ends`
    when that of its first input has come."""
    began = False

    def first(_: torch.Tensor) -> None:
        nonlocal began
        if not began:
            began = True
            begins()

    for tensor in outputs:
        if tensor.requires_grad:
            tensor.register_hook(first)
    given = next((t for t in inputs if t.requires_grad), None)
    if given is not None:
        given.register_hook(lambda _: ends())


def put_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """The module's forward is another one. Returns what undoes it."""
    replaced = module.__dict__.get("forward")
    module.__dict__["forward"] = forward

    def undo() -> None:
        if replaced is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = replaced

    return undo


def as_given(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The forward, to be run with these arguments, and then again: lists, dicts, sets, caches of keys and objects among them,
    which it may change, are as they were."""
    leaves, spec = tree_flatten((args, kwargs))
    leaves, caches = keycaches.copied(leaves)
    leaves, objects = objects_as_now(leaves)
    if not caches and not objects and not any(isinstance(value, list | dict | set) for value in (*args, *kwargs.values())):
        return forward
    runs = iter((False, True))

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(runs, True):
            args, kwargs = tree_unflatten(leaves, spec)
        return forward(*args, **kwargs)

    return run


def as_begun(forward: Callable[..., Any], beginning: Beginning) -> Callable[..., Any]:
    """The forward, to be run and then again: the second time its block is as the first one found it, and draws the same random
    numbers from generators outside of torch."""
    runs = iter((False, True))
    drawn: randomness.States = (None, None)

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal drawn
        if not next(runs, True):
            before = randomness.now()
            result = forward(*args, **kwargs)
            drawn = randomness.drawn_since(before)
            return result
        with beginning.restored(), randomness.kept(drawn):
            return forward(*args, **kwargs)

    return run
