"""Plans with block modes that swap, on real dry runs: their peak, what they write, and how they are counted and read."""

from __future__ import annotations

import pickle
import random
from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed import with_fixed_times
from nets import steps
from twins import MIB, adamw, assert_equal, loss_of, run

import protrain
from protrain import _core
from protrain.model.blocks import find_blocks
from protrain.planner.planning import plan_from_profile
from protrain.planner.smallest import Anew, _smallest, refuse

pytest.importorskip("transformers")

LAYERS = 4
MIXED = ["keep", "swap", "checkpoint", "checkpoint_swap"]


def saved_bytes(model: Any, ids: torch.Tensor) -> int:
    """What autograd saves in the blocks of a real forward, each storage once, parameters left out; as the arena counts it."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    inside, found, alive = [False], {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside[0] and storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = _core.rounded_bytes(storage.nbytes())
            alive.append(tensor)
        return tensor

    handles = []
    for _, block in find_blocks(model):
        handles.append(block.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True)))
        handles.append(block.register_forward_hook(lambda *_: inside.__setitem__(0, False)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    for handle in handles:
        handle.remove()
    return sum(found.values())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_swapped_step_peaks_as_a_recomputed_one_and_what_is_small(family: str, causal_lm: Any, token_batches: Any) -> None:
    model, (ids,) = causal_lm(family, layers=LAYERS, vocabulary=2048), token_batches(1, batch=4, length=128)
    found = with_fixed_times(protrain.profile(model, {"input_ids": ids, "labels": ids}, memory="64MiB"))

    def plan(*modes: str) -> protrain.Plan:
        return plan_from_profile(found, 64 << 20, modes=list(modes))

    checkpoint = plan(*["checkpoint"] * LAYERS)
    swap = plan(*["swap"] * LAYERS)
    both = plan(*["checkpoint_swap"] * LAYERS)
    mixed = plan(*MIXED)
    small = [phase.small_bytes for phase in found.run.phases if phase.block >= 0 and not phase.backward]
    assert 0 < min(small) == max(small) < 64 << 10  # statistics of norms, and the like
    assert both.peak_bytes == checkpoint.peak_bytes == swap.peak_bytes - sum(small)
    assert mixed.peak_bytes == plan("keep", "checkpoint", "checkpoint", "checkpoint").peak_bytes + small[MIXED.index("swap")]
    assert [(p.n_swap, p.n_checkpoint) for p in (swap, checkpoint, both, mixed)] == [(4, 0), (0, 4), (0, 4), (1, 2)]
    assert (swap.n_persist, both.n_persist) == (checkpoint.n_persist, checkpoint.n_persist)
    stash = swap.disk_bytes - checkpoint.disk_bytes
    assert abs(stash - saved_bytes(model, ids)) <= LAYERS * 65536
    inputs = _core.rounded_bytes(ids.numel() * 64 * 4)  # of a block: float32 [4, 128, 64]
    assert both.disk_bytes - checkpoint.disk_bytes == LAYERS * -(-inputs // 65536) * 65536


def test_a_plan_of_four_modes_is_read_and_used(causal_lm: Any, token_batches: Any) -> None:
    model, (ids,) = causal_lm("gpt2", layers=LAYERS), token_batches(1)
    plan = protrain.plan(model, ids, memory="1GiB", block_modes=MIXED)
    assert plan.explain().splitlines()[-LAYERS:] == [f"block {number} {mode}" for number, mode in enumerate(MIXED)]
    assert protrain.Plan.from_json(plan.to_json()) == plan
    again = protrain.plan(model, ids, memory=plan.peak_bytes, block_modes=list(plan.block_modes))
    assert again.block_modes == plan.block_modes
    assert again.peak_bytes <= plan.peak_bytes
    with pytest.raises(ValueError, match=r"block_modes\[2\] is 'offload'; allowed are keep, swap, checkpoint, checkpoint_swap"):
        protrain.plan(model, ids, memory="1GiB", block_modes=["keep", "swap", "offload", "keep"])
    with pytest.raises(ValueError, match="3 entries; the model has 4 blocks"):
        protrain.plan(model, ids, memory="1GiB", block_modes=MIXED[:3])


def test_what_fits_is_kept_and_what_does_not_leaves(causal_lm: Any, token_batches: Any) -> None:
    model, (ids,) = causal_lm("gpt2", layers=LAYERS), token_batches(1, batch=8, length=256)
    batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(model, batch, memory="4MiB")
    ample, tight = (protrain.plan(model, batch, memory=memory) for memory in ("1GiB", refused.value.smallest_bytes))
    assert (set(ample.block_modes), ample.n_persist, ample.disk_bytes) == ({"keep"}, ample.n_chunks, 0)
    assert set(tight.block_modes) != {"keep"}
    assert tight.disk_bytes > 0
    assert min(tight.step_seconds, ample.step_seconds) > 0
    assert protrain.Plan.from_json(tight.to_json()).forecast == tight.forecast


def test_the_smallest_budget_works_with_the_chunks_that_it_has_itself(
    causal_lm: Any, token_batches: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are a twelfth of the budget at most. Those of the budget that is refused would need less."""
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    model, (ids,) = causal_lm("gpt2", hidden=256, layers=8), token_batches(1, batch=4, length=256)
    with pytest.raises(protrain.BudgetError, match="smallest budget that works") as refused:
        protrain.plan(model, {"input_ids": ids, "labels": ids}, memory="16MiB")
    smallest = refused.value.smallest_bytes
    plan = protrain.plan(model, {"input_ids": ids, "labels": ids}, memory=smallest)
    assert plan.chunk_bytes > 16 * MIB // 12
    with pytest.raises(protrain.BudgetError):
        protrain.plan(model, {"input_ids": ids, "labels": ids}, memory=smallest - 4096)
    wrapped, _ = protrain.wrap(model, adamw(model), memory="16MiB")
    with pytest.raises(protrain.BudgetError) as refused:
        loss_of(wrapped, ids)
    model = protrain.unwrap(wrapped)
    assert refused.value.smallest_bytes >= smallest
    wrapped, optimizer = protrain.wrap(model, adamw(model), memory=refused.value.smallest_bytes)
    loss_of(wrapped, ids).backward()
    optimizer.step()
    assert protrain.status(wrapped).plan.chunk_bytes == plan.chunk_bytes
    protrain.unwrap(wrapped)


def test_a_profile_plans_elsewhere(causal_lm: Any, token_batches: Any) -> None:
    model, (ids,) = causal_lm("gpt2", layers=LAYERS), token_batches(1, batch=4, length=128)
    batch = {"input_ids": ids, "labels": ids}
    found = protrain.profile(model, batch, memory="24MiB")
    assert protrain.Profile.from_json(found.to_json()) == found
    plan = protrain.plan(model, batch, memory="24MiB")
    elsewhere = plan_from_profile(protrain.Profile.from_json(found.to_json()), 24 << 20)
    assert elsewhere == plan
    assert elsewhere.to_json() == plan.to_json()
    with pytest.raises(protrain.PlanError, match="profile: this JSON is no profile"):
        protrain.Profile.from_json("[]")
    with pytest.raises(protrain.PlanError, match="chunks that its parameters do not fill"):
        plan_from_profile(replace(found, parameters=found.parameters[:1]), 24 << 20)


def test_errors_cross_processes() -> None:
    budget = protrain.BudgetError("memory: too little", needed_bytes=3, budget_bytes=1, smallest_bytes=2)
    disk = protrain.DiskError("disk: full", errno=28, filename="/there", asked_bytes=7)
    for error in (budget, disk, protrain.PlanError("plan: no"), protrain.StepError("step: no")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
        assert {name: getattr(again, name) for name in error._keywords} == {n: getattr(error, n) for n in error._keywords}


# ---- budgets that decide about chunks ----


@pytest.mark.parametrize("seed", range(20))
def test_from_the_smallest_budget_on_all_work(seed: int) -> None:
    """Packings change with the budget, and what each needs is anything: no budget above the smallest named is in a hole."""
    draw = random.Random(seed)
    begins = [0, *sorted(draw.sample(range(500, 4000, 20), 60))]
    needs = [draw.randint(1500, 1600) + begin // 20 for begin in begins]

    def packed(budget: int) -> int:
        return bisect(begins, budget) - 1

    def works(budget: int) -> bool:
        return budget >= needs[packed(budget)]

    for refused in (budget for budget in (1, 1000, 1500) if not works(budget)):
        asked: list[int] = []

        def needed(budget: int, asked: list[int] = asked) -> int:
            asked.append(packed(budget))
            return needs[packed(budget)]

        found = _smallest(Anew(packed, needed), refused, needs[packed(refused)])
        assert all(map(works, range(found, 4000)))
        assert not works(found - 1)
        assert len(asked) == len({*asked} - {packed(refused)})


def test_no_step_needs_more_than_the_smallest_budget_that_works() -> None:
    """What was refused may have chunks that need more than those of a budget that works."""
    error = protrain.BudgetError("", needed_bytes=90, budget_bytes=30, smallest_bytes=90)
    told = refuse(error, "a step", anew=Anew(lambda budget: budget >= 60, lambda budget: 70 if budget >= 60 else 90))
    assert (told.needed_bytes, told.smallest_bytes) == (70, 70)
    assert str(told).startswith(
        "memory: a step needs 70 bytes, the budget is 30 bytes; the smallest budget that works is 70 bytes"
    )


class Residual(torch.nn.Module):
    """Two convolutions with their norms, and what they are added to."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        part = lambda a, b, size, step: [torch.nn.Conv2d(a, b, size, step, size // 2, bias=False), torch.nn.BatchNorm2d(b)]  # noqa: E731
        self.body = torch.nn.Sequential(*part(n_in, n_out, 3, stride), torch.nn.ReLU(inplace=True), *part(n_out, n_out, 3, 1))
        self.down = torch.nn.Sequential(*part(n_in, n_out, 1, stride)) if n_in != n_out else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.relu(self.body(x) + self.down(x), inplace=True)


class Thin(torch.nn.Module):
    """A hundred layers, of which all take less than a slot and the ring."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Tanh()) for _ in range(100))
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_a_model_that_is_smaller_than_what_moves_it_is_trained_in_the_budget_that_is_named(disk: Path) -> None:
    """wrap had asked for what all chunks on disk need, 2.4 times as much."""
    x = torch.randn(4, 16)
    model = Thin()
    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(model, (x,), memory=1000, optimizer=adamw(model), disk=str(disk))
    memory = refused.value.smallest_bytes
    with pytest.raises(protrain.BudgetError) as states:
        protrain.wrap(model, adamw(model), memory=1000, disk=str(disk))
    assert states.value.smallest_bytes <= memory
    given = {"memory": memory, "disk": str(disk)}
    status = assert_equal(run(Thin, steps([x] * 4), **given), run(Thin, steps([x] * 4)), memory)
    assert status.plan.n_persist == status.plan.n_chunks


class Funnel(torch.nn.Sequential):
    """One large layer among small ones, whose activations are small beside its gradient."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sides = [64, 1000, 700, 300, 10]
        layers = [(torch.nn.Linear(i, o), torch.nn.Tanh()) for i, o in zip(sides, sides[1:], strict=False)]
        super().__init__(*(layer for pair in layers for layer in pair))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def trained_by_rmsprop_in_the_smallest_budget(
    make: Callable[[], torch.nn.Module], x: torch.Tensor, disk: Path
) -> protrain.Status:
    """The status behind four steps in the budget that `protrain.plan` names, which plain torch's are compared with."""

    def rmsprop(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), lr=1e-3)

    model = make()
    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(model, (x,), memory=1000, optimizer=rmsprop(model), disk=str(disk))
    memory = refused.value.smallest_bytes
    given = {"memory": memory, "disk": str(disk)}
    return assert_equal(run(make, steps([x] * 4), rmsprop, **given), run(make, steps([x] * 4), rmsprop), memory)


def test_wrap_takes_the_smallest_budget_of_an_optimizer_without_a_kernel(disk: Path) -> None:
    """It had counted a gradient that waits to leave memory beside the update, which comes when it has left."""
    x = torch.randn(32, 64)
    status = trained_by_rmsprop_in_the_smallest_budget(Funnel, x, disk)
    assert status.plan.n_persist < status.plan.n_chunks


def test_wrap_takes_the_smallest_budget_of_a_small_model_and_an_optimizer_without_a_kernel(disk: Path) -> None:
    """In memory it takes less than what moves it; old values were counted, which go to the disk where there is no room."""
    x = torch.randn(2, 48)

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(48, 48) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().mean()

    status = trained_by_rmsprop_in_the_smallest_budget(Small, x, disk)
    assert status.plan.n_persist == status.plan.n_chunks


def test_budgets_above_the_smallest_of_a_model_whose_layers_grow() -> None:
    """Some were refused, as chunks grow with the budget and slots with them; and who asks for one is told of the same one."""
    widths = [48, 48, 96, 192, 384]
    stages = [m for a, b in zip(widths, widths[1:], strict=False) for m in (Residual(a, b, 1 + (a != b)), Residual(b, b))]
    stem = [torch.nn.Conv2d(3, 48, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(48), torch.nn.ReLU(inplace=True)]
    last = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(384, 100)]
    model, x = torch.nn.Sequential(*stem, torch.nn.MaxPool2d(3, 2, 1), *stages, *last), torch.randn(4, 3, 64, 64)
    with pytest.raises(protrain.BudgetError) as caught:
        protrain.plan(model, x, memory=MIB)
    smallest = caught.value.smallest_bytes
    for part in range(0, 128, 8):
        budget = smallest + smallest * part // 1024
        assert protrain.plan(model, x, memory=budget).peak_bytes <= budget
    with pytest.raises(protrain.BudgetError) as caught:
        protrain.plan(model, x, memory=smallest - 1)
    assert caught.value.smallest_bytes == smallest
