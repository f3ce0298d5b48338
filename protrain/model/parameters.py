"""Parameters of chunks on disk: every use of one, anywhere, is the demand for its chunk.

A parameter is a view of its slot; the bytes behind it change. What reads it must find its own bytes there, so such a parameter
is of a subclass of `nn.Parameter` whose `__torch_function__` sees each torch call that takes it (or a view of it), brings its
chunk, and keeps it in place during the call. Nothing else is changed: results are what the call gives for plain tensors.
Parameters of persistent chunks stay plain.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
import torch.utils.dlpack
from torch import nn

from ..base.counting import uncounted
from ..errors import PlanError

DisableTorchFunction = torch._C.DisableTorchFunctionSubclass


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


def _setters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__set__ for name in names}


#: Calls that look at a tensor but not at its values.
_METADATA: set[Any] = _getters(
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "itemsize", "nbytes", "_version",
    "is_sparse", "is_quantized", "is_meta", "is_cpu", "is_cuda", "is_nested", "_backward_hooks", "_post_accumulate_grad_hooks",
    "output_nr", "retains_grad", "name", "is_mkldnn", "is_sparse_csr", "is_xpu", "is_mps", "grad_dtype", "_base",
) | _setters("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks") | {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.stride,
    torch.Tensor.storage_offset, torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.is_floating_point,
    torch.Tensor.is_complex, torch.is_complex, torch.Tensor.is_contiguous, torch.Tensor.requires_grad_,
    torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad, torch.Tensor.__len__,
    torch.Tensor.get_device, torch.Tensor.is_shared, torch.Tensor.is_inference, torch.Tensor.is_same_size, torch.numel,
}  # fmt: skip

#: Views that are made without looking at values; they carry their parameter's chunk along.
_LAZY_VIEWS: set[Any] = {torch.Tensor.detach, torch.detach} | _getters("data")

#: Calls that hand out the memory itself: it is that of a copy, since what lies in a slot is another parameter's a moment later.
_EXPORTS: set[Any] = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.__reduce_ex__}

#: Calls that tell where the memory is, for kernels that torch does not start: good until the next operation on parameters.
ADDRESSES: set[Any] = {
    torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor._typed_storage,
} | _getters("__cuda_array_interface__")  # fmt: skip

_ZERO_GRAD_CODE = nn.Module.zero_grad.__code__
_PARAMETER_CODE = nn.Parameter.__new__.__code__

#: Calls that walk a graph to its inputs.
_DIFFERENTIATES: set[Any] = {torch.autograd.grad, torch.autograd.backward}

_DATA_SET: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]

#: Calls that give a tensor other memory: a view may be none any more.
_MOVES: set[Any] = {_DATA_SET, torch.Tensor.set_}

_GRAD: Any = torch.Tensor.grad
_GRAD_GET, _GRAD_SET = _GRAD.__get__, _GRAD.__set__


class Owner(Protocol):
    """Whom parameters on disk turn to when they are used: their session. They are known to it by their numbers."""

    def call(
        self, func: Callable[..., Any], found: list[Any], numbers: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a torch call that reads `found`, which are these parameters or views of them, with their chunks in place."""

    def check_grad_access(self, number: int, drops: bool) -> None:
        """`.grad` is looked at, or set; drops: to None."""

    def owner_of_memory(self, tensor: torch.Tensor, numbers: list[int]) -> int | None:
        """The parameter whose bytes the tensor shows, where its storage is that of one of these parameters' chunks; else None."""

    def note_view(self, view: torch.Tensor, number: int) -> None:
        """The tensor is a view of this parameter, which lies where the parameter does as long as it is a ChunkView."""

    def has_place(self, number: int) -> bool:
        """Whether the parameter has memory; it has none where homes could not be moved, there or back."""

    def set_data(self, number: int, value: torch.Tensor) -> None:
        """As `p.data = value`."""

    def value(self, number: int) -> torch.Tensor:
        """An owned copy of the parameter's values, in no budget."""


_conversions = threading.local()


@contextmanager
def without_gradients() -> Iterator[None]:
    """In this thread nobody is refused a look at a gradient that has left memory: what looks converts nothing."""
    before = getattr(_conversions, "overlooks", False)
    _conversions.overlooks = True
    try:
        yield
    finally:
        _conversions.overlooks = before


def _drops_gradients(frame: FrameType) -> bool:
    """Whether it is that of a `zero_grad` of torch's modules, which looks at each gradient before it sets it to None: as a module
    has it that holds a wrapped model."""
    return frame.f_code is _ZERO_GRAD_CODE and bool(frame.f_locals.get("set_to_none"))


class ChunkTensor:
    """Mixed into the two classes below: whose parameter this is, or is a view of, and which."""

    _protrain: tuple[Owner, int]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        found = list(_chunk_tensors(args)) + list(_chunk_tensors(kwargs.values()))
        owner, number = found[0]._protrain
        if func in (_GRAD_GET, _GRAD_SET):
            if not getattr(_conversions, "overlooks", False):
                drops = args[1] is None if func == _GRAD_SET else _drops_gradients(sys._getframe(1))
                owner.check_grad_access(number, drops)
            with DisableTorchFunction():
                return func(*args, **kwargs)
        if func == _DATA_SET and isinstance(args[0], ChunkParameter):
            return owner.set_data(number, args[1])
        if func is torch.Tensor.share_memory_:
            raise PlanError("a parameter on disk cannot be put into shared memory: give away a copy, p.detach().clone()")
        if func in _EXPORTS:
            return _export(func, args, kwargs)
        if func in _DIFFERENTIATES and not any(True for _ in _chunk_tensors(args[:1])):
            return _differentiate(func, *args, **kwargs)
        if func in _LAZY_VIEWS:
            if not owner.has_place(number):
                return owner.value(number)
            with DisableTorchFunction():
                return mark_views(func(*args, **kwargs), owner, [number])
        if len(types) > 1 and (others := tuple(kind for kind in types if not issubclass(kind, ChunkTensor))):
            func = _asking(others, func)
        if any(tensor._protrain[0] is not owner for tensor in found):
            return _call_among(func, found, args, kwargs)
        numbers = [tensor._protrain[1] for tensor in found]
        result = owner.call(func, found, numbers, args, kwargs)
        if func in _MOVES and isinstance(args[0], ChunkView):
            _look_again(args[0], owner, numbers)
        return mark_views(result, owner, numbers)

    def as_subclass(self, cls: type[Any]) -> Any:
        """As a tensor's, of torch.Tensor alone: one of another class would not turn to anybody."""
        if cls is not torch.Tensor:
            raise PlanError(
                f"a {cls.__name__} cannot share the memory of a parameter that is on disk, which is another's a moment later: "
                "make it of a copy, p.detach().clone()"
            )
        return self.view_as(self)  # type: ignore[attr-defined]


def _asking(others: tuple[type[Any], ...], func: Callable[..., Any]) -> Callable[..., Any]:
    """The call as it is where parameters are plain: classes of other arguments are asked first, and see no class of these."""

    @functools.wraps(func)
    def asked(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction():
            for kind in others:
                result = kind.__torch_function__(func, others, args, kwargs)
                if result is not NotImplemented:
                    return result
        name, kinds = torch.overrides.resolve_name(func) or func, [kind.__name__ for kind in others]
        raise TypeError(f"no implementation found for {name} on types that implement __torch_function__: {kinds}")

    return asked


def _call_among(func: Callable[..., Any], found: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that reads `found`, of several wrapped models: each session brings its own, one inside of the other.

    Raises:
        PlanError: the call is to be differentiated: what is saved for that is recognised by one session alone.
    """
    groups: dict[int, list[Any]] = {}
    for tensor in found:
        groups.setdefault(id(tensor._protrain[0]), []).append(tensor)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in found):
        raise PlanError(
            "an operation that is to be differentiated reads parameters on disk of two wrapped models: give it a copy of one "
            "model's (p.detach().clone()), or run it under torch.no_grad()"
        )
    marks: list[tuple[Owner, list[int]]] = []
    for tensors in groups.values():
        owner, numbers = tensors[0]._protrain[0], [tensor._protrain[1] for tensor in tensors]
        marks.append((owner, numbers))
        func = functools.partial(_within, owner, func, tensors, numbers)
    result = func(*args, **kwargs)
    for owner, numbers in marks:
        result = mark_views(result, owner, numbers)
    return result


def _within(owner: Owner, func: Callable[..., Any], found: list[Any], numbers: list[int], /, *args: Any, **kwargs: Any) -> Any:
    return owner.call(func, found, numbers, args, kwargs)


class ChunkParameter(ChunkTensor, nn.Parameter):
    """A parameter whose chunk has its home on disk."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain parameter with these values, of memory of its own."""
        if id(self) not in memo:
            owner, number = self._protrain
            memo[id(self)] = nn.Parameter(owner.value(number), requires_grad=self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.__deepcopy__({}))

    def detach(self) -> Any:
        """As a tensor's. nn.Parameter asks for it where it is to be made of this, and would refuse it in words about detach()."""
        if sys._getframe(1).f_code is _PARAMETER_CODE:
            raise PlanError(
                "a parameter cannot share the memory of one that is on disk, which is another's a moment later: make it of a "
                "copy, nn.Parameter(p.detach().clone())"
            )
        return super().detach()


class ChunkView(ChunkTensor, torch.Tensor):
    """A tensor over the memory of such a parameter.

    lifted: offset, size and strides of one that lies nowhere while its chunk moves.
    """

    lifted: tuple[int, torch.Size, tuple[int, ...]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with uncounted():
                memo[id(self)] = self.clone()
        return memo[id(self)]

    def __repr__(self) -> str:  # type: ignore[override]
        return super().__repr__() if self.requires_grad else repr(self.__deepcopy__({}))

    def __format__(self, spec: str) -> str:
        """As a tensor's, which shows a single number by its own format, and asks for its own class."""
        return format(self.__deepcopy__({}), spec) if self.dim() == 0 else super().__format__(spec)


def _differentiate(func: Callable[..., Any], outputs: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """As torch.autograd.grad or backward, which want places in the graph of their inputs, no values: their chunks come as the
    graph asks for them."""

    def place(tensor: Any) -> Any:
        if not isinstance(tensor, ChunkTensor):
            return tensor
        with DisableTorchFunction():
            if not tensor.requires_grad:  # type: ignore[attr-defined]
                return torch.empty(0)  # which torch refuses in its words
            if func is torch.autograd.backward and not tensor.is_leaf:  # type: ignore[attr-defined]
                tensor.retain_grad()  # type: ignore[attr-defined]
            return torch.autograd.graph.get_gradient_edge(tensor)  # type: ignore[arg-type]

    places = place(inputs) if isinstance(inputs, torch.Tensor) else tuple(map(place, inputs))
    return func(outputs, inputs=places, **kwargs)


def _export(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].requires_grad and torch.is_grad_enabled() and func is not torch.Tensor.__reduce_ex__ and not kwargs.get("force"):
        with DisableTorchFunction():
            return func(*args, **kwargs)  # torch refuses
    with uncounted(), torch.no_grad():
        found = func(args[0].detach().clone(), *args[1:], **kwargs)
    if hasattr(found, "flags"):
        found.flags.writeable = False  # what is written there would reach no parameter
    return found


def _chunk_tensors(values: Any, depth: int = 3) -> Iterator[Any]:
    for value in values:
        if isinstance(value, ChunkTensor):
            yield value
        elif depth and isinstance(value, list | tuple):
            yield from _chunk_tensors(value, depth - 1)
        elif depth and isinstance(value, dict):
            yield from _chunk_tensors(value.values(), depth - 1)


def mark_views(result: Any, owner: Owner, numbers: list[int]) -> Any:
    """`result` with every tensor in it that lies in a slot made a ChunkView of the parameter whose bytes it shows."""
    if isinstance(result, torch.Tensor):
        if isinstance(result, ChunkTensor) or result.layout != torch.strided:
            return result
        number = owner.owner_of_memory(result, numbers)
        if number is None:
            return result
        view = _as_view(result)
        view._protrain = (owner, number)
        owner.note_view(view, number)
        return view
    if type(result) in (list, tuple):
        return type(result)(mark_views(item, owner, numbers) for item in result)
    return result


def _as_view(tensor: torch.Tensor) -> ChunkView:
    """The object itself: an alias would be a node of its own in the graph, and keep the tensor that it is an alias of."""
    if type(tensor) is not torch.Tensor:
        return tensor.as_subclass(ChunkView)
    tensor.__class__ = ChunkView  # type: ignore[assignment]
    return tensor  # type: ignore[return-value]


def _look_again(view: ChunkView, owner: Owner, numbers: list[int]) -> None:
    """A view was given other memory: it is another parameter's, or a plain tensor."""
    with DisableTorchFunction():
        number = owner.owner_of_memory(view, numbers)
    if number is None:
        view.__class__ = torch.Tensor  # type: ignore[assignment]
        del view._protrain
    else:
        view._protrain = (owner, number)
        owner.note_view(view, number)


@functools.cache
def _guard_readers() -> None:
    """What reads the values of a tensor below `__torch_function__` turns to it: functions and methods of TorchScript, and
    DLPack's. torch.tensor and torch.asarray do so too, but Dynamo knows these by what they are: nothing may stand in their
    place."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = _turning(kind.__call__)  # type: ignore[method-assign]
    dlpack: Any = torch.utils.dlpack
    export = dlpack.to_dlpack

    @functools.wraps(export)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        return _export(export, (tensor,), {}) if isinstance(tensor, ChunkTensor) else export(tensor)

    dlpack.to_dlpack = to_dlpack


def _turning(call: Callable[..., Any]) -> Callable[..., Any]:
    def as_it_is(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    @functools.wraps(call)
    def turned(*args: Any, **kwargs: Any) -> Any:
        if next(_chunk_tensors((args, kwargs)), None) is None:
            return call(*args, **kwargs)
        return ChunkTensor.__torch_function__(as_it_is, (), args, kwargs)

    return turned


@functools.cache
def _guard_transforms() -> None:
    """The transforms of torch.func wrap what they are given below `__torch_function__`: nobody would bring the chunk."""
    for module, name in (("torch._functorch.eager_transforms", "_wrap_for_grad"), ("torch._functorch.vmap", "_add_batch_dim")):
        wrap = getattr(sys.modules.get(module), name, None)
        if wrap is not None:
            setattr(sys.modules[module], name, functools.partial(_wrap_own, wrap))


def _wrap_own(wrap: Callable[..., Any], tensor: Any, /, *args: Any) -> Any:
    if isinstance(tensor, ChunkTensor):
        raise PlanError(
            "a transform of torch.func (grad, vmap, jvp) is given a parameter that is on disk: give it a copy, p.detach().clone()"
        )
    return wrap(tensor, *args)


def enchain(p: nn.Parameter, owner: Owner, number: int) -> None:
    """Make `p` a parameter of a chunk on disk; the object stays the same."""
    _guard_transforms()
    _guard_readers()
    p.__class__ = ChunkParameter
    p._protrain = (owner, number)  # type: ignore[attr-defined]


def release(p: nn.Parameter) -> None:
    """Make `p` a plain parameter again."""
    if isinstance(p, ChunkParameter):
        p.__class__ = nn.Parameter  # type: ignore[assignment]
        del p._protrain
