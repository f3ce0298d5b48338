"""Files of checkpoints: shards of ours and of other tools, read tensor by tensor without being mapped, whole or refused."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import struct
import weakref
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from nets import TIGHT, Chain, inputs, steps
from twins import MIB, adamw, assert_equal, bits, fit, run

import protrain
from protrain import _core, checkpoint
from protrain.base.replacing import replaced
from protrain.runtime.loads import Loads
from protrain.runtime.residency import Residency
from protrain.state import materialise, tensorfiles, torchfiles
from protrain.state.tensorfiles import Entry, TensorFile, write_tensors
from protrain.state.values import Values


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


def state_of(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: bits(value) for name, value in model.state_dict().items()}


def test_weights_in_shards_of_another_tool(
    causal_lm: Any, token_batches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index and several files; at most a slice of one tensor is in memory at a time."""
    make = partial(causal_lm, "gpt2", hidden=192, layers=8, vocabulary=4000)
    make(seed=3).save_pretrained(tmp_path, max_shard_size="2MB")
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > 90
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    read, sizes = TensorFile.read, []

    def noted(file: TensorFile, *args: Any) -> torch.Tensor:
        found = read(file, *args)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(TensorFile, "read", noted)
    monkeypatch.setattr(materialise, "SLICE_BYTES", MIB)

    def on_meta() -> Any:
        with torch.device("meta"):
            return make()

    want = run(partial(make, seed=3), fit(token_batches(3)))
    assert_equal(run(on_meta, fit(token_batches(3)), memory=40 * MIB, weights=tmp_path), want, 40 * MIB)
    assert max(sizes) <= MIB
    assert sum(sizes) == sum(p.nbytes for p in make().parameters())


def trained(memory: int) -> Any:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    steps(inputs(3))(model, optimizer, False)
    return model, optimizer


def test_a_checkpoint_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tools and our own load find the tensors by the index; training goes on as if it had not stopped."""
    from safetensors.torch import load_file

    folder = tmp_path / "checkpoint"
    monkeypatch.setattr(checkpoint, "write_tensors", partial(write_tensors, shard_bytes=2 * MIB))
    model, optimizer = trained(TIGHT)
    protrain.save(model, optimizer, folder)
    want = steps(inputs(2, seed=4))(model, optimizer, False), state_of(model)
    protrain.unwrap(model)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(set(index.values()))
    assert len(files) > 4
    assert all((folder / name).stat().st_size <= 2 * MIB + 8192 for name in files)
    loaded = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert set(loaded) == set(index)
    plain = Chain()
    plain.load_state_dict(loaded)
    other: Any = Chain()
    other, optimizer = protrain.wrap(other, adamw(other, lr=0.5), memory=TIGHT + 4 * MIB)
    protrain.load(other, optimizer, folder)
    assert (steps(inputs(2, seed=4))(other, optimizer, False), state_of(other)) == want
    protrain.unwrap(other)


def test_loading_maps_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a mapped file count as the process's memory, those of all tensors read so far."""
    model, optimizer = trained(TIGHT)
    protrain.save(model, optimizer, tmp_path / "checkpoint")
    mapped: list[str] = []
    put = Values.put

    def looking(values: Values, *args: Any) -> None:
        mapped.extend(line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line)
        put(values, *args)

    monkeypatch.setattr(Values, "put", looking)
    before = state_of(model)
    steps(inputs(1, seed=8))(model, optimizer, False)
    protrain.load(model, optimizer, tmp_path / "checkpoint")
    assert state_of(model) == before
    assert not mapped
    protrain.unwrap(model)


@pytest.mark.parametrize("damage", ["short", "header", "empty", "missing"])
def test_a_file_that_is_not_whole_changes_nothing(damage: str, tmp_path: Path) -> None:
    model, optimizer = trained(TIGHT)
    folder = tmp_path / "checkpoint"
    protrain.save(model, optimizer, folder)
    steps(inputs(1, seed=8))(model, optimizer, False)
    before = state_of(model)
    file = folder / "optimizer.safetensors"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes({"short": content[:-1], "header": content[:40], "empty": b""}[damage])
    with pytest.raises(protrain.PlanError, match=r"optimizer\.safetensors|missing"):
        protrain.load(model, optimizer, folder)
    assert state_of(model) == before
    protrain.unwrap(model)


def test_what_others_put_beside_the_weights_is_not_loaded(tmp_path: Path) -> None:
    """An average of the weights has the same names; so has another optimizer's state."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "checkpoint"

    def averages(fresh: Path) -> None:
        for file, name in (("model", "weights_average"), ("model", "model_average"), ("optimizer", "optimizer_before")):
            tensors = load_file(fresh / f"{file}.safetensors")
            save_file({key: torch.zeros_like(value) for key, value in tensors.items()}, fresh / f"{name}.safetensors")

    model, optimizer = trained(TIGHT)
    protrain.save(model, optimizer, folder, extra=averages)
    want = state_of(model)
    steps(inputs(1, seed=8))(model, optimizer, False)
    protrain.load(model, optimizer, folder)
    assert state_of(model) == want
    want_losses = steps(inputs(2, seed=4))(model, optimizer, False)
    protrain.load(model, optimizer, folder)
    assert steps(inputs(2, seed=4))(model, optimizer, False) == want_losses
    protrain.unwrap(model)
    with torch.device("meta"):
        empty: Any = Chain()
    empty, _ = protrain.wrap(empty, adamw(empty), memory=TIGHT, weights=folder)
    assert state_of(empty) == want
    protrain.unwrap(empty)


class Counting(Chain):
    def __init__(self, n_blocks: int) -> None:
        super().__init__()
        self.blocks = self.blocks[:n_blocks]
        self.register_buffer("count", torch.zeros(3))


@pytest.mark.parametrize("n_blocks", [7, 8])
def test_a_checkpoint_of_a_larger_model_or_without_a_buffer_is_refused(n_blocks: int, tmp_path: Path) -> None:
    """As load_state_dict refuses it; nothing is changed."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "checkpoint"
    model: Any = Counting(8)
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    protrain.save(model, optimizer, folder)
    protrain.unwrap(model)
    if n_blocks == 8:
        tensors = load_file(folder / "model.safetensors")
        del tensors["count"]
        save_file(tensors, folder / "model.safetensors")
    other: Any = Counting(n_blocks)
    other, optimizer = protrain.wrap(other, adamw(other), memory=TIGHT)
    steps(inputs(1))(other, optimizer, False)
    before = state_of(other)
    with pytest.raises(protrain.PlanError, match=r"buffer count is missing" if n_blocks == 8 else r"it has 'blocks\.7\."):
        protrain.load(other, optimizer, folder)
    assert state_of(other) == before
    protrain.unwrap(other)


def test_progress_is_told_tensor_by_tensor(fresh_disk: Any) -> None:
    model = torch.nn.Linear(64, 64)
    model, optimizer = protrain.wrap(model, torch.optim.AdamW(model.parameters(), fused=True), memory="8MiB", disk=fresh_disk)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    told: list[tuple[int, int]] = []
    protrain.save(model, optimizer, fresh_disk / "saved", progress=lambda *sizes: told.append(sizes))
    matrix, bias = 4 * 64 * 64, 4 * 64
    assert told == [
        (sum(sizes), 3 * (matrix + bias))
        for sizes in ([matrix], [matrix, bias], [matrix, bias, matrix], [matrix, bias, matrix, matrix],
                      [matrix, bias, matrix, matrix, bias], [matrix, bias, matrix, matrix, bias, bias])
    ]  # fmt: skip
    protrain.unwrap(model)


@pytest.mark.parametrize("moment", ["header", "first tensor", "last tensor"])
def test_another_run_saves_while_this_one_loads(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a mixture of two checkpoints: it is told, and loading again gives the new one."""
    folder, newer = tmp_path / "checkpoint", tmp_path / "newer"
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    steps(inputs(1))(model, optimizer, False)
    protrain.save(model, optimizer, folder)
    steps(inputs(2)[1:])(model, optimizer, False)
    protrain.save(model, optimizer, newer)
    want = state_of(model)
    calls = {"header": 1, "first tensor": 1, "last tensor": 20}[moment]
    name = "_check_groups" if moment == "header" else "tensor"
    place: Any = checkpoint if moment == "header" else checkpoint._Files
    original, left = getattr(place, name), [calls]

    def replacing(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            with replaced(folder) as fresh:
                shutil.copytree(newer, fresh, dirs_exist_ok=True)
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(place, name, replacing)
        with pytest.raises(protrain.DiskError, match="again") as caught:
            protrain.load(model, optimizer, folder)
    assert caught.value.errno == errno.ESTALE
    assert str(folder) in str(caught.value)
    protrain.load(model, optimizer, folder)
    assert protrain.status(model).steps == 2
    assert state_of(model) == want
    protrain.unwrap(model)


# ---- checksums ----


def flip(path: Path, place: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def begins(path: Path) -> dict[str, tuple[int, int]]:
    """Begin and end in the file of each tensor that has bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: (8 + length + a, 8 + length + b) for name, about in header.items() for a, b in [about["data_offsets"]] if a < b}


TENSORS = {
    "flat": torch.arange(700_001, dtype=torch.float32),  # more than two pieces, the last one not whole
    "turned": torch.arange(6000.0).view(60, 100).t(),
    "half": torch.arange(33).to(torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
}


def written(folder: Path) -> Path:
    write_tensors(folder, [Entry(name, tuple(t.shape), t.dtype) for name, t in TENSORS.items()], TENSORS.items())
    return folder / "model.safetensors"


def test_every_byte_of_a_tensor_is_checked(tmp_path: Path) -> None:
    """The first, the last and those at the seams of pieces; the error says where."""
    path = written(tmp_path)
    for name, tensor in TENSORS.items():
        assert TensorFile(str(path)).read(name).equal(tensor)
    for name, (begin, end) in begins(path).items():
        for place in {begin, end - 1, min(begin + MIB - 1, end - 1), min(begin + MIB, end - 1)}:
            flip(path, place, place % 8)
            with pytest.raises(
                protrain.DiskError, match=f"{path}: tensor '{name}', {end - begin} bytes at {begin}, is not"
            ) as caught:
                TensorFile(str(path)).read(name)
            assert (caught.value.errno, caught.value.asked_bytes) == (errno.EBADMSG, end - begin)
            assert caught.value.filename == str(path)
            flip(path, place, place % 8)
    for name, tensor in TENSORS.items():
        assert TensorFile(str(path)).read(name).equal(tensor)


def test_a_tensor_that_is_read_by_rows_is_checked(tmp_path: Path) -> None:
    path = written(tmp_path)

    def read(rows: int) -> torch.Tensor:
        file = TensorFile(str(path))
        return torch.cat([file.read("turned", first, rows) for first in range(0, 100, rows)])

    assert all(read(rows).equal(TENSORS["turned"]) for rows in (1, 7, 50, 100))
    flip(path, begins(path)["turned"][0] + 4 * 60 * 50)
    for rows in (1, 7, 50, 100):
        with pytest.raises(protrain.DiskError, match="turned") as caught:
            read(rows)
        assert caught.value.errno == errno.EBADMSG
    assert TensorFile(str(path)).read("turned", 0, 50).equal(TENSORS["turned"][:50])  # another part, which nothing is known of


@pytest.mark.parametrize(("old", "new"), [(b'"F32","shape":[100,60]', b'"I32","shape":[100,60]'), (b"[100,60]", b"[60,100]")])
def test_a_description_that_is_another_is_found(old: bytes, new: bytes, tmp_path: Path) -> None:
    """As many bytes, which would be read as other numbers, or in another order."""
    path = written(tmp_path)
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    with pytest.raises(protrain.DiskError) as caught:
        TensorFile(str(path)).read("turned")
    assert caught.value.errno == errno.EBADMSG


def test_files_of_other_tools_have_no_sums(tmp_path: Path) -> None:
    """They are read as they are, and other tools read ours."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = written(tmp_path)
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
    assert all(tensor.equal(TENSORS[name]) for name, tensor in load_file(path).items())
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, path, metadata={"format": "pt"})
    flip(path, begins(path)["flat"][0])
    assert TensorFile(str(path)).read("flat")[1:].equal(TENSORS["flat"][1:])


@pytest.mark.parametrize("sums", ["", "{", "[]", "3", '{"flat": 1}', '{"flat": "xyz"}', '{"flat": "0000000g"}', "[" * 9999])
def test_sums_that_are_none(sums: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"flat": torch.ones(3)}, path, metadata={"protrain.crc32c": sums})
    with pytest.raises(protrain.PlanError, match=r"model\.safetensors is no whole safetensors file: ."):
        TensorFile(str(path))


def test_sums_are_the_published_ones() -> None:
    """CRC-32C, and that of two parts is that of the whole."""
    data = bytes(range(256)) * 300
    assert _core.checksum(b"123456789") == 0xE3069283
    assert all(
        _core.checksum(data[cut:], _core.checksum(data[:cut])) == _core.checksum(data) for cut in (0, 1, 7, 4096, len(data))
    )


@pytest.mark.parametrize("stem", ["model", "optimizer"])
def test_a_flipped_bit_of_a_checkpoint_is_found(stem: str, tmp_path: Path) -> None:
    model, optimizer = trained(TIGHT)
    folder = tmp_path / "checkpoint"
    protrain.save(model, optimizer, folder)
    path = folder / f"{stem}.safetensors"
    flip(path, path.stat().st_size // 2, 3)
    with pytest.raises(protrain.DiskError, match=f"{stem}.safetensors: tensor ") as caught:
        protrain.load(model, optimizer, folder)
    assert caught.value.errno == errno.EBADMSG
    if stem == "model":

        def on_meta() -> Any:
            with torch.device("meta"):
                return Chain()

        other = on_meta()
        with pytest.raises(protrain.DiskError) as caught:
            protrain.wrap(other, adamw(other), memory=TIGHT, weights=folder)
        assert caught.value.errno == errno.EBADMSG
    refuses_to_go_on(model, optimizer, tmp_path / "other", "parameters and optimizer state")
    protrain.unwrap(model)


def test_a_flipped_digit_beside_the_tensors_is_found(tmp_path: Path) -> None:
    """A learning rate, a count of steps: nothing is changed. Who changes them by hand removes the sum."""
    model, optimizer = trained(TIGHT)
    folder = tmp_path / "checkpoint"
    protrain.save(model, optimizer, folder)
    path, before = folder / "protrain.json", state_of(model)
    text = path.read_text()
    for old, new in (('"steps": 3', '"steps": 2'), ('"head.bias": 3', '"head.bias": 1'), ('"lr": 0.0', '"lr": 0.1')):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(
            protrain.DiskError, match=r"protrain\.json .* is not what was written there.*remove the line"
        ) as caught:
            protrain.load(model, optimizer, folder)
        assert (caught.value.errno, caught.value.asked_bytes) == (errno.EBADMSG, path.stat().st_size)
        assert state_of(model) == before
    steps(inputs(1))(model, optimizer, False)
    values = json.loads(text) | {"steps": 7}
    del values["crc32c"]
    path.write_text(json.dumps(values))
    protrain.load(model, optimizer, folder)
    assert protrain.status(model).steps == 7
    protrain.unwrap(model)


# ---- loads that fail half-way ----


def refuses_to_go_on(model: Any, optimizer: Any, folder: Path, part: str) -> None:
    """Neither a forward, nor a step, nor a save; unwrap would still give the model back."""
    for what, call in (
        ("forward", lambda: model(inputs(1)[0])),
        (r"optimizer\.step\(\)", optimizer.step),
        ("save", lambda: protrain.save(model, optimizer, folder)),
    ):
        with pytest.raises(protrain.StepError, match=f"{what}: the last load failed half-way .*{part}.*load a checkpoint again"):
            call()
    assert not folder.exists()


class Failing:
    """In the place of a method: the call of this number raises EIO, or what was written is not what is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, call: int) -> None:
        self.left, original = call, getattr(place, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise protrain.DiskError("the disk failed", errno=errno.EIO, filename="store", asked_bytes=4096)
            return original(*args, **kwargs)

        monkeypatch.setattr(place, name, method)


@pytest.mark.parametrize("kind", ["AdamW", "Adamax"])
@pytest.mark.parametrize("where", ["read", "put"])
def test_a_load_that_fails_half_way_is_made_again(where: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then nothing goes on; then all goes on, bit for bit as the run that was saved did."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, getattr(torch.optim, kind)(model.parameters(), lr=1e-3), memory=TIGHT)
    folder = tmp_path / "checkpoint"
    steps(inputs(2))(model, optimizer, False)
    protrain.save(model, optimizer, folder)
    want = steps(inputs(2, seed=4))(model, optimizer, False), state_of(model)
    with monkeypatch.context() as patched:
        Failing(patched, *((TensorFile, "read") if where == "read" else (Values, "put")), call=9)
        with pytest.raises(protrain.DiskError, match="the disk failed"):
            protrain.load(model, optimizer, folder)
    refuses_to_go_on(model, optimizer, tmp_path / "other", "parameters and optimizer state")
    protrain.load(model, optimizer, folder)
    assert (steps(inputs(2, seed=4))(model, optimizer, False), state_of(model)) == want
    protrain.unwrap(model)


def test_state_that_a_failed_load_left_is_not_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint with steps some moments were put, and its counts of steps were not; the next one has no step."""
    older, newer = tmp_path / "older", tmp_path / "newer"
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    protrain.save(model, optimizer, older)
    want = steps(inputs(2))(model, optimizer, False), state_of(model)
    protrain.save(model, optimizer, newer)
    protrain.load(model, optimizer, older)
    with monkeypatch.context() as patched:
        Failing(patched, TensorFile, "read", call=30)
        with pytest.raises(protrain.DiskError):
            protrain.load(model, optimizer, newer)
    protrain.load(model, optimizer, older)
    assert (steps(inputs(2))(model, optimizer, False), state_of(model)) == want
    protrain.unwrap(model)


def test_a_load_that_is_refused_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """Nothing was put, so training goes on."""
    model, optimizer = trained(TIGHT)
    with pytest.raises(protrain.DiskError):
        protrain.load(model, optimizer, tmp_path / "nothing")
    steps(inputs(1))(model, optimizer, False)
    protrain.unwrap(model)


@pytest.mark.parametrize("lr", [0, 1e-300, 1e30, 1.7e308])
def test_every_finite_rate_goes_on(lr: float, tmp_path: Path) -> None:
    model, optimizer = trained(TIGHT)
    optimizer.param_groups[0]["lr"] = lr
    protrain.save(model, optimizer, tmp_path / "saved")
    optimizer.param_groups[0]["lr"] = 0.1
    protrain.load(model, optimizer, tmp_path / "saved")
    assert optimizer.param_groups[0]["lr"] == lr
    protrain.unwrap(model)


class Tied(Chain):
    """A parameter of two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].square.weight = self.head.weight
        self.register_buffer("scale", torch.ones(3))


def test_a_whole_load_need_not_name_a_tied_parameter_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As safetensors' files do not; one that lacks a parameter is no whole one."""
    model: Any = Tied()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    saved = model.state_dict()
    steps(inputs(1))(model, optimizer, False)
    with monkeypatch.context() as patched:
        Failing(patched, Residency, "write_back", call=3)
        with pytest.raises(protrain.DiskError, match="the disk failed"):
            model.load_state_dict(saved)
    for lacking in (("head.bias",), ("head.weight", "blocks.0.square.weight")):
        model.load_state_dict({name: value for name, value in saved.items() if name not in lacking}, strict=False)
        with pytest.raises(protrain.StepError, match="load a checkpoint again"):
            model(inputs(1)[0])
    lacking = ("head.weight", "scale")
    model.load_state_dict({name: value for name, value in saved.items() if name not in lacking}, strict=False)
    steps(inputs(1))(model, optimizer, False)
    protrain.unwrap(model)


@pytest.mark.parametrize("part", ["parameters", "optimizer state"])
def test_a_state_dict_that_is_half_loaded(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DiskError, not torch's words about it; loading it again is enough."""
    model, optimizer = trained(TIGHT)
    saved: Any = model.state_dict() if part == "parameters" else optimizer.state_dict()
    taker: Any = model if part == "parameters" else optimizer
    steps(inputs(1))(model, optimizer, False)
    with monkeypatch.context() as patched:
        Failing(patched, *((Residency, "write_back") if part == "parameters" else (Values, "put")), call=3)
        with pytest.raises(protrain.DiskError, match="the disk failed"):
            taker.load_state_dict(saved)
    refuses_to_go_on(model, optimizer, tmp_path / "other", part)
    other: Any = optimizer if part == "parameters" else model
    other.load_state_dict(other.state_dict())
    refuses_to_go_on(model, optimizer, tmp_path / "other", part)
    if part == "parameters":
        model.blocks[0].load_state_dict(model.blocks[0].state_dict())
        refuses_to_go_on(model, optimizer, tmp_path / "other", part)
    taker.load_state_dict(saved)
    steps(inputs(1))(model, optimizer, False)
    protrain.unwrap(model)
    assert "load_state_dict" not in model.__dict__


# ---- optimizer.pt ----


OPTIMIZER_STATE: dict[str, Any] = {
    "state": {
        0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(600_000), "exp_avg_sq": torch.rand(30, 20).t()},
        1: {"step": torch.tensor(3.0), "exp_avg": torch.empty(0), "exp_avg_sq": torch.empty(0)},
    },
    "param_groups": [{"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "params": [0, 1]}],
}


def all_of(path: Path) -> Any:
    found = torchfiles.load_optimizer(str(path))
    return {number: dict(entry.items()) for number, entry in found["state"].items()}, found["param_groups"]


def same_state(found: Any) -> bool:
    states, groups = found
    return str(groups) == str(OPTIMIZER_STATE["param_groups"]) and all(
        states[number][key].equal(value) and states[number][key].stride() == value.stride()
        for number, entry in OPTIMIZER_STATE["state"].items()
        for key, value in entry.items()
    )


def write_state(path: Path, writer: str) -> None:
    if writer == "ours":
        torchfiles.save(OPTIMIZER_STATE, str(path))
        return
    torch.serialization.set_crc32_options(writer == "torch")
    try:
        torch.save(OPTIMIZER_STATE, path)
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("writer", ["ours", "torch"])
def test_every_record_of_an_optimizer_file_is_checked(writer: str, tmp_path: Path) -> None:
    """Of torch.save and of ours, which other tools for zip archives find whole."""
    path = tmp_path / "optimizer.pt"
    write_state(path, writer)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
    assert same_state(all_of(path))
    for name in ("data.pkl", "data/0", "data/1", "data/2"):
        record = records[name]
        with path.open("rb") as file:
            begin = torchfiles._data_offset(file, record)
        for place in {begin, begin + record.file_size - 1, begin + record.file_size // 2}:
            flip(path, place, 2)
            with pytest.raises(protrain.DiskError, match=f"{name}', {record.file_size} bytes at {begin}, is not what") as caught:
                all_of(path)
            assert (caught.value.errno, caught.value.asked_bytes) == (errno.EBADMSG, record.file_size)
            assert caught.value.filename == str(path)
            flip(path, place, 2)
    assert same_state(all_of(path))


def test_an_optimizer_file_without_checksums_is_read(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    write_state(path, "torch without")
    assert same_state(all_of(path))


def test_an_optimizer_file_that_is_a_pipe(tmp_path: Path) -> None:
    """Nobody writes into it: reading would wait for ever. Neither at first nor when a tensor is asked for."""
    path = tmp_path / "optimizer.pt"
    os.mkfifo(path)
    with pytest.raises(protrain.PlanError, match="no regular file"):
        torchfiles.load_optimizer(str(path))
    path.unlink()
    write_state(path, "ours")
    found = torchfiles.load_optimizer(str(path))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(protrain.PlanError, match="no regular file"):
        found["state"][0].get("exp_avg")


def test_an_optimizer_file_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    path, other = tmp_path / "optimizer.pt", tmp_path / "other.pt"
    write_state(path, "ours")
    write_state(other, "ours")
    found = torchfiles.load_optimizer(str(path))
    assert found["state"][0]["exp_avg"].equal(OPTIMIZER_STATE["state"][0]["exp_avg"])
    other.replace(path)
    with pytest.raises(protrain.DiskError, match="replaced or changed") as caught:
        found["state"][0].get("exp_avg")
    assert (caught.value.errno, caught.value.asked_bytes) == (errno.ESTALE, 2_400_000)
    path.unlink()
    with pytest.raises(protrain.DiskError, match=r"optimizer\.pt cannot be read: No such file.*2400000 bytes") as caught:
        found["state"][0].get("exp_avg")
    assert (caught.value.errno, caught.value.asked_bytes) == (errno.ENOENT, 2_400_000)


# ---- what errors say ----


def told(error: protrain.DiskError, code: int, name: str, asked_bytes: int) -> None:
    """Errno, file and bytes, as attributes and in the line."""
    assert (error.errno, os.path.basename(error.filename), error.asked_bytes) == (code, name, asked_bytes)
    assert str(asked_bytes) in str(error)
    assert error.filename in str(error)
    assert "\n" not in str(error)


def test_a_save_that_fails_tells_errno_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(TIGHT)
    size_bytes = 3 * sum(p.numel() * 4 for p in Chain().parameters())

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(protrain.DiskError, match="No space left") as caught:
            protrain.save(model, optimizer, tmp_path / "checkpoint")
        told(caught.value, errno.ENOSPC, "checkpoint", size_bytes)
        with pytest.raises(protrain.DiskError, match="No space left") as caught:
            torchfiles.save(OPTIMIZER_STATE, str(tmp_path / "optimizer.pt"))
        told(caught.value, errno.ENOSPC, "optimizer.pt", 2 * 4 + 4 + 4 * 600_000 + 4 * 600)
    protrain.unwrap(model)


@pytest.mark.parametrize(
    ("code", "words"), [(errno.EIO, "cannot be read: Input/output error"), (errno.ENODATA, "ends (inside of|within)")]
)
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_read_that_fails_tells_errno_and_bytes(
    kind: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails, or somebody cuts the file, while a tensor is being read."""
    path = tmp_path / "optimizer.pt"
    if kind == "pt":
        write_state(path, "ours")
        found = torchfiles.load_optimizer(str(path))["state"][0]
    else:
        path = written(tmp_path)
        file = TensorFile(str(path))

    class Cut(io.FileIO):
        def readinto(self, memory: Any) -> int:
            if self.tell() > path.stat().st_size // 2:
                if code == errno.ENODATA:
                    return 0
                raise OSError(code, os.strerror(code))
            return super().readinto(memory)  # type: ignore[return-value]

    module: Any = torchfiles if kind == "pt" else tensorfiles
    monkeypatch.setattr(module, "open_file", lambda path, buffering: Cut(path))
    with pytest.raises(protrain.DiskError, match=words) as caught:
        found.get("exp_avg") if kind == "pt" else file.read("flat")
    told(caught.value, code, path.name, TENSORS["flat"].nbytes if kind == "safetensors" else 2_400_000)


def test_loads_inside_of_a_load() -> None:
    """What fails behind one that a module's own load_state_dict made is still the outer one's."""
    loads, error = (
        Loads(cast("Any", None)),
        protrain.DiskError("the disk failed", errno=errno.EIO, filename="store", asked_bytes=4096),
    )

    def load() -> None:
        with loads.of_state_dict():
            with loads.of_state_dict():
                pass
            loads.note(error)
            raise RuntimeError("torch's words about it")

    with pytest.raises(protrain.DiskError, match="the disk failed"):
        load()
    with pytest.raises(protrain.StepError, match="half-way"):
        loads.check("forward")


def test_an_error_that_is_over_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward had allocated when the disk failed, and a load_state_dict likewise, is given back with the error."""
    model, optimizer = trained(TIGHT)
    before = protrain.status(model).memory_bytes
    saved = model.state_dict()
    for work, name in ((lambda: model(inputs(1)[0]), "bring"), (lambda: model.load_state_dict(saved), "write_back")):
        with monkeypatch.context() as patched:
            Failing(patched, Residency, name, call=3)
            with pytest.raises(protrain.DiskError, match="the disk failed") as caught:
                work()
        ended = weakref.ref(caught.value)
        del caught
        assert ended() is None
    model.load_state_dict(saved)
    assert protrain.status(model).memory_bytes <= before
    steps(inputs(1))(model, optimizer, False)
    protrain.unwrap(model)


def test_groups_that_changed_places_are_refused(tmp_path: Path) -> None:
    """The options of the one would be the other's, without a word."""

    def grouped(turned: bool) -> tuple[Any, Any]:
        model: Any = Chain()
        flat = [p for p in model.parameters() if p.dim() == 1]
        wide = [p for p in model.parameters() if p.dim() > 1]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
        return protrain.wrap(model, torch.optim.AdamW(groups[::-1] if turned else groups, lr=1e-3), memory=TIGHT)

    model, optimizer = grouped(False)
    steps(inputs(1))(model, optimizer, False)
    protrain.save(model, optimizer, tmp_path / "saved")
    protrain.load(model, optimizer, tmp_path / "saved")
    protrain.unwrap(model)
    model, optimizer = grouped(True)
    with pytest.raises(
        protrain.PlanError, match=r"parameter .* is in group [01] of the optimizer that was saved, and in group [01]"
    ):
        protrain.load(model, optimizer, tmp_path / "saved")
    protrain.unwrap(model)
