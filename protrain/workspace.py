"""What CPU kernels of torch allocate inside themselves, which fake tensors do not show.

One entry for each operation where it matters, found by comparing live bytes of real and fake runs operation by operation
(tests/test_dryrun.py does so again). Entries are upper bounds; an operation that is not named allocates its outputs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

#: Operations with outputs that live on and whose true size fake tensors do not show.
HIDDEN_OUTPUTS = {"aten::mkldnn_rnn_layer"}
_SMALL_BYTES = 16 << 10


def _bytes(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _attention_split(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows of queries and of keys that a thread of the flash kernel works on at once."""
    rows = query.shape[-2]
    return min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32), min(key.shape[-2], 512)


def _packed_bytes(first: torch.Tensor, second: torch.Tensor, threads: int) -> int:
    """What threads pack of the operands of a product of 16-bit numbers: each its blocks of the second, and of the first where its
    rows do not lie in a row, or are so far apart that they would share a place in the cache. Four threads and more may divide
    long sums, and each has its own of the output then. Only known where the kernels are those of AVX-512 (products of 30 to 16384
    in each direction, 1 to 16 threads); else all of both is taken."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or torch.cpu._is_amx_tile_supported():
        return _bytes(first, second)
    most = _bytes(first) + threads * (_bytes(second) + (84 << 10))
    rows, inner = first.shape[-2:]
    if first.stride(-1) == 1 and first.stride(-2) % 4096 != 0:
        return min(most, threads * (256 << 10))
    sums = 4 * rows * second.shape[-1]
    divided = threads >= 4 and inner >= 2048 and sums <= 8 << 20
    return min(most, threads * (2 << 20)) + (threads * sums if divided else 0)


def workspace_bytes(name: str, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> int:
    """What the CPU kernel of an operation allocates beside its outputs while it runs: the one table, found by measurement."""
    threads = torch.get_num_threads()
    match name:
        case "aten::_scaled_dot_product_flash_attention_for_cpu":  # a block of scores and of output for each thread
            queries, keys = _attention_split(inputs[0], inputs[1])
            return threads * 4 * queries * (keys + 2 + inputs[0].shape[-1])
        case "aten::_scaled_dot_product_flash_attention_for_cpu_backward":  # scores and their gradients
            queries, keys = _attention_split(inputs[1], inputs[2])
            return threads * 4 * queries * (2 * keys + 1)
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
        case "aten::_embedding_bag_dense_backward":  # the indices, sorted
            return 3 * _bytes(inputs[1])
        case "aten::mm" | "aten::addmm" | "aten::bmm" | "aten::baddbmm" if outputs[0].element_size() == 2:  # packed operands
            first, second = [t for t in inputs if isinstance(t, torch.Tensor)][-2:]  # numbers to scale them by may follow
            return _packed_bytes(first, second, threads)
    return 0
