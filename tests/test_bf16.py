"""precision="bf16", bit for bit a plain loop: bf16 parameters and gradients, torch's fused optimizer over fp32 masters."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from twins import MIB, adamw, bits, loss_of

import protrain
from protrain import _core
from protrain.model.precision import master as master_of
from protrain.state.materialise import Filler

TIGHT = 13 * MIB
AMPLE = 1 << 30


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


@pytest.fixture
def token_batches(token_batches: Any) -> Any:
    """Batches of 32 tokens, whose activations are just large enough for the stash: torch's bf16 products are a hundred times
    slower than those of fp32 where the processor has no instructions for them."""
    return partial(token_batches, length=16)


@pytest.fixture
def gpt2(causal_lm: Any) -> Any:
    """GPT-2 of 2.0 M parameters: 32 MB of parameters, gradients, masters and moments."""
    return partial(causal_lm, "gpt2", hidden=192, layers=4, use_cache=True)


class Plain:
    """The loop that bf16 is equal to. Only parameters become bf16; the norm is that of the widened gradients."""

    def __init__(self, model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.params = list(model.parameters())
        named = [(name, nn.Parameter(p.detach().float().clone(), p.requires_grad)) for name, p in model.named_parameters()]
        self.masters = [m for _, m in named]
        for p in self.params:
            p.data = p.data.bfloat16()
        holder = SimpleNamespace(parameters=lambda: self.masters, named_parameters=lambda: named)
        self.inner = optimizer(holder)
        self.param_groups = self.inner.param_groups

    def step(self, clip: float | None = None) -> float | None:
        for p, m in zip(self.params, self.masters, strict=True):
            m.grad = None if p.grad is None else p.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self.masters, clip).item() if clip else None
        self.inner.step()
        with torch.no_grad():
            for p, m in zip(self.params, self.masters, strict=True):
                p.copy_(m)
        return norm

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


class Wrapped:
    """The same, wrapped."""

    def __init__(self, model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], **options: Any) -> None:
        self.model, self.inner = protrain.wrap(model, optimizer(model), precision="bf16", **options)
        self.param_groups = self.inner.param_groups

    def step(self, clip: float | None = None) -> float | None:
        self.inner.step()
        return None if clip is None else float(self.inner.grad_norm)  # type: ignore[arg-type]

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def fit(batches: list[torch.Tensor], accumulate: int = 1, clip: float | None = None) -> Callable[[Any, Any], list[Any]]:
    """The ordinary loop; figures are losses, and norms where gradients are clipped."""

    def loop(model: Any, trainer: Any) -> list[Any]:
        figures: list[Any] = []
        for number, ids in enumerate(batches):
            loss = loss_of(model, ids)
            (loss / accumulate).backward()
            figures.append(loss.item())
            if (number + 1) % accumulate == 0:
                figures.append(trainer.step(clip))
                trainer.zero_grad()
        return figures

    return loop


def seen(model: nn.Module, trainer: Any, figures: list[Any]) -> dict[str, Any]:
    """All that a run leaves, as bytes."""
    found: dict[str, Any] = {"figures": figures, "random": bits(torch.get_rng_state())}
    for name, value in model.state_dict().items():
        found[name] = value.dtype, bits(value.view(torch.int16) if value.dtype == torch.bfloat16 else value)
    if isinstance(trainer, Wrapped):
        session = protrain.session_of(model)
        numbers = [n for n, e in enumerate(session.layout.entries) if e.group >= 0]
        found |= {f"{n}.master": bits(master_of(session.values, n)) for n in numbers}
        state = trainer.inner.state_dict()["state"]
        assert all(bits(entry.pop("master")) == found[f"{n}.master"] for n, entry in state.items())
    else:
        found |= {f"{n}.master": bits(m) for n, m in enumerate(trainer.masters) if m.requires_grad}
        state = trainer.inner.state_dict()["state"]
    for index, entries in state.items():
        if float(entries.get("step", 1)):  # torch has no state where no gradient came
            found |= {f"{index}.{key}": bits(torch.as_tensor(v).float()) for key, v in entries.items() if v is not None}
    return found


def run(make: Callable[[], Any], loop: Any, optimizer: Any = adamw, **options: Any) -> tuple[dict[str, Any], Any]:
    """Train make()'s model: wrapped where there are options, else plainly. What it left, and the status."""
    model = make()
    torch.manual_seed(11)
    trainer: Any = Wrapped(model, optimizer, **options) if options else Plain(model, optimizer)
    try:
        found = seen(model, trainer, loop(model, trainer))
        return found, protrain.status(model) if options else None
    finally:
        if options:
            protrain.unwrap(model)
            assert all(p.dtype == torch.bfloat16 and type(p) is nn.Parameter for p in model.parameters())


_plain_runs: dict[tuple[Any, ...], dict[str, Any]] = {}


def assert_equal(
    make: Callable[[], Any], loop: Any, optimizer: Any = adamw, same: tuple[Any, ...] = (), **options: Any
) -> protrain.Status:
    """The wrapped run gives what the plain one gives, inside its budget. Plain runs of the same name, if any, are one run."""
    got, status = run(make, loop, optimizer, **options)
    if same and same not in _plain_runs:
        _plain_runs[same] = run(make, loop, optimizer)[0]
    want = _plain_runs[same] if same else run(make, loop, optimizer)[0]
    assert got["figures"] == want["figures"]
    assert set(got) == set(want)
    assert [name for name in want if got[name] != want[name]] == []
    assert 0 < status.peak_memory_bytes <= options["memory"]
    found: protrain.Status = status
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_budgets(family: str, budget: int, causal_lm: Any, token_batches: Any) -> None:
    make = partial(causal_lm, family, hidden=192, layers=4)
    status = assert_equal(make, fit(token_batches(5)), same=("budgets", family), memory=budget)
    if budget == TIGHT:
        assert status.plan.n_persist < status.plan.n_chunks
        assert status.disk_read_bytes > 0
    else:
        assert status.plan.n_persist == status.plan.n_chunks


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("budget", [20 * MIB, AMPLE], ids=["tight", "ample"])
def test_block_modes_with_dropout(mode: str, budget: int, gpt2: Any, token_batches: Any) -> None:
    make = partial(gpt2, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    status = assert_equal(make, fit(token_batches(4)), same=("modes",), memory=budget, block_modes=[mode] * 4)
    assert list(status.plan.block_modes) == [mode] * 4


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_accumulation_and_clipping(accumulate: int, clip: float | None, budget: int, gpt2: Any, token_batches: Any) -> None:
    loop = fit(token_batches(3 * accumulate), accumulate, clip)
    same = "windows", accumulate, clip
    assert_equal(gpt2, loop, same=same, memory=budget, accumulate=accumulate, max_grad_norm=clip)


OPTIMIZERS = {
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True, fused=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, fused=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, gpt2: Any, token_batches: Any) -> None:
    assert_equal(gpt2, fit(token_batches(4)), OPTIMIZERS[name], memory=TIGHT)


@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_tied_frozen_unused_and_odd(budget: int, gpt2: Any, token_batches: Any) -> None:
    def make() -> Any:
        model = gpt2()
        for block in model.transformer.h[::2]:
            block.requires_grad_(False)
        model.transformer.h[1].ln_1.requires_grad_(False)  # in one chunk with others that are trained
        model.spare = nn.Linear(301, 299)
        model.transformer.h[3].extra = nn.Parameter(torch.randn(1001))
        model.nothing = nn.Parameter(torch.ones(0))
        model.scalar = nn.Parameter(torch.tensor(0.3))
        model.register_buffer("table", torch.randn(5))
        return model

    assert make().lm_head.weight is make().lm_head.weight or make().config.tie_word_embeddings
    assert_equal(make, fit(token_batches(4)), same=("odd",), memory=budget)


def test_models_that_come_as_bf16(gpt2: Any, token_batches: Any) -> None:
    for budget in (TIGHT, AMPLE):
        assert_equal(lambda: gpt2().bfloat16(), fit(token_batches(3)), same=("narrow",), memory=budget)


@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_skipped_and_late_steps(budget: int, gpt2: Any, token_batches: Any) -> None:
    """Steps that are not made leave no trace; rates that change between backward and step count."""

    def loop(model: Any, trainer: Any) -> list[Any]:
        figures = []
        for number, ids in enumerate(token_batches(6)):
            loss = loss_of(model, ids)
            loss.backward()
            figures.append(loss.item())
            for group in trainer.param_groups:
                group["lr"] = 1e-3 / (number + 1)
            if number not in (1, 4):
                trainer.step()
            trainer.zero_grad()
        return figures

    assert_equal(gpt2, loop, same=("skipped",), memory=budget)


@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_what_is_written_to_a_parameter_counts(budget: int, gpt2: Any, token_batches: Any) -> None:
    """In plain torch the masters must be told; here the parameter is enough."""

    def loop(model: Any, trainer: Any) -> list[Any]:
        figures = fit(token_batches(2))(model, trainer)
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                if number % 3 == 0:
                    before = p.detach().clone()
                    p.mul_(0.5)
                    if isinstance(trainer, Plain):
                        kept = p.view(torch.int16) == before.view(torch.int16)
                        trainer.masters[number].copy_(torch.where(kept, trainer.masters[number], p.float()))
        return figures + fit(token_batches(2, seed=5))(model, trainer)

    assert_equal(gpt2, loop, same=("written",), memory=budget)


# ---- memory ----


@pytest.mark.parametrize("mode", ["keep", "checkpoint", "swap"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_peak_is_foreseen(mode: str, family: str, causal_lm: Any, token_batches: Any) -> None:
    model = causal_lm(family, hidden=128, layers=6, vocabulary=512)
    trainer = Wrapped(model, adamw, memory=AMPLE, block_modes=[mode] * 6)
    (ids,) = token_batches(1, batch=4, length=128, vocabulary=512)
    output = model(input_ids=ids, labels=ids)  # held in backward, as is foreseen
    output.loss.backward()
    trainer.step()
    trainer.zero_grad()
    del output
    status = protrain.status(model)
    protrain.unwrap(model)
    assert status.peak_memory_bytes <= 1.001 * status.predicted_peak_bytes
    if mode != "swap":  # which works for the plan's peak, and may need less
        assert status.peak_memory_bytes >= 0.97 * status.predicted_peak_bytes


# ---- first values ----


@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_meta_model_initialised_in_order(budget: int, tied: bool, causal_lm: Any, token_batches: Any) -> None:
    """Numbers are drawn in fp32 and rounded; the masters keep what was drawn."""

    def draw(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.normal_(p, float(p.dim() == 1), 0.02)

    def drawn() -> Any:
        model = make()
        torch.manual_seed(4)
        for module in model.modules():
            draw(module)
        torch.manual_seed(11)
        return model

    def on_meta() -> Any:
        with torch.device("meta"):
            return make()

    make = partial(causal_lm, "llama", hidden=192, layers=4, tie_word_embeddings=tied)
    loop = fit(token_batches(3))
    want, _ = run(drawn, loop)
    model = on_meta()
    torch.manual_seed(4)
    trainer = Wrapped(model, adamw, memory=budget, param_init_fn=draw)
    torch.manual_seed(11)
    got = seen(model, trainer, loop(model, trainer))
    assert protrain.status(model).peak_memory_bytes <= budget
    protrain.unwrap(model)
    assert [name for name in want if got[name] != want[name]] == []


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_weights_of_a_folder(saved: torch.dtype, gpt2: Any, token_batches: Any, tmp_path: Any) -> None:
    gpt2(seed=3).to(saved).save_pretrained(tmp_path)

    def on_meta() -> Any:
        with torch.device("meta"):
            return gpt2()

    loop = fit(token_batches(3))
    want, _ = run(lambda: gpt2(seed=3).to(saved), loop)
    got, _ = run(on_meta, loop, memory=TIGHT, weights=tmp_path)
    assert [name for name in want if got[name] != want[name]] == []


# ---- states ----


@pytest.fixture
def six(gpt2: Any, token_batches: Any) -> Any:
    """Six batches, and what a plain run of them gives."""
    batches = token_batches(6)
    want, _ = run(partial(gpt2, resid_pdrop=0.1), fit(batches))
    return batches, want


def test_save_and_load_under_another_budget(gpt2: Any, six: Any, tmp_path: Path) -> None:
    batches, want = six
    make = partial(gpt2, resid_pdrop=0.1)
    model = make()
    torch.manual_seed(11)
    trainer = Wrapped(model, adamw, memory=TIGHT)
    figures = fit(batches[:3])(model, trainer)
    protrain.save(model, trainer.inner, tmp_path / "checkpoint")
    protrain.unwrap(model)
    for budget in (AMPLE, TIGHT):
        other = gpt2(seed=9, resid_pdrop=0.1)
        again = Wrapped(other, partial(adamw, lr=0.5), memory=budget)
        protrain.load(other, again.inner, tmp_path / "checkpoint")
        got = seen(other, again, figures + fit(batches[3:])(other, again))
        protrain.unwrap(other)
        assert [name for name in want if got[name] != want[name]] == []
    import transformers
    from safetensors import safe_open

    with safe_open(tmp_path / "checkpoint" / "model.safetensors", framework="pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.bfloat16"}  # noqa: SIM118 (no mapping)
    assert json.loads((tmp_path / "checkpoint" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


def test_checkpoints_change_precision(gpt2: Any, token_batches: Any, tmp_path: Path) -> None:
    """fp32 takes the masters of bf16 as its parameters, bf16 takes fp32's parameters as its masters; moments are the same."""
    model = gpt2()
    trainer = Wrapped(model, adamw, memory=TIGHT)
    fit(token_batches(2))(model, trainer)
    session = protrain.session_of(model)
    masters = [master_of(session.values, n) for n in range(len(session.params))]
    protrain.save(model, trainer.inner, tmp_path / "bf16")
    protrain.unwrap(model)
    wide: Any = gpt2(seed=5)
    wide, optimizer = protrain.wrap(wide, adamw(wide), memory=AMPLE)
    protrain.load(wide, optimizer, tmp_path / "bf16")
    assert all(torch.equal(p, m) for p, m in zip(wide.parameters(), masters, strict=True))
    protrain.save(wide, optimizer, tmp_path / "fp32")
    protrain.unwrap(wide)
    narrow = gpt2(seed=6)
    again = Wrapped(narrow, adamw, memory=TIGHT)
    protrain.load(narrow, again.inner, tmp_path / "fp32")
    session = protrain.session_of(narrow)
    assert all(torch.equal(master_of(session.values, n), m) for n, m in enumerate(masters))
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(narrow.parameters(), masters, strict=True))
    protrain.unwrap(narrow)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_state_dicts(order: str, budget: int, gpt2: Any, token_batches: Any) -> None:
    """Ours to ours and to the plain loop, and the plain loop's masters to ours."""
    batches = token_batches(6)
    want, _ = run(gpt2, fit(batches))
    model = gpt2()
    trainer = Wrapped(model, adamw, memory=TIGHT)
    fit(batches[:3])(model, trainer)
    weights, state = model.state_dict(), trainer.inner.state_dict()
    protrain.unwrap(model)

    other = gpt2(seed=9)
    again = Wrapped(other, partial(adamw, lr=0.5), memory=budget)
    if order == "model first":
        other.load_state_dict(weights)
    again.inner.load_state_dict(state)
    if order == "optimizer first":
        other.load_state_dict(weights)
    assert fit(batches[3:])(other, again) == want["figures"][6:]
    protrain.unwrap(other)

    third = gpt2(seed=9)
    plain = Plain(third, adamw)
    third.load_state_dict(weights)
    masters = [state["state"][n]["master"] for n in range(len(plain.masters))]
    with torch.no_grad():
        for m, value in zip(plain.masters, masters, strict=True):
            m.copy_(value)
    plain.inner.load_state_dict(copy.deepcopy(state))
    assert fit(batches[3:])(third, plain) == want["figures"][6:]

    fourth = gpt2(seed=9)
    last = Wrapped(fourth, adamw, memory=budget)
    names = [name for name, _ in fourth.named_parameters()]
    fourth.load_state_dict(dict(zip(names, masters, strict=True)), strict=False)  # fp32 values are masters
    without = {n: {k: v for k, v in entry.items() if k != "master"} for n, entry in state["state"].items()}
    last.inner.load_state_dict({"state": without, "param_groups": state["param_groups"]})
    assert fit(batches[3:])(fourth, last) == want["figures"][6:]
    protrain.unwrap(fourth)


def test_state_dict_before_the_first_step(gpt2: Any, token_batches: Any) -> None:
    """What rounding took from the first values is not lost either."""
    batches = token_batches(2)
    want, _ = run(gpt2, fit(batches))
    model = gpt2()
    trainer = Wrapped(model, adamw, memory=TIGHT)
    weights, state = model.state_dict(), trainer.inner.state_dict()
    protrain.unwrap(model)
    other = gpt2(seed=9)
    again = Wrapped(other, adamw, memory=TIGHT)
    other.load_state_dict(weights)
    again.inner.load_state_dict(state)
    got = seen(other, again, fit(batches)(other, again))
    protrain.unwrap(other)
    assert got["figures"] == want["figures"]
    assert [name for name in want if got[name] != want[name] and name != "random"] == []


# ---- planning and refusals ----


def test_plans_of_bf16(gpt2: Any, token_batches: Any) -> None:
    """An fp32 model is planned for as bf16, and stays what it is; its states are as large, what steps read is half as large."""
    model, (ids,) = gpt2(), token_batches(1)
    batch = {"input_ids": ids, "labels": ids}
    wide = protrain.plan(model, batch, memory=AMPLE)
    narrow = protrain.plan(model, batch, memory=AMPLE, precision="bf16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert 0 < narrow.peak_bytes < wide.peak_bytes
    trainer = Wrapped(model, adamw, memory=AMPLE)
    fit([ids])(model, trainer)
    status = protrain.status(model)
    protrain.unwrap(model)
    assert abs(status.predicted_peak_bytes / narrow.peak_bytes - 1) < 0.01


def test_plans_count_the_gradient_that_a_norm_widens(gpt2: Any, token_batches: Any) -> None:
    model, (ids,) = gpt2(), token_batches(1)
    largest = _core.rounded_bytes(4 * max(p.numel() for p in model.parameters()))
    for precision, widened in (("bf16", largest), ("fp32", 0)):
        plain, clipped = (
            protrain.profile(model, {"input_ids": ids, "labels": ids}, precision=precision, max_grad_norm=norm).run
            for norm in (None, 1.0)
        )
        assert clipped.fixed_bytes == plain.fixed_bytes + widened


def test_refusals(gpt2: Any) -> None:
    def wrap(model: Any, **options: Any) -> None:
        protrain.wrap(model, adamw(model), memory=AMPLE, **options)

    for name in ("fp16", "float16", torch.float16):
        with pytest.raises(ValueError, match=r"precision is .*16.*not supported; use 'bf16'"):
            wrap(gpt2(), precision=name)
    for other in ("BF16", "half", 16, None, torch.bfloat16):
        with pytest.raises(ValueError, match=r"precision is .*; allowed are 'fp32' and 'bf16'"):
            wrap(gpt2(), precision=other)
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(protrain.PlanError, match=f"{dtype}; only torch.float32 and torch.bfloat16 are"):
            wrap(gpt2().to(dtype), precision="bf16")
    with pytest.raises(protrain.PlanError, match="give precision='bf16'"):
        wrap(gpt2().bfloat16())
    model = gpt2()
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    with pytest.raises(protrain.PlanError, match=r"has a gradient of torch.float32; call optimizer.zero_grad"):
        wrap(model, precision="bf16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# ---- the kernels ----

CAPABILITY = torch.backends.cpu.get_cpu_capability()
SIMDS = {"AVX2": ("plain", "avx2", "auto"), "AVX512": ("plain", "avx2", "avx512", "auto")}.get(CAPABILITY, ())
EDGES = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-38, 1.00390625, 1.01171875, -1.00390625, 3.39e38, -3.4e38, 1e19, 1e-19])
NAMES = {"adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "sgd": ("momentum_buffer",)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements agree in every bit, or are NaN on both sides."""
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())


@pytest.mark.skipif(not SIMDS, reason=f"torch's reference kernels need AVX2, it runs with {CAPABILITY}")
@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "loop"])
@pytest.mark.parametrize("kind", ["adam", "adamw", "amsgrad", "sgd", "momentum"])
def test_kernels_equal_torch_over_masters(kind: str, fused: bool, special: bool) -> None:
    """torch's optimizer over the masters, then torch's rounding; ties, denormals, infinities and NaN are there."""
    generator = torch.Generator().manual_seed(3)
    values = torch.cat([EDGES, torch.tensor([float("inf"), -float("inf"), float("nan")])])

    def draw(count: int) -> torch.Tensor:
        normal = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-6, 3, (count,), generator=generator)
        picked = values[torch.randint(len(values), (count,), generator=generator)]
        return torch.where(torch.rand(count, generator=generator) < 0.3, picked, normal) if special else normal

    base = "sgd" if kind in ("sgd", "momentum") else "adamw" if kind == "adamw" else "adam"
    given = {"lr": 0.01, "weight_decay": 0.1} | {"amsgrad": {"amsgrad": True}, "momentum": {"momentum": 0.9}}.get(kind, {})
    masters = [nn.Parameter(draw(count)) for count in (*range(1, 34), 255, 1000, 4099)]
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    reference = kinds[base](masters, fused=fused, **given)
    group = reference.param_groups[0]
    hyper = {name: group[name] for name in ("lr", "weight_decay", "maximize", "fused")}
    if base == "sgd":
        hyper |= {name: group[name] for name in ("momentum", "dampening", "nesterov")}
        names = NAMES["sgd"][: int(group["momentum"] != 0)]
    else:
        hyper |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"], "amsgrad": group["amsgrad"]}
        names = NAMES["adam"][: 2 + int(group["amsgrad"])]
    copies = {
        simd: [(m.detach().clone(), m.detach().bfloat16(), [torch.zeros(m.shape) for _ in names]) for m in masters]
        for simd in SIMDS
    }
    for step in range(1, 5):
        grads = [draw(m.numel()).bfloat16() for m in masters]
        for m, grad in zip(masters, grads, strict=True):
            m.grad = grad.float() * 0.5
        reference.step()
        for simd, ours in copies.items():
            for (wide, param, state), grad, m in zip(ours, grads, masters, strict=True):
                buffers = [array.numpy() for array in state]
                narrow, given_grad = param.view(torch.int16).numpy(), grad.view(torch.int16).numpy()
                _core.update(base, hyper, step, 0.5, narrow, buffers, given_grad, simd, wide.numpy())
                assert same_bits(wide, m.detach())
                assert same_bits(param, m.detach().bfloat16())
                assert all(same_bits(array, reference.state[m][name]) for name, array in zip(names, state, strict=True))


@pytest.mark.parametrize("memory", [TIGHT, AMPLE])
def test_a_wrap_that_is_interrupted_leaves_parameters_as_they_were_given(
    memory: int, gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not rounded: the chunks that were written have masters, which kept them."""
    model = gpt2()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    enter = Filler.enter

    def interrupted(filler: Filler, number: int) -> None:
        if number == len(before) * 2 // 3:
            raise KeyboardInterrupt
        enter(filler, number)

    monkeypatch.setattr(Filler, "enter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        protrain.wrap(model, adamw(model), memory=memory, precision="bf16")
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter
        assert p.dtype == torch.float32
        assert torch.equal(p, before[name]), name
