"""Operations that fake tensors show otherwise than they are where the CPU computes, or refuse; and questions about values.

The dry run calls operations through `call`, and is given what the real ones give: outputs of the same shapes and sizes. Code of
libraries that looks at values, and goes on in the same way with all that are usual, is not asked: `without_questions`. What torch
does to tensors past all operations is done to fake ones too: `as_with_data`.
"""

from __future__ import annotations

import functools
import logging
import math
import numbers
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from . import remembered
from .knownvalues import ALMOST_ONE, KnownValues
from .workspace import MeasuredWorkspace, Workspace, lstm_kept_bytes

#: Whose result is a part of the memory of what it was added up from.
_PARTS_OF_MORE = {torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default, torch.ops.aten.col2im.default}

#: Whose first output lies as the input at this place does: in a row, or with channels last.
_LAID_AS = {torch.ops.aten.native_batch_norm.default: 0, torch.ops.aten.native_batch_norm_backward.default: 1}

#: Whose first output lies in a row, whatever its inputs do.
_IN_A_ROW = {torch.ops.aten.native_layer_norm_backward.default}


def call(known: KnownValues, workspace: Workspace, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on fake tensors. known: values of some of them; workspace: of the dry run, which may have measured what a
    kernel keeps."""
    return known.call(operation, args, kwargs, functools.partial(_call, known, workspace))


def _call(known: KnownValues, workspace: Workspace, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    aten = torch.ops.aten
    if operation is aten.masked_select.default:
        count = known.ask(args[1], lambda mask: int(mask.count_nonzero()))
        if count is not None:
            return _selected(args[0], args[1], count)
    if operation is aten._ctc_loss.Tensor:
        longest = known.ask(args[3], lambda lengths: int(lengths.max()))
        if longest is not None:
            return _ctc_loss(args[0], args[3], longest)
    if operation is aten._grouped_mm.default:
        return _grouped_product(*args, **kwargs)
    if operation is aten._nested_tensor_from_mask_left_aligned.default:
        return False  # nn.TransformerEncoder goes on without nested tensors, which are no larger
    result = remembered.call(operation, args, kwargs)
    if operation in _LAID_AS and result[0] is not None:
        laid_as = suggest_memory_format(args[_LAID_AS[operation]])
        return torch.empty_like(result[0], memory_format=laid_as), *result[1:]
    if operation in _IN_A_ROW and result[0] is not None:
        return torch.empty_like(result[0], memory_format=torch.contiguous_format), *result[1:]
    if operation is aten.view.default and 1 in args[0].shape:
        return _as_viewed(args[0], result)
    if operation in _PARTS_OF_MORE:
        return _within(result, _kept_bytes(workspace, operation, args, kwargs) or 0)
    if operation is aten.mkldnn_rnn_layer.default:
        kept_bytes = _kept_bytes(workspace, operation, args, kwargs)
        if kept_bytes is None:
            kept_bytes = lstm_kept_bytes(args[0], args[1], args[5])
        return [*result[:-1], result[-1].new_empty(kept_bytes)]  # empty among fake tensors
    if operation is aten.mkldnn_rnn_layer_backward.default and _share(result[3], result[4]):
        return [*result[:4], torch.empty_like(result[4]), *result[5:]]
    return result


@contextmanager
def as_with_data() -> Iterator[None]:
    """Inside, modules of fake tensors may be moved and converted to what they are already, torch.tensor takes fake tensors among
    its numbers, and a number that is known stands in a text as it does, where libraries make names of them."""
    with ExitStack() as stack:
        stack.enter_context(_replaced(FakeTensor, "__format__", _formatted))
        stack.enter_context(_replaced(nn.Module, "_apply", _converting(nn.Module._apply)))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(_replaced(torch, name, functools.partial(_put_together, getattr(torch, name))))
        yield


def _converting(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Module._apply, through which forwards move a layer to where its input is. It puts another tensor in the place of each fake
    one, also where that is the same, and fails where a graph or somebody else has it: such parameters are left out."""

    @functools.wraps(apply)
    def converted(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own, before = module._parameters, dict(module._parameters)
        same = [name for name, p in before.items() if isinstance(p, FakeTensor) and fn(p) is p]
        try:
            for name in same:
                del own[name]
            return apply(module, fn, recurse)
        finally:
            if same:
                own.clear()
                own.update(before)

    return converted


def _formatted(tensor: torch.Tensor, spec: str) -> str:
    if tensor.dim() == 0:
        with suppress(DataDependentOutputException):
            return format(tensor.item(), spec)
    return torch.Tensor.__format__(tensor, spec)


def _put_together(make: Callable[..., torch.Tensor], data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What torch.tensor makes of numbers some of which are fake tensors, whose data it looks for past all modes. Where one is not
    known nothing is."""
    leaves = tree_leaves(data) if isinstance(data, list | tuple) else []
    if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
        return make(data, *args, **kwargs)
    if kwargs.get("dtype") is None:
        kinds = [leaf.dtype if isinstance(leaf, torch.Tensor) else torch.tensor(leaf).dtype for leaf in leaves]
        kwargs["dtype"] = functools.reduce(torch.promote_types, kinds)
    try:
        return make(tree_map_only(FakeTensor, FakeTensor.tolist, data), *args, **kwargs)
    except DataDependentOutputException:
        return torch.empty_like(make(tree_map_only(FakeTensor, _zeros, data), *args, **kwargs))


def _zeros(tensor: torch.Tensor) -> Any:
    """As many of them, in lists as `tolist` makes them."""
    with unset_fake_temporarily():
        return torch.zeros(tensor.shape).tolist()


@contextmanager
def answering(known: KnownValues) -> Iterator[None]:
    """Inside, NumPy is given what is known of fake tensors. Where a forward with data was listened to, transformers asks what it
    asked there; else it takes a mask for one that hides something, which needs the most."""

    def as_array(tensor: torch.Tensor, *, force: bool = False) -> Any:
        return known.as_array(tensor, force=force)

    traced = sys.modules.get("transformers.utils.import_utils") if known.replies else None
    with ExitStack() as stack:
        stack.enter_context(_replaced(FakeTensor, "numpy", as_array))
        if traced is not None and hasattr(traced, "is_fake_tensor"):
            stack.enter_context(_replaced(traced, "is_fake_tensor", lambda _tensor: False))
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch logs nothing of this thread's fake tensors: what they refuse is an exception, which is told in a line."""
    here, log = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here

    log.addFilter(elsewhere)
    try:
        yield
    finally:
        log.removeFilter(elsewhere)


@contextmanager
def without_questions(kwargs: dict[str, Any]) -> Iterator[None]:
    """Inside, what has no data is not looked at, as far as that is known.

    transformers looks at position_ids to see packed sequences. Where the caller gives none, the model counts them up, which is no
    packing. nn.Transformer compares masks with the causal one, for which less memory would do. Distributions check what they are
    given.
    """
    masking = sys.modules.get("transformers.masking_utils")
    packed, distribution = "find_packed_sequence_indices", torch.distributions.Distribution
    with ExitStack() as stack:
        if masking is not None and hasattr(masking, packed) and kwargs.get("position_ids") is None:
            stack.enter_context(_replaced(masking, packed, lambda *_args, **_kwargs: None))
        stack.enter_context(_replaced(nn.modules.transformer, "_detect_is_causal_mask", _said_to_be_causal))
        stack.enter_context(_replaced(distribution, "_validate_args", False))
        yield


#: Of the single numbers that a thread draws in a trial, so many are answered: a loop that waits for another one ends.
_MOST_DRAWN = 1 << 12


@contextmanager
def nothing_left_out() -> Iterator[None]:
    """Inside, a single random number between 0 and 1 that this thread draws is almost one, as by torch among fake tensors: it
    decides whether a layer is left out, and which ones are is chance. A whole number, as of how often a layer is gone through, is
    the largest that could be drawn, and so is a choice among numbers. They are drawn all the same. Where a larger one asks for
    less, as the begin of a part that is cut out does, what is foreseen is a step that takes less than others."""
    here, drawn = threading.get_ident(), 0

    def drawing(draw: Callable[..., Any], most: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal drawn
        found = draw(*args, **kwargs)
        if threading.get_ident() != here or drawn >= _MOST_DRAWN:
            return found
        largest = most(found, *args, **kwargs)
        drawn += largest is not None
        return found if largest is None else largest

    numpys = sys.modules.get("numpy.random")
    draws: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch, "rand", _almost_one_of_tensor), (random, "randint", lambda _, a, b: b), (random, "randrange", _last),
        (random, "choice", _largest), (numpys, "choice", _largest), (numpys, "randint", _below), (numpys, "rand", _almost_one),
    ]  # fmt: skip
    draws += [(where, name, _almost_one) for where in (random, numpys) for name in ("random", "uniform")]
    with ExitStack() as stack:
        for where, name, most in draws:
            if where is not None:
                stack.enter_context(_replaced(where, name, functools.partial(drawing, getattr(where, name), most)))
        try:
            yield
        finally:
            drawn = _MOST_DRAWN  # another thread, inside as well, may put it back


# Each of these is given what was drawn, and what for; None: it is left as it is.


def _almost_one_of_tensor(found: Any, *_args: Any, **_kwargs: Any) -> torch.Tensor | None:
    is_single = type(found) is torch.Tensor and found.numel() == 1 and not found.requires_grad
    return found.fill_(ALMOST_ONE) if is_single else None


def _almost_one(found: Any, *args: Any, **kwargs: Any) -> float | None:
    return ALMOST_ONE if isinstance(found, float) and args in ((), (0, 1)) and not kwargs else None


def _last(_found: int, start: Any, stop: Any = None, step: Any = 1) -> int:
    start, step = int(start), int(step)  # Python 3.11 takes what is whole, such as 10.0
    return (range(start) if stop is None else range(start, int(stop), step))[-1 if step > 0 else 0]


def _below(found: Any, low: Any, high: Any = None, *_args: Any, **_kwargs: Any) -> Any:
    kind: Any = type(found)  # Python's or one of NumPy's
    return kind((low if high is None else high) - 1) if issubclass(kind, numbers.Integral) else None


def _largest(found: Any, *args: Any, **kwargs: Any) -> Any:
    kind: Any = type(found)
    given = (*args, *kwargs.values())
    # With weights it need not be among those that can come, and of two answers nobody knows which one asks for more.
    if not issubclass(kind, numbers.Real) or issubclass(kind, bool) or len(given) > 1:
        return None
    if isinstance(given[0], numbers.Integral):
        return kind(int(given[0]) - 1)
    among = list(given[0])
    return kind(max(among)) if all(isinstance(one, numbers.Real) for one in among) else None


def _said_to_be_causal(_mask: Any, is_causal: bool | None = None, _size: int | None = None) -> bool:
    return is_causal is True


@contextmanager
def _replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def _as_viewed(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The view of a tensor, with the strides that it really has where a side is 1: libraries choose kernels by them."""
    with unset_fake_temporarily():
        strides = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(view.shape).stride()
    return view if strides == view.stride() else tensor.as_strided(view.shape, strides, tensor.storage_offset())


def _share(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Of the gradients of two biases: they are one tensor until fake tensors remember how it went, and two from then on."""
    return one is not None and other is not None and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _kept_bytes(workspace: Workspace, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The memory of the last output of the real operation; None where it is not measured."""
    return workspace.kept_bytes(operation, args, kwargs) if isinstance(workspace, MeasuredWorkspace) else None


def _within(result: torch.Tensor, kept_bytes: int) -> torch.Tensor:
    """The result as a part of a memory of so many bytes."""
    if kept_bytes <= result.untyped_storage().nbytes():
        return result
    return result.new_empty(-(-kept_bytes // result.element_size())).as_strided(result.shape, result.stride())


def _selected(tensor: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """What a mask leaves of a tensor, of which so many are true."""
    repeats = math.prod(torch.broadcast_shapes(tensor.shape, mask.shape)) // max(mask.numel(), 1)
    return tensor.new_empty(count * repeats)


def _ctc_loss(log_probs: torch.Tensor, target_lengths: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss for each sequence, and for each moment of it a number for each of so many labels, and for the gaps between them."""
    moments, batch = log_probs.shape[0], target_lengths.numel()
    return log_probs.new_empty(target_lengths.shape), log_probs.new_empty(batch, moments, 2 * longest + 1)


def _grouped_product(
    first: torch.Tensor,
    second: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of groups of rows with a matrix each, as experts make them: fake tensors take those of bfloat16 alone.

    2-D with 3-D: rows of the first in groups; 3-D with 2-D: columns of the second; 2-D with 2-D: what they are summed over.
    """
    shape = [first.shape[-2], second.shape[-1]]
    if first.dim() == second.dim():
        shape.insert(0, first.shape[0] if first.dim() == 3 else len(ends) if ends is not None else 1)
    return first.new_empty(shape, dtype=out_dtype or first.dtype)
