"""Rates: of the CPU's updates and of the lanes between the host and the device, beside what was measured of them alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from protrain import _core
from protrain.planner.profiles import Machine
from protrain.profiling.timeline import TRANSFERS, Timeline, length, union

#: Bytes that Adam moves for each element in fp32: parameter and two moments read and written, gradient read.
ADAM_BYTES = 28
ROUNDS = 5
HYPER = {
    "lr": 1e-4, "weight_decay": 0.01, "maximize": False, "eps": 1e-8, "amsgrad": False, "beta1": 0.9, "beta2": 0.999,
}  # fmt: skip


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest round, after one that touches the memory."""
    seconds = []
    for _ in range(1 + ROUNDS):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def host_rates(elements: int) -> dict[str, Any]:
    """What all cores do alone in ordinary memory, in bytes each second: AdamW by the core's kernel, and a copy, both counted in
    what they read and write."""
    threads = len(os.sched_getaffinity(0))
    part = max(elements // threads // 1024, 1) * 1024
    arrays = [torch.full((part * threads,), value) for value in (0.5, 0.01, 0.0, 0.0)]  # parameter, gradient, moments
    parts = [[array[part * i : part * (i + 1)].numpy() for array in arrays] for i in range(threads)]

    def update(mine: list[Any]) -> None:
        _core.update("adamw", HYPER, 1, 1.0, mine[0], mine[2:], mine[1])

    with ThreadPoolExecutor(threads) as pool:
        adam = _best(lambda: list(pool.map(update, parts)))
        copy = _best(lambda: list(pool.map(lambda mine: mine[0].__setitem__(slice(None), mine[1]), parts)))
    return {
        "threads": threads,
        "elements": part * threads,
        "adam_bytes_per_second": ADAM_BYTES * part * threads / adam,
        "copy_bytes_per_second": 8 * part * threads / copy,
    }


class Updates:
    """Of a session's chunks beside the device, from when it is made."""

    def __init__(self, session: Any) -> None:
        self._session, self._begin_ns = session, session.engine.stats()["update_ns"]

    def bytes_per_second(self, steps: int) -> float | None:
        """In so many steps; None where nothing is updated there."""
        session = self._session
        elements = sum(entry.count for entry in session.layout.entries if not session.engine.in_memory(entry.chunk))
        spent_ns = session.engine.stats()["update_ns"] - self._begin_ns
        return ADAM_BYTES * elements * steps / spent_ns * 1e9 if elements and spent_ns > 0 else None


def link_shares(timeline: Timeline, machine: Machine) -> dict[str, Any]:
    """For each direction, what a step moved while its lane was busy, and which share that is of the speed that calibration
    measured of it alone; empty where nothing moved. Where both directions were busy at once they share the link, by
    link_overlap, so that a share below one need not be time lost."""
    found: dict[str, Any] = {}
    for lane, speed in zip(TRANSFERS, (machine.upload, machine.offload), strict=True):
        events = [event for event in timeline.events if event.lane == lane and event.bytes]
        busy = length(union((event.start_seconds, event.end_seconds) for event in events))
        if busy > 0:
            rate = sum(event.bytes for event in events) / busy
            measured = speed.bytes_per_second
            found[lane] = {
                "bytes": sum(event.bytes for event in events),
                "busy_seconds": busy,
                "bytes_per_second": rate,
                "measured_bytes_per_second": measured,
                "share": rate / measured if measured else None,
            }
    return found | {"link_overlap": machine.link_overlap} if found else found
