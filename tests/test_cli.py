"""The command line: exit codes, one-line errors, models without memory, exports that plain transformers reads."""

from __future__ import annotations

import copy
import errno
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import transformers
from ahead import Ahead
from program import HUNG_SECONDS, ROOT, answer, environment, interrupted, run
from safetensors.torch import load_file

from protrain import checkpoint
from protrain.api import Status
from protrain.base import replacing
from protrain.cli import display, export, machine, model, notes, resumed, train, words
from protrain.cli.bench_activations import configurations
from protrain.cli.bench_worker import materialize
from protrain.errors import PlanError, StepError
from protrain.state import tensorfiles

MIB = 1 << 20


def small(kind: str = "gpt2") -> Any:
    """The config of a model of a few hundred thousand parameters."""
    common = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        return transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, n_positions=128, **common)
    return transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, max_position_embeddings=128, **common
    )


def real(config: Any, seed: int = 0) -> Any:
    built = model.build(copy.deepcopy(config))
    materialize(built, model.Initializer(built, seed))
    return built


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model's config and a text."""
    folder = tmp_path_factory.mktemp("work")
    small().save_pretrained(folder / "tiny")
    (folder / "text.txt").write_text(Path(json.__file__).read_text() * 4)
    (folder / "text.html").write_text("<p>text</p>")
    (folder / "file").write_text("no folder")
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").write_text("mine")
    transformers.ViTConfig().save_pretrained(folder / "vision")
    transformers.T5Config().save_pretrained(folder / "translator")
    return folder


SMALL = ("train", "--model", "tiny", "--data", "text.txt", "--seq", 32, "--batch", 2, "--steps", 3)


# ---- words ----


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("4GiB", 4 << 30), ("512 mib", 512 * MIB), ("1.5KiB", 1536), ("2GB", 2 * 10**9), ("7B", 7)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert words.Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "abc", "-1", "0", "0.2", "1 parsec", "nan", "1e9", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        words.Size().convert(text, None, None)


@pytest.mark.parametrize("size", [0, 5, 1023, 1024, 999 * MIB, 40 * MIB, 3 << 40])
def test_a_size_that_is_shown_reads_back_nearly(size: int) -> None:
    number, unit = words.size_text(size).replace(",", "").split()
    scale = {"bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}[unit]
    assert float(number) * scale == pytest.approx(size, rel=0.01)


def test_json_for_programs_has_null_where_a_figure_is_no_number() -> None:
    value = {"a": (1.5, float("nan")), "b": [{"c": float("-inf")}, None, True, 1 << 62]}
    text = '{"a": [1.5, null], "b": [{"c": null}, null, true, 4611686018427387904]}'
    assert words.json_text(value) == text


# ---- models ----


@pytest.mark.parametrize("name", ["gpt2", "gpt2-bytes", "gpt2-demo", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-small"])
def test_shipped_models_are_built_without_memory(name: str) -> None:
    config, folder = model.read_config(name)
    assert folder is None
    built = model.build(config)
    assert all(parameter.device.type == "meta" for parameter in built.parameters())
    assert all(buffer.device.type == "cpu" for buffer in built.buffers())
    millions = {"gpt2": 124, "gpt2-bytes": 26, "gpt2-demo": 92, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558}
    assert round(sum(parameter.numel() for parameter in built.parameters()) / 1e6) == millions.get(name, 125)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_are_distributed_as_transformers_makes_them(kind: str) -> None:
    ours = dict(real(small(kind)).named_parameters())
    theirs = dict(transformers.AutoModelForCausalLM.from_config(small(kind)).named_parameters())
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].mean().item() == pytest.approx(tensor.mean().item(), abs=0.003), name
        assert ours[name].std().item() == pytest.approx(tensor.std().item(), rel=0.1, abs=1e-9), name


def test_the_projections_of_gpt2_are_scaled_by_depth() -> None:
    block = real(small()).transformer.h[0]
    assert block.attn.c_proj.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.1)
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_buffers_are_those_of_transformers() -> None:
    ours, theirs = model.build(small("llama")), transformers.AutoModelForCausalLM.from_config(small("llama"))
    found = dict(ours.named_buffers())
    assert found
    assert all(torch.equal(found[name], buffer) for name, buffer in theirs.named_buffers())


@pytest.mark.parametrize(("kind", "names"), [("gpt_neo", {"bias"}), ("openai-gpt", {"position_ids"})])
def test_buffers_of_numbers_that_are_whole_are_those_of_transformers(kind: str, names: set[str]) -> None:
    """Masks and positions, which have no NaN to tell that nobody computed them."""
    config = transformers.AutoConfig.for_model(kind)
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300}
    sizes |= {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]}
    for name, value in {**sizes, "max_position_embeddings": 64, "n_positions": 64, "window_size": 16}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    wanted = dict(transformers.AutoModelForCausalLM.from_config(config).named_buffers())
    found = dict(model.build(copy.deepcopy(config)).named_buffers())
    assert found.keys() == wanted.keys()
    assert names <= {name.rpartition(".")[2] for name in wanted}
    assert not [name for name, buffer in wanted.items() if not torch.equal(found[name], buffer)]


def test_weights_depend_on_the_seed_alone() -> None:
    one, same, other = real(small(), 1), None, real(small(), 2)
    torch.rand(100)
    before = torch.get_rng_state()
    same = real(small(), 1)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.transformer.wte.weight, other.transformer.wte.weight)
    assert one.lm_head.weight is one.transformer.wte.weight


def test_a_module_leaves_the_others_as_they_are() -> None:
    built = real(small())
    before = {name: tensor.clone() for name, tensor in built.named_parameters()}
    model.Initializer(built, 9)(built.transformer.h[1].attn.c_proj)
    changed = [name for name, tensor in built.named_parameters() if not torch.equal(tensor, before[name])]
    assert changed == ["transformer.h.1.attn.c_proj.weight"]  # its bias is zero as before
    assert not any(hasattr(tensor, "_is_hf_initialized") for tensor in built.parameters())


def test_a_parameter_that_nobody_initialises_is_refused() -> None:
    built = real(small())
    built.transformer.h[0].extra = torch.nn.Module()
    built.transformer.h[0].extra.scale = torch.nn.Parameter(torch.empty(3))
    with pytest.raises(words.CommandError, match="'scale' of Module"):
        model.Initializer(built, 0)(built.transformer.h[0].extra)


@pytest.mark.parametrize(
    ("key", "value", "least"),
    [
        ("n_layer", 0, 1),
        ("n_layer", -1, 1),
        ("n_embd", 0, 1),
        ("n_head", 0, 1),
        ("n_head", -2, 1),
        ("vocab_size", -5, 1),
        ("n_positions", 0, 2),
        ("n_positions", 1, 2),  # its loss is a mean over nothing
        ("n_positions", -4, 2),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_name(tmp_path: Path, key: str, value: int, least: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**small().to_dict(), key: value}))
    with pytest.raises(words.CommandError, match=rf"config\.json' says {key} {value}; give a whole number of at least {least}$"):
        model.read_config(str(tmp_path))


def test_a_config_whose_parameters_hold_nothing_is_refused() -> None:
    config = small()
    config.n_inner = 0
    with pytest.raises(words.CommandError, match=r"'gpt2' gives transformer\.h\.0\.mlp\.c_fc\.weight the shape \[\d+, 0\]"):
        model.build(config)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("n_head", 3, "must be divisible"),
        ("activation_function", "zzz", "KeyError: 'zzz'"),
        ("n_embd", 10**12, "RuntimeError: Storage size"),
    ],
)
def test_a_config_that_no_model_is_made_from_is_refused_with_the_reason(key: str, value: object, reason: str) -> None:
    config = small()
    setattr(config, key, value)
    with pytest.raises(
        words.CommandError, match=rf"'gpt2' can be made from its config\.json: .*{reason}.*; put what it says right"
    ):
        model.build(config)


def test_weights_in_another_format_are_refused_by_name(tmp_path: Path) -> None:
    assert not model.has_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(words.CommandError, match=r"pytorch_model\.bin"):
        model.has_weights(tmp_path)


# ---- the folder that is saved ----


def tensors(built: Any) -> list[tuple[str, torch.Tensor]]:
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in built.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), (name, tensor.detach()))
    return list(seen.values())


@pytest.mark.parametrize("shard_bytes", [10**9, 100_000, 1])
def test_shards_hold_the_weights(tmp_path: Path, shard_bytes: int) -> None:
    built = real(small())
    small().save_pretrained(tmp_path)
    written = tensorfiles.write_tensors(tmp_path, tensorfiles.entries(built), tensors(built), shard_bytes)
    assert written == sum(4 * tensor.numel() for tensor in built.parameters())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == {10**9: 1, 1: len(tensors(built))}.get(shard_bytes, len(files))
    read = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors(built))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), built.parameters(), strict=True))


@pytest.mark.parametrize("change", ["missing", "more", "order", "shape", "type"])
def test_a_tensor_that_is_not_the_one_expected_is_refused(tmp_path: Path, change: str) -> None:
    built = real(small())
    found = tensors(built)
    name, tensor = found[0]
    found = {
        "missing": found[:-1],
        "more": [*found, ("extra", tensor)],
        "order": [*found[1:], found[0]],
        "shape": [(name, tensor[:-1]), *found[1:]],
        "type": [(name, tensor.to(torch.bfloat16)), *found[1:]],
    }[change]
    with pytest.raises(PlanError, match="nothing was saved"):
        tensorfiles.write_tensors(tmp_path, tensorfiles.entries(built), found)


# ---- the machine ----


def test_the_doctor_measures_the_disk_and_leaves_nothing(work: Path, tmp_path: Path) -> None:
    result = run(work, "doctor", "--disk", tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["torch"]["version"] == torch.__version__
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]
    if found["disk folder"]["file_system"] != "tmpfs":  # which takes no direct I/O, and is refused
        assert found["disk speed"]["read_bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_file_system_of_a_folder_is_that_of_its_nearest_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its device number is no mount's, as on Btrfs, and where the mount's name has letters beside ASCII, or spaces."""
    folder = tmp_path / "a b" / "ü"
    folder.mkdir(parents=True)
    point = str(folder).replace(" ", "\\040")
    lines = ["1 0 0:1 / / rw - overlay o rw", f"2 1 0:2 / {point} rw - ext4 e rw", f"3 1 0:3 / {point} rw - btrfs b rw"]
    lines.append(f"4 1 0:4 / {point}x rw - xfs x rw")
    monkeypatch.setattr(Path, "read_bytes", lambda _: ("\n".join(lines) + "\n").encode())
    assert machine.file_system(str(folder))[0] == "btrfs"
    device = os.stat(tmp_path).st_dev
    lines[0] = f"1 0 {os.major(device)}:{os.minor(device)} / / rw - overlay o rw"
    assert machine.file_system(str(tmp_path))[0] == "overlay"


def test_a_terminal_that_cannot_draw_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel would be shown there when all is over."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, kind in (("dumb", "_Plain"), ("xterm", "_Live")):
        monkeypatch.setenv("TERM", name)
        assert type(display.make_display("a training", 3, None, as_json=False)).__name__ == kind


def test_memory_is_what_the_kernel_says() -> None:
    total, available = machine.memory()
    assert 0 < available <= total
    assert total == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.1)


def test_room_is_what_the_kernel_says(tmp_path: Path) -> None:
    found = machine.room(str(tmp_path))
    assert found is not None
    space = os.statvfs(tmp_path)
    assert space.f_bavail * space.f_frsize * 0.9 < found[0] <= space.f_blocks * space.f_frsize
    assert found[1] == (1.0 if machine.file_system(str(tmp_path))[0] in machine.AS_WRITTEN else 0.5)
    assert machine.room("/proc") is None


# ---- the program ----


def test_no_command_is_usage_and_2(work: Path) -> None:
    result = run(work)
    assert result.returncode == 2
    assert "Usage: protrain" in result.stderr


def test_sources_that_are_not_installed_have_their_version(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert answer(capfd, monkeypatch, work, "--version") == (0, f"protrain, version {version}\n", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--memory", "abc"], ["--memory", "abc"]),
        (["--steps", "0"], ["--steps", "0"]),
        (["--steps", "x"], ["--steps", "'x' is not a valid whole number"]),
        (["--lr", "x"], ["--lr", "'x' is not a valid number"]),
        (["--memory"], ["'--memory' requires an argument"]),
        (["--memroy", "1GiB"], ["--memroy"]),
        (["--lr", "nan"], ["--lr", "nan"]),
        (["--precision", "fp8"], ["--precision", "fp8"]),
        (["--memory", "9" * 400 + ".5GiB"], ["--memory", "more than any machine has"]),
        (["--memory", "99999999999TiB"], ["--memory", "more than any machine has"]),
        (["--batch", "1" + 21 * "0"], ["--batch"]),
        (["--accumulate", "3000000000"], ["--accumulate"]),
    ],
)
def test_wrong_words_are_2_with_the_usage(
    work: Path, arguments: list[str], named: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = answer(capfd, monkeypatch, work, *SMALL, *arguments)
    assert code == 2
    assert errors.startswith("Usage:")
    assert all(word in errors.splitlines()[-1] for word in named)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "gpt17"], "gpt17"),
        (["--model", "./nowhere"], "nowhere"),
        (["--model", "full"], "config.json"),
        (["--model", "vision"], "'vision/config.json' is of the type 'vit', which is no causal language model"),
        (["--model", "translator"], "'translator/config.json' is of the type 't5', which is no causal language model"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--seq", "129"], "129"),
        (["--out", "file/out"], "file"),
        (["--out", "full"], "full"),
        (["--out", "/proc/out"], "--out '/proc/out' cannot be made"),
        (["--resume", "nowhere"], "nowhere"),
        (["--disk", "file"], "file"),
        (["--trace", "full"], "full"),
        (["--trace", "nowhere/trace.json"], "nowhere/trace.json"),
        (["--out", "inner", "--trace", "inner/trace.json"], "inner/trace.json"),
        (["--out", "inner", "--report", "inner/report.html"], "inner/report.html"),
        (["--out", "inner", "--trace", "./inner"], "--trace './inner' is --out or inside of it"),
        (["--out", "inner", "--disk", "inner/disk"], "--disk 'inner/disk' is inside of --out"),
        (["--trace", "one.html", "--report", "./one.html"], "--trace 'one.html' and --report are one file"),
        (["--trace", "./text.txt"], "--trace './text.txt' is the text of --data"),
        (["--data", "text.html", "--report", "text.html"], "--report 'text.html' is the text of --data"),
        (["--data", "full", "--trace", "full/notes.txt"], "--trace 'full/notes.txt' is the text of --data"),
        (["--trace", "tiny/config.json"], "--trace 'tiny/config.json' is a file of a model"),
        (["--trace", ""], "--trace '' names no file"),
        (["--trace", "text.txt/"], "--trace 'text.txt/' names no file"),
        (["--disk", "s3://bucket/run"], "--disk is 's3://bucket/run', a URL"),
        (["--out", "hf://me/model"], "--out is 'hf://me/model', a URL"),
        (["--disk", ""], "--disk '' is no folder"),
        (["--disk", "/sys"], "name a folder that can be written (--disk)"),
        (["--data", ""], "no file or folder ''"),
        (["--out", "\udcff"], "--out '\\udcff' is no UTF-8"),
        (["--out", "/proc"], "--out: /proc is a mount point"),
        (["--out", "./tiny"], "--out './tiny' is the folder of --model"),
    ],
)
def test_an_error_is_1_with_one_line(
    work: Path, arguments: list[str], named: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = answer(capfd, monkeypatch, work, *SMALL, *arguments)
    assert (code, len(errors.splitlines())) == (1, 1), errors
    assert named in errors
    assert (work / "full" / "notes.txt").read_text() == "mine"


def test_a_disk_that_this_user_cannot_write_to_is_refused_first(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def access(path: Any, mode: int) -> bool:  # who runs tests may write anywhere
        if mode == os.W_OK | os.X_OK:
            asked.append(path)
        return mode != os.W_OK | os.X_OK

    monkeypatch.setattr(train.os, "access", access)
    monkeypatch.setattr(train, "any_tokens", None)  # nothing is planned for
    code, _, errors = answer(capfd, monkeypatch, work, *SMALL, "--disk", "inner/of/it")
    assert (code, asked) == (1, [work])
    assert errors == (
        "protrain: --disk 'inner/of/it' cannot be written to by this user; give a folder on a disk that can be written to\n"
    )


def test_what_may_not_be_read_is_told_with_its_name() -> None:
    message = words.message_of(PermissionError(errno.EACCES, "Permission denied", "/root/model"))
    assert message == "'/root/model': Permission denied; give a path that this user may use"
    assert words.message_of(PlanError("n_devices is 2; cpu.toml has 1, give 1")).startswith("--devices is 2; ")


@pytest.mark.parametrize("option", [True, False])
def test_a_folder_in_memory_is_refused_before_anything_is_read(
    work: Path, option: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    monkeypatch.setenv("PROTRAIN_DISK", "/dev/shm/never/made")
    code, _, errors = answer(capfd, monkeypatch, work, *SMALL, *(["--disk", "/dev/shm/never"] if option else []))
    assert (code, len(errors.splitlines())) == (1, 1), errors
    given = "--disk '/dev/shm/never'" if option else "'/dev/shm/never/made', the folder without --disk,"
    assert f"{given} is a tmpfs: what is put there stays in memory; give --disk" in errors
    assert not os.path.exists("/dev/shm/never")


@pytest.mark.parametrize(("arguments", "code", "lines"), [(["--lr", "nan"], 2, 4), (["--resume", "nowhere"], 1, 1)])
def test_the_program_exits_so(
    work: Path, arguments: list[str], code: int, lines: int, ahead: Ahead, request: pytest.FixtureRequest
) -> None:
    result = ahead.result(request, lambda given: run(work, *SMALL, *given["arguments"]))
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (code, "", lines), result.stderr


NO_ROOM = "protrain: stdout cannot be written: No space left on device; give it a place with room\n"


@pytest.mark.parametrize(
    ("redirections", "printed", "code", "errors"),
    [
        (">&-", "'steps'", 0, ""),
        ("<&- >&- 2>&-", "'steps'", 0, ""),
        (">/dev/full", "'steps'", 1, NO_ROOM),
        (">/dev/full", "'steps', flush=True", 1, NO_ROOM),
        (">/dev/null", "'\\udcff \u280b'", 0, ""),
    ],
    ids=["closed", "all closed", "full", "full at once", "ascii"],
)
def test_streams_that_take_nothing(redirections: str, printed: str, code: int, errors: str) -> None:
    """No traceback, and no training that ends because of what it says."""
    program = f"from protrain.cli import main; main.commands.invoke = lambda _: print({printed}); main.main()"
    result = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-c", program, "doctor"],
        env={**environment(), "PYTHONUNBUFFERED": "", "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, check=False, timeout=HUNG_SECONDS,
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (code, "", errors)


def test_an_impossible_budget_is_one_line_that_names_memory(work: Path) -> None:
    result = run(work, *SMALL, "--memory", "64KiB", "--json")
    assert (result.returncode, len(result.stderr.splitlines()), result.stdout) == (1, 1, ""), result.stderr
    assert "memory" in result.stderr


def test_training_saves_a_model_that_transformers_reads(work: Path) -> None:
    result = run(work, *SMALL, "--out", "out", "--disk", "disk", "--memory", "64MiB", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["step"] for line in lines[:-1]] == [1, 2, 3]
    assert {"loss", "seconds", "tokens_per_second", "memory_bytes"} <= set(lines[0])
    assert {"plan", "steps", "peak_memory_bytes", "disk_read_bytes"} <= set(lines[-1])
    assert lines[-1]["peak_memory_bytes"] <= 64 * MIB
    assert not (work / "disk").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "out")
    text = (work / "text.txt").read_text()[:400]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    trained = transformers.AutoModelForCausalLM.from_pretrained(work / "out")
    start = real(small(), 0)
    assert not torch.equal(trained.transformer.h[0].mlp.c_fc.weight, start.transformer.h[0].mlp.c_fc.weight)
    further = run(work, *SMALL, "--model", "out", "--memory", "64MiB", "--json")
    assert further.returncode == 0, further.stderr
    assert json.loads(further.stdout.splitlines()[0])["loss"] < lines[0]["loss"]


def test_the_summary_has_the_budget_that_was_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Where none was given."""
    summary = display.Summary(1, 2.0, 1.0, 3.0, 4, None, None, 0, [], {"budget_bytes": 7, "steps": 1})
    display.make_display("a training", 1, None, as_json=True).finish(summary)
    found = json.loads(capsys.readouterr().out)
    assert (found["budget_bytes"], found["steps"], found["last_loss"]) == (7, 1, 1.0)


def test_a_warning_is_told_before_the_first_step(work: Path) -> None:
    """What it warns of may end the process. JSON lines have it in the summary."""
    lines = run(work, *SMALL, "--steps", 2, "--memory", "4000TiB").stdout.splitlines()
    notes = [number for number, line in enumerate(lines) if line.startswith("note: protrain: memory is 4000")]
    steps = [number for number, line in enumerate(lines) if line.startswith("step ")]
    assert (len(notes), len(steps), notes < steps) == (1, 2, True), lines
    summary = json.loads(run(work, *SMALL, "--steps", 2, "--memory", "4000TiB", "--json").stdout.splitlines()[-1])
    assert [text.split(",")[0] for text in summary["warnings"]] == [lines[notes[0]].removeprefix("note: ").split(",")[0]]


def steps_of(trace: Path) -> list[str]:
    """The steps in a Chrome trace, after looking at its lanes."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {"step", "compute", "read", "write"} <= {event["cat"] for event in events}
    return sorted(event["name"] for event in events if event["cat"] == "step")


def test_a_trace_has_the_last_three_steps(work: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("old")
    result = run(work, *SMALL, "--steps", 4, "--memory", "4MiB", "--trace", file)
    assert result.returncode == 0, result.stderr
    assert steps_of(file) == ["step 2", "step 3", "step 4"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert f"trace: {file}" in result.stdout


def test_a_step_of_more_events_than_are_kept_ends_no_training(
    work: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with many passes. The report is written, without lanes."""

    def gone(_status: Any) -> Any:
        raise StepError("timeline: not all events of step 1 are kept any more")

    monkeypatch.setattr(Status, "timeline", gone)
    files = ("--trace", tmp_path / "trace.json", "--report", tmp_path / "report.html")
    code, printed, errors = answer(capfd, monkeypatch, work, *SMALL, "--memory", "64MiB", "--json", *files)
    assert (code, len(errors.splitlines())) == (1, 1), errors
    assert "trace.json' was not written: a step has more events than are kept; give a smaller --accumulate" in errors
    *steps, last = map(json.loads, printed.splitlines())
    assert len(steps) == 3
    assert (last["trace"], last["report"]) == (None, str(tmp_path / "report.html"))
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_another_budget_gives_the_same_losses(work: Path) -> None:
    found = []
    for memory in ("5MiB", "1GiB"):
        result = run(work, *SMALL, "--memory", memory, "--json")
        assert result.returncode == 0, result.stderr
        found.append([json.loads(line)["loss"] for line in result.stdout.splitlines()[:-1]])
    assert found[0] == found[1]


def test_a_rate_that_is_given_counts_where_a_training_goes_on(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = answer(capfd, monkeypatch, work, *SMALL, "--memory", "64MiB", "--out", "goes", "--save-every", 1)
    assert code == 0, errors
    losses = []
    for rate in ((), ("--lr", "0.1")):
        words = ("--memory", "64MiB", "--resume", "goes", "--steps", 5, "--json", *rate)
        code, printed, errors = answer(capfd, monkeypatch, work, *SMALL, *words)
        assert code == 0, errors
        losses.append([json.loads(line)["loss"] for line in printed.splitlines()[:-1]])
    assert losses[0][0] == losses[1][0]  # before its first step
    assert losses[0][1] != losses[1][1]


def test_a_training_that_goes_on_tells_its_own_steps_and_needs_its_model(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small("llama").save_pretrained(work / "llama")
    code, printed, errors = answer(capfd, monkeypatch, work, *SMALL, "--memory", "64MiB", "--out", "begun", "--save-every", 3)
    assert code == 0, errors
    assert re.search(r"^trained: 3 steps in [0-9.]+ s$", printed, re.MULTILINE)
    on = ("--memory", "64MiB", "--resume", "begun", "--steps", 4)
    code, printed, errors = answer(capfd, monkeypatch, work, *SMALL, *on)
    assert code == 0, errors
    assert re.search(r"^trained: 1 step in [0-9.]+ s, 4 with those of the checkpoint$", printed, re.MULTILINE)
    code, _, errors = answer(capfd, monkeypatch, work, *SMALL, *on, "--model", "llama")
    assert (code, len(errors.splitlines())) == (1, 1), errors
    refused = "protrain: --resume 'begun' is not of --model 'llama', or not whole: begun is of another model: it has "
    assert errors.startswith(refused)


def test_a_training_that_goes_on_tells_which_of_its_words_differ(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "seen", [])
    (work / "more.txt").write_text("a text of other words\n" * 200)
    common = ("train", "--model", "tiny", "--memory", "64MiB")
    first = ("--data", "text.txt", "--seq", 32, "--batch", 2, "--steps", 1, "--out", "kept", "--save-every", 1)
    code, printed, errors = answer(capfd, monkeypatch, work, *common, *first)
    assert code == 0, errors
    assert "note: " not in printed

    def told(*words: object) -> list[str]:
        notes.seen.clear()
        code, printed, errors = answer(capfd, monkeypatch, work, *common, "--steps", 2, "--resume", "kept", *words)
        assert code == 0, errors
        return [line for line in printed.splitlines() if line.startswith("note: --resume")]

    same = ("--data", "./text.txt", "--seq", 32, "--batch", 2)
    assert told(*same, "--disk", "elsewhere", "--lr", 0.1) == []
    assert told(*same, "--model", "kept") == []
    other = ("--batch", 1, "--accumulate", 2, "--seed", 3, "--precision", "bf16", "--max-grad-norm", 0.5, "--data", "more.txt")
    tokens = {name: re.escape(repr(str(work / name))) + r" \([\d,]+ tokens\)" for name in ("text.txt", "more.txt")}
    expected = [
        "--seq was 32 when it was saved, and is 128 now",
        "--batch was 2 when it was saved, and is 1 now",
        "--accumulate was 1 when it was saved, and is 2 now",
        "--seed was 0 when it was saved, and is 3 now",
        r"--max-grad-norm was not given when it was saved, and is 0\.5 now",
        "--precision was fp32 when it was saved, and is bf16 now",
        f"--data was {tokens['text.txt']} when it was saved, and is {tokens['more.txt']} now",
    ]
    for line, pattern in zip(told(*other), expected, strict=True):
        assert re.fullmatch(f"note: --resume 'kept': {pattern}", line)
    config = small()
    config.n_head = 8  # of as many parameters
    config.save_pretrained(work / "heads")
    line = "note: --resume 'kept': n_head of --model was 4 when it was saved, and is 8 now"
    assert told(*same, "--model", "heads") == [line]
    (work / "own.txt").write_text((work / "text.txt").read_text())
    assert told("--data", "own.txt", *same[2:]) == []  # the same text
    for damage in ("", "[]", '{"data": 3, "model": 4}', '{"data": {"paths": 5}}', "[" * 100000):
        (work / "kept" / resumed.RECORD).write_text(damage)
        assert told("--data", "more.txt", *same[2:]) == []
    (work / "kept" / resumed.RECORD).unlink()  # as older versions saved it
    assert told(*other) == []


def test_the_record_of_a_trainings_words_goes_with_its_checkpoint(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*SMALL, "--memory", "64MiB", "--steps", 1, "--out", "belongs")

    def run_once(*more: object) -> bool:
        code, _, errors = answer(capfd, monkeypatch, work, *words, *more)
        assert code == 0, errors
        return (work / "belongs" / resumed.RECORD).exists()

    assert run_once("--save-every", 1)
    assert resumed.RECORD in json.loads((work / "belongs" / "protrain.json").read_text())["files"]
    assert checkpoint.saved_steps(work / "belongs") == 1
    assert run_once("--save-every", 1)
    (work / "belongs" / "protrain.json").unlink()
    assert run_once("--save-every", 1)  # no file of others, which could not be replaced
    assert not run_once()  # the model alone, of which it says nothing
    assert replacing.is_of_a_model(resumed.RECORD)


def test_a_training_that_goes_on_keeps_its_tokenizer(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "other.txt").write_text("Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich\n" * 200)
    words = (*SMALL, "--memory", "64MiB", "--save-every", 1, "--json")
    code, _, errors = answer(capfd, monkeypatch, work, *words, "--steps", 1, "--out", "first")
    assert code == 0, errors
    files = [(work / "first" / "tokenizer.json").read_bytes()]
    losses = []
    for name, text in (("same", "text.txt"), ("changed", "other.txt")):
        on = ("--steps", 2, "--resume", "first", "--out", name, "--data", text)
        code, printed, errors = answer(capfd, monkeypatch, work, *words[:3], *words[5:], *on)
        assert code == 0, errors
        files.append((work / name / "tokenizer.json").read_bytes())
        losses.append(json.loads(printed.splitlines()[0])["loss"])
    assert files == files[:1] * 3
    (work / "first" / "tokenizer.json").unlink()  # as a checkpoint of an earlier version, which had none
    (work / "first" / "tokenizer_config.json").unlink()
    on = ("--steps", 2, "--resume", "first", "--out", "anew", "--data", "text.txt")
    code, printed, errors = answer(capfd, monkeypatch, work, *words[:3], *words[5:], *on)
    assert code == 0, errors
    assert json.loads(printed.splitlines()[0])["loss"] == losses[0]  # one that was read back gives the same tokens


def test_a_tilde_is_the_home_folder_in_all_words_that_are_paths(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no shell has put it there, as behind an equals sign."""
    monkeypatch.setenv("HOME", str(work / "home"))
    (work / "home").mkdir()
    (work / "home" / "own.txt").write_text("home, sweet home\n" * 400)
    words = ("--memory=64MiB", "--steps=1", "--out=~/run", "--disk=~/disk", "--trace=~/trace.json", "--data=~/own.txt")
    code, _, errors = answer(capfd, monkeypatch, work, *SMALL, *words)
    assert code == 0, errors
    assert {file.name for file in (work / "home").iterdir()} == {"own.txt", "run", "trace.json"}
    assert not (work / "~").exists()


def test_a_training_that_is_over_is_not_begun_again(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*SMALL, "--memory", "64MiB")
    code, _, errors = answer(capfd, monkeypatch, work, *words, "--steps", 2, "--out", "over", "--save-every", 2)
    assert code == 0, errors
    monkeypatch.setattr(train, "_train", lambda *_: pytest.fail("it was begun"))
    code, _, errors = answer(capfd, monkeypatch, work, *words, "--steps", 2, "--resume", "over")
    assert (code, errors) == (1, "protrain: --resume 'over' was saved after step 2; give more than --steps 2\n")
    code, _, errors = answer(capfd, monkeypatch, work, *words, "--steps", 3, "--resume", "over", "--out", "./over")
    assert (code, len(errors.splitlines())) == (1, 1)
    assert "--out './over' is the folder of --resume" in errors  # the checkpoint would be gone


def tensors_in(folder: Path) -> int:
    return sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpoints", [(), ("--save-every", 1)], ids=["the model", "a checkpoint"])
def test_a_disk_that_cannot_take_what_is_saved_is_refused_first(
    precision: str,
    checkpoints: tuple[Any, ...],
    work: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ("--memory", "64MiB", "--precision", precision, "--out", tmp_path / "out", *checkpoints)
    code, _, errors = answer(capfd, monkeypatch, work, *SMALL, *words, "--steps", 1)
    assert code == 0, errors
    size = tensors_in(tmp_path / "out")
    there = sum(512 * file.stat().st_blocks for file in (tmp_path / "out").iterdir())
    room = {"all": (size, 1.0), "half": ((size + 1) // 2, 0.5)}
    trained: list[str] = []

    def begin(*_: Any) -> None:
        trained.append("begun")
        raise PlanError("far enough")

    def ask(free: int, share: float, steps: int, out: str = "out") -> str:
        monkeypatch.setattr(machine, "room", lambda folder: (free, share) if folder == str(tmp_path) else None)
        more = ("--out", tmp_path / out / "model") if out != "out" else ()
        code, _, errors = answer(capfd, monkeypatch, work, *SMALL, *words, "--steps", steps, *more)
        assert (code, len(errors.splitlines())) == (1, 1), errors
        return errors

    monkeypatch.setattr(train, "_tokens", begin)
    what = "a checkpoint" if checkpoints else "the model"
    for free, share in room.values():
        assert "far enough" in ask(free, share, 1)  # what is there stays until the new one is whole
        assert ask(free - 1, share, 1) == (
            f"protrain: --out '{tmp_path / 'out'}': {what} takes {display.size_text(size)}; {display.size_text(free - 1)} are "
            "free on that disk: make room, or give a folder on another one\n"
        )
    assert "far enough" in ask(size, 1.0, 2)  # the second one has the room of what was there
    assert there >= size
    shutil.rmtree(tmp_path / "out")
    assert "far enough" in ask(2 * size, 1.0, 2)
    twice = ask(2 * size - 1, 1.0, 2)
    assert ("and stays until the next one is whole" if checkpoints else "far enough") in twice
    assert f"takes {display.size_text(size)}" in ask(0, 1.0, 1, "not/there")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("checkpoints", [(), ("--save-every", 1)], ids=["the model", "a checkpoint"])
def test_a_model_that_cannot_be_saved_is_an_error_of_out(
    checkpoints: tuple[Any, ...], work: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr(export, "write_tensors", full)
    monkeypatch.setattr(checkpoint, "write_tensors", full)
    words = ("--memory", "64MiB", "--steps", 1, "--out", tmp_path / "out", *checkpoints)
    code, _, errors = answer(capfd, monkeypatch, work, *SMALL, *words)
    assert (code, len(errors.splitlines())) == (1, 1), errors
    assert f"--out '{tmp_path / 'out'}' could not be saved: No space left on device; what was there" in errors
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_is_null(work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed, errors = answer(capfd, monkeypatch, work, *SMALL, "--memory", "64MiB", "--lr", "1e30", "--json")
    assert code == 0, errors
    lines = [json.loads(line, parse_constant=pytest.fail) for line in printed.splitlines()]
    assert [line["loss"] for line in lines[1:-1]] == [None, None]


@pytest.mark.usefixtures("fresh_cache")
def test_plan_shows_its_fields(work: Path) -> None:
    result = run(work, "plan", *SMALL[1:], "--memory", "64MiB", "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert len(plan["block_modes"]) == 4
    assert 0 < plan["peak_bytes"] <= 64 * MIB


def test_interrupted_training_is_130_and_leaves_its_trace_alone(work: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in work.iterdir())
    words = ("--steps", 1000000, "--memory", "4MiB", "--disk", "d", "--out", "o", "--trace", tmp_path / "trace.json")
    assert interrupted(work, *SMALL, *words) == (130, "")
    assert sorted(path.name for path in work.iterdir()) == before
    assert 2 <= len(steps_of(tmp_path / "trace.json")) <= 3
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def probe(folder: Path, lines: str) -> tuple[int, str, str]:
    """`python -m` of these lines, which say what the command does instead, and the command. Returns code, stdout and stderr."""
    (folder / "probe.py").write_text(
        f"import os, signal\nfrom protrain.cli import main\n{lines}main.sys.argv[1:] = ['doctor']\nmain.main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "probe"], cwd=folder, env=environment(), capture_output=True, text=True, check=False,
        timeout=HUNG_SECONDS,
    )  # fmt: skip
    return result.returncode, result.stdout, result.stderr


def test_one_more_interrupt_as_the_interpreter_ends_is_the_exit_code_too(tmp_path: Path) -> None:
    """The interpreter takes away handlers before it takes apart modules, which takes a second where torch is loaded."""
    lines = (
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):\n"
        "        kill(pid, number)\n"
        "late = Late()\n"
        "main.commands.invoke = lambda context: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert probe(tmp_path, lines) == (130, "", "")


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupt_in_code_that_is_made_from_text_is_the_exit_code_too(tmp_path: Path, name: str, code: int) -> None:
    """As a dataclass is while it is imported: Python would end the process by SIGINT when all is over."""
    text = f"import os, signal; os.kill(os.getpid(), signal.{name}); print(os.getpid())"
    assert probe(tmp_path, f"main.commands.invoke = lambda context: exec({text!r})\n") == (code, "", "")


def test_what_a_process_of_bench_refuses_is_told_as_a_training_tells_it(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", "tiny", "--seq", 32, "--memory", "10KiB")
    for command, begin in (("step", "protrain: --memory: the model"), ("activations", "protrain: keep: --memory: the model")):
        code, _, errors = answer(capfd, monkeypatch, work, "bench", command, *words)
        assert (code, len(errors.splitlines())) == (1, 1), errors
        assert errors.startswith(begin)


# ---- the curve of activations ----


def test_activations_are_measured_and_drawn(work: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    words = ("--model", "tiny", "--seq", 64, "--batch", 2, "--rounds", 1, "--mixes", 0, "--memory", "1GiB")
    page = tmp_path / "page.html"
    reported = ("--report", page) if importlib.util.find_spec("vl_convert") else ()
    result = run(work, "bench", "activations", *words, "--out", picture, *reported, "--json")
    assert result.returncode == 0, result.stderr
    *rows, summary = [json.loads(line) for line in result.stdout.splitlines()]
    assert {row["name"]: row["block_modes"] for row in rows} == {
        mode: [mode] * 4 for mode in ("keep", "swap", "checkpoint", "checkpoint_swap")
    }
    assert summary["equal_losses"]
    peaks = {row["name"]: row["activation_peak_bytes"] for row in rows}
    assert 0 < peaks["checkpoint"] < peaks["keep"]
    assert all(row["tokens_per_second"] == pytest.approx(128 / row["median_seconds"]) for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")
    if reported:
        text = page.read_text()
        assert re.findall('<h2 class="of">(.*?)</h2>', text) == ["keep", "swap", "checkpoint", "checkpoint_swap"]
        assert all(f"<td>{row['tokens_per_second']:,.0f}</td>" in text for row in rows)


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--out", "curve.svg"], "PNG"), (["--out", "nowhere/a.png"], "nowhere"), (["--seq", "129"], "129")]
)
def test_a_curve_that_cannot_be_made_is_one_line(
    work: Path, arguments: list[str], named: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = answer(capfd, monkeypatch, work, "bench", "activations", "--model", "tiny", "--seq", "64", *arguments)
    assert (code, len(errors.splitlines())) == (1, 1), errors
    assert named in errors


@pytest.mark.parametrize(("n_blocks", "n_mixes", "count"), [(8, 3, 10), (8, 0, 4), (1, 3, 4), (2, 9, 6)])
def test_mixes_lie_between_the_pure_modes(n_blocks: int, n_mixes: int, count: int) -> None:
    found = configurations(n_blocks, n_mixes)
    assert found[0].block_modes == ["keep"] * n_blocks
    assert len({tuple(configuration.block_modes) for configuration in found}) == len(found) == count
    assert all(len(configuration.block_modes) == n_blocks for configuration in found)
