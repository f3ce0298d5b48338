"""The model of torch's caching allocator by which decision 0020 was made."""

from __future__ import annotations

import pytest

from benchmarks.lost_memory import LEAST_BYTES, MIB, Allocator, least_range, lost, played


@pytest.mark.parametrize(
    ("size", "live_bytes", "reserved_bytes"),
    [
        (1, LEAST_BYTES, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + LEAST_BYTES, 20 * MIB),
        (10 * MIB - LEAST_BYTES, 10 * MIB - LEAST_BYTES, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB is not cut off
        (13 * MIB + 1, 14 * MIB, 14 * MIB),
    ],
)
def test_a_request_gets_a_segment_of_its_own(size: int, live_bytes: int, reserved_bytes: int) -> None:
    allocator = Allocator()
    allocator.take(size)
    assert (allocator.live_bytes, allocator.reserved_bytes) == (live_bytes, reserved_bytes)


def test_the_smallest_block_that_fits_is_cut_and_grows_together_again() -> None:
    allocator = Allocator()
    first, second = allocator.take(40 * MIB), allocator.take(20 * MIB)
    allocator.give(first)
    allocator.give(second)
    inside = [allocator.take(6 * MIB) for _ in range(3)]  # of the block of 20 MiB, whose last 2 are left
    assert allocator.reserved_bytes == 60 * MIB
    whole = allocator.take(40 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    for block in inside:
        allocator.give(block)
    assert allocator.take(20 * MIB).size == 20 * MIB
    assert allocator.reserved_bytes == 60 * MIB
    allocator.give(whole)
    assert (allocator.live_bytes, allocator.most_live_bytes) == (20 * MIB, 60 * MIB)


def test_what_is_free_in_pieces_does_not_serve_a_large_request() -> None:
    """As logits were refused beside as many free bytes; in one range too, where something live lies between."""
    events = [(0, 30 * MIB), (1, 30 * MIB), (0, 0), (1, 0), (2, 60 * MIB)]
    segments = played(events)
    assert segments is not None
    assert (segments.most_live_bytes, segments.reserved_bytes) == (60 * MIB, 120 * MIB)
    assert least_range(events, 60 * MIB).reserved_bytes <= 64 * MIB
    between = [(0, 30 * MIB), (1, 2 * MIB), (2, 30 * MIB), (0, 0), (2, 0), (3, 60 * MIB)]
    assert least_range(between, 62 * MIB).reserved_bytes >= 92 * MIB
    assert played(between, 91 * MIB) is None


@pytest.mark.parametrize("recomputed", [True, False])
def test_a_step_is_recorded_and_measured(recomputed: bool) -> None:
    """One range loses no more than segments; more is live where blocks keep."""
    row = lost(4, 512, 8, 512, recomputed, vocabulary=8192)
    assert 1 <= row["one_range"] <= row["segments"] < 2
    more = lost(8, 512, 8, 512, recomputed, vocabulary=8192)
    grown = more["live_bytes"] / row["live_bytes"]
    assert (1 < grown < 1.6) if recomputed else (1.6 < grown < 2)
