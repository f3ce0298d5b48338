"""What no dry run foresees: several forwards before a backward, a backward through a backward. A first step leaves room for it,
and state in memory gives way, where the budget has any."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Chain, inputs, rigid
from torch import nn
from twins import MIB, adamw

import protrain
from benchmarks.refusals import NO_SWAPPING, until_made
from protrain.api import find_session

ROWS = 512
IN_A_STEP = "a request of"  # what refusals begin with that are not a plan's


def three_forwards(model: Any, number: int) -> torch.Tensor:
    return torch.stack([model(x) for x in inputs(3, ROWS, seed=number)]).sum()


def gradient_penalty(model: Any, number: int) -> torch.Tensor:
    x = inputs(1, ROWS, seed=number)[0].requires_grad_()
    y = model(x, loss=False)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + (grad.norm(dim=1) - 1).square().mean()


def now_and_then(model: Any, number: int) -> torch.Tensor:
    return three_forwards(model, number) if number % 4 == 3 else model(inputs(1, ROWS, seed=number)[0])


def train(model: nn.Module, optimizer: Any, loss_of: Callable[[Any, int], torch.Tensor], count: int) -> tuple[list[float], int]:
    return until_made(model, optimizer, loss_of, count, 8)


def wrapped(loss_of: Callable[[Any, int], torch.Tensor], memory: int, count: int = 4) -> tuple[int, protrain.Status]:
    """How many steps were refused of those that it takes to make so many, or to make none; with the values of plain torch."""
    plain = Chain()
    want, _ = train(plain, adamw(plain), loss_of, count)
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    losses, refused = train(model, optimizer, loss_of, count)
    status = protrain.status(model)
    protrain.unwrap(model)
    assert losses == want[: len(losses)]
    if len(losses) == count:
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    else:
        assert refused == 8
    assert status.peak_memory_bytes <= memory
    return refused, status


@pytest.mark.parametrize(("loss_of", "share"), [(three_forwards, 0.5), (three_forwards, 0.7), (gradient_penalty, 0.85)])
def test_no_step_is_refused_where_the_safest_plan_has_room(
    loss_of: Callable[[Any, int], torch.Tensor], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor later, when the plan is another one: what the first step showed is planned with."""
    _, ample = wrapped(loss_of, 1 << 30)
    memory = int(share * ample.peak_memory_bytes)
    refused, _ = wrapped(loss_of, memory)
    assert refused == 0
    rigid(monkeypatch)
    refused, _ = wrapped(loss_of, memory)
    assert refused > 0, "the test has too much room"


def contrasted(model: Any, number: int) -> torch.Tensor:
    """Two forwards of half a batch, and what the program makes of each."""
    good, bad = (model(x, loss=False).log_softmax(-1).square().sum(-1) for x in inputs(2, ROWS // 2, seed=number))
    return -torch.nn.functional.logsigmoid(good - bad).mean()


def of_forwards(count: int) -> Callable[[Any, int], torch.Tensor]:
    return lambda model, number: torch.stack([model(x) for x in inputs(count, ROWS, seed=number)]).sum()


def over_parameters(model: Any, number: int) -> torch.Tensor:
    """Gradients of all parameters come before those of the model, and wait for them."""
    return model(inputs(1, ROWS, seed=number)[0]) + 0.01 * sum(p.square().sum() for p in model.parameters())


def orthogonal(model: Any, number: int) -> torch.Tensor:
    """What the loss holds grows with each parameter."""
    weights = [p.repeat(4, 1) for p in model.parameters() if p.dim() == 2]
    return model(inputs(1, ROWS, seed=number)[0]) + 0.01 * sum((w @ w.T).square().mean() for w in weights)


def of_large_tensors(model: Any, number: int) -> torch.Tensor:
    """Eight and more tensors that are each larger than any in the model."""
    y = model(inputs(1, ROWS, seed=number)[0], loss=False)
    near = (y @ y.T).repeat(4, 4)
    for _ in range(8):
        near = near.tanh()
    return near.mean() + y.square().mean()


@pytest.mark.parametrize(
    ("loss_of", "most"),
    [
        (contrasted, 2), (of_forwards(2), 2), (three_forwards, 3), (of_forwards(8), 4), (gradient_penalty, 4),
        (over_parameters, 2), (orthogonal, 7), (of_large_tensors, 6),
    ],
    ids=["contrasted", "two", "three", "eight", "penalty", "over parameters", "orthogonal", "large"],
)  # fmt: skip
def test_who_restarts_with_the_named_budget_does_not_do_so_for_ever(
    loss_of: Callable[[Any, int], torch.Tensor], most: int
) -> None:
    """From the smallest that the first batch is refused with: each refusal behind it tells of what waits, not of one request."""
    plain = Chain()
    want, _ = train(plain, adamw(plain), loss_of, 3)
    memory, named = 1 << 20, []
    while (refused := started(loss_of, memory, want)) is not None:
        smallest, message = refused
        assert smallest > memory
        assert str(smallest) in message
        memory = smallest
        if IN_A_STEP in message:
            named.append(memory)
    assert len(named) <= most, named


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class Longer(nn.Module):
    """By its argument a layer more; and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stack = nn.Sequential(*(Small() for _ in range(4)), nn.Linear(128, 16))
        self.never, self.more = Small(), Small()

    def forward(self, x: torch.Tensor, longer: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.stack(self.more(x) if longer else x)
        return y


@pytest.mark.parametrize("memory", range(4_000_000, 4_300_000, 50_000))
def test_what_is_named_has_room_for_two_kinds_of_batches(memory: int) -> None:
    """Where each of them fits by itself, but beside the slots of the other only in what is named."""

    def trained(memory: int) -> int | None:
        model: Any = Longer()
        model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
        try:
            for number in range(4):
                model(torch.randn(4, 10, 128), longer=number % 2 > 0).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except protrain.BudgetError as error:
            return error.smallest_bytes
        finally:
            protrain.unwrap(model)
        return None

    named = trained(memory)
    if named is not None:
        assert named > memory
        assert trained(named) is None


@pytest.mark.parametrize("more", [1.02, 1.1, 1.3])
@pytest.mark.parametrize("loss_of", [orthogonal, of_large_tensors])
def test_plans_know_what_the_loss_of_the_first_step_took(loss_of: Callable[[Any, int], torch.Tensor], more: float) -> None:
    """Also where that step had to leave room, which the plans behind it need not."""
    _, ample = wrapped(loss_of, 2 << 30)
    memory = int(more * ample.peak_memory_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused, status = wrapped(loss_of, memory)
    assert refused == 0
    assert status.plan.peak_bytes == pytest.approx(status.peak_memory_bytes, rel=0.03)


@pytest.mark.parametrize("more", [1.0, 1.25, 1.5])
def test_steps_that_are_made_again_are_made(more: float) -> None:
    """In the budget that is named where the batch's own smallest is too small for two forwards, and in larger ones."""
    memory, message = 1 << 20, ""
    while IN_A_STEP not in message:
        refused = started(of_forwards(2), memory, [])
        assert refused is not None
        memory, message = refused
    n_refused, status = wrapped(of_forwards(2), int(more * memory))
    assert status.steps == 4
    assert n_refused <= 1


@pytest.mark.parametrize(
    ("modes", "most"),
    [(["keep"] * 8, 3), (["keep", "checkpoint"] * 4, 3), (["checkpoint"] * 8, 3), (["checkpoint_swap"] * 8, 4)],
    ids=["keep", "mixed", "checkpoint", "checkpoint_swap"],
)
def test_what_is_named_has_room_for_what_given_modes_keep(modes: list[str], most: int) -> None:
    """Of forwards that wait, too."""
    memory, named = 1 << 20, 0
    while (refused := started(of_forwards(4), memory, [], modes)) is not None:
        memory = refused[0]
        named += IN_A_STEP in refused[1]
    assert named <= most, memory


def first_of_a_batch() -> int:
    """The smallest budget for a step of one forward."""
    refused = started(of_forwards(1), 1 << 20, [])
    while refused is not None and (again := started(of_forwards(1), refused[0], [])) is not None:
        refused = again
    assert refused is not None
    return refused[0]


def test_a_step_that_is_made_again_names_no_less_than_was_named() -> None:
    """Where it has no room: its smallest plan alone is no budget in which the program trains."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=first_of_a_batch())
    named = []
    for _ in range(2):
        with pytest.raises(protrain.BudgetError) as refused:
            three_forwards(model, 0).backward()
        named.append(refused.value.smallest_bytes)
        assert f"{named[-1]} bytes" in str(refused.value)
        optimizer.zero_grad()
    protrain.unwrap(model)
    assert named[1] >= named[0]
    assert started(three_forwards, named[1], []) is None


@pytest.mark.parametrize("more", [2.8, 3.0, 3.2, 3.5, 4.0])
def test_a_larger_budget_trains_what_a_smaller_one_does(more: float) -> None:
    """Also behind a first step whose blocks swapped: forwards that wait leave none that keep room, nor recomputed ones."""
    plain = Chain()
    want, _ = train(plain, adamw(plain), three_forwards, 4)
    assert started(three_forwards, int(more * first_of_a_batch()), want) is None


@pytest.mark.parametrize("memory", [20.0, 22.2, 23.3, 25.7, 28.3, 29.8])
def test_a_first_step_whose_blocks_swap_shows_what_the_loss_takes(memory: float) -> None:
    """All of it, though what they write leaves memory meanwhile: the next plan keeps blocks, and has room for it."""
    plain = Chain()
    want, _ = train(plain, adamw(plain), over_parameters, 4)
    assert started(over_parameters, int(memory * MIB), want) is None


@pytest.mark.parametrize("memory", [33.2, 40.3, 49.0, 56.8])
def test_forwards_that_nobody_foresaw_leave_memory(memory: float) -> None:
    """Where the first step's plan recomputes, and has no room for so many that wait; a smaller budget's swaps, and has."""
    plain = Chain()
    want, _ = train(plain, adamw(plain), of_forwards(8), 4)
    assert started(of_forwards(8), int(memory * MIB), want) is None


@pytest.mark.parametrize("within", ["the first forward", "a later forward", "backward"])
@pytest.mark.parametrize("memory", [8 << 20, 64 << 20])
def test_no_step_is_made_of_what_a_refusal_has_left(within: str, memory: int) -> None:
    """Plain torch would make one of the gradients that there are."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    x = inputs(1, 64)[0]
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    before, losses = [p.detach().clone() for p in model.parameters()], [model(x)] if within == "a later forward" else []

    def too_large(_module: nn.Module, _given: Any, result: torch.Tensor) -> None:
        if within == "backward":
            result.register_hook(lambda _grad: torch.empty(1 << 28))
        else:
            torch.empty(1 << 28)

    def pass_through() -> None:
        losses.append(model(x))
        torch.stack(losses).sum().backward()

    handle = model.blocks[2].register_forward_hook(too_large)
    with pytest.raises(protrain.BudgetError, match=IN_A_STEP):
        pass_through()
    handle.remove()
    if within == "backward":
        with pytest.raises(protrain.StepError, match=r"refused .* missing: call optimizer.zero_grad\(\), and run"):
            optimizer.step()
    else:
        optimizer.step()
    assert protrain.status(model).steps == 1
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    losses.clear()
    optimizer.zero_grad()
    with pytest.raises(protrain.BudgetError):  # what was asked for is planned with, once
        model(x)
    model(x).backward()
    optimizer.step()
    assert protrain.status(model).steps == 2
    protrain.unwrap(model)


def test_a_backward_that_was_refused_is_no_pass_of_a_step() -> None:
    """Though another one follows, which has all of its gradients."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 << 20, accumulate=2)
    x, armed = inputs(1, 64)[0], [True]

    def too_large(_module: nn.Module, _given: Any, result: torch.Tensor) -> None:
        result.register_hook(lambda _grad: torch.empty(1 << 28) if armed[0] else None)

    handle = model.blocks[2].register_forward_hook(too_large)
    loss = model(x)
    with pytest.raises(protrain.BudgetError, match=IN_A_STEP):
        loss.backward()
    armed[0] = False
    handle.remove()
    model(x).backward()
    with pytest.raises(protrain.StepError, match=r"refused .* missing"):
        optimizer.step()
    assert protrain.status(model).steps == 0
    del loss
    protrain.unwrap(model)


def test_a_step_goes_on_without_the_forward_that_was_refused() -> None:
    """It is made of the others."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 << 20)
    loss = model(inputs(1, 64)[0])
    with pytest.raises(protrain.BudgetError, match=IN_A_STEP):
        model(inputs(1, 1 << 16)[0])
    loss.backward()
    optimizer.step()
    assert protrain.status(model).steps == 1
    del loss
    protrain.unwrap(model)


def started(
    loss_of: Callable[[Any, int], torch.Tensor], memory: int, want: list[float], modes: list[str] | None = None
) -> tuple[int, str] | None:
    """A program that ends where it is refused: the budget that is named, and the message. None: it made its steps, at least one,
    with these losses."""
    model: Any = Chain()
    got = []
    try:
        model, optimizer = protrain.wrap(model, adamw(model), memory=memory, block_modes=modes)
        for number in range(max(len(want), 1)):
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            got.append(loss.item())
    except protrain.BudgetError as error:
        return error.smallest_bytes, str(error)
    finally:
        loss = None  # type: ignore[assignment]
        if find_session(model) is not None:
            protrain.unwrap(model)
    assert got == want or not want
    return None


def test_state_gives_way_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loop that takes more now and then: the plan before it has filled the budget, and the one behind it leaves room."""
    monkeypatch.setattr(*NO_SWAPPING)
    _, ample = wrapped(now_and_then, 1 << 30)
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=int(0.8 * ample.peak_memory_bytes))
    session = protrain.session_of(model)
    away = []
    for number in range(8):
        loss = now_and_then(model, number)
        loss.backward()
        away.append(session.engine.held()["yielded_bytes"])
        optimizer.step()
        assert session.engine.held()["yielded_bytes"] == 0
        optimizer.zero_grad()
    protrain.unwrap(model)
    assert [number for number, n_bytes in enumerate(away) if n_bytes] == [3]


def test_state_that_gave_way_in_a_step_that_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at, saved and trained with as ever."""
    monkeypatch.setattr(*NO_SWAPPING)

    def light(model: Any, number: int) -> torch.Tensor:
        return now_and_then(model, number % 3)

    _, ample = wrapped(now_and_then, 1 << 30)
    plain = Chain()
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=int(0.8 * ample.peak_memory_bytes))
    want, session = adamw(plain), protrain.session_of(model)
    assert train(model, optimizer, light, 3) == train(plain, want, light, 3)
    three_forwards(model, 3).backward()
    assert session.engine.held()["yielded_bytes"] > 0
    optimizer.zero_grad()
    got, expected = optimizer.state_dict()["state"], want.state_dict()["state"]
    for number, values in expected.items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(got[number][name]), torch.as_tensor(value)), (number, name)
    assert session.engine.held()["yielded_bytes"] > 0, "looked at where it is"
    assert train(model, optimizer, now_and_then, 4) == train(plain, want, now_and_then, 4)
    protrain.unwrap(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def retaining(
    model: Any,
    optimizer: Any,
    seen: Callable[[], object] = lambda: None,
    behind: Callable[[torch.Tensor], object] = lambda _loss: None,
) -> list[float]:
    """Each step's graph stays until the next one has its own. seen: before each update; behind: with the loss, after it."""
    losses = []
    for x in inputs(5, ROWS):
        loss = model(x)
        loss.backward(retain_graph=True)
        seen()
        optimizer.step()
        optimizer.zero_grad()
        behind(loss)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("share", [0.6, 0.85, 1.0])
def test_graphs_that_stay_leave_the_first_plan_behind(share: float) -> None:
    """From the second step on plans use the memory that these leave."""
    plain = Chain()
    want = retaining(plain, adamw(plain))
    peaks: list[int] = []
    for _ in range(2):
        memory = int(share * peaks[0]) if peaks else 1 << 30
        model: Any = Chain()
        model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
        plans: list[protrain.Plan] = []
        losses = retaining(model, optimizer, lambda model=model, plans=plans: plans.append(protrain.status(model).plan))
        peaks.append(protrain.status(model).peak_memory_bytes)
        protrain.unwrap(model)
        assert losses == want
        assert peaks[-1] <= memory
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    first, last = plans[0], plans[-1]
    assert last == plans[1]
    assert last.n_persist > first.n_persist or last.n_checkpoint < first.n_checkpoint


@pytest.mark.parametrize("memory", [40 << 20, 50 << 20])
def test_a_graph_that_stays_finds_chunks_that_came_to_memory(memory: int) -> None:
    """It saved parameters that are not trained, which were on disk when it did, and goes backward again behind the step."""

    def gradients(model: Any, optimizer: Any, seen: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def go_back(loss: torch.Tensor) -> None:
            seen()
            loss.backward()
            found.append(model.blocks[0].up.bias.grad.clone())
            optimizer.zero_grad()

        retaining(model, optimizer, seen, go_back)
        return found

    def make() -> Any:
        model = Chain().requires_grad_(False)
        model.blocks[0].up.bias.requires_grad_()
        return model, torch.optim.AdamW([model.blocks[0].up.bias], fused=True)

    want = gradients(*make())
    model, optimizer = make()
    model, optimizer = protrain.wrap(model, optimizer, memory=memory)
    plans: list[protrain.Plan] = []
    got = gradients(model, optimizer, lambda: plans.append(protrain.status(model).plan))
    protrain.unwrap(model)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert plans[1].n_persist > plans[0].n_persist, "nothing moved"
