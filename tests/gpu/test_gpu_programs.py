"""On a GPU: what people train, and how: language models with dropout and in lower precision, images, norms, passes, evaluation,
checkpoints and transformers' Trainer, each bit for bit beside plain torch.

    python -m pytest tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from references import Plain, values
from test_gpu import MIB, adamw, deterministic, on_gpu  # noqa: F401 - the fixture is for all tests here
from torch import nn

import protrain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

#: Of models of some 21 M parameters, whose states are 340 MiB in fp32.
HOMES: dict[str, dict[str, Any]] = {
    "device": {"memory": 4 << 30},
    "host": {"memory": 240 * MIB, "host_memory": 4 << 30},
    "mixed": {"memory": 240 * MIB, "host_memory": 120 * MIB},
}
MODES = ["swap", "keep", "checkpoint", "checkpoint_swap"]

Loop = Callable[[Any, Any, bool], list[float]]


def fit(batches: list[torch.Tensor], accumulate: int = 1, clip: float | None = None, amp: bool = False, seed: int = 5) -> Loop:
    """The ordinary loop of a language model; a wrapped one clips by itself."""

    def loop(model: Any, trainer: Any, wrapped: bool) -> list[float]:
        torch.manual_seed(seed)
        losses = []
        for number, ids in enumerate(batches, 1):
            ids = ids.cuda()
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                loss = model(input_ids=ids, labels=ids).loss / accumulate
            loss.backward()
            losses.append(loss.item())
            if number % accumulate == 0:
                if clip is not None and not wrapped:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                trainer.step()
                trainer.zero_grad()
        return losses

    return loop


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[Any, Any]:
    with torch.device("cuda"):
        return protrain.wrap(model, optimizer, **options)


def equal(make: Callable[[], nn.Module], loop: Loop, optimizer: Any = adamw, **options: Any) -> protrain.Status:
    """Trained wrapped and plainly, the same losses, parameters and buffers."""
    made = make()
    model, trainer = wrap(made, optimizer(list(made.parameters())), **options)
    try:
        losses = loop(model, trainer, True)
        persistent, found, status = on_gpu(model), values(model), protrain.status(model)
    finally:
        protrain.unwrap(model)
    plain = Plain(make(), optimizer, persistent, options.get("precision") == "bf16")
    assert losses == loop(plain.model, plain, False)
    want = values(plain.model)
    assert [name for name in want if found[name] != want[name]] == []
    assert 0 < status.peak_memory_bytes <= options["memory"]
    return status


@pytest.fixture
def gpt2(causal_lm: Any) -> Any:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return partial(causal_lm, "gpt2", hidden=512, layers=6, heads=8, vocabulary=4096, **drops)


@pytest.fixture
def batches(token_batches: Any) -> Any:
    return partial(token_batches, batch=4, length=128, vocabulary=4096)


# ---- the bits ----


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("homes", HOMES)
def test_a_language_model_with_dropout(homes: str, precision: str, gpt2: Any, batches: Any) -> None:
    """What its blocks draw is drawn again where they are recomputed."""
    modes = [MODES[block % 4] for block in range(6)]
    equal(gpt2, fit(batches(4)), precision=precision, block_modes=modes, **HOMES[homes])


@pytest.mark.parametrize("mode", MODES)
def test_rotary_positions_and_grouped_heads(mode: str, causal_lm: Any, batches: Any) -> None:
    make = partial(causal_lm, "llama", hidden=512, layers=6, heads=8, vocabulary=4096, num_key_value_heads=2)
    equal(make, fit(batches(4)), precision="bf16", block_modes=[mode] * 6, **HOMES["host"])


@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode: str, gpt2: Any, batches: Any) -> None:
    equal(gpt2, fit(batches(4), amp=True), block_modes=[mode] * 6, memory=400 * MIB, host_memory=4 << 30)


@pytest.mark.parametrize("homes", HOMES)
def test_passes_and_norms(homes: str, gpt2: Any, batches: Any) -> None:
    equal(gpt2, fit(batches(6), 2, 0.5), accumulate=2, max_grad_norm=0.5, **HOMES[homes])


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True)


def amsgrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, amsgrad=True, weight_decay=0.01, maximize=True, fused=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [sgd, amsgrad])
def test_optimizers(optimizer: Any, precision: str, gpt2: Any, batches: Any) -> None:
    equal(gpt2, fit(batches(4)), optimizer, precision=precision, **HOMES["mixed"])


class Convolved(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.second(torch.relu(self.norm(self.first(x))))
        return y


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 256, 3, padding=1)
        self.blocks = nn.ModuleList([Convolved(256) for _ in range(8)])
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = nn.functional.cross_entropy(self.head(x.mean((2, 3))), torch.arange(len(x), device=x.device) % 10)
        return y


@pytest.mark.parametrize("memory", [220 * MIB, 1 << 30])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions(layout: torch.memory_format, memory: int) -> None:
    """Their running statistics are updated once in a step, also where a block is recomputed."""
    images = torch.randn(4, 4, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    def make() -> nn.Module:
        return Images().to(memory_format=layout)

    def loop(model: Any, trainer: Any, wrapped: bool) -> list[float]:
        losses = []
        for x in images:
            loss = model(x.cuda().to(memory_format=layout))
            loss.backward()
            trainer.step()
            trainer.zero_grad()
            losses.append(loss.item())
        return losses

    first, again = (loop(plain.model, plain, False) for plain in (Plain(make(), adamw, set()) for _ in range(2)))
    if first != again:
        pytest.skip("plain torch does not repeat itself here")
    equal(make, loop, block_modes=MODES * 2, memory=memory, host_memory=4 << 30)


# ---- what else a program does ----


def test_evaluation_between_steps(gpt2: Any, batches: Any) -> None:
    def loop(model: Any, trainer: Any, wrapped: bool) -> list[float]:
        found = fit(batches(2))(model, trainer, wrapped)
        model.eval()
        with torch.no_grad():
            found.append(model(input_ids=batches(1)[0].cuda(), labels=batches(1)[0].cuda()).loss.item())
            found += model.generate(batches(1)[0][:2, :8].cuda(), max_new_tokens=8, do_sample=False).flatten().tolist()
        model.train()
        return found + fit(batches(2, seed=3))(model, trainer, wrapped)

    equal(gpt2, loop, **HOMES["mixed"])


def test_from_a_checkpoint_it_goes_on(gpt2: Any, batches: Any, tmp_path: Path) -> None:
    """Under another budget, from what torch.save wrote."""
    with torch.random.fork_rng(devices=[0]):
        made = gpt2()
        model, trainer = wrap(made, adamw(list(made.parameters())), **HOMES["host"])
        fit(batches(2))(model, trainer, True)
        torch.save({"model": model.state_dict(), "optimizer": trainer.state_dict()}, tmp_path / "state.pt")
        homes = on_gpu(model)
        want = fit(batches(2, seed=3))(model, trainer, True), values(model)
        protrain.unwrap(model)
    made = gpt2(seed=1)
    model, trainer = wrap(made, adamw(list(made.parameters())), **HOMES["mixed"])
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    trainer.load_state_dict(state["optimizer"])
    got = fit(batches(2, seed=3))(model, trainer, True), values(model)
    same = homes == on_gpu(model)
    protrain.unwrap(model)
    assert got[0][0] == want[0][0]
    assert not same or got == want


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_smallest_budget_works(precision: str, gpt2: Any, batches: Any) -> None:
    """The one that a refusal names, and the one that protrain.plan does."""
    ids = batches(1)[0].cuda()
    made = gpt2()
    model, trainer = wrap(made, adamw(list(made.parameters())), memory=64 * MIB, host_memory=4 << 30, precision=precision)
    with pytest.raises(protrain.BudgetError) as refused:
        model(input_ids=ids, labels=ids)
    smallest = refused.value.smallest_bytes
    protrain.unwrap(model)
    made = gpt2()
    model, trainer = wrap(made, adamw(list(made.parameters())), memory=smallest, host_memory=4 << 30, precision=precision)
    fit(batches(5))(model, trainer, True)
    assert protrain.status(model).peak_memory_bytes <= smallest
    protrain.unwrap(model)


def test_an_error_in_backward_leaves_the_model(gpt2: Any, batches: Any) -> None:
    class Once(torch.autograd.Function):
        fails = False

        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if Once.fails:
                raise ValueError("as asked")
            return grad

    def make() -> nn.Module:
        model = gpt2()
        model.transformer.h[2].register_forward_hook(
            lambda _m, _a, out: Once.apply(out) if isinstance(out, torch.Tensor) else (Once.apply(out[0]), *out[1:])
        )
        return model

    def loop(model: Any, trainer: Any, wrapped: bool) -> list[float]:
        found = fit(batches(2))(model, trainer, wrapped)
        Once.fails = wrapped
        if wrapped:
            with pytest.raises(ValueError, match="as asked"):
                fit(batches(1))(model, trainer, wrapped)
            trainer.zero_grad()
        Once.fails = False
        return found + fit(batches(2, seed=3))(model, trainer, wrapped)

    equal(make, loop, block_modes=[MODES[block % 4] for block in range(6)], **HOMES["host"])


def test_the_trainer_of_transformers(causal_lm: Any, batches: Any, tmp_path: Path) -> None:
    """With all states on the GPU it is the plain one bit for bit."""
    import transformers

    from protrain.integrations.transformers import ProTrainTrainer

    rows = [{"input_ids": row, "labels": row} for ids in batches(8) for row in ids]

    def train(kind: Any, name: str, **options: Any) -> tuple[list[float], dict[str, bytes]]:
        arguments = transformers.TrainingArguments(
            str(tmp_path / name), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            optim="adamw_torch_fused", report_to=[], save_strategy="no", disable_tqdm=True, max_grad_norm=0.5,
        )  # fmt: skip
        model = causal_lm("gpt2", hidden=512, layers=6, heads=8, vocabulary=4096)
        trainer = kind(model, arguments, train_dataset=rows, **options)
        trainer.train()
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], values(trainer.model)
        if options:
            assert protrain.status(trainer.model).plan.n_persist > 0
            protrain.unwrap(trainer.model)
        return found

    plain = train(transformers.Trainer, "plain")
    assert train(ProTrainTrainer, "wrapped", protrain={"memory": "2GiB", "host_memory": "4GiB"}) == plain
    host = train(ProTrainTrainer, "host", protrain={"memory": 240 * MIB, "host_memory": "4GiB"})
    assert host[0] == pytest.approx(plain[0], rel=1e-3)
