"""torch's CPU tensors in the arena: what a refusal looks like from Python, wherever it happens, and that nothing else
changes."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import protrain
from protrain import _core
from protrain.api import session_of
from protrain.base.counting import counted, uncounted

MIB = 1 << 20
BUDGET = 64 * MIB


def wrap(disk: Path) -> torch.nn.Module:
    """A small model under the budget."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return protrain.wrap(model, optimizer, memory=BUDGET, disk=str(disk))[0]


@pytest.fixture
def wrapped(fresh_disk: Path) -> Iterator[torch.nn.Module]:
    """A small wrapped model, as in the middle of a step: while it is there, every tensor counts against 64 MiB."""
    model = wrap(fresh_disk)
    with counted(session_of(model).engine, session_of(model).wrapped.compute):
        yield model
    protrain.unwrap(model)


class Swells(torch.autograd.Function):
    """Backward needs 160 MiB."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.sum()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope * torch.ones(40 * MIB)[:MIB]


def in_an_operation() -> None:
    torch.empty(20 * MIB)


def in_an_operation_on_data() -> None:
    torch.ones(MIB).repeat(32)


def in_backward_in_python() -> None:
    Swells.apply(torch.ones(MIB, requires_grad=True)).backward()


def in_backward_in_torch() -> None:
    weight = torch.ones(4 * MIB, requires_grad=True)
    total = (weight * 2).sum()
    held = torch.empty(10 * MIB)
    total.backward()  # the slope times 2 is 16 MiB
    del held


def while_a_gradient_is_stored() -> None:
    weight = torch.ones(4 * MIB, requires_grad=True)
    total = weight.sum()
    held = torch.empty(10 * MIB)
    total.backward()  # the slope has no memory of its own until it becomes the gradient
    del held


@pytest.mark.parametrize(
    "refused",
    [in_an_operation, in_an_operation_on_data, in_backward_in_python, in_backward_in_torch, while_a_gradient_is_stored],
)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["this thread", "another thread"])
def test_refusal_is_a_budget_error(wrapped: torch.nn.Module, refused: Callable[[], None], elsewhere: bool) -> None:
    """The class itself, with the figures of the request that was refused; afterwards all works as before."""
    caught: list[BaseException] = []
    classes: list[type[BaseException] | None] = []

    def run() -> None:
        try:
            refused()
        except BaseException as error:
            caught.append(error)
            classes.append(sys.exc_info()[0])

    if elsewhere:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert [type(error) for error in caught] == classes == [protrain.BudgetError]
    error = caught[0]
    assert isinstance(error, protrain.BudgetError)
    assert error.budget_bytes == BUDGET < error.needed_bytes <= error.smallest_bytes
    assert str(BUDGET) in str(error)
    assert "optimizer.zero_grad()" in str(error), "what to do"
    caught.clear()
    del error
    assert torch.ones(MIB).sum().item() == MIB


def test_refusal_keeps_its_context(wrapped: torch.nn.Module) -> None:
    """As any exception raised while another is handled."""

    def handle() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            torch.empty(40 * MIB)

    with pytest.raises(protrain.BudgetError) as caught:
        handle()
    assert isinstance(caught.value.__context__, KeyError)


def test_refusals_of_refusals_while_garbage_is_collected(wrapped: torch.nn.Module) -> None:
    """What raises an error that comes while another is handled is there until it has."""

    def handle() -> None:
        try:
            torch.empty(40 * MIB)
        except protrain.BudgetError:
            torch.empty(30 * MIB)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(100):
            with pytest.raises(protrain.BudgetError) as caught:
                handle()
            assert isinstance(caught.value.__context__, protrain.BudgetError)
    finally:
        gc.set_threshold(*threshold)


def test_empty_tensors_and_foreign_memory(wrapped: torch.nn.Module) -> None:
    """Tensors of no bytes have no memory; memory that is not torch's is left to its owner."""
    empty = torch.empty(0)
    assert empty.data_ptr() == 0
    empty.resize_(1000).fill_(1)
    assert empty.sum().item() == 1000
    array = torch.arange(10.0).numpy()
    shared = torch.frombuffer(bytearray(64), dtype=torch.uint8)
    assert array.sum() == 45
    assert shared.sum().item() == 0


def test_budget_ends_with_the_wrapping(fresh_disk: Path) -> None:
    """A tensor of more than the budget is fine once the model is unwrapped, and one made before stays what it is."""
    model = wrap(fresh_disk)
    kept = torch.full((MIB,), 3.0)
    protrain.unwrap(model)
    assert torch.ones(20 * MIB).sum().item() == 20 * MIB
    assert kept.sum().item() == 3 * MIB


def test_forked_worker_is_outside_of_the_budget(wrapped: torch.nn.Module) -> None:
    """A process that is forked while a model is wrapped, as a loader's worker, has memory of its own."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # as loaders' workers do: torch's own threads do not survive a fork
            status = 0 if torch.full((20 * MIB,), 2.0)[-1].item() == 2.0 else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(protrain.BudgetError):
        torch.empty(20 * MIB)


def test_what_a_thread_makes_apart_leaves_the_count_of_the_others(fresh_disk: Path) -> None:
    """A copy is made while another thread's step begins and ends: it counts in no budget, and the step in its own."""
    model = wrap(fresh_disk)
    engine, compute = session_of(model).engine, session_of(model).wrapped.compute

    def live_bytes() -> int:
        return int(engine.stats()["live_bytes"])

    def elsewhere(work: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    before = live_bytes()
    with uncounted():
        elsewhere(partial(compute.count, engine, True))
        copies = [torch.ones(BUDGET // 4) for _ in range(2)]
        assert live_bytes() == before
        with counted(engine, compute):
            mine = torch.ones(MIB)
            assert live_bytes() == before + 4 * MIB
        made = elsewhere(partial(torch.ones, MIB))
        assert live_bytes() == before + 8 * MIB
    late = torch.ones(MIB)
    assert live_bytes() == before + 12 * MIB
    compute.count(engine, False)
    del copies, mine, made, late
    assert live_bytes() == before
    protrain.unwrap(model)


def test_an_interrupted_thread_counts_again_with_its_next_step(fresh_disk: Path) -> None:
    """One that came as the thread had set itself apart, before anything was there to undo it."""
    model = wrap(fresh_disk)
    engine, compute = session_of(model).engine, session_of(model).wrapped.compute

    def interrupt(_frame: Any, event: str, called: Any) -> None:
        if event == "c_return" and called is _core.set_apart:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt), uncounted():
        pass
    sys.setprofile(None)
    before = int(engine.stats()["live_bytes"])
    compute.count(engine, True)
    made = torch.ones(MIB)
    assert int(engine.stats()["live_bytes"]) == before + 4 * MIB
    compute.count(engine, False)
    del made
    protrain.unwrap(model)
