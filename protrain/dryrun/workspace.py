"""What CPU kernels of torch allocate inside themselves, which fake tensors do not show.

Of most of a step that is known. Element by element, in one type, nothing is allocated but the output, nor by what copies, fills
and joins; a table has what products, attention and norms take, found by comparing live bytes of real and fake runs operation by
operation (tests/test_dryrun.py and tests/test_workspace.py do so again). Entries are upper bounds.

Every other operation runs once, with tensors of the same geometry, and what its kernel took is counted: convolutions, layers of
LSTMs, and products and attention of 16-bit numbers, where a library chooses among many kernels by shape, layout, type,
instructions and threads; and whatever may copy its inputs to another type or layout first, or makes one step of several: losses,
sorts, images that change their size, gathers. It repeats to the byte, but for attention's backward, where it hangs on which
threads are inside of a product at once: there the table counts as well. Where there is nothing to run them on (planning for other
hardware), or not the memory, the table stands for them, and where it has no entry as much as all inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from .. import _core
from ..errors import Error

#: What the kernel of an operation holds beside its outputs: of the operation, its arguments by place and by name, its outputs.
Workspace = Callable[[Any, Sequence[Any], Mapping[str, Any], Sequence[torch.Tensor]], int]

_SMALL_BYTES = 16 << 10


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments or results, in lists too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _bytes(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _attention_split(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows of queries and of keys that a thread of the flash kernel works on at once."""
    rows = query.shape[-2]
    return min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32), min(key.shape[-2], 512)


def _are_packed(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes products of these 16-bit numbers, whose threads pack operands: where the processor has instructions
    for them. Elsewhere torch's own kernels do, which pack nothing."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    library = torch.ops.mkldnn
    supported = library._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else library._is_mkldnn_fp16_supported
    return bool(supported())


def _product_bytes(dtype: torch.dtype, queries: int, keys: int, size: int) -> int:
    """What one thread packs for the products of 16-bit numbers inside of attention's backward: a bound for AVX-512."""
    if not _are_packed(dtype):
        return 0
    return 4 * keys * size + 2 * queries * keys + (96 << 10)


def _packed_bytes(first: torch.Tensor, second: torch.Tensor, threads: int) -> int:
    """What threads pack of the operands of a product of 16-bit numbers: each its blocks of the second, and of the first where its
    rows do not lie in a row, or are so far apart that they would share a place in the cache. Four threads and more may divide
    long sums, and each has its own of the output then. Only known where the kernels are those of AVX-512 (products of 30 to 16384
    in each direction, 1 to 16 threads), or of AMX (30 to 4096, 1 to 4 threads); else all of both is taken."""
    if not _are_packed(first.dtype):
        return 0
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return _bytes(first, second)
    if torch.cpu._is_amx_tile_supported():
        return _tiled_bytes(first, second, threads)
    most = _bytes(first) + threads * (_bytes(second) + (84 << 10))
    rows, inner = first.shape[-2:]
    if first.stride(-1) == 1 and first.stride(-2) % 4096 != 0:
        return min(most, threads * (256 << 10))
    sums = 4 * rows * second.shape[-1]
    divided = threads >= 4 and inner >= 2048 and sums <= 8 << 20
    return min(most, threads * (2 << 20)) + (threads * sums if divided else 0)


def _tiled_bytes(first: torch.Tensor, second: torch.Tensor, threads: int) -> int:
    """The same for AMX, a bound: whole tiles, and of small ones each thread packs all."""
    rows, inner, columns = (-(-n // 64) * 64 for n in (*first.shape[-2:], second.shape[-1]))
    return max(_bytes(first, second), threads * min(2 * inner * (rows + columns) + (64 << 10), 1 << 20))


def _lstm_bytes(x: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor) -> tuple[int, int, int]:
    """Of a layer of an LSTM, with rows as the library lays them: its weights, one state of all steps, the gates of all steps."""
    steps, rows, width = x.shape
    size, padded = weight.element_size(), [-(-n // 16) * 16 for n in (width, hidden.shape[-1])]
    gates = 4 * padded[1]
    return gates * sum(padded) * size, (steps + 1) * rows * (max(padded) + 16) * size, steps * rows * gates * size


def lstm_kept_bytes(x: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor) -> int:
    """What a layer of an LSTM keeps for its backward, at most."""
    weights, states, gates = _lstm_bytes(x, weight, hidden)
    return weights + 10 * states + 2 * gates + _SMALL_BYTES


def workspace_bytes(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]) -> int:
    """What the CPU kernel of an operation allocates beside its outputs while it runs: the one table, found by measurement."""
    threads, inputs = torch.get_num_threads(), [*args, *kwargs.values()]
    match operation._schema.name:
        case "aten::_scaled_dot_product_flash_attention_for_cpu":  # a block of scores and of output for each thread
            queries, keys = _attention_split(inputs[0], inputs[1])
            bytes_each = 4 * queries * (keys + 2 + inputs[0].shape[-1])
            if outputs[0].element_size() == 2:  # the scores, narrowed
                bytes_each += 2 * queries * keys
            return threads * bytes_each + _SMALL_BYTES
        case "aten::_scaled_dot_product_flash_attention_for_cpu_backward":  # scores and their gradients
            queries, keys = _attention_split(inputs[1], inputs[2])
            bytes_each = 4 * queries * (2 * keys + 1)
            if outputs[0].element_size() == 2:
                bytes_each += 4 * queries * keys + _product_bytes(inputs[1].dtype, queries, keys, inputs[1].shape[-1])
            return threads * bytes_each
        case "aten::convolution":  # the library's own layout of output and weight
            return _bytes(outputs[0], inputs[1]) + _SMALL_BYTES
        case "aten::convolution_backward":  # and of gradient, input, weight and the weight's gradient
            return _bytes(inputs[0], inputs[1], inputs[2], inputs[2]) + _SMALL_BYTES
        case "aten::native_batch_norm":  # sums of each thread
            return (threads + 1) * 8 * inputs[0].shape[1]
        case "aten::native_batch_norm_backward":  # and the gradient, laid like the input
            return _bytes(inputs[0]) + (threads + 1) * 8 * inputs[0].shape[1]
        case "aten::native_layer_norm_backward":  # sums of each thread
            return threads * 2 * _bytes(inputs[5])
        case "aten::native_group_norm_backward":
            return 2 * 4 * inputs[5] * inputs[6]
        case "aten::mkldnn_rnn_layer":  # weights in the library's own layout
            weights, states, gates = _lstm_bytes(inputs[0], inputs[1], inputs[5])
            return (2 * weights + 4 * states + gates) * 5 // 8 + _SMALL_BYTES
        case "aten::mkldnn_rnn_layer_backward":  # and their gradients
            weights, states, gates = _lstm_bytes(inputs[0], inputs[1], inputs[5])
            return (4 * weights + 4 * states + gates) * 5 // 8 + _SMALL_BYTES
        case "aten::_embedding_bag_dense_backward":  # the indices, sorted
            return 3 * _bytes(inputs[1])
        case "aten::mm" | "aten::addmm" | "aten::bmm" | "aten::baddbmm" if outputs[0].element_size() == 2:  # packed operands
            first, second = [t for t in inputs if isinstance(t, torch.Tensor)][-2:]  # numbers to scale them by may follow
            return _packed_bytes(first, second, threads)
        case "aten::_grouped_mm" if outputs[0].element_size() == 2:  # one group after another
            first, second = (t[0] if t.dim() == 3 else t for t in inputs[:2])
            return _packed_bytes(first, second, threads)
    return 0


# ---- what is known ----

#: Whatever the types and layouts of their inputs are: the table has what they take, or they take nothing.
_KNOWN = {
    "_to_copy", "clone", "copy_", "fill_", "zero_", "cat", "stack", "constant_pad_nd", "select_backward", "slice_backward",
    "tril", "triu", "_unsafe_view", "lift_fresh", "where", "masked_fill", "masked_fill_", "embedding",
    "_embedding_bag_dense_backward", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip

#: Where what they are given lies in a row.
_KNOWN_IN_A_ROW = {
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward", "nll_loss_forward", "nll_loss_backward",
    "nll_loss2d_forward", "nll_loss2d_backward", "embedding_dense_backward", "avg_pool2d", "avg_pool2d_backward", "gelu_backward",
}  # fmt: skip

#: The same for sums, which are of the type of what is added; of short numbers they are made in a longer type.
_KNOWN_SUMS = {"sum", "mean", "linalg_vector_norm", "cumsum"}

#: Products, where the numbers of each matrix lie in a row one way or the other.
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}

#: Element by element, and yet not in one pass.
_IN_SEVERAL_PASSES = {"isinf", "mvlgamma"}

_LONG_TYPES = {torch.float32, torch.float64}


def _is_known(operation: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Whether the table's word is right for this operation, to a few hundred bytes."""
    name, tags = operation._schema.name.removeprefix("aten::"), operation.tags
    if operation.namespace != "aten" or not inputs or name in _KNOWN:  # other libraries' are not run
        return True
    if torch.Tag.nondeterministic_seeded in tags or torch.Tag.inplace_view in tags:
        return True
    if name.startswith("new_") or name.endswith("_like"):
        return True
    if all(tensor.numel() <= 1 for tensor in (*inputs, *outputs)):
        return True
    types = {tensor.dtype for tensor in inputs if tensor.dim() > 0}
    in_a_row = all(tensor.is_contiguous() for tensor in inputs)
    if torch.Tag.pointwise in tags and name not in _IN_SEVERAL_PASSES | _KNOWN_IN_A_ROW:
        one_type = len(types) == 1 and all(kind.is_floating_point for kind in types)
        return one_type and all(output.dtype in types | {torch.bool} for output in outputs)
    if name in _KNOWN_SUMS:
        return in_a_row and len(types) == 1 and types <= _LONG_TYPES and {output.dtype for output in outputs} == types
    if name in _PRODUCTS:
        return not any(kind.is_complex for kind in types) and all(1 in t.stride()[-2:] for t in inputs if t.dim() > 1)
    return in_a_row and name in _KNOWN_IN_A_ROW


# ---- measured ----

_OF_ANY_TYPE = {
    "aten::convolution",
    "aten::convolution_backward",
    "aten::mkldnn_rnn_layer",
    "aten::mkldnn_rnn_layer_backward",
}
_OF_16_BITS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}
_BY_CHANCE = {"aten::_scaled_dot_product_flash_attention_for_cpu_backward"}  # threads that meet hold more than others
_BY_SIZE_OF_NUMBERS = {"aten::linalg_matrix_exp"}  # more terms of the series for larger ones, whose powers are all held


class _Measured(NamedTuple):
    """Of an operation with tensors of one geometry."""

    workspace_bytes: int
    last_output_bytes: int


_found: dict[Hashable, _Measured | None] = {}  # of this process: what was measured once is so again; None: it fails


def _is_chosen(name: str, outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a library chooses the kernel, so that no formula tells what it takes."""
    return name in _OF_ANY_TYPE or (name in _OF_16_BITS and outputs[0].element_size() == 2)


def _described(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.is_conj(), value.is_neg()
    if isinstance(value, (list, tuple)):
        return tuple(_described(entry) for entry in value)
    return type(value), value


def _like(make: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Zeros or ones that lie as this tensor's numbers do, also where several are one in memory."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    made = make(reach + 1 if tensor.numel() else 0, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


class MeasuredWorkspace:
    """A `Workspace` by the table, and by a run of each operation of which that is not the last word.

    Args:
        counted: tensors made inside count in the engine that it yields. What its budget refuses is left to the table.
    """

    def __init__(self, counted: Callable[[], AbstractContextManager[_core.Engine]]) -> None:
        self._counted = counted
        self._missed: set[Hashable] = set()

    def take_missed(self) -> bool:
        """Whether since this was last asked there was an operation that had no memory to run in, so that what it takes may be
        more than the table says, or less than all inputs and outputs. From here on it is tried again."""
        missed, self._missed = bool(self._missed), set()
        return missed

    def __call__(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]) -> int:
        name = operation._schema.name
        if not outputs or operation.is_view:
            return 0
        told_bytes = workspace_bytes(operation, args, kwargs, outputs)
        if not _is_chosen(name, outputs):
            inputs = list(tensors_in([*args, *kwargs.values()]))
            if _is_known(operation, inputs, outputs):
                return told_bytes
            told_bytes = told_bytes or _bytes(*inputs, *outputs)
        found = self._measured(operation, args, kwargs)
        if found is None:
            return told_bytes
        return max(found.workspace_bytes, told_bytes) if name in _BY_CHANCE else found.workspace_bytes

    def kept_bytes(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """The memory of the last output of an operation; None where there is none to run it in now."""
        found = self._measured(operation, args, kwargs)
        return found.last_output_bytes if found is not None else None

    def _measured(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Measured | None:
        key = (
            operation, _described(args), _described(sorted(kwargs.items())), torch.get_num_threads(),
            torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision(),
        )  # fmt: skip
        if key not in _found and key not in self._missed:
            try:
                _found[key] = self._run_once(operation, args, kwargs)
            except Error:  # no memory for it now
                self._missed.add(key)
        return _found.get(key)

    def _run_once(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Measured | None:
        """On zeros, or on ones, from which pivots count; None: it takes neither. On large numbers where those take most."""
        makes: list[Callable[..., torch.Tensor]] = [torch.zeros, torch.ones]
        if operation._schema.name in _BY_SIZE_OF_NUMBERS:
            makes.insert(0, lambda count, dtype: torch.full((count,), 64, dtype=dtype))
        for make in makes:
            try:
                return self._measure(operation, args, kwargs, make)
            except Error:  # says nothing of the operation
                raise
            except Exception:
                continue
        return None

    def _measure(
        self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], make: Callable[..., torch.Tensor]
    ) -> _Measured:
        with unset_fake_temporarily(), self._counted() as engine:
            given, named = tree_map_only(torch.Tensor, partial(_like, make), (tuple(args), dict(kwargs)))
            inside = {tensor.untyped_storage()._cdata for tensor in tensors_in([*given, *named.values()])}
            engine.mark()
            before_bytes = engine.stats()["live_bytes"]
            made = operation(*given, **named)
            highest_bytes = engine.mark() - before_bytes
            outputs = list(tensors_in([made]))
            storages = {output.untyped_storage()._cdata: output.untyped_storage().nbytes() for output in outputs}
            known_bytes = sum(_core.rounded_bytes(size) for key, size in storages.items() if size and key not in inside)
            return _Measured(max(highest_bytes - known_bytes, 0), outputs[-1].untyped_storage().nbytes())
