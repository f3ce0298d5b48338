"""Several threads that use one wrapped model: they wait for each other, and what each gets is right."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TIGHT, Block, Chain, both, inputs, steps
from twins import adamw, bits

import protrain

MODES = ["swap", "checkpoint", "checkpoint_swap", "keep"] * 2


def in_threads(count: int, work: Callable[[], Any]) -> list[Any]:
    """What each of so many threads returned, or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_forwards_at_once(training: bool, fresh_disk: Path) -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk, block_modes=MODES)
    steps(inputs(2))(model, optimizer, False)
    (x,) = inputs(1, seed=2)
    model.train(training)

    def forwards() -> list[float]:
        with torch.set_grad_enabled(training):
            return [model(x).item() for _ in range(8)]

    want = forwards()
    assert len(set(want)) == 1
    assert in_threads(3, forwards) == [want] * 3
    optimizer.zero_grad()
    protrain.unwrap(model)


def no_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint"])
def test_blocks_at_once_are_refused(mode: str, fresh_disk: Path) -> None:
    """The one that came first ends as if nothing had been, and no thread is left with hooks."""
    batches = inputs(3)
    plain: Any = Chain()
    want = steps(batches)(plain, adamw(plain), True)
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk, block_modes=[mode] * 8)
    found = steps(batches[:1])(model, optimizer, False)
    begun, over = threading.Event(), threading.Event()

    def stay(*_: Any) -> None:
        begun.set()
        over.wait()

    left: list[bool] = []

    def work() -> torch.Tensor:
        y: torch.Tensor = model.blocks[0](batches[0])
        left.append(no_hooks())
        return y

    def meet() -> None:
        begun.wait()
        try:
            for call, given in ((model.blocks[1], batches[:1]), (model.head.weight.sum, []), (model, batches[:1])):
                with pytest.raises(protrain.StepError, match="another thread is inside of one: run the blocks"):
                    call(*given)
                left.append(no_hooks())
        finally:
            over.set()

    stays = model.blocks[0].up.register_forward_hook(stay)
    works = iter((work, meet))

    def either() -> Any:
        return next(works)()

    results = in_threads(2, either)
    stays.remove()
    (y,) = (result for result in results if result is not None)
    assert left == [True] * 4
    assert torch.equal(y, model.blocks[0](batches[0]))
    optimizer.zero_grad()
    found += steps(batches[1:])(model, optimizer, False)
    assert found == want
    protrain.unwrap(model)


class Meets(torch.autograd.Function):
    """x @ w.T, in whose backward somebody comes between what is asked for and its use."""

    comes: Callable[[], Any] | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        if Meets.comes is not None:
            Meets.comes()
        return grad @ w, grad.T @ x


class Met(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(Meets.apply(self.norm_in(x), self.up.weight)))  # type: ignore[no-untyped-call]


class Meeting(Chain):
    block = Met


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint"])
def test_a_forward_leaves_what_another_threads_backward_uses(
    mode: str, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = inputs(3)
    plain: Any = Meeting()
    want = steps(batches)(plain, adamw(plain), True)
    model: Any = Meeting()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk, block_modes=[mode] * 8)
    refused = []

    def evaluate() -> Any:
        with torch.no_grad():
            return model(batches[0])

    found = steps(batches[:1])(model, optimizer, False)  # a dry run, which the other thread would wait for
    monkeypatch.setattr(Meets, "comes", lambda: refused.extend(in_threads(1, evaluate)))
    found += steps(batches[1:])(model, optimizer, False)
    assert found == want
    errors = [one for one in refused if isinstance(one, Exception)]
    assert len(refused) == 8 * (len(batches) - 1)
    assert all(isinstance(error, protrain.StepError) and "another thread's backward" in str(error) for error in errors)
    assert len(errors) == (0 if mode == "keep" else 14)  # where it is kept the node has copies, and one chunk is in memory
    monkeypatch.setattr(Meets, "comes", None)
    assert in_threads(1, evaluate)[0].isfinite()
    protrain.unwrap(model)


def test_a_backward_that_is_refused_leaves_random_numbers_alone(fresh_disk: Path) -> None:
    """It would have recomputed a block while another thread is inside of one."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk, block_modes=["checkpoint"] * 8)
    x = inputs(1)[0]
    loss = model(x)
    begun, over = threading.Event(), threading.Event()

    def stay(*_: Any) -> None:
        begun.set()
        over.wait()

    def evaluate() -> None:
        with torch.no_grad():
            model.blocks[0](x)

    stays = model.blocks[0].up.register_forward_hook(stay)
    other = threading.Thread(target=evaluate)
    other.start()
    begun.wait()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    try:
        with pytest.raises(protrain.StepError, match="another thread is inside of one"):
            loss.backward()
    finally:
        over.set()
        other.join()
        stays.remove()
    assert torch.equal(torch.get_rng_state(), before)
    optimizer.zero_grad()
    assert steps([x])(model, optimizer, False) == [loss.item()]
    protrain.unwrap(model)


def test_forward_and_backward_each_on_a_thread_of_its_own(fresh_disk: Path) -> None:
    batches = inputs(3)
    plain: Any = Chain()
    want = steps(batches)(plain, adamw(plain), True)
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk, block_modes=MODES)
    found = []
    for x in batches:
        (loss,) = in_threads(1, lambda x=x: model(x))  # type: ignore[misc]
        assert in_threads(1, loss.backward) == [None]
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found == want
    protrain.unwrap(model)


class OnAThread(Chain):
    """Its whole forward runs on a thread of its own."""

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        (y,) = in_threads(1, lambda: super(OnAThread, self).forward(x, **given))
        assert isinstance(y, torch.Tensor), y
        return y


def test_a_model_with_a_thread_of_its_own(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not foreseen as one that takes nothing."""
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    with pytest.warns(UserWarning, match="runs on a thread of its own.*safest plan"):
        both(OnAThread, steps(inputs(4)))
    with pytest.raises(protrain.PlanError, match="runs on a thread of its own"):
        protrain.plan(OnAThread(), inputs(1)[0], memory=TIGHT)


def test_steps_beside_a_thread_that_keeps_the_gil(fresh_disk: Path) -> None:
    """In C, for 50 ms at a time, where a loop of Python gives it up after 5: the lanes never wait for it."""
    batches = inputs(2)
    plain: Any = Chain()
    want = steps(batches)(plain, adamw(plain), True)
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk, block_modes=["swap"] * 8)
    usleep = ctypes.PyDLL(None).usleep  # not given up for the call, as ctypes.CDLL does
    begun, over = threading.Event(), threading.Event()

    def keep() -> None:
        while not over.is_set():
            usleep(50_000)
            begun.set()

    thread = threading.Thread(target=keep)
    thread.start()
    begun.wait()
    try:
        found = steps(batches)(model, optimizer, False)
    finally:
        over.set()
        thread.join()
    assert found == want
    status = protrain.status(model)
    assert status.disk_read_bytes > 0
    assert status.disk_write_bytes > 0
    protrain.unwrap(model)
    assert {name: bits(value) for name, value in model.state_dict().items()} == {
        name: bits(value) for name, value in plain.state_dict().items()
    }


def test_saving_while_another_thread_trains(fresh_disk: Path) -> None:
    """Each checkpoint is of one step, whole; training waits for it where it must. It is read as arrays of NumPy: tensors of this
    thread would count in the budget of a step that is made beside it."""
    from safetensors.numpy import load_file

    batches, target = inputs(12), fresh_disk / "checkpoint"
    plain: Any = Chain()
    plain_optimizer = adamw(plain)
    want, losses = [], []
    for x in batches:
        losses += steps([x])(plain, plain_optimizer, True)
        want.append({name: bits(value) for name, value in plain.state_dict().items()})
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk)
    found = steps(batches[:1])(model, optimizer, False)
    seen: set[int] = set()
    over = threading.Event()

    def save() -> None:
        while not over.is_set() or not seen:
            protrain.save(model, optimizer, target)
            number = json.loads((target / "protrain.json").read_text())["steps"]
            saved = {name: value.tobytes() for name, value in load_file(target / "model.safetensors").items()}
            assert saved == want[number - 1], f"the checkpoint of step {number} is none of plain torch's"
            seen.add(number)

    def train() -> None:
        try:
            found.extend(steps(batches[1:])(model, optimizer, False))
        finally:
            over.set()

    works = iter((save, train))

    def work() -> None:
        next(works)()

    assert in_threads(2, work) == [None, None]
    assert found == losses
    protrain.unwrap(model)


def test_a_step_in_the_middle_of_a_save_is_told(fresh_disk: Path) -> None:
    """Made by its own callback, for which nobody waits."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk)
    steps(inputs(1))(model, optimizer, False)
    batches = iter(inputs(2)[1:])

    def train(_done: int, _all: int) -> None:
        for x in batches:
            steps([x])(model, optimizer, False)

    with pytest.raises(protrain.StepError, match="nothing was saved"):
        protrain.save(model, optimizer, fresh_disk / "checkpoint", progress=train)
    assert list(fresh_disk.iterdir()) == []
    protrain.unwrap(model)


@pytest.mark.parametrize("use", [lambda model, x: model(x), lambda model, _: model.state_dict()], ids=["forward", "values"])
def test_a_child_that_is_forked_while_another_thread_saves(use: Callable[[Any, Any], Any], fresh_disk: Path) -> None:
    """It does not wait for a thread that it does not have: the wrapped model is refused there."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk)
    steps(inputs(1))(model, optimizer, False)
    (x,) = inputs(1)
    inside, forked = threading.Event(), threading.Event()

    def wait(_done: int, _all: int) -> None:
        inside.set()
        forked.wait()

    saving = threading.Thread(target=lambda: protrain.save(model, optimizer, fresh_disk / "checkpoint", progress=wait))
    saving.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(600)  # only to end what hangs
            use(model, x)
        except RuntimeError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    forked.set()
    saving.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    protrain.unwrap(model)


@pytest.mark.parametrize("threads", [1, len(os.sched_getaffinity(0))])
def test_updates_are_the_same_whoever_computes_them(threads: int) -> None:
    """The lane's thread where a core is free, those of compute where none is."""
    torch.set_num_threads(threads)
    assert both(Chain, steps(inputs(5)), block_modes=MODES).disk_write_bytes > 0
