"""What a program asked of the numbers that it computed, and how it was answered: a dry run answered the same goes its way.

Fake tensors have no data, so a program that decides by computed numbers cannot be foreseen before it was run. One forward with
data is listened to, and what was asked in it is noted: single numbers, places and sizes that hang on values, arrays of NumPy.
Each question is known by what is asked and by the line of the program that asks; what is asked again there is answered in turn.
So what libraries ask in one of the runs only, as whether a distribution's arguments are in range, shifts no other answer.

The same shapes may be answered otherwise in another step, and need more: `varies` says whether sizes may hang on answers.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch._ops import OpOverload
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from ..base.counting import uncounted

#: Of answers of one forward; a program that asks for more is not listened to any further.
MOST_ANSWERS, MOST_BYTES = 1 << 14, 1 << 20

_aten = torch.ops.aten
_NUMBER = _aten._local_scalar_dense.default
_ARRAY = "numpy"  # a question that is no operation

#: What picks by masks, among other ways: how many numbers each of them leaves is the question.
_PICKING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)

_ASKING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_MASKS = (torch.bool, torch.uint8)
_LIBRARIES = ("torch", "protrain", "numpy")
_MODES = ("__torch_function__", "__torch_dispatch__")

Question = tuple[Any, str, int]  # what is asked, and the file and the line that asks


@dataclass(frozen=True)
class Answer:
    """A tensor that was one. values: where it has whole numbers; None: they are of no use to anybody."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None


def hangs_on_values(operation: Any) -> bool:
    """Whether its result, or the size of that, may hang on the values of its inputs."""
    return not _ASKING.isdisjoint(operation.tags)


def masks_among(operation: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """By which it picks."""
    return [index for index in args[1] if index is not None and index.dtype in _MASKS] if operation in _PICKING else []


def is_question(operation: Any, args: Sequence[Any]) -> bool:
    """Whether the operation is one, given these. Picking is where it is by masks."""
    return bool(masks_among(operation, args)) if operation in _PICKING else hangs_on_values(operation)


def _question(what: Any) -> Question:
    """Asked by the innermost line that is of no library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _passes_on(frame):
        frame = frame.f_back
    return what, frame.f_code.co_filename, frame.f_lineno


def _passes_on(frame: FrameType) -> bool:
    """Whether it asks for somebody else: a library's, and that of a mode or of a subclass, which a dry run may be without."""
    return frame.f_code.co_name in _MODES or frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES


class Answers:
    """Of one forward. varies: whether how large tensors are may hang on them. too_many: they were not all noted."""

    def __init__(self) -> None:
        self.of: dict[Question, list[Any]] = {}
        self.varies = self.too_many = False
        self._left, self._left_bytes = MOST_ANSWERS, MOST_BYTES

    def fits(self, count: int, n_bytes: int = 0) -> bool:
        """Whether there is room for so many answers."""
        return count <= self._left and n_bytes <= self._left_bytes

    def note(self, what: Any, answer: Any, n_bytes: int = 0, *, varies: bool) -> None:
        self._left, self._left_bytes = self._left - 1, self._left_bytes - n_bytes
        self.too_many |= self._left < 0 or self._left_bytes < 0
        self.varies |= varies
        if not self.too_many:
            self.of.setdefault(_question(what), []).append(answer)

    def note_result(self, operation: Any, result: Any) -> None:
        """What such an operation gave: of what is larger than the room that is left for it the size."""
        n_bytes = sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and _is_whole(leaf))
        fits = n_bytes <= self._left_bytes
        noted = tree_map_only(torch.Tensor, _noted if fits else _size_of, result)
        self.note(operation, noted, n_bytes if fits else 0, varies=_may_be_size(result))

    def note_masks(self, operation: Any, masks: Sequence[torch.Tensor]) -> None:
        n_bytes = sum(mask.nbytes for mask in masks)
        self.note(operation, [_kept(mask) for mask in masks] if n_bytes <= self._left_bytes else [], n_bytes, varies=True)


def _may_be_size(result: Any) -> bool:
    return any(not isinstance(leaf, bool | float | complex) for leaf in tree_leaves(result))


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    with uncounted():
        return tensor.detach().cpu().clone()


def _size_of(tensor: torch.Tensor) -> Answer:
    return Answer(tuple(tensor.shape), tensor.stride(), tensor.dtype, None)


def _noted(tensor: torch.Tensor) -> Answer:
    return Answer(tuple(tensor.shape), tensor.stride(), tensor.dtype, _kept(tensor) if _is_whole(tensor) else None)


class _Listening(TorchDispatchMode):
    """Notes what this thread's program asks of torch's operations; what it computes stays as it is."""

    supports_higher_order_operators = True

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # functions that are compiled stay so, and what they ask inside is not heard

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # for versions of torch that ask this

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload) and not self.answers.too_many:
            if masks := masks_among(func, args):
                self.answers.note_masks(func, masks)
            elif is_question(func, args):
                self.answers.note_result(func, result)
        return result


#: Which threads listen, by what, the innermost last; while any does torch has other functions.
_listeners: dict[int, list[_Listening]] = {}
_undo = ExitStack()
_lock = threading.Lock()


def _answers_here() -> list[Answers]:
    """What this thread notes answers in, where it does and may."""
    return [mode.answers for mode in _listeners.get(threading.get_ident(), ()) if not mode.answers.too_many]


def _called(before: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """By its own name where subclasses and modes are asked: torch would tell them that of what is in its place."""
    if has_torch_function((tensor,)):
        return handle_torch_function(before, (tensor,), tensor, *args, **kwargs)
    return before(tensor, *args, **kwargs)


def _heard_as_array(before: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    array = _called(before, tensor, *args, **kwargs)
    for answers in _answers_here() if hasattr(array, "nbytes") else ():
        kept = array.copy() if answers.fits(1, array.nbytes) else None
        answers.note(_ARRAY, kept, array.nbytes, varies=True)
    return array


def _heard_as_list(before: Callable[..., Any], tensor: torch.Tensor) -> Any:
    numbers = _called(before, tensor)
    with DisableTorchFunction():  # that of modes, too
        count = tensor.numel()
    for answers in _answers_here():  # a fake tensor asks for one number after the other
        answers.too_many = not answers.fits(count)
        for number in [] if answers.too_many else tree_leaves(numbers):
            answers.note_result(_NUMBER, number)
    return numbers


def _unheard(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Without the modes that listen, where no other one is inside of them."""
    with ExitStack() as without:
        for mode in reversed(_listeners.get(threading.get_ident(), ())):
            if _get_current_dispatch_mode() is not mode:
                break
            without.enter_context(_pop_mode_temporarily())
        return before(*args, **kwargs)


#: What is done to functions of torch. Some compute in another way, with other bits, where any mode is active.
_OTHERS: tuple[tuple[Any, Sequence[str], Callable[..., Any]], ...] = (
    (torch.Tensor, ("numpy",), _heard_as_array),
    (torch.Tensor, ("tolist",), _heard_as_list),
    (torch.linalg, ("svdvals", "eigvals", "eigvalsh", "cond", "matrix_norm", "norm", "matrix_rank", "pinv"), _unheard),
    (torch, ("norm", "nuclear_norm", "ormqr", "pinverse"), _unheard),
    (torch.autograd, ("_engine_run_backward",), _unheard),
)


def _replacement(before: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return other(before, *args, **kwargs)

    return replacement


def _replace_all() -> None:
    """Until `_undo` is closed, also where a module has imported a function by its name."""
    others: dict[int, Callable[..., Any]] = {}
    from torch import _dynamo  # one that came later would know what is here now as no functions of torch's

    for where, names, other in _OTHERS:
        for name in names:
            if (before := getattr(where, name, None)) is not None:
                others[id(before)] = _replacement(before, other)
                if where in (torch, torch.linalg):  # for what is compiled meanwhile it is one of torch's
                    _dynamo.allow_in_graph(others[id(before)])
                _replace(where, name, others[id(before)])
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in others and module is not torch.functional:  # it tells subclasses its own names
                _replace(module, name, others[id(value)])


def _replace(where: Any, name: str, value: Any) -> None:
    own = where.__dict__.get(name)
    _undo.callback(functools.partial(delattr, where, name) if own is None else functools.partial(setattr, where, name, own))
    setattr(where, name, value)


@contextmanager
def listening() -> Iterator[Answers]:
    """Inside, what this thread's program asks is noted, also by what listens around this."""
    mode, here = _Listening(Answers()), threading.get_ident()
    try:
        with _lock:
            first = not _listeners
            _listeners.setdefault(here, []).append(mode)
            if first:
                _replace_all()
        with mode:
            yield mode.answers
    finally:
        with _lock:
            if mode in (mine := _listeners.get(here, [])):
                mine.remove(mode)
            if not mine:
                _listeners.pop(here, None)
            if not _listeners:
                _undo.close()


class Replies:
    """Of one dry run: which of the answers come next. Without answers there are none."""

    def __init__(self, answers: Answers | None = None) -> None:
        self._of: Mapping[Question, list[Any]] = answers.of if answers is not None else {}
        self._next: dict[Question, int] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def take(self, what: Any) -> Any:
        """The next one, which is taken whether somebody needs it or not; None: there is none."""
        if not self._of:
            return None
        question = _question(what)
        place, answers = self._next.get(question, 0), self._of.get(question, ())
        self._next[question] = place + 1
        return answers[place] if place < len(answers) else None

    def take_array(self) -> Any:
        found = self.take(_ARRAY)
        return None if found is None else found.copy()

    def now(self) -> dict[Question, int]:
        """For `again`."""
        return dict(self._next)

    @contextmanager
    def again(self, then: dict[Question, int]) -> Iterator[None]:
        """Inside, what was asked since then is asked again."""
        now, self._next = self._next, dict(then)
        try:
            yield
        finally:
            self._next = now


def answered_again(forward: Callable[..., Any], replies: Replies) -> Callable[..., Any]:
    """The forward, to be run and then again: what it asks is answered as it was."""
    if not replies:
        return forward
    begun: list[dict[Question, int]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not begun:
            begun.append(replies.now())
            return forward(*args, **kwargs)
        with replies.again(begun[0]):
            return forward(*args, **kwargs)

    return run
