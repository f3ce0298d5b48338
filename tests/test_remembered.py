"""What a dry run remembers of operations is what fake tensors give."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from protrain import _core
from protrain.dryrun import fakes, remembered
from protrain.dryrun.dryrun import dry_run
from protrain.dryrun.phases import DryRun
from protrain.model.blocks import find_blocks

transformers = pytest.importorskip("transformers")

Given = dict[str, torch.Tensor]


def gpt2() -> tuple[nn.Module, Given]:
    sizes: dict[str, Any] = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 96, "n_positions": 32}
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), {"input_ids": ids, "labels": ids}


def llama() -> tuple[nn.Module, Given]:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": torch.bfloat16}
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)), {"input_ids": ids, "labels": ids}


def t5() -> tuple[nn.Module, Given]:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    ids = torch.zeros(2, 16, dtype=torch.int64)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    return model, {"input_ids": ids, "labels": torch.zeros(2, 8, dtype=torch.int64)}


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norms = [nn.BatchNorm2d(16), nn.GroupNorm(4, 16)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), norm, nn.ReLU()) for norm in norms)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.repeat(1, 8, 1, 1)
        for block in self.blocks:
            x = x + block(x)
        first, second = nn.functional.max_pool2d(x, 2).flip(-1).chunk(2, dim=1)
        return (first * second).roll(1, -1).mean()


def images() -> tuple[nn.Module, Given]:
    given = torch.zeros(2, 2, 8, 8).to(memory_format=torch.channels_last)
    return Image().to(memory_format=torch.channels_last), {"images": given}


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.memory = nn.LSTM(16, 8, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.memory(x)[0].cumsum(1).square().mean()


def sequences() -> tuple[nn.Module, Given]:
    return Sequence(), {"x": torch.zeros(2, 6, 16)}


def run(model: nn.Module, given: Given) -> DryRun:
    chunks = {id(p): number for number, p in enumerate(model.parameters())}
    return dry_run(model, (), given, [block for _, block in find_blocks(model)], chunks, round_bytes=_core.rounded_bytes)


def described(result: Any, given: list[Any]) -> list[Any]:
    """Its tensors: how they lie, and with which of those given they share memory."""
    storages = [tensor.untyped_storage()._cdata for tensor in given]
    found: list[Any] = [type(result)]
    for leaf in tree_leaves(result):
        if not isinstance(leaf, torch.Tensor):
            found.append(leaf)
            continue
        assert type(leaf) is FakeTensor
        storage = leaf.untyped_storage()
        shared = [number for number, other in enumerate(storages) if other == storage._cdata]
        lies = tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), storage.nbytes()
        found.append((*lies, leaf.dtype, leaf.fake_device, leaf.requires_grad, leaf.constant, shared))
    return found


@pytest.mark.parametrize("make", [gpt2, llama, t5, images, sequences])
def test_what_is_remembered_is_what_fake_tensors_give(
    make: Callable[[], tuple[nn.Module, Given]], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, answered = remembered.call, 0

    def checked(operation: Any, args: Any, kwargs: Any) -> Any:
        nonlocal answered
        before = []
        with monkeypatch.context() as within:
            within.setattr(remembered, "_made", lambda *words: before.append(words) or made(*words))
            result = call(operation, args, kwargs)
        if before:
            answered += 1
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            assert described(result, given) == described(operation(*args, **kwargs), given), operation
        elif remembered._changes_first(operation):
            answered += 1
            assert result is operation(*args, **kwargs) is args[0], operation
        return result

    made, calls = remembered._made, 0
    model, given = make()

    def plain(operation: Any, args: Any, kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return operation(*args, **kwargs)

    with monkeypatch.context() as within:
        within.setattr(fakes.remembered, "call", plain)
        plainly = run(model, given)
    monkeypatch.setattr(fakes.remembered, "call", checked)
    assert run(model, given) == plainly
    assert answered > calls * 2 // 3


def test_words_of_other_types_are_other_words() -> None:
    """1, 1.0 and True are one key to a dictionary, and other tensors to torch."""
    with FakeTensorMode():
        whole = torch.empty(3, dtype=torch.int64)
        for _ in range(2):
            for word, kind in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64)):
                assert remembered.call(torch.ops.aten.add.Scalar, (whole, word), {}).dtype is kind
        torch.set_default_dtype(torch.float64)
        try:
            assert remembered.call(torch.ops.aten.add.Scalar, (whole, 1.0), {}).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_what_is_refused_is_refused_again() -> None:
    with FakeTensorMode():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="reduction dim"):
                remembered.call(torch.ops.aten.mm.default, (torch.empty(2, 3), torch.empty(4, 5)), {})


def test_results_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_results", {})
    monkeypatch.setattr(remembered, "_MOST_RESULTS", 8)
    with FakeTensorMode():
        for number in range(1, 30):
            assert remembered.call(torch.ops.aten.relu.default, (torch.empty(number),), {}).shape == (number,)
            assert len(remembered._results) <= 8


def test_a_dry_run_keeps_no_model() -> None:
    model, given = images()
    run(model, given)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
