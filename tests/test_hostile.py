"""Files that somebody made to do harm, and what once went wrong: refused in one line, and nothing has changed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TIGHT, Chain, inputs, steps
from twins import adamw, bits

import protrain
from protrain import _core
from protrain.base.reading import parse
from protrain.planner.hardware import load_hardware
from protrain.planner.planning import plan_from_profile
from protrain.planner.plans import Plan
from protrain.planner.profiles import Profile
from protrain.state.tensorfiles import TensorFile

CORPUS = Path(__file__).with_name("corpus")


def files(kind: str, *left_out: str) -> list[Path]:
    return [path for path in sorted((CORPUS / kind).iterdir()) if path.name not in left_out]


def refused(work: Callable[[], Any], *kinds: type[Exception]) -> str:
    with pytest.raises(kinds or protrain.PlanError) as caught:
        work()
    said = str(caught.value)
    assert said
    assert "\n" not in said
    assert len(said) < 1500
    return said


@pytest.mark.parametrize("path", files("safetensors", "empty_huge"), ids=lambda path: path.name)
def test_safetensors(path: Path) -> None:
    assert path.name in refused(lambda: TensorFile(str(path)))


def test_an_empty_tensor_of_a_huge_shape_takes_no_memory() -> None:
    file = TensorFile(str(CORPUS / "safetensors" / "empty_huge"))
    assert file.read("a").numel() == 0


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Nobody writes into it: reading would wait for ever."""
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    assert "no regular file" in refused(lambda: TensorFile(str(path)))


@pytest.mark.parametrize("path", files("plan", "small.json"), ids=lambda path: path.name)
def test_plans(path: Path) -> None:
    refused(lambda: Plan.from_json(path.read_text()))


GOOD = json.loads((CORPUS / "plan" / "small.json").read_text())


@pytest.mark.parametrize(
    "change",
    [
        {"n_chunks": 2.0},
        {"n_chunks": True},
        {"n_chunks": 1 << 70},
        {"n_chunks": -1},
        {"n_persist": 3},
        {"chunk_bytes": 0},
        {"block_modes": "keep"},
        {"block_modes": ["sleep"]},
        {"step_seconds": float("nan")},
        {"step_seconds": float("inf")},
        {"forecast": {}},
        {"forecast": []},
        {"peak_bytes": None},
        {"x" * 5000: 1},
        {"version": 2},
        {"version": 1.0},
        {"version": True},
        {"version": None},
        {"version": "x" * 5000},
    ],
    ids=lambda change: repr(change)[:60],
)
def test_plans_with_one_wrong_value(change: dict[str, Any]) -> None:
    assert Plan.from_json(json.dumps(GOOD)).n_chunks == 2
    refused(lambda: Plan.from_json(json.dumps(GOOD | change)))


def test_a_plan_without_a_version_is_of_the_first_one() -> None:
    plan = Plan.from_json(json.dumps(GOOD))
    assert json.loads(plan.to_json())["version"] == 1
    assert Plan.from_json(plan.to_json()) == plan
    said = refused(lambda: Plan.from_json(json.dumps(GOOD | {"version": 2})))
    assert said == (
        "plan: this JSON is no plan: its version is 2, this protrain reads 1; plan again, or use the protrain that wrote it"
    )


def test_numbers_that_no_plan_has_are_explained_in_lines_that_end() -> None:
    text = (CORPUS / "profile" / "small.json").read_text()
    tree = json.loads(plan_from_profile(Profile.from_json(text), 8 << 20).to_json())
    tree["step_seconds"] = 0.02
    tree["forecast"]["wait_seconds"]["update"] = 1 << 53
    lines = Plan.from_json(json.dumps(tree)).explain().splitlines()
    assert any("9007199254740992" in line for line in lines)
    assert max(map(len, lines)) <= 160


@pytest.mark.parametrize("text", ["[" * 100000, '{"a": 1, "a": 2}', "", "\x00", "9" * 10000], ids=lambda text: text[:8])
def test_json_itself(text: str) -> None:
    refused(lambda: parse(text), ValueError)
    refused(lambda: Plan.from_json(text))
    refused(lambda: Profile.from_json(text))


def changed(path: tuple[Any, ...], value: Any) -> str:
    """The profile of the corpus with one value in another's place."""
    tree = json.loads((CORPUS / "profile" / "small.json").read_text())
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("run", "access_phases", 0), (1 << 32) + 1),
        (("run", "complete_phase", "0"), 1 << 32),
        (("run", "phases", 1, "block"), 1 << 40),
        (("run", "phases", 1, "backward"), 0),
        (("run", "n_together"), 1 << 33),
        (("run", "n_together"), -1),
        (("run", "fixed_bytes"), -1),
        (("run", "phases", 1, "keep_peak_bytes"), -1),
        (("parameters", 0), [4096, 1 << 35, True]),
        (("parameters", 0), [4096, 0]),
        (("n_blocks",), 1 << 30),
        (("n_states",), 1 << 20),
        (("chunk_bytes",), 0),
        (("times", "phases", 0), [float("inf"), 0.0]),
        (("times", "phases", 0), [-1.0, 0.0]),
        (("machine", "disk_read"), 3),
        (("version",), 2),
        (("version",), 4),
    ],
    ids=repr,
)
def test_profiles_with_one_wrong_value(path: tuple[Any, ...], value: Any) -> None:
    """What would not fit the core's integers is refused here: cut to 32 bits it would be another number, and the plan wrong."""
    Profile.from_json((CORPUS / "profile" / "small.json").read_text())
    refused(lambda: Profile.from_json(changed(path, value)))


def test_numbers_that_the_planner_does_not_have_are_refused() -> None:
    """By formats that look at no range, they were others: a mode of 2^32 was keep."""
    chunks, phases = [(4096, 4096, 8192, 0)], [(0, False, 0, 4096, 0, 4096)]
    for wrong in (
        lambda: _core.layout([(-4, 0)], 4096),
        lambda: _core.layout_size([(4, 0)], 1, 1 << 64),
        lambda: _core.make_plan(-1, 0, chunks, [], [], [], 1, 3, 0, None, -1, 0, 0, False, 1, 0, 1, None),
        lambda: _core.make_plan(1 << 30, 0, chunks, phases, [], [], 1, 3, 1, [1 << 32], -1, 0, 0, False, 1, 0, 1, None),
        lambda: _core.make_plan(1 << 30, 0, chunks, phases, [1 << 32], [0], 1, 3, 1, None, -1, 0, 0, False, 1, 0, 1, None),
    ):
        with pytest.raises(OverflowError, match="is out of range: give 0 to"):
            wrong()


class Growing:
    """A number; who asks for it finds the list longer."""

    def __init__(self, numbers: list[Any]) -> None:
        self.numbers = numbers

    def __index__(self) -> int:
        self.numbers += [0] * 100_000
        return 0


def test_a_list_that_grows_while_it_is_read() -> None:
    """Counts as it was when there was room made for it."""
    numbers: list[Any] = [0, 0, 1]
    numbers[0] = Growing(numbers)
    chunks = [(4096, 4096, 8192, 0)] * 2

    def made(accesses: list[Any]) -> Any:
        return _core.make_plan(1 << 30, 0, chunks, [], accesses, [], 1, 3, 0, None, -1, 0, 0, False, 1, 0, 1, None)

    assert made(numbers) == made([0, 0, 1])
    assert len(numbers) > 3


@pytest.mark.parametrize("path", files("hardware"), ids=lambda path: path.name)
def test_machines(path: Path) -> None:
    assert path.name in refused(lambda: load_hardware(path))


def test_a_profile_of_ages() -> None:
    """More seconds than the core's nanoseconds hold."""
    profile = Profile.from_json(changed(("times", "phases", 0), [1e15, 0.0]))
    assert "ns" in refused(lambda: plan_from_profile(profile, 1 << 30), ValueError)


# ---- checkpoints ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> tuple[Any, Any, Path]:
    """A wrapped model after two steps, and the folder it was saved into after one."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=disk)
    steps(inputs(1))(model, optimizer, False)
    protrain.save(model, optimizer, folder)
    steps(inputs(1))(model, optimizer, False)
    return model, optimizer, folder


def about(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "protrain.json"
        values = json.loads(path.read_text())
        del values["crc32c"]  # who changes the one can change the other
        change(values)
        path.write_text(json.dumps(values))

    return apply


def index(names: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def write(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def to_pipe(folder: Path) -> None:
    (folder / "optimizer.safetensors").unlink()
    os.mkfifo(folder / "optimizer.safetensors")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a path that climbs": index({"head.weight": "../checkpoint/model.safetensors"}),
    "an absolute path": index({"head.weight": "/etc/passwd"}),
    "a name that is none": index({"head.weight": 3}),
    "an index that is none": index([1]),
    "an index of text": write("model.safetensors.index.json", b"years of work"),
    "parameters in a group": about(lambda values: values["param_groups"][0].update(params=[])),
    "an unknown key in a group": about(lambda values: values["param_groups"][0].update(foreach="x")),
    "text for a number": about(lambda values: values["param_groups"][0].update(lr="fast")),
    "betas of three": about(lambda values: values["param_groups"][0].update(betas=[0.9, 0.9, 0.9])),
    "a group that is none": about(lambda values: values.update(param_groups=[3])),
    "no groups": about(lambda values: values.pop("param_groups")),
    "steps below none": about(lambda values: values.update(steps=-1)),
    "steps of text": about(lambda values: values["param_steps"].update({"head.bias": "1"})),
    "a random state of nothing": about(lambda values: values.update(torch_random_state="")),
    "a random state of text": about(lambda values: values.update(torch_random_state="zz")),
    "a random state of the device of text": about(lambda values: values.update(device_random_state="zz")),
    "a random state of the device of a number": about(lambda values: values.update(device_random_state=7)),
    "a deep one": write("protrain.json", b"[" * 100000),
    "a pickle": write("protrain.json", (CORPUS / "checkpoint" / "pickle").read_bytes()),
    "a pipe": to_pipe,
    "a header of everything": write("optimizer.safetensors", struct.pack("<Q", (1 << 64) - 1) + b"{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_checkpoints(damage: str, checkpoint: tuple[Any, Any, Path], tmp_path: Path) -> None:
    import shutil

    model, optimizer, good = checkpoint
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    DAMAGES[damage](folder)

    def state() -> Any:
        values = {name: bits(value) for name, value in model.state_dict().items()}
        groups = [{key: repr(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return values, groups, bits(torch.get_rng_state()), protrain.status(model).steps

    before = state()
    refused(lambda: protrain.load(model, optimizer, folder), protrain.PlanError)
    assert state() == before


@pytest.mark.parametrize("stem", ["model", "optimizer"])
def test_tensors_that_are_not_those_that_were_saved(stem: str, checkpoint: tuple[Any, Any, Path], tmp_path: Path) -> None:
    """One bit, a page of zeros, a page of elsewhere, two tensors that changed places: none is loaded."""
    import shutil

    model, optimizer, good = checkpoint
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    path = folder / f"{stem}.safetensors"
    content = path.read_bytes()
    page, middle = 4096, len(content) // 2
    other = content[-page:]
    names = ("blocks.0.square.weight", "blocks.1.square.weight")
    first, second = (name if stem == "model" else f"exp_avg.{name}" for name in names)
    exchanged = content.replace(f'"{first}":{{'.encode(), b'"?":{').replace(f'"{second}":{{'.encode(), f'"{first}":{{'.encode())
    for damaged in (
        content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :],
        content[:middle] + bytes(page) + content[middle + page :],
        content[:middle] + other + content[middle + page :],
        exchanged.replace(b'"?":{', f'"{second}":{{'.encode()),
    ):
        assert damaged != content
        path.write_bytes(damaged)
        said = refused(lambda: protrain.load(model, optimizer, folder), protrain.DiskError)
        assert "is not what was written there" in said
        assert path.name in said
        refused(lambda: model(inputs(1)[0]), protrain.StepError)
    protrain.load(model, optimizer, good)
    steps(inputs(1))(model, optimizer, False)


def test_a_checkpoint_with_other_options_does_not_keep_out_the_next(checkpoint: tuple[Any, Any, Path], tmp_path: Path) -> None:
    """foreach is None in the good one, and was then compared with what the other had."""
    import shutil

    model, optimizer, good = checkpoint
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    about(lambda values: values["param_groups"][0].update(foreach=1))(folder)
    protrain.load(model, optimizer, folder)
    assert optimizer.param_groups[0]["foreach"] == 1
    protrain.load(model, optimizer, good)
    assert optimizer.param_groups[0]["foreach"] is None
    steps(inputs(1))(model, optimizer, False)


@pytest.mark.parametrize("part", ["param_groups", "params", "loose"])
def test_states_of_an_optimizer_without_a_kernel_that_are_none(part: str, fresh_disk: Path) -> None:
    """A list where a dict belongs: refused before anything has changed."""
    folder = fresh_disk / "checkpoint"
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, torch.optim.Adamax(model.parameters()), memory=TIGHT, disk=fresh_disk)
    steps(inputs(1))(model, optimizer, False)
    protrain.save(model, optimizer, folder)
    steps(inputs(2)[1:])(model, optimizer, False)

    def spoil(values: dict[str, Any]) -> None:
        state = values["optimizer_state"]
        if part == "param_groups":
            state[part] = {"list": [{"list": []}]}
        elif part == "params":
            state[part]["head.weight"] = {"list": []}
        else:
            state[part] = {"tuple": []}

    about(spoil)(folder)
    before = {name: bits(value) for name, value in model.state_dict().items()}
    refused(lambda: protrain.load(model, optimizer, folder))
    assert {name: bits(value) for name, value in model.state_dict().items()} == before
    assert protrain.status(model).steps == 2
    protrain.unwrap(model)


def test_a_checkpoint_that_is_good_is_loaded(checkpoint: tuple[Any, Any, Path]) -> None:
    model, optimizer, good = checkpoint
    assert protrain.status(model).steps == 2
    protrain.load(model, optimizer, good)
    assert protrain.status(model).steps == 1
    protrain.unwrap(model)
