"""Weights that transformers saves in another form than its modules have: they are read as transformers reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter
from twins import MIB, adamw

import protrain
from protrain.integrations.weights import has_original_form

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def experts() -> Any:
    """Experts are saved one by one."""
    config = transformers.Qwen3MoeConfig(**SMALL, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=16)
    return transformers.Qwen3MoeForCausalLM(config)


def renamed() -> Any:
    """Layers are saved under other names."""
    kinds = ["linear_attention", "full_attention"]
    return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**SMALL, **LINEAR, layer_types=kinds))


def transposed() -> Any:
    """Square matrices are saved under their names, and transposed."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(autouse=True)
def _surroundings(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    look = conversion_mapping.get_checkpoint_conversion_mapping

    def mapping(kind: str) -> Any:
        if kind != "gpt2":
            return look(kind)
        return [WeightConverter("attn.c_proj.weight", "attn.c_proj.weight", operations=[Transpose(0, 1)])]

    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", mapping)


def saved(make: Callable[[], Any], folder: Path) -> dict[str, torch.Tensor]:
    """Random weights in transformers' form, and what its own loader makes of them."""
    torch.manual_seed(5)
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder)
    assert holds(again, model.state_dict())
    found: dict[str, torch.Tensor] = again.state_dict()
    return found


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def holds(model: Any, expected: dict[str, torch.Tensor]) -> bool:
    found = model.state_dict()
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("make", [experts, renamed, transposed])
def test_what_transformers_saves_is_what_it_reads(make: Callable[[], Any], tmp_path: Path) -> None:
    expected = saved(make, tmp_path)
    model, memory = on_meta(make), 4 * MIB
    model, _ = protrain.wrap(model, adamw(model), memory=memory, weights=tmp_path)
    assert holds(model, expected)
    assert protrain.status(model).peak_memory_bytes <= memory
    protrain.unwrap(model)


@pytest.mark.parametrize("make", [experts, renamed, transposed])
def test_what_protrain_saves_has_the_forms_of_the_modules(make: Callable[[], Any], tmp_path: Path) -> None:
    expected = saved(make, tmp_path / "theirs")
    model = on_meta(make)
    model, optimizer = protrain.wrap(model, adamw(model), memory=4 * MIB, weights=tmp_path / "theirs")
    assert not has_original_form(model)
    protrain.save(model, optimizer, tmp_path / "ours")
    protrain.unwrap(model)
    model = on_meta(make)
    model, _ = protrain.wrap(model, adamw(model), memory=4 * MIB, weights=tmp_path / "ours")
    assert holds(model, expected)
    protrain.unwrap(model)


def test_masters_have_what_was_saved(tmp_path: Path) -> None:
    expected = saved(experts, tmp_path)
    model = on_meta(experts)
    model, optimizer = protrain.wrap(model, adamw(model), memory=4 * MIB, precision="bf16", weights=tmp_path)
    masters = optimizer.state_dict()["state"]
    assert masters
    for number, (name, _) in enumerate(model.named_parameters()):
        assert torch.equal(masters[number]["master"], expected[name])
    protrain.unwrap(model)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(EXPERT), "gate_up_proj"),
        (lambda tensors: tensors.update({EXPERT: torch.zeros(16, 31)}), "gate_up_proj"),
        (lambda tensors: tensors.update({EXPERT: torch.zeros(16, 32, dtype=torch.int8)}), "torch.int8"),
        (lambda tensors: tensors.pop("model.norm.weight"), "has no tensor model.norm.weight"),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "0.mlp.experts" in name],
            "has no tensor model.layers.0",
        ),
    ],
    ids=["an expert less", "another shape", "integers", "another tensor less", "no experts"],
)
def test_what_lacks_something_is_refused_and_the_model_stays_as_it_was(
    change: Callable[[dict[str, torch.Tensor]], None], said: str, tmp_path: Path
) -> None:
    saved(experts, tmp_path)
    changed(tmp_path, change)
    model = on_meta(experts)
    with pytest.raises(ValueError, match=f"weights: .*{said}"):
        protrain.wrap(model, adamw(model), memory=4 * MIB, weights=tmp_path)
    assert all(p.is_meta for p in model.parameters())


def test_what_fails_for_another_reason_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(experts, tmp_path)

    def convert(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(transformers.core_model_loading.MergeModulelist, "convert", convert)
    model = on_meta(experts)
    with pytest.raises(torch.OutOfMemoryError):
        protrain.wrap(model, adamw(model), memory=4 * MIB, weights=tmp_path)
    assert all(p.is_meta for p in model.parameters())


def test_a_tensor_under_both_names_is_that_of_its_own(tmp_path: Path) -> None:
    """In a folder that has another form all the same."""
    expected = saved(experts, tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    changed(tmp_path, lambda tensors: tensors.update({name.removeprefix("model."): torch.zeros_like(tensors[name])}))
    model = on_meta(experts)
    model, _ = protrain.wrap(model, adamw(model), memory=4 * MIB, weights=tmp_path)
    assert torch.equal(model.state_dict()[name], expected[name])
    protrain.unwrap(model)


def test_what_has_no_room_is_refused(tmp_path: Path) -> None:
    """A parameter is made of what was saved within the budget."""

    def wide() -> Any:
        config = transformers.Qwen3MoeConfig(**SMALL | {"hidden_size": 128}, num_experts=64, moe_intermediate_size=128)
        return transformers.Qwen3MoeForCausalLM(config)

    expected = saved(wide, tmp_path)
    memory, refused = 1 * MIB, 0
    while True:
        model = on_meta(wide)
        try:
            model, _ = protrain.wrap(model, adamw(model), memory=memory, weights=tmp_path)
            break
        except protrain.BudgetError as error:
            refused += "does not fit the memory budget" in str(error)
            memory = error.smallest_bytes
        assert all(p.is_meta for p in model.parameters())
    assert refused > 0
    assert protrain.status(model).peak_memory_bytes <= memory
    assert holds(model, expected)
    protrain.unwrap(model)


def routed() -> Any:
    """Its routers have a buffer that is trained by hand, and saved."""
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            v_head_dim=8,
            qk_nope_head_dim=8,
        )
    )


def test_persistent_buffers_have_what_was_saved(tmp_path: Path) -> None:
    """As scores that a router adds; what a constructor makes of them would route otherwise."""
    plain = routed()
    with torch.no_grad():
        for name, buffer in plain.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(torch.arange(4.0))
    plain.save_pretrained(tmp_path)
    with torch.device("meta"):
        model: Any = routed()
    model, _ = protrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), memory="64MiB", weights=str(tmp_path))
    found = {name: value.clone() for name, value in model.state_dict().items() if "e_score_correction_bias" in name}
    protrain.unwrap(model)
    assert found
    assert all(torch.equal(value, torch.arange(4.0)) for value in found.values())
