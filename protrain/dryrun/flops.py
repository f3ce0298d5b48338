"""How many floating-point operations an operation of torch makes: torch's own table, and what is not in it, as fused attention
on the CPU. A multiply-add is two; operations that are no products of matrices count as none. And about how long such counts
take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

Count = Callable[..., int]


def _attention(of_products: int, query_at: int, causal_at: int) -> Count:
    """What fused attention computes: so many products of scores' size, a half of each where it is causal."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        query, key = args[query_at], args[query_at + 1]
        causal = args[causal_at] if len(args) > causal_at else kwargs.get("is_causal", False)
        batch, heads, rows, size = query.shape
        whole = 2 * of_products * batch * heads * rows * key.shape[-2] * size
        return int(whole // 2 if causal else whole)

    return count


def _grouped(first: torch.Tensor, second: torch.Tensor, *_: Any, **__: Any) -> int:
    """Groups share the rows, the columns or what is summed over, but where both have one matrix for each."""
    rows, inner = first.shape[-2:]
    return int(2 * rows * inner * second.shape[-1] * (first.shape[0] if first.dim() == second.dim() == 3 else 1))


_OF_CPU: dict[Any, Count] = {
    torch.ops.aten._grouped_mm: _grouped,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention(2, 0, 4),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(5, 1, 7),
}


def flops_of(operation: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Of one call; operation is an overload packet, as torch.ops.aten.mm."""
    count = flop_registry.get(operation) or _OF_CPU.get(operation)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


#: Of an ordinary processor: operations a second, bytes a second, seconds for each operation.
FLOPS_PER_SECOND, BYTES_PER_SECOND, OPERATION_SECONDS = 1e11, 1e10, 5e-6


def ordinary_seconds(flops: int, moved_bytes: int, operations: int) -> float:
    """About what counted operations take on an ordinary processor: for dividing a time that was measured, not for one alone."""
    return flops / FLOPS_PER_SECOND + moved_bytes / BYTES_PER_SECOND + operations * OPERATION_SECONDS
