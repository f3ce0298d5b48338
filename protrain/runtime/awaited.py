"""Graphs whose backward has not come: what autograd saved in them of parameters in memory lies where these lay, so homes stay.

A forward that recorded gradients leaves a note at the nodes that made what it returned: it dies with them, and is told when a
backward comes by that is the last one. One with create_graph makes a graph that need not hold these nodes: the note is held until
a step is made. A graph that none of them shows, as one of a part of the model, is refused where it would read old values
(residency.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


class _Note:
    came = False

    def __init__(self, differentiated: set[_Note], tell: weakref.WeakMethod[Callable[[], object]]) -> None:
        self._differentiated, self._tell = differentiated, tell

    def backward_comes(self, _grads: Any) -> None:
        if torch.is_grad_enabled():  # create_graph: what this backward makes saves parameters too, and may outlive these nodes
            self._differentiated.add(self)
            if (tell := self._tell()) is not None:
                tell()
        self.came |= not torch._C._autograd._get_current_graph_task_keep_graph()  # else another one may come


class Awaited:
    """Of one session. tell: a method of it, called when a backward begins that makes a graph. Graphs outlive sessions, and must
    not hold them."""

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = weakref.WeakMethod(tell)
        self._notes: list[weakref.ref[_Note]] = []
        self._differentiated: set[_Note] = set()  # in this step, by a backward that has a graph of its own
        self._n_hidden = 0  # forwards of this step whose graphs, if they have any, are not seen

    def add(self, outputs: Iterable[torch.Tensor]) -> None:
        """A forward of the whole model has returned these."""
        note = _Note(self._differentiated, self._tell)
        nodes = {output.grad_fn for output in outputs if output.grad_fn is not None}
        for node in nodes:
            node.register_prehook(note.backward_comes)
        self._n_hidden += not nodes
        self._notes = [ref for ref in self._notes if _waits(ref)]
        self._notes.append(weakref.ref(note))

    def forget(self) -> None:
        """No backward comes for any of them."""
        self._notes.clear()
        self._differentiated.clear()
        self._n_hidden = 0

    def step_made(self) -> None:
        """Graphs of gradients from before it are awaited no more: in torch's loop their backward is an error of versions."""
        self._differentiated.clear()
        self._n_hidden = 0

    def any(self) -> bool:
        """Whether a backward may come for one of them that finds its graph whole."""
        return bool(self._differentiated) or any(_waits(ref) for ref in self._notes)

    def count(self) -> int:
        """Of forwards whose backward may come. One that returned nothing with a graph may have put it elsewhere, as into the
        model, and counts until a step is made; one whose graph has died does not."""
        return self._n_hidden + sum(map(_waits, self._notes))


def _waits(ref: weakref.ref[_Note]) -> bool:
    note = ref()
    return note is not None and not note.came
