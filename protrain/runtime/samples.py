"""What memory is of, over a step: samples at every begin and end of a block, taken where `Session.watch_memory` asked for them.

Each sample is measured: live bytes are the account's, parts are what the engine, the stash and `.grad` hold at that moment. What
none of them holds is activations that autograd keeps, the batch, and what the operation under way has made. Between two samples
the arena's own mark tells the highest there was, so a peak inside a block is seen as well. Nothing is recorded unless asked for.
Of a step of very many moments, as --accumulate makes them, some are kept, and what was highest is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .. import _core
from ..base.thinning import kept
from ..model.parameters import DisableTorchFunction
from ..planner.plans import Plan

if TYPE_CHECKING:
    from ..session import Session

MOST_SAMPLES = 1000  # of a step, about


@dataclass(frozen=True)
class MemorySample:
    """One moment, in seconds from the beginning of the step. Bytes, as the arena counts them; the parts sum up to live_bytes.

    highest_bytes is the most that was live since the sample before, of those that are kept. stash_bytes are activations that
    leave memory or came back; rest_bytes those that autograd keeps, with all that operations make for themselves.
    """

    seconds: float
    moment: str
    live_bytes: int
    highest_bytes: int
    parameter_bytes: int
    state_bytes: int
    slot_bytes: int
    ring_bytes: int
    gradient_bytes: int
    stash_bytes: int
    rest_bytes: int


@dataclass(frozen=True)
class MemoryOfStep:
    """A completed step, counted from 1, and the plan that it was made under. n_left_out: samples that were taken and not kept."""

    step: int
    plan: Plan
    samples: tuple[MemorySample, ...]
    n_left_out: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that was live in the step."""
        return max(sample.highest_bytes for sample in self.samples)


class MemorySamples:
    """Of one session; called on the thread that drives the step. last: the last completed step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._samples: list[MemorySample] = []
        self._n_taken = 0
        self._began_ns = 0
        self.last: MemoryOfStep | None = None

    def begin_step(self, now_ns: int) -> None:
        """The first forward of a step begins."""
        self._began_ns = now_ns
        self._samples, self._n_taken = [], 0
        self._session.marks.tell()  # what was highest before is none of this step's
        self._add("step begins", now_ns)

    def sample(self, moment: str, block: int) -> None:
        """Something begins or ends; block -1: of the whole model."""
        self._add(moment if block < 0 else f"{moment} {block}", _core.now_ns())

    def end_step(self, number: int, now_ns: int) -> None:
        """Step `number` is complete; nothing was planned anew since it began to compute."""
        self._add("step ends", now_ns)
        samples = tuple(thinned(self._samples, MOST_SAMPLES))
        self.last = MemoryOfStep(number, self._session.homes.arrangement.plan, samples, self._n_taken - len(samples))

    def _add(self, moment: str, now_ns: int) -> None:
        session = self._session
        if len(self._samples) >= 2 * MOST_SAMPLES:
            self._samples = thinned(self._samples, MOST_SAMPLES)
        self._n_taken += 1
        highest = session.marks.tell()
        held = session.engine.held()
        gradient_bytes = held["gradient_bytes"] + self._grad_bytes()
        parts = (
            held["parameter_bytes"], held["state_bytes"], held["slot_bytes"], held["ring_bytes"], gradient_bytes,
            held["stash_memory_bytes"],
        )  # fmt: skip
        live = held["live_bytes"]
        self._samples.append(
            MemorySample(
                (now_ns - self._began_ns) / 1e9, moment, live, max(highest, live), *parts, rest_bytes=max(live - sum(parts), 0)
            )
        )

    def _grad_bytes(self) -> int:
        """Of gradients that lie in `.grad`; several may share a storage."""
        found: dict[int, int] = {}
        with DisableTorchFunction():
            for p in self._session.params:
                grad = p.grad
                if grad is not None and grad.layout == torch.strided:
                    storage = grad.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
        return sum(_core.rounded_bytes(size) for size in found.values() if size)


def thinned(samples: list[MemorySample], most: int) -> list[MemorySample]:
    """About so many of the samples at most: of equal stretches of time those with the most live bytes, and where each kind of
    memory was at its highest. What was highest since a sample that is left out counts for the next one."""
    sizes = [
        (
            s.live_bytes, s.highest_bytes, s.parameter_bytes, s.state_bytes, s.slot_bytes, s.ring_bytes, s.gradient_bytes,
            s.stash_bytes, s.rest_bytes,
        )
        for s in samples
    ]  # fmt: skip
    found: list[MemorySample] = []
    begin = 0
    for number in kept([s.seconds for s in samples], sizes, most):
        highest = max(s.highest_bytes for s in samples[begin : number + 1])
        found.append(replace(samples[number], highest_bytes=highest))
        begin = number + 1
    return found
