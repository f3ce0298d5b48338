"""Models that are trained in eval mode, in which from_pretrained leaves them: planned as others are; and caches of keys."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from nets import steps
from torch import nn
from twins import MIB, adamw, assert_equal, loss_of, run

import protrain

BUDGET = 14 * MIB


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


def make_model(family: str) -> nn.Module:
    """With a cache of keys where nobody says otherwise, and in eval mode."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 500}
    if family == "gpt2":
        sizes |= {"n_embd": 128, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    if family == "llama":
        sizes |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2)).eval()
    sizes |= {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, pad_token_id=0)).eval()


def make_stateful(training: bool) -> nn.Module:
    """Linear attention and full attention in turns, and experts."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"] * 2, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config).train(training)


@pytest.mark.parametrize("memory", [64 * MIB, 12 * MIB], ids=["ample", "tight"])
def test_a_plan_is_made_as_in_train_mode(memory: int, token_batches: Any) -> None:
    batches = token_batches(4, vocabulary=500)
    for training in (True, False):
        make = partial(lambda training: make_model("llama").train(training), training)
        status = assert_equal(run(make, steps(batches, loss_of), memory=memory), run(make, steps(batches, loss_of)), memory)
        assert 0.9 * status.peak_memory_bytes <= status.predicted_peak_bytes <= 1.1 * status.peak_memory_bytes
        if memory == 64 * MIB:
            assert status.plan.n_persist == status.plan.n_chunks
            assert status.plan.block_modes == ("keep",) * 4


def own_loss(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    """Of logits, outside of the model; rows are of different lengths, so that masks are made."""
    mask = torch.ones_like(ids)
    mask[0, 40:] = 0
    mask[1, :9] = 0
    logits = model(input_ids=ids, attention_mask=mask, **more).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -logits.shape[1] :].flatten())


@pytest.mark.parametrize("modes", [None, "keep", "swap", "checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize(("family", "training"), [("gpt2", False), ("llama", True), ("t5", False)])
def test_caches_of_keys_are_as_each_block_found_them(family: str, training: bool, modes: str | None, token_batches: Any) -> None:
    """A block that is recomputed would find its own keys among those before. The program that wants them gets them."""
    batches = token_batches(3, vocabulary=500)
    lengths: list[int] = []

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        more = {"decoder_input_ids": ids[:, :40].contiguous()} if family == "t5" else {}
        found = own_loss(model, ids, use_cache=True, **more)
        with torch.no_grad():
            lengths.append(model(input_ids=ids, use_cache=True, **more).past_key_values.get_seq_length())
        return found

    given = {"block_modes": [modes] * 4} if modes else {}
    make = partial(lambda: make_model(family).train(training))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is foreseen
        assert_equal(run(make, steps(batches, loss), memory=BUDGET, **given), run(make, steps(batches, loss)), BUDGET)
    assert lengths[:3] == lengths[3:]


@pytest.mark.parametrize("modes", [None, "keep", "swap", "checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("training", [True, False])
def test_models_whose_bits_hang_on_their_cache(training: bool, modes: str | None, token_batches: Any) -> None:
    """With a cache, which is on where nobody says otherwise, linear attention goes another way."""
    batches = token_batches(3, vocabulary=500)
    make = partial(make_stateful, training)
    given = {"block_modes": [modes] * 4} if modes else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is foreseen
        assert_equal(run(make, steps(batches, loss_of), memory=BUDGET, **given), run(make, steps(batches, loss_of)), BUDGET)


@pytest.mark.parametrize("training", [True, False])
def test_keys_alone_are_dropped(training: bool, token_batches: Any) -> None:
    """A model that keeps states as well has its whole cache."""
    (ids,) = token_batches(1, vocabulary=500)
    for model in (make_stateful(training), make_model("llama").train(training)):
        stateful = isinstance(model, transformers.Qwen3NextForCausalLM)
        model, _ = protrain.wrap(model, adamw(model), memory=BUDGET)
        cache = model(input_ids=ids, labels=ids).past_key_values
        assert (cache.get_seq_length(3) > 0) == stateful
        protrain.unwrap(model)


@pytest.mark.parametrize("modes", [None, "keep", "swap", "checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_keys_that_nobody_asked_for_are_dropped_and_leave_the_bits(family: str, modes: str | None) -> None:
    """Small heads and few tokens: attention over keys that a cache has put together rounds otherwise than without one."""
    torch.manual_seed(2)
    batches = [torch.randint(2, 500, (2, 40)) for _ in range(3)]
    common = {"vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=64, n_layer=4, n_head=8, **common)
    else:
        sizes = {"d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        config = transformers.T5Config(decoder_start_token_id=0, **sizes, **common)

    def make() -> Any:
        torch.manual_seed(0)
        return (transformers.GPT2LMHeadModel if family == "gpt2" else transformers.T5ForConditionalGeneration)(config).train()

    given = {"block_modes": [modes] * 4} if modes else {}
    want = run(make, steps(batches, loss_of))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is foreseen
        status = assert_equal(run(make, steps(batches, loss_of), memory=BUDGET, **given), want, BUDGET)
    assert 0.97 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.03 or modes in ("swap", "checkpoint_swap")
    without = run(make, steps(batches, lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss))
    if without.tensors == want.tensors:
        pytest.skip("attention rounds with a cache as it does without one here")
    model = make()
    model, _ = protrain.wrap(model, adamw(model), memory=BUDGET, **given)
    assert model(input_ids=batches[0], labels=batches[0]).past_key_values.get_seq_length() == 0
    protrain.unwrap(model)


@pytest.mark.parametrize("modes", ["keep", "checkpoint"])
def test_a_cache_that_the_program_gives_is_its_own(modes: str, token_batches: Any) -> None:
    """Planning runs the model without training it: keys that this makes are in no cache of the program."""
    batches = token_batches(3, vocabulary=500)
    lengths: list[int] = []

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        cache = transformers.DynamicCache(config=model.config)
        for layer in range(4):
            cache.update(torch.full((2, 2, 5, 32), 0.1), torch.full((2, 2, 5, 32), 0.2), layer)
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        lengths.append(cache.get_seq_length())
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    make = partial(lambda: make_model("llama").train())
    got = run(make, steps(batches, loss), memory=BUDGET, block_modes=[modes] * 4)
    assert_equal(got, run(make, steps(batches, loss)), BUDGET)
    assert lengths == [69] * 6
    cache = transformers.DynamicCache(config=make().config)
    protrain.plan(
        make(), {"input_ids": batches[0], "labels": batches[0], "past_key_values": cache, "use_cache": True}, memory=BUDGET
    )
    assert cache.get_seq_length() == 0


def test_evaluations_that_record_gradients_are_not_planned_for(token_batches: Any) -> None:
    """As somebody forgot to turn them off, between steps in train mode; and a backward through one says that it was training."""
    (ids,), (longer,) = token_batches(1, vocabulary=500), token_batches(1, length=128, vocabulary=500)
    model = make_model("llama").train()
    model, optimizer = protrain.wrap(model, adamw(model), memory=64 * MIB)

    def step(batch: torch.Tensor) -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(ids)
    plan = protrain.status(model).plan
    model.eval()
    loss_of(model, longer)
    assert protrain.status(model).plan == plan
    step(longer)
    assert protrain.status(model).plan == plan
    loss_of(model, longer)
    assert protrain.status(model).plan.peak_bytes > plan.peak_bytes
