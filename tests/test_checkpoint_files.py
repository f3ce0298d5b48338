"""Files of checkpoints: shards of ours and of other tools, read tensor by tensor without being mapped, whole or refused."""

from __future__ import annotations

import errno
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TIGHT, Chain, inputs, steps
from twins import MIB, adamw, assert_equal, bits, fit, run

import protrain
from protrain import checkpoint, materialise
from protrain.replacing import replaced
from protrain.tensorfiles import TensorFile, write_tensors
from protrain.values import Values


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
