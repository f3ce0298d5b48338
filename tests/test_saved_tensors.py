"""What backward may do with the tensors that it gets from the stash, and what becomes of them when the disk fails it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import adamw, assert_equal, run

import protrain
from protrain import _core
from protrain.api import session_of

N_BLOCKS = 3
LARGE = 1 << 16
CHANGED = "modified by an inplace operation"


class Subclass(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


class ChangesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return y * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        y.mul_(3)
        return gradient * 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(64, 64), nn.Linear(64, 64)
        self.changes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.rise(x))
        z: Any = y.sin()
        if self.changes:
            z = z + ChangesWhatItSaved.apply(y)
        result: torch.Tensor = x + self.fall(z)
        return result


def make() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(N_BLOCKS)))


def data() -> torch.Tensor:
    return torch.randn(8, 256, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> Iterator[Any]:
    """All of its blocks are of mode swap."""
    made = make()
    made, _ = protrain.wrap(made, adamw(made), memory=1 << 30, block_modes=["swap"] * N_BLOCKS)
    yield made
    protrain.unwrap(made)


@pytest.fixture
def hooks(model: Any) -> Iterator[Any]:
    """(SavedTensors that stashes, the engine): in a pass, with tensors of the engine's account."""
    session = session_of(model)
    session.engine.stash_begin()
    session.engine.use_account(True)
    yield session.runner.stash, session.engine
    session.engine.stash_end()


def until_written(engine: _core.Engine) -> None:
    """Until nothing is in the stash's memory."""
    end = time.monotonic() + 30
    while engine.stats()["stash_memory_bytes"]:
        assert time.monotonic() < end
        time.sleep(0.001)


# ---- changes in place ----


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")  # the dry run's backward raises as well
def test_backward_that_changes_what_others_saved_raises(model: Any) -> None:
    for each in (make(), model):
        for block in each:
            block.changes = True
        with pytest.raises(RuntimeError, match=CHANGED):
            each(data()).sum().backward()


class ChangesForItsResult(ChangesWhatItSaved):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return y.mul_(2) * gradient


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")
@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("again", [False, True])
def test_backward_that_changes_what_was_recomputed_raises(again: bool, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another operation saved it too, or where it is asked for again."""

    def forward(self: Block, x: torch.Tensor) -> Any:
        y = self.rise(x)
        return x + self.fall(ChangesForItsResult.apply(y) if again else ChangesWhatItSaved.apply(y.tanh()))

    monkeypatch.setattr(Block, "forward", forward)
    wrapped = make()
    wrapped, _ = protrain.wrap(wrapped, adamw(wrapped), memory=1 << 30, block_modes=[mode] * N_BLOCKS, accumulate=2)
    for each in (make(), wrapped):
        loss = each(data()).sum()
        if again:
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()
    protrain.unwrap(wrapped)


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_change_in_place_is_seen_by_every_other_use(hooks: Any, from_disk: bool) -> None:
    stash, engine = hooks
    tensor = torch.randn(LARGE)
    saved, other, view = stash.pack(tensor), stash.pack(tensor), stash.pack(tensor.view(256, 256)[1:])
    assert saved.stashed
    if from_disk:
        del tensor
        until_written(engine)
    got, again = stash.unpack(saved), stash.unpack(other)
    assert got._version == 0
    got.mul_(3)
    assert again._version == 1
    for use in (saved, other, view):
        with pytest.raises(RuntimeError, match=rf"{CHANGED}.*is at version 1; expected version 0 instead"):
            stash.unpack(use)
    del got, again  # what was changed stays so
    with pytest.raises(RuntimeError, match=CHANGED):
        stash.unpack(view)


def test_a_change_in_place_is_seen_by_the_tensor_that_was_saved(hooks: Any) -> None:
    stash, _ = hooks
    tensor = torch.randn(LARGE)
    saved = stash.pack(tensor)
    stash.unpack(saved).zero_()
    assert tensor._version == 1


def test_tensors_of_one_memory_that_count_apart_have_records_of_their_own(hooks: Any) -> None:
    stash, _ = hooks
    tensor = torch.randn(LARGE)
    apart = tensor.data
    saved, other, again = stash.pack(tensor), stash.pack(apart), stash.pack(tensor[7:])
    apart.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        stash.unpack(other)
    assert (stash.unpack(saved)._version, stash.unpack(again)._version) == (0, 0)  # as autograd sees it
    del saved, other, again
    tensor.add_(1)
    saved = stash.pack(tensor)
    apart.add_(1)
    assert stash.unpack(saved)._version == 1


def test_parts_of_one_memory_that_count_apart_are_kept(hooks: Any) -> None:
    """Others of its memory change, and no counter of a part tells: what was written would be compared with what was there."""
    stash, engine = hooks
    whole = torch.randn(2, LARGE)
    part, other = torch.unsafe_chunk(whole, 2)
    del whole
    values = part.clone()
    packed = [stash.pack(each) for each in (part, part[:, 1:], part.detach(), part.expand(2, LARGE))]
    assert not any(saved.stashed for saved in packed)
    other.add_(1)
    assert stash.unpack(packed[0]).equal(values)
    stash.compiled = True  # what torch's compiler gives looks like them, and nothing of it changes
    assert stash.pack(part).stashed
    stash.compiled = False
    views = [stash.pack(each) for each in torch.randn(2, LARGE).chunk(2)]
    assert all(saved.stashed for saved in views)
    del part, other
    until_written(engine)
    for saved in views:
        stash.unpack(saved)


def test_what_the_user_made_is_kept(hooks: Any) -> None:
    """It counts in no budget, so nothing is gained where it leaves memory; and a batch may be a view of all data."""
    stash, engine = hooks
    engine.use_account(False)
    data = torch.randn(64, LARGE)
    engine.use_account(True)
    assert not stash.pack(data[3:5]).stashed
    assert stash.pack(data[3:5].clone()).stashed


class Cells(nn.Module):
    def __init__(self, kind: type[nn.Module], compiled: bool) -> None:
        super().__init__()
        self.cell, self.last = kind(512, 512), nn.Tanh()
        if compiled:
            self.last.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.last(self.cell(x)[0])
        return y


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_torchs_cells_that_change_parts_of_what_they_saved(kind: type[nn.Module], compiled: bool) -> None:
    """[3 steps, 32 rows, 512], in half of the memory that the step would take: gates of a cell are 192 KiB."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Cells(kind, compiled) for _ in range(N_BLOCKS)))

    def loop(model: Any, optimizer: torch.optim.Optimizer, plain: bool) -> list[float]:
        losses = []
        for x in torch.randn(3, 3, 32, 512, generator=torch.Generator().manual_seed(1)):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if not plain:
            assert protrain.status(model).disk_write_bytes > 0
        return losses

    with pytest.raises(protrain.BudgetError) as refused:
        protrain.plan(make(), torch.randn(3, 32, 512), memory="1MiB", block_modes=["swap"] * N_BLOCKS)
    expected = run(make, loop)
    for memory in (refused.value.smallest_bytes, 2 * refused.value.smallest_bytes):
        status = assert_equal(run(make, loop, memory=memory, block_modes=["swap"] * N_BLOCKS), expected, memory)
        if not compiled:  # whose twin is not run with hooks
            assert 0.97 <= status.predicted_peak_bytes / status.peak_memory_bytes <= 1.15  # of oneDNN's LSTM a bound is known


def test_a_leaf_is_kept_as_it_is_and_a_result_without_its_graph(hooks: Any) -> None:
    saved_tensors, _ = hooks
    leaf = torch.ones(4, requires_grad=True)
    packed = saved_tensors.pack(leaf)
    assert not packed.stashed
    assert saved_tensors.unpack(packed) is leaf
    with torch.no_grad():
        leaf.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        saved_tensors.unpack(packed)
    result = leaf.exp()
    packed = saved_tensors.pack(result)
    assert saved_tensors.unpack(packed).grad_fn is None
    assert saved_tensors.unpack(packed).equal(result)


DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex32, torch.complex64),
    *(torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int64),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_type_comes_back(hooks: Any, dtype: torch.dtype) -> None:
    stash, engine = hooks
    tensor = torch.randint(0, 2, (LARGE * 8,), dtype=torch.uint8).view(dtype).view(16, -1)
    sent = tensor.clone()
    saved = stash.pack(tensor)
    assert saved.stashed
    del tensor
    until_written(engine)
    got = stash.unpack(saved)
    assert (got.dtype, got.shape, got.stride(), got.requires_grad) == (dtype, sent.shape, sent.stride(), False)
    assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "narrow": lambda t: t[3:7, 5:],
    "expanded": lambda t: t[:, :1].expand(64, 2000),
    "channels_last": lambda t: t.view(4, 4, 16, 256).to(memory_format=torch.channels_last),
    "one": lambda t: t[9, 9],
    "empty": lambda t: t[:, 7:7],
    "empty at the end": lambda t: t[64:],
    "windows": lambda t: t.view(-1).as_strided((100, 30), (2, 1), 11),
    "conjugated": lambda t: torch.view_as_complex(t.view(64, -1, 2)).conj(),
    "negative": lambda t: torch.view_as_complex(t.view(64, -1, 2)).conj().imag,
    "copied late": torch._lazy_clone,
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("result", [False, True])
def test_any_view_comes_back(hooks: Any, kind: str, result: bool) -> None:
    stash, engine = hooks
    view = VIEWS[kind](torch.randn(64, 1024, requires_grad=True) * 1 if result else torch.randn(64, 1024))
    sent, strides, flags = view.detach().resolve_conj().resolve_neg().clone(), view.stride(), (view.is_conj(), view.is_neg())
    assert view.requires_grad == result
    saved = stash.pack(view)
    assert saved.stashed == (kind not in ("conjugated", "negative"))
    del view
    until_written(engine)
    got = stash.unpack(saved)
    assert (got.stride(), got.is_conj(), got.is_neg(), got.grad_fn) == (strides, *flags, None)
    assert torch.equal(got, sent)


def over(storage: torch.UntypedStorage, skipped: int = 0) -> torch.Tensor:
    """All that lies in a storage from an element on."""
    count = storage.nbytes() // 4 - skipped
    return torch.empty(0).set_(storage, skipped, (count,), (1,))  # type: ignore[call-overload, no-any-return]


def resized(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
    """All of its storage, which had these sizes one after the other."""
    for size in sizes:
        tensor.untyped_storage().resize_(size)
    return over(tensor.untyped_storage()).fill_(2)


def copied_late_with_its_source_gone(tensor: torch.Tensor) -> torch.Tensor:
    """The storage takes over what it shared."""
    copy = torch._lazy_clone(tensor.clone())
    gc.collect()
    return copy[5:]


# How a tensor came to its memory, and whether that is a block of the arena: who gives it back, and how, tells of it.
STORAGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "set to": (lambda t: over(t.untyped_storage(), 1000), False),  # a part of it, which nobody else tells of
    "a part": (lambda t: over(t.untyped_storage()[3 * 4096 : 40 * 4096]), True),
    "longer": (lambda t: t.resize_(2 * t.numel()).fill_(3), True),
    "shorter": (lambda t: t.resize_(t.numel() // 2), False),
    "emptied and filled": (lambda t: resized(t, 0, 1 << 20), True),
    "of an array": (lambda t: torch.from_numpy(t.numpy()[50:]), True),
    "handed through": (torch.utils.dlpack.from_dlpack, True),
    "taken over": (copied_late_with_its_source_gone, True),
    "another's": (lambda t: torch.empty(3).set_(t + 1), True),  # type: ignore[call-overload]
    "shared": (lambda t: t.share_memory_(), False),
    "shared storage": (lambda t: over(t.untyped_storage().share_memory_()), False),
    "of bytes": (lambda t: torch.frombuffer(bytearray(t.numpy().tobytes()), dtype=torch.float32), False),
    "empty": (lambda t: resized(t, 0), False),
    "short": (lambda t: t[0, :5].clone(), False),
}


@pytest.mark.parametrize("kind", STORAGES)
def test_any_storage_comes_back(hooks: Any, kind: str) -> None:
    stash, _ = hooks
    make_it, stashed = STORAGES[kind]
    tensor = make_it(torch.randn(64, 1024))
    sent, saved = tensor.clone(), stash.pack(tensor)
    assert saved.stashed == stashed
    del tensor
    others = [torch.zeros(64, 1024) for _ in range(4)]  # where it lay, if nobody has a hold on that
    assert torch.equal(stash.unpack(saved), sent)
    del others


def test_an_empty_view_is_not_of_the_memory_behind_it(hooks: Any) -> None:
    """It begins where its own tensor ends, and there another may lie, whose changes are not its."""
    stash, _ = hooks
    tensors = {tensor.data_ptr(): tensor for tensor in (torch.randn(64, 1024) for _ in range(256))}  # more than fit into holes
    pairs = [(t, tensors[place + t.nbytes]) for place, t in tensors.items() if place + t.nbytes in tensors]
    assert pairs
    for tensor, behind in pairs[:8]:
        saved_empty, saved = stash.pack(tensor[64:]), stash.pack(behind)
        tensor.add_(1)
        assert torch.equal(stash.unpack(saved), behind)
        with pytest.raises(RuntimeError, match=CHANGED):
            stash.unpack(saved_empty)


def test_what_comes_back_may_be_copied_late(hooks: Any) -> None:
    stash, engine = hooks
    tensor = torch.randn(64, 1024)
    sent, saved = tensor.clone(), stash.pack(tensor)
    del tensor
    until_written(engine)
    got = stash.unpack(saved)
    copy = torch._lazy_clone(got)
    assert torch._C._is_cow_tensor(copy)
    copy.add_(1)
    assert torch.equal(copy, sent + 1)
    assert torch.equal(got, sent)


def test_a_view_whose_base_has_a_graph_now_is_no_leaf(hooks: Any) -> None:
    """Its own is made when it is asked for first."""
    stash, _ = hooks
    base = torch.zeros(8)
    view = base[:4]
    base.mul_(torch.ones(8, requires_grad=True))
    got = stash.unpack(stash.pack(view))
    assert got.grad_fn is None
    assert got is not view
    assert view.grad_fn is not None


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda t: t.to_sparse().requires_grad_() * 1,
    "csr": lambda t: t.to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "meta": lambda t: t.to("meta"),
    "mkldnn": lambda t: t.to_mkldnn(),
    "subclass": lambda t: t.as_subclass(Subclass).requires_grad_() * 1,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", KEPT)
def test_what_does_not_lie_in_usual_memory_is_kept(hooks: Any, kind: str) -> None:
    stash, _ = hooks
    tensor = KEPT[kind](torch.eye(256))
    saved = stash.pack(tensor)
    assert not saved.stashed
    got = stash.unpack(saved)
    seen = [(type(t), t.layout, t.dtype, t.shape, t.device) for t in (got, tensor)]
    assert seen[0] == seen[1]
    assert got.grad_fn is None


def test_what_a_transform_wraps_is_kept(hooks: Any) -> None:
    stash, _ = hooks

    def of(x: torch.Tensor) -> torch.Tensor:
        saved = stash.pack(x * 2)
        assert not saved.stashed
        return (x * stash.unpack(saved)).sum()

    x = torch.randn(256, 256)
    assert torch.equal(torch.func.vmap(torch.func.grad(of))(x), x * 2)  # what comes back has no graph


def test_memory_comes_back_with_the_last_tensor_handed_out(hooks: Any) -> None:
    stash, engine = hooks
    gc.collect()
    before = engine.stats()["live_bytes"]
    tensor = torch.randn(LARGE)
    tensor_bytes = tensor.nbytes
    saved, other = stash.pack(tensor), stash.pack(tensor)
    del tensor
    until_written(engine)
    assert engine.stats()["live_bytes"] == before
    got, again = stash.unpack(saved), stash.unpack(other)
    view = got[1:]
    assert engine.stats()["live_bytes"] == before + tensor_bytes
    del got, again
    assert engine.stats()["live_bytes"] == before + tensor_bytes
    del view
    assert engine.stats()["live_bytes"] == before  # though the record lives
    got = stash.unpack(saved)
    del saved, other
    assert engine.stats()["live_bytes"] == before + tensor_bytes
    del got
    assert engine.stats()["live_bytes"] == before


def test_tensors_of_inference_mode_come_back(hooks: Any) -> None:
    stash, _ = hooks
    tensor = torch.randn(LARGE)
    saved = stash.pack(tensor)
    with torch.inference_mode():
        assert torch.equal(stash.unpack(saved), tensor)
    assert torch.equal(stash.unpack(saved), tensor)


def test_backward_in_inference_mode(model: Any) -> None:
    gradients = []
    for each in (make(), model):
        loss = each(data()).sum()
        with torch.inference_mode():
            loss.backward()
        gradients.append([parameter.grad.clone() for parameter in each.parameters()])
    assert all(torch.equal(ours, plain) for plain, ours in zip(*gradients, strict=True))


def test_threads_unpack_one_record(hooks: Any) -> None:
    stash, engine = hooks
    want = torch.randn(LARGE)
    tensor = want.clone()
    uses = [stash.pack(tensor) for _ in range(8)]
    version = tensor._version
    del tensor
    until_written(engine)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda use=use: found.append(stash.unpack(use))) for use in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(uses)
    assert all(torch.equal(got, want) and got._version == version for got in found)
    found[0].zero_()
    assert all(got._version == version + 1 for got in found)


# ---- a disk that fails ----


class Damage:
    """What lies in the store's file is not what was written, until the end."""

    def __init__(self, folder: Path) -> None:
        self.files: list[str] = []
        for name in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{name}").startswith(str(folder)):
                    self.files.append(f"/proc/self/fd/{name}")
            except OSError:  # that of the listing itself
                continue
        assert self.files
        self.before: list[bytes] = []

    def __enter__(self) -> None:
        for name in self.files:
            with open(name, "r+b", buffering=0) as file:
                self.before.append(file.read())
                file.seek(0)
                file.write(bytes(len(self.before[-1])))

    def __exit__(self, *_: object) -> None:
        for name, data in zip(self.files, self.before, strict=True):
            with open(name, "r+b", buffering=0) as file:
                file.write(data)


def test_a_use_whose_read_failed_still_waits(hooks: Any, disk: Path) -> None:
    stash, engine = hooks
    want = torch.randn(LARGE)
    tensor = want.clone()
    saved, other = stash.pack(tensor), stash.pack(tensor)
    del tensor
    until_written(engine)
    with Damage(disk), pytest.raises(protrain.DiskError):
        stash.unpack(saved)
    got = stash.unpack(saved)
    assert torch.equal(got, want)
    assert engine.stats()["stash_memory_bytes"] == want.nbytes  # the other waits
    del got
    assert torch.equal(stash.unpack(other), want)
    assert engine.stats()["stash_memory_bytes"] == 0  # nobody waits: what comes from the disk is handed over


def test_backward_after_one_whose_read_failed(model: Any, disk: Path) -> None:
    plain, x = make(), data().requires_grad_()
    (want,) = torch.autograd.grad(plain(x).sum(), x)
    engine = session_of(model).engine
    loss = model(x).sum()
    until_written(engine)
    with Damage(disk), pytest.raises(protrain.DiskError):
        torch.autograd.grad(loss, x, retain_graph=True)
    for _ in range(N_BLOCKS * 4):  # others were read ahead while it failed
        try:
            (got,) = torch.autograd.grad(loss, x, retain_graph=True)
        except protrain.DiskError:
            continue
        break
    assert torch.equal(got, want)
    assert engine.stats()["stash_memory_bytes"] == 0  # nobody waits
    del loss
    gc.collect()
    assert engine.stats()["stash_memory_bytes"] == engine.stats()["stash_disk_bytes"] == 0
