"""What `protrain plan` measured of a model on this machine, kept for an hour.

Two measurements of one step differ by some percent, on a machine that others use too by much more, and plans that are forecast
alike change places with it. Who asks for one plan after another, to see what more memory does or another --accumulate, would then
compare measurements. So all plans of an hour for the same operations come from one, and a plan that is asked for twice is the
same. It is kept where programs keep what they can make again ($XDG_CACHE_HOME, else ~/.cache); where that cannot be written to,
nothing is kept. A measurement in a bad moment is gone with the hour, or with --save-profile, which always measures anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protrain.base.replacing import write_file
from protrain.cli.machine import cpu_name
from protrain.errors import PlanError

if TYPE_CHECKING:
    from protrain.planner.profiles import Profile

KEPT_SECONDS = 3600.0
#: Variables of the environment by whose beginnings compute differs.
_OF_COMPUTE = ("ATEN_", "CUDA_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_")


def folder() -> Path | None:
    """Where measurements are kept, which need not exist; None: nowhere."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    path = Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache")) / "protrain"
    return path if path.is_absolute() else None  # a user without a home


def described(config: Any, batch: int, seq: int, precision: str, device: str, disk: str) -> dict[str, Any]:
    """All that a measurement depends on, as JSON has it. config: of transformers; disk: a folder that is there."""
    import torch
    import transformers

    import protrain

    model = config.to_dict()
    model.pop("_name_or_path", None)
    n_gpus = torch.cuda.device_count() if device != "cpu" and torch.version.cuda else 0
    return {
        "model": model,
        "step": [batch, seq, precision],
        "device": [device, *map(torch.cuda.get_device_name, range(n_gpus))],
        "disk": os.stat(disk).st_dev,
        "machine": [os.uname().nodename, os.uname().release, cpu_name(), len(os.sched_getaffinity(0)), torch.get_num_threads()],
        "software": [protrain.__version__, torch.__version__, transformers.__version__],
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_OF_COMPUTE)},
    }


class Measured:
    """What is known of one model, batch and machine: `of`, as `described` gives it.

    anew: what was measured before counts for nothing.
    """

    def __init__(self, of: dict[str, Any], anew: bool) -> None:
        digest = hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()
        where = folder()
        self._path = where / f"{digest[:32]}.json" if where is not None else None
        self._age_seconds: float | None = None
        self._known = None if anew else self._read()

    def profile(self, make: Callable[[Profile | None], Profile]) -> Profile:
        """What `make` gives for a measurement that is known, or for None, where it measures; that is kept then."""
        if self._known is not None:
            with suppress(PlanError):  # it is of other operations, whatever its name says
                return make(self._known)
        found = make(None)
        self._known, self._age_seconds = found, None
        self._write(found)
        return found

    def age(self) -> str:
        """Of what profiles are made from, as "12 minutes ago"; "" where it was not measured before."""
        if self._age_seconds is None:
            return ""
        minutes = round(self._age_seconds / 60)
        return "within the last minute" if minutes < 1 else f"{minutes} minute{'s' if minutes > 1 else ''} ago"

    def _read(self) -> Profile | None:
        from protrain.planner.profiles import Profile

        if self._path is None:
            return None
        try:
            age_seconds = time.time() - self._path.stat().st_mtime
            if not 0 <= age_seconds <= KEPT_SECONDS:
                return None
            found = Profile.from_json(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, PlanError):
            return None
        self._age_seconds = age_seconds
        return found

    def _write(self, found: Profile) -> None:
        """And remove what is too old."""
        if self._path is None:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, found.to_json().encode())
            for path in self._path.parent.glob("*.json"):
                if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                    path.unlink()
