"""How the largest model is searched for: layers are doubled until some fail, then what is between is halved."""

from __future__ import annotations

FINEST = 16  # what is between is a sixteenth of what fits, or one layer: good enough


def settled(fits: int, fails: int | None) -> bool:
    """Whether so many layers are the largest, near enough. fails: the fewest that are known to fail; None: none is."""
    return fails is not None and fails - fits <= max(fits // FINEST, 1)


def next_layers(fits: int, fails: int | None, most: int) -> int | None:
    """Which number of layers is tried next, `most` at most; None where none is left to try."""
    if settled(fits, fails) or fits >= most:
        return None
    return min(max(2 * fits, 1) if fails is None else (fits + fails) // 2, most)
