"""The largest model that trains: by doubling its layers until one does not, then by halving what is between, while time lasts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from layers import next_layers, settled

EXPECTED = 1.3  # more than in proportion to its layers a larger model may take

FOUND, NO_TIME, NO_MORE = "found", "time was over", "no more was asked for"


def search(
    trains: Callable[[int], bool],
    *,
    until: float,
    most: int,
    trained: int = 0,
    failed: int | None = None,
    note: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """The most layers that train: {"layers", "fails_at_layers" (None: not known), "ended" (why no more was tried)}.

    Args:
        trains: whether a model of so many layers does.
        until: by time.monotonic(), when no other try may go on.
        most: layers that are tried.
        trained, failed: layers that are known to train, and not to.
        note: told of what is known after each try, as if time were over then.
    """
    seconds_per_layer = 0.0
    while True:
        found = {"layers": trained, "fails_at_layers": failed, "ended": NO_TIME}
        note(found)
        layers = next_layers(trained, failed, most)
        if layers is None:
            return {**found, "ended": FOUND if settled(trained, failed) else NO_MORE}
        begin = time.monotonic()
        if begin + seconds_per_layer * layers * EXPECTED >= until:
            return found
        if trains(layers):
            trained = layers
        else:
            failed = layers
        seconds_per_layer = (time.monotonic() - begin) / layers
