"""Models whose course hangs on ids, masks and labels are foreseen, trained exactly, and in the smallest budget that is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from twins import adamw

import protrain
from protrain import _core
from protrain.dryrun import knownvalues
from protrain.dryrun.dryrun import dry_run
from protrain.dryrun.phases import DryRunError
from protrain.model.blocks import find_blocks

WIDTH, WORDS = 64, 100


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


class Layers(nn.Module):
    """Words, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([self.block() for _ in range(4)])

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def through(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


class Selecting(Layers):
    """The loss is of the tokens that have a label."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chosen = labels != -100
        if labels.max() >= WORDS or not chosen.any():
            raise ValueError("no labels, or wrong ones")
        x = self.through(ids)[chosen] + chosen.nonzero().float().mean()
        assert len(x) == int(chosen.sum())
        return nn.functional.cross_entropy(self.head(x), labels.masked_select(chosen))


class Heard(Layers):
    """A connectionist temporal classification of what has a mask, its labels in a row behind one another."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.through(ids)).log_softmax(-1).transpose(0, 1)
        there = labels != -100
        given, lengths = labels.masked_select(there), (ids > 2).sum(-1).clamp(min=40)
        return nn.functional.ctc_loss(scores, given, lengths, there.sum(-1), zero_infinity=True)


class Packed(Layers):
    """Sentences end where an id says so; each is averaged."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ends = (ids == 1).nonzero()[:, 1].tolist()
        x = self.through(ids)
        parts = [x[:, a:b].mean(1) for a, b in zip([0, *ends], [*ends, ids.shape[1]], strict=True) if b > a]
        return self.head(torch.stack(parts)).logsumexp(-1).mean() + (labels[0, 0] * 0)


class Placed(Layers):
    """torch.tensor is given what was counted of each sentence, as in models of images and text, and what was computed."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([(row == 1).nonzero().max() for row in ids])
        x = self.through(ids)
        share = torch.tensor([[x.detach().mean(), 0.5], [1, len(labels)]])
        return self.head(x[torch.arange(ids.shape[1]) < ends[:, None]]).logsumexp(-1).mean() * share[0].sum()


class Leaving(Layers):
    """Blocks are left out at random."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            if torch.rand([]) < 0.3:
                continue
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten().clamp(min=0))


class Checked(Layers):
    """Raises where a number is none."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.through(ids.repeat(1, 4))
        x[torch.isinf(x)] = 0
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.repeat(1, 4).flatten().clamp(min=0))
        if torch.isnan(x).any() or torch.isnan(loss):
            raise ValueError("not a number")
        return loss


class Routed(nn.Module):
    """Experts that a router chooses for each token. way: how tokens are brought to theirs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.router = way, nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(Layers.block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        shares = self.router(tokens).softmax(-1)
        result: torch.Tensor = getattr(self, self.way)(tokens, shares).view_as(x)
        return result

    def by_where(self, tokens: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        weights, chosen = shares.topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel():
                out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        return out

    def by_hits(self, tokens: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        _, chosen = torch.topk(shares, 2)
        mask = nn.functional.one_hot(chosen, 4).permute(2, 1, 0)
        out = torch.zeros_like(tokens)
        for hit in mask.sum((-1, -2)).nonzero():
            _, rows = torch.where(mask[hit[0]])
            out[rows] += self.experts[hit[0]](tokens[rows]) * shares[rows, hit[0], None]  # type: ignore[index]
        return out

    def by_counts(self, tokens: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        share, chosen = shares.max(dim=-1)
        order = chosen.argsort(stable=True)
        parts = tokens[order].split(torch.bincount(chosen, minlength=4).tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(tokens).index_copy(0, order, done) * share[:, None]

    def by_capacity(self, tokens: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        mask = nn.functional.one_hot(shares.argmax(-1), 4)
        mask = mask * (mask.cumsum(0) <= 48)
        return sum(mask[:, n, None] * expert(tokens * shares[:, n, None]) for n, expert in enumerate(self.experts))  # type: ignore[return-value]


class Mixture(Layers):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed(way) for _ in range(4))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.through(ids)).flatten(0, 1), labels.flatten().clamp(min=0))


MIXTURES = [partial(Mixture, way) for way in ("by_where", "by_hits", "by_counts", "by_capacity")]


def batches(count: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(2, WORDS, (2, 64), generator=generator)
        ids[:, 20], ids[:, 41] = 1, 1
        labels = torch.randint(1, WORDS, (2, 64), generator=generator)
        labels[torch.arange(64).expand(2, 64) % 5 > 0] = -100
        found.append((ids, labels))
    return found


def train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for number, batch in enumerate(batches()):
        torch.manual_seed(number)
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def foreseen(model: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> int:
    blocks, chunks = [block for _, block in find_blocks(model)], {id(p): 0 for p in model.parameters()}
    return dry_run(model, args, kwargs, blocks, chunks, round_bytes=_core.rounded_bytes).keep_peak_bytes


@pytest.mark.parametrize("make", [Selecting, Heard, Packed, Placed, Leaving, Checked, *MIXTURES])
def test_such_models_are_trained_in_the_smallest_budget_and_foreseen(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = train(plain, adamw(plain))

    def wrapped(memory: int) -> tuple[list[float], Any]:
        model = make()
        model.load_state_dict(start)
        model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
        try:
            return train(model, optimizer), protrain.status(model)
        finally:
            protrain.unwrap(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, status = wrapped(1 << 30)
        assert losses == expected
        assert 0.99 <= status.plan.peak_bytes / status.peak_memory_bytes <= 1.15, "what is foreseen, to some KiB"
        memory = 400 << 10
        for _ in ("of the states", "of a step"):
            with pytest.raises(protrain.BudgetError) as refused:
                wrapped(memory)
            memory = refused.value.smallest_bytes
        losses, status = wrapped(memory)
    assert losses == expected
    assert status.peak_memory_bytes <= memory


def test_models_of_transformers_that_ask_for_values_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import (
        BartConfig,
        BartForSequenceClassification,
        LongformerConfig,
        LongformerForMaskedLM,
        Wav2Vec2Config,
        Wav2Vec2ForCTC,
    )

    (ids, labels), *_ = batches(1)
    short = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ending = ids.clone()
    ending[ending == 1], ending[:, -1] = 5, 2
    assert foreseen(
        LongformerForMaskedLM(LongformerConfig(vocab_size=WORDS, attention_window=16, max_position_embeddings=80, **short)),
        input_ids=ids, labels=ids,
    )  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(knownvalues, "MOST_NUMBERS", 1 << 10)  # as with longer sentences
        assert foreseen(
            LongformerForMaskedLM(LongformerConfig(vocab_size=WORDS, attention_window=16, max_position_embeddings=80, **short)),
            input_ids=ids, labels=ids,
        )  # fmt: skip
    assert foreseen(
        BartForSequenceClassification(
            BartConfig(
                vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=80,
                encoder_layerdrop=0.3, num_labels=3,
            )
        ),
        input_ids=ending, labels=torch.zeros(2, dtype=torch.int64),
    )  # fmt: skip
    assert foreseen(
        Wav2Vec2ForCTC(
            Wav2Vec2Config(
                vocab_size=WORDS, conv_dim=[16] * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, **short
            )
        ),
        input_values=torch.randn(2, 6000), attention_mask=torch.ones(2, 6000, dtype=torch.int64), labels=labels[:, ::5],
    )  # fmt: skip


def test_what_floats_decide_is_not_foreseen_nor_what_a_batch_without_data_would() -> None:
    class Deciding(Layers):
        def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.through(ids).mean() if (x > 0).any() else self.words(ids).mean()

    (ids, labels), *_ = batches(1)
    with pytest.raises(DryRunError, match="DataDependent"):
        foreseen(Deciding(), ids, torch.ones(3))
    with pytest.raises(DryRunError, match="DataDependent"):
        foreseen(Selecting(), ids.to("meta"), labels.to("meta"))


def test_a_loop_that_waits_for_what_a_choice_never_is_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knownvalues, "MOST_ANSWERS", 50)

    class Waiting(Layers):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.through(ids)
            while int(self.head(x).argmax(-1).max()) <= WORDS:
                x = x + 1
            return x.mean()

    with pytest.raises(DryRunError, match="DataDependent"):
        foreseen(Waiting(), batches(1)[0][0])


@pytest.mark.parametrize(("shape", "dim"), [((6, 5), -1), ((6, 5), 0), ((2, 3, 4), 1), ((7,), 0)])
def test_choices_that_are_made_up_are_places_of_their_dimension(shape: tuple[int, ...], dim: int) -> None:
    aten, among = torch.ops.aten, shape[dim]
    found = []
    with FakeTensorMode():
        numbers, known = torch.empty(shape), knownvalues.KnownValues()

        def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
            result = known.call(operation, args, kwargs, lambda run, given, named: run(*given, **named))
            return [result] if isinstance(result, torch.Tensor) else result

        for operation, args, kwargs in (
            (aten.topk.default, (2, dim), {}), (aten.max.dim, (dim, True), {}), (aten.min.dim, (dim,), {}),
            (aten.argmax.default, (dim,), {}), (aten.argmin.default, (), {"dim": dim, "keepdim": True}),
            (aten.sort.default, (dim,), {}), (aten.sort.stable, (), {"stable": True, "dim": dim}),
        ):  # fmt: skip
            fake = call(operation, numbers, *args, **kwargs)[-1]
            found.append(((fake.shape, fake.stride(), fake.dtype), known.value(fake)))
        assert known.value(call(aten.argmax.default, numbers)[0]) is None, "not along a dimension"
    for described, value in found:
        assert value is not None
        assert (value.shape, value.stride(), value.dtype) == described
        assert 0 <= int(value.min()) <= int(value.max()) < among
        if value.dim() == len(shape):  # different ones, of a row
            rows = value.movedim(dim, -1).reshape(-1, value.shape[dim])
            assert all(len(set(row)) == len(row) for row in rows.tolist())


def test_what_is_written_over_with_what_is_not_known_is_not_known() -> None:
    real = torch.arange(6).view(2, 3)
    with FakeTensorMode():
        fake, other = torch.empty(2, 3, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
        known = knownvalues.KnownValues([(fake, real)])

        def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
            return known.call(operation, args, kwargs, lambda run, given, named: run(*given, **named))

        aten = torch.ops.aten
        row = call(aten.select.int, fake, 1, 0)
        call(aten.add_.Tensor, row, 5)
        assert known.ask(call(aten.sum.default, fake), int) == 15 + 10, "a view was changed, and so was what it shows"
        call(aten.copy_.default, row, other)
        assert known.value(fake) is None
        assert known.value(row) is None
    assert real.sum() == 15, "what was given is as it was"


def test_a_mask_that_is_the_same_for_all_that_look_is_known_however_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knownvalues, "MOST_NUMBERS", 64)
    real, aten = torch.tensor([[1] * 6 + [0] * 26, [1] * 30 + [0] * 2]), torch.ops.aten
    with FakeTensorMode():
        fake = torch.empty(2, 32, dtype=torch.int64)
        known = knownvalues.KnownValues([(fake, real)])

        def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
            return known.call(operation, args, kwargs, lambda run, given, named: run(*given, **named))

        places = call(aten.arange.default, 32, dtype=torch.int64)
        zero, one, seven = (call(aten.scalar_tensor.default, number, dtype=torch.float32) for number in (0.0, -1.0, 7.0))
        looks = call(aten.view.default, places, [32, 1])
        looked_at = call(aten.view.default, call(aten.ne.Scalar, fake, 0), [2, 1, 32])
        mask = call(aten.bitwise_and.Tensor, call(aten.ge.Scalar, looks, 0), looked_at)
        shift = call(aten.where.self, mask, zero, one)
        row = call(aten.select.int, shift, 1, 3)
        before, large = known.value(row), known.value(mask)
        assert before is not None
        before = knownvalues._really(before.clone)
        call(aten.index_put_.default, row, [call(aten.eq.Scalar, fake, 0)], seven)
        after, positive = known.value(row), known.ask(call(aten.gt.Scalar, row, 0), lambda found: int(found.sum()))
        assert known.value(shift) is None, "one of its rows differs now"
        assert known.value(call(aten.le.Tensor, places, looks)) is None, "too large, and nowhere the same"
    assert large is not None
    assert after is not None
    assert torch.equal(large, (real != 0)[:, None].expand(2, 32, 32))
    assert torch.equal(before, real - 1.0)
    assert torch.equal(after, 7.0 - 7.0 * real)
    assert positive == int((real == 0).sum())


def test_a_dry_run_draws_nothing_and_its_values_count_in_no_budget(arena: _core.Engine) -> None:
    model, ((ids, labels), *_), state = Leaving(), batches(1), torch.get_rng_state().clone()
    arena.mark()
    before = arena.stats()["live_bytes"]
    foreseen(model, ids, labels)
    assert arena.mark() - before <= 64 << 10
    assert torch.equal(torch.get_rng_state(), state)


class Named(nn.Module):
    """Experts that are found by a name, of a number that was asked for, as some libraries keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleDict({f"expert_{number}": nn.Linear(16, 16) for number in range(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.nn.functional.one_hot(self.router(x).argmax(-1), 4)
        y = torch.zeros_like(x)
        for number in (chosen.sum(0) > 0).nonzero():
            rows = chosen[:, number[0]].nonzero()[:, 0]
            y = y.index_add(0, rows, self.experts[f"expert_{number[0]}"](x[rows]))
        assert len(f"{y.sum()}") > 1  # of what is not known it says what it did
        return y


def test_a_number_that_is_known_stands_in_a_name() -> None:
    model = Named()
    plan = protrain.plan(model, {"x": torch.randn(64, 16)}, memory=64 << 20, optimizer=torch.optim.AdamW(model.parameters()))
    assert plan.peak_bytes > 0
