"""What requests cost, as a part of what bytes cost: of chunks, of their state, of activations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from conftest import LanguageModel, TokenBatches
from twins import adamw, loss_of

import protrain
from protrain import _core
from protrain.base.sizes import KIB, MIB
from protrain.planner.profiles import Machine, Speed
from protrain.planner.requests import update_requests, with_memory, with_requests
from protrain.profiling.timeline import KINDS, LANES

REQUEST, CHECKSUM, WALK = 50e-6, 0.5e-10, 2e-10
LANE = Speed(1e9, 1e9, 1e-10)
MACHINE = Machine(disk_read=LANE, disk_write=LANE, stash_drag_seconds_per_byte=CHECKSUM, request_drag_seconds=REQUEST)


def drags(machine: Machine) -> tuple[float, float, float]:
    return (
        machine.disk_read.drag_seconds_per_byte,
        machine.disk_write.drag_seconds_per_byte,
        machine.stash_drag_seconds_per_byte,
    )


def test_no_cost_of_requests_changes_nothing() -> None:
    free = Machine(disk_read=LANE, disk_write=LANE)
    assert with_requests(free, [MIB], 2, MIB, 100 * MIB) is free
    assert with_requests(MACHINE, [], 2, MIB, 100 * MIB) is MACHINE


def counted(memory_share: float) -> list[tuple[int, int, int]]:
    """Phases of a step of two seconds, as counted operations take: one of nothing but memory, one of nothing but products."""
    return [(0, round(2e10 * memory_share), 0), (round(2e11 * (1 - memory_share)), 0, 0)]


def test_compute_that_depends_on_memory_loses_more() -> None:
    machine = replace(MACHINE, memory_drag_seconds_per_byte=WALK)
    assert with_memory(machine, counted(0.0)) == with_memory(machine, counted(0.16)) == MACHINE
    found = [drags(with_memory(machine, counted(share)))[0] for share in (0.16, 0.19, 0.205, 0.22, 0.25, 0.4, 1.0)]
    assert found == sorted(found)
    assert found[2] == pytest.approx(1e-10 + 0.5 * WALK)
    assert found[4:] == pytest.approx([1e-10 + WALK] * 3)
    of_memory = with_memory(machine, counted(1.0))
    read, write, stash = drags(of_memory)
    assert (read, stash) == (write, MACHINE.stash_drag_seconds_per_byte)
    assert with_memory(of_memory, counted(1.0)) is of_memory  # it is in there once


def test_where_nothing_is_counted_memory_costs_nothing() -> None:
    machine = replace(MACHINE, memory_drag_seconds_per_byte=WALK)
    assert with_memory(machine, []) == with_memory(machine, [(0, 0, 0)] * 3) == MACHINE
    assert with_memory(MACHINE, counted(1.0)) is MACHINE  # a walk through memory loses nothing more


def test_each_byte_has_its_part_of_its_request() -> None:
    # Two chunks of 6 MiB: a fetch is 2 requests, the state 2 arrays of 6 pieces each of 1 MiB, which 200 MiB allow.
    read, write, stash = drags(with_requests(MACHINE, [6 * MIB] * 2, 2, 512 * KIB, 200 * MIB))
    assert read == pytest.approx(1e-10 + CHECKSUM / 2 + REQUEST * (2 * 2 + 2 * 6) / (4 * 6 * MIB))
    assert write == pytest.approx(1e-10 + REQUEST / MIB)
    # What a byte of activations costs is that of a request for eight records, in place of a chunk's.
    assert (read + write) / 2 + stash == pytest.approx(1e-10 + CHECKSUM + REQUEST / (4 * MIB))


def test_short_ones_side_by_side_are_one_request() -> None:
    # Chunks of 1 MiB are whole pieces of the ring: two arrays of state are read at once, and three written.
    read, write, _ = drags(with_requests(MACHINE, [MIB] * 3, 2, MIB, 200 * MIB))
    assert read == pytest.approx(1e-10 + CHECKSUM / 2 + REQUEST * (2 + 1) / (4 * MIB))
    assert write == pytest.approx(1e-10 + REQUEST / (3 * MIB))
    # Of 2 MiB, with a master beside them, four arrays are two requests.
    _, write, _ = drags(with_requests(MACHINE, [2 * MIB], 3, MIB, 400 * MIB))
    assert write == pytest.approx(1e-10 + REQUEST * 2 / (8 * MIB))


def test_fp32_beside_bf16_is_one_array_of_twice_the_bytes() -> None:
    # Master and two moments: six arrays of parameters' size, three that are moved. Each of their pieces is a request.
    read, write, _ = drags(with_requests(MACHINE, [6 * MIB] * 2, 6, MIB, 200 * MIB, widening=2))
    assert read == pytest.approx(1e-10 + CHECKSUM / 4 + REQUEST * (2 * 2 + 3 * 6) / (8 * 6 * MIB))
    assert write == pytest.approx(1e-10 + REQUEST * 4 * 6 / (7 * 6 * MIB))
    # Of a chunk that is one piece those go together that fit whole: of 1.5, 3, 3 and 3 MiB none, of 1.25, 2.5, 2.5 and 2.5 two.
    for size, reads, writes in ((6 * MIB // 4, 3, 4), (5 * MIB // 4, 3, 3), (MIB, 2, 2), (MIB // 2, 1, 1)):
        assert update_requests(size, 6, 2 * MIB, widening=2) == (reads, writes)


def test_frozen_chunks_are_only_fetched() -> None:
    # Of four chunks one is trained: each is fetched twice by two requests; the state of that one is 2 arrays of 6 pieces.
    trained = [False, True, False, False]
    read, write, _ = drags(with_requests(MACHINE, [6 * MIB] * 4, 2, MIB, 200 * MIB, trained=trained))
    assert read == pytest.approx(1e-10 + CHECKSUM * 8 / 10 + REQUEST * (4 * 2 * 2 + 2 * 6) / (10 * 6 * MIB))
    assert write == pytest.approx(1e-10 + REQUEST / MIB)
    read, write, _ = drags(with_requests(MACHINE, [6 * MIB] * 4, 2, MIB, 200 * MIB, trained=[False] * 4))
    assert (read, write) == (pytest.approx(1e-10 + CHECKSUM + REQUEST * 2 / (6 * MIB)), 1e-10)
    assert drags(with_requests(MACHINE, [6 * MIB], 2, MIB, 200 * MIB, trained=[True])) == drags(
        with_requests(MACHINE, [6 * MIB], 2, MIB, 200 * MIB)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.together
@pytest.mark.parametrize("hidden", [96, 192])  # chunks that are one piece of the ring are among those of the first
def test_updates_make_the_requests_that_are_planned_with(
    causal_lm: LanguageModel, token_batches: TokenBatches, disk: Any, precision: str, hidden: int
) -> None:
    ids = token_batches(1, length=16)[0]
    model, memory = causal_lm("gpt2", hidden=hidden), "100MiB"
    plan = protrain.plan(model, {"input_ids": ids, "labels": ids}, memory=memory, disk=disk, precision=precision)
    plan = replace(plan, n_persist=0, n_buffer=0, n_ahead=0)
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory, disk=disk, precision=precision, plan=plan)
    for _ in range(3):
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    session = protrain.api.session_of(model)
    layout, ring_piece = session.layout, session.homes.arrangement.piece_bytes
    began_ns = protrain.status(model).timeline().began_ns
    made: dict[str, Counter[int]] = {}
    for lane, since_ns in (("read", 0), ("write", began_ns)):  # what begins and ends together is one
        events = _core.trace_events(session.engine, since_ns)
        found = {event[:2]: event[3] for event in events if event[4:] == (LANES.index(lane), KINDS.index("state"))}
        made[lane] = Counter(found.values())
    planned = [update_requests(size, session.wrapped.state_arrays, ring_piece, layout.widening) for size in layout.sizes]
    protrain.unwrap(model)
    assert [made["write"][chunk] for chunk in range(layout.n_chunks)] == [writes for _, writes in planned]
    # What is read ahead in vain, and parameters whose slot another chunk has, are read beside that; in the first step nothing is.
    more = [made["read"][chunk] - 2 * reads for chunk, (reads, _) in enumerate(planned)]
    assert min(more) >= 0, more
    assert 2 * sum(reads for reads, _ in planned) > sum(made["read"].values()) / 3


@pytest.mark.parametrize(
    ("record", "request_bytes"),
    [
        (8 * KIB, MIB // 2),
        (MIB, 4 * MIB),
        (3 * MIB, 3 * MIB),
        (3 * MIB // 2, 3 * MIB),
        (4 * MIB, 4 * MIB),
        (6 * MIB, 3 * MIB),
        (9 * MIB, 3 * MIB),
    ],
)
def test_records_go_together_as_far_as_they_fit(record: int, request_bytes: int) -> None:
    read, write, stash = drags(with_requests(MACHINE, [6 * MIB], 2, record, 200 * MIB))
    assert (read + write) / 2 + stash == pytest.approx(1e-10 + CHECKSUM + REQUEST / request_bytes)


def test_more_memory_never_makes_requests_dearer() -> None:
    budgets = [MIB << level for level in range(14)]
    found = [drags(with_requests(MACHINE, [3 * MIB] * 4, 2, MIB, budget)) for budget in budgets]
    for less, more in zip(found, found[1:], strict=False):
        assert more[0] <= less[0]
        assert more[1] <= less[1]
    assert found[0][1] == pytest.approx(1e-10 + REQUEST / (64 * KIB))
    assert found[-1][1] == pytest.approx(1e-10 + REQUEST * 2 / (3 * MIB))  # two pieces of at most 2 MiB


def test_activations_never_cost_less_than_nothing() -> None:
    found = with_requests(MACHINE, [64 * KIB], 2, 4 * MIB, MIB)  # small requests of chunks, large ones of activations
    read, write, stash = drags(found)
    assert stash >= -min(read, write)


def test_the_dry_run_foresees_the_size_of_a_record(causal_lm: LanguageModel, token_batches: TokenBatches, disk: Any) -> None:
    make = partial(causal_lm, "gpt2", hidden=128)
    ids = token_batches(1, batch=4, length=128)[0]
    found = protrain.api.profile(make(), {"input_ids": ids, "labels": ids}, memory="1GiB", disk=disk).run.record_bytes
    model = make()
    modes = ["swap"] * 4
    model, optimizer = protrain.wrap(model, adamw(model), memory="1GiB", disk=disk, block_modes=modes)
    for _ in range(2):
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    written = [
        event.bytes for event in protrain.status(model).timeline().events if event.lane == "write" and "activations" in event.name
    ]
    protrain.unwrap(model)
    assert written
    assert found == pytest.approx(sum(written) / len(written), rel=0.3)
