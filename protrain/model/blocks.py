"""Blocks: the repeated transformer layers of a model, the unit of activation modes.

A model's own marker (`_no_split_modules` of transformers) says which classes are layers; where there is none, or it names nothing
that repeats, repetition itself does. Either way blocks are children of one list, so they run one after the other, and no block
lies inside another.
"""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.nn.utils import parametrize


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _kind(module: nn.Module) -> type[nn.Module]:
    """A module's class; of a parametrized one, which has a class of its own, what it was before."""
    kind: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return kind


def _marked_classes(model: nn.Module) -> set[str]:
    """Names of the classes that the model, or a part of it, says must not be split."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def _repeated(container: nn.Module, marked: set[str] | None) -> list[tuple[str, nn.Module]]:
    """The children of the class that occurs most often among those that own parameters, where at least two are of it."""
    children, seen = [], set()
    for name, child in container.named_children():
        wanted = marked is None or _kind(child).__name__ in marked
        if id(child) not in seen and wanted and _owns_parameters(child):
            seen.add(id(child))
            children.append((name, child))
    counts = Counter(_kind(child) for _, child in children)
    if not counts or max(counts.values()) < 2:
        return []
    most = max(counts.values())
    chosen = next(_kind(child) for _, child in children if counts[_kind(child)] == most)
    return [(name, child) for name, child in children if _kind(child) is chosen]


def _collect(module: nn.Module, prefix: str, marked: set[str] | None, found: list[tuple[str, nn.Module]], seen: set[int]) -> None:
    """Outermost lists first, in model order; what lies inside a found block is not looked at."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        repeated = _repeated(module, marked)
        if repeated:
            taken = {id(child) for _, child in found}
            found.extend((f"{prefix}{name}", child) for name, child in repeated if id(child) not in taken)
            seen.update(id(inner) for _, child in repeated for inner in child.modules())
    for name, child in module.named_children():
        _collect(child, f"{prefix}{name}.", marked, found, seen)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the repeated layers of a model.

    Blocks are the parameter-owning children of one class, at least two, of an outermost `nn.ModuleList` or `nn.Sequential`.
    Classes that the model's `_no_split_modules` names are preferred where they repeat. Several lists (encoder, decoder) give
    several runs of blocks, one after the other in model order. A module is a block once, however often it is registered.

    Returns:
        (qualified name, module) of each block in model order; empty where nothing repeats.
    """
    for marked in (_marked_classes(model), None):
        found: list[tuple[str, nn.Module]] = []
        if marked is None or marked:
            _collect(model, "", marked, found, set())
        if found:
            return found
    return []
