"""A peer's process, seen from the bench: asked with a word, answers with JSON; what it prints goes to a file."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from peers.environments import drop_dead_extensions

ANSWER_SECONDS = 600.0  # for one answer: what hangs for longer is taken for hanging
BENCHMARKS = Path(__file__).resolve().parent.parent


class PeerError(Exception):
    """A peer failed; one line says how."""


class PeerProcess:
    """Runs run.py of a peer. Use `close`, or `with`."""

    def __init__(self, python: Path, script: Path, job: dict[str, Any], prefix: list[str] | None = None) -> None:
        """Args: job, fields of worker.Job; prefix, a command that runs the interpreter, as to limit it."""
        # Files of its own: what it writes ends with it, whatever becomes of it.
        self._disk = tempfile.TemporaryDirectory(prefix="peer-", dir=job["disk"], ignore_cleanup_errors=True)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (close closes it)
        self._buffer = b""
        self._owes = False  # an answer, to a word that Ctrl-C came behind
        environment = {**os.environ, "PYTHONPATH": _python_path(), "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment["PATH"] = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # where ninja is
        self._extensions = python.parent.parent / "extensions" if python != Path(sys.executable) else None
        if self._extensions is not None:
            environment["TORCH_EXTENSIONS_DIR"] = str(self._extensions)  # what it compiles at its first use
        self._process = subprocess.Popen(
            [*(prefix or []), str(python), str(script), json.dumps(job | {"disk": self._disk.name})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=self._disk.name,
            start_new_session=True,
        )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, word: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Raises PeerError with what the process says where it fails, or that it ended or hangs."""
        assert self._process.stdin is not None
        if self._owes:
            self._line(seconds)
        try:
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; its last line says why
        self._owes = True
        line = self._line(seconds)
        self._owes = False
        if line is None:
            raise PeerError(f"no answer to {word!r} in {seconds:.0f} s")
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._end_text()}
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _line(self, seconds: float) -> bytes | None:
        """The next line; empty at the end, None where time is over."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], seconds)[0]:
                return None
            part = os.read(descriptor, 1 << 16)
            if not part:
                return b""
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _end_text(self) -> str:
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"the process {how}" + (f": {lines[-1][:300]}" if lines else "")

    def close(self) -> None:
        """End it and those it started, and remove its files."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._extensions is not None:
            drop_dead_extensions(self._extensions)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()
        self._disk.cleanup()


def _python_path() -> str:
    """What run scripts import: peers.worker, and protrain from where it is run."""
    import protrain

    own = [str(BENCHMARKS), str(Path(protrain.__file__).resolve().parent.parent)]
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH", "")])])
