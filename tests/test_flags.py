"""What a step takes hangs on flags, which a program sets as it likes: what records gradients, and what is in train mode."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from nets import Block, Chain, inputs, steps
from torch import nn
from twins import MIB, adamw, assert_equal, run

import protrain
from protrain.runtime import foreseeing
from protrain.runtime.batches import Batches, covers


class Dropping(Block):
    """Saves more in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drops = nn.Sequential(*(nn.Dropout(0.1) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.drops(super().forward(x))
        return y


class Droppings(Chain):
    block = Dropping


@pytest.mark.parametrize("way", ["frozen", "one after the other", "eval mode", "an input"])
def test_a_step_that_saves_more_than_the_first_ones_has_its_plan(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches have the same shapes."""
    foreseen, real = Counter[int](), foreseeing.dry_run
    steps: list[protrain.Status] = []

    def dry_run(*args: Any, **kwargs: Any) -> Any:
        foreseen[len(steps)] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(foreseeing, "dry_run", dry_run)
    batch, memory = inputs(1, 2048)[0], 26 * MIB

    def loop(model: Any, optimizer: torch.optim.Optimizer, plain: bool) -> list[float]:
        losses = []
        for number in range(5):
            all_is_on = number >= 2
            if way == "frozen":
                model.blocks.requires_grad_(all_is_on)
            elif way == "one after the other":
                for place, block in enumerate(model.blocks):
                    block.requires_grad_(place >= 6 - 2 * number)
            elif way == "eval mode":
                model.train(all_is_on)
            else:
                model.blocks[0].requires_grad_(False)
            loss = model(batch.clone().requires_grad_(all_is_on and way == "an input"))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if not plain:
                steps.append(protrain.status(model))
        return losses

    got, want = run(Droppings, loop, memory=memory), run(Droppings, loop)
    for seen in (got, want):  # torch has states in the order in which they came to be
        seen.tensors = dict(sorted(seen.tensors.items()))
    assert_equal(got, want, memory)
    assert steps[0].predicted_peak_bytes < steps[-1].predicted_peak_bytes or way != "frozen"
    wanted = {0, 1, 2, 3} if way == "one after the other" else {0, 2}
    assert wanted <= set(foreseen) <= wanted | {1}, "the second one may be foreseen anew, as the output is not held"


def test_a_plan_stays_that_has_room_for_other_flags() -> None:
    """As where other blocks are trained now and then: what was measured of it stands, too."""
    model: Any = Droppings()
    model, optimizer = protrain.wrap(model, adamw(model), memory=30 * MIB)
    plans = []
    for on in (2, 2, 2, 5, 4, 2, 6):
        for place, block in enumerate(model.blocks):
            block.requires_grad_(place in (on, on + 1))
        model(inputs(1, 1024)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(protrain.status(model).plan)
    status, known = protrain.status(model), len(protrain.session_of(model).decider.dry_runs)
    protrain.unwrap(model)
    assert plans[2].step_seconds > 0
    assert plans[3:] == [plans[2]] * 4
    assert known == 4
    assert status.peak_memory_bytes <= 30 * MIB


def test_steps_with_other_flags_than_the_largest_batch_are_planned_by_time() -> None:
    """A first phase that takes the most does not come again."""
    model: Any = Droppings()
    model, optimizer = protrain.wrap(model, adamw(model), memory=40 * MIB)

    def step(rows: int, on: range) -> protrain.Status:
        for place, block in enumerate(model.blocks):
            block.requires_grad_(place in on)
        model(inputs(1, rows)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return protrain.status(model)

    step(1024, range(4))
    assert step(512, range(2, 8)).plan.step_seconds == 0
    for _ in range(12):
        status = step(512, range(2, 8))
    protrain.unwrap(model)
    assert status.plan.step_seconds > 0
    assert status.peak_memory_bytes <= 40 * MIB


@dataclass
class Given:
    x: torch.Tensor


def test_flags_that_are_all_among_others_need_no_more() -> None:
    """And words are told apart beside them."""
    model = Chain()
    batches, x = Batches(model, list(model.parameters())), inputs(1)[0]
    whole = batches.batch_of((x, "a"), {})
    assert covers(whole, batches.batch_of((x[:4], "a"), {}))
    with torch.autocast("cpu", torch.bfloat16):
        cast = batches.batch_of((x, "a"), {})
        assert covers(cast, batches.batch_of((x[:4], "a"), {}))
    assert not covers(whole, cast)
    assert not covers(cast, whole)
    assert not covers(whole, batches.batch_of((x, "b"), {}))
    assert not covers(whole, batches.batch_of((x.clone().requires_grad_(), "a"), {}))
    given = Given(x.clone())
    held = batches.batch_of((given,), {})
    given.x.requires_grad_()
    assert not covers(held, batches.batch_of((given,), {}))
    model.blocks[2].requires_grad_(False)
    model.head.eval()
    part = batches.batch_of((x, "a"), {})
    assert covers(whole, part)
    assert not covers(part, whole)
    model.blocks[2].requires_grad_(True)
    assert covers(whole, batches.batch_of((x, "a"), {}))
    assert not covers(part, batches.batch_of((x, "a"), {}))


class Grows(Chain):
    """As many blocks as it has by now."""

    n_blocks = 2

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, skip=range(self.n_blocks, 8))


def test_a_model_that_grows_by_an_attribute_is_planned_for_anew() -> None:
    """No word of the batch says so, and what was foreseen of it has no room for the blocks that run now."""
    model: Any = Grows()
    batches = inputs(6, rows=2048)
    model, optimizer = protrain.wrap(model, adamw(model), memory=72 * MIB)
    train = steps(batches[:2])
    train(model, optimizer, False)
    assert "checkpoint" not in protrain.status(model).plan.block_modes[:2]
    model.n_blocks = 8
    with pytest.raises(protrain.BudgetError):
        train(model, optimizer, False)
    optimizer.zero_grad()
    steps(batches[2:])(model, optimizer, False)
    protrain.unwrap(model)


def test_a_gradient_of_the_input_alone_is_no_step_under_way() -> None:
    """As for a saliency map, between two steps."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=200 * MIB)
    train = steps(inputs(1))
    train(model, optimizer, False)
    model.eval()
    x = inputs(1)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(x), x)
    assert gradient.isfinite().all()
    model.train()
    model.blocks[0].compile(backend="eager")
    model(x.detach()).backward()
    with pytest.raises(protrain.StepError, match="in the middle of a step"):
        model.blocks[1].compile(backend="eager")
    optimizer.zero_grad()
    train(model, optimizer, False)
    protrain.unwrap(model)
