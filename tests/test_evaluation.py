"""Forwards without gradients, of batches that training did not plan for: room is made, or they are refused before they begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nets import Chain, inputs, rigid
from torch import nn
from twins import MIB, adamw, assert_equal, loss_of, run

import protrain
from protrain.api import session_of
from protrain.dryrun import dryrun
from protrain.dryrun.phases import SMALL_UNSEEN_BYTES
from protrain.runtime import evaluation, foreseeing
from protrain.runtime.fitting import Fitter
from protrain.runtime.pacing import Pacer

BUDGET = 24 * MIB  # states of 17 MiB stay in memory
LARGE, HUGE = 12, 40  # rows of 64 tokens: 13 MiB at once, and 47


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


@pytest.fixture
def gpt2(causal_lm: Any) -> Callable[..., Any]:
    return partial(causal_lm, "gpt2", hidden=128, vocabulary=2000)


@pytest.fixture
def foreseen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What dry runs of forwards found, one after another."""
    found: list[int] = []

    def noted(*args: Any, **kwargs: Any) -> int:
        found.append(dryrun.dry_forward(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(foreseeing, "dry_forward", noted)
    return found


def train(model: nn.Module, optimizer: Any, ids: torch.Tensor) -> float:
    loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def evaluate(model: nn.Module, ids: torch.Tensor, context: Callable[[], AbstractContextManager[Any]] = torch.no_grad) -> float:
    model.eval()
    try:
        with context():
            return loss_of(model, ids).item()
    finally:
        model.train()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_room_is_made_and_given_back(context: Any, gpt2: Any, token_batches: Any) -> None:
    batches, (large,) = token_batches(4, batch=1, vocabulary=2000), token_batches(1, batch=LARGE, vocabulary=2000)
    kept = []

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = []
        for ids in batches:
            figures += [train(model, optimizer, ids)]
            if not plain:
                kept.append(protrain.status(model).plan.n_persist)
            figures += [evaluate(model, large, context), evaluate(model, large[:, :32], context)]
            if not plain:
                kept.append(protrain.status(model).plan.n_persist)
        return figures

    status = assert_equal(run(gpt2, loop, memory=BUDGET), run(gpt2, loop), BUDGET)
    assert kept[:2] == kept[2:4] == kept[4:6] == kept[6:]
    assert kept[0] == status.plan.n_chunks
    assert 0 < kept[1] < kept[0]  # as many as there is room for


@pytest.mark.parametrize("trained", [False, True], ids=["before training", "after a step"])
def test_what_cannot_fit_is_refused_before_it_begins(trained: bool, gpt2: Any, token_batches: Any) -> None:
    batches, (huge,) = token_batches(2, batch=1, vocabulary=2000), token_batches(1, batch=HUGE, vocabulary=2000)
    model = gpt2()
    began: list[int] = []
    model.transformer.wte.register_forward_hook(lambda *_: began.append(1))
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    if trained:
        train(model, optimizer, batches[0])
    before, began[:] = protrain.status(model).plan, []
    with pytest.raises(
        protrain.BudgetError, match=r"memory: a forward of this batch needs .* the smallest budget that works is"
    ) as e:
        evaluate(model, huge)
    assert not began
    assert protrain.status(model).plan == before
    train(model, optimizer, batches[1])
    protrain.unwrap(model)

    smallest = e.value.smallest_bytes
    plain = gpt2()
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=smallest)
    made = adamw(plain)
    if trained:
        assert train(model, optimizer, batches[0]) == train(plain, made, batches[0])
    assert evaluate(model, huge) == evaluate(plain, huge)
    status = protrain.status(model)
    assert smallest - 3 * MIB < status.peak_memory_bytes <= smallest


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bert", "chain"])
def test_a_forward_is_foreseen_to_the_byte(family: str, causal_lm: Any, token_batches: Any, foreseen: list[int]) -> None:
    import transformers

    (ids,) = token_batches(1, batch=6, length=96)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if family == "t5":
        config: Any = transformers.T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=256, num_layers=2, num_heads=4,
                                            decoder_start_token_id=0)  # fmt: skip
        model: Any = transformers.T5ForConditionalGeneration(config)
    elif family == "bert":
        config = transformers.BertConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                         intermediate_size=256)  # fmt: skip
        model = transformers.BertForMaskedLM(config)
        batch["attention_mask"] = (ids > 9).long()  # of ones alone no mask would be made
    elif family == "chain":
        model, batch = Chain(), {"x": torch.ones(300, 256)}
    else:
        model = causal_lm(family)
    model, _ = protrain.wrap(model, adamw(model), memory="64MiB")
    model.eval()
    engine = session_of(model).engine
    with torch.no_grad():
        model(**batch)  # parameters are where they are to be, and oneDNN has what it keeps
        engine.mark()
        before = engine.held()["live_bytes"]
        output = model(**batch)
        rise = engine.mark() - before
    del output
    assert len(foreseen) == 1
    assert foreseen[0] - SMALL_UNSEEN_BYTES <= rise <= foreseen[0] + SMALL_UNSEEN_BYTES


@dataclass
class Given:
    """rows: a batch, which the model puts another one in the place of. number: of the batch, and nothing to it."""

    rows: torch.Tensor
    number: int = 0


class Asked(Chain):
    def forward(self, given: Any, **kwargs: Any) -> torch.Tensor:
        given.rows = given.rows * 2
        return super().forward(given.rows, **kwargs)


def test_batches_that_are_objects_find_room_and_are_foreseen_once(foreseen: list[int]) -> None:
    kept = []

    def loop(model: Any, optimizer: Any, plain: bool) -> list[float]:
        figures = []
        for number in range(3):
            loss = model(Given(inputs(1, 8, seed=number)[0]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                given = Given(inputs(1, 6000)[0], number)
                figures += [loss.item(), model(given).item(), given.rows.sum().item()]
            if not plain:
                kept.append(protrain.status(model).plan.n_persist)
        return figures

    memory = 60 * MIB
    status = assert_equal(run(Asked, loop, memory=memory), run(Asked, loop), memory)
    assert 0 < kept[-1] < status.plan.n_chunks
    assert len(foreseen) == 1


def test_what_is_no_batch_is_not_foreseen(foreseen: list[int]) -> None:
    """Something to call, which a forward may change, and an object without tensors."""
    model: Any = Asked()
    model, _ = protrain.wrap(model, adamw(model), memory="64MiB")
    rows = inputs(1)[0]
    with torch.no_grad():
        model(SimpleNamespace(rows=rows))
        assert len(foreseen) == 1
        found = evaluation._Batch.of((lambda: rows,), {}, frozenset())
        assert found is evaluation._Batch.of((SimpleNamespace(words=3),), {}, frozenset()) is None
    protrain.unwrap(model)


class Widening(Chain):
    """Takes more where a module in it is in train mode, whatever it is in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        wide = self.part(x.repeat(1, 6)) if self.part.training else x
        return super().forward(x + wide[:, :256], **kwargs)


def test_modules_in_train_mode_in_a_model_that_is_not_are_another_evaluation(foreseen: list[int]) -> None:
    """Such as dropout that is left on to see how sure a model is."""
    model: Any = Widening()
    model, _ = protrain.wrap(model, adamw(model), memory="64MiB")
    x = inputs(1, 1000)[0]
    with torch.no_grad():
        for on in (False, True, False, True):
            model.eval()
            model.part.train(on)
            model(x)
    protrain.unwrap(model)
    plainly, widely = foreseen
    assert widely > plainly + 5 * x.nbytes


def test_text_that_is_generated_is_not_foreseen_word_by_word(gpt2: Any, token_batches: Any, foreseen: list[int]) -> None:
    (ids,) = token_batches(1, batch=1, length=4, vocabulary=2000)
    model = gpt2()
    want = model.eval().generate(ids, max_new_tokens=60, do_sample=False, use_cache=False)
    model, _ = protrain.wrap(model, adamw(model), memory=BUDGET)
    for use_cache in (False, True):
        assert torch.equal(model.generate(ids, max_new_tokens=60, do_sample=False, use_cache=use_cache), want)
    assert 1 <= len(foreseen) <= 6


def test_a_batch_is_foreseen_once(gpt2: Any, token_batches: Any, foreseen: list[int]) -> None:
    """Also where training was between, and batches half as long."""
    (ids,), (large,) = token_batches(1, batch=1, vocabulary=2000), token_batches(1, batch=LARGE, vocabulary=2000)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    for _ in range(3):
        train(model, optimizer, ids)
        evaluate(model, large)
        evaluate(model, large[:, :32])
    assert len(foreseen) == 1


def test_nothing_moves_in_the_middle_of_a_step(gpt2: Any, token_batches: Any, foreseen: list[int]) -> None:
    (ids,), (large,) = token_batches(1, batch=1, vocabulary=2000), token_batches(1, batch=4, vocabulary=2000)

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = []
        for place in range(3):
            loss = loss_of(model, ids)
            if place == 0:
                figures.append(evaluate(model, large))
            loss.backward()
            if place == 1:
                figures.append(evaluate(model, large))
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    assert_equal(run(gpt2, loop, memory=BUDGET), run(gpt2, loop), BUDGET)
    assert not foreseen


@pytest.mark.parametrize("modes", ["eval and train", "eval twice", "train twice"])
def test_homes_stay_in_the_middle_of_a_step_behind_an_evaluation(modes: str, gpt2: Any, token_batches: Any) -> None:
    """They come back with the next one."""
    batches, (large,) = token_batches(6, batch=1, vocabulary=2000), token_batches(1, batch=LARGE, vocabulary=2000)

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            figures.append(evaluate(model, large))
            model.train(modes == "train twice")
            loss_of(model, first).backward()
            model.train(modes != "eval twice")
            loss_of(model, second).backward()
            optimizer.step()
            optimizer.zero_grad()
        return figures

    got = run(gpt2, loop, memory=BUDGET, accumulate=2)
    assert_equal(got, run(gpt2, loop), BUDGET)


@pytest.fixture
def between(gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, list[Any]]]:
    """A model that was trained and then evaluated, its optimizer, and batches of more and more rows. No plan is made by time."""
    monkeypatch.setattr(Pacer, "after_step", lambda *_, **__: None)
    batches = [token_batches(1, batch=rows, vocabulary=2000)[0] for rows in (1, 2, LARGE)]
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    train(model, optimizer, batches[0])
    evaluate(model, batches[-1])
    assert session_of(model).evaluation.is_under_way
    yield model, optimizer, batches
    protrain.unwrap(model)


def test_a_plan_that_is_made_while_homes_may_not_go_back_stands(between: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward in eval mode has recorded gradients since: the next one of training has not its arrangement back by itself."""
    model, optimizer, (ids, longer, _) = between
    plans = []
    monkeypatch.setattr(Fitter, "note_dropped", lambda *_: None)
    model.lm_head.register_forward_hook(lambda *_: plans.append(protrain.status(model).plan))
    loss_of(model.eval(), ids)
    for _ in range(2):
        train(model.train(), optimizer, longer)
    _, planned, then = plans
    assert then == planned


def test_a_step_beside_an_evaluation_shows_nothing_of_training(between: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, (ids, *_) = between
    timed: list[bool] = []
    monkeypatch.setattr(Pacer, "after_step", lambda *_, **__: timed.append(True))
    loss_of(model.eval(), ids)
    train(model.train(), optimizer, ids)
    assert not timed
    train(model, optimizer, ids)
    assert timed
    assert protrain.status(model).plan.n_persist == protrain.status(model).plan.n_chunks


def test_plans_are_made_anew_from_trainings_own_arrangement(between: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a graph waited for its backward over the step in which homes could not go back."""
    model, optimizer, (ids, *_) = between
    evaluation, under_way = session_of(model).evaluation, []
    waiting = loss_of(model.eval(), ids)
    train(model.train(), optimizer, ids)
    assert evaluation.is_under_way
    monkeypatch.setattr(Fitter, "plan_later", lambda _: under_way.append(evaluation.is_under_way))
    del waiting
    train(model, optimizer, ids)
    assert under_way == [False]


@pytest.mark.parametrize("how", ["kept graph", "failed forward"])
def test_what_autograd_keeps_of_parameters_stays_where_it_is(how: str, gpt2: Any, token_batches: Any) -> None:
    """An evaluation that would need room is tried beside it."""
    (ids,), (large,) = token_batches(1, batch=1, vocabulary=2000), token_batches(1, batch=8, vocabulary=2000)

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for _ in range(2):
            loss = loss_of(model, ids)
            if how == "kept graph":
                loss.backward(retain_graph=True)
                optimizer.zero_grad()
            else:
                with pytest.raises(IndexError):
                    loss_of(model, ids + 5000)
            with suppress(protrain.BudgetError):  # there is no room, and none is made
                evaluate(model, large)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    assert_equal(run(gpt2, loop, memory=BUDGET + 2 * MIB), run(gpt2, loop), BUDGET + 2 * MIB)


class Asking(nn.Module):
    """Its forward calls it again, for more rows, while it looks at a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleList([nn.Linear(512, 512) for _ in range(8)])

    def forward(self, x: torch.Tensor, more: int = 0) -> torch.Tensor:
        weight = self.inner[0].weight[:128]
        if more:
            x = x + self(x.repeat(more, 1)).mean()
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return x.mean() + weight.sum()


def test_a_step_that_was_dropped_is_in_no_evaluations_way() -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=20 * MIB)
    for x in inputs(2):
        loss = model(x)
        loss.backward()
        optimizer.zero_grad()
        assert session_of(model)._may_move()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    protrain.unwrap(model)


def test_a_forward_inside_another_moves_nothing() -> None:
    x = torch.ones(8, 512)

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for _ in range(2):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                figures.append(model(x, more=200).item())
        return figures

    assert_equal(run(Asking, loop, memory=40 * MIB), run(Asking, loop), 40 * MIB)


def test_longer_rows_are_foreseen_where_there_are_fewer(causal_lm: Any, token_batches: Any) -> None:
    """Scores of attention grow with the square of their length."""
    (ids,), (wide,), (long,) = (token_batches(1, batch=rows, length=length) for rows, length in ((1, 8), (64, 8), (1, 440)))
    model = causal_lm("gpt2", hidden=128, attn_implementation="eager")
    want = evaluate(model, long)
    model, optimizer = protrain.wrap(model, adamw(model, lr=0.0, weight_decay=0.0), memory=16 * MIB)
    train(model, optimizer, ids)
    evaluate(model, wide)
    assert evaluate(model, long) == want


def test_what_cannot_be_foreseen_is_tried(fresh_disk: Any) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum().item() > 0 else self.linear(-x)

    model: Any = Counting()
    x = torch.ones(4, 64)
    with torch.no_grad():
        want = model(x)
    model, _ = protrain.wrap(model, adamw(model), memory="8MiB", disk=fresh_disk)
    with torch.no_grad():
        assert torch.equal(model(x), want)
        assert torch.equal(model(-x), want)


def test_what_a_user_keeps_of_an_evaluation_is_named(gpt2: Any, token_batches: Any) -> None:
    """Training cannot have its memory back until it is dropped, and then goes on."""
    (ids,), (large,) = token_batches(1, batch=1, vocabulary=2000), token_batches(1, batch=LARGE, vocabulary=2000)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    train(model, optimizer, ids)
    with torch.no_grad():
        kept = [model(input_ids=large).logits for _ in range(2)]  # 6 MiB each, where training has 7 beside what stays
    with pytest.raises(protrain.BudgetError, match=r"still in memory.*drop what holds them"):
        train(model, optimizer, ids)
    assert [logits.shape for logits in kept] == [(LARGE, 64, 2000)] * 2
    del kept
    train(model, optimizer, ids)
    assert protrain.status(model).plan.n_persist == protrain.status(model).plan.n_chunks


@pytest.mark.parametrize("fails", ["refused", "in a block", "in a block, gradients dropped"])
def test_room_is_made_behind_a_training_forward_that_failed(fails: str, gpt2: Any, token_batches: Any) -> None:
    (ids,), (large,) = token_batches(1, batch=1, vocabulary=2000), token_batches(1, batch=LARGE, vocabulary=2000)
    (huge,) = token_batches(1, batch=8 * HUGE, vocabulary=2000)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    train(model, optimizer, ids)
    want = evaluate(model, large)
    if fails == "refused":
        with pytest.raises(protrain.BudgetError):
            train(model, optimizer, huge)
    else:
        handle = model.transformer.h[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer, ids)
        handle.remove()
    if "dropped" in fails or fails == "refused":
        optimizer.zero_grad()
        assert evaluate(model, large) == want
    train(model, optimizer, ids)
    evaluate(model, large)
    protrain.unwrap(model)


@pytest.mark.parametrize("first", ["fp32", "bf16"])
def test_what_autocast_holds_is_foreseen(first: str, gpt2: Any, token_batches: Any, foreseen: list[int]) -> None:
    """Of one batch: with casts of all parameters, which are held until the context ends, and without."""
    (ids,) = token_batches(1, batch=8, vocabulary=2000)
    model = gpt2()
    contexts: dict[str, Any] = {"fp32": suppress, "bf16": partial(torch.autocast, "cpu", torch.bfloat16)}

    def forward(kind: str) -> float:
        with torch.no_grad(), contexts[kind]():
            return loss_of(model, ids).item()

    want = {kind: forward(kind) for kind in contexts}
    model, _ = protrain.wrap(model, adamw(model), memory=18 * MIB)
    for kind in (first, "bf16", "fp32"):
        assert forward(kind) == want[kind]
    assert len(set(foreseen)) == 2
    protrain.unwrap(model)


def test_outputs_that_an_evaluation_collects_are_named(gpt2: Any, token_batches: Any) -> None:
    """Not the batch, which has room without them."""
    (ids,), (large,) = token_batches(1, batch=1, vocabulary=2000), token_batches(1, batch=LARGE, vocabulary=2000)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    train(model, optimizer, ids)
    kept: list[torch.Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(10):
                kept.append(model(input_ids=large).logits)

    with pytest.raises(protrain.BudgetError, match=r"earlier forwards are still in memory.*drop what holds them") as refused:
        evaluate()
    assert 0 < len(kept) < 10
    assert refused.value.smallest_bytes > BUDGET
    kept.clear()
    with torch.no_grad():
        model(input_ids=large)
    train(model, optimizer, ids)


def test_room_that_could_not_be_made_is_made_when_it_is_asked_for_again(
    gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ids,) = token_batches(1, batch=1, vocabulary=2000)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    train(model, optimizer, ids)
    session = session_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(session.homes, "rearrange", failing)
        with pytest.raises(protrain.DiskError):
            session.leave_room()
    assert session.leave_room()
    assert not session.leave_room()
    assert protrain.status(model).plan.n_persist == 0
    train(model, optimizer, ids)
    assert protrain.status(model).plan.n_persist == protrain.status(model).plan.n_chunks


def failing(_found: Any) -> None:
    raise protrain.DiskError("write of 4096 bytes failed")


@pytest.mark.parametrize("yields", [False, True])
def test_training_leaves_room_for_evaluations_within_its_steps(
    yields: bool, gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between backward and step() no home moves: an evaluation to which state cannot give way is refused where the plan leaves it
    no room, and the next step's plan does."""
    rigid(monkeypatch, first_room=False, yields=yields)
    ids, large = token_batches(1, vocabulary=2000)[0], token_batches(1, batch=10, vocabulary=2000)[0]
    refused: list[int] = []

    def loop(model: nn.Module, optimizer: Any, plain: bool) -> list[Any]:
        figures: list[Any] = []
        for number in range(4):
            loss_of(model, ids).backward()
            with suppress(protrain.BudgetError):
                figures.append(evaluate(model, large))
            if len(figures) == number:
                refused.append(number)
                optimizer.zero_grad()
                loss_of(model, ids).backward()
                figures.append(evaluate(model, large))
            optimizer.step()
            optimizer.zero_grad()
            if not plain:
                status = protrain.status(model)
                assert 0.98 * status.peak_memory_bytes <= status.predicted_peak_bytes <= BUDGET
        return figures

    status = assert_equal(run(gpt2, loop, memory=BUDGET), run(gpt2, loop), BUDGET)
    assert refused == ([] if yields else [0])
    assert status.plan.n_persist < status.plan.n_chunks


@pytest.mark.parametrize("yields", [False, True])
def test_training_leaves_room_for_evaluations_before_their_backward(
    yields: bool, gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a forward of a teacher, beside what the blocks of the step save; one is refused where no state gives way to it, and
    the plan is another one."""
    rigid(monkeypatch, first_room=False, yields=yields)
    ids, large = token_batches(1, vocabulary=2000)[0], token_batches(1, batch=10, vocabulary=2000)[0]
    refused: list[int] = []

    def loop(model: nn.Module, optimizer: Any, plain: bool) -> list[Any]:
        figures: list[Any] = []
        for number in range(6):
            loss = loss_of(model, ids)
            if number % 2:
                found = None
                with suppress(protrain.BudgetError):
                    found = evaluate(model, large)
                if found is None:
                    refused.append(number)
                    del loss
                    optimizer.zero_grad()
                    loss = loss_of(model, ids)
                    found = evaluate(model, large)
                figures.append(found)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return figures

    assert_equal(run(gpt2, loop, memory=BUDGET), run(gpt2, loop), BUDGET)
    assert refused == ([] if yields else [1])


@pytest.mark.parametrize("where", ["in the step before", "between steps", "in a step"])
def test_only_an_evaluation_that_is_refused_in_a_step_finds_room_there(
    where: str, gpt2: Any, token_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = token_batches(1, vocabulary=2000)[0]
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    train(model, optimizer, ids)
    loss = loss_of(model, ids)
    if where == "in the step before":
        evaluate(model, ids)
    if where != "in a step":
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def take(*_: Any) -> None:
        torch.empty(BUDGET, dtype=torch.uint8)

    taking = model.lm_head.register_forward_hook(take)
    with pytest.raises(protrain.BudgetError):
        evaluate(model, ids)
    taking.remove()
    noted: list[int] = []
    monkeypatch.setattr(session_of(model).fitter, "note_beside", noted.append)
    del loss
    optimizer.zero_grad()
    train(model, optimizer, ids)
    assert [n_bytes > BUDGET for n_bytes in noted] == [True] * (where == "in a step")
    protrain.unwrap(model)


def test_an_evaluation_within_steps_counts_in_every_plan(gpt2: Any, token_batches: Any) -> None:
    """What it takes beside chunks was seen under one plan; one that would leave it no room is not made."""
    ids = token_batches(1, vocabulary=2000)[0]
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    train(model, optimizer, ids)
    session = session_of(model)
    assert session.decider.within_peak_bytes(session.homes.arrangement) == 0
    largest = 0
    for rows in (2, 6, 4):  # as much as the largest of them
        loss_of(model, ids).backward()
        with suppress(protrain.BudgetError):
            evaluate(model, token_batches(1, batch=rows, vocabulary=2000)[0])
        optimizer.zero_grad()
        train(model, optimizer, ids)
        found = session.homes.arrangement
        assert session.decider.within_peak_bytes(found) <= BUDGET
        beside = session.decider.within_bytes  # and gradients of chunks in memory, of which plans by time have more or fewer
        assert rows == 4 or beside > largest
        largest = max(largest, beside)
    protrain.unwrap(model)


def test_what_no_plan_has_room_for_within_a_step_is_forgotten(gpt2: Any, token_batches: Any) -> None:
    ids, huge = token_batches(1, vocabulary=2000)[0], token_batches(1, batch=HUGE, vocabulary=2000)[0]
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=BUDGET)
    train(model, optimizer, ids)
    for _ in range(2):
        loss_of(model, ids).backward()
        with pytest.raises(protrain.BudgetError):
            evaluate(model, huge)
        optimizer.zero_grad()
        train(model, optimizer, ids)
    assert protrain.status(model).predicted_peak_bytes <= BUDGET
    protrain.unwrap(model)


def test_an_evaluation_needs_no_room_for_gradients() -> None:
    """With every chunk away it has the budget but for slots and the ring."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=12 * MIB)
    for x in inputs(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(inputs(1, 1960)[0])
    assert 0.97 * 12 * MIB < protrain.status(model).peak_memory_bytes <= 12 * MIB
    protrain.unwrap(model)
