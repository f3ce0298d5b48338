"""Processes that end while something is under way: in a hook, in a thread, in a child that was forked; threads that hold the GIL.

    python tests/exits.py

Each way to end runs in a process forked off this one, which has imported everything, and goes through the interpreter's own
finalisation there. It must end with its exit code, in time, with nothing on stderr and no file left.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crashes
import torch
from crashes import MEMORY, adamw, batch, make, readable, train_one, warm_up

import protrain

DISK = Path()
kept: list[Any] = []  # until the interpreter has gone


def wrapped(**options: Any) -> tuple[Any, Any]:
    model: Any = make()
    model, optimizer = protrain.wrap(model, adamw(model), memory=MEMORY, disk=DISK, **options)
    kept.append((model, optimizer))
    return model, optimizer


def end(*_: Any) -> None:
    raise SystemExit(3)


def after_a_step() -> int:
    model, optimizer = wrapped()
    train_one(model, optimizer, 0)
    return 0


def in_the_middle_of_a_step() -> int:
    model, optimizer = wrapped(block_modes=["swap"] * 6)
    train_one(model, optimizer, 0)
    kept.append(model(batch(1)))
    return 0


def after_backward_without_step() -> int:
    model, _ = wrapped()
    model(batch(0)).backward()
    return 0


def in_forward() -> int:
    model, _ = wrapped()
    model.blocks[3].register_forward_hook(end)
    model(batch(0))
    return 0


def in_backward() -> int:
    model, _ = wrapped()
    model.blocks[3].register_full_backward_hook(end)
    model(batch(0)).backward()
    return 0


def in_save() -> int:
    model, optimizer = wrapped()
    protrain.save(model, optimizer, DISK / "ended", progress=end)
    return 0


def with_a_thread_that_trains() -> int:
    """What is closed at the end is no model that another thread is driving. (A daemon thread is another matter: torch's own
    backward does not survive the interpreter's end in one.)"""
    expected = crashes.in_child(crashes.reference)["losses"]
    model, optimizer = wrapped()
    began, losses = threading.Event(), []

    def train() -> None:
        for number in range(6):
            losses.append(train_one(model, optimizer, number))
            began.set()

    thread = threading.Thread(target=train)
    thread.start()
    began.wait(60)
    while thread.is_alive():
        protrain.api.close_all()
    return 0 if losses == expected[:6] else 4


def with_a_thread_that_saves() -> int:
    model, optimizer = wrapped()
    train_one(model, optimizer, 0)
    began = threading.Event()
    save = threading.Thread(
        target=lambda: protrain.save(model, optimizer, DISK / "saved", progress=lambda *_: began.set()), daemon=False
    )
    save.start()
    began.wait(60)
    return 0


def by_an_exit_handler_that_trains() -> int:
    import atexit

    model, optimizer = wrapped()
    atexit.register(lambda: train_one(model, optimizer, 0))
    return 0


def by_ctrl_c_in_backward() -> int:
    model, _ = wrapped()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    model.blocks[3].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        model(batch(0)).backward()
        time.sleep(5)
    except KeyboardInterrupt:
        return 3
    return 0


def by_ctrl_c_in_a_dry_run() -> int:
    """When autograd has just asked a fake tensor where it is, and takes no error for an answer."""
    from protrain.dryrun.meter import Meter

    model, _ = wrapped()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dispatch, asked = Meter.__torch_dispatch__, []

    def interrupted(self: Any, func: Any, *rest: Any) -> Any:
        if func is torch.ops.prim.device.default and not asked:
            asked.append(func)
            signal.raise_signal(signal.SIGINT)
        return dispatch(self, func, *rest)

    Meter.__torch_dispatch__ = interrupted  # type: ignore[method-assign]
    try:
        model(batch(0))
    except KeyboardInterrupt:
        return 3 if asked else 4
    return 0


def by_a_child_of_its_own() -> int:
    """A child forked in the middle of a step goes through the interpreter's end, and this process trains on."""
    model, optimizer = wrapped()
    expected = crashes.in_child(crashes.reference)["losses"]
    losses = [train_one(model, optimizer, 0)]
    loss = model(batch(1))
    child = os.fork()
    if child == 0:
        return 0
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert os.waitpid(child, 0)[1] == 0
    losses += [loss.item(), train_one(model, optimizer, 2)]
    return 0 if losses == expected[:3] else 4


def with_threads_that_hold_the_gil() -> int:
    """Others poll the status, collect garbage, allocate, and hold the GIL for long stretches: the losses are plain torch's."""
    expected = crashes.in_child(crashes.reference)["losses"]
    model, optimizer = wrapped(block_modes=["swap", "checkpoint", "checkpoint_swap"] * 2)
    stop = threading.Event()

    def repeat(work: Callable[[], Any]) -> threading.Thread:
        def body() -> None:
            while not stop.is_set():
                work()

        thread = threading.Thread(target=body)
        thread.start()
        return thread

    sys.setswitchinterval(0.05)  # who has the GIL keeps it that long
    threads = [
        repeat(lambda: sum(range(200000))),
        repeat(lambda: protrain.status(model)),
        repeat(gc.collect),
        repeat(lambda: time.sleep(0.001)),
    ]
    try:
        losses = [train_one(model, optimizer, number) for number in range(3)]  # the last under the plan by time
        status = protrain.status(model)
        protrain.save(model, optimizer, DISK / "held")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return 0 if losses == expected[:3] and status.disk_read_bytes > 0 else 4


WAYS: dict[Callable[[], int], int] = {
    after_a_step: 0,
    in_the_middle_of_a_step: 0,
    after_backward_without_step: 0,
    in_forward: 3,
    in_backward: 3,
    in_save: 3,
    with_a_thread_that_trains: 0,
    with_a_thread_that_saves: 0,
    by_an_exit_handler_that_trains: 0,
    by_ctrl_c_in_backward: 3,
    by_ctrl_c_in_a_dry_run: 3,
    by_a_child_of_its_own: 0,
    with_threads_that_hold_the_gil: 0,
}


@contextlib.contextmanager
def begun(way: Callable[[], int]) -> Iterator[int]:
    """In the parent: the process's number, its stderr being read by `wait_for`. The child leaves by the interpreter's end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        os.close(reader)
        os.close(writer)
        torch.set_num_threads(1)
        sys.exit(way())
    os.close(writer)
    readers[child] = reader
    try:
        yield child
    finally:
        os.close(readers.pop(child))


readers: dict[int, int] = {}


def wait_for(child: int) -> tuple[int, str]:
    """(exit code, what it said)."""
    said = b""
    while readable(readers[child]):
        part = os.read(readers[child], 65536)
        if not part:
            break
        said += part
    else:
        os.kill(child, signal.SIGKILL)
        said += b"\nit hangs"
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.decode(errors="replace")


def main() -> int:
    global DISK
    chosen = sys.argv[1:]
    work = Path(tempfile.mkdtemp(dir=os.environ.get("PROTRAIN_DISK")))  # children leave through here too, and must not remove it
    DISK = work / "disk"
    DISK.mkdir()
    warm_up(DISK)
    ended = 0
    for way, code in WAYS.items():
        if chosen and way.__name__ not in chosen:
            continue
        with begun(way) as child:
            found, said = wait_for(child)
        assert found == code, f"{way.__name__} ended with {found}, not {code}\n{said}"
        assert not said.strip(), f"{way.__name__} said\n{said}"
        left = [path.name for path in DISK.iterdir() if path.name not in ("saved", "held")]
        assert not left, f"{way.__name__} left {left}"
        ended += 1
    shutil.rmtree(work)
    print(json.dumps({"ways": ended}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
