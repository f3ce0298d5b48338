"""Long courses in few points, so that what is highest in them stays to be seen."""

from __future__ import annotations

from collections.abc import Sequence


def kept(places: Sequence[float], sizes: Sequence[Sequence[float]], most: int) -> list[int]:
    """Which points of a course stay, where there are more than `most`: the first and the last, of each of `most` equal stretches
    the one whose first size is highest, and wherever one of the sizes is highest of all.

    Args:
        places: of the points, which do not fall.
        sizes: as many for each point.

    Returns:
        Their numbers, rising.
    """
    if len(places) <= most:
        return list(range(len(places)))
    begin, span = places[0], places[-1] - places[0] or 1.0
    highest: dict[int, int] = {}
    for number, place in enumerate(places):
        stretch = int(most * (place - begin) / span)
        if stretch not in highest or sizes[number][0] > sizes[highest[stretch]][0]:
            highest[stretch] = number
    tops = (max(range(len(places)), key=lambda number: sizes[number][kind]) for kind in range(len(sizes[0])))
    return sorted({0, len(places) - 1, *highest.values(), *tops})
