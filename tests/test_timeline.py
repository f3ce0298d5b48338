"""The timeline of a step: what is in it, what it says is hidden, and that watching blocks changes nothing."""

from __future__ import annotations

import gc
import json
import os
import pickle
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LanguageModel, TokenBatches
from nets import TIGHT, Chain
from torch import nn
from twins import MIB, adamw, loss_of

import protrain
from protrain import _core
from protrain.api import session_of
from protrain.profiling.blockclock import BlockClock
from protrain.profiling.timeline import (
    LANES,
    TRANSFERS,
    Event,
    Timeline,
    both,
    chrome_trace,
    make_timeline,
    requests,
    union,
    without,
)

MODES = ["keep", "checkpoint", "keep", "checkpoint"]


@pytest.fixture
def trained(causal_lm: LanguageModel, token_batches: TokenBatches, fresh_disk: Path) -> Iterator[Any]:
    """A model of four blocks, its states on disk, after four steps."""
    model = causal_lm("gpt2", hidden=128)
    model, optimizer = protrain.wrap(model, adamw(model), memory="11MiB", disk=fresh_disk, block_modes=MODES)
    for ids in token_batches(4):
        step(model, optimizer, ids)
    yield model, optimizer
    if "_protrain_session" in model.__dict__:
        protrain.unwrap(model)


def step(model: Any, optimizer: Any, ids: torch.Tensor) -> None:
    loss_of(model, ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def lane(timeline: Timeline, name: str) -> list[Event]:
    return [event for event in timeline.events if event.lane == name]


def overlaps(spans: list[tuple[float, float]]) -> bool:
    return any(a[1] > b[0] + 1e-9 for a, b in pairwise(sorted(spans)))


# ---- a trained model ----


def test_the_lanes_of_a_step_are_there(trained: Any) -> None:
    timeline = protrain.status(trained[0]).timeline()
    assert timeline.step == 4
    assert {event.lane for event in timeline.events} >= {"step", "compute", "read", "write", "update"}
    (whole,) = lane(timeline, "step")
    assert (whole.name, whole.start_seconds, whole.end_seconds) == ("step 4", 0.0, timeline.seconds)
    assert all(event.end_seconds > 0 and event.start_seconds < timeline.seconds for event in timeline.events)
    for name in ("read", "write"):
        assert all(event.bytes > 0 for event in lane(timeline, name))
    assert {event.name.split()[0] for event in lane(timeline, "read")} >= {"parameters", "state"}


def test_blocks_run_forward_then_back_inside_the_step(trained: Any) -> None:
    timeline = protrain.status(trained[0]).timeline()
    computed = lane(timeline, "compute")
    assert not overlaps([(event.start_seconds, event.end_seconds) for event in computed])
    assert all(0 <= event.start_seconds <= event.end_seconds <= timeline.seconds for event in computed)
    names = [event.name for event in computed]
    assert names[:4] == [f"forward block {n}" for n in range(4)]
    back = [name for name in names[4:] if name.startswith("backward")]
    assert list(dict.fromkeys(back)) == [f"backward block {n}" for n in (3, 2, 1, 0)]
    assert [name for name in names if name.startswith("recompute")] == ["recompute block 3", "recompute block 1"]
    assert names.index("backward block 3") < names.index("recompute block 3") < names.index("backward block 2")


def test_the_chrome_trace_has_rows_without_overlap(trained: Any, tmp_path: Path) -> None:
    timeline = protrain.status(trained[0]).timeline()
    timeline.save(tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_trace(found)
    assert len([event for event in found if event["ph"] == "X"]) == len(requests(timeline.events))
    reads = [event for event in found if event.get("cat") == "read"]
    assert all(event["args"]["GB/s"] == pytest.approx(event["args"]["bytes"] / event["dur"] / 1e3, abs=1e-3) for event in reads)


def test_what_a_request_carried_is_one_event() -> None:
    def event(lane: str, name: str, begin: float, end: float) -> Event:
        return Event(lane, name, begin, end, 10)

    together = [event("write", f"activations block {block}", 1.0, 2.0) for block in (3, 3, 4)]
    others = [event("write", "activations block 4", 1.0, 2.5), event("read", "state chunk 1", 1.0, 2.0)]
    computed = [event("compute", f"forward block {block}", 1.0, 2.0) for block in (0, 1)]
    found = requests([others[0], *together, others[1], *computed])
    assert found == [others[0], Event("write", "activations block 3, activations block 4", 1.0, 2.0, 30), others[1], *computed]


def check_trace(found: list[dict[str, Any]]) -> None:
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in found:
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert all(not any(a[1] > b[0] + 1e-3 for a, b in pairwise(sorted(row))) for row in rows.values())
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert set(rows) <= set(names)
    order = [names[tid].split()[0] for tid in sorted(names)]
    assert list(dict.fromkeys(order)) == [lane for lane in LANES if lane in order or lane not in TRANSFERS]
    assert order == sorted(order, key=LANES.index)


def test_a_chunk_is_read_once_on_the_way_and_once_on_the_way_back(
    causal_lm: LanguageModel, token_batches: TokenBatches, fresh_disk: Path
) -> None:
    """Blocks of three chunks, two slots: whoever reads ahead in the order of recomputation reads some chunks a third time."""
    model = causal_lm("gpt2", hidden=256)
    ids = token_batches(1)[0]
    plan = protrain.plan(model, {"input_ids": ids, "labels": ids}, memory="24MiB")
    plan = replace(plan, n_persist=4, n_buffer=2, n_ahead=1, block_modes=("swap", "keep", "swap", "swap"))
    model, optimizer = protrain.wrap(model, adamw(model), memory="24MiB", disk=fresh_disk, plan=plan)
    for ids in token_batches(4):
        step(model, optimizer, ids)
    status = protrain.status(model)
    assert status.plan.n_buffer == 2
    assert status.plan.n_chunks - status.plan.n_persist > 2 * 4
    reads = Counter(event.name for event in lane(status.timeline(), "read") if event.name.startswith("parameters"))
    protrain.unwrap(model)
    assert reads
    assert max(reads.values()) <= 2, reads


def test_a_text_says_what_was_hidden(trained: Any) -> None:
    lines = protrain.status(trained[0]).timeline().explain().splitlines()
    assert lines[0].startswith("step 4: ")
    assert [line.split()[0] for line in lines[1:]] == list(LANES[1 : -len(TRANSFERS)])
    assert "hidden behind compute" in lines[3]


def test_evaluation_between_steps_is_in_no_step(trained: Any, token_batches: TokenBatches) -> None:
    model, _ = trained
    before = protrain.status(model)
    first = before.timeline()
    model.eval()
    with torch.no_grad():
        model(token_batches(1)[0])
    model.train()
    assert session_of(model)._began is None  # nor does the next one begin with it
    assert before.timeline().step == 4
    assert lane(before.timeline(), "compute") == lane(first, "compute")


class Latents(Chain):
    """Its first block is given a parameter as it is, its second a tensor of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(8, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y: torch.Tensor = self.blocks[0](self.latents) + self.blocks[1](x)
        for block in self.blocks[2:]:
            y = block(y)
        return self.head(y).square().mean()


@pytest.mark.parametrize("memory", [TIGHT, 256 * MIB], ids=["on_disk", "in_memory"])
def test_leaves_given_to_blocks_keep_no_hooks(memory: int, fresh_disk: Path) -> None:
    model: Any = Latents()
    x = torch.randn(8, 256, requires_grad=True)
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory, disk=fresh_disk)
    session = weakref.ref(session_of(model))
    own = len(model.latents._backward_hooks)
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    back = [event.name for event in lane(protrain.status(model).timeline(), "compute") if event.name.startswith("backward")]
    assert sorted(back) == [f"backward block {n}" for n in range(8)]
    assert len(model.latents._backward_hooks) == own
    assert not x._backward_hooks
    protrain.unwrap(model)
    assert not any(leaf._backward_hooks for leaf in (x, *model.parameters()))
    del optimizer
    gc.collect()
    assert session() is None  # although the model, what it was given and its loss live on


def test_graphs_that_live_on_pile_up_no_hooks_on_a_leaf() -> None:
    model: Any = Chain()
    x = torch.randn(8, 256, requires_grad=True)
    model, optimizer = protrain.wrap(model, adamw(model), memory=256 * MIB)
    losses = []
    for _ in range(3):
        losses.append(model(x))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not x._backward_hooks
    losses = [model(x) for _ in range(3)]
    assert len(x._backward_hooks or {}) == 3
    torch.autograd.grad(losses[0], x)
    assert len(x._backward_hooks or {}) == 2
    del losses
    gc.collect()
    assert not x._backward_hooks
    protrain.unwrap(model)


# ---- when there is none ----


def test_before_the_first_step_it_is_a_clear_error(causal_lm: LanguageModel, fresh_disk: Path) -> None:
    model = causal_lm("gpt2")
    model, _ = protrain.wrap(model, adamw(model), memory="64MiB", disk=fresh_disk)
    with pytest.raises(protrain.StepError, match="no step is complete"):
        protrain.status(model).timeline()
    protrain.unwrap(model)


def test_events_that_gave_way_are_an_error_and_no_half_timeline(trained: Any) -> None:
    model, _ = trained
    status = protrain.status(model)
    engine = protrain.session_of(model).engine
    now = _core.now_ns()
    for _ in range((1 << 16) - len(status.timeline().events) // 2):
        _core.trace_add(engine, 1, 1, 0, now, now + 1)
    with pytest.raises(protrain.StepError, match="not all events of step 4"):
        status.timeline()


def test_after_unwrap_it_is_a_clear_error(trained: Any) -> None:
    status = protrain.status(trained[0])
    protrain.unwrap(trained[0])
    with pytest.raises(protrain.StepError, match="unwrapped"):
        status.timeline()


def test_a_status_that_is_kept_keeps_no_model_that_is_dropped(causal_lm: LanguageModel, fresh_disk: Path) -> None:
    """Nor its threads, nor its file."""
    model = causal_lm("gpt2", hidden=128)
    model, optimizer = protrain.wrap(model, adamw(model), memory="11MiB", disk=fresh_disk, block_modes=MODES)
    step(model, optimizer, torch.zeros(1, 8, dtype=torch.long))
    status = protrain.status(model)
    threads = len(os.listdir("/proc/self/task"))
    del model, optimizer
    gc.collect()
    assert len(os.listdir("/proc/self/task")) < threads
    with pytest.raises(protrain.StepError, match="is gone"):
        status.timeline()


def test_a_status_is_still_figures_alone(trained: Any) -> None:
    status = protrain.status(trained[0])
    json.dumps(asdict(status))
    copy = pickle.loads(pickle.dumps(status))
    assert copy == status
    assert "StepTrace" not in repr(status)
    with pytest.raises(protrain.StepError, match="no events came with this status"):
        copy.timeline()


# ---- recorded events ----

SECOND = 10**9
#: Start, end, bytes, number, lane, kind: a step from 10 s to 20 s, and what is beside it.
RECORDED = [
    (0, 9 * SECOND, 0, 1, 0, 0),
    (10 * SECOND - 1, 10 * SECOND, 0, -1, 0, 0),
    (8 * SECOND, 9 * SECOND, 7, 0, 3, 4),
    (9 * SECOND, 12 * SECOND, 3000, 1, 3, 4),
    (11 * SECOND, 13 * SECOND, 2000, 2, 3, 4),
    (10 * SECOND, 11 * SECOND, 0, 0, 1, 1),
    (17 * SECOND, 18 * SECOND, 0, 0, 1, 2),
    (12 * SECOND, 14 * SECOND, 0, 2, 2, 4),
    (17 * SECOND, 21 * SECOND, 4000, 2, 4, 5),
    (10 * SECOND, 20 * SECOND, 0, 2, 0, 0),
    (21 * SECOND, 22 * SECOND, 5, 3, 3, 4),
]


def test_events_beside_the_step_are_left_out() -> None:
    timeline = make_timeline(RECORDED, 2, 10 * SECOND, 20 * SECOND)
    assert [(event.lane, event.name, event.start_seconds, event.end_seconds) for event in timeline.events] == [
        ("read", "parameters chunk 1", -1.0, 2.0),
        ("compute", "forward block 0", 0.0, 1.0),
        ("step", "step 2", 0.0, 10.0),
        ("read", "parameters chunk 2", 1.0, 3.0),
        ("wait", "parameters chunk 2", 2.0, 4.0),
        ("compute", "backward block 0", 7.0, 8.0),
        ("write", "state chunk 2", 7.0, 11.0),
    ]


def test_hidden_is_what_lies_between_blocks_while_nobody_waits() -> None:
    lines = make_timeline(RECORDED, 2, 10 * SECOND, 20 * SECOND).explain().splitlines()
    assert lines == [
        "step 2: 10.000 s",
        "compute  2.000 s, 20.0% of the step",
        "wait     2.000 s, 20.0% of the step, parameters 2.000 s",
        "read     3.000 s, 30.0% of the step, 0.0 MB, 66.7% of it hidden behind compute",
        "write    3.000 s, 30.0% of the step, 0.0 MB, 33.3% of it hidden behind compute",
        "update   0.000 s, 0.0% of the step",
    ]


def test_what_crosses_to_a_device_has_lanes_of_its_own() -> None:
    crossing = [(11 * SECOND, 12 * SECOND, 4000, 1, 6, 4), (12 * SECOND, 13 * SECOND, 2000, 1, 7, 6)]
    timeline = make_timeline([*RECORDED, *crossing], 2, 10 * SECOND, 20 * SECOND)
    assert [event.name for event in timeline.events if event.lane in TRANSFERS] == ["parameters chunk 1", "gradients chunk 1"]
    lines = timeline.explain().splitlines()
    assert [line.split(",")[0] for line in lines[-2:]] == ["upload   1.000 s", "offload  1.000 s"]
    found = json.loads(timeline.to_json())["traceEvents"]
    check_trace(found)
    assert [event["args"]["bytes"] for event in found if event.get("cat") in TRANSFERS] == [4000, 2000]


def test_reads_at_the_same_time_get_rows_of_their_own() -> None:
    found = json.loads(make_timeline(RECORDED, 2, 10 * SECOND, 20 * SECOND).to_json())["traceEvents"]
    check_trace(found)
    names = [event["args"]["name"] for event in found if event["name"] == "thread_name"]
    assert names == ["step", "compute", "wait", "read", "read 2", "write", "update"]
    first = next(event for event in found if event["name"] == "parameters chunk 1")
    assert (first["ts"], first["dur"], first["args"]["bytes"]) == (0, 3e6, 3000)


def test_what_two_steps_share_is_in_their_trace_once() -> None:
    later = [(20 * SECOND - 1, 20 * SECOND, 0, -1, 0, 0), (20 * SECOND, 30 * SECOND, 0, 3, 0, 0)]
    steps = [make_timeline([*RECORDED, *later], n, 10 * n * SECOND - 10 * SECOND, 10 * n * SECOND) for n in (2, 3)]
    names = [event["name"] for event in json.loads(chrome_trace(steps))["traceEvents"] if event["ph"] == "X"]
    assert sorted(name for name in names if name.startswith("step")) == ["step 2", "step 3"]
    assert names.count("state chunk 2") == 1
    assert names.count("parameters chunk 3") == 1


def test_a_step_whose_beginning_is_lost_is_refused() -> None:
    with pytest.raises(protrain.StepError, match="step 2"):
        make_timeline(RECORDED[2:], 2, 10 * SECOND, 20 * SECOND)


def test_intervals() -> None:
    assert union([(3, 4), (0, 2), (1, 2.5), (4, 5)]) == [(0, 2.5), (3, 5)]
    assert both([(0, 4), (6, 9)], [(1, 2), (3, 7)]) == [(1, 2), (3, 4), (6, 7)]
    assert without([(0, 4), (6, 9)], [(1, 2), (3, 7)]) == [(0, 1), (2, 3), (7, 9)]
    assert without([(0, 4)], []) == [(0, 4)]


# ---- the clock ----


@pytest.fixture
def clock(fresh_disk: Path) -> Iterator[BlockClock]:
    """A clock that writes into the trace of an engine that does nothing else."""
    engine = _core.Engine(str(fresh_disk), MIB, [(4096, True)], [(0, 0, 4, True, 0)], 1, 2)
    clock = BlockClock(engine, lambda: None, lambda *_: None)
    clock.begin_step()
    yield clock
    clock.close()
    engine.close()


def run(clock: BlockClock, number: int, block: Any, *args: Any, **kwargs: Any) -> Any:
    begin = _core.now_ns()
    result = block(*args, **kwargs)
    clock.forward_done(number, begin, args, kwargs, result)
    return result


def names_of(clock: BlockClock) -> list[str]:
    clock.end_step(1)
    assert clock.step is not None
    return [event.name for event in lane(clock.step.timeline(), "compute")]


@pytest.mark.parametrize("kind", ["tuple", "dict", "keyword"])
def test_outputs_of_any_shape_are_found(clock: BlockClock, kind: str) -> None:
    blocks: dict[str, Any] = {
        "tuple": lambda x: (x.exp(), None, x.detach()),
        "dict": lambda x: {"hidden": x.exp(), "more": [x]},
        "keyword": lambda x: x.exp(),
    }
    x = torch.ones(3, requires_grad=True)
    for number in range(2):
        found = run(clock, number, blocks[kind], x=x) if kind == "keyword" else run(clock, number, blocks[kind], x)
        x = found if kind == "keyword" else found[0] if kind == "tuple" else found["hidden"]
    x.sum().backward()
    assert names_of(clock) == ["forward block 0", "forward block 1", "backward block 1", "backward block 0"]


def test_what_goes_through_every_block_begins_none(clock: BlockClock) -> None:
    x, bias = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True) * 2
    for number in range(3):
        x, bias = run(clock, number, lambda x, bias: (x * bias, bias), x, bias)
    x.sum().backward()
    assert names_of(clock)[3:] == ["backward block 2", "backward block 1", "backward block 0"]


def test_a_backward_that_fails_leaves_nothing_open(clock: BlockClock) -> None:
    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("in the middle")

    start = torch.ones(3, requires_grad=True)
    middle = run(clock, 0, torch.exp, start)
    between = middle * 2
    between.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        run(clock, 1, torch.exp, between).sum().backward()
    run(clock, 2, torch.exp, start).sum().backward()
    assert names_of(clock)[3:] == ["backward block 2"]  # block 1's has no end


def test_a_graph_may_be_walked_twice(clock: BlockClock) -> None:
    x = torch.ones(3, requires_grad=True)
    y = run(clock, 0, torch.exp, x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().exp())  # type: ignore[arg-type]
    assert names_of(clock) == ["forward block 0", "backward block 0", "backward block 0"]


def test_hooks_hold_no_tensor_and_survive_the_engine(clock: BlockClock) -> None:
    x = torch.ones(3, requires_grad=True)
    middle = run(clock, 0, torch.exp, x)
    end = run(clock, 1, torch.sin, middle)
    seen = weakref.ref(end)
    del end
    assert seen() is None
    clock.close()
    clock._engine.close()
    middle.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())  # type: ignore[arg-type]
