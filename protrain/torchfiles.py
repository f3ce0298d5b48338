"""Files as `torch.save` writes them, filled tensor by tensor: what torch.load reads, without all of it in memory at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from torch.utils._pytree import tree_map_only

from .counting import uncounted
from .errors import DiskError

Value = Callable[[], torch.Tensor]


class Described(torch.Tensor):
    """Stands for a tensor that is made when it is written."""

    _value: Value


def described(shape: tuple[int, ...], value: Value) -> torch.Tensor:
    """A float32 tensor of `shape` that `save` asks `value` for when its turn has come."""
    with uncounted():
        stand_in = torch.empty(1).expand(shape).as_subclass(Described)
    stand_in._value = value
    return stand_in


def save(content: Any, path: str) -> None:
    """Write `content`, whose tensors may be `described`, to a file that torch.load reads; it takes its name when it is whole.

    Raises:
        DiskError: the file cannot be written; what was there before is still there.
    """
    sources: list[Value] = []
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        sources.append(tensor._value if isinstance(tensor, Described) else lambda: tensor.detach().contiguous())
        with mode:
            return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)

    partial = f"{path}.{os.getpid()}.partial"
    try:
        try:
            with uncounted():
                # Each tensor has a storage of its own, so records are numbered as tensors come.
                with skip_data(materialize_fake_tensors=True):
                    torch.save(tree_map_only(torch.Tensor, fake, content), partial)
                _fill(partial, sources)
            os.replace(partial, path)
        finally:
            if os.path.exists(partial):
                os.unlink(partial)
    except (OSError, RuntimeError) as error:
        if isinstance(error, DiskError):
            raise
        code = getattr(error, "errno", None) or 0
        raise DiskError(f"writing {path} failed: {error}", errno=code, filename=path) from error


def _fill(path: str, sources: list[Value]) -> None:
    reader: Any = torch._C.PyTorchFileReader(path)
    places = [int(reader.get_record_offset(f"data/{number}")) for number in range(len(sources))]
    del reader
    with open(path, "r+b") as file:
        for place, source in zip(places, sources, strict=True):
            flat = source().view(-1)
            if flat.numel():
                file.seek(place)
                file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
