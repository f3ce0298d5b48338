"""Folders of safetensors, written and read tensor by tensor.

One tensor at a time is in memory: names, shapes and types are known before, which is all that a shard's header needs.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .errors import DiskError, PlanError

SHARD_BYTES = 5 * 10**9

#: Types of tensors that a file holds, and their names there.
SAVED_TYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_OF_NAME = {name: dtype for dtype, name in SAVED_TYPES.items()}


class Entry(NamedTuple):
    """What is known of a tensor before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def entries(model: nn.Module) -> list[Entry]:
    """The tensors of a model's state dict in its order, a tied one once. The model's parameters may be on any device."""
    found: list[Entry] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):  # no state_dict: it would copy the whole model
        saved = {
            **module._parameters,
            **{name: module._buffers[name] for name in module._buffers if name not in module._non_persistent_buffers_set},
        }
        for name, tensor in saved.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found.append(Entry(f"{prefix}.{name}" if prefix else name, tuple(tensor.shape), tensor.dtype))
    return found


def write_tensors(
    folder: Path,
    expected: list[Entry],
    tensors: Iterable[tuple[str, torch.Tensor]],
    shard_bytes: int = SHARD_BYTES,
    stem: str = "model",
) -> int:
    """Write `tensors`, which must come as `expected` says, into one or more safetensors files whose names begin with `stem`.

    Args: folder, which exists; shard_bytes, the most a file's tensors take (a larger tensor has a file of its own).
    Returns the bytes of all tensors. Raises PlanError where a tensor is not the one expected.
    """
    shards: list[list[Entry]] = [[]]
    size_bytes = 0
    for entry in expected:
        if shards[-1] and size_bytes + entry.size_bytes > shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(entry)
        size_bytes += entry.size_bytes
    count = len(shards)
    names = (
        [f"{stem}.safetensors"]
        if count == 1
        else [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    )
    source = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, source)
    if (extra := next(source, None)) is not None:
        raise PlanError(f"the model gave one more tensor than it has: {extra[0]!r}; nothing was saved")
    total_bytes = sum(entry.size_bytes for entry in expected)
    if count > 1:
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard},
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total_bytes


def _write_shard(path: Path, shard: list[Entry], source: Iterator[tuple[str, torch.Tensor]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in shard:
        header[entry.name] = {
            "dtype": SAVED_TYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.size_bytes],
        }
        offset += entry.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in shard:
            name, tensor = next(source, ("nothing more", None))
            if tensor is None or Entry(name, tuple(tensor.shape), tensor.dtype) != entry:
                raise PlanError(
                    f"the model gave {name!r} where {entry.name!r} of shape {entry.shape} "
                    f"and type {entry.dtype} was due; nothing was saved"
                )
            flat = tensor.detach().contiguous().view(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


class TensorFile:
    """One safetensors file, read tensor by tensor or by rows of one. It is read, not mapped: mapped pages would count as memory
    of the process, all of the file's in the end."""

    def __init__(self, path: str) -> None:
        """Raises DiskError where the file cannot be read, PlanError where it is no whole safetensors file."""
        self.path = path
        self.entries: dict[str, Entry] = {}
        self._first: dict[str, int] = {}
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                (length,) = struct.unpack("<Q", file.read(8))
                header: dict[str, Any] = json.loads(file.read(length)) if length <= size - 8 else {}
                if not header:
                    raise ValueError("its header is not whole")
            for name, about in header.items():
                if name == "__metadata__":
                    continue
                begin, end = about["data_offsets"]
                entry = Entry(name, tuple(about["shape"]), _OF_NAME[about["dtype"]])
                if end - begin != entry.size_bytes or not 0 <= begin <= end <= size - 8 - length:
                    raise ValueError(f"tensor {name} is not whole")
                self.entries[name], self._first[name] = entry, 8 + length + begin
        except OSError as error:
            raise DiskError(f"{path} cannot be read: {error.strerror}", errno=error.errno or 0, filename=path) from None
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise PlanError(f"{path} is no whole safetensors file: {error}") from None

    def read(self, name: str, first: int = 0, rows: int | None = None) -> torch.Tensor:
        """A tensor of its own memory, or rows of it from `first` on.

        Raises:
            DiskError: the file ends too early, or cannot be read.
        """
        _, shape, dtype = self.entries[name]
        if shape and rows is not None:
            shape = (min(rows, shape[0] - first), *shape[1:])
        row_bytes = math.prod(self.entries[name].shape[1:]) * dtype.itemsize
        found = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self._first[name] + first * row_bytes)
                rest = memoryview(found.numpy().data)
                while rest:
                    count = file.readinto(rest)
                    if not count:
                        raise DiskError(f"{self.path} ends inside of tensor {name}", filename=self.path, asked_bytes=len(rest))
                    rest = rest[count:]
        except OSError as error:
            if isinstance(error, DiskError):
                raise
            raise DiskError(f"{self.path} cannot be read: {error.strerror}", errno=error.errno or 0, filename=self.path) from None
        return found.view(dtype).view(shape)


#: What is told while files are written: bytes that are done, bytes in all.
Progress = Callable[[int, int], Any]


class Told:
    """Passes tensors on to be written, and tells of each when the next one is asked for."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self._progress, self._total_bytes, self._done_bytes = progress, total_bytes, 0

    def through(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            size_bytes = tensor.nbytes
            yield name, tensor
            del tensor
            self._done_bytes += size_bytes
            self._progress(self._done_bytes, self._total_bytes)
