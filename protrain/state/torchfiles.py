"""Files as `torch.save` writes them, written and read tensor by tensor: what is in them is never in memory at once.

Writing lays the file out with tensors that have no memory, then fills in each tensor's bytes; torch.load reads the file as any
other. Reading is the reverse: torch.load says where each tensor lies, and its bytes are read when it is asked for. Nothing is
mapped, since what is mapped and touched is in memory too.
"""

from __future__ import annotations

import errno
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from torch.utils._pytree import tree_map_only

from ..base.counting import uncounted
from ..base.reading import open_file, shown
from ..base.replacing import replaced_file
from ..errors import DiskError, PlanError
from ..model.strides import Strides, dense_strides, laid
from .tensorfiles import PIECE_BYTES, check_same, identity_of, pieces, unreadable

Value = Callable[[], torch.Tensor]


class Described(torch.Tensor):
    """Stands for a tensor that is made when it is written."""

    _value: Value
    _strides: Strides


def described(shape: tuple[int, ...], strides: Strides, value: Value) -> torch.Tensor:
    """A float32 tensor of `shape` and dense `strides` that `save` asks `value` for when its turn has come."""
    with uncounted():
        stand_in = torch.empty((), device="cpu").expand(shape).as_subclass(Described)
    stand_in._value, stand_in._strides = value, strides
    return stand_in


def save(content: Any, path: str) -> None:
    """Write `content`, whose tensors may be `described`, to a file that torch.load reads; it takes its name when it is whole.

    Raises:
        DiskError: the file cannot be written; what was there before is still there.
    """
    sources: list[Value] = []
    size_bytes = 0
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal size_bytes
        size_bytes += tensor.numel() * tensor.itemsize
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
        code = getattr(error, "errno", None) or errno.EIO  # torch's own writer says it in words
        raise DiskError(
            f"writing {path} failed: {error} (tensors of {size_bytes} bytes)", errno=code, filename=path, asked_bytes=size_bytes
        ) from error


class OnDemand(dict[Any, Any]):
    """A dict of tensors, each of them read anew whenever it is asked for."""

    def __init__(self, file: _File, content: dict[Any, Any]) -> None:
        super().__init__(content)
        self._file = file

    def __getitem__(self, key: Any) -> Any:
        return self._file.read(super().__getitem__(key))

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
    """An optimizer's state dict from a file that torch.save or `save` wrote; each parameter's state is `OnDemand`: what is asked
    for later raises DiskError where the file fails, was replaced, or, with errno EBADMSG, holds what was not written there.

    Raises:
        DiskError: the file cannot be read.
        PlanError: the file holds something else, or more than tensors and plain values: nothing of it is run.
    """
    asked_bytes = 0
    try:
        with open_file(path) as opened:
            asked_bytes = os.fstat(opened.fileno()).st_size
            file = _File(path, opened)
            with FakeTensorMode():
                found: dict[str, Any] = torch.load(opened, map_location="cpu", weights_only=True)
        if not isinstance(found["state"], dict) or not all(map(_is_dict, (*found["state"].values(), *found["param_groups"]))):
            raise ValueError("it has no state, or no groups")
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        raise unreadable(path, error, asked_bytes) from None
    except _REFUSED as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise PlanError(f"{path} holds no state of an optimizer: {why[:200]}") from error
    groups = [{key: tree_map_only(torch.Tensor, file.read, value) for key, value in g.items()} for g in found["param_groups"]]
    return {"state": {number: OnDemand(file, entry) for number, entry in found["state"].items()}, "param_groups": groups}


#: What torch.load raises of a file that is none of its own.
_REFUSED = (
    pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError,
    AssertionError, ArithmeticError, NotImplementedError, struct.error,
)  # fmt: skip


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


class _File:
    """A zip archive of torch's, whose records are read one by one and compared with the CRC-32 in its directory."""

    def __init__(self, path: str, file: Any) -> None:
        """Raises BadZipFile where it is no such archive, DiskError where its pickle is not what was written."""
        self._path, self._identity = path, identity_of(file.fileno())
        with zipfile.ZipFile(file) as archive:
            self._records = {_data_offset(file, record): record for record in archive.infolist()}
        for begin, record in self._records.items():
            if record.filename.endswith("/data.pkl"):
                self._pass(file, begin, record.file_size, memoryview(bytearray(min(record.file_size, PIECE_BYTES))))
        file.seek(0)

    def read(self, tensor: Any) -> Any:
        """What a tensor without data stands for; anything else is itself.

        Raises:
            DiskError: as TensorFile.read.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        storage: Any = tensor.untyped_storage()
        begin, count = getattr(storage, "_checkpoint_offset", None), storage.nbytes()
        if begin is None:
            raise PlanError(f"{self._path} holds a tensor that is no record of it")
        with uncounted():
            try:
                with open_file(self._path, buffering=0) as file:
                    whole = self._read(file, begin, count)
            except OSError as error:
                if isinstance(error, DiskError):
                    raise
                raise unreadable(self._path, error, count) from None
            except ValueError as error:
                raise PlanError(f"{self._path} cannot be read: {error}") from None
            return whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _read(self, file: Any, begin: int, count: int) -> torch.Tensor:
        path = self._path
        check_same(path, self._identity, identity_of(file.fileno()), count)
        self._check_inside(file, begin, count)  # known before there is memory for it
        whole = torch.empty(count, dtype=torch.uint8, device="cpu")
        self._pass(file, begin, count, whole.numpy().data)
        return whole

    def _check_inside(self, file: Any, begin: int, count: int) -> None:
        if begin + count > os.fstat(file.fileno()).st_size:
            raise _ends(self._path, begin, count)

    def _pass(self, file: Any, begin: int, count: int, memory: memoryview) -> None:
        """Read a record, compared with its CRC-32, into memory; where that is shorter, piece over piece."""
        path, record = self._path, self._records.get(begin)
        if record is None or record.file_size != count or record.compress_type != zipfile.ZIP_STORED:
            raise PlanError(f"{path} holds no record of {count} bytes at {begin}, which one of its tensors is to be")
        self._check_inside(file, begin, count)
        file.seek(begin)
        done = found = 0
        while done < count:
            place = done if len(memory) == count else 0
            size = file.readinto(memory[place : place + min(PIECE_BYTES, count - done)])
            if not size:
                raise _ends(path, begin, count)
            found = zlib.crc32(memory[place : place + size], found)
            done += size
        if record.CRC not in (0, found):  # 0: whoever wrote it took none
            raise DiskError(
                f"{path}: record {shown(record.filename)}, {count} bytes at {begin}, is not what was written there "
                f"(checksum {found:08x}, {record.CRC:08x} is right); take another copy of the file",
                errno=errno.EBADMSG,
                filename=path,
                asked_bytes=count,
            )


def _ends(path: str, begin: int, count: int) -> DiskError:
    return DiskError(
        f"{path} ends within a record of {count} bytes at {begin}", errno=errno.ENODATA, filename=path, asked_bytes=count
    )


def _data_offset(file: Any, record: zipfile.ZipInfo) -> int:
    """Where the bytes of a record begin, behind its own header."""
    file.seek(record.header_offset + 26)
    name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    return int(record.header_offset) + 30 + int(name_bytes) + int(extra_bytes)


def _fill(path: str, sources: list[Value]) -> None:
    """Write each record's bytes into its place, and their CRC-32, 0 in the layout, behind them and into the directory."""
    reader: Any = torch._C.PyTorchFileReader(path)
    places = [int(reader.get_record_offset(f"data/{number}")) for number in range(len(sources))]
    del reader
    with open(path, "r+b") as file:
        sums: dict[int, int] = {}
        for place, source in zip(places, sources, strict=True):
            flat, sums[place] = source(), 0
            if flat.numel():
                file.seek(place)
                for piece in pieces(flat.view(torch.uint8).numpy().data):
                    sums[place] = zlib.crc32(piece, sums[place])
                    file.write(piece)
        file.flush()
        _write_sums(file, sums)
        file.flush()
        os.fsync(file.fileno())


_DIRECTORY_ENTRY, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"


def _write_sums(file: Any, sums: dict[int, int]) -> None:
    """sums: of the records whose bytes begin at these places."""
    with zipfile.ZipFile(file) as archive:
        records, entry = archive.infolist(), archive.start_dir
    for record in records:
        place = _data_offset(file, record)
        file.seek(entry)
        head = file.read(46)
        assert head[:4] == _DIRECTORY_ENTRY
        if place in sums:
            text = struct.pack("<I", sums[place])
            file.seek(entry + 16)
            file.write(text)
            file.seek(place + record.file_size)
            if file.read(4) == _DESCRIPTOR:
                file.seek(place + record.file_size + 4)
                file.write(text)
        entry += 46 + sum(struct.unpack("<HHH", head[28:34]))
