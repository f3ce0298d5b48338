"""Compiled modules: a block, or any other part of a model, that `module.compile()` was called on before `wrap`.

Dynamo looks at the class of each parameter, and what it compiled reads memory without a call that anybody sees. So a compiled
module runs as one operation that takes all of its parameters: their chunks are brought and stay in place, and those on disk are
plain parameters, until it returns (running.py). Hooks, modes and recomputation stand around it and are never compiled. In
backward it is one node of the graph, or a few, which ask for what they saved as others do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import PlanError

#: Where torch keeps what `module.compile()` made: in the module's `__dict__`, called in place of its forward and hooks.
CALL = "_compiled_call_impl"

_IN_PLACE = "compile the model's blocks in place: for block in blocks: block.compile()"


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, CALL, None) is not None


def _paths(module: nn.Module, name: str, inside: bool) -> Iterator[tuple[str, nn.Module, bool]]:
    """Each module as often as it is registered: its name, and whether it is inside of a compiled one."""
    yield name, module, inside
    inside = inside or is_compiled(module)
    for leaf, child in module._modules.items():
        if child is not None:
            yield from _paths(child, f"{name}.{leaf}" if name else leaf, inside)


def find_compiled(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the compiled modules of a model that are not inside of another one, each once."""
    outermost = ((name, module) for name, module, inside in _paths(model, "", False) if is_compiled(module) and not inside)
    return list({id(module): (name, module) for name, module in outermost}.values())


def check_compiled(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], separate: bool = False) -> None:
    """Whether what is compiled in the model can be trained. separate: over a device.

    Raises:
        PlanError: the whole model is compiled, or a part with blocks in it, or not in place, or with options that keep parameters
            or memory where they are not seen; it is named.
    """
    for name, module, _ in _paths(model, "", False):
        if type(module).__name__ == "OptimizedModule":
            raise PlanError(f"model: {name or 'it'} is what torch.compile(module) returned; {_IN_PLACE}")
        if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
            raise PlanError(f"model: the forward of {name or 'it'} was replaced by a compiled one; {_IN_PLACE}")
    if is_compiled(model):
        raise PlanError(f"model: it is compiled as a whole, which would need all of its parameters at once; {_IN_PLACE}")
    found = find_compiled(model)
    for name, module in found:
        config = getattr(module.__dict__[CALL], "get_compiler_config", lambda: None)()
        if isinstance(config, dict) and config.get("freezing"):
            raise PlanError(f"model: {name} is compiled with freezing, which keeps parameters as constants: compile it without")
        if separate and isinstance(config, dict) and config.get("triton.cudagraphs"):
            raise PlanError(f"model: {name} is compiled to CUDA graphs, whose memory is not counted: compile it without them")
        own = {id(inner) for inner in module.modules()} - {id(module)}
        block = next((block for block, inner in blocks if id(inner) in own), None)
        if block is not None:
            raise PlanError(f"model: {name} is compiled with blocks in it, {block} among them; {_IN_PLACE}")
    outermost = {id(module) for _, module in found}
    for name, module, inside in _paths(model, "", False):
        if inside and id(module) in outermost:
            raise PlanError(
                f"model: {name} is compiled, and a part both of a compiled module and of one that is not: compile both"
            )


def frozen() -> bool:
    """Whether inductor makes constants of parameters where no gradient is asked for."""
    return bool(getattr(sys.modules.get("torch._inductor.config"), "freezing", False))


def has_compiled(module: nn.Module) -> bool:
    """Whether it, or a part of it, is compiled."""
    return any(map(is_compiled, module.modules()))


def grad_fns(values: Any) -> set[Any]:
    """The nodes of autograd's graph that the tensors in plain containers come from."""
    return {leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)} - {None}


def functions_behind(result: Any, ends: set[Any]) -> list[Any]:
    """Nodes of `torch.autograd.Function`s that a module's result comes from, in one order; ends: what its inputs came from. What
    is compiled is one of these, and its class is made with the code."""
    seen = set(ends)
    found: list[Any] = []
    ahead = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.append(node)
        ahead.extend(before for before, _ in node.next_functions)
    return found


@functools.cache
def keep_out() -> None:
    """Dynamo compiles no function of protrain: where one is called from what is compiled, the graph ends before it."""
    from torch._dynamo import trace_rules

    trace_rules.add("protrain")


@contextmanager
def eager() -> Iterator[None]:
    """What was compiled runs as if it were not."""
    with torch.compiler.set_stance("force_eager"):  # type: ignore[no-untyped-call]
        yield
