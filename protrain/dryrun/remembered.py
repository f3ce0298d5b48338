"""What operations on fake tensors gave before, for tensors of the same shapes.

A dry run calls the same operations on the same shapes in every block, in three runs. Torch remembers what fake tensors give too,
but looks for it by far more than decides it here, and so takes longer than the rest of a dry run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

_aten = torch.ops.aten

#: So many results are remembered; then all are forgotten.
_MOST_RESULTS = 1 << 12

#: Whose type and value say all of them.
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}

#: Whose results hang on values, or have more or fewer tensors' memory than their words say.
_OTHER_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}

#: Which look at how large the memory behind a tensor is, or at what is no fake tensor yet.
_OF_MEMORY = {_aten.as_strided.default, _aten.lift_fresh.default, _aten.lift.default}


class _Output(NamedTuple):
    """A tensor among results. is_view: of the only one that was given."""

    shape: torch.Size
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype
    device: torch.device
    is_view: bool


class _Outputs(NamedTuple):
    """kind: of what they come in; None: it is one tensor."""

    kind: type[list[Any]] | type[tuple[Any, ...]] | None
    each: tuple[_Output | None, ...]


_FIRST_GIVEN = _Outputs(None, ())

_results: dict[tuple[Any, ...], _Outputs | None] = {}  # None: to be asked every time


def call(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation on fake tensors."""
    key: list[Any] = [operation, torch.get_default_dtype()]
    tensors: list[FakeTensor] = []
    if not _suits(operation) or not _describe(args, key, tensors) or not tensors:
        return operation(*args, **kwargs)
    if kwargs and not _describe([*kwargs, *kwargs.values()], key, tensors):
        return operation(*args, **kwargs)
    words = tuple(key)
    found = _results.get(words)
    if found is _FIRST_GIVEN:
        return tensors[0]
    if found is not None:
        with no_dispatch():
            made = [None if output is None else _made(output, tensors) for output in found.each]
        return made[0] if found.kind is None else found.kind(made)
    result = operation(*args, **kwargs)
    if words not in _results:
        if len(_results) >= _MOST_RESULTS:
            _results.clear()
        _results[words] = _outputs(operation, result, tensors)
    return result


@functools.cache
def _suits(operation: Any) -> bool:
    """Whether what it gives follows from shapes and plain words alone."""
    if operation.namespace != "aten" or operation in _OF_MEMORY or _OTHER_TAGS & set(operation.tags):
        return False
    return not operation._schema.is_mutable or _changes_first(operation)


def _changes_first(operation: Any) -> bool:
    """Whether it writes to its first argument alone, and gives that back."""
    written = [word.alias_info is not None and word.alias_info.is_write for word in operation._schema.arguments]
    given = [word.alias_info is not None and word.alias_info.is_write for word in operation._schema.returns]
    return written[0] and sum(written) == 1 and given == [True]


def _describe(values: Iterable[Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Adds what decides the result to `key`; False: one is not of a kind that is known."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.is_complex():
                return False
            tensors.append(value)
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
        elif kind in _PLAIN:
            key += (kind, value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _describe(value, key, tensors):
                return False
        else:
            return False
    return True


def _outputs(operation: Any, result: Any, tensors: Sequence[FakeTensor]) -> _Outputs | None:
    if operation._schema.is_mutable:
        return _FIRST_GIVEN if result is tensors[0] else None
    kind = type(result) if type(result) in (list, tuple) else None
    given, taken = tensors[0].untyped_storage()._cdata, {tensor.untyped_storage()._cdata for tensor in tensors}
    each: list[_Output | None] = []
    for tensor in [result] if kind is None else result:
        if tensor is None:
            each.append(None)
            continue
        if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
            return None
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        is_view = storage._cdata == given
        if is_view and len(tensors) > 1:
            return None
        if not is_view:
            if storage._cdata in taken or offset or storage.nbytes() != _whole_bytes(tensor):
                return None
            taken.add(storage._cdata)
        each.append(_Output(tensor.shape, tensor.stride(), offset, tensor.dtype, tensor.fake_device, is_view))
    return _Outputs(kind, tuple(each))


def _whole_bytes(tensor: torch.Tensor) -> int:
    """From its first number to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _made(output: _Output, tensors: Sequence[FakeTensor]) -> FakeTensor:
    if output.is_view:
        made = torch.empty(0, dtype=output.dtype, device="meta")
        made.set_(tensors[0].untyped_storage(), output.storage_offset, output.shape, output.stride)
    else:
        made = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
    return FakeTensor(tensors[0].fake_mode, made, output.device)
