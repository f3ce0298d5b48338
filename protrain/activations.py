"""Activations: saved-tensor hooks around what reads parameters, and blocks whose activations are recomputed.

Two kinds of things are saved for backward. Memory of a parameter is recognised and passed through: autograd gets a small
record, and unpacking it in backward is the demand for the parameter's chunk. Everything else is left as it is in a block of
mode keep; in a block of mode checkpoint only its place in the order of saved tensors is noted, and the block's forward runs
again, with the same random numbers, when the first of them is asked for.

As torch's own non-reentrant checkpoint does, recomputation stops at the last tensor that was saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .session import Session

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


class SavedParameter:
    """A saved tensor that lies in a parameter's memory: which parameter, and the geometry of the view."""

    __slots__ = ("number", "offset", "owner", "size", "stride", "version")

    def __init__(self, number: int, tensor: torch.Tensor, offset: int, owner: torch.Tensor) -> None:
        self.number = number
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = offset  # in elements, from the parameter's first
        self.owner = weakref.ref(owner)
        self.version = owner._version


class Kept:
    """A saved tensor that stays: an alias, so that no output keeps its own graph alive, and the version it had."""

    __slots__ = ("alias", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias = tensor.detach()
        self.version = tensor._version


class Recomputed:
    """A saved tensor that a block's recomputation brings back."""

    __slots__ = ("__weakref__", "dtype", "frame", "shape", "tensor")

    def __init__(self, frame: Frame, tensor: torch.Tensor) -> None:
        self.frame, self.shape, self.dtype = frame, tensor.shape, tensor.dtype
        self.tensor: torch.Tensor | None = None


def check_version(now: int, saved: int, shape: Any) -> None:
    """As autograd does, which does not look at versions where hooks are set.

    Raises:
        RuntimeError: the tensor was changed in place after it was saved.
    """
    if now != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(shape)} is at version {now}; expected version {saved} instead"
        )


class Stop(BaseException):
    """Ends a recomputation that has brought back all that was saved."""


def operation_hooks(session: Session) -> Hooks:
    """For one operation on parameters outside of recomputed blocks."""

    def pack(tensor: torch.Tensor) -> Any:
        return session.saved_parameter(tensor) or Kept(tensor)

    def unpack(saved: Any) -> torch.Tensor:
        if type(saved) is SavedParameter:
            return session.unpack_parameter(saved)
        check_version(saved.alias._version, saved.version, saved.alias.shape)
        alias: torch.Tensor = saved.alias
        return alias

    return pack, unpack


class Frame:
    """One forward of one recomputed block: its inputs, the random state it started from, and what it saved."""

    def __init__(self, session: Session, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.session, self.forward, self.args, self.kwargs = session, forward, args, kwargs
        self.versions = [(t, t._version) for t in _tensors(args, kwargs)]
        self.random_state = torch.get_rng_state()
        self.autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
        self.saved: list[weakref.ref[Recomputed]] = []

    # ---- forward ----

    def pack(self, tensor: torch.Tensor) -> Any:
        found = self.session.saved_parameter(tensor)
        if found:
            return found
        record = Recomputed(self, tensor)
        self.saved.append(weakref.ref(record))
        return record

    def unpack(self, saved: Any) -> torch.Tensor:
        if type(saved) is SavedParameter:
            return self.session.unpack_parameter(saved)
        if saved.tensor is None:
            self.recompute()
        if saved.tensor is None:
            raise RuntimeError(
                "a recomputed block did not save the tensors that its forward saved: it must do the same each time"
            )
        tensor: torch.Tensor = saved.tensor
        return tensor

    # ---- recomputation ----

    def recompute(self) -> None:
        for tensor, version in self.versions:
            check_version(tensor._version, version, tensor.shape)
        now = torch.get_rng_state()
        torch.set_rng_state(self.random_state)
        enabled, dtype, cache = self.autocast
        place = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal place
            if self.session.saved_parameter(tensor):
                return
            if place >= len(self.saved):
                raise RuntimeError("a recomputed block saved more tensors than its forward: it must do the same each time")
            record = self.saved[place]()
            place += 1
            if record is not None:
                if tensor.shape != record.shape or tensor.dtype != record.dtype:
                    raise RuntimeError(
                        f"a recomputed block saved a tensor of shape {list(tensor.shape)} where its forward saved one of "
                        f"{list(record.shape)}: it must do the same each time"
                    )
                record.tensor = tensor.detach()
            if place == len(self.saved):
                raise Stop

        def unpack(_saved: Any) -> torch.Tensor:
            raise RuntimeError("backward inside a recomputed block is not supported")

        _push(pack, unpack)
        before, self.session.frame = self.session.frame, self
        try:
            with torch.enable_grad(), torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache):
                self.forward(*self.args, **self.kwargs)
        except Stop:
            pass
        finally:
            self.session.frame = before
            _pop()
            torch.set_rng_state(now)


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def run_checkpointed(session: Session, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block's forward so that backward runs it again instead of keeping what it saves."""
    frame = Frame(session, forward, args, kwargs)
    _push(frame.pack, frame.unpack)
    before, session.frame = session.frame, frame
    try:
        return forward(*args, **kwargs)
    finally:
        session.frame = before
        _pop()


def run_operation(session: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation on parameters with hooks that recognise their memory."""
    _push(*session.hooks)
    try:
        return func(*args, **kwargs)
    finally:
        _pop()
