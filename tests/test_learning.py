"""What the program around the model does: its loss is foreseen as cross entropy; what else it makes and holds, steps show."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import rigid
from torch import nn
from torch.nn import functional
from twins import MIB, adamw

import protrain
from protrain.api import session_of
from protrain.dryrun.dryrun import dry_run
from protrain.dryrun.phases import DryRunError
from protrain.runtime import foreseeing
from protrain.runtime.batches import MOST_VALUES, tensors_of

WIDTH, WORDS = 192, 4096

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


class Scores(nn.Module):
    """Of the next word: 2 MiB for a batch, and 44 MiB of states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        scores: torch.Tensor = self.head(x)
        return scores


def plain(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


def shifted(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def heavy(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Some five times the outputs more than cross entropy."""
    others = functional.kl_div(
        functional.log_softmax(scores / 2, -1), functional.softmax(scores.detach() * 1.1, -1), reduction="batchmean"
    )
    return plain(scores, ids) + others + torch.logsumexp(scores, -1).square().mean()


def batches(count: int = 6, length: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (4, length), generator=generator) for _ in range(count)]


def train_with(model: nn.Module, optimizer: Any, step: Callable[[nn.Module, int], float], n_steps: int) -> list[float | None]:
    """None: the step was refused, and the loop went on."""
    losses: list[float | None] = []
    for number in range(n_steps):
        try:
            loss = step(model, number)
            optimizer.step()
            losses.append(loss)
        except protrain.BudgetError:
            losses.append(None)
        optimizer.zero_grad()
    return losses


def train(model: nn.Module, optimizer: Any, loss: Loss, given: list[torch.Tensor], holds: bool = True) -> list[float | None]:
    """holds: the program holds the output while backward runs, beside what its loss does."""

    def step(model: nn.Module, number: int) -> float:
        ids = given[number]
        scores = model(ids)
        found = loss(scores, ids)
        if not holds:
            del scores
        found.backward()
        return found.item()

    return train_with(model, optimizer, step, len(given))


def expected(loss: Loss, given: list[torch.Tensor]) -> list[float | None]:
    model = Scores()
    return train(model, adamw(model), loss, given)


def wrapped(
    memory: int, loss: Loss, given: list[torch.Tensor], holds: bool = True, **options: Any
) -> tuple[list[float | None], protrain.Status]:
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory, **options)
    losses = train(model, optimizer, loss, given, holds)
    status = protrain.status(model)
    protrain.unwrap(model)
    return losses, status


def smallest(**options: Any) -> int:
    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(Scores(), (batches(1)[0],), memory=MIB, **options)
    return refused.value.smallest_bytes


@pytest.mark.parametrize("loss", [plain, shifted])
def test_cross_entropy_is_foreseen(loss: Loss) -> None:
    given = batches()
    want, least = expected(loss, given), smallest()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for memory in (least, least * 5 // 4, 1 << 30):
            losses, status = wrapped(memory, loss, given)
            assert losses == want, f"in {memory} bytes"
            assert status.peak_memory_bytes <= memory
    assert 0.97 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.03 or loss is shifted


def mean(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return scores.mean()


def test_a_light_loss_makes_room_for_chunks() -> None:
    """All of them, in what cross entropy would need with all of them away. What takes more later is refused once at most."""
    given, memory = batches(5, 256), 100 * MIB
    losses, status = wrapped(memory, mean, given, block_modes=["keep"] * 4)
    assert losses == expected(mean, given)
    assert status.plan.n_persist == status.plan.n_chunks
    assert 0.97 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.03

    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory, block_modes=["keep"] * 4)
    assert None not in train(model, optimizer, mean, given[:4])
    later = train(model, optimizer, plain, given[:3])
    assert None not in later[1:]
    assert protrain.status(model).peak_memory_bytes <= memory
    protrain.unwrap(model)


def test_a_batch_that_is_refused_before_it_begins_is_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what the program holds there is no room for it: later steps tell of those batches that were made, as if it had never
    come."""
    given, memory = batches(5, 256), 100 * MIB
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory, block_modes=["keep"] * 4)
    session = protrain.session_of(model)
    losses = train(model, optimizer, mean, given[:1])
    monkeypatch.setattr(session.carrier, "can_carry_out", lambda _found: False)
    with pytest.raises(protrain.BudgetError, match="of earlier steps are still in memory"):
        model(batches(1, 258)[0])
    monkeypatch.undo()
    optimizer.zero_grad()
    losses += train(model, optimizer, mean, given[1:])
    assert losses == expected(mean, given)
    status = protrain.status(model)
    assert status.plan.n_persist == status.plan.n_chunks
    assert 0.97 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.03
    protrain.unwrap(model)


def test_what_leaves_no_room_for_a_plan_behind_a_refused_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a plan: no budget is too small, but what the program holds is to be dropped."""
    given: Any = batches(1, 256)
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=100 * MIB, block_modes=["keep"] * 4)
    session = protrain.session_of(model)
    train(model, optimizer, mean, given)
    monkeypatch.setattr(session.carrier, "can_carry_out", lambda _found: False)
    with pytest.raises(protrain.BudgetError, match="drop what holds them"):
        session.fitter.learn_refused(session.homes.arrangement.needed_bytes + 4096, (given[0],), {})
    protrain.unwrap(model)


def test_a_long_batch_behind_a_short_one_is_foreseen_with_the_gradient_of_its_head_once() -> None:
    """What the short one took, gradients of the head among it, had been taken for as many times as its outputs are fewer."""
    given = [*batches(1, 2), *batches(3, 48)]
    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(Scores(), given[-1], memory=MIB)
    memory = refused.value.smallest_bytes * 21 // 20
    losses, status = wrapped(memory, plain, given)
    assert losses == expected(plain, given)
    assert status.peak_memory_bytes <= memory


class Losses(Scores):
    """Gives a small loss and a large one, or the large one behind what it is of, or the small one behind what it is not of."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.small, self.gives = nn.Linear(WIDTH, 2), gives

    def forward(self, ids: torch.Tensor) -> Any:
        scores, small = super().forward(ids), self.small(self.words(ids)).square().mean()
        if self.gives == "both":
            return {"class": small, "words": plain(scores, ids)}
        if self.gives == "named":
            return {"scores": scores, "loss": plain(scores, ids)}
        return (scores, plain(scores, ids)) if self.gives == "behind" else (scores, small)


@pytest.mark.parametrize("gives", ["both", "named", "behind", "beside"])
def test_losses_of_a_model_are_found_and_added_up(gives: str) -> None:
    """One that is not the first output is no output of which the program makes another; several are the step's, and not the
    first alone. A penalty beside scores is not the loss. Where all is on disk a gradient of the head may wait for its update
    behind the last block, which is foretold and does not happen where the disk is fast."""
    given = batches(4)

    def step(model: nn.Module, number: int) -> float:
        output = model(given[number])
        if gives == "both":
            loss = output["class"] + output["words"]
        elif gives == "beside":
            loss = plain(output[0], given[number]) + output[1]
        else:
            loss = output["loss"] if gives == "named" else output[1]
        loss.backward()
        return float(loss.item())

    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(Losses(gives), given[0], memory=MIB)
    plain_model = Losses(gives)
    want = train_with(plain_model, adamw(plain_model), step, 4)
    for memory in (refused.value.smallest_bytes, 1 << 30):
        model: Any = Losses(gives)
        model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert train_with(model, optimizer, step, 4) == want
        status = protrain.status(model)
        protrain.unwrap(model)
        above = 1.01 if status.plan.n_persist else 1.03
        assert 0.99 <= status.predicted_peak_bytes / status.peak_memory_bytes <= above


def test_cross_entropy_of_bf16_is_foreseen_in_fp32() -> None:
    losses, _ = wrapped(smallest(precision="bf16"), shifted, batches(), precision="bf16")
    assert None not in losses


@pytest.mark.parametrize("holds", [True, False])
def test_a_heavy_loss_finds_the_room_that_chunks_can_make(holds: bool) -> None:
    """With all states in memory there is no room for it; what it takes is known however the plans change."""
    given = batches()
    _, ample = wrapped(1 << 30, heavy, given, holds)
    assert 0.99 <= ample.predicted_peak_bytes / ample.peak_memory_bytes <= 1.01
    for share in (0.5, 0.6, 0.7, 0.9):
        memory = int(ample.peak_memory_bytes * share)
        losses, status = wrapped(memory, heavy, given, holds)
        assert losses == expected(heavy, given)
        assert status.peak_memory_bytes <= memory
        assert status.plan.n_persist < status.plan.n_chunks


def test_a_refused_step_is_the_last_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a loss that takes more than any room that was left for it."""
    rigid(monkeypatch)
    monkeypatch.setattr("protrain.runtime.fitting.ROOM_FOR_LOSS", (0,))
    _, ample = wrapped(1 << 30, heavy, batches())
    given = batches(16)
    losses, status = wrapped(int(ample.peak_memory_bytes * 0.8), heavy, given)
    refused = losses.index(next(loss for loss in losses if loss is not None))
    assert 0 < refused <= 8, "each one shows another request of the loss"
    assert losses[refused:] == expected(heavy, given[refused:])
    assert status.plan.n_persist < status.plan.n_chunks


@pytest.mark.parametrize("yields", [False, True])
def test_what_was_refused_has_room_however_light_the_steps_between_are(yields: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a program adds a penalty to its loss now and then. State gives way to it, which is planned with as if it had been
    refused."""
    rigid(monkeypatch, first_room=True, yields=yields)
    given = batches(24)
    heavy_steps = set(range(3, 24, 4))

    def step(model: nn.Module, number: int) -> float:
        ids = given[number]
        scores = model(ids)
        found = heavy(scores, ids) if number in heavy_steps else plain(scores, ids)
        found.backward()
        return found.item()

    _, ample = wrapped(1 << 30, heavy, batches())
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=int(ample.peak_memory_bytes * 0.8))
    losses = train_with(model, optimizer, step, 24)
    protrain.unwrap(model)
    refused = [number for number, loss in enumerate(losses) if loss is None]
    assert bool(refused) != yields, "all in memory leaves no room for the first one but that of state"
    assert set(refused) <= heavy_steps
    assert len(refused) <= 3


def test_what_has_no_room_is_refused_and_shown_again() -> None:
    losses, _ = wrapped(smallest(), heavy, batches(8))
    assert losses == [None] * 8
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=smallest())
    assert None in train(model, optimizer, heavy, batches(3))
    assert train(model, optimizer, plain, batches(4))[-1] is not None, "a lighter loss is trained after it"
    protrain.unwrap(model)


def test_a_smaller_batch_behind_one_that_was_refused_is_made() -> None:
    """As where a program halves its batches until they fit: what the larger one lacks is no concern of theirs."""
    large, small = batches(1, 256)[0], batches(4, 16)
    model: Any = Scores()
    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(Scores(), (large,), memory=MIB)
    model, optimizer = protrain.wrap(model, adamw(model), memory=refused.value.smallest_bytes)
    losses = train(model, optimizer, heavy, [large, *small[:2], large, large, *small[2:]])
    protrain.unwrap(model)
    assert [loss is None for loss in losses] == [True, False, False, True, True, False, False]
    assert [loss for loss in losses if loss is not None] == expected(heavy, small)


@pytest.mark.parametrize("lasting", [True, False])
def test_a_refused_step_teaches_whatever_a_program_holds(lasting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it goes on holding is planned with; what it held in that step alone is not."""
    rigid(monkeypatch, first_room=True)
    given = batches(10)
    _, ample = wrapped(1 << 30, heavy, batches())
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=int(ample.peak_memory_bytes * 0.9))
    losses = train(model, optimizer, plain, given[:4])
    with torch.no_grad():
        held = [model(ids) for ids in given[:6]]
    losses += train(model, optimizer, heavy, given[4:5])
    if not lasting:
        held.clear()
    losses += train(model, optimizer, heavy, given[5:])
    protrain.unwrap(model)
    assert losses[4] is None
    assert losses[5 if lasting else 6 :].count(None) == 0


def test_an_evaluation_in_a_step_and_what_a_program_holds_teach_nothing() -> None:
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30)
    train(model, optimizer, plain, batches(3))
    before = protrain.status(model).predicted_peak_bytes
    loss = plain(model(batches(1)[0]), batches(1)[0])
    with torch.no_grad():
        model(batches(1, 256)[0])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    held = []
    for ids in batches(3):
        held.append(model(ids))
        plain(held[-1], ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert protrain.status(model).predicted_peak_bytes <= before + held[0].nbytes + MIB
    protrain.unwrap(model)


# ---- other than one forward of one shape, whose output is held ----


def test_several_forwards_before_a_backward_find_room_after_a_step() -> None:
    """Their activations are in memory at once; with all states beside them there is no room."""
    longest = batches(3, 256)

    def step(model: nn.Module, number: int) -> float:
        loss = sum(model(ids).square().mean() for ids in longest) + torch.zeros(())
        loss.backward()
        return loss.item()

    def wrapped_step(memory: int) -> tuple[list[float | None], protrain.Status]:
        model: Any = Scores()
        model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
        losses, status = train_with(model, optimizer, step, 8), protrain.status(model)
        protrain.unwrap(model)
        return losses, status

    _, ample = wrapped_step(1 << 30)
    losses, _ = wrapped_step(int(ample.peak_memory_bytes * 0.7))
    made = [loss for loss in losses if loss is not None]
    assert len(made) >= 6, "what several hold is known after a step that is refused, or not"
    assert None not in losses[-4:]
    plain_model = Scores()
    assert made == train_with(plain_model, adamw(plain_model), step, len(made))


@pytest.mark.parametrize(
    ("held", "n_waiting"),
    [
        ("gone loss", 0), ("loss loss", 1), ("output loss", 1), ("gone loss gone loss", 1), ("loss gone loss", 1),
        ("loss loss gone loss", 2), ("inside inside", 1),
    ],
)  # fmt: skip
def test_forwards_count_whose_graphs_are_there_when_the_next_one_begins(held: str, n_waiting: int) -> None:
    """One that was made to be looked at, and is gone, is no other forward of each step. held: what the program has of each."""

    class Storing(Scores):
        """Returns nothing: who calls it looks into it."""

        def forward(self, ids: torch.Tensor) -> Any:
            self.losses.append(super().forward(ids).square().mean())

    ids = batches(1, 64)[0]

    def step(model: nn.Module, number: int) -> float:
        losses: list[Any] = []
        model.losses = losses  # type: ignore[assignment]
        outputs = []
        for what in held.split():
            output = model(ids)
            if what == "loss":
                losses.append(output.square().mean())
            elif what == "output":
                outputs.append(output)
            del output
        loss = sum([*losses, *(output.square().mean() for output in outputs)], torch.zeros(()))
        loss.backward()
        return loss.item()

    make = Storing if "inside" in held else Scores
    model: Any = make()
    model, optimizer = protrain.wrap(model, adamw(model), memory=256 * MIB)
    losses, several = train_with(model, optimizer, step, 3), session_of(model).decider.several
    protrain.unwrap(model)
    assert several._most_waiting == n_waiting
    assert (several.hold_bytes > 0) == (n_waiting > 0)
    other = make()
    assert losses == train_with(other, adamw(other), step, 3)


def test_a_longer_batch_among_the_passes_of_a_step_is_planned_for_before_the_next() -> None:
    short, long = batches(1, 16)[0], batches(1, 192)[0]

    def step(model: nn.Module, number: int) -> float:
        first = plain(model(short), short)
        first.backward()
        second = plain(model(long), long)
        second.backward()
        return first.item() + second.item()

    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(Scores(), (long,), memory=MIB, accumulate=2)
    memory = refused.value.smallest_bytes * 21 // 20
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory, accumulate=2)
    losses = train_with(model, optimizer, step, 5)
    protrain.unwrap(model)
    made = 1 if losses[0] is None else 0
    assert None not in losses[1:]
    other = Scores()
    assert losses[made:] == train_with(other, adamw(other), step, 5 - made)


class Meeting(nn.Module):
    """Two inputs, of which either may be the longer one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(6)
        )

    def forward(self, given: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        x, y = self.words(given), self.words(asked)
        for block in self.blocks[:3]:
            x = x + block(x)
        y = y + x.mean(1, keepdim=True)
        for block in self.blocks[3:]:
            y = y + block(y)
        return y.square().mean()


@pytest.mark.parametrize("share", [0.62, 0.7, 0.8])
def test_a_plan_has_room_for_all_shapes_that_were_planned_for(share: float) -> None:
    one, other = (batches(1, 400)[0], batches(1, 32)[0]), (batches(1, 48)[0], batches(1, 400)[0])
    given = [one, one, other, one, other, one, one, other]

    def step(model: nn.Module, number: int) -> float:
        loss = model(*given[number])
        loss.backward()
        return float(loss.item())

    def trained(memory: int) -> tuple[list[float | None], protrain.Status]:
        model: Any = Meeting()
        model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
        losses, status = train_with(model, optimizer, step, len(given)), protrain.status(model)
        protrain.unwrap(model)
        return losses, status

    _, ample = trained(1 << 30)
    plain_model = Meeting()
    expected_losses = train_with(plain_model, adamw(plain_model), step, len(given))
    losses, _ = trained(int(ample.peak_memory_bytes * share))
    assert losses == expected_losses


class Tasks(Scores):
    """The large task makes its loss of scores, 16 MiB of a batch, and the small one of hidden states."""

    def forward(
        self, ids: torch.Tensor, task: str = "small", loops: int = 1, step: int = 0, *, of_scores: Any = 0, of_states: Any = 0
    ) -> torch.Tensor:
        x = self.words(ids)
        for _ in range(loops):
            for block in self.blocks:
                x = x + block(x)
        large = task == "large" or isinstance(of_scores, torch.Tensor)
        return (self.head(x) if large else x).cos().square().mean() + step + of_scores + of_states


def trained_by_words(
    words: list[dict[str, Any]], memory: int | None, given: torch.Tensor
) -> tuple[list[float | None], list[protrain.Status]]:
    """memory None: in plain torch."""
    model: Any = Tasks()
    optimizer: Any = adamw(model)
    if memory is not None:
        model, optimizer = protrain.wrap(model, optimizer, memory=memory)
    seen = []

    def step(model: nn.Module, number: int) -> float:
        loss = model(given, **words[number])
        loss.backward()
        if memory is not None:
            seen.append(protrain.status(model))
        return float(loss.item())

    losses = train_with(model, optimizer, step, len(words))
    if memory is not None:
        protrain.unwrap(model)
    return losses, seen


@pytest.mark.parametrize(
    ("small", "large", "memory"),
    [
        ({}, {"task": "large"}, 110 * MIB),
        ({}, {"task": "large"}, 140 * MIB),
        ({}, {"loops": 8}, 80 * MIB),
        ({"of_states": torch.tensor(2.0)}, {"of_scores": torch.tensor(2.0)}, 110 * MIB),
    ],
)
def test_a_call_with_other_words_is_planned_for(small: dict[str, Any], large: dict[str, Any], memory: int) -> None:
    """Its tensors have the same shapes; what it computes is more, and chunks have to make room for it."""
    words, given = [small, small, large, large, small, large], batches(1, 256)[0]
    losses, seen = trained_by_words(words, memory, given)
    assert losses == trained_by_words(words, None, given)[0]
    assert max(status.peak_memory_bytes for status in seen) <= memory
    assert seen[0].predicted_peak_bytes < seen[2].predicted_peak_bytes


def test_words_that_need_the_same_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a count of steps is soon not looked at any more."""
    made = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args[2])
        return dry_run(*args, **kwargs)

    monkeypatch.setattr(foreseeing, "dry_run", counted)
    words = [{"step": number} for number in range(14)]
    losses, seen = trained_by_words(words, 1 << 30, batches(1)[0])
    assert losses == trained_by_words(words, None, batches(1)[0])[0]
    assert len(made) == MOST_VALUES + 1
    assert seen[-1].plan.step_seconds > 0  # it was planned by time


@pytest.mark.parametrize("held", [True, False])
def test_an_output_that_is_not_held_is_not_foretold(held: bool, causal_lm: Any) -> None:
    model = causal_lm("gpt2", hidden=64, layers=2, vocabulary=8192)
    ids = torch.randint(8192, (4, 64))
    model, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30)
    for _ in range(4):
        output = model(input_ids=ids, labels=ids)
        loss = output.loss
        if not held:
            del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    status = protrain.status(model)
    protrain.unwrap(model)
    assert 0.99 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.01


class Tabled(Scores):
    """With a table of 4 MiB that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1 << 20))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.table[:1]


def test_buffers_count_in_what_is_measured_and_refused() -> None:
    """As the budget's words say; they were planned for, and nobody counted them."""
    small = Tabled()
    with pytest.raises(protrain.BudgetError) as refused:
        protrain.wrap(small, adamw(small), memory=MIB)
    assert refused.value.smallest_bytes > 4 * MIB
    model: Any = Tabled()
    plain_model = Tabled()
    model, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30)
    assert protrain.status(model).memory_bytes >= 4 * MIB
    assert train(model, optimizer, plain, batches(3)) == train(plain_model, adamw(plain_model), plain, batches(3))
    status = protrain.status(model)
    assert 0.99 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.01
    protrain.unwrap(model)


class Images(nn.Module):
    """Takes more than it makes of it: 3 MiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 64, 16, stride=16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            y = y + block(y)
        return y.square().mean()


@pytest.mark.parametrize("made", ["before", "between", "ahead", "among passes"])
def test_a_batch_is_foretold_where_it_is_counted(made: str) -> None:
    """Each plan has room for it; nothing counts what is made between steps, and what is made within one counts."""
    accumulate = 2 if made == "among passes" else 1
    model: Any = Images()
    first = torch.randn(4, 3, 256, 256)
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 * MIB, accumulate=accumulate)
    images = first
    for _ in range(3):
        if made == "between":
            images = torch.randn(4, 3, 256, 256)
        for _ in range(accumulate):
            loss = model(images)
            if made in ("ahead", "among passes"):
                images = torch.randn(4, 3, 256, 256)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    status = protrain.status(model)
    protrain.unwrap(model)
    assert 0.99 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.01
    assert status.peak_memory_bytes <= status.plan.peak_bytes


def test_activations_that_go_to_disk_fill_what_a_batch_leaves_of_their_goal() -> None:
    model: Any = Images()
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 * MIB, block_modes=["swap"] * 4)
    model(torch.randn(4, 3, 256, 256)).backward()
    optimizer.step()
    status = protrain.status(model)
    protrain.unwrap(model)
    assert status.predicted_peak_bytes == status.plan.peak_bytes


def test_what_is_foretold_is_of_the_steps_that_were_highest() -> None:
    """As the peak since wrap is, which they made: plans after them take less."""
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30)
    train(model, optimizer, plain, batches(3, 128))
    before = protrain.status(model)
    protrain.session_of(model).change_step(1, None)  # what was planned for is forgotten
    train(model, optimizer, plain, batches(2))
    status = protrain.status(model)
    protrain.unwrap(model)
    assert status.plan.peak_bytes < 0.9 * before.plan.peak_bytes
    assert status.peak_memory_bytes == before.peak_memory_bytes
    assert 0.99 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.01


def test_lengths_that_grow_with_every_step_are_not_all_planned_for_for_ever() -> None:
    """What a longer batch covers is that one. Two that cover each other in nothing stay."""
    given = [batches(1, length)[0] for length in (*range(2, 12), 5, 11)] + [batches(1, 4)[0].expand(4, 4).repeat(4, 1)] * 2
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=smallest() * 3 // 2)
    losses = train(model, optimizer, plain, given)
    status, known = protrain.status(model), [tensors_of(shapes) for shapes, _ in protrain.session_of(model).decider.dry_runs]
    protrain.unwrap(model)
    assert losses == expected(plain, given)
    assert status.peak_memory_bytes <= smallest() * 3 // 2
    assert known == [[(4, 11)], [(16, 4)]]


@pytest.mark.parametrize("share", [1.0, 1.3, 3.0])
def test_shorter_batches_never_raise_the_peak(share: float) -> None:
    """They are trained under the plan of the longer one, and take less."""
    lengths = (48, 48, 48, 48, 31, 7, 40, 1, 48, 16)
    given = [batches(1, length)[0] for length in lengths]
    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(Scores(), (given[0],), memory=MIB)
    memory = int(refused.value.smallest_bytes * share)
    model: Any = Scores()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    losses, peaks = [], []
    for ids in given:
        losses += train(model, optimizer, plain, [ids])
        peaks.append(protrain.status(model).peak_memory_bytes)
    plans = protrain.session_of(model).decider.dry_runs
    protrain.unwrap(model)
    assert losses == expected(plain, given)
    assert len(plans) == 1, "each was planned for by the first one"
    assert peaks[7] <= 1.02 * max(peaks[:4])  # gradients may wait longer for a disk that is busy
    assert peaks[-1] <= memory


@pytest.mark.parametrize("error", [protrain.DiskError("the disk failed", errno=5), protrain.OutOfMemoryError("no memory")])
def test_a_dry_run_that_the_machine_fails_says_nothing_of_the_model(error: protrain.Error) -> None:
    """The forward is refused with what it was, homes are where they were, and the next one is foreseen."""
    failing = True

    class Failing(Scores):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if failing:
                raise error
            return super().forward(ids)

    model: Any = Failing()
    model, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(type(error), match=str(error)):
            model(batches(1)[0])
        failing = False
        plain(model(batches(1)[0]), batches(1)[0]).backward()
        optimizer.step()
    status = protrain.status(model)
    protrain.unwrap(model)
    assert status.steps == 1
    assert status.predicted_peak_bytes > 0


def test_homes_go_back_behind_a_dry_run_that_tells_nothing(causal_lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chunks left memory for it, and the step before is known to be planned for."""
    model = causal_lm("gpt2", hidden=64, layers=2, vocabulary=8192)
    ids = torch.randint(8192, (4, 64))
    model, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30)

    def step() -> protrain.Plan:
        loss = model(input_ids=ids, labels=ids).loss  # nobody holds its output
        plan = protrain.status(model).plan
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return plan

    def failing(_self: Any, _args: Any, _kwargs: Any, make_room: Callable[[], object]) -> Any:
        make_room()
        raise DryRunError("it tells nothing")

    before = step()
    monkeypatch.setattr(foreseeing.Foreseer, "step", failing)
    now = step()
    protrain.unwrap(model)
    assert before.n_persist == before.n_chunks
    assert (now.n_persist, now.block_modes) == (before.n_persist, before.block_modes)
