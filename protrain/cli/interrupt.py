"""Ctrl-C: the process ends with 130 within seconds, whatever it is doing, and leaves nothing behind.

A first SIGINT raises a KeyboardInterrupt in the main thread, which unwinds as any exception does. Two things can keep that
from ending the process: a long call outside Python (a tokenizer's training, a backward pass) delays the handler, and a
library's callback may swallow the exception. So the fact is remembered (`pressed`), and a watching thread, woken by the
signal itself and not by its handler, ends the process after a grace of a few seconds, having removed the folders
that `replacing.litter` names. Later signals are ignored: an impatient second Ctrl-C must not break the cleaning up. A
process that was started to ignore SIGINT, as in the background of a script, hears it too: it is how a training is stopped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from types import FrameType

GRACE_SECONDS = 5.0


class Interrupted(KeyboardInterrupt):
    """A class of its own: where Python's is raised in code that is made from text, as imports make dataclasses, `python -m` ends
    by SIGINT and not with the exit code, whoever caught it."""


_received: list[int] = []
_pipe: list[int] = []
_end = 0.0  # of the grace, once a signal was received


def pressed() -> int | None:
    """The exit code that a received signal asks for (130 for SIGINT, 143 for SIGTERM), else None."""
    return 128 + _received[0] if _received else None


def extend(seconds: float) -> None:
    """Give the process so many seconds from now, where a signal was received: what was measured is to be written."""
    global _end
    _end = max(_end, time.monotonic() + seconds)


def ignore_more() -> None:
    """Call as the last thing. The interpreter takes handlers away as it ends, and one more Ctrl-C would end the process by its
    signal and not with the exit code; what is ignored it leaves so."""
    if _received:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def install() -> None:
    """Take over SIGINT and SIGTERM. Call once, in the main thread, before any long work."""
    if _pipe:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _pipe.extend((reader, writer))
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_watch, args=(reader,), name="protrain-interrupt", daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _received:
        _received.append(number)
        raise Interrupted


def _watch(reader: int) -> None:
    numbers: list[int] = []
    while not numbers:
        numbers = [number for number in os.read(reader, 64) if number in (signal.SIGINT, signal.SIGTERM)]
    extend(GRACE_SECONDS)
    while (left := _end - time.monotonic()) > 0:
        time.sleep(left)
    replacing = sys.modules.get("protrain.base.replacing")  # what is not loaded has written nothing
    for path in tuple(replacing.litter) if replacing else ():
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(path)  # a file
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")  # the cursor, which a live display hides
    os._exit(128 + numbers[0])
