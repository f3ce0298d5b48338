"""Bit for bit plain torch: losses, parameters, moments and random state, whatever the budget and the shape of the loop."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from twins import MIB, adamw, assert_equal, fit, loss_of, run

import protrain
from protrain.api import session_of

TIGHT = 16 * MIB
AMPLE = 1 << 30


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


@pytest.fixture
def gpt2(causal_lm: Any) -> Any:
    """GPT-2 of 2.0 M parameters: 32 MB of parameters, gradients and moments."""
    return partial(causal_lm, "gpt2", hidden=192, layers=4, use_cache=True)  # as transformers' own configs have it


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gpt_neox"])
@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_budgets(family: str, budget: int, causal_lm: Any, token_batches: Any) -> None:
    make = partial(causal_lm, family, hidden=192, layers=4)
    loop = fit(token_batches(5))
    status = assert_equal(run(make, loop, memory=budget), run(make, loop), budget)
    if budget == TIGHT:
        assert status.plan.n_persist < status.plan.n_chunks
        assert status.disk_read_bytes > 0
    else:
        assert status.plan.n_persist == status.plan.n_chunks


@pytest.mark.parametrize("mode", ["keep", "checkpoint", "mixed"])
@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_block_modes_with_dropout(mode: str, budget: int, gpt2: Any, token_batches: Any) -> None:
    make = partial(gpt2, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    modes = ["keep", "checkpoint"] * 2 if mode == "mixed" else [mode] * 4
    loop = fit(token_batches(4))
    budget = 24 * MIB if budget == TIGHT else budget  # what is kept must fit
    status = assert_equal(run(make, loop, memory=budget, block_modes=modes), run(make, loop), budget)
    assert list(status.plan.block_modes) == modes


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1, 1e9])
def test_accumulation_and_clipping(accumulate: int, clip: float | None, gpt2: Any, token_batches: Any) -> None:
    loop = fit(token_batches(3 * accumulate), accumulate, clip)
    assert_equal(run(gpt2, loop, memory=TIGHT, accumulate=accumulate, max_grad_norm=clip), run(gpt2, loop), TIGHT)


OPTIMIZERS = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1, fused=True),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True, fused=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, fused=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True),
    "groups": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in m.parameters() if p.dim() <= 1], "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6},
        ],
        fused=True,
    ),
    "AdamW, a loop": lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1),
    "Adam, a loop": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-3), weight_decay=0.1, amsgrad=True),
    "AdamW, foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "momentum, a loop": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "groups, one fused": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "fused": True},
            {"params": [p for p in m.parameters() if p.dim() <= 1]},
        ]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, gpt2: Any, token_batches: Any) -> None:
    loop = fit(token_batches(4))
    assert_equal(run(gpt2, loop, OPTIMIZERS[name], memory=TIGHT), run(gpt2, loop, OPTIMIZERS[name]), TIGHT)


def test_tied_embeddings(causal_lm: Any, token_batches: Any) -> None:
    make = partial(causal_lm, "llama", hidden=192, layers=4, tie_word_embeddings=True)
    loop = fit(token_batches(4))
    assert_equal(run(make, loop, memory=TIGHT), run(make, loop), TIGHT)


def test_frozen_and_unused_parameters(gpt2: Any, token_batches: Any) -> None:
    def make() -> Any:
        model = gpt2()
        for block in model.transformer.h[::2]:
            block.requires_grad_(False)
        model.spare = nn.Linear(300, 300)
        model.transformer.h[3].extra = nn.Parameter(torch.ones(1000))
        model.nothing = nn.Parameter(torch.ones(0))
        return model

    loop = fit(token_batches(4))
    assert_equal(run(make, loop, memory=TIGHT), run(make, loop), TIGHT)


class Uneven(nn.Module):
    """Convolutions, odd widths, parameters of one element and of no dimension, a branch that alternates, a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = 775, 1023, 517, 775, 769, 333, 1
        self.stem = nn.Conv2d(3, 17, 5, padding=2)
        self.down = nn.Conv2d(17, 31, 3, stride=2, bias=False)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths, widths[1:], strict=False))
        )
        self.even, self.odd = nn.Linear(775, 775), nn.Linear(775, 775)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor(0.5))
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.calls += 1
        x = torch.relu(self.down(torch.relu(self.stem(input_ids)))).flatten(1)
        x = x + (self.even if self.calls % 2 else self.odd)(x)
        x = x + x @ self.layers[0][0].weight.t() @ self.layers[0][0].weight * 1e-3
        y = self.layers(x) * self.scale + self.shift
        return SimpleNamespace(loss=((y - labels.mean((1, 2, 3)).unsqueeze(1)) ** 2).mean())


def test_uneven_model_with_branches() -> None:
    images = list(torch.randn(6, 7, 3, 11, 11, generator=torch.Generator().manual_seed(2)))
    loop = fit(images)
    # The dry run sees one of the branches at a time; the plain run counts one call less than the wrapped one.
    assert_equal(run(Uneven, loop, memory=24 * MIB), run(Uneven, loop), 24 * MIB)


def test_several_chunks_in_one_operation(token_batches: Any) -> None:
    """An operation that takes parameters of more chunks than there are slots for gets them all."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(256, 512)
            self.parts = nn.ParameterList([nn.Parameter(torch.randn(512, 512) * 0.02) for _ in range(8)])
            self.lstm = nn.LSTM(512, 512, num_layers=2, batch_first=True)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            x = self.table(input_ids) @ torch.stack(list(self.parts)).sum(0)
            y, _ = self.lstm(x)
            return SimpleNamespace(loss=nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten()))

    loop = fit(token_batches(3, length=16))
    assert_equal(run(Wide, loop, memory=64 * MIB), run(Wide, loop), 64 * MIB)


def test_skipped_steps_and_late_rates(gpt2: Any, token_batches: Any) -> None:
    """A step that is not made changes nothing; rates set between backward and step are those of the step."""
    batches = token_batches(6)

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for number, ids in enumerate(batches):
            loss = loss_of(model, ids)
            loss.backward()
            figures.append(loss.item())
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 / (number + 1)
            if number not in (1, 4):
                optimizer.step()
            optimizer.zero_grad()
        return figures

    assert_equal(run(gpt2, loop, memory=TIGHT), run(gpt2, loop), TIGHT)


def test_late_rates_of_a_loop_that_goes_on_from_a_checkpoint(gpt2: Any, token_batches: Any, tmp_path: Path) -> None:
    """Whose first step has the rate that the one before had: only the second shows that rates are set behind backward."""
    batches, rates = token_batches(6), [1e-3, 5e-4, 5e-4, 5e-4, 2e-4, 1e-4]

    def loop(model: Any, optimizer: Any, begin: int, end: int) -> list[float]:
        losses = []
        for ids, rate in list(zip(batches, rates, strict=True))[begin:end]:
            loss = loss_of(model, ids)
            loss.backward()
            losses.append(loss.item())
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return losses

    plain = gpt2()
    want = loop(plain, adamw(plain), 0, 6)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    found = loop(model, optimizer, 0, 3)
    protrain.save(model, optimizer, tmp_path / "saved")
    protrain.unwrap(model)
    again = gpt2(seed=9)
    again, optimizer = protrain.wrap(again, adamw(again), memory=TIGHT)
    protrain.load(again, optimizer, tmp_path / "saved")
    assert found + loop(again, optimizer, 3, 6) == want
    protrain.unwrap(again)


def test_evaluation_between_backward_and_step(gpt2: Any, token_batches: Any) -> None:
    """Until step() the model is the old one, whatever was updated behind backward."""
    batches = token_batches(5)

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for ids in batches:
            loss_of(model, ids).backward()
            with torch.no_grad():
                figures.append(loss_of(model, batches[0]).item())
            optimizer.step()
            optimizer.zero_grad()
        return figures

    assert_equal(run(gpt2, loop, memory=TIGHT), run(gpt2, loop), TIGHT)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions(where: str, gpt2: Any, token_batches: Any) -> None:
    """A batch that raises is skipped, as users do, and training goes on."""
    batches = token_batches(6)

    class BoomError(Exception):
        pass

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures, armed = [], [0]

        def boom(*_: Any) -> None:
            if armed[0]:
                raise BoomError

        def in_backward(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(boom)

        model.transformer.h[2].mlp.register_forward_hook(boom if where == "forward" else in_backward)
        for number, ids in enumerate(batches):
            armed[0] = number in (2, 3)
            try:
                loss = loss_of(model, ids)
                loss.backward()
            except BoomError:
                figures.append(None)
            else:
                optimizer.step()
                figures.append(loss.item())
            optimizer.zero_grad()
        return figures

    make = partial(gpt2, resid_pdrop=0.1, attn_pdrop=0.1)
    assert_equal(run(make, loop, memory=TIGHT), run(make, loop), TIGHT)


def test_changing_shapes(gpt2: Any, token_batches: Any) -> None:
    batches = [ids for length in (32, 64, 16, 128, 8) for ids in token_batches(2, length=length, seed=length)]
    assert_equal(run(gpt2, fit(batches), memory=TIGHT), run(gpt2, fit(batches)), TIGHT)


def test_reading_and_changing_parameters_between_steps(gpt2: Any, token_batches: Any) -> None:
    """What a user reads is what the parameter is; what a user writes is what training goes on with."""
    batches = token_batches(4)

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for ids in batches:
            loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            params = list(model.parameters())
            figures += [p.detach().double().norm().item() for p in params]
            figures += [p.data.sum().item() for p in reversed(params)]
            with torch.no_grad():
                params[5].mul_(0.5)
                params[-1].data.add_(1.0)
        return figures

    assert_equal(run(gpt2, loop, memory=TIGHT), run(gpt2, loop), TIGHT)


def test_two_models_in_turns(gpt2: Any, causal_lm: Any, token_batches: Any) -> None:
    batches = token_batches(4)
    llama = partial(causal_lm, "llama", hidden=192, layers=4)
    want = [run(make, fit(batches)).figures for make in (gpt2, llama)]
    pairs = [protrain.wrap(model, adamw(model), memory=TIGHT) for model in (gpt2(), llama())]
    got: list[list[float]] = [[], []]
    for ids in batches:
        for losses, (model, optimizer) in zip(got, pairs, strict=True):
            losses += fit([ids])(model, optimizer, False)
    for model, _ in pairs:
        protrain.unwrap(model)
    assert got == want


def test_states_hand_over_to_plain_torch_and_back(gpt2: Any, token_batches: Any) -> None:
    batches = token_batches(6)
    want = run(gpt2, fit(batches)).figures
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    fit(batches[:3])(model, optimizer, False)
    weights, state = model.state_dict(), optimizer.state_dict()
    fit(batches[3:4])(model, optimizer, False)  # must not reach into what was handed out
    protrain.unwrap(model)
    plain = gpt2(seed=9)
    plain_optimizer = adamw(plain, lr=0.5)
    plain.load_state_dict(weights)
    plain_optimizer.load_state_dict(copy.deepcopy(state))  # torch goes on with the tensors it is given
    assert fit(batches[3:])(plain, plain_optimizer, True) == want[3:]

    again = gpt2(seed=9)
    again, again_optimizer = protrain.wrap(again, adamw(again, lr=0.5), memory=TIGHT)
    again.load_state_dict(weights)
    again_optimizer.load_state_dict(state)
    assert fit(batches[3:])(again, again_optimizer, False) == want[3:]
    protrain.unwrap(again)


def test_meta_model_initialised_in_order(causal_lm: Any, token_batches: Any) -> None:
    def draw(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.normal_(p, float(p.dim() == 1), 0.02)

    def plain() -> Any:
        return causal_lm("llama", hidden=192, layers=4)

    def plain_loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        for module in model.modules():
            draw(module)
        return fit(token_batches(3))(model, optimizer, True)

    def on_meta() -> Any:
        with torch.device("meta"):
            return causal_lm("llama", hidden=192, layers=4)

    want = run(plain, plain_loop)
    got = run(on_meta, fit(token_batches(3)), memory=TIGHT, param_init_fn=draw)
    assert_equal(got, want, TIGHT)


def test_weights_of_a_folder(gpt2: Any, token_batches: Any, tmp_path: Any) -> None:
    gpt2(seed=3).save_pretrained(tmp_path)

    def on_meta() -> Any:
        with torch.device("meta"):
            return gpt2()

    want = run(partial(gpt2, seed=3), fit(token_batches(3)))
    assert_equal(run(on_meta, fit(token_batches(3)), memory=TIGHT, weights=tmp_path), want, TIGHT)


def test_gradients_that_left_are_not_none(gpt2: Any, token_batches: Any) -> None:
    """Clipping by hand would see no gradients where they have left: it raises and names what to do."""
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    (ids,) = token_batches(1)
    loss_of(model, ids).backward()
    with pytest.raises(protrain.StepError, match="max_grad_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(protrain.StepError, match="accumulate"):
        loss_of(model, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert protrain.status(model).steps == 1
    assert all(p.grad is None for p in model.parameters())
    protrain.unwrap(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_save_and_load_under_another_budget(gpt2: Any, token_batches: Any, tmp_path: Any) -> None:
    batches = token_batches(6)
    make = partial(gpt2, resid_pdrop=0.1)
    torch.manual_seed(11)
    want = run(make, fit(batches))
    model = make()
    optimizer: Any = adamw(model)
    torch.manual_seed(11)
    model, optimizer = protrain.wrap(model, optimizer, memory=TIGHT)
    fit(batches[:3])(model, optimizer, False)
    protrain.save(model, optimizer, tmp_path / "checkpoint")
    protrain.unwrap(model)
    other = gpt2(seed=9, resid_pdrop=0.1)
    other, optimizer = protrain.wrap(other, adamw(other, lr=0.5), memory=AMPLE)
    protrain.load(other, optimizer, tmp_path / "checkpoint")
    assert fit(batches[3:])(other, optimizer, False) == want.figures[3:]
    assert protrain.status(other).steps == 6
    protrain.unwrap(other)
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert {name for name, _ in loaded.named_parameters()} == {name for name, _ in other.named_parameters()}


def test_a_gradient_that_cannot_be_used_changes_nothing(gpt2: Any, token_batches: Any) -> None:
    """A sparse gradient is refused before any parameter in memory is updated."""
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=AMPLE)
    first, second = token_batches(2)
    fit([first])(model, optimizer, False)
    assert protrain.status(model).plan.n_persist == protrain.status(model).plan.n_chunks
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss_of(model, second).backward()
    last = list(model.parameters())[-1]
    last.grad = last.grad.to_sparse()
    with pytest.raises(protrain.PlanError, match="sparse"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    protrain.unwrap(model)


def test_homes_that_move_in_step(gpt2: Any, token_batches: Any) -> None:
    """A plan by time may move chunks to disk at the end of step(), when gradients in memory wait for zero_grad()."""
    batches = token_batches(4)

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = []
        for number, ids in enumerate(batches):
            loss = loss_of(model, ids)
            loss.backward()
            figures.append(loss.item())
            optimizer.step()
            if number == 1 and not plain:
                session = protrain.session_of(model)
                assert session.homes.arrangement.plan.n_persist == session.homes.arrangement.plan.n_chunks
                session.homes.rearrange(session.decider.decide(None))
                assert session.homes.arrangement.plan.n_persist == 0
                loss_of(model, ids).backward()
                with pytest.raises(protrain.StepError, match="zero_grad"):
                    optimizer.step()
            optimizer.zero_grad()
        return figures

    assert_equal(run(gpt2, loop, memory=AMPLE), run(gpt2, loop), AMPLE)


def test_denormal_numbers_are_flushed_where_the_loop_says_so(gpt2: Any, token_batches: Any) -> None:
    """Also where chunks are updated by a thread that was there before."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        torch.set_flush_denormal(True)
        try:
            figures = []
            for ids in token_batches(3):
                loss = loss_of(model, ids)
                (1e-18 * loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                figures.append(loss.item())
            return figures
        finally:
            torch.set_flush_denormal(False)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # those of a team that is there already flush nothing
    try:
        assert_equal(run(gpt2, loop, memory=TIGHT), run(gpt2, loop), TIGHT)
    finally:
        torch.set_num_threads(threads)


def test_gradients_of_another_optimizer_are_left_alone(gpt2: Any, token_batches: Any) -> None:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for name, p in model.named_parameters() if "ln_f" not in name], lr=1e-3, fused=True)

    def loop(model: Any, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        other = torch.optim.SGD(model.transformer.ln_f.parameters(), lr=0.1)
        figures = []
        for number, ids in enumerate(token_batches(4)):
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                other.step()
                other.zero_grad()
            figures.append(loss.item())
        return figures

    assert_equal(run(gpt2, loop, made, memory=TIGHT), run(gpt2, loop, made), TIGHT)


@pytest.mark.parametrize("share", [16, 17, 18, 20, 24])
def test_a_checkpoint_is_gone_on_from_in_budgets_that_it_trained_in(
    share: int, gpt2: Any, token_batches: Any, tmp_path: Any
) -> None:
    """Bytes of the budget for each parameter: what is loaded before the first batch is not held twice."""
    count = sum(p.numel() for p in gpt2().parameters())
    (ids,) = token_batches(1, length=16)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=share * count)
    for number in range(2):
        if number == 1:
            protrain.save(model, optimizer, tmp_path / "saved")
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    protrain.unwrap(model)
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=share * count)
    protrain.load(model, optimizer, tmp_path / "saved")
    again = loss_of(model, ids)
    again.backward()
    optimizer.step()
    assert again.item() == loss.item()
    protrain.unwrap(model)


def test_what_an_operation_on_all_parameters_took_is_given_back(gpt2: Any, token_batches: Any) -> None:
    model = gpt2()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    (ids,) = token_batches(1)
    loss_of(model, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    session = session_of(model)
    slots = session.engine.held()["slot_bytes"]
    torch._foreach_norm(list(model.parameters()))  # all chunks at once
    assert session.engine.held()["slot_bytes"] > slots
    loss_of(model, ids).backward()
    assert session.engine.held()["slot_bytes"] == slots
    optimizer.step()
    protrain.unwrap(model)


def test_parameters_over_one_memory_are_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.second.weight = nn.Parameter(self.first.weight.data)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)).square().mean()

    model = Tied()
    with pytest.raises(protrain.PlanError, match=r"first.weight and second.weight share memory"):
        protrain.wrap(model, adamw(model), memory=AMPLE)
    whole = torch.randn(64, 128)
    model.first.weight, model.second.weight = (nn.Parameter(whole[:, part::2]) for part in range(2))  # side by side
    wrapped, _ = protrain.wrap(model, adamw(model), memory=AMPLE)
    assert protrain.unwrap(wrapped) is model
