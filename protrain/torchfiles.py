"""Files as `torch.save` writes them, written and read tensor by tensor: what is in them is never in memory at once.

Writing lays the file out with tensors that have no memory, then fills in each tensor's bytes; torch.load reads the file as any
other. Reading is the reverse: torch.load says where each tensor lies, and its bytes are read when it is asked for. Nothing is
mapped, since what is mapped and touched is in memory too.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from torch.utils._pytree import tree_map_only

from .counting import uncounted
from .errors import DiskError, PlanError
from .replacing import replaced_file
from .strides import Strides, dense_strides, laid

Value = Callable[[], torch.Tensor]


class Described(torch.Tensor):
    """Stands for a tensor that is made when it is written."""

    _value: Value
    _strides: Strides


def described(shape: tuple[int, ...], strides: Strides, value: Value) -> torch.Tensor:
    """A float32 tensor of `shape` and dense `strides` that `save` asks `value` for when its turn has come."""
    with uncounted():
        stand_in = torch.empty(1, device="cpu").expand(shape).as_subclass(Described)
    stand_in._value, stand_in._strides = value, strides
    return stand_in


def save(content: Any, path: str) -> None:
    """Write `content`, whose tensors may be `described`, to a file that torch.load reads; it takes its name when it is whole.

    Raises:
        DiskError: the file cannot be written; what was there before is still there.
    """
    sources: list[Value] = []
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Described):
            strides, value = tensor._strides, tensor._value
        else:
            strides, value = dense_strides(tensor), tensor.detach
        sources.append(lambda: laid(value(), strides).as_strided((tensor.numel(),), (1,)))
        with mode:
            return torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype, device="cpu")

    try:
        with replaced_file(path) as partial, uncounted():
            # Each tensor, dense with its own strides, has a storage of its own, so records are numbered as tensors come.
            with skip_data(materialize_fake_tensors=True):
                torch.save(tree_map_only(torch.Tensor, fake, content), partial)
            _fill(partial, sources)
    except (OSError, RuntimeError) as error:
        if isinstance(error, DiskError):
            raise
        code = getattr(error, "errno", None) or 0
        raise DiskError(f"writing {path} failed: {error}", errno=code, filename=path) from error


class OnDemand(dict[Any, Any]):
    """A dict of tensors, each of them read anew whenever it is asked for."""

    def __init__(self, path: str, content: dict[Any, Any]) -> None:
        super().__init__(content)
        self._path = path

    def __getitem__(self, key: Any) -> Any:
        return _read(self._path, super().__getitem__(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """As dict's."""
        if key not in self:
            return default
        return self[key]

    def items(self) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
        """As dict's, one value at a time."""
        return ((key, self[key]) for key in self)

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        """As dict's, one value at a time."""
        return (self[key] for key in self)


def load_optimizer(path: str) -> dict[str, Any]:
    """An optimizer's state dict from a file that torch.save or `save` wrote; each parameter's state is `OnDemand`.

    Raises:
        PlanError: the file holds something else, or more than tensors and plain values: nothing of it is run.
    """
    try:
        with FakeTensorMode():
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(found["state"], dict) or not all(isinstance(group, dict) for group in found["param_groups"]):
            raise ValueError("it has no state, or no groups")
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise PlanError(f"{path} holds no state of an optimizer: {why}") from error
    groups = [
        {key: tree_map_only(torch.Tensor, lambda t: _read(path, t), value) for key, value in g.items()}
        for g in found["param_groups"]
    ]
    return {"state": {number: OnDemand(path, entry) for number, entry in found["state"].items()}, "param_groups": groups}


def _read(path: str, tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    storage: Any = tensor.untyped_storage()
    with uncounted():
        count = storage.nbytes()
        with open(path, "rb") as file:
            begin, size = storage._checkpoint_offset, os.fstat(file.fileno()).st_size
            if begin + count > size:  # known before there is memory for it
                raise DiskError(f"{path} ends within a tensor of {count} bytes", filename=path, asked_bytes=count)
            file.seek(begin)
            whole = torch.empty(count, dtype=torch.uint8, device="cpu")
            if file.readinto(whole.numpy().data) != count:
                raise DiskError(f"{path} ends within a tensor of {count} bytes", filename=path, asked_bytes=count)
        return whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _fill(path: str, sources: list[Value]) -> None:
    reader: Any = torch._C.PyTorchFileReader(path)
    places = [int(reader.get_record_offset(f"data/{number}")) for number in range(len(sources))]
    del reader
    with open(path, "r+b") as file:
        for place, source in zip(places, sources, strict=True):
            flat = source()
            if flat.numel():
                file.seek(place)
                file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
