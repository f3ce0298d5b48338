"""The rehearsal: times line up with the dry run's phases, nothing of the model changes, and memory stays small."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from nets import Starting
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import protrain
from protrain import _core
from protrain.dryrun.dryrun import dry_run
from protrain.dryrun.phases import DryRun
from protrain.model.blocks import find_blocks
from protrain.planner.profiles import Times
from protrain.profiling import rehearsal, ring
from protrain.profiling.rehearsal import RehearsalError, rehearse

transformers = pytest.importorskip("transformers")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """What is computed is too small to share."""
    torch.set_num_threads(1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, arena: _core.Engine) -> _core.Engine:
    """Counts what the rehearsal makes as well."""
    monkeypatch.setattr(rehearsal, "uncounted", contextlib.nullcontext)
    return arena


def modules_of(model: nn.Module) -> list[nn.Module]:
    return [block for _, block in find_blocks(model)]


def foresee(model: nn.Module, args: tuple[Any, ...] = (), **kwargs: Any) -> DryRun:
    chunks = {id(p): number for number, p in enumerate(model.parameters())}
    return dry_run(model, args, kwargs, modules_of(model), chunks, round_bytes=_core.rounded_bytes)


def timed(model: nn.Module, args: tuple[Any, ...] = (), memory_bytes: int | None = None, **kwargs: Any) -> tuple[DryRun, Times]:
    run = foresee(model, args, **kwargs)
    return run, rehearse(model, args, kwargs, modules_of(model), run, memory_bytes=memory_bytes)


def check(run: DryRun, times: Times) -> None:
    """A time for each phase; only backwards of blocks run something again, where what was saved needs it."""
    assert len(times.phases) == len(run.phases)
    assert times.compute_seconds > 0
    for phase, (compute, recompute) in zip(run.phases, times.phases, strict=True):
        assert compute > 0 or phase.block < 0
        assert compute >= 0
        of_block = phase.block >= 0 and phase.backward
        assert recompute > 0 if of_block and phase.again_operations > 0 else recompute == 0 or of_block


# ---- models ----


def tokens(rows: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 256, (rows, length))
    return {"input_ids": ids, "labels": ids}


def gpt2(layers: int = 6, **more: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=layers, n_embd=64, n_head=4, vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False,
        **more)).train()  # fmt: skip


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, vocab_size=256,
        use_cache=False)).train()  # fmt: skip


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        d_model=64, num_layers=7, num_heads=4, d_kv=16, d_ff=128, vocab_size=256, decoder_start_token_id=0, pad_token_id=0,
        use_cache=False)).train()  # fmt: skip


def frozen() -> nn.Module:
    """Only the upper half is trained, so the lower blocks have no backward."""
    model = gpt2(8, tie_word_embeddings=False)
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    model.transformer.h[:4].requires_grad_(False)
    return model


def few_trained() -> nn.Module:
    """One matrix in each block is trained."""
    model = gpt2(6).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_proj.weight.requires_grad_(True)
    return model


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


class Encoder(nn.Module):
    """Patches of an image, torch's own layers, a class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.zeros(1, 16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(32, 10)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return nn.functional.cross_entropy(self.head(self.layers(hidden).mean(1)), classes)


class Layer(nn.Module):
    """Its forwards are counted, over all that are alive."""

    ran = 0

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inner, self.setting = nn.Linear(width, width), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).ran += 1
        return x + torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Layers one after the other, `times` times; its own forwards are counted."""

    ran = 0

    def __init__(self, layers: list[nn.Module], times: int = 1) -> None:
        super().__init__()
        width = next(layers[0].parameters()).shape[-1]
        self.enter, self.layers, self.leave, self.times = nn.Linear(8, width), nn.ModuleList(layers), nn.Linear(width, 4), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).ran += 1
        x = self.enter(x)
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        return self.leave(x).sum()


def stack(layers: int = 10, times: int = 1) -> Stack:
    return Stack([Layer() for _ in range(layers)], times)


def layer_runs_each_pass(model: nn.Module, memory_bytes: int | None = None) -> float:
    args = (torch.randn(4, 8),)
    run = foresee(model, args)
    Layer.ran = Stack.ran = 0
    check(run, rehearse(model, args, {}, modules_of(model), run, memory_bytes=memory_bytes))
    assert Stack.ran >= 1 + rehearsal.LEAST_PASSES
    return Layer.ran / Stack.ran


# ---- phases ----


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (gpt2, tokens), (llama, tokens), (t5, tokens), (frozen, tokens), (few_trained, tokens),
        (lambda: on_meta(gpt2), tokens), (lambda: on_meta(llama), tokens), (lambda: gpt2(tie_word_embeddings=False), tokens),
        (lambda: gpt2(0), tokens), (lambda: gpt2(1), tokens),
    ],
    ids=["gpt2", "llama", "t5", "frozen", "few trained", "gpt2 on meta", "llama on meta", "untied", "no block", "one block"],
)  # fmt: skip
def test_language_models_get_a_time_for_each_phase(build: Callable[[], nn.Module], batch: Callable[[], dict[str, Any]]) -> None:
    check(*timed(build(), **batch()))


@pytest.mark.parametrize(
    ("build", "args"),
    [
        (Encoder, (torch.randn(2, 3, 32, 32), torch.tensor([1, 2]))),
        (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(7))), (torch.randn(4, 16),)),
        (lambda: nn.Sequential(*(weight_norm(nn.Linear(16, 16)) for _ in range(6))), (torch.randn(4, 16),)),
        (lambda: stack(6, times=2), (torch.randn(4, 8),)),
        (lambda: nn.Conv2d(3, 4, 3), (torch.randn(2, 3, 8, 8),)),
    ],
    ids=["encoder", "sequential", "weight norm", "used twice", "a layer"],
)  # fmt: skip
def test_other_models_get_a_time_for_each_phase(build: Callable[[], nn.Module], args: tuple[Any, ...]) -> None:
    check(*timed(build(), args))


def test_a_second_rehearsal_has_the_same_structure() -> None:
    model, batch = gpt2(), tokens()
    run = foresee(model, **batch)
    first, second = (rehearse(model, (), batch, modules_of(model), run) for _ in range(2))
    assert [again > 0 for _, again in first.phases] == [again > 0 for _, again in second.phases]


# ---- what is timed ----


class Spend(torch.autograd.Function):
    """Lets the clock of this test go on by so much in forward and in backward."""

    now_ns = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_ns: int, backward_ns: int) -> torch.Tensor:
        Spend.now_ns += forward_ns
        ctx.backward_ns = backward_ns
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Spend.now_ns += ctx.backward_ns
        return grad.clone(), None, None


class Spending(nn.Module):
    """A block of known times; `slow_ns` is no whole number, so that a block that has it is not alike."""

    def __init__(self, slow_ns: float = 0.0) -> None:
        super().__init__()
        self.inner, self.slow_ns = nn.Linear(8, 8), slow_ns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(Spend.apply(x, 1000 + int(self.slow_ns), 3000 + int(self.slow_ns)))


class Late(nn.Module):
    """A block that takes its time behind the last tensor that it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Spend.apply(self.inner(x), 1000, 3000)


class Spender(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.enter, self.layers = nn.Linear(8, 8), nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Spend.apply(self.enter(x), 100, 200)
        for layer in self.layers:
            x = Spend.apply(layer(x), 10, 30)
        return Spend.apply(x, 500, 700).sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_times_belong_to_their_phases(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the model moves: what lies between blocks counts to the one before, recomputation to no backward."""
    monkeypatch.setattr(rehearsal, "_now_ns", lambda: Spend.now_ns)
    if recompute:
        monkeypatch.setattr(rehearsal, "_needed_bytes", lambda _run, _passed_by, again: 0 if again else 1 << 60)
    model = Spender([*(Spending() for _ in range(7)), Spending(slow_ns=2000.5)])
    run, times = timed(model, (torch.randn(2, 8),))
    found = [(round(1e9 * compute), round(1e9 * again)) for compute, again in times.phases]
    forward = [(1010, 0)] * 7 + [(3000, 0)]
    # A product's result is saved by nobody, so it is not recomputed: of a block's two operations the first is, which takes all of
    # its time. Where nothing has shown that, counted operations divide the phase, with what lies behind the block in it.
    again = {7: 3000, **dict.fromkeys(range(7), 1000)}
    if not recompute:
        told = {block: found[2 * 8 + 1 - block][1] for block in range(8)}
        assert told == {7: pytest.approx(3000 / 2, rel=0.02), **dict.fromkeys(range(7), pytest.approx(1010 / 3, rel=0.02))}
        again = told
    backward = [(5000 + 30, again[7])] + [(3030, again[block]) for block in range(6, 0, -1)] + [(3000, again[0])]
    assert found == [(100, 0), *forward, (10 + 500 + 700 + 30, 0), *backward, (200, 0)]
    assert len(found) == len(run.phases)


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_that_are_compiled_are_recomputed_to_their_end(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_now_ns", lambda: Spend.now_ns)
    monkeypatch.setattr(rehearsal, "_needed_bytes", lambda _run, _passed_by, again: 0 if again else 1 << 60)
    model = Spender([Late() for _ in range(6)])
    for layer in model.layers if compiled else ():
        layer.compile(backend="eager")
    run, times = timed(model, (torch.randn(2, 8),))
    assert [round(1e9 * again) for _, again in times.phases[2 + 6 : 2 + 12]] == [1000 if compiled else 0] * 6
    assert (run.recomputed_parts()[2 + 6] == 1.0) == compiled  # the last block's, behind which nothing of its phase follows


def test_one_slow_block_is_no_measure_of_those_that_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    forward_ns = [9000, *[1000] * 7]

    class FirstIsSlow(Spending):
        number = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(Spend.apply(x, forward_ns[self.number], 3000))

    monkeypatch.setattr(rehearsal, "_now_ns", lambda: Spend.now_ns)
    blocks = [FirstIsSlow() for _ in forward_ns]
    for number, block in enumerate(blocks):
        block.number = number
    _, times = timed(Spender(blocks), (torch.randn(2, 8),))
    assert [round(1e9 * compute) for compute, _ in times.phases[1:9]] == [9010, *[1010] * 6, 1000]


@pytest.mark.parametrize(("jitter_ns", "passes"), [(0, 3), (100, 3), (9000, 13)])
def test_passes_that_differ_are_followed_by_others_for_a_while(
    jitter_ns: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unsteady(Spender):
        passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).passes += 1
            return Spend.apply(super().forward(x), type(self).passes % 3 * jitter_ns, 0)

    monkeypatch.setattr(rehearsal, "_now_ns", lambda: Spend.now_ns)
    model, args = Unsteady([Spending() for _ in range(2)]), (torch.randn(2, 8),)
    run = foresee(model, args)
    Unsteady.passes = 0
    monkeypatch.setattr(rehearsal, "MORE_SECONDS", 190e-6)  # ten passes, of 9.58 µs and 9 µs more on average
    rehearse(model, args, {}, modules_of(model), run)
    assert Unsteady.passes == 1 + passes


# ---- blocks that are alike ----


def test_of_blocks_that_are_alike_few_run() -> None:
    assert layer_runs_each_pass(stack(12)) == rehearsal.RUN_OF_ALIKE
    assert layer_runs_each_pass(stack(rehearsal.RUN_OF_ALIKE)) == rehearsal.RUN_OF_ALIKE


def test_blocks_that_differ_run() -> None:
    settings = stack(12)
    for number, layer in enumerate(settings.layers):
        layer.setting = 1.0 + number % 3
    assert layer_runs_each_pass(settings) == 12
    trained = stack(12)
    for layer in trained.layers[::3]:
        layer.inner.bias.requires_grad_(False)
    assert layer_runs_each_pass(trained) == 8  # 8 of the one kind and 4 of the other; of each kind four run
    numbered = stack(12)
    for number, layer in enumerate(numbered.layers):
        layer.number = number  # that counts the blocks makes none unlike
    assert layer_runs_each_pass(numbered) == rehearsal.RUN_OF_ALIKE


class Wider(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return {"hidden": super().forward(x)}


class Through(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Stack.ran += 1
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)["hidden"]
        return self.leave(x).sum()


def test_blocks_whose_output_is_not_made_like_their_input_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Through([Wider() for _ in range(7)])
    passes: list[tuple[int, int]] = []
    one_pass = rehearsal._Rehearsal.one_pass

    def counting(self: Any, args: Any, kwargs: Any) -> Any:
        before = Wider.ran
        found = one_pass(self, args, kwargs)
        passes.append((len(found), Wider.ran - before))
        return found

    monkeypatch.setattr(rehearsal._Rehearsal, "one_pass", counting)
    run, times = timed(model, (torch.randn(4, 8),))
    check(run, times)
    assert len(passes) >= 1 + rehearsal.LEAST_PASSES
    assert set(passes) == {(len(run.phases), 7)}


# ---- memory ----


def test_a_large_model_is_rehearsed_in_a_part_of_its_memory(counted: _core.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "cache_bytes", lambda: MIB)
    with torch.device("meta"):
        model = Stack([Layer(1024) for _ in range(24)])
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    args = (torch.randn(256, 8),)
    run = foresee(model, args)
    before = counted.stats()["live_bytes"]
    counted.mark()
    times = rehearse(model, args, {}, modules_of(model), run)
    peak = counted.mark() - before
    check(run, times)
    assert size > 96 * MIB
    assert peak < 32 * MIB
    assert counted.stats()["live_bytes"] == before
    ring_bytes = ring.Ring(model).bytes
    passed_by = list(range(rehearsal.RUN_OF_ALIKE, 24))
    assert ring_bytes <= 9 * MIB
    assert 0.8 * peak <= ring_bytes + rehearsal._needed_bytes(run, passed_by, recompute=False) <= 1.2 * peak


def test_where_activations_do_not_fit_blocks_are_recomputed(counted: _core.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "cache_bytes", lambda: 64 << 10)

    class Deep(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).ran += 1
            for _ in range(8):
                x = torch.tanh(self.inner(x))
            return x

    model, args = Stack([Deep(64) for _ in range(6)]), (torch.randn(4096, 8),)
    run = foresee(model, args)
    ring_bytes = ring.Ring(model).bytes
    kept, recomputed = (ring_bytes + rehearsal._needed_bytes(run, (4, 5), recompute) for recompute in (False, True))
    assert recomputed < kept
    for memory, needed, runs in ((kept, kept, 4), (kept - 1, recomputed, 8), (recomputed, recomputed, 8)):
        before, Deep.ran, Stack.ran = counted.stats()["live_bytes"], 0, 0
        counted.mark()
        check(run, rehearse(model, args, {}, modules_of(model), run, memory_bytes=memory))
        assert 0.7 * needed < counted.mark() - before <= needed
        assert Deep.ran == runs * Stack.ran
    with pytest.raises(RehearsalError, match="may be used"):
        rehearse(model, args, {}, modules_of(model), run, memory_bytes=recomputed - 1)


def test_a_recomputed_block_goes_on_from_what_its_forward_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins with nothing, and would go on in another way from what it left."""

    monkeypatch.setattr(ring, "cache_bytes", lambda: 64 << 10)
    model, args = Starting(), (torch.randn(4096, 64),)
    run = foresee(model, args)
    kept = ring.Ring(model).bytes + rehearsal._needed_bytes(run, (), recompute=False)
    check(run, rehearse(model, args, {}, modules_of(model), run, memory_bytes=kept - 1))


def test_no_budget_counts_it(arena: _core.Engine) -> None:
    model, args = stack(6), (torch.randn(4096, 8),)
    run = foresee(model, args)
    arena.mark()
    before = arena.stats()["live_bytes"]
    rehearse(model, args, {}, modules_of(model), run)
    assert arena.mark() - before < MIB < 4096 * 32 * 4 * 6


def test_parameters_share_a_ring_and_keep_their_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "cache_bytes", lambda: 256 << 10)
    model = Stack([Layer(256) for _ in range(20)])
    model.layers[3].inner.weight = nn.Parameter(torch.randn(256, 256).t())
    model.layers[4].inner.weight = nn.Parameter(torch.randn(256, 256).bfloat16())
    shared = ring.Ring(model)
    made = dict(shared.make())
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in made.values()}
    assert sum(storages.values()) == shared.bytes < 2 * MIB < 20 * 256 * 256 * 4
    for p in model.parameters():
        value = made[p]
        assert (value.shape, value.stride(), value.dtype) == (p.shape, p.stride(), p.dtype)
        assert value.data_ptr() % 64 == 0
        if p.dim() > 1:
            assert 0.5 <= value.float().std() * (p.shape[0] * p.shape[1]) ** 0.25 <= 2
        else:
            assert torch.equal(value, p)
    one, other = made[model.layers[0].inner.weight], made[model.layers[1].inner.weight]
    assert one.data_ptr() != other.data_ptr()
    version = other._version
    with torch.no_grad():
        one.add_(1)
    assert other._version == version


def test_a_model_smaller_than_the_ring_has_all_its_parameters() -> None:
    model = gpt2()
    shared = ring.Ring(model)
    made = dict(shared.make())
    assert len({value.data_ptr() for value in made.values()}) == len(list(model.parameters()))
    size = sum(_core.rounded_bytes(p.numel() * p.element_size()) for p in model.parameters())
    assert shared.bytes <= size


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Identity])
def test_values_stay_ordinary_numbers_in_deep_models_without_norms(activation: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), activation(), nn.Linear(256, 64), activation()) for _ in range(30)))
    with torch.no_grad():
        twin, _ = ring.make_twin(model, ring.Ring(model))
    x = torch.randn(16, 64, requires_grad=True)
    output = twin(x)
    output.backward(torch.ones_like(output))
    assert x.grad is not None
    for tensor in (output, x.grad):
        assert 1e-20 < tensor.abs().mean() < 1e20


# ---- nothing else changes ----


class Writing(nn.Module):
    """Writes to its batch, its buffer and its parameter, and draws all kinds of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, count: list[torch.Tensor]) -> torch.Tensor:
        x.add_(1)
        count[0].mul_(2)
        count.append(x)
        with torch.no_grad():
            self.layers[0].weight.mul_(1.01)
            self.norm.running_mean.add_(1)
        random.random()
        numpy.random.random()
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x)).sum()


def test_nothing_of_model_batch_and_random_states_changes() -> None:
    model = Writing()
    model.layers[0].eval()
    p = next(model.parameters())
    p.grad = torch.ones_like(p)
    called: list[int] = []
    model.layers[1].register_forward_hook(lambda *_: called.append(1))
    p.register_post_accumulate_grad_hook(lambda _: called.append(1))
    batch: tuple[Any, ...] = (torch.randn(4, 8), [torch.ones(2)])
    run = foresee(model, (batch[0].clone(), [torch.ones(2)]))
    before, state = copy.deepcopy(batch), copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    keys = [sorted(module.__dict__) for module in model.modules()]
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers(), batch[0])]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    check(run, rehearse(model, batch, {}, modules_of(model), run))
    assert not called
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert flags == [module.training for module in model.modules()]
    assert keys == [sorted(module.__dict__) for module in model.modules()]
    assert versions == [tensor._version for tensor in (*model.parameters(), *model.buffers(), batch[0])]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(p.grad, torch.ones_like(p))
    assert all(q.grad is None for q in list(model.parameters())[1:])
    assert torch.equal(batch[0], before[0])
    assert len(batch[1]) == 1
    assert torch.equal(batch[1][0], torch.ones(2))


def test_a_model_on_meta_stays_there() -> None:
    model = on_meta(llama)
    check(*timed(model, **tokens()))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


# ---- what cannot be rehearsed ----


class Deciding(Stack):
    """Takes a way by the values that it sees, where it is told to."""

    decides = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        if self.decides and x.isnan().any():
            return x.sum()
        for layer in self.layers:
            x = layer(x)
        return self.leave(x).sum()


def test_control_flow_by_values_works_and_another_way_is_an_error() -> None:
    model, args = Deciding([Layer() for _ in range(6)]), (torch.randn(4, 8),)
    run = foresee(model, args)
    model.decides = True
    check(run, rehearse(model, args, {}, modules_of(model), run))
    with pytest.raises(RehearsalError, match="another order than in the dry run, from phase 1 on"):
        rehearse(model, (torch.full((4, 8), float("nan")),), {}, modules_of(model), run)
    model.layers = nn.ModuleList(reversed(model.layers))
    with pytest.raises(RehearsalError, match="is not the one that it was in the dry run"):
        rehearse(model, args, {}, modules_of(model)[::-1], run)


@pytest.mark.parametrize(
    ("where", "name", "given"),
    [(torch, "rand", ([],)), (random, "random", ()), (random, "uniform", (0, 1)), (numpy.random, "random", ()),
     (numpy.random, "uniform", (0, 1))],
)  # fmt: skip
def test_layers_that_chance_leaves_out_run(where: Any, name: str, given: tuple[Any, ...]) -> None:
    """As they do in the dry run; what is drawn is not drawn from what the program draws next."""

    def drawn() -> Any:
        return getattr(where, name)(*given)

    class Leaving(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x)
            for layer in self.layers:
                if drawn() > 0.5:
                    x = layer(x)
            return self.leave(x).sum()

    seed_all = (torch.manual_seed, random.seed, numpy.random.seed)
    for seed in range(2):
        for put in seed_all:
            put(seed)
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        model, args = Leaving([Layer() for _ in range(3)]), (torch.ones(4, 8),)
        check(*timed(model, args))
        assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]
        for put in seed_all:
            put(seed)
        draws = [drawn() for _ in range(20)]
        assert not all(draw > 0.5 for draw in draws)


def test_a_step_of_another_way_is_planned_by_memory_alone(disk: Path) -> None:
    class Wayward(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x)
            for layer in self.layers if type(x) is not torch.Tensor else list(self.layers)[:-1]:
                x = layer(x)
            return self.leave(x).sum()

    with pytest.warns(UserWarning, match="by memory alone, and says no time: .* another order than in the dry run"):
        plan = protrain.plan(Wayward([Layer() for _ in range(3)]), torch.ones(4, 8), memory="1GiB", disk=disk)
    assert plan.step_seconds == 0
    assert plan.block_modes == ("keep",) * 3


class Failing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and self.setting == 0.0:
            raise ValueError("this layer\nalways fails")
        return super().forward(x)


def test_what_fails_is_one_line_and_leaves_no_memory(counted: _core.Engine) -> None:
    model, args = Stack([Failing() for _ in range(6)]), (torch.randn(1024, 8),)
    run = foresee(model, args)
    model.layers[2].setting = 0.0
    before = counted.stats()["live_bytes"]
    with pytest.raises(RehearsalError) as caught:
        rehearse(model, args, {}, modules_of(model), run)
    assert str(caught.value) == "the step cannot be timed by a rehearsal: ValueError: this layer"
    assert counted.stats()["live_bytes"] == before


def test_a_batch_without_values_and_a_model_without_gradients_are_errors() -> None:
    model = gpt2()
    run = foresee(model, **tokens())
    with pytest.raises(RehearsalError, match="batch: a tensor is on meta; give a batch on the CPU"):
        rehearse(model, (), {name: value.to("meta") for name, value in tokens().items()}, modules_of(model), run)
    with pytest.raises(RehearsalError, match="requires a gradient"):
        rehearse(model.requires_grad_(False), (), tokens(), modules_of(model), run)
