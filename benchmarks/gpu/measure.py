"""One system, measured in this process: its steps, what they took of memory and of the lanes, then the largest model it trains.

What is known is printed as it comes to be, a line of JSON each time, so that a process whose time is over has said what it found.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu import driver, figures, largest
from gpu.systems import SYSTEMS, Settings, System, fill

from protrain import BudgetError, DeviceError, DiskError
from protrain.api import find_session
from protrain.base.sizes import default_memory_bytes, parse_bytes
from protrain.device.compute import Accelerator
from protrain.model.onmeta import parameters_on_meta
from protrain.profiling import calibration
from protrain.profiling.timeline import StepError

WARMUP = 4  # protrain plans before the first step and by the times of the first two, in which it finds out about the loop too
TRIAL_STEPS = 2  # of the search: optimizers make their state in the first one
HOST_BYTES = 20  # for each parameter, of who holds all states on the host and is given the model there

#: What only some systems have, or only a GPU tells.
NOT_TOLD: dict[str, Any] = dict.fromkeys((
    "peak_bytes", "live_bytes", "reserved_over_live", "nvml_bytes", "planned_seconds", "planned_peak_bytes",
    "planned_over_measured_seconds", "planned_over_measured_peak", "adam_bytes_per_second", "link",
))  # fmt: skip

Tell = Callable[[dict[str, Any]], None]


def tell(found: dict[str, Any]) -> None:
    """To whoever started this process."""
    print(json.dumps(found), flush=True)


def make_model(words: argparse.Namespace, layers: int) -> Any:
    """A GPT-2 of these sizes, in ordinary memory."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=words.hidden, n_layer=layers, n_head=max(words.hidden // 64, 1), vocab_size=words.vocabulary,
        n_positions=max(words.seq, 64), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def make_batches(words: argparse.Namespace, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(words.vocabulary, (words.batch, words.seq), generator=generator) for _ in range(count)]


def does_not_fit(error: BaseException) -> bool:
    """Whether it says that some memory, or the disk, is too small."""
    full = isinstance(error, DiskError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    refused = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return full or refused or isinstance(error, torch.OutOfMemoryError | BudgetError | MemoryError)


def one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def close(model: Any) -> None:
    """What protrain has of the model goes, its parameters too: they may be more than memory holds."""
    session = find_session(model)
    if session is not None:
        session.close(restore=False)


def let_go(words: argparse.Namespace) -> None:
    gc.collect()
    if words.device == "cuda":
        torch.cuda.empty_cache()


# ---- the model that all systems train ----


def measure(words: argparse.Namespace, system: System, settings: Settings) -> dict[str, Any]:
    """The figures of its steps; or, in one word, why there are none."""
    model = make_model(words, words.layers)
    try:
        step = system.make(model, settings)
        batches = make_batches(words, WARMUP + words.steps)
        losses = [step(ids.to(words.device)).item() for ids in batches[:WARMUP]]
        session = find_session(model)
        updates = figures.Updates(session) if session is not None else None
        if words.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses += [step(ids.to(words.device)).item() for ids in batches[WARMUP:]]
        seconds = (time.perf_counter() - begin) / words.steps
        found: dict[str, Any] = NOT_TOLD | {
            "step_seconds": seconds,
            "tokens_per_second": words.batch * words.seq / seconds,
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }
        found |= memory_figures(words, session)
        if session is not None and updates is not None:
            found |= session_figures(session, updates, found, words.steps)
        return found
    except Exception as error:
        if does_not_fit(error):
            return {"does_not_fit": one_line(error)}
        return {"failed": f"{type(error).__name__}: {one_line(error)}"}
    finally:
        close(model)


def memory_figures(words: argparse.Namespace, session: Any) -> dict[str, Any]:
    """peak_bytes: of the budget, protrain's since it was wrapped; reserved_over_live: what was taken from the driver beside what
    tensors and the engine had, both at their highest of the measured steps; nvml_bytes: of the whole process, by the driver.
    None: not told."""
    stats = session.engine.stats() if session is not None else None
    found: dict[str, Any] = {"peak_bytes": stats["peak_bytes"] if stats else None}
    if words.device != "cuda":
        return found
    own = stats["device_bytes"] if stats else 0
    reserved, live = torch.cuda.max_memory_reserved() + own, torch.cuda.max_memory_allocated() + own
    found |= {"reserved_over_live": reserved / live if live else None, "live_bytes": live}
    if stats is None:
        found["peak_bytes"] = reserved
    try:
        found["nvml_bytes"] = driver.process_bytes()
    except driver.NotTold as error:
        found["nvml_not_told"] = str(error)
    return found


def session_figures(session: Any, updates: figures.Updates, found: dict[str, Any], steps: int) -> dict[str, Any]:
    """protrain's own: what its plan said beside what was measured, its lanes, its updates."""
    plan = session.homes.arrangement.plan
    told = {
        "planned_seconds": plan.step_seconds or None,
        "planned_peak_bytes": plan.peak_bytes,
        "planned_over_measured_seconds": plan.step_seconds / found["step_seconds"] if plan.step_seconds else None,
        "planned_over_measured_peak": plan.peak_bytes / found["peak_bytes"] if found["peak_bytes"] else None,
        "chunks": {"device": plan.n_persist, "host": plan.n_host, "disk": plan.n_chunks - plan.n_persist - plan.n_host},
        "block_modes": {mode: plan.block_modes.count(mode) for mode in sorted(set(plan.block_modes))},
        "adam_bytes_per_second": updates.bytes_per_second(steps),
    }
    compute = session.wrapped.compute
    if not isinstance(compute, Accelerator):
        return told
    try:
        timeline = session.clock.step.timeline()
        machine = calibration.measure_device(compute, session.wrapped.settings.disk)
    except (StepError, DiskError, DeviceError, BudgetError, MemoryError) as error:
        return told | {"link_not_told": one_line(error)}
    return told | {"link": figures.link_shares(timeline, machine)}


# ---- the largest model ----


class Trials:
    """Models of this system of any number of layers, each trained for two steps."""

    def __init__(self, words: argparse.Namespace, system: System, settings: Settings) -> None:
        self._words, self._system, self._settings = words, system, settings

    def parameters(self, layers: int) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in make_model(self._words, layers).parameters())

    def trains(self, layers: int) -> bool:
        """Raises what a step raises that is not for want of memory."""
        try:
            return self._train(layers)
        except Exception as error:
            if not does_not_fit(error):
                raise
            return False
        finally:
            let_go(self._words)

    def _train(self, layers: int) -> bool:
        begins = self._system.begins
        if begins == "host" and HOST_BYTES * self.parameters(layers) > default_memory_bytes():
            return False
        with parameters_on_meta():
            model = make_model(self._words, layers)
        if begins != "meta":
            model.to_empty(device="cpu" if begins == "host" else self._words.device)
            model.tie_weights()
            with torch.no_grad():
                model.apply(fill)
        try:
            step = self._system.make(model, self._settings)
            for ids in make_batches(self._words, TRIAL_STEPS):
                step(ids.to(self._words.device)).item()
        finally:
            close(model)
        return True


def find_largest(words: argparse.Namespace, system: System, settings: Settings, measured: dict[str, Any], tell: Tell) -> None:
    """Tells of the largest model as far as it is known, again and again."""
    if words.most_layers < 1:
        return
    if words.device != "cuda" and not system.keeps_budget:
        tell({"largest": {"not_measured": "torch keeps no budget on the CPU"}})
        return
    trials = Trials(words, system, settings)
    last: dict[str, Any] = {}

    def note(found: dict[str, Any]) -> None:
        last.clear()
        last.update(found, parameters=trials.parameters(found["layers"]) if found["layers"] else 0)
        tell({"largest": last})

    trained = words.layers if "step_seconds" in measured else 0
    failed = words.layers if "does_not_fit" in measured else None
    most = max(words.most_layers, trained)
    try:
        found = largest.search(trials.trains, until=words.until, most=most, trained=trained, failed=failed, note=note)
        tell({"largest": {**last, **found}})
    except Exception as error:
        tell({"largest": {**last, "ended": f"{type(error).__name__}: {one_line(error)}"}})


def work(words: argparse.Namespace, tell: Tell = tell) -> None:
    """Tells all of one system."""
    budget = parse_bytes(words.memory)
    system = SYSTEMS[words.system]
    if words.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        total = torch.cuda.get_device_properties(0).total_memory
        if not system.keeps_budget:
            torch.cuda.set_per_process_memory_fraction(min(budget / total, 1.0))
    settings = Settings(budget, words.device, words.disk, words.host_memory, words.batch)
    measured = measure(words, system, settings)
    tell(measured)
    let_go(words)
    if "failed" not in measured:
        find_largest(words, system, settings, measured, tell)
