"""The comparison on a GPU, run whole where there is none: every figure is there and makes sense, and what is missing says why."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from standin import StandIn

from protrain.device import compute
from protrain.planner.profiles import Machine, Speed
from protrain.profiling.timeline import Event, Timeline

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu import apart, driver, figures, largest, measure, modes, run  # noqa: E402
from gpu.systems import PLAIN, SYSTEMS, Settings, System, deepspeed_configuration  # noqa: E402

MIB = 1 << 20
SMALL = (
    "--device", "cpu", "--layers", "2", "--hidden", "64", "--vocabulary", "256", "--seq", "16", "--batch", "2", "--steps", "2",
    "--memory", "16MiB", "--most-layers", "4", "--minutes", "60",
)  # fmt: skip
WITH_TORCH = [name for name, system in SYSTEMS.items() if not system.package and not system.refused]
OTHERS = [name for name in SYSTEMS if name not in WITH_TORCH]


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


@pytest.fixture(scope="module")
def whole(disk: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the one command writes: figures, and the table."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTRAIN_DISK", str(disk))
        assert run.main([*SMALL, "--out", str(out)]) == 0
    return json.loads(out.read_text()), Path(f"{out}.txt").read_text()


# ---- the whole ----


def test_every_figure_is_there(whole: tuple[dict[str, Any], str]) -> None:
    found, _ = whole
    assert list(found["systems"]) == list(SYSTEMS)
    for name in WITH_TORCH:
        one = found["systems"][name]
        assert measure.NOT_TOLD.keys() < one.keys(), f"{name}: {one}"
        assert one["tokens_per_second"] == pytest.approx(32 / one["step_seconds"])
        assert one["last_loss"] == pytest.approx(found["systems"][PLAIN]["last_loss"], abs=1e-4)
        assert "ended" not in one
    for name in ("protrain", "protrain, blocks swap"):
        one = found["systems"][name]
        assert 0 < one["peak_bytes"] <= 16 * MIB
        assert one["planned_over_measured_peak"] == one["planned_peak_bytes"] / one["peak_bytes"]
        assert one["planned_over_measured_seconds"] == one["planned_seconds"] / one["step_seconds"]
        assert sum(one["block_modes"].values()) == 2
        assert one["largest"]["layers"] == 4
        assert one["largest"]["ended"] == largest.NO_MORE
        assert one["largest"]["parameters"] == 4 * (12 * 64**2 + 13 * 64) + (256 + 64 + 2) * 64
    assert found["systems"]["protrain, blocks swap"]["block_modes"] == {"swap": 2}
    assert found["systems"][PLAIN]["largest"] == {"not_measured": "torch keeps no budget on the CPU"}
    assert found["host"]["adam_bytes_per_second"] > 0
    assert found["host"]["copy_bytes_per_second"] > 0
    assert found["memory_gib"] == 16 / 1024
    assert found["settings"]["layers"] == 2


def test_the_table_says_it(whole: tuple[dict[str, Any], str]) -> None:
    found, text = whole
    lines = text.splitlines()
    assert max(map(len, lines)) <= 200
    for head in (
        "planned/measured", "planned/measured peak", "reserved/live", "NVML", "largest model in 16MiB", "CPU Adam in steps",
        "of calibration",
    ):  # fmt: skip
        assert head in text
    assert f"{found['systems']['protrain']['planned_over_measured_peak']:.3f}" in text
    assert f"CPU Adam alone, {found['host']['threads']} threads: " in text
    for name in OTHERS:
        assert any(line.startswith(f"{name}: skipped: ") for line in lines)
    assert "Megatron-core: skipped: it trains transformers of its own, not this model, so it is never measured" in lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 0
    assert capsys.readouterr().out == "skipped: no GPU\n"


# ---- over a device ----


def told(name: str, *more: str) -> dict[str, Any]:
    """What a system's process tells, in this one."""
    found: dict[str, Any] = {}
    measure.work(run.parser().parse_args([*SMALL, *more, "--system", name]), found.update)
    return found


def test_lanes_and_updates_over_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core's host device stands for a GPU: what moves there is timed and compared as it is on one."""
    monkeypatch.setattr(compute, "stand_in", StandIn())
    sizes = ("--hidden", "256", "--memory", "12MiB", "--host-memory", "1GiB", "--most-layers", "0")
    found = told("protrain, blocks swap", *sizes)
    assert found["chunks"]["host"] > 0, found
    assert found["adam_bytes_per_second"] > 0
    link = found["link"]
    for lane in ("upload", "offload"):
        assert link[lane]["bytes"] > MIB
        assert link[lane]["share"] == link[lane]["bytes_per_second"] / link[lane]["measured_bytes_per_second"] > 0
    results = {"protrain, blocks swap": found}
    line = run.lanes_table(results, {"adam_bytes_per_second": 1e12, "copy_bytes_per_second": 1e12, "threads": 2})[1]
    assert f"{link['upload']['share']:.0%}" in line
    assert "largest" not in found


def test_shares_of_the_link() -> None:
    """Bytes over the time in which the lane was busy, of which two transfers at once are counted once."""
    events = (
        Event("upload", "parameters chunk 1", 0.0, 1.0, 600),
        Event("upload", "parameters chunk 2", 0.5, 2.0, 400),
        Event("offload", "gradients chunk 1", 3.0, 3.5, 100),
        Event("read", "parameters chunk 1", 0.0, 4.0, 999),
    )
    found = figures.link_shares(
        Timeline(1, 4.0, events, 0), Machine(upload=Speed(1000.0), offload=Speed(400.0), link_overlap=1.5)
    )
    assert (found["upload"]["busy_seconds"], found["upload"]["bytes"], found["upload"]["share"]) == (2.0, 1000, 0.5)
    assert (found["offload"]["busy_seconds"], found["offload"]["bytes"], found["offload"]["share"]) == (0.5, 100, 0.5)
    assert found["link_overlap"] == 1.5
    assert figures.link_shares(Timeline(1, 4.0, (), 0), Machine()) == {}


def test_a_budget_that_is_too_small_is_told_and_bounds_the_search() -> None:
    found = told("protrain", "--memory", "1MiB", "--hidden", "128", "--layers", "8")
    assert found["does_not_fit"].startswith("memory: ")
    assert found["largest"]["layers"] < 8
    assert found["largest"]["fails_at_layers"] <= found["largest"]["layers"] + 1
    assert found["largest"]["ended"] == largest.FOUND


def test_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_model: Any, _settings: Settings) -> Any:
        raise ValueError("no\nmore")

    monkeypatch.setitem(SYSTEMS, PLAIN, System(fail))
    assert told(PLAIN) == {"failed": "ValueError: no"}


# ---- the largest model ----


@pytest.mark.parametrize("limit", [0, 1, 5, 16, 47, 48, 100, 1000])
@pytest.mark.parametrize("first", ["nothing", "trains", "fails"])
def test_the_search_finds_the_largest(limit: int, first: str) -> None:
    """To a sixteenth; and it tries nothing that is known."""
    tried: list[int] = []

    def trains(layers: int) -> bool:
        tried.append(layers)
        return layers <= limit

    known = {"nothing": {}, "trains": {"trained": min(limit, 48)}, "fails": {"failed": max(limit + 1, 48)}}[first]
    found = largest.search(trains, until=float("inf"), most=4096, **known)  # type: ignore[arg-type]
    assert found["layers"] <= limit < found["fails_at_layers"]
    assert found["fails_at_layers"] - found["layers"] <= max(limit // 16, 1)
    assert found["ended"] == largest.FOUND
    assert len(set(tried)) == len(tried) <= 20
    assert not set(tried) & {0, *known.values()}


def test_the_search_tries_no_more_than_was_asked_for() -> None:
    found = largest.search(lambda _: True, until=float("inf"), most=4, failed=48)
    assert found == {"layers": 4, "fails_at_layers": 48, "ended": largest.NO_MORE}


def test_the_search_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is begun that would not end in time, by what the last try took; what is known so far was told."""
    now = [0.0]
    monkeypatch.setattr(largest, "time", Namespace(monotonic=lambda: now[0]))
    notes: list[dict[str, Any]] = []

    def trains(layers: int) -> bool:
        now[0] += layers
        return True

    found = largest.search(trains, until=100.0, most=4096, note=notes.append)
    assert now[0] <= 100
    assert found == notes[-1] == {"layers": 32, "fails_at_layers": None, "ended": largest.NO_TIME}
    assert [note["layers"] for note in notes] == [0, 1, 2, 4, 8, 16, 32]


# ---- processes ----


def test_what_outlives_its_time_is_ended_with_all_it_started() -> None:
    """Nobody waits for a grandchild that has the output."""
    inner = "import time; time.sleep(600)"
    code = (
        "import subprocess, sys, time\n"
        f"inner = subprocess.Popen([sys.executable, '-c', {inner!r}])\n"
        "print('{\"inner\": ' + str(inner.pid) + '}', flush=True)\n"
        "time.sleep(600)\n"
    )
    ended = apart.run([sys.executable, "-c", code], 15.0)
    assert ended.code is None
    assert gone(json.loads(ended.out)["inner"])


def gone(number: int) -> bool:
    """Whether a process has ended; it may not be waited for yet, by nobody of ours."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.1)
    return False


def test_how_a_process_ended() -> None:
    assert apart.run([sys.executable, "-c", "print(1); raise SystemExit('no room')"], 60).reason() == "no room"
    killed = apart.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], 60)
    assert killed.reason() == "the process was ended by SIGKILL"


@pytest.mark.parametrize(
    ("ended", "want"),
    [
        (apart.Ended(None, "", ""), {"not_measured": "not done in the 15 s left for it"}),
        (
            apart.Ended(None, '{"step_seconds": 1}\n{"largest": {"layers": 4}}\n', ""),
            {"step_seconds": 1, "largest": {"layers": 4}},
        ),
        (apart.Ended(1, "words\n", "Traceback\nValueError: no"), {"failed": "ValueError: no"}),
        (apart.Ended(-9, '{"step_seconds": 1}\n', ""), {"step_seconds": 1, "ended": "the process was ended by SIGKILL"}),
    ],
)
def test_what_a_process_tells(ended: apart.Ended, want: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that was over is no failure, and loses nothing that was told."""
    commands: list[tuple[list[str], float]] = []
    monkeypatch.setattr(apart, "run", lambda command, seconds: commands.append((command, seconds)) or ended)
    words = run.parser().parse_args([*SMALL])
    words.end = time.monotonic() + 1000
    assert run.run_apart(words, "protrain", 10.0) == want
    (command, seconds) = commands[0]
    assert seconds == 15.0
    assert command[2:4] == ["--system", "protrain"]
    again = run.parser().parse_args(command[2:])
    assert (again.hidden, again.memory, again.most_layers) == (64, "16MiB", 4)


def test_nobody_begins_when_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    words = run.parser().parse_args([*SMALL, "--only", PLAIN])
    words.end = time.monotonic() - 1
    assert run.run_all(words) == {PLAIN: {"not_measured": "no time was left for it"}}


# ---- others ----


def test_deepspeed_trains_what_the_others_train() -> None:
    """Its own defaults are a micro batch that is another, and clipping."""
    found = deepspeed_configuration(Settings(1 << 30, "cuda", None, None, 4))
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["gradient_clipping"] == 0.0
    assert found["optimizer"]["params"] == {"lr": 1e-4, "weight_decay": 0.01}
    assert found["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}


# ---- NVML ----


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program that stands for nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_what_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/words; echo "17, 300"; echo "170, 7"; echo "17, 24"')
    assert driver.told_bytes("GPU-1", 17) == 324 * MIB
    assert "--id=GPU-1" in (tmp_path / "words").read_text()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo "17, [N/A]"', r"nvidia-smi says \[N/A\] of the memory of process 17"),
        ('echo "[N/A], 300"', "lists no process 17"),
        ("exit 0", "lists no process 17"),
        ("echo 'No devices were found'; exit 6", "exit code 6 and said No devices were found"),
    ],
)
def test_what_the_driver_does_not_tell(script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, script)
    with pytest.raises(driver.NotTold, match=said):
        driver.told_bytes("GPU-1", 17)


def test_no_program_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(driver.NotTold, match="cannot be asked"):
        driver.told_bytes("GPU-1", 17)


def test_the_command_is_a_program() -> None:
    """As the documentation has it."""
    done = subprocess.run([sys.executable, ROOT / "benchmarks/gpu/run.py", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--most-layers" in done.stdout


# ---- modes ----


def test_every_mode_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "modes.json"
    small = [word for word in SMALL if word not in ("--most-layers", "4", "--minutes", "60", "--memory", "16MiB")]
    assert modes.main([*small, "--memory", "64MiB", "1MiB", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["cases"]
    assert json.loads(capsys.readouterr().out)["cases"] == found
    named = {f"all {mode}": {mode: 2} for mode in modes.MODES}
    assert list(found) == ["in 64MiB", "in 1MiB", *named, "plain torch"]
    assert "smallest budget" in found["in 1MiB"]["does_not_fit"]
    for name, one in found.items():
        if name == "in 1MiB":
            continue
        assert (one["first_loss"], one["last_loss"]) == (found["plain torch"]["first_loss"], found["plain torch"]["last_loss"])
        assert min(one["seconds_waited_for"], one["seconds_ordered"], one["seconds_not_waited_for"]) > 0
        if name in named:
            assert one["block_modes"] == named[name]
            assert 0 < one["peak_bytes"] <= 64 * MIB
