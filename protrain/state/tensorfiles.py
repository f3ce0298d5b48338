"""Folders of safetensors, written and read tensor by tensor.

One tensor at a time is in memory: names, shapes and types are known before, which is all that a shard's header needs, but for
checksums. These, a CRC-32C for each tensor, stand in its `__metadata__`, where other tools overlook them; their places are kept
free until all bytes have passed. A file without them, as other tools write it, is read unchecked.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _core
from ..base.reading import open_file, parse, shown
from ..errors import DiskError, PlanError
from ..model.held import persistent_buffers

SHARD_BYTES = 5 * 10**9
SLICE_BYTES = 4 << 20
PIECE_BYTES = 1 << 20  # read or written at once, and summed while the nearer caches have it
MOST_HEADER_BYTES = 100 * 10**6  # as the format has it
MOST_DIMENSIONS = 64  # torch's limit

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
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}
_OF_NAME = {name: dtype for dtype, name in SAVED_TYPES.items()}
#: In `__metadata__`, whose values are text: a JSON object of each tensor's checksum, eight hexadecimal digits.
SUMS = "protrain.crc32c"


class Entry(NamedTuple):
    """What is known of a tensor before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def first_sum(self) -> int:
        """What the checksum of the tensor's bytes goes on from: that of its description, which must be the one written too."""
        return _core.checksum(json.dumps([self.name, SAVED_TYPES[self.dtype], *self.shape]).encode())


def entries(model: nn.Module) -> list[Entry]:
    """The tensors of a model's state dict in its order, a tied one once. The model's parameters may be on any device.

    Raises:
        PlanError: one is of a type or a layout that no file holds.
    """
    found: list[Entry] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):  # no state_dict: it would copy the whole model
        for name, tensor in {**module._parameters, **persistent_buffers(module)}.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                path = f"{prefix}.{name}" if prefix else name
                if tensor.dtype not in SAVED_TYPES or tensor.layout != torch.strided:
                    raise PlanError(f"model: {path} is a {tensor.layout} tensor of {tensor.dtype}, which cannot be saved")
                found.append(Entry(path, tuple(tensor.shape), tensor.dtype))
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


def _header(shard: list[Entry], sums: list[int]) -> bytes:
    """As long whatever the sums are."""
    texts = {entry.name: f"{value:08x}" for entry, value in zip(shard, sums, strict=True)}
    header: dict[str, object] = {"__metadata__": {"format": "pt", SUMS: json.dumps(texts, separators=(",", ":"))}}
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
    return struct.pack("<Q", len(text)) + text


def _write_shard(path: Path, shard: list[Entry], source: Iterator[tuple[str, torch.Tensor]]) -> None:
    sums = [0] * len(shard)
    with open(path, "wb") as file:
        file.write(_header(shard, sums))
        for place, entry in enumerate(shard):
            name, tensor = next(source, ("nothing more", None))
            if tensor is None or Entry(name, tuple(tensor.shape), tensor.dtype) != entry:
                raise PlanError(
                    f"the model gave {name!r} where {entry.name!r} of shape {entry.shape} "
                    f"and type {entry.dtype} was due; nothing was saved"
                )
            sums[place] = entry.first_sum
            for part in _in_order(tensor.detach().resolve_conj().resolve_neg()):
                for piece in pieces(part.view(torch.uint8).numpy().data):
                    sums[place] = _core.checksum(piece, sums[place])
                    file.write(piece)
        file.seek(0)
        file.write(_header(shard, sums))
        file.flush()
        os.fsync(file.fileno())


def pieces(memory: memoryview) -> Iterator[memoryview]:
    """All of it, no more than PIECE_BYTES at a time."""
    return (memory[begin : begin + PIECE_BYTES] for begin in range(0, len(memory), PIECE_BYTES))


def _in_order(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements row after row, in flat parts; of a tensor that lies otherwise no more than a part is copied at once."""
    if tensor.is_contiguous() or tensor.dim() < 2:
        parts: Iterable[torch.Tensor] = (tensor,)
    else:
        parts = tensor.split(max(SLICE_BYTES * tensor.shape[0] // max(tensor.nbytes, 1), 1))
    for part in parts:
        if part.numel():
            yield part.contiguous().view(-1)


def _described(name: str, about: Any) -> tuple[tuple[int, ...], torch.dtype, int, int]:
    """Shape, type, begin and end of a tensor, of its entry in a header. Raises ValueError."""
    if not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {shown(name)} is not described as the format has it")
    shape, offsets, dtype = about["shape"], about["data_offsets"], about["dtype"]
    if not isinstance(dtype, str) or dtype not in _OF_NAME:
        raise ValueError(f"tensor {shown(name)} is of type {shown(dtype)}; known are {', '.join(_OF_NAME)}")
    if not _sizes(shape) or len(shape) > MOST_DIMENSIONS or not _sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {shown(name)} is not described as the format has it")
    if math.prod(max(size, 1) for size in shape) >= 1 << 63:  # of no elements, and yet its strides are no numbers of torch's
        raise ValueError(f"tensor {shown(name)} has a shape that no tensor can have")
    return tuple(shape), _OF_NAME[dtype], offsets[0], offsets[1]


def _sizes(values: Any) -> bool:
    """Whether it is a list of whole numbers, none negative and none above 63 bits."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _sums(metadata: Any) -> dict[str, int]:
    """The checksums of tensors in a header's `__metadata__`; none where another tool wrote it. Raises ValueError."""
    if not isinstance(metadata, dict) or SUMS not in metadata:
        return {}
    texts = parse(metadata[SUMS]) if isinstance(metadata[SUMS], str) else None
    if not isinstance(texts, dict) or not all(isinstance(text, str) and _SUM(text) for text in texts.values()):
        raise ValueError(f"its {SUMS} are no checksums")
    return {name: int(text, 16) for name, text in texts.items()}


_SUM = re.compile("[0-9a-f]{8}").fullmatch


def identity_of(descriptor: int) -> tuple[int, ...]:
    """Of a file, as long as nobody writes it."""
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def check_same(path: str, before: tuple[int, ...], now: tuple[int, ...], asked_bytes: int) -> None:
    """Raises DiskError where a file is not the one any more that was looked at before."""
    if now != before:
        raise DiskError(
            f"{path} was replaced or changed while it was being read ({asked_bytes} bytes); read it again",
            errno=errno.ESTALE,
            filename=path,
            asked_bytes=asked_bytes,
        )


class TensorFile:
    """One safetensors file, read tensor by tensor or by rows of one. It is read, not mapped: mapped pages would count as memory
    of the process, all of the file's in the end."""

    def __init__(self, path: str) -> None:
        """Raises DiskError where the file cannot be read, PlanError where it is no whole safetensors file."""
        self.path = path
        asked_bytes = 8
        self.entries: dict[str, Entry] = {}
        self._first: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._running: dict[str, tuple[int, int]] = {}  # of tensors that are read by rows: bytes so far, and their checksum
        try:
            with open_file(path) as file:
                self._identity = identity_of(file.fileno())
                size = os.fstat(file.fileno()).st_size
                (length,) = struct.unpack("<Q", file.read(8))
                if length > min(size - 8, MOST_HEADER_BYTES):
                    raise ValueError("its header is not whole")
                asked_bytes = length
                self._read_header(parse(file.read(length)), 8 + length, size)
        except OSError as error:
            raise unreadable(path, error, asked_bytes) from None
        except (ValueError, struct.error) as error:
            raise PlanError(f"{path} is no whole safetensors file: {error}") from None

    def _read_header(self, header: Any, data_begin: int, size: int) -> None:
        """Raises ValueError where a tensor is not described as the format has it, lies outside of the file, or shares bytes with
        another."""
        if not isinstance(header, dict) or not header:
            raise ValueError("its header is not whole")
        ranges: list[tuple[int, int, str]] = []
        for name, about in header.items():
            if name == "__metadata__":
                self._sums = _sums(about)
                continue
            shape, dtype, begin, end = _described(name, about)
            entry = Entry(name, shape, dtype)
            if not 0 <= begin <= end <= size - data_begin or end - begin != entry.size_bytes:
                raise ValueError(f"tensor {shown(name)} is not whole")
            self.entries[name], self._first[name] = entry, data_begin + begin
            ranges.append((begin, end, name))
        ranges.sort()
        for (_, end, name), (begin, _, other) in pairwise(ranges):
            if begin < end:
                raise ValueError(f"tensors {shown(name)} and {shown(other)} share bytes")

    @property
    def is_ours(self) -> bool:
        """Whether protrain wrote it."""
        return bool(self._sums)

    def read(self, name: str, first: int = 0, rows: int | None = None) -> torch.Tensor:
        """A tensor of its own memory, or rows of it from `first` on. What was read from its begin to its end, at once or rows
        after rows, is compared with its checksum, where the file has one.

        Raises:
            DiskError: the file ends too early, cannot be read, or is not the one any more whose header was read; or, with errno
                EBADMSG, the tensor is not what was written.
        """
        _, shape, dtype = self.entries[name]
        if shape and rows is not None:
            shape = (min(rows, shape[0] - first), *shape[1:])
        row_bytes = math.prod(self.entries[name].shape[1:]) * dtype.itemsize
        found = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device="cpu")
        try:
            with open_file(self.path, buffering=0) as file:
                check_same(self.path, self._identity, identity_of(file.fileno()), found.nbytes)
                file.seek(self._first[name] + first * row_bytes)
                self._read_into(file, found.numpy().data, name, first * row_bytes)
        except OSError as error:
            if isinstance(error, DiskError):
                raise
            raise unreadable(self.path, error, found.nbytes) from None
        except ValueError as error:
            raise PlanError(f"{self.path} is no whole safetensors file: {error}") from None
        return found.view(dtype).view(shape)

    def _read_into(self, file: Any, memory: memoryview, name: str, begin: int) -> None:
        """begin: where in the tensor's bytes the file stands."""
        if begin == 0:
            self._running[name] = 0, self.entries[name].first_sum
        done, found = self._running.pop(name, (-1, 0))
        summed = name in self._sums and done == begin
        rest = memory
        while rest:
            count = file.readinto(rest[:PIECE_BYTES])
            if not count:
                raise DiskError(
                    f"{self.path} ends inside of tensor {shown(name)}: {len(rest)} of {len(memory)} bytes are missing",
                    errno=errno.ENODATA,
                    filename=self.path,
                    asked_bytes=len(memory),
                )
            if summed:
                found = _core.checksum(rest[:count], found)
            rest = rest[count:]
        if not summed:
            return
        end, whole_bytes = begin + len(memory), self.entries[name].size_bytes
        if end < whole_bytes:
            self._running[name] = end, found
        elif found != self._sums[name]:
            raise DiskError(
                f"{self.path}: tensor {shown(name)}, {whole_bytes} bytes at {self._first[name]}, is not what was written there "
                f"(checksum {found:08x}, {self._sums[name]:08x} is right); take another copy of the file",
                errno=errno.EBADMSG,
                filename=self.path,
                asked_bytes=whole_bytes,
            )


def unreadable(path: str, error: OSError, asked_bytes: int) -> DiskError:
    """What reading so many bytes of a file raised, as a DiskError."""
    return DiskError(
        f"{path} cannot be read: {error.strerror or error} ({asked_bytes} bytes)",
        errno=error.errno or errno.EIO,
        filename=path,
        asked_bytes=asked_bytes,
    )


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
