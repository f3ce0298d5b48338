"""What kernels take beside their outputs, operation by operation: no step takes more than is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protrain import _core
from protrain.base import sizes
from protrain.base.counting import counted_alone
from protrain.dryrun import fakes, workspace
from protrain.dryrun.knownvalues import KnownValues
from protrain.dryrun.workspace import MeasuredWorkspace
from protrain.errors import DiskError, Error, OutOfMemoryError

#: How far a single operation may be off.
SMALL_BYTES = 16 << 10


@pytest.fixture
def measured(disk: Path) -> MeasuredWorkspace:
    workspace._found.clear()
    return MeasuredWorkspace(partial(counted_alone, str(disk), 1 << 40))


class Compared(TorchDispatchMode):
    """Of each operation that runs, on real tensors: what its kernel took beside its outputs, and what is told."""

    def __init__(self, arena: _core.Engine, measured: MeasuredWorkspace) -> None:
        super().__init__()
        self.arena, self.measured = arena, measured
        self.found: dict[str, tuple[int, int]] = {}  # where it is furthest off

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {tensor.untyped_storage()._cdata for tensor in tensors(args, kwargs)}
        self.arena.mark()
        held_bytes = self.arena.stats()["live_bytes"]
        result = operation(*args, **kwargs)
        taken_bytes = self.arena.mark() - held_bytes
        outputs = tensors(result)
        made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in outputs}
        taken_bytes -= sum(_core.rounded_bytes(size) for key, size in made.items() if size and key not in before)
        told_bytes = self.measured(operation, args, kwargs, outputs)
        real, told = self.found.get(str(operation), (0, 0))
        if abs(taken_bytes - told_bytes) >= abs(real - told):
            self.found[str(operation)] = taken_bytes, told_bytes
        return result


def tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def assert_told(compared: Compared, by_chance: int = 0) -> None:
    """by_chance: how much more may be told of attention's backward, as threads may meet."""
    off = {
        name: (real, told)
        for name, (real, told) in compared.found.items()
        if real > told + SMALL_BYTES or told > real + SMALL_BYTES + (by_chance if "attention" in name else 0)
    }
    assert not off, off


def images(size: int = 96) -> torch.Tensor:
    return torch.randn(4, 16, size, size, requires_grad=True)


def rows() -> torch.Tensor:
    return torch.randn(8, 128, 256, requires_grad=True)


def across() -> torch.Tensor:
    return rows().transpose(1, 2)


F = nn.functional

OPERATIONS: dict[str, Callable[[], torch.Tensor]] = {
    "nearest": lambda: F.interpolate(images(), scale_factor=2.0),
    "bilinear": lambda: F.interpolate(images(), scale_factor=2.0, mode="bilinear"),
    "bicubic, antialias": lambda: F.interpolate(images(), size=(70, 50), mode="bicubic", antialias=True),
    "roll": lambda: torch.roll(images(), (3, -2), (2, 3)),
    "unfold and fold": lambda: F.fold(F.unfold(images(), 4, stride=4), (96, 96), 4, stride=4),
    "pixel shuffle": lambda: F.pixel_shuffle(images(), 2),
    "pooling": lambda: F.adaptive_avg_pool2d(images(), 7) + F.adaptive_max_pool2d(images(), 7),
    "max pooling": lambda: F.max_pool2d(images(), 3, stride=2, padding=1),
    "reflecting": lambda: F.pad(images(), (3, 3, 3, 3), mode="reflect"),
    "grid": lambda: F.grid_sample(images(), torch.zeros(4, 64, 64, 2), align_corners=False),
    "group norm across": lambda: F.group_norm(across(), 8),
    "layer norm across": lambda: F.layer_norm(across(), (128,), torch.ones(128, requires_grad=True), torch.zeros(128)),
    "rms norm": lambda: F.rms_norm(rows(), (256,), torch.ones(256, requires_grad=True)),
    "softmax across": lambda: across().softmax(-1) + across().log_softmax(-1),
    "gelu across": lambda: F.gelu(across()),
    "squared error": lambda: F.mse_loss(rows(), torch.zeros(8, 128, 256)),
    "smooth error": lambda: F.smooth_l1_loss(rows(), torch.zeros(8, 128, 256)) + F.huber_loss(rows(), torch.zeros(8, 128, 256)),
    "cross entropy of two": lambda: F.binary_cross_entropy_with_logits(rows(), torch.ones(8, 128, 256)),
    "divergence": lambda: F.kl_div(rows().log_softmax(-1), torch.ones(8, 128, 256), reduction="batchmean"),
    "cross entropy of images": lambda: F.cross_entropy(images(), torch.zeros(4, 96, 96, dtype=torch.int64), label_smoothing=0.1),
    "other types": lambda: rows() * torch.ones(8, 128, 1, dtype=torch.bfloat16) + torch.ones(8, 128, 256, dtype=torch.int32),
    "masks": lambda: rows() * (rows() > 0) + rows().masked_fill(rows() > 1, 0.0),
    "whole numbers": lambda: rows() + (rows().detach() * 7).long().bitwise_and(3) * 2,
    "gather": lambda: rows().gather(-1, torch.zeros(8, 128, 128, dtype=torch.int64)),
    "scatter": lambda: rows().scatter_add(-1, torch.zeros(8, 128, 128, dtype=torch.int64), torch.ones(8, 128, 128)),
    "scatter, largest": lambda: rows().scatter_reduce(1, torch.zeros(8, 128, 256, dtype=torch.int64), rows(), "amax"),
    "index": lambda: rows()[:, torch.arange(64)] + rows().index_select(1, torch.arange(64)),
    "put": lambda: rows().index_put((torch.arange(8),), torch.ones(128, 256)),
    "sort": lambda: rows().sort(-1).values + rows().topk(256, -1).values,
    "median": lambda: rows().median(-1).values + rows().kthvalue(5, -1).values,
    "sums": lambda: rows().cumsum(-1) + rows().logsumexp(-1, keepdim=True) + rows().std(-1, keepdim=True),
    "sums of short numbers": lambda: rows().bfloat16().sum((0, 2)).sum() + rows().bfloat16().mean(1).sum(),
    "counts": lambda: rows() * (rows() > 0).sum(-1, keepdim=True) + (rows() > 0).cumsum(-1),
    "products": lambda: rows().cumprod(-1) + rows().prod(-1, keepdim=True),
    "distances": lambda: torch.cdist(rows(), rows()),
    "rows in batches": lambda: F.batch_norm(across(), None, None, torch.ones(256, requires_grad=True), training=True) * 2,
    "images in batches": lambda: F.batch_norm(
        images().contiguous(memory_format=torch.channels_last), None, None, torch.ones(16, requires_grad=True), training=True
    ),
    "complex products": lambda: torch.abs(torch.fft.rfft(rows()).mT.conj() @ torch.fft.rfft(rows())),
    "solutions": lambda: torch.linalg.solve(torch.eye(128) + rows()[:, :, :128] * 1e-3, rows()),
    "Fourier": lambda: torch.fft.rfft(rows()).abs() + torch.fft.irfft(torch.fft.rfft(rows()), 257)[..., :129],
    "bilinear form": lambda: F.bilinear(rows()[0], rows()[1], torch.randn(16, 256, 256, requires_grad=True)),
    "exponential": lambda: torch.linalg.matrix_exp(rows()[:, :, :128]) + torch.linalg.matrix_exp(rows()[0, :, :128]),
    "values and vectors": lambda: torch.linalg.svdvals(rows()).sum() + torch.linalg.eigh(rows()[:, :, :128])[1].sum(),
    "orthogonal": lambda: torch.linalg.qr(rows().mT)[0] * torch.linalg.householder_product(rows().mT, rows()[:, :, 0]),
    "triangles": lambda: torch.linalg.cholesky(torch.eye(128) * 9 + rows()[:, :, :128] * 1e-3) + torch.logdet(torch.eye(128) * 2),
    "inverse": lambda: torch.linalg.inv(torch.eye(128) + rows()[:, :, :128] * 1e-3),
    "repeats": lambda: rows().repeat(2, 1, 1) + rows().repeat_interleave(2, 0),
    "infinite": lambda: rows() * rows().isinf() + rows().nan_to_num(),
    "gammas": lambda: (rows().abs() + 3).mvlgamma(2),
    "embedding bag": lambda: F.embedding_bag(torch.zeros(64, 64, dtype=torch.int64), torch.randn(999, 128, requires_grad=True)),
    "strided product": lambda: rows()[..., ::2] @ rows()[:, ::2, ::2].transpose(1, 2),
    "noise": lambda: F.dropout(rows(), 0.1) + torch.randn_like(rows()) + F.rrelu(rows(), training=True),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_take_what_is_told(name: str, arena: _core.Engine, measured: MeasuredWorkspace) -> None:
    compared = Compared(arena, measured)
    with compared:
        OPERATIONS[name]().float().sum().backward()
    assert_told(compared)


@pytest.mark.parametrize("across", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("n_rows", "inner", "columns"), [(384, 1000, 48), (256, 1024, 30), (64, 4096, 30), (192, 576, 192)])
def test_products_of_short_numbers_take_no_more_than_the_table_says(
    n_rows: int, inner: int, columns: int, across: bool, arena: _core.Engine
) -> None:
    """Whatever this processor packs of them."""
    first = torch.ones(inner, n_rows, dtype=torch.bfloat16).t() if across else torch.ones(n_rows, inner, dtype=torch.bfloat16)
    second = torch.ones(columns, inner, dtype=torch.bfloat16).t() if across else torch.ones(inner, columns, dtype=torch.bfloat16)
    arena.mark()
    held_bytes = arena.stats()["live_bytes"]
    product = first @ second
    taken_bytes = arena.mark() - held_bytes - _core.rounded_bytes(product.nbytes)
    assert taken_bytes <= workspace.workspace_bytes(torch.ops.aten.mm.default, (first, second), {}, [product])


class Stored(TorchDispatchMode):
    """Of each operation that runs, on real tensors or as a dry run calls it: how its outputs lie, in how many pages of memory."""

    def __init__(self, measured: MeasuredWorkspace | None) -> None:
        super().__init__()
        self.measured = measured
        self.found: list[tuple[str, list[tuple[int, tuple[int, ...]]]]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.prim.device.default:  # of fake tensors alone
            return args[0].fake_device
        if self.measured is None:
            result = operation(*args, **(kwargs or {}))
        else:
            result = fakes.call(KnownValues(), self.measured, operation, args, kwargs or {})
        lies = [(tensor.untyped_storage().nbytes() // 4096, tensor.stride()) for tensor in tensors(result)]
        self.found.append((str(operation), [(pages, strides) for pages, strides in lies if pages > 0]))
        return result


def _stored(name: str, measured: MeasuredWorkspace | None) -> list[tuple[str, list[tuple[int, tuple[int, ...]]]]]:
    with Stored(measured) as stored:
        OPERATIONS[name]().float().sum().backward()
    return stored.found


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("noise", "inverse")])
def test_a_dry_runs_tensors_lie_as_real_ones_do(name: str, measured: MeasuredWorkspace) -> None:
    """Those of kernels that fake tensors show otherwise too. Not compared: what other parts are made of."""
    real = _stored(name, None)
    with FakeTensorMode():
        fake = _stored(name, measured)
    for one, other in zip(fake, real, strict=True):
        assert one == other


def _swin() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=112, embed_dim=24, depths=[2, 2], num_heads=[2, 4])
    return SwinForImageClassification(config), {"pixel_values": torch.randn(4, 3, 112, 112), "labels": torch.zeros(4).long()}


def _segformer() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(hidden_sizes=[32, 64, 96, 128], num_labels=10)
    batch = {"pixel_values": torch.randn(2, 3, 128, 128), "labels": torch.zeros(2, 128, 128).long()}
    return SegformerForSemanticSegmentation(config), batch


def _deberta() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        relative_attention=True, pos_att_type=["p2c", "c2p"],
    )  # fmt: skip
    return DebertaV2ForMaskedLM(config), {"input_ids": torch.zeros(2, 96).long(), "labels": torch.zeros(2, 96).long()}


@pytest.mark.parametrize("make", [_swin, _segformer, _deberta])
@pytest.mark.parametrize("short", [False, True], ids=["fp32", "autocast"])
def test_every_operation_of_a_model_takes_what_is_told(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], short: bool, arena: _core.Engine, measured: MeasuredWorkspace
) -> None:
    model, batch = make()
    with Compared(arena, measured) as compared, torch.autocast("cpu", torch.bfloat16, enabled=short):
        loss = model(**batch).loss
        loss.backward()
    assert_told(compared, by_chance=1 << 20)


def test_torchs_own_encoder_takes_what_is_told(arena: _core.Engine, measured: MeasuredWorkspace) -> None:
    """In eval mode it is one operation, for a whole layer."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2, enable_nested_tensor=False)
    with torch.no_grad(), Compared(arena, measured) as compared:
        model.train(False)(torch.randn(4, 128, 128))
    assert compared.found["aten._transformer_encoder_layer_fwd.default"][0] > 256 << 10
    assert_told(compared)


def test_what_fails_on_zeros_takes_no_more_than_its_inputs_and_outputs(disk: Path) -> None:
    measured = MeasuredWorkspace(partial(counted_alone, str(disk), 1 << 40))
    x = torch.eye(256)
    output = torch.linalg.cholesky(x)
    told = measured(torch.ops.aten.cholesky.default, (x,), {}, [output])
    assert told == 2 * x.nbytes
    assert not measured.take_missed(), "more memory would not help"


def test_an_operation_of_another_library_is_not_run(disk: Path) -> None:
    ran = []

    def operation(x: torch.Tensor) -> torch.Tensor:
        ran.append(x)
        return x.clone()

    library = torch.library.Library("protrain_test", "FRAGMENT")
    try:
        library.define("own(Tensor x) -> Tensor")
        library.impl("own", operation, "CPU")
        measured = MeasuredWorkspace(partial(counted_alone, str(disk), 1 << 40))
        x = torch.zeros(1 << 20)
        assert measured(torch.ops.protrain_test.own.default, (x,), {}, [x]) == 0
        assert not ran
    finally:
        library._destroy()


@pytest.mark.parametrize("kind", [DiskError, OutOfMemoryError])
def test_what_had_no_memory_is_measured_another_time(
    kind: type[Error], measured: MeasuredWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever memory was refused with: it says nothing of the operation, and is no reason to try it on other numbers."""
    asked: list[Any] = []

    def refuse(*_: Any) -> None:
        asked.append(None)
        raise kind("write of 4096 bytes failed")

    given = [torch.empty(64, 64, device="meta")] * 2
    with monkeypatch.context() as patch:
        patch.setattr(MeasuredWorkspace, "_measure", refuse)
        assert measured.kept_bytes(torch.ops.aten.mm.default, given, {}) is None
    assert measured.take_missed()
    assert not measured.take_missed()
    assert len(asked) == 1
    assert measured.kept_bytes(torch.ops.aten.mm.default, given, {}) == 64 * 64 * 4


def test_a_kernel_is_not_measured_far_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was refused 4 MiB for a batch of gigabytes had them taken first."""
    monkeypatch.setattr(sizes, "default_memory_bytes", lambda: 64 << 30)
    assert sizes.measuring_bytes(4 << 20) == 1 << 30
    assert sizes.measuring_bytes(1 << 30) == 4 << 30
    monkeypatch.setattr(sizes, "default_memory_bytes", lambda: 2 << 30)
    assert sizes.measuring_bytes(1 << 30) == 2 << 30
