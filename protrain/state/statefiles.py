"""State of optimizers without a kernel, and what modules give by get_extra_state, in checkpoints: tensors in safetensors, all
else as JSON.

A tree of containers, tensors and plain values becomes JSON in which a tensor is its name in the files. Nothing is a pickle, so
what is neither a container, a tensor nor a plain value cannot be written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn

from ..base.counting import uncounted
from ..base.reading import shown
from ..errors import PlanError
from ..model.strides import contiguous_strides
from ..optim.parking import Tree, is_plain, tensors_of
from .tensorfiles import SAVED_TYPES, Entry

if TYPE_CHECKING:
    from ..session import Session


#: Numbers of NumPy, which stand in groups where a schedule is computed with it: what is computed with them rounds otherwise.
_NUMPY: dict[str, Any] = {
    numpy.dtype(kind).name: numpy.dtype(kind).type
    for kind in ("bool", "f2", "f4", "f8", *(f"{sign}{n}" for sign in "iu" for n in (1, 2, 4, 8)))
}


def _name(path: tuple[str, ...], owner: str) -> str:
    return ".".join((*path, owner))


def _encode(tree: Tree, owner: str, names: dict[int, str], path: tuple[str, ...] = (), whose: str = "optimizer") -> Any:
    """The tree as JSON values; `names` gets the name of each tensor, by id: its path in the tree, then the owner. whose
    tree it is stands in errors.

    Raises:
        PlanError: something in it can be written neither as a tensor nor as JSON.
    """
    name = _name(path, owner)
    if isinstance(tree, torch.Tensor):
        if not is_plain(tree) or tree.dtype not in SAVED_TYPES:
            raise PlanError(f"{whose}: its {name} is a {type(tree).__name__} of {tree.dtype}, which cannot be saved")
        value: dict[str, Any] = {"tensor": names.setdefault(id(tree), name)}
        return value if tree.stride() == contiguous_strides(tree.shape) else value | {"stride": list(tree.stride())}
    if isinstance(tree, dict):
        for key in tree:
            if key is not None and type(key) not in (bool, int, str):
                raise PlanError(f"{whose}: a key of its {name} is a {type(key).__name__}, which cannot be saved")
        return {"dict": [[key, _encode(item, owner, names, (*path, str(key)), whose)] for key, item in tree.items()]}
    if type(tree) in (list, tuple):
        items = [_encode(item, owner, names, (*path, str(place)), whose) for place, item in enumerate(tree)]
        return {type(tree).__name__: items}
    if isinstance(tree, numpy.generic) and tree.dtype.name in _NUMPY:
        return {"numpy": [tree.dtype.name, repr(tree.item())]}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"float": repr(tree)}
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    raise PlanError(f"{whose}: its {name} is a {type(tree).__name__}, which cannot be saved")


def _decode(value: Any, tensor: Callable[[str], Any], made: dict[Any, Any] | None = None) -> Tree:
    """The tree that `_encode` wrote; `tensor` gives that of a name. made: tensors with strides of their own, by name and these.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    if not isinstance(value, dict):
        return value
    made = {} if made is None else made
    if "tensor" in value:
        found = tensor(value["tensor"])
        if "stride" not in value:
            return found
        _check_stride(value["stride"], found)
        key = value["tensor"], tuple(value["stride"])
        if key not in made:
            made[key] = torch.empty_strided(found.shape, value["stride"], dtype=found.dtype, device=found.device).copy_(found)
        return made[key]
    ((kind, content),) = value.items()
    if kind == "dict":
        return {key: _decode(item, tensor, made) for key, item in content}
    if kind == "float":
        return float(content)
    if kind == "numpy":
        name, text = content
        return _NUMPY[name](text == "True" if name == "bool" else int(text) if "int" in name else float(text))
    return {"list": list, "tuple": tuple}[kind](_decode(item, tensor, made) for item in content)


def _check_stride(stride: Any, tensor: torch.Tensor) -> None:
    """Raises ValueError where a tensor of this stride would take more memory than it has elements."""
    if not isinstance(stride, list) or len(stride) != tensor.dim() or not all(type(step) is int and step >= 0 for step in stride):
        raise ValueError("a stride is no list of whole numbers, one for each dimension")
    if tensor.numel() and sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True)) >= tensor.numel():
        raise ValueError("a stride reaches further than its tensor has elements")


def _check_dict(tree: Tree) -> None:
    """Raises ValueError where it is no dict, as a group and the state of a parameter are."""
    if not isinstance(tree, dict):
        raise ValueError("a group, or the state of a parameter, is no dict")


def _read(value: Any, tensor: Callable[[str], torch.Tensor]) -> Tree:
    """As `_decode`, in no budget; one tensor that stood in two places stands in both again."""
    with uncounted():
        return _decode(value, functools.cache(tensor))


def states_of(session: Session) -> tuple[dict[str, Any], list[Entry], Iterator[tuple[str, torch.Tensor]]]:
    """What there is to write of a session whose optimizer has no kernel: JSON values; its tensors before they are there; and the
    tensors, one parameter's after another's.

    Raises:
        PlanError: something of it cannot be written.
    """
    foreign = session.foreign
    assert foreign is not None
    names: dict[int, str] = {}
    states = foreign.described()
    shared = {"param_groups": foreign.values_of_groups(), "loose": foreign.loose}
    params = {session.layout.entries[number].name: tree for number, tree in states.items()}
    found = {"params": {owner: _encode(tree, owner, names) for owner, tree in params.items()}}
    found |= {owner: _encode(tree, owner, names) for owner, tree in shared.items()}
    expected = [
        Entry(names[id(tensor)], tuple(tensor.shape), tensor.dtype)
        for tree in (*params.values(), *shared.values())
        for tensor in tensors_of(tree)
    ]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        left = iter(expected)
        for number in states:
            for tensor in tensors_of(foreign.copy(number)):
                yield next(left).name, tensor
        for tree in shared.values():
            for tensor in tensors_of(tree):
                yield next(left).name, tensor

    return found, expected, tensors()


def check_states(
    session: Session, saved: Any, shape: Callable[[str], tuple[int, ...] | None], tensor: Callable[[str], torch.Tensor]
) -> Callable[[], None]:
    """Check what `states_of` gave, as it was read; what is returned brings it into the session.

    Args: shape and tensor: of a name in the files; None where they have none.

    Raises:
        PlanError: it is of another model or optimizer, or a tensor is missing.
    """
    foreign = session.foreign
    assert foreign is not None
    numbers = {session.layout.entries[number].name: number for number in foreign.numbers()}

    def look(name: str) -> torch.Tensor:
        if not isinstance(name, str) or (found := shape(name)) is None:
            raise PlanError(f"checkpoint: tensor {shown(name)} of the optimizer is missing")
        return torch.empty(found, device="meta")

    try:
        for owner, value in saved["params"].items():
            if owner not in numbers:
                raise PlanError(f"checkpoint: the optimizer has no parameter {shown(owner)}")
            _check_dict(_decode(value, look))
        groups = _decode(saved["param_groups"], look)
        if not isinstance(groups, list):
            raise ValueError("its groups are no list")
        for group in groups:
            _check_dict(group)
        _check_dict(_decode(saved["loose"], look))
    except PlanError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise PlanError(f"checkpoint: its optimizer state is none that this version writes: {shown(str(error))}") from error
    if len(groups) != len(foreign.values_of_groups()):
        raise PlanError(f"checkpoint: its optimizer has {len(groups)} groups, this one {len(foreign.values_of_groups())}")

    def bring() -> None:
        foreign.put((numbers[owner], _read(value, tensor)) for owner, value in saved["params"].items())
        foreign.set_shared(_read(saved["param_groups"], tensor), _read(saved["loose"], tensor))

    return bring


# ---- what modules give by get_extra_state ----


def _with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the name that torch's state dict has for what they give."""
    own: Any = nn.Module.get_extra_state
    return {
        f"{prefix}._extra_state" if prefix else "_extra_state": module
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not own
    }


def extra_states_of(model: nn.Module) -> tuple[dict[str, Any], list[Entry], list[tuple[str, torch.Tensor]]]:
    """What there is to write of it: JSON values, and its tensors, which are the modules' own.

    Raises:
        PlanError: something of it cannot be written.
    """
    names: dict[int, str] = {}
    trees = {name: module.get_extra_state() for name, module in _with_extra_state(model).items()}
    found = {name: _encode(tree, name, names, whose="model") for name, tree in trees.items()}
    tensors = {id(tensor): tensor for tree in trees.values() for tensor in tensors_of(tree)}
    named = [(name, tensors[key]) for key, name in names.items()]
    return found, [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named], named


def check_extra_states(
    model: nn.Module, saved: Any, shape: Callable[[str], tuple[int, ...] | None], tensor: Callable[[str], torch.Tensor]
) -> Callable[[], None]:
    """Check what `extra_states_of` gave, as it was read; what is returned gives it to the modules. Arguments as `check_states`.

    Raises:
        PlanError: it is of another model, or a tensor is missing.
    """
    modules = _with_extra_state(model)

    def look(name: str) -> torch.Tensor:
        if not isinstance(name, str) or (found := shape(name)) is None:
            raise ValueError(f"tensor {shown(name)} is missing")
        return torch.empty(found, device="meta")

    try:
        if saved.keys() != modules.keys():
            raise ValueError(f"it has {shown(', '.join(saved))}, this model {shown(', '.join(modules))}")
        for value in saved.values():
            _decode(value, look)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise PlanError(f"checkpoint: what modules give by get_extra_state is not this model's: {shown(str(error))}") from error

    def bring() -> None:
        for name, value in saved.items():
            modules[name].set_extra_state(_read(value, tensor))

    return bring
