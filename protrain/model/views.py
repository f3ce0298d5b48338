"""Views of parameters on disk that the program has: where a chunk gets another place they go along, their graphs with them.

A view is found by a weak reference from the moment it is made. While chunks move it is lifted: it lies over no memory, so that
slots and homes can go, and its geometry waits in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.weak import TensorWeakRef

from .parameters import ChunkView, DisableTorchFunction

FEW = 64


class Views:
    """By chunk."""

    def __init__(self) -> None:
        self._refs: dict[int, list[TensorWeakRef]] = {}
        self._limits: dict[int, int] = {}  # so many references are looked through once more: views are made in every step

    def add(self, view: torch.Tensor, chunk: int) -> None:
        refs = self._refs.setdefault(chunk, [])
        refs.append(TensorWeakRef(view))
        if len(refs) > self._limits.get(chunk, FEW):
            refs[:] = [ref for ref in refs if ref() is not None]
            self._limits[chunk] = 2 * len(refs) + FEW

    def of(self, chunk: int) -> Iterator[ChunkView]:
        """Those that are alive."""
        for ref in list(self._refs.get(chunk, ())):
            view = ref()
            if isinstance(view, ChunkView):  # it may have become a plain tensor
                yield view

    def lift_all(self) -> None:
        """Views lie nowhere until they are put down again."""
        with _unseen():
            for chunk in self._refs:
                for view in self.of(chunk):
                    if view.lifted is None:
                        view.lifted = int(view.storage_offset()), view.size(), view.stride()
                        _lay(view, torch.empty((), dtype=view.dtype, device=view.device).expand(view.shape))

    def put(self, view: ChunkView, base: torch.Tensor) -> None:
        """The view lies in the chunk whose memory `base` is, as it lay in it before."""
        with _unseen():
            _put(view, base, 0)

    def part(self, chunk: int) -> None:
        """Views of this chunk show memory of their own from now on, as they lie: they are plain tensors."""
        for view in self.of(chunk):
            _make_plain(view)

    def part_from(self, chunk: int, number: int, values: torch.Tensor, begin_bytes: int) -> None:
        """Those of parameter `number`, which begins at this byte of the chunk, show these values from now on, which lie as
        its own do."""
        with _unseen():
            for view in self.of(chunk):
                if view._protrain[1] != number:
                    continue
                _put(view, values, begin_bytes)
                _make_plain(view)


def _put(view: ChunkView, memory: torch.Tensor, begin_bytes: int) -> None:
    """The view lies in this memory, which begins at this byte of the chunk, as it lay in the chunk."""
    offset, size, stride = view.lifted or (int(view.storage_offset()), view.size(), view.stride())
    found = torch.empty(0, dtype=view.dtype, device=view.device)
    _lay(view, found.set_(memory.untyped_storage(), offset - begin_bytes // view.element_size(), size, stride))
    view.lifted = None


def _make_plain(view: ChunkView) -> None:
    view.__class__ = torch.Tensor  # type: ignore[assignment]
    del view._protrain


@contextmanager
def _unseen() -> Iterator[None]:
    """By autograd and by those who watch calls."""
    with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
        yield


def _lay(view: torch.Tensor, found: torch.Tensor) -> None:
    """The view is what was found, but for bits that say that it shows the conjugate or the negative of that."""
    found = found.conj() if view.is_conj() else found
    view.data = torch._neg_view(found) if view.is_neg() else found
