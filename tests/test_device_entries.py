"""The command line and the Trainer over a device: the core's host device stands for a GPU (standin.py)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
import transformers
from nets import TIGHT, Chain, inputs, steps
from program import answer
from standin import StandIn
from test_trainer import arguments, assert_twins, finish, rows, trainer_of
from twins import MIB, adamw, bits

import protrain
from protrain.cli import words
from protrain.device import compute
from protrain.integrations.training_arguments import check_arguments
from protrain.integrations.transformers import ProTrainTrainer


@pytest.fixture
def device(disk: Any, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))
    made = StandIn()
    monkeypatch.setattr(compute, "stand_in", made)
    return made


@pytest.fixture
def one_gpu(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """torch says that there is a GPU, and can make no tensor on it: what wrap made where the default device is would fail."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return device


def test_nothing_is_made_on_the_default_device(device: StandIn, fresh_disk: Path) -> None:
    """Which a model on the CPU is sent to a GPU by: from memory, from files, and when it is loaded."""
    options: dict[str, Any] = {"memory": TIGHT, "host_memory": 24 * MIB}
    model: Any = Chain()
    optimizer = adamw(model)
    with torch.device("meta"):
        model, optimizer = protrain.wrap(model, optimizer, **options)
    steps(inputs(2))(model, optimizer, False)
    protrain.save(model, optimizer, fresh_disk / "saved")
    want = {name: bits(value) for name, value in model.state_dict().items()}
    protrain.unwrap(model)
    with torch.device("meta"):
        fresh: Any = Chain()
        fresh, again = protrain.wrap(fresh, adamw(fresh), weights=fresh_disk / "saved", **options)
        protrain.load(fresh, again, fresh_disk / "saved")
        states = again.state_dict()["state"]
    assert {name: bits(value) for name, value in fresh.state_dict().items()} == want
    assert {value.device.type for entry in states.values() for value in entry.values()} == {"cpu"}
    protrain.unwrap(fresh)


# ---- the command line ----


@pytest.fixture
def work(tmp_path: Path) -> Path:
    config = transformers.GPT2Config(
        vocab_size=300, bos_token_id=0, eos_token_id=0, n_embd=128, n_layer=4, n_head=4, n_positions=128
    )
    config.save_pretrained(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(Path(json.__file__).read_text() * 4)
    return tmp_path


TRAIN = ("train", "--model", "tiny", "--data", "text.txt", "--seq", 32, "--batch", 2, "--steps", 4, "--json")


def test_training_over_a_device(
    one_gpu: StandIn, work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses of the CPU, within both budgets, and what is saved is read."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for name, more in {"cpu": (), "cuda": ("--host-memory", "12MiB", "--out", "out", "--save-every", 3)}.items():
        if name == "cpu":
            monkeypatch.setattr(compute, "stand_in", None)
        code, out, err = answer(capfd, monkeypatch, work, *TRAIN, "--device", name, "--memory", "8MiB", *more)
        assert (code, err) == (0, "")
        lines[name] = [json.loads(line) for line in out.splitlines()]
        monkeypatch.setattr(compute, "stand_in", one_gpu)
    assert one_gpu.streams > 0
    losses = [[line["loss"] for line in lines[name][:-1]] for name in lines]
    assert losses[0] == losses[1]
    status = lines["cuda"][-1]
    assert 0 < status["host_bytes"] <= 12 * MIB
    assert 0 < status["peak_memory_bytes"] <= 8 * MIB
    assert transformers.AutoModelForCausalLM.from_pretrained(work / "out") is not None
    code, out, err = answer(
        capfd, monkeypatch, work, *TRAIN, "--device", "cuda:0", "--memory", "64MiB", "--resume", "out", "--steps", 5
    )
    assert (code, err) == (0, "")
    assert [json.loads(line)["step"] for line in out.splitlines()[:-1]] == [5]


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (("--device", "cuda:1"), 1, "--device cuda:1: there is cuda:0 alone"),
        (("--device", "tpu"), 2, "'tpu' is no device; give cpu, cuda, or cuda:1"),
        (("--host-memory", "1GiB"), 1, "--host-memory needs --device cuda"),
        (("--device", "cuda", "--memory", "1MiB"), 1, "protrain: --memory: "),
        (("--device", "cuda", "--memory", "8MiB", "--host-memory", "1MiB"), 1, "protrain: host_memory of 1.00 MiB does not hold"),
    ],
)  # fmt: skip
def test_devices_that_cannot_train(
    given: tuple[str, ...], code: int, said: str, one_gpu: StandIn, work: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found, out, err = answer(capfd, monkeypatch, work, *TRAIN, *given)
    assert (found, out) == (code, "")
    assert said in err
    assert code == 2 or err.count("\n") == 1


def test_a_device_that_is_not_there(work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (TRAIN, ("plan",)):
        code, _, err = answer(capfd, monkeypatch, work, *command, "--device", "cuda")
        assert (code, err.count("\n")) == (1, 1)
        assert "finds no GPU here; leave it out for the CPU" in err


@pytest.mark.parametrize("text", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:1:2", "cpu:0", "meta"])
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        words.DeviceName().convert(text, None, None)


# ---- the Trainer ----


@pytest.fixture
def gpt2(causal_lm: Any) -> Any:
    return lambda: causal_lm("gpt2", 7, hidden=128, layers=4, vocabulary=128, positions=64, resid_pdrop=0.1, embd_pdrop=0.1)


def test_a_trainer_over_a_device(gpt2: Any, device: StandIn, fresh_disk: Path) -> None:
    """Steps, norms, evaluation, a checkpoint and training on from it: all that the plain Trainer gives."""

    def scenario(ours: bool) -> dict[str, Any]:
        folder = fresh_disk / str(ours)
        common: dict[str, Any] = {
            "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5,
            "gradient_accumulation_steps": 2,
        }  # fmt: skip
        first = trainer_of(folder, gpt2(), ours, max_steps=2, **common)
        first.train()
        if ours:
            assert protrain.status(first.model).plan.n_host > 0
            protrain.unwrap(first.model)
        trainer = trainer_of(folder, gpt2(), ours, max_steps=4, **common)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return finish(trainer, trainer.predict(rows(5, seed=3)).metrics["test_loss"])

    assert_twins(scenario, disk=False)
    assert device.streams > 0


def test_a_trainer_whose_device_is_a_gpu(gpt2: Any, one_gpu: StandIn, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stays where it is, for wrap to take it over chunk by chunk."""
    trainer = trainer_of(fresh_disk, gpt2(), True)
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda", 0))
    trainer._move_model_to_device(trainer.model, trainer.args.device)
    trainer.create_optimizer()
    session = protrain.session_of(trainer.model)
    assert session.wrapped.compute is one_gpu
    protrain.unwrap(trainer.model)


@pytest.mark.parametrize(
    ("kind", "n_gpu", "said"),
    [
        ("cuda", 1, ""),
        ("cuda", 2, "there are 2 GPUs, and protrain trains on one: set CUDA_VISIBLE_DEVICES to it, or use_cpu=True"),
        ("mps", 1, "the device is mps; protrain trains on cpu and cuda: set use_cpu=True"),
    ],
)
def test_devices_of_training_arguments(kind: str, n_gpu: int, said: str, tmp_path: Path) -> None:
    base = vars(arguments(tmp_path))
    given = SimpleNamespace(**{**base, "world_size": 1, "device": torch.device(kind), "n_gpu": n_gpu})
    if not said:
        check_arguments(given, {})
        return
    with pytest.raises(protrain.PlanError, match=said):
        check_arguments(given, {})


def test_a_trainer_on_the_cpu_stays_there(gpt2: Any, fresh_disk: Path) -> None:
    trainer = trainer_of(fresh_disk, gpt2(), True)
    trainer.create_optimizer()
    assert isinstance(trainer, ProTrainTrainer)
    assert not protrain.session_of(trainer.model).wrapped.compute.separate
    protrain.unwrap(trainer.model)
