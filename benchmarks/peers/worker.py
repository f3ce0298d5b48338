"""A peer's side of the comparison: a process that makes the model and trains a step whenever it is asked to.

`benchmarks/peers/NAME/run.py JOB` calls `serve` with a function that makes the peer's way to train. JOB is JSON, the fields of
`Job`. Words come on stdin, a line each: "make", "step", "reset" and "end"; each is answered with a line of JSON. An error is a
line {"error": ...} and exit code 1. Everybody has the same weights (a folder of safetensors), batches, learning rate and way to
measure, whatever else they do; this file needs torch, transformers and safetensors alone, so it runs in every peer's environment.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

LEARNING_RATE = 3e-4
N_BATCHES = 2  # which come again and again, so that losses fall fast and a wrong update is seen


class CannotRunError(Exception):
    """A peer cannot run here at all; the message says why, in one line."""


@dataclass(frozen=True)
class Job:
    """What a peer trains. model_folder has config.json and model.safetensors; memory is the budget in bytes, which only some
    peers can be told; disk, a folder of this process alone; knobs, the setting that is tried."""

    model_folder: str
    seq: int
    batch: int
    seed: int
    memory: int
    disk: str
    knobs: dict[str, Any]

    def empty_model(self) -> Any:
        """On whatever device is torch's default, in training mode."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self.model_folder, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()

    def model(self) -> Any:
        """With its weights, which are read one tensor at a time."""
        model = self.empty_model()
        with torch.no_grad():
            for parameter, value in self.weights(model):
                parameter.copy_(value)
        return model

    def weights(self, model: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Each parameter of a model and its value, which is read when it is asked for."""
        from safetensors import safe_open

        with safe_open(Path(self.model_folder) / "model.safetensors", "pt") as file:
            names = set(file.keys())
            for name, parameter in model.named_parameters():
                if name not in names:
                    raise CannotRunError(f"the weights have no {name}")
                yield parameter, file.get_tensor(name)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """The one that everybody's is compared with."""
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The forward pass."""
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


#: Trains one step on token ids and returns its loss.
Step = Callable[[torch.Tensor], torch.Tensor]


def train_step(model: Any, optimizer: Any, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Step:
    """The training loop of plain PyTorch, which many peers leave as it is. around: what the forward pass is made inside of."""

    def step(ids: torch.Tensor) -> torch.Tensor:
        with around():
            loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def one_process() -> None:
    """The environment of torch.distributed for a world of this process alone."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(_free_port())


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _resident_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process, file pages and shared memory included."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise CannotRunError(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024


def _load_kernels() -> None:
    """Make a step of a model of a few KiB."""
    inner = torch.nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(16, 16), inner, torch.nn.Linear(16, 16))
    ids = torch.zeros(1, 64, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()


class _Server:
    def __init__(self, job: Job, make: Callable[[Job], Step], counted: Callable[[], int] | None) -> None:
        self._job, self._make, self._counted = job, make, counted
        self._step: Step | None = None
        self._base_bytes = self._highest_bytes = self._count = 0
        generator = torch.Generator().manual_seed(job.seed)
        self._shape = (N_BATCHES, job.batch, job.seq)
        self._generator = generator
        self._batches: torch.Tensor | None = None

    def make(self) -> dict[str, Any]:
        """What torch and transformers load at their first use is not the model's, so it is loaded before."""
        from transformers import AutoConfig

        vocabulary = AutoConfig.from_pretrained(self._job.model_folder, local_files_only=True).vocab_size
        self._batches = torch.randint(vocabulary, self._shape, generator=self._generator)
        with torch.device("meta"):
            self._job.empty_model()
        _load_kernels()
        self._base_bytes = _resident_bytes("VmRSS")
        begin = time.monotonic()
        self._step = self._make(self._job)
        return {"seconds": time.monotonic() - begin, "base_bytes": self._base_bytes}

    def step(self) -> dict[str, Any]:
        if self._step is None or self._batches is None:
            raise CannotRunError("a step was asked for before the model was made")
        ids = self._batches[self._count % N_BATCHES].clone()
        torch.manual_seed(self._job.seed + self._count)  # one who draws more random numbers than others has no others next time
        self._count += 1
        begin = time.monotonic()
        loss = self._step(ids)
        return {"seconds": time.monotonic() - begin, "loss": loss.item()}

    def reset(self) -> dict[str, Any]:
        """The peak begins anew."""
        self._highest_bytes = max(self._highest_bytes, _resident_bytes("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")
        return {}

    def end(self) -> dict[str, Any]:
        peak = _resident_bytes("VmHWM")
        whole = max(self._highest_bytes, peak)
        counted = {"counted_bytes": self._counted()} if self._counted else {}
        return {"peak_bytes": peak, "whole_peak_bytes": whole, "base_bytes": self._base_bytes, "versions": versions(), **counted}


def versions() -> dict[str, str]:
    """Of what is loaded and makes a difference."""
    names = ("torch", "transformers", "protrain", "deepspeed", "megatron.core", "colossalai")
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    return {name: str(version) for name, version in loaded.items() if version is not None}


def serve(make: Callable[[Job], Step], counted: Callable[[], int] | None = None) -> None:
    """Answer until stdin ends. What packages print goes to stderr; answers go to what was stdout. Args: counted, the peak in
    bytes as the peer itself counts it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.exp(torch.zeros(16))  # protrain/base/firstcall.py says why
    try:
        server = _Server(Job(**json.loads(sys.argv[1])), make, counted)
        for line in sys.stdin:
            _answer(answers, getattr(server, line.strip())())
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        message = " ".join(str(error).split()) or "no message"
        kind = "" if isinstance(error, CannotRunError) else f"{type(error).__name__}: "
        _answer(answers, {"error": (kind + message)[:600]})
        os._exit(1)
    os._exit(0)  # others' threads may never end


def _answer(answers: TextIO, fields: dict[str, Any]) -> None:
    print(json.dumps(fields), file=answers, flush=True)
