"""Ctrl-C during `protrain bench step` and `bench activations`: what was measured is shown and written; one line says so."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from protrain.cli import bench, bench_activations, bench_peers
from protrain.cli.words import CommandError

MIB = 1 << 20
PLAN = {"n_persist": 3, "n_chunks": 3}


class Scripted:
    """A child that answers at once. stop: behind so many steps of all of them Ctrl-C comes instead of an answer."""

    stop = 0
    steps = 0

    def __init__(self, kind: str, words: dict[str, Any], name: str | None = None) -> None:
        self.modes, self.owes = words.get("block_modes"), False

    def ask(self, word: str, seconds: float | None = None) -> dict[str, Any]:
        if word == "step":
            Scripted.steps += 1
            if Scripted.steps > Scripted.stop:
                raise KeyboardInterrupt
            return {"seconds": 0.5, "loss": 4.0}
        status = {
            "plan": {**PLAN, "block_modes": self.modes}, "peak_memory_bytes": 9, "memory_bytes": 4, "wait_seconds": 0.0,
            "disk_read_bytes": 0, "disk_write_bytes": 0, "steps": 4,
        }  # fmt: skip
        return {"peak_resident_bytes": 2 * MIB, "base_resident_bytes": MIB, "budget_bytes": MIB, "status": status}

    def end(self) -> None:
        pass


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 100}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    def stop(steps: int) -> None:
        Scripted.stop, Scripted.steps = steps, 0

    monkeypatch.setattr(bench, "Child", Scripted)
    monkeypatch.setattr(bench_activations, "Child", Scripted)
    return stop


def step_words(model: str) -> bench.Words:
    return bench.Words(model, None, 32, 1, 5, 0, None, True)


def test_bench_step_shows_the_rounds_that_were_complete(tiny: str, stop_at: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stop_at(2 * (bench.WARM_STEPS + 2) + 1)
    with pytest.raises(KeyboardInterrupt):
        bench.run(step_words(tiny))
    found = json.loads(capsys.readouterr().out)
    assert (found["rounds"], found["interrupted"], found["plain"]["seconds"]) == (2, True, [0.5, 0.5])
    stop_at(2 * (bench.WARM_STEPS + 2) + 1)
    with pytest.raises(KeyboardInterrupt):
        bench.run(bench.Words(**{**vars(step_words(tiny)), "as_json": False}))
    assert capsys.readouterr().out.endswith("interrupted after 2 of 5 rounds: this is what was measured until then\n")


def test_before_the_first_round_there_is_nothing_to_show(
    tiny: str, stop_at: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But a line says so."""

    def no_peer_was_measured(*_: Any) -> Any:
        raise KeyboardInterrupt

    said = ("", "interrupted before there was anything to show\n")
    stop_at(2 * bench.WARM_STEPS + 1)
    with pytest.raises(KeyboardInterrupt):
        bench.run(step_words(tiny))
    assert capsys.readouterr() == said
    stop_at(bench.WARM_STEPS)
    with pytest.raises(KeyboardInterrupt):
        bench_activations.run(bench_activations.Words(tiny, 64 * MIB, 32, 1, 2, 0, 0, None, None, True))
    assert capsys.readouterr() == said
    monkeypatch.syspath_prepend(str(bench_peers.BENCHMARKS))
    monkeypatch.setattr("peers.runner.compare", no_peer_was_measured)
    with pytest.raises(KeyboardInterrupt):
        bench_peers.run(bench_peers.Words(tiny, 64 * MIB, 32, 1, 2, 0, None, True, False, (), None, True))
    assert capsys.readouterr() == said


def test_a_peer_whose_loss_is_no_number_is_in_json_as_null(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"verdict": "wrong", "losses": [4.0, float("nan")], "largest_difference": float("inf"), "seconds": None}
    monkeypatch.syspath_prepend(str(bench_peers.BENCHMARKS))
    monkeypatch.setattr("peers.runner.compare", lambda *_: {"rows": [row], "interrupted": False})
    bench_peers.run(bench_peers.Words(tiny, 64 * MIB, 32, 1, 2, 0, None, True, False, (), None, True))
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]
    assert (found["losses"], found["largest_difference"]) == ([4.0, None], None)


def test_the_curve_is_drawn_of_what_was_measured(
    tiny: str, stop_at: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory has room for one configuration beside keep, so that each has a group of its own; the second is interrupted."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_activations, "_free_bytes", lambda used: 3 * MIB if used == 2 * MIB else 0)
    stop_at(2 * bench.WARM_STEPS + 2 * 3 + bench.WARM_STEPS + 1)
    words = bench_activations.Words(tiny, 64 * MIB, 32, 1, 3, 0, 0, None, str(tmp_path / "curve.png"), True)
    with pytest.raises(KeyboardInterrupt):
        bench_activations.run(words)
    *found, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert [one["name"] for one in found] == summary["configurations"] == ["swap", "keep"]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_is_shown_where_the_curve_cannot_be_written(
    tiny: str, stop_at: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bench_activations, "_free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr("protrain.cli.bench_plot.write_file", full)
    stop_at(1 << 20)
    words = bench_activations.Words(tiny, 64 * MIB, 32, 1, 1, 0, 0, None, str(tmp_path / "curve.png"), False)
    with pytest.raises(CommandError, match=r"--out .*curve\.png' cannot be written: No space left on device"):
        bench_activations.run(words)
    assert "time to keep's is the median" in capsys.readouterr().out
