"""A step that is interrupted: KeyboardInterrupt at each place at which Python lets a signal in while protrain's code runs.

    python tests/interrupts.py --share 1 --seed 1

These places are where a function begins and where a call of C has come back; a step has some thousands, and --share says how
many are tried. After each interrupt, and `zero_grad()` as users call it then: parameters, optimizer state and the count of steps
are all those before the step or all those after it; the next step gives plain torch's loss, and what the user allocates after
that counts in no budget. Figures are printed as one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from crashes import adamw, batch, digest, make
from standin import StandIn

import protrain
from protrain.base.counting import uncounted
from protrain.device import compute

MIB = 1 << 20
BUDGET = 4 * MIB  # of 6.3 MiB of states
OURS = (str(Path(protrain.__file__).parent), contextlib.__file__)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "planned": {},
    "modes": {"block_modes": ["swap", "checkpoint", "checkpoint_swap", "keep", "swap", "swap"]},
    "in memory": {"memory": 3 * BUDGET // 2, "max_grad_norm": 0.5},
    "without a kernel": {"memory": 3 * BUDGET},
    "accumulate": {"accumulate": 3},
    "accumulate, clipped": {"accumulate": 2, "max_grad_norm": 0.5, "memory": 5 * MIB},
    "bf16": {"precision": "bf16", "memory": 5 * MIB, "block_modes": ["swap", "checkpoint", "keep"] * 2},
    "over a device": {"memory": 3 * BUDGET // 2, "host_memory": 5 * BUDGET // 2, "max_grad_norm": 0.5},
}
WARM_STEPS = 4  # after which plans change no more


def optimizer_of(configuration: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adamax(model.parameters()) if configuration == "without a kernel" else adamw(model)


class Places:
    """Counts the places that a call comes to, and interrupts at one of them."""

    def __init__(self) -> None:
        self.count = self._at = 0
        self.where = ""

    def run(self, work: Callable[[], Any], at: int = 0) -> bool:
        """Whether it was interrupted."""
        self.count, self._at, self.where = 0, at, ""
        sys.setprofile(self._event)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    def _event(self, frame: FrameType, event: str, value: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(OURS):
            return
        self.count += 1
        if self.count == self._at:
            sys.setprofile(None)
            after = f" after {value.__name__}" if event == "c_return" else ""
            self.where = f"{frame.f_code.co_qualname}{after}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise KeyboardInterrupt


def seen(model: Any, optimizer: Any, masters: Any = None) -> tuple[str, str]:
    """Parameters and states, masters with these where the optimizer does not hold them as such."""
    states = optimizer.state_dict()["state"]
    tensors = {f"{number}.{name}": torch.as_tensor(value) for number in states for name, value in states[number].items()}
    if masters is not None:
        tensors |= {f"{number}.master": p.detach() for number, p in enumerate(masters.parameters())}
    return digest({name: value.float() for name, value in model.state_dict().items()}), digest(tensors)


class Plain:
    """What plain torch has after each step, as far as it was asked for. In bf16 it updates fp32 masters and rounds them."""

    def __init__(self, configuration: str) -> None:
        options = CONFIGURATIONS[configuration]
        self._passes, self._clip = options.get("accumulate", 1), options.get("max_grad_norm")
        self.dtype = torch.bfloat16 if options.get("precision") == "bf16" else torch.float32
        self._masters: Any = make()
        self._model: Any = self._masters if self.dtype == torch.float32 else copy.deepcopy(self._masters).bfloat16()
        self._optimizer = optimizer_of(configuration, self._masters)
        self._losses: list[list[float]] = []
        self._seen = [self._look()]

    def _look(self) -> tuple[str, str]:
        return seen(self._model, self._optimizer, None if self._masters is self._model else self._masters)

    def batches(self, step: int) -> list[torch.Tensor]:
        """Of the passes of a step."""
        return [batch(self._passes * step + number).to(self.dtype) for number in range(self._passes)]

    def after(self, steps: int) -> tuple[str, str]:
        with uncounted():
            while len(self._losses) < steps:
                self._losses.append([])
                for x in self.batches(len(self._losses) - 1):
                    loss = self._model(x)
                    loss.backward()
                    self._losses[-1].append(loss.item())
                self._update()
                self._seen.append(self._look())
        return self._seen[steps]

    def _update(self) -> None:
        pairs = list(zip(self._model.parameters(), self._masters.parameters(), strict=True))
        for p, master in pairs:
            master.grad = p.grad.float()
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._masters.parameters(), self._clip)
        self._optimizer.step()
        with torch.no_grad():
            for p, master in pairs:
                p.copy_(master)
                p.grad = None

    def losses(self, step: int) -> list[float]:
        self.after(step + 1)
        return self._losses[step]


class Run:
    """All interrupts of one configuration."""

    def __init__(self, configuration: str, disk: Path) -> None:
        self.plain, self.places = Plain(configuration), Places()
        self.found: Counter[str] = Counter()
        model: Any = make()
        compute.stand_in = StandIn() if "host_memory" in CONFIGURATIONS[configuration] else None
        options = {"memory": BUDGET, **CONFIGURATIONS[configuration]}
        self.model, self.optimizer = protrain.wrap(model, optimizer_of(configuration, model), disk=disk, **options)
        self.steps = 0
        for _ in range(WARM_STEPS):
            self.one_step()

    def one_step(self) -> None:
        want, losses = self.plain.losses(self.steps), []
        for x in self.plain.batches(self.steps):
            loss = self.model(x)
            loss.backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert losses == want, f"step {self.steps + 1} has losses {losses}, in plain torch {want}"
        self.steps += 1

    def works(self) -> dict[str, Callable[[], Any]]:
        """What a step calls, in order; the first word of each name says what it is."""
        losses: list[torch.Tensor] = []
        works: dict[str, Callable[[], Any]] = {}
        for number, x in enumerate(self.plain.batches(self.steps), 1):
            works[f"forward {number}"] = lambda x=x: losses.append(self.model(x))
            works[f"backward {number}"] = lambda: torch.autograd.backward(losses.pop())
        return works | {"step": self.optimizer.step, "zero_grad": self.optimizer.zero_grad}

    def interrupted(self, phase: str, at: int, again: bool = False) -> int:
        """One step, in this phase interrupted at that place (0: at none); returns how many places there are. again: a forward
        that is interrupted is made once more, and the step is completed."""
        before, after, kind = self.steps, {self.steps + 1}, phase.split(maxsplit=1)[0]
        for name, work in self.works().items():
            if name != phase:
                work()
            elif self.places.run(work, at):
                self.found[kind] += 1
                if again and kind == "forward":
                    work()
                    continue
                after = {"forward": {before}, "backward": {before}, "step": {before, before + 1}}.get(kind, after)
                break
        self.optimizer.zero_grad()
        self.steps = protrain.status(self.model).steps
        assert self.steps in after, f"{self.steps} steps are counted, there were {before}"
        with uncounted():  # the interrupted step may still have its memory
            params, states = seen(self.model, self.optimizer)
        want = self.plain.after(self.steps)
        assert params == want[0], f"the parameters are not those after step {self.steps}"
        assert states == want[1], f"the states are not those after step {self.steps}"
        return self.places.count


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--share", type=float, default=1.0, help="of the places of each phase, spread at random")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("configurations", nargs="*", help=f"all unless some are named: {', '.join(CONFIGURATIONS)}")
    given = words.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(given.seed)
    found: Counter[str] = Counter()
    for configuration in given.configurations or CONFIGURATIONS:
        with tempfile.TemporaryDirectory(dir=os.environ.get("PROTRAIN_DISK")) as disk:
            run = Run(configuration, Path(disk))
            for phase in run.works():
                count = run.interrupted(phase, 0)
                for at in range(1, count + 1):
                    if chance.random() >= given.share:
                        continue
                    try:
                        run.interrupted(phase, at, again=at % 2 == 0)
                        run.one_step()
                        torch.empty(4 * BUDGET)
                    except BaseException as error:
                        error.add_note(f"{configuration}, {phase} interrupted at place {at} of {count}: {run.places.where}")
                        raise
            protrain.unwrap(run.model)
            found += run.found
    print(json.dumps({"interrupts": sum(found.values()), **found, "seed": given.seed}))


if __name__ == "__main__":
    sys.exit(main())
