"""Which parameters share a chunk, and what that saves where most of a model is frozen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from twins import MIB, adamw, assert_equal, run

import protrain
from protrain.model.layout import SMALL_BYTES, chunk_size, pack

Parameter = tuple[int, int, bool]
N_BLOCKS = 6


def blocks(frozen: int, trained: int, count: int = 24) -> list[Parameter]:
    """A frozen embedding; blocks of two frozen parameters with an adapter behind each; a head that is trained."""
    found = [(3 * MIB, -1, False)]
    for block in range(count):
        found += [(frozen, block, False), (trained, block, True)] * 2
    return [*found, (MIB, -1, True)]


@pytest.mark.parametrize("trained", [1 << 10, 1 << 18, 1 << 20, 3 << 20])
@pytest.mark.parametrize("budget", [20 * MIB, 200 * MIB, 2000 * MIB])
def test_no_chunk_has_parameters_of_both_kinds(trained: int, budget: int) -> None:
    parameters = blocks(2 * MIB, trained)
    size = chunk_size(parameters, budget)
    found = pack(parameters, size)
    assert sorted(index for members in found.members for index in members) == list(range(len(parameters)))
    for members, is_trained, grad_bytes in zip(found.members, found.trained, found.grad_bytes, strict=True):
        assert {parameters[index][2] for index in members} == {is_trained}
        assert (grad_bytes > 0) == is_trained
    assert all(one[0] < next_one[0] for one, next_one in pairwise(found.members))  # in the order of their first parameters
    for number, (members, bytes_) in enumerate(zip(found.members, found.sizes, strict=True)):
        ends = [found.places[index][1] + parameters[index][0] for index in members]
        assert all(found.places[index][0] == number for index in members)
        assert all(found.places[b][1] >= end for end, b in zip(ends[:-1], members[1:], strict=True))
        assert 0 <= bytes_ - ends[-1] < 4096
        if not found.trained[number]:
            continue
        of_blocks = {parameters[index][1] for index in members}
        assert len(of_blocks) == 1 or ends[-1] <= SMALL_BYTES


def test_what_is_trained_whole_or_frozen_whole_is_packed_as_ever() -> None:
    whole = [(size, block, True) for size, block, _ in blocks(2 * MIB, MIB)]
    for budget in (30 * MIB, 400 * MIB):
        found = pack(whole, chunk_size(whole, budget))
        assert [index for members in found.members for index in members] == list(range(len(whole)))
        assert all(found.trained)
    frozen = [(size, block, False) for size, block, _ in whole]
    found = pack(frozen, chunk_size(frozen, 400 * MIB))
    assert not any(found.trained)
    assert [index for members in found.members for index in members] == list(range(len(frozen)))


class Adapted(nn.Module):
    """A frozen layer, 1 MiB, with an adapter of rank 4 beside it, as peft has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(512, 512).requires_grad_(False)
        self.down, self.up = nn.Linear(512, 4, bias=False), nn.Linear(4, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + torch.tanh(self.base(x) + self.up(self.down(x)))
        return y


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(N_BLOCKS)))


def loop(model: Any, optimizer: torch.optim.Optimizer, plain: bool) -> list[float]:
    losses = []
    for x in torch.randn(4, 16, 512, generator=torch.Generator().manual_seed(1)):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_frozen_weights_have_no_state_and_are_not_written(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    frozen_bytes, trained_bytes = N_BLOCKS * 4 * 513 * 512, N_BLOCKS * 4 * 2 * 4 * 512
    model = make()
    optimizer = adamw(model)
    plan = protrain.plan(model, torch.randn(16, 512), memory=64 * MIB, optimizer=optimizer)
    assert plan.n_persist == plan.n_chunks
    assert frozen_bytes + 3 * trained_bytes <= plan.persistent_bytes <= 1.05 * frozen_bytes + 3.2 * trained_bytes
    memory = 4 * MIB
    status = assert_equal(run(make, loop, memory=memory), run(make, loop), memory)
    assert status.plan.n_persist < status.plan.n_chunks
    assert status.disk_bytes <= 1.1 * frozen_bytes + 8 * trained_bytes
    # Once by wrap, and where homes move for a plan by time; adapters in each of four steps.
    assert status.disk_write_bytes <= 3.3 * frozen_bytes + 4 * 8 * trained_bytes


class Biased(nn.Module):
    """Of a layer the bias is trained alone: two chunks for one module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(512, 512), nn.Linear(512, 512)
        self.layer.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + torch.tanh(self.scale(torch.tanh(self.layer(x))))
        return y


def fill(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module._parameters.values():
            if p is not None:
                p.copy_(torch.randn(p.shape) * 0.05)


class Several(nn.Module):
    """Parameters of six chunks in one module, used one after another."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(6):
            setattr(self, f"w{number}", nn.Parameter(torch.empty(512, 512)))

    def forward(self, x: Any) -> Any:
        for p in self.parameters():
            x = torch.tanh(x @ p)
        return x


def both_filled(make: Callable[[], nn.Module], memory: int) -> tuple[nn.Module, Any, Any]:
    """A model in plain torch and a wrapped one with its optimizer, made on meta, whose values come from `fill`."""
    with torch.device("meta"):
        plain, model = make(), make()
    plain.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in plain.modules():
        fill(module)
    torch.manual_seed(3)
    return plain, *protrain.wrap(model, adamw(model), memory=memory, param_init_fn=fill)


def test_values_from_a_function_need_room_for_one_module_at_a_time(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    memory = 12 * MIB  # slots of two chunks, the ring, own slots of four more, what is drawn; eight modules have 48 of 1 MiB
    plain, model, _ = both_filled(lambda: nn.Sequential(*(Several() for _ in range(8))), memory)
    session = protrain.api.session_of(model)
    assert session.residency.own_slots == 0
    assert session.engine.held()["slot_bytes"] == sum(session.homes.arrangement.slot_bytes)
    assert protrain.status(model).peak_memory_bytes <= memory
    protrain.unwrap(model)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("mib", [6, 200])
def test_values_from_a_function_where_a_modules_parameters_are_of_both_kinds(
    mib: int, disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    memory = mib * MIB
    plain, model, optimizer = both_filled(lambda: nn.Sequential(*(Biased() for _ in range(N_BLOCKS))), memory)
    assert loop(model, optimizer, False) == loop(plain, adamw(plain), True)
    assert protrain.status(model).peak_memory_bytes <= memory
    protrain.unwrap(model)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
