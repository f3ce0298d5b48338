"""torch's own attention layers in eval mode, where they are one operation: the bits of plain torch, wherever parameters are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import MIB, adamw

import protrain

WIDTH = 128
SMALL, LARGE = 6 * MIB, 64 * MIB  # one of seven chunks in memory, or all


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **{"batch_first": True} | options)


class Encoder(nn.Module):
    """Words, torch's encoder, and a head."""

    def __init__(self, norm: bool = True, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(500, WIDTH), nn.Linear(WIDTH, 500)
        self.encoder = nn.TransformerEncoder(layer(**options), 4, norm=nn.LayerNorm(WIDTH) if norm else None)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.encoder(self.words(ids), src_key_padding_mask=padding))


class Attending(nn.Module):
    """Attention whose projections are parts of a model of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(500, WIDTH), nn.Linear(WIDTH, 500)
        self.blocks = nn.ModuleList([nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(4)])

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return self.head(x)


class Both(nn.Module):
    """nn.Transformer: an encoder, and a decoder whose attention has two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(500, WIDTH), nn.Linear(WIDTH, 500)
        self.both = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, batch_first=True)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(ids)
        return self.head(self.both(x, x, src_key_padding_mask=padding))


class OwnLayer(nn.TransformerEncoderLayer):
    """A layer with a forward of its own around torch's."""

    def forward(self, src: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().forward(src * 1.0, **options)


class OwnEncoder(nn.TransformerEncoder):
    """The mask has another name."""

    def forward(self, src: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        return super().forward(src, src_key_padding_mask=hidden)


class Inherited(nn.Module):
    """As Encoder, of such parts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(500, WIDTH), nn.Linear(WIDTH, 500)
        self.encoder = OwnEncoder(OwnLayer(WIDTH, 4, 4 * WIDTH, batch_first=True), 4)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.encoder(self.words(ids), padding))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder,
    "norm first": lambda: Encoder(norm_first=True),
    "gelu, no norm, not nested": lambda: Encoder(activation="gelu", norm=False),
    "activation that is not fused": lambda: Encoder(activation=torch.tanh),
    "attention": Attending,
    "transformer": Both,
    "inherited": Inherited,
}


def ids_and_padding() -> tuple[torch.Tensor, torch.Tensor]:
    padding = torch.zeros(2, 24, dtype=torch.bool)
    padding[0, 15:] = True
    return torch.randint(500, (2, 24), generator=torch.Generator().manual_seed(1)), padding


def step(model: nn.Module, optimizer: Any, ids: torch.Tensor) -> float:
    torch.manual_seed(3)
    loss = model(ids).logsumexp(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Twins:
    """A model wrapped within a budget, and the same in plain torch."""

    def __init__(self, make: Callable[[], nn.Module], memory: int) -> None:
        torch.manual_seed(0)
        self.plain = make()
        self.model = copy.deepcopy(self.plain)
        self.plain_optimizer = adamw(self.plain)
        self.model, self.optimizer = protrain.wrap(self.model, adamw(self.model), memory=memory)

    def train(self, ids: torch.Tensor, steps: int = 3) -> None:
        for _ in range(steps):
            assert step(self.model, self.optimizer, ids) == step(self.plain, self.plain_optimizer, ids)

    def evaluate(self, *args: Any) -> None:
        self.model.train(False), self.plain.train(False)
        torch.testing.assert_close(self.model(*args), self.plain(*args), rtol=0, atol=0)
        self.model.train(), self.plain.train()

    def end(self) -> None:
        status = protrain.status(self.model)
        assert status.peak_memory_bytes <= status.plan.budget_bytes
        protrain.unwrap(self.model)


@pytest.mark.parametrize("memory", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", MODELS)
def test_evaluations_have_the_bits_of_plain_torch(name: str, memory: int) -> None:
    ids, padding = ids_and_padding()
    twins = Twins(MODELS[name], memory)
    twins.train(ids)
    assert (protrain.status(twins.model).plan.n_persist < protrain.status(twins.model).plan.n_chunks) == (memory == SMALL)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            twins.evaluate(ids)
            twins.evaluate(ids, padding)
            twins.evaluate(ids.repeat(3, 2))
    twins.train(ids)
    twins.end()


def test_where_gradients_are_asked_for_the_other_path_runs() -> None:
    ids, padding = ids_and_padding()
    twins = Twins(Encoder, SMALL)
    twins.train(ids)
    twins.evaluate(ids)
    twins.evaluate(ids, padding)
    twins.model.zero_grad()
    twins.train(ids)
    twins.end()


def test_a_frozen_encoder_runs_fused_where_gradients_are_on() -> None:
    def make() -> nn.Module:
        model = Encoder()
        model.words.requires_grad_(False)
        model.encoder.requires_grad_(False)
        return model

    ids, padding = ids_and_padding()
    twins = Twins(make, 3 * MIB)
    for model in (twins.model, twins.plain):
        model.encoder.train(False)
    twins.train(ids)
    assert protrain.status(twins.model).plan.n_persist < protrain.status(twins.model).plan.n_chunks
    twins.evaluate(ids, padding)
    twins.end()


@pytest.mark.parametrize(
    "inner",
    [lambda encoder: encoder.layers[0], lambda encoder: encoder.layers[2].linear1, lambda encoder: encoder.norm],
    ids=["first layer", "layer", "norm"],
)
def test_hooks_inside_see_parameters_and_keep_torch_from_its_fused_path(inner: Callable[[Any], nn.Module]) -> None:
    ids, padding = ids_and_padding()
    seen: dict[int, list[float]] = {}

    def look(module: nn.Module, _args: Any, _output: Any) -> None:
        seen.setdefault(id(module), []).append(sum(p.sum().item() for p in module.parameters()))

    twins = Twins(Encoder, SMALL)
    hooked = [inner(model.encoder) for model in (twins.model, twins.plain)]
    for module in hooked:
        module.register_forward_hook(look)
    twins.train(ids)
    with torch.no_grad():
        twins.evaluate(ids)
        twins.evaluate(ids, padding)
    assert seen[id(hooked[0])] == seen[id(hooked[1])]
    twins.end()


class Adapted(nn.Module):
    """A frozen layer in eval mode, in which something of the user's is trained: by a hook, or in its activation."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(500, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 500)
        self.more = nn.Linear(WIDTH, 4 * WIDTH) if hooked else nn.Linear(1, 1)
        self.layers = nn.ModuleList([layer(activation=F.relu if hooked else self.scaled) for _ in range(4)]).requires_grad_(False)
        if hooked:
            for inner in self.layers:
                inner.linear1.register_forward_hook(self.add)

    def add(self, _module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output + self.more(args[0])

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) * self.more.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for inner in self.layers:
            x = inner.train(False)(x)
        return self.head(x)


@pytest.mark.parametrize("hooked", [True, False], ids=["hook", "activation"])
def test_what_is_trained_inside_of_a_frozen_layer_gets_its_gradients(hooked: bool) -> None:
    ids, _ = ids_and_padding()
    torch.manual_seed(0)
    plain, model = Adapted(hooked), Adapted(hooked)
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], fused=True) for m in (plain, model)]
    model, optimizer = protrain.wrap(model, optimizers[1], memory=8 * MIB)
    for _ in range(3):
        assert step(model, optimizer, ids) == step(plain, optimizers[0], ids)
    protrain.unwrap(model)
    assert torch.equal(model.more.weight, plain.more.weight)


def test_an_encoder_without_layers() -> None:
    class Decoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(500, WIDTH), nn.Linear(WIDTH, 500)
            self.both = nn.Transformer(WIDTH, 4, 0, 3, 2 * WIDTH, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.words(ids)
            return self.head(self.both.decoder(x, x))

    ids, _ = ids_and_padding()
    twins = Twins(Decoding, SMALL)
    twins.train(ids)
    with torch.no_grad():
        twins.evaluate(ids)
    twins.end()


def test_an_encoder_that_is_the_whole_model() -> None:
    def forward_step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> float:
        torch.manual_seed(3)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    x, (_, padding) = torch.randn(2, 24, WIDTH), ids_and_padding()
    twins = Twins(lambda: nn.TransformerEncoder(layer(dropout=0.0), 4), 5 * MIB)
    for _ in range(3):
        assert forward_step(twins.model, twins.optimizer, x) == forward_step(twins.plain, twins.plain_optimizer, x)
    with torch.no_grad():
        twins.evaluate(x)
        twins.evaluate(x, None, padding)
    twins.end()
    assert "forward" not in twins.model.__dict__
    assert all("forward" not in module.__dict__ for module in twins.model.modules())


@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_that_is_compiled_after_wrap(number: int) -> None:
    ids, padding = ids_and_padding()
    twins = Twins(Encoder, SMALL)
    twins.train(ids)
    for model in (twins.model, twins.plain):
        model.encoder.layers[number].compile(backend="eager")
    with torch.no_grad():
        twins.evaluate(ids)
    twins.train(ids)
    for model in (twins.model, twins.plain):
        model.encoder.norm.compile(backend="eager")
    with torch.no_grad():
        twins.evaluate(ids)
        twins.evaluate(ids, padding)
    twins.end()


def test_what_a_fused_layer_takes_is_foreseen() -> None:
    """Room is made for an evaluation, or it is refused with a budget that works."""
    ids, _ = ids_and_padding()
    large = ids.repeat(64, 1)
    twins = Twins(Encoder, 5 * MIB)
    twins.train(ids)
    twins.model.train(False)
    with torch.no_grad(), pytest.raises(protrain.BudgetError) as refused:
        twins.model(large)
    protrain.unwrap(twins.model)
    twins = Twins(Encoder, refused.value.smallest_bytes)
    twins.train(ids)
    with torch.no_grad():
        twins.evaluate(large)
    twins.train(ids)
    twins.end()
