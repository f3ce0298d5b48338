"""find_blocks on models of several kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from protrain.model.blocks import find_blocks

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}


def build(kind: str, name: str, **config: Any) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**config))


@pytest.mark.parametrize(
    ("kind", "name", "config", "expected"),
    [
        ("GPT2", "GPT2LMHeadModel", {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64}, ["transformer.h.{}"]),
        ("Llama", "LlamaForCausalLM", SMALL, ["model.layers.{}"]),
        ("OPT", "OPTForCausalLM", SMALL | {"word_embed_proj_dim": 32, "ffn_dim": 64}, ["model.decoder.layers.{}"]),
        ("Bert", "BertForMaskedLM", SMALL, ["bert.encoder.layer.{}"]),
        ("GPTNeoX", "GPTNeoXForCausalLM", SMALL, ["gpt_neox.layers.{}"]),
        (
            "T5",
            "T5ForConditionalGeneration",
            {"num_layers": 3, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "vocab_size": 64},
            ["encoder.block.{}", "decoder.block.{}"],
        ),
    ],
)
def test_transformers_layers(kind: str, name: str, config: dict[str, Any], expected: list[str]) -> None:
    model = build(kind, name, **config)
    blocks = find_blocks(model)
    assert [name for name, _ in blocks] == [pattern.format(i) for pattern in expected for i in range(3)]
    assert all(model.get_submodule(name) is block for name, block in blocks)


def test_vit_layers() -> None:
    model = build(
        "ViT",
        "ViTForImageClassification",
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    blocks = find_blocks(model)
    assert len(blocks) == 4
    assert {type(block).__name__ for _, block in blocks} == {"ViTLayer"}


def layer(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


def test_sequential_of_sequentials_gives_the_outer_ones() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), *(layer(8) for _ in range(3)), nn.Linear(8, 16))
    assert [name for name, _ in find_blocks(model)] == ["1", "2", "3"]


def test_marker_that_names_nothing_repeated_is_passed_over() -> None:
    class Marked(nn.Module):
        _no_split_modules = ("Absent",)

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer(4) for _ in range(2))

    assert [name for name, _ in find_blocks(Marked())] == ["layers.0", "layers.1"]


def test_cnn_and_models_without_repetition() -> None:
    features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU())
    cnn = nn.Sequential(features, nn.Flatten(), nn.Linear(8, 10))
    assert [name for name, _ in find_blocks(cnn)] == ["0.0", "0.3"]
    assert find_blocks(nn.Linear(2, 2)) == []
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    assert find_blocks(nn.ModuleList([nn.ReLU(), nn.ReLU()])) == []


def test_a_shared_layer_is_one_block() -> None:
    shared = layer(4)
    model = nn.ModuleList([shared, layer(4), shared])
    assert [name for name, _ in find_blocks(model)] == ["0", "1"]


def test_parametrized_layers_are_of_the_class_that_they_were_of() -> None:
    """torch gives each of them a class of its own."""
    model = nn.Sequential(*[weight_norm(nn.Linear(8, 8)) for _ in range(3)], nn.LayerNorm(8))
    assert [name for name, _ in find_blocks(model)] == ["0", "1", "2"]
