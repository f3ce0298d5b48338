"""A process apart, which is ended with all that it started: what outlives it would hold its output, its GPU and others' time."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Ended:
    """code: None where its time was over; what it wrote."""

    code: int | None
    out: str
    error: str

    def reason(self) -> str:
        """In one line, why it gave no answer."""
        if self.code is not None and self.code < 0:
            return f"the process was ended by {signal.Signals(-self.code).name}"
        return (self.error.strip().splitlines() or [f"no answer, exit code {self.code}"])[-1][:300]


def run(command: list[str], seconds: float) -> Ended:
    """The command, in a session of its own, for so long at most."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=error, start_new_session=True)
        try:
            over = _wait(process.pid, seconds)
        finally:  # before it is waited for: until then its number, which is that of its group, can be nobody else's
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        return Ended(code if over else None, _read(out), _read(error))


def _wait(number: int, seconds: float) -> bool:
    """Whether it has ended in this time; it stays to be waited for."""
    end = time.monotonic() + seconds
    while os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
