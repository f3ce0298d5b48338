"""Optimizers without a kernel: their own step, parameter by parameter, bit for bit what it gives for the whole model."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Chain, both, inputs, steps
from torch import nn
from twins import MIB, adafactor, assert_equal, bits, fit, loss_of, run

import protrain
from benchmarks.optimizer_peaks import Lion, Make

TIGHT = 14 * MIB
MIDDLE = 28 * MIB  # all is in memory, but not twice: a part of what a step may have to put back is kept on disk
AMPLE = 1 << 30


class Counting(torch.optim.AdamW):
    """A subclass with a step of its own, which keeps a count in its groups and in itself, and draws random numbers."""

    def __init__(self, params: Any, **values: Any) -> None:
        super().__init__(params, **values)
        self.calls, self.history = 0, [0.0]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        self.history.append(self.calls / 3)
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(torch.randn_like(p.grad), alpha=1e-3 / group["seen"])
        return super().step(closure)


@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_is_decoupled_where_the_group_says_so(decoupled: bool) -> None:
    """AdamW's step is Adam's, and asks the group, which may change."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": list(model.parameters()), "decoupled_weight_decay": decoupled}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3)

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        losses = steps(inputs(2))(model, optimizer, False)
        optimizer.param_groups[0]["decoupled_weight_decay"] = not decoupled
        return [*losses, *steps(inputs(2, seed=5))(model, optimizer, False)]

    both(Chain, loop, make)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("method", ["step", "zero_grad"])
def test_methods_that_were_replaced_are_refused(kind: Any, method: str) -> None:
    """Nobody would call them. What a scheduler puts there only counts."""
    model = Chain()
    optimizer = kind(model.parameters(), lr=1e-3)
    setattr(optimizer, method, lambda *args: None)
    with pytest.raises(protrain.PlanError, match=f"optimizer: its {method} was replaced on the object"):
        protrain.wrap(model, optimizer, memory=AMPLE)
    optimizer = kind(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, _ = protrain.wrap(model, optimizer, memory=AMPLE)
    protrain.unwrap(model)
    del scheduler


def test_who_cannot_be_tried_without_data_names_a_budget_that_works() -> None:
    """Its step runs on stand-ins in memory, of which this budget may have too little; the plan is what is refused."""
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300))
    optimizer = torch.optim.Adagrad(model.parameters(), fused=True)
    with pytest.raises(protrain.BudgetError, match="the smallest budget that works") as caught:
        protrain.plan(model, torch.randn(4, 300), memory=1, optimizer=optimizer)
    protrain.plan(model, torch.randn(4, 300), memory=caught.value.smallest_bytes, optimizer=optimizer)


class Layered(torch.optim.Optimizer):
    """State of every form: nested, shared, strided, of other types, replaced and made later; values by p.data."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    mean = torch.zeros_like(p)
                    state.update(pair=[mean, {"again": mean}], turned=torch.zeros(p.shape[::-1]).t() if p.dim() == 2 else None)
                    state.update(half=torch.zeros(p.shape, dtype=torch.bfloat16), signs=torch.zeros(p.shape, dtype=torch.bool))
                    state.update(count=0, note=("text", 1.5, torch.tensor(0)))
                assert state["pair"][0] is state["pair"][1]["again"]
                state["count"] += 1
                if state["count"] == 2:
                    state["late"] = p.detach().clone()
                state["pair"][0].lerp_(p.grad, 0.1)
                state["half"].add_(p.grad)
                state["signs"].logical_xor_(p.grad > 0)
                if state["turned"] is not None:
                    state["turned"].add_(p.grad)
                    assert p.dim() < 2 or state["turned"].t().is_contiguous()
                state["note"] = ("text", state["note"][1] * 0.5, state["note"][2] + 1)
                update = state["pair"][0] + state["half"].float() * 0.1 + state["signs"].float() * 1e-2
                p.data = p.data - group["lr"] * state["note"][1] * update


def two_dimensional(model: nn.Module) -> list[nn.Parameter]:
    """What Muon takes."""
    return [p for p in model.parameters() if p.dim() == 2]


def classes() -> dict[str, Make]:
    """Every optimizer that torch has, as it is and with foreach, but for those that have a kernel or need the whole model."""
    left_out = (
        torch.optim.Optimizer,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.LBFGS,
        torch.optim.SparseAdam,
    )
    found: dict[str, Make] = {}
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name)
        if not inspect.isclass(kind) or kind in left_out:
            continue
        params = two_dimensional if name == "Muon" else nn.Module.parameters
        found[name] = lambda model, kind=kind, params=params: kind(params(model))
        if "foreach" in inspect.signature(kind).parameters:
            found[name + "-foreach"] = lambda model, kind=kind: kind(model.parameters(), foreach=True)
    return found


MADE: dict[str, Make] = {
    **classes(),
    "Lion": lambda model: Lion(model.parameters()),
    "Counting": lambda model: Counting(model.parameters(), weight_decay=0.1),
    "Counting-fused": lambda model: Counting(model.parameters(), fused=True),
    "Layered": lambda model: Layered(model.parameters()),
    "RMSprop-centered": lambda model: torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.9, weight_decay=0.1),
    "names": lambda model: torch.optim.RAdam(model.named_parameters(), lr=torch.tensor(3e-3)),
    "groups": lambda model: torch.optim.NAdam(
        [
            {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 3e-3, "betas": (0.8, 0.95)},
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
        ]
    ),
}


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


@pytest.fixture
def gpt2(causal_lm: Any) -> Any:
    """GPT-2 of 1.8 M parameters: 7.4 MB."""
    return partial(causal_lm, "gpt2", hidden=192, layers=4, positions=128)


def test_every_class_of_torch_is_tried() -> None:
    assert {"Adafactor", "Adagrad", "RMSprop", "RAdam", "NAdam", "Adamax", "ASGD", "Rprop", "Adadelta"} <= set(MADE)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_equal_to_plain_torch(name: str, budget: int, gpt2: Any, token_batches: Any) -> None:
    loop = fit(token_batches(3, length=32))
    status = assert_equal(run(gpt2, loop, MADE[name], memory=budget), run(gpt2, loop, MADE[name]), budget)
    if budget == TIGHT:
        assert status.plan.n_persist < status.plan.n_chunks
        assert status.disk_write_bytes > 0
    else:
        assert status.plan.n_persist == status.plan.n_chunks


@pytest.mark.parametrize("name", ["Lion", "Adafactor", "Counting", "groups"])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.1), (2, None), (2, 0.1)])
def test_accumulation_and_clipping(name: str, accumulate: int, clip: float | None, gpt2: Any, token_batches: Any) -> None:
    loop = fit(token_batches(2 * accumulate, length=32), accumulate, clip)
    got = run(gpt2, loop, MADE[name], memory=TIGHT, accumulate=accumulate, max_grad_norm=clip)
    assert_equal(got, run(gpt2, loop, MADE[name]), TIGHT)


def uneven(gpt2: Any) -> Any:
    """Tied embeddings, frozen blocks, parameters that are never used, one of no element and one of no dimension."""
    model = gpt2(tie_word_embeddings=True)
    for block in model.transformer.h[::2]:
        block.requires_grad_(False)
    model.spare = nn.Linear(300, 300)
    model.transformer.h[3].extra = nn.Parameter(torch.ones(1000))
    model.nothing, model.scale = nn.Parameter(torch.ones(0)), nn.Parameter(torch.tensor(2.0))
    model.transformer.register_forward_hook(lambda _module, _args, output: scaled(output, model.scale))
    return model


def scaled(output: Any, scale: torch.Tensor) -> Any:
    output.last_hidden_state = output.last_hidden_state * scale
    return output


@pytest.mark.parametrize("name", ["Adagrad", "Layered", "Lion"])
def test_frozen_unused_and_tied_parameters(name: str, gpt2: Any, token_batches: Any) -> None:
    make, loop = partial(uneven, gpt2), fit(token_batches(3, length=32))
    assert_equal(run(make, loop, MADE[name], memory=TIGHT), run(make, loop, MADE[name]), TIGHT)


def test_groups_schedules_and_hooks(gpt2: Any, token_batches: Any) -> None:
    """Values of groups are those of the moment of step(), also those that the step itself keeps there; hooks run once."""
    seen: dict[str, list[Any]] = {"plain": [], "wrapped": [], "before": []}

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.register_step_post_hook(lambda which, _args, _kwargs: calls.append(("post", len(which.param_groups))))
        calls = seen["plain" if plain else "wrapped"]
        figures = []
        for ids in token_batches(3, length=32):
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.param_groups[0]["weight_decay"] += 0.1
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            figures += [loss.item(), [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]]
        return figures

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = Counting(model.parameters())
        optimizer.register_step_pre_hook(lambda _which, _args, _kwargs: seen["before"].append("pre"))
        return optimizer

    assert_equal(run(gpt2, loop, make, memory=TIGHT), run(gpt2, loop, make), TIGHT)
    assert seen["wrapped"] == [("post", 1)] * 3
    assert len(seen["plain"]) >= 3  # where a step calls the superclass's, torch runs them in that too
    assert seen["before"].count("pre") == 3 + len(seen["plain"])


@pytest.mark.parametrize("name", ["AdamW", "Counting"])
def test_hooks_on_state_dicts(name: str, gpt2: Any, token_batches: Any) -> None:
    """Those registered before wrap and after it run once for each call, and what they return stands in its place."""
    kind: type[torch.optim.Optimizer] = Counting if name == "Counting" else torch.optim.AdamW
    calls: list[str] = []

    def watch(optimizer: torch.optim.Optimizer, when: str) -> None:
        optimizer.register_state_dict_pre_hook(lambda _which: calls.append(f"{when}: state"))
        optimizer.register_state_dict_post_hook(lambda _which, found: {**found, when: len(found["state"])})
        optimizer.register_load_state_dict_pre_hook(lambda _which, given: {k: v for k, v in given.items() if k != when})
        optimizer.register_load_state_dict_post_hook(lambda _which: calls.append(f"{when}: loaded"))

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = kind(model.parameters(), lr=1e-3)
        watch(optimizer, "before")
        return optimizer

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        calls.clear()
        watch(optimizer, "after")
        figures: list[Any] = fit(token_batches(2, length=32))(model, optimizer, plain)
        found = optimizer.state_dict()
        figures += [found["before"], found["after"], list(found)]
        optimizer.load_state_dict(found)
        figures += calls
        return figures + fit(token_batches(2, length=32, seed=5))(model, optimizer, plain)

    assert_equal(run(gpt2, loop, make, memory=TIGHT), run(gpt2, loop, make), TIGHT)


def test_state_made_before_wrap_goes_on(gpt2: Any, token_batches: Any) -> None:
    batches = token_batches(4, length=32)

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        return fit(batches[2:])(model, optimizer, True)

    def begun(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = MADE["Layered"](model)
        fit(batches[:2])(model, optimizer, True)
        return optimizer

    assert_equal(run(gpt2, loop, begun, memory=TIGHT), run(gpt2, loop, begun), TIGHT)


def test_state_by_rows_and_columns_of_a_square_parameter_goes_on() -> None:
    """Adafactor's: a row and a column, which only their place tells apart."""

    def begun(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adafactor(model)
        steps(inputs(2))(model, optimizer, True)
        return optimizer

    class Square(nn.Linear):
        def __init__(self) -> None:
            super().__init__(256, 256)

    class Squares(Chain):
        block = Square

    both(Squares, steps(inputs(2, seed=2)), begun, memory=4 * MIB)


@pytest.mark.parametrize("name", ["Lion", "Layered", "Adafactor", "groups", "ASGD"])
def test_states_hand_over_to_plain_torch_and_back(name: str, gpt2: Any, token_batches: Any) -> None:
    batches = token_batches(4, length=32)
    want = run(gpt2, fit(batches), MADE[name]).figures
    model = gpt2()
    model, optimizer = protrain.wrap(model, MADE[name](model), memory=TIGHT)
    fit(batches[:2])(model, optimizer, False)
    weights, state = model.state_dict(), optimizer.state_dict()
    fit(batches[2:3])(model, optimizer, False)  # must not reach into what was handed out
    protrain.unwrap(model)
    plain = gpt2(seed=9)
    plain_optimizer = MADE[name](plain)
    plain.load_state_dict(weights)
    plain_optimizer.load_state_dict(copy.deepcopy(state))
    if name != "Layered":  # plain torch does not know that two tensors were one
        assert fit(batches[2:])(plain, plain_optimizer, True) == want[2:]

    again = gpt2(seed=9)
    again, again_optimizer = protrain.wrap(again, MADE[name](again), memory=TIGHT)
    again.load_state_dict(weights)
    if name != "Layered":
        again_optimizer.load_state_dict(state)
        assert fit(batches[2:])(again, again_optimizer, False) == want[2:]
    with pytest.raises(ValueError, match="group"):
        again_optimizer.load_state_dict({"state": {}, "param_groups": []})
    protrain.unwrap(again)
    assert all(type(p) is nn.Parameter for p in again.parameters())


class Failing(Lion):
    """Raises in the middle of a step, when it comes to the parameter of a certain shape for the n-th time."""

    left = -1
    error: BaseException = ArithmeticError("no more")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.99
        if self.left >= 0 and any(p.grad is not None and p.shape == (192, 576) for g in self.param_groups for p in g["params"]):
            type(self).left -= 1
            if self.left < 0:
                raise type(self.error)(*self.error.args)  # a new one: what holds an error holds the memory of its frames


@pytest.mark.parametrize("budget", [TIGHT, MIDDLE, AMPLE], ids=["tight", "middle", "ample"])
@pytest.mark.parametrize("error", [ArithmeticError("no more"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_step_that_fails_in_the_middle_is_not_made(budget: int, error: BaseException, gpt2: Any, token_batches: Any) -> None:
    batches = token_batches(4, length=32)
    model = gpt2()
    plain = Failing(model.parameters())
    want = fit(batches)(model, plain, True)
    model = gpt2()
    model, optimizer = protrain.wrap(model, Failing(model.parameters()), memory=budget)
    figures = fit(batches[:2])(model, optimizer, False)
    before, state = model.state_dict(), optimizer.state_dict()
    loss_of(model, batches[2]).backward()
    written = protrain.status(model).disk_write_bytes
    Failing.left, Failing.error = 2, error  # not in the first nor in the last chunk
    kind, match = (
        (protrain.StepError, "Failing.*h.2.attn.c_attn.weight.*no more")
        if isinstance(error, Exception)
        else (KeyboardInterrupt, None)
    )
    with pytest.raises(kind, match=match):
        optimizer.step()
    assert (protrain.status(model).disk_write_bytes > written) == (budget != AMPLE)
    after = optimizer.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert repr(after) == repr(state)
    assert all(bits(v["exp_avg"]) == bits(after["state"][n]["exp_avg"]) for n, v in state["state"].items())
    optimizer.zero_grad()
    assert figures + fit(batches[2:])(model, optimizer, False) == want
    assert protrain.status(model).peak_memory_bytes <= budget
    protrain.unwrap(model)


def test_a_step_that_fails_leaves_all_gradients_clipped(gpt2: Any, token_batches: Any) -> None:
    """As plain torch does, where they are clipped before the step: made again, it clips what was clipped."""
    ids = token_batches(1, length=32)[0]
    plain = gpt2()
    optimizer: Any = Failing(plain.parameters())
    loss_of(plain, ids).backward()
    norms = [nn.utils.clip_grad_norm_(plain.parameters(), 0.5) for _ in range(2)]
    optimizer.step()
    want = optimizer.state_dict()["state"]
    model = gpt2()
    model, optimizer = protrain.wrap(model, Failing(model.parameters()), memory=AMPLE, max_grad_norm=0.5)
    loss_of(model, ids).backward()
    Failing.left, Failing.error = 2, ArithmeticError("no more")
    with pytest.raises(protrain.StepError, match="no more"):
        optimizer.step()
    optimizer.step()
    assert norms[0] > norms[1] == optimizer.grad_norm
    found = optimizer.state_dict()["state"]
    assert found.keys() == want.keys()
    assert all(bits(state["exp_avg"]) == bits(found[number]["exp_avg"]) for number, state in want.items())
    protrain.unwrap(model)


@pytest.mark.parametrize("name", ["Lion", "Layered", "Adafactor", "groups", "Counting"])
def test_save_and_load_under_another_budget(name: str, gpt2: Any, token_batches: Any, tmp_path: Any) -> None:
    batches = token_batches(5, length=32)
    torch.manual_seed(11)
    want = run(gpt2, fit(batches), MADE[name])
    model = gpt2()
    optimizer: Any = MADE[name](model)
    torch.manual_seed(11)
    model, optimizer = protrain.wrap(model, optimizer, memory=TIGHT)
    fit(batches[:3])(model, optimizer, False)
    protrain.save(model, optimizer, tmp_path / "checkpoint")
    groups = optimizer.state_dict()["param_groups"]
    protrain.unwrap(model)
    other = gpt2(seed=9)
    made: Any = MADE[name](other)
    for group in made.param_groups:
        group["lr"] = 0.5
    made.calls = 3
    other, optimizer = protrain.wrap(other, made, memory=AMPLE)
    if name == "Counting":
        made.history = [0.0, 1 / 3, 2 / 3, 1.0]
    fit(batches[:1])(other, optimizer, False)
    made.calls = 3
    protrain.load(other, optimizer, tmp_path / "checkpoint")
    assert optimizer.state_dict()["param_groups"] == groups
    assert fit(batches[3:])(other, optimizer, False) == want.figures[3:]
    assert protrain.status(other).steps == 5
    protrain.unwrap(other)
    assert not list((tmp_path / "checkpoint").glob("*.pt"))


def test_a_checkpoint_of_another_optimizer_is_refused(gpt2: Any, token_batches: Any, tmp_path: Any) -> None:
    batches = token_batches(1, length=32)
    model = gpt2()
    model, optimizer = protrain.wrap(model, MADE["Lion"](model), memory=AMPLE)
    fit(batches)(model, optimizer, False)
    protrain.save(model, optimizer, tmp_path / "lion")
    protrain.unwrap(model)
    for other in (MADE["RMSprop"], lambda m: torch.optim.AdamW(m.parameters())):
        model = gpt2(seed=1)
        model, optimizer = protrain.wrap(model, other(model), memory=AMPLE)
        before = {name: bits(value) for name, value in model.state_dict().items()}
        with pytest.raises(protrain.PlanError, match="Lion"):
            protrain.load(model, optimizer, tmp_path / "lion")
        assert before == {name: bits(value) for name, value in model.state_dict().items()}
        protrain.unwrap(model)


def test_state_that_is_no_plain_data_is_not_saved(gpt2: Any, token_batches: Any, tmp_path: Any) -> None:
    model = gpt2()
    model, optimizer = protrain.wrap(model, MADE["Lion"](model), memory=TIGHT)
    fit(token_batches(1, length=32))(model, optimizer, False)
    state = optimizer.state_dict()
    state["state"][0]["what"] = {"set": {1, 2}}
    optimizer.load_state_dict(state)
    with pytest.raises(protrain.PlanError, match=r"what\.set.* is a set"):
        protrain.save(model, optimizer, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    protrain.unwrap(model)


class NormOfAll(torch.optim.SGD):
    """Scales each update by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm() if params else 0.0
        for p in params:
            assert p.grad is not None
            p.sub_(p.grad * 1e-2 / (norm + 1e-6))


class Decaying(torch.optim.SGD):
    """Changes parameters that have no gradient too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)


class Largest(Lion):
    """Keeps the largest gradient of all parameters in its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            values = [p.grad.abs().max().item() for p in group["params"] if p.grad is not None]
            group["largest"] = max([group.get("largest", 0.0), *values])


class Noting(Lion):
    """Keeps something by each parameter in an attribute, as Kron does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.noted: dict[torch.Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.noted.update((p, p.numel()) for group in self.param_groups for p in group["params"])


class Closure(torch.optim.SGD):
    """Needs to evaluate the model."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class Lookahead(torch.optim.SGD):
    """Has another optimizer make its steps."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.fast = Lion(params)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.fast.step()


REFUSED = {
    "Lookahead": (lambda m: Lookahead(m.parameters()), "Lookahead.*fast.*optimizer.*whole model"),
    "LBFGS": (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS.*closure"),
    "SparseAdam": (lambda m: torch.optim.SparseAdam(m.parameters()), "SparseAdam.*sparse"),
    "Closure": (lambda m: Closure(m.parameters()), "Closure.*closure"),
    "NormOfAll": (lambda m: NormOfAll(m.parameters()), "NormOfAll.*depends on the others.*whole model"),
    "Decaying": (lambda m: Decaying(m.parameters()), "Decaying.*no gradient.*whole model"),
    "Largest": (lambda m: Largest(m.parameters()), "Largest.*depends on each of them.*whole model"),
    "Noting": (lambda m: Noting(m.parameters()), "Noting.*depends on each of them.*whole model"),
    "differentiable": (lambda m: torch.optim.RMSprop(m.parameters(), differentiable=True), "differentiable"),
    "differentiable Adam": (lambda m: torch.optim.Adam(m.parameters(), differentiable=True), "differentiable"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_whole_model_is_refused_by_name(name: str, gpt2: Any) -> None:
    make, match = REFUSED[name]
    model = gpt2()
    before = {key: bits(value) for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(protrain.PlanError, match=match) as caught:
        protrain.wrap(model, make(model), memory=AMPLE)
    assert "\n" not in str(caught.value)
    assert {key: bits(value) for key, value in model.state_dict().items()} == before
    assert torch.equal(torch.get_rng_state(), state)
    protrain.unwrap(protrain.wrap(model, MADE["Lion"](model), memory=AMPLE)[0])


class Numeric(Lion):
    """Leaves torch for a part of its step, so that it cannot be tried without data."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.copy_(torch.from_numpy(p.grad.numpy() * 0.5))
        super().step()


def test_a_step_that_needs_data_is_tried_with_data(gpt2: Any, token_batches: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Numeric(model.parameters())

    loop = fit(token_batches(3, length=32))
    assert_equal(run(gpt2, loop, make, memory=TIGHT), run(gpt2, loop, make), TIGHT)


class Growing(Lion):
    """From its ninth step on keeps four more copies of what it keeps: more than it showed when it was tried."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["count"] = state.get("count", 0) + 1
            if state["count"] == 9:
                state["more"] = [state["exp_avg"].clone() for _ in range(60)]


def test_what_grows_past_the_budget_is_refused_and_the_step_not_made(gpt2: Any, token_batches: Any) -> None:
    model = gpt2()
    model, optimizer = protrain.wrap(model, Growing(model.parameters()), memory=TIGHT)
    (ids,) = token_batches(1, length=32)
    fit([ids] * 8)(model, optimizer, False)
    before = {key: bits(value) for key, value in model.state_dict().items()}
    state = optimizer.state_dict()["state"]
    loss_of(model, ids).backward()
    with pytest.raises(protrain.BudgetError, match="budget"):
        optimizer.step()
    optimizer.zero_grad()
    assert {key: bits(value) for key, value in model.state_dict().items()} == before
    after = optimizer.state_dict()["state"]
    assert {n: (v["count"], bits(v["exp_avg"])) for n, v in after.items()} == {
        n: (v["count"], bits(v["exp_avg"])) for n, v in state.items()
    }
    assert protrain.status(model).peak_memory_bytes <= TIGHT
    protrain.unwrap(model)


def test_what_takes_more_than_was_tried_is_put_back_within_the_budget() -> None:
    """Decay that was off at `wrap` takes a tensor more; nothing is free for it, nor for a copy of what is put back."""

    def loop(model: Any, optimizer: Any, plain: bool) -> list[float]:
        figures = []
        for number, x in enumerate(inputs(4)):
            optimizer.param_groups[0]["weight_decay"] = 0.1 if number == 2 and not plain else 0.0
            loss = model(x)
            loss.backward()
            try:
                optimizer.step()
            except protrain.BudgetError:
                assert number == 2
                before, optimizer.param_groups[0]["weight_decay"] = loss.item(), 0.0
                optimizer.zero_grad()
                loss = model(x)
                loss.backward()
                optimizer.step()
                assert loss.item() == before
            else:
                assert plain or number != 2
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    def rmsprop(model: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), lr=1e-3)

    assert_equal(run(Chain, loop, rmsprop, memory=20 * MIB), run(Chain, loop, rmsprop), 20 * MIB)


def test_a_step_that_takes_more_than_the_first_ones_is_foreseen() -> None:
    """RAdam rectifies from its sixth step on."""

    def radam(model: Any) -> torch.optim.Optimizer:
        return torch.optim.RAdam(model.parameters(), lr=1e-3)

    assert_equal(run(Chain, steps(inputs(7)), radam, memory=20 * MIB), run(Chain, steps(inputs(7)), radam), 20 * MIB)


def test_plan_knows_the_state(gpt2: Any, token_batches: Any) -> None:
    """Twice the state, more on disk; and a plan made before is used as it is."""
    (ids,) = token_batches(1, length=32)
    model, batch = gpt2(), {"input_ids": ids, "labels": ids}
    large = protrain.plan(model, batch, memory=TIGHT, optimizer=MADE["Adadelta"](model))
    small = protrain.plan(model, batch, memory=TIGHT, optimizer=MADE["Lion"](model))
    assert small.disk_bytes < large.disk_bytes
    assert small.n_persist >= large.n_persist
    assert small.step_seconds == 0.0
    model, optimizer = protrain.wrap(model, MADE["Lion"](model), memory=TIGHT, plan=small)
    fit([ids] * 2)(model, optimizer, False)
    assert protrain.status(model).plan == small
    protrain.unwrap(model)
    found = protrain.profile(model, batch, memory=TIGHT, optimizer=MADE["Lion"](model))
    assert protrain.Profile.from_json(found.to_json()) == found


def test_meta_models(causal_lm: Any, token_batches: Any) -> None:
    def draw(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.normal_(p, float(p.dim() == 1), 0.02)

    def plain() -> Any:
        return causal_lm("llama", hidden=192, layers=4)

    def on_meta() -> Any:
        with torch.device("meta"):
            return plain()

    def plain_loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        for module in model.modules():
            draw(module)
        return fit(token_batches(2, length=32))(model, optimizer, True)

    want = run(plain, plain_loop, MADE["Lion"])
    got = run(on_meta, fit(token_batches(2, length=32)), MADE["Lion"], memory=20 * MIB, param_init_fn=draw)
    assert_equal(got, want, 20 * MIB)
    model = on_meta()
    with pytest.raises(protrain.PlanError, match=r"Adagrad.*on meta"):
        protrain.wrap(model, torch.optim.Adagrad(model.parameters()), memory=AMPLE, param_init_fn=draw)


def test_disk_is_given_back(gpt2: Any, token_batches: Any, fresh_disk: Any) -> None:
    """The file stays as large as it was after two steps, and goes with the session."""
    model = gpt2()
    model, optimizer = protrain.wrap(model, MADE["Layered"](model), memory=TIGHT, disk=fresh_disk)
    sizes = []
    for ids in token_batches(6, length=32):
        fit([ids])(model, optimizer, False)
        sizes.append(protrain.status(model).disk_bytes)
    assert len(set(sizes[3:])) == 1
    protrain.unwrap(model)
    assert not list(fresh_disk.iterdir())


@pytest.mark.parametrize("name", ["NAdam", "Adamax"])
def test_state_moves_with_its_chunk(name: str, gpt2: Any, token_batches: Any) -> None:
    """Longer batches leave memory to fewer chunks, and the states of the others go to disk with them."""
    persistent = []

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = []
        for length in (8, 64, 128):
            figures += fit(token_batches(2, length=length, seed=length))(model, optimizer, plain)
            if not plain:
                persistent.append(protrain.status(model).plan.n_persist)
        return figures

    budget = 24 * MIB
    assert_equal(run(gpt2, loop, MADE[name], memory=budget), run(gpt2, loop, MADE[name]), budget)
    assert persistent[0] > persistent[-1]


@pytest.mark.parametrize("budget", [TIGHT, 18 * MIB, MIDDLE, AMPLE])
@pytest.mark.parametrize("name", ["Adagrad", "RMSprop", "Rprop"])
def test_the_peak_of_an_update_is_foretold(name: str, budget: int, gpt2: Any, token_batches: Any) -> None:
    """Copies stay in memory as far as it goes, and a parameter in memory is updated with its own value, gradient and state."""
    model = gpt2()
    model, optimizer = protrain.wrap(model, getattr(torch.optim, name)(model.parameters()), memory=budget)
    for ids in token_batches(3):
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    status = protrain.status(model)
    protrain.unwrap(model)
    assert 0.98 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.03
    assert status.peak_memory_bytes <= budget


@pytest.mark.parametrize("name", ["Adadelta-foreach", "Adagrad", "RMSprop"])
def test_a_first_step_that_makes_the_state_is_foretold(name: str, gpt2: Any, token_batches: Any) -> None:
    """State that is still to come counted as something that the program held less, which was taken off: 22 to 34 % too little."""
    (ids,) = token_batches(1)
    model = gpt2()
    model, optimizer = protrain.wrap(model, MADE[name](model), memory=AMPLE)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    optimizer.step()
    status = protrain.status(model)
    protrain.unwrap(model)
    assert 0.98 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.02


def test_old_values_of_small_state_are_foretold() -> None:
    """They stay in memory until a step is whole; of a model of many small parameters they are as much as all its values."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(32, 32) for _ in range(24)))
    model, optimizer = protrain.wrap(model, torch.optim.Adagrad(model.parameters()), memory="16MiB")
    for _ in range(2):
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    status = protrain.status(model)
    protrain.unwrap(model)
    assert 0.97 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.05  # of half a MiB


@pytest.mark.parametrize("budget", [30 * MIB, 36 * MIB])
def test_an_update_beside_large_parameters_is_foretold(budget: int) -> None:
    """Behind backward nothing of it is left, which was counted beside the update of the largest parameter: 17 % too much."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(8192, (2, 32))
    model, optimizer = protrain.wrap(model, torch.optim.RMSprop(model.parameters()), memory=budget)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    status = protrain.status(model)
    protrain.unwrap(model)
    assert status.plan.n_persist < status.plan.n_chunks
    assert 0.98 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.03


class Words(nn.Module):
    """Large embeddings around small blocks, its loss the model's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(4096, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)])
        self.head = nn.Linear(64, 4096, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("times", [1, 2, 16], ids=["smallest", "tight", "ample"])
@pytest.mark.parametrize("name", ["Adafactor", "Adadelta-foreach", "Muon", "RMSprop"])
def test_a_plan_foretells_the_peak_of_another_optimizer(name: str, times: int) -> None:
    """It counted an update of the largest parameter beside the end of backward, as if that were away, and no copies of what is in
    memory: 0.6 to 1.4 of what was taken, and budgets were refused that are enough."""
    make, model, ids = MADE[name], Words(), torch.arange(64)
    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(model, ids, memory=MIB, optimizer=make(model))
    budget = times * refused.value.smallest_bytes
    plan = protrain.plan(model, ids, memory=budget, optimizer=make(model))
    model, optimizer = protrain.wrap(model, make(model), memory=budget)
    for _ in range(3):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak_bytes = protrain.status(model).peak_memory_bytes
    protrain.unwrap(model)
    assert peak_bytes <= budget
    found = torch.cpu.get_capabilities()
    bound = torch.cpu._is_amx_tile_supported() or found.get("avx512_fp16", False) or found.get("avx512_bf16", False)
    packs = name == "Muon" and bound  # of what these processors' kernels pack a bound is known
    assert 0.99 <= plan.peak_bytes / peak_bytes <= (1.2 if packs else 1.03)


def test_state_that_was_there_is_no_part_of_what_an_update_makes() -> None:
    """Adagrad has its state from the beginning: it is looked at for stand-ins, which copied nothing."""
    from protrain.optim.footprint import measure

    p = nn.Parameter(torch.zeros(256, 256))
    found = measure(torch.optim.Adagrad([p]), [p], "", AMPLE)
    assert found.work_bytes[0] <= 1.01 * p.nbytes, "the square roots"
    assert found.step_bytes <= 4.01 * p.nbytes


class OnlyInMemory(torch.optim.SGD):
    """Looks at values, as one with a kernel of its own."""

    def step(self, closure: Any = None) -> Any:
        assert all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        return super().step(closure)


def test_a_folder_that_cannot_be_used_is_no_fault_of_the_optimizers(tmp_path: Path) -> None:
    from protrain.optim.footprint import measure

    p = nn.Parameter(torch.zeros(256, 256))
    assert measure(OnlyInMemory([p]), [p], str(tmp_path), AMPLE).value_bytes == (p.nbytes,)
    with pytest.raises(protrain.DiskError, match="nowhere"):
        measure(OnlyInMemory([p]), [p], str(tmp_path / "nowhere"), AMPLE)


class ScheduleFree(torch.optim.Optimizer):
    """As its paper has it: it trains one set of values and evaluates another, and is told which is to be the parameters'."""

    left = -1  # calls of eval for parameters of a certain shape before one fails

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "training": False, "steps": 0})

    def train(self) -> None:
        """The values that are trained."""
        self._change(True)

    def eval(self) -> None:
        """Those that are evaluated."""
        self._change(False)

    @torch.no_grad()
    def _change(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] == training:
                continue
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - group["beta"] if training else 1 - 1 / group["beta"])
                if self.left >= 0 and p.shape == (192, 576):
                    type(self).left -= 1
                    if self.left < 0:
                        raise ArithmeticError("no more")
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call optimizer.train() first")
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], 1 / group["steps"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["steps"]) - 1))
                state["z"].sub_(p.grad, alpha=group["lr"])


def evaluated(batches: list[torch.Tensor], optimizer: Any, model: Any) -> list[float]:
    """Losses of training, and of an evaluation behind each step."""
    found = []
    for ids in batches:
        optimizer.train()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.train()  # as a Trainer does before each pass
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            found += [loss.item(), loss_of(model, ids).item()]
    return found


@pytest.mark.parametrize("budget", [TIGHT, MIDDLE, AMPLE], ids=["tight", "middle", "ample"])
def test_an_optimizer_that_evaluates_other_values_than_it_trains(budget: int, gpt2: Any, token_batches: Any) -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[float]:
        return evaluated(token_batches(3, length=32), optimizer, model)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return ScheduleFree(model.parameters())

    status = assert_equal(run(gpt2, loop, make, memory=budget), run(gpt2, loop, make), budget)
    assert status.steps == 3
    assert (status.plan.n_persist < status.plan.n_chunks) == (budget == TIGHT)


@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_going_to_evaluation_is_done_or_not_done(budget: int, gpt2: Any, token_batches: Any) -> None:
    batches = token_batches(4, length=32)
    model = gpt2()
    want = evaluated(batches, ScheduleFree(model.parameters()), model)

    model = gpt2()
    given = ScheduleFree(model.parameters())
    model, optimizer = protrain.wrap(model, given, memory=budget)
    found = evaluated(batches[:2], optimizer, model)
    optimizer.train()
    for call in (given.eval, given.train):
        with pytest.raises(protrain.StepError, match=r"given to wrap.*use the optimizer that wrap returned"):
            call()
    before, state = model.state_dict(), optimizer.state_dict()
    for _ in range(2):
        ScheduleFree.left = 2
        with pytest.raises(protrain.StepError, match=r"its own eval failed at transformer\.h\.2\.attn\.c_attn\.weight.*no more"):
            optimizer.eval()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert all(bits(one["z"]) == bits(after["state"][n]["z"]) for n, one in state["state"].items())

    loss_of(model, batches[2]).backward()
    with pytest.raises(protrain.StepError, match=r"optimizer\.eval\(\) in the middle of a step"):
        optimizer.eval()
    optimizer.zero_grad()
    loss = loss_of(model, batches[2])
    optimizer.eval()
    with pytest.raises(RuntimeError):
        loss.backward()
    del loss
    optimizer.zero_grad()
    assert found + evaluated(batches[2:], optimizer, model) == want
    protrain.unwrap(model)
    assert given.eval.__func__ is ScheduleFree.eval


def test_methods_that_a_class_does_not_have(gpt2: Any) -> None:
    for make in (MADE["Lion"], lambda model: torch.optim.AdamW(model.parameters())):
        model = gpt2()
        model, optimizer = protrain.wrap(model, make(model), memory=AMPLE)
        assert not hasattr(optimizer, "eval")
        assert not hasattr(optimizer, "train")
        protrain.unwrap(model)
