"""The comparison with peers: who is in it, what a search keeps, wrong losses without a time, a run of what needs torch alone."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner

from protrain.cli.main import commands
from protrain.cli.words import CommandError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from peers import environments, listing, process, runner, show, swap  # noqa: E402

MIB = 1 << 20
QUICK = ("plain", "checkpoint", "save_on_cpu", "python_disk_hook", "fsdp2", "kernel_swap", "protrain")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small model's config."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 100}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    return str(folder)


def words(model: str, disk: Path, build: Path, **changed: Any) -> runner.Words:
    fields = {"memory": 64 * MIB, "seq": 32, "batch": 2, "rounds": 2, "seed": 0, "quick": True, "search": False}
    return runner.Words(model_name=model, disk=str(disk), build=str(build), **{**fields, **changed})


def peer(folder: Path, name: str, rows: str, script: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "peer.toml").write_text(f'documented = "nowhere"\n{rows}')
    (folder / name / "run.py").write_text(textwrap.dedent(script))


# Speaks for a peer, with losses of its own; `last` steps are made.
FAKE = """
    import json, os, sys

    left = {last}
    for line in sys.stdin:
        word, answer = line.strip(), {{}}
        if word == "make":
            answer = {{"seconds": 0.0, "base_bytes": 0}}
        elif word == "step":
            left -= 1
            answer = {{"seconds": 0.1, "loss": 4.0}} if left >= 0 else {{"error": "MemoryError: all is gone"}}
        elif word == "end":
            answer = {{"peak_bytes": 1, "whole_peak_bytes": 1, "base_bytes": 0, "versions": {{}}}}
        print(json.dumps(answer), flush=True)
"""


def one_row(name: str) -> str:
    return f'[[rows]]\nname = "{name}"\nsettings = [{{}}]\nquick = true\n'


@pytest.fixture(scope="module")
def found(tiny: str, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run over the peers that need torch alone, each with one setting, and over three that do something wrong."""
    folder = tmp_path_factory.mktemp("peers")
    for one in (one for one in listing.read_rows() if one.peer in QUICK):
        knobs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in one.settings[-1].items())
        settings = f"settings = [{{ {knobs} }}]"
        if one.name == listing.REFERENCE:
            settings = "settings = [{ fused = true }]"
        rows = f'[[rows]]\nname = "{one.name}"\nquick = true\nneeds_swap = {str(one.needs_swap).lower()}\n{settings}\n'
        peer(folder, one.peer, rows, (one.folder / "run.py").read_text())
    peer(folder, "wrong", one_row("wrong"), FAKE.format(last=99))
    peer(folder, "late", one_row("fails late"), FAKE.format(last=runner.WARM_STEPS + 1))
    peer(folder, "dies", one_row("dies"), "import os\nos.kill(os.getpid(), 9)\n")
    return runner.compare(words(tiny, disk, tmp_path_factory.mktemp("build")), lambda text: None, folder)


def row(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in found["rows"] if r["name"] == name)


def test_losses_are_plain_torchs_in_every_peer_that_has_a_time(found: dict[str, Any]) -> None:
    names = ("plain torch", "all-checkpoint", "save_on_cpu", "Python disk hook", "FSDP2, CPU offload", "protrain")
    assert {name: row(found, name)["verdict"] for name in names} == dict.fromkeys(names, "equal")
    expected = row(found, "plain torch")["losses"]
    assert len(set(expected)) == len(expected) == runner.WARM_STEPS + 2
    for name in names:
        assert row(found, name)["losses"] == expected
        assert len(row(found, name)["seconds"]) == 2
        assert row(found, name)["peak_bytes"] > 0
    assert found["rows"][0]["name"] == "plain torch"
    assert found["rows"][-1]["name"] == "protrain"


def test_a_peer_with_wrong_losses_is_shown_as_wrong_and_has_no_time(found: dict[str, Any]) -> None:
    wrong = row(found, "wrong")
    assert (wrong["verdict"], wrong["seconds"], wrong["median_seconds"], wrong["peak_bytes"]) == ("wrong", None, None, None)
    assert wrong["reason"].startswith("step 1: the loss is 4, plain torch's ")
    assert show.cells(wrong)[1:8] == ["–", "–", "–", "–", "", "", "wrong"]


def test_a_peer_that_ends_or_fails_says_how_and_others_go_on(found: dict[str, Any]) -> None:
    assert row(found, "dies")["verdict"] == "failed"
    assert "SIGKILL" in row(found, "dies")["reason"]
    assert row(found, "fails late")["reason"] == "MemoryError: all is gone"
    assert row(found, "fails late")["seconds"] is None


def test_the_table_the_page_and_the_picture_are_made_from_the_record(
    found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = {
        "cpu": "a processor", "cores": 2, "memory_bytes": 8 << 30, "swap_bytes": 0, "file_system": "ext4", "kernel": "6",
        "python": "3", "torch": "2", "transformers": "5",
    }  # fmt: skip
    whole = {
        "date": "today", "command": "protrain bench", "machine": machine, **json.loads(json.dumps(found)), "took_seconds": 372.4,
    }  # fmt: skip
    written = show.write(tmp_path, whole)
    assert json.loads((tmp_path / "peers.json").read_text()) == whole
    show.write(tmp_path, whole | {"extra": [float("nan")]})
    assert json.loads((tmp_path / "peers.json").read_text(), parse_constant=pytest.fail) == whole | {"extra": [None]}
    page = (tmp_path / "peers.md").read_text()
    show.print_table(whole)
    shown = capsys.readouterr().out
    for r in whole["rows"]:
        assert f"### {r['name']}" in page
        assert r["name"] in shown
        assert (f"{r['tokens_per_second']:,.0f}" if r["seconds"] else r["reason"]) in shown
    for name, why in show.behind(whole):
        assert f"- {name}: {why}." in page
        assert f"{name}: {why}" in shown
    for sentence in (*show.verdicts(whole), show.took(whole)):
        assert sentence in page
        assert sentence in shown
    assert ("peers.png" in written) == (importlib.util.find_spec("matplotlib") is not None)


# ---- whether protrain is ahead ----


def made_up(name: str, tokens: float, peak: int, to_ours: list[float] | None = None, **fields: Any) -> dict[str, Any]:
    """A row as the record has it; peak in MiB. to_ours: steps over protrain's, by default all as tokens/s have it."""
    to_ours = to_ours or [233 / tokens]
    given = {
        "name": name, "tokens_per_second": tokens, "seconds": [256 / tokens], "median_seconds": 256 / tokens,
        "peak_bytes": peak * MIB, "within_budget": peak <= 770, "offloads": "", "note": "", "reason": "", "ratio": 284 / tokens,
        "searched": [], "largest_layers": None, "largest_parameters": None, "largest_at_least": False, "largest_ended": "",
        "verdict": "equal", "setup_seconds": 1.0, "knobs": {}, "defaults": {}, "documented": "", "versions": {},
        "ratios": [284 / tokens], "to_ours": to_ours,
    }  # fmt: skip
    return {**given, **fields}


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    ours = made_up("protrain", 233, 727, offloads="states and activations to disk")
    return {"budget_bytes": 700 * MIB, "rows": [*rows, ours], "over": 1.1, "tolerance": 1e-3}


PLAIN = made_up("plain torch", 284, 1764, offloads="nothing")


@pytest.mark.parametrize(
    ("row", "word", "text"),
    [
        (
            PLAIN,
            "slower",
            "1.22 times as fast as protrain, at 1,764 MiB where protrain has 727: over the budget of 700 MiB; offloads nothing",
        ),
        (
            made_up("a", 116.5, 727, offloads="to disk"),
            "ahead",
            "0.50 times as fast as protrain, at 727 MiB where protrain has 727: within the budget of 700 MiB; offloads to disk",
        ),
        (
            made_up("a", 116.5, 400),
            "larger",
            "0.50 times as fast as protrain, at 400 MiB where protrain has 727: within the budget of 700 MiB",
        ),
        (
            made_up("a", 466, 400, note="it cheats"),
            "behind",
            "2.00 times as fast as protrain, at 400 MiB where protrain has 727: within the budget of 700 MiB; it cheats",
        ),
        (
            made_up("a", 230, 900, [0.8, 1.25, 1.3]),
            "even",
            "0.80 times as fast as protrain (0.78–1.02), at 900 MiB where protrain has 727: over the budget of 700 MiB",
        ),
    ],
)
def test_how_protrain_stands_to_a_peer_is_said_with_the_figures(row: dict[str, Any], word: str, text: str) -> None:
    (standing,) = show.standings(record(row))
    assert (standing.word, standing.text) == (word, text)
    assert show.behind(record(row)) == ([] if word == "ahead" else [(row["name"], text)])


def test_the_peers_that_offload_and_that_protrain_is_not_ahead_of_are_named() -> None:
    slow = made_up("slow", 100, 900, offloads="states to disk")
    quick = made_up("quick", 300, 900, offloads="activations to disk")
    none = made_up("none", 300, 900, median_seconds=None, reason="it fails")
    assert show.verdicts(record(PLAIN, slow, quick, none)) == [
        "protrain is ahead of 1 of the 3 other rows that have a time: faster in the same rounds, at equal or lower peak memory.",
        "Of the 2 that offload it is not ahead of quick.",
    ]
    assert show.verdicts(record(PLAIN, slow))[1] == "Of those that offload it is ahead of all 1."
    assert len(show.verdicts(record(PLAIN))) == 1
    lines = show._behind(record(PLAIN, quick))
    assert "## Where protrain is behind, and why" in lines
    assert "A step of protrain takes 1.22 of plain torch's, with 41 % of its peak memory." in lines
    assert len(show._behind(record(slow))) == 2
    without = record(PLAIN, quick)
    without["rows"][-1]["median_seconds"] = None
    assert show.standings(without) == show.verdicts(without) == show._behind(without) == []


def test_settings_with_wrong_losses_are_named_where_others_of_the_row_are_right() -> None:
    searched = [
        {"knobs": {"checkpoint": "non-reentrant"}, "verdict": "wrong", "reason": "step 2: the loss is 1, plain torch's 2"},
        {"knobs": {}, "verdict": "equal", "reason": ""},
    ]
    lines = show._wrong(record(made_up("a", 100, 900, searched=searched)))
    assert lines[2] == '- a, `checkpoint="non-reentrant"`: step 2: the loss is 1, plain torch\'s 2.'
    assert len(lines) == 4
    assert show._wrong(record(PLAIN)) == []


def test_how_long_the_command_took_is_said_and_whether_it_searched() -> None:
    assert show.took({}) == ""
    assert show.took({"took_seconds": 372.4, "kept_searches": 0}) == "The whole command took 6 min 12 s, its searches included."
    kept = show.took({"took_seconds": 61.0, "kept_searches": 5})
    assert kept == "The whole command took 61.0 s, with 5 of the searches kept from earlier runs."


# ---- the fastest and the leanest ----

# Speaks for a peer whose knobs are its speed, its peak in MiB and a factor of its losses.
KNOBS = """
    import json, sys

    knobs, steps = json.loads(sys.argv[1])["knobs"], 0
    for line in sys.stdin:
        answer = {"seconds": 0.0, "base_bytes": 0}
        if line.strip() == "step":
            steps += 1
            answer = {"seconds": knobs["seconds"], "loss": knobs.get("factor", 1.0) * 4.0 / steps}
        elif line.strip() == "end":
            answer = {"peak_bytes": knobs["peak"] << 20, "whole_peak_bytes": 1, "base_bytes": 0, "versions": {}}
        print(json.dumps(answer), flush=True)
"""


def test_where_no_setting_keeps_to_the_budget_the_fastest_and_the_leanest_are_two_rows(tiny: str, tmp_path: Path) -> None:
    settings = {
        "plain torch": "{ seconds = 0.2, peak = 200 }, { seconds = 0.3, peak = 100 }",
        "two": "{ seconds = 0.5, peak = 90 }, { seconds = 0.1, peak = 300 }, { seconds = 0.01, peak = 60 }",
        "one": "{ seconds = 0.1, peak = 90 }, { seconds = 0.5, peak = 300 }",
        "kept": "{ seconds = 0.1, peak = 300 }, { seconds = 0.5, peak = 60 }",
        "wrong": "{ seconds = 0.1, peak = 60, factor = 2.0 }, { seconds = 0.1, peak = 60, factor = 3.0 }",
    }
    for name, given in settings.items():
        peer(tmp_path / "peers", name, f'[[rows]]\nname = "{name}"\nquick = true\nsettings = [{given}]\n', KNOBS)
    folder = tmp_path / "peers"
    found = runner.compare(words(tiny, tmp_path, tmp_path / "build"), lambda text: None, folder)
    assert [(r["name"], r["setting"], r["median_seconds"], r["peak_bytes"]) for r in found["rows"]] == [
        ("plain torch", "", 0.2, 200 * MIB),  # the reference is one row, the fastest
        ("kept", "", 0.5, 60 * MIB),
        ("one", "", 0.1, 90 * MIB),
        ("two, fastest", "fastest", 0.1, 300 * MIB),
        ("two, leanest", "leanest", 0.5, 90 * MIB),
        ("wrong", "", None, None),
    ]
    assert [len(r["searched"]) for r in found["rows"]] == [2, 2, 2, 2, 0, 2]  # the third is for a whole run
    assert row(found, "two, fastest")["knobs"] == {"seconds": 0.1, "peak": 300}
    assert {r["verdict"] for r in found["rows"] if r["seconds"]} == {"equal"}
    assert row(found, "wrong")["reason"] == "step 1: the loss is 8, plain torch's 4"
    assert found["kept_searches"] == 0
    again = runner.compare(words(tiny, tmp_path, tmp_path / "build"), lambda text: None, folder)
    assert again["kept_searches"] == 5


# ---- the largest model ----

# Speaks for a peer that needs 10 MiB for each layer.
GROWING = """
    import json, pathlib, sys

    layers = json.loads((pathlib.Path(json.loads(sys.argv[1])["model_folder"]) / "about.json").read_text())["layers"]
    for line in sys.stdin:
        answer = {"seconds": 0.1, "loss": 4.0, "base_bytes": 0, "versions": {}}
        print(json.dumps(answer | {"peak_bytes": layers * 10 << 20, "whole_peak_bytes": 0}), flush=True)
"""


PEAK = "8 layers: a peak of 80 MiB"  # OVER * 64 MiB are 70
TRIED = [1, 2, 4, 8, 6, 7]


@pytest.mark.parametrize(
    ("most", "budget", "seconds", "largest", "ended", "tried"),
    [
        (256, 64, 600, (7, False), PEAK, TRIED),
        (4, 64, 600, (4, True), "more than 4 layers were not tried", TRIED[:3]),
        (6, 64, 600, (6, True), "more than 6 layers were not tried", [1, 2, 4, 6]),
        (256, 8, 600, (0, False), "1 layer: a peak of 10 MiB", [1]),
        (256, 64, 1.5, (4, True), "8 layers were not begun after 1.50 s", TRIED[:3]),
        (256, 64, 2, (4, True), "6 layers were not begun after 2.00 s", TRIED[:4]),
        (256, 64, 0, (0, False), "1 layer was not begun after 0.000 s", []),
    ],
)
def test_the_largest_model_is_the_one_whose_peak_the_budget_holds(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, budget: int, seconds: float,
    largest: tuple[int, bool], ended: str, tried: list[int],
) -> None:  # fmt: skip
    """Each size takes half a second."""
    made: list[int] = []

    def write_model(self: runner._Bench, name: str, layers: int) -> Path:
        made.append(layers)
        (self._scratch / name).mkdir()
        (self._scratch / name / "about.json").write_text(json.dumps({"layers": layers, "parameters": 1000 * layers}))
        return self._scratch / name

    monkeypatch.setattr(runner._Bench, "write_model", write_model)
    monkeypatch.setattr(runner, "GROW_SECONDS", seconds)
    monkeypatch.setattr(runner, "_now", functools.partial(next, itertools.count(0.5, 0.5)))
    peer(tmp_path / "peers", "one", one_row("one"), GROWING)
    asked = dataclasses.replace(words(tiny, tmp_path, tmp_path / "build", peers=("one",)), memory=budget * MIB)
    (found,) = runner.grow(asked, lambda text: None, most, tmp_path / "peers")
    assert (found.largest_layers, found.largest_at_least, found.largest_parameters) == (*largest, 1000 * largest[0])
    assert (found.largest_ended, made) == (ended, tried)


def test_the_largest_models_are_told_with_what_is_too_large() -> None:
    large = {"largest_layers": 40, "largest_parameters": 402_000_000, "largest_at_least": True, "largest_ended": "no time"}
    none = {"largest_layers": 0, "largest_parameters": 0, "largest_ended": "1 layer: a peak of 999 MiB"}
    found = record(PLAIN, made_up("large", 1, 600, **large), made_up("none", 1, 800, **none)) | {"model": "gpt2-demo"}
    assert show.largest_models(found) == [
        ("large", "≥ 402 M parameters in 40 layers; no time"),
        ("none", "none; 1 layer: a peak of 999 MiB"),
    ]
    assert [show.largest(row) for row in found["rows"]] == ["–", "≥ 402 M", "none", "–"]
    assert show.grown(found)
    assert not show.grown(record(PLAIN))
    assert not show._largest(record(PLAIN) | {"model": "gpt2-demo"})


# ---- Ctrl-C ----

# Speaks for a peer whose losses fall as the reference's, which is made of it as well.
FALLING = """
    import json, sys

    steps = 0
    for line in sys.stdin:
        answer = {"seconds": 0.0, "base_bytes": 0}
        if line.strip() == "step":
            steps += 1
            answer = {"seconds": 0.1, "loss": 4.0 / steps}
        elif line.strip() == "end":
            answer = {"peak_bytes": 1, "whole_peak_bytes": 1, "base_bytes": 0, "versions": {}}
        print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize("rounds", [0, 1])
def test_what_was_measured_before_ctrl_c_is_kept(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """It comes when the last of two in a round has been asked for a step, and has not answered."""
    for name in (listing.REFERENCE, "another"):
        peer(tmp_path / "peers", name, one_row(name), FALLING)
    whole, asked = runner._Runner.round, []

    def stopped(self: runner._Runner) -> float | None:
        asked.append(self.row.name)
        if len(asked) == 2 * (rounds + 1):
            assert self._process is not None
            assert self._process._process.stdin is not None
            self._process._process.stdin.write(b"step\n")
            self._process._process.stdin.flush()
            self._process._owes = True
            raise KeyboardInterrupt
        return whole(self)

    monkeypatch.setattr(runner._Runner, "round", stopped)
    given = words(tiny, tmp_path, tmp_path / "build", rounds=5)
    if not rounds:
        with pytest.raises(KeyboardInterrupt):
            runner.compare(given, lambda text: None, tmp_path / "peers")
        return
    found = runner.compare(given, lambda text: None, tmp_path / "peers")
    assert found["interrupted"]
    assert [(r["name"], len(r["seconds"]), r["verdict"], r["ratio"]) for r in found["rows"]] == [
        (listing.REFERENCE, 1, "equal", 1.0),
        ("another", 1, "equal", 1.0),
    ]
    assert show.title({**found, "model": "m"}).endswith("5 interleaved rounds, interrupted")


def test_an_interrupted_comparison_is_written_and_ends_as_ctrl_c_does(
    tiny: str,
    found: dict[str, Any],
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "compare", lambda *_: {**found, "interrupted": True})
    words = ["--model", tiny, "--seq", "32", "--disk", str(disk), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(commands, ["bench", *words])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    written = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert written["interrupted"]
    assert 0 < written["took_seconds"] < 60
    measured = sum(r["seconds"] is not None for r in found["rows"])
    line = f"interrupted with {measured} of {len(found['rows'])} rows measured: this is what was measured until then"
    assert line in result.output


# ---- parts ----


def test_a_loss_that_is_no_number_or_far_off_is_wrong() -> None:
    assert runner.judge([2.0, 1.0], [2.0, 1.0, 0.5])[0] == "equal"
    assert runner.judge([2.0, 1.0000001], [2.0, 1.0])[0] == "close"
    assert runner.judge([2.0, float("nan")], [2.0, 1.0])[0] == "wrong"
    verdict, reason, difference = runner.judge([2.0, 1.1], [2.0, 1.0])
    assert (verdict, reason, difference) == ("wrong", "step 2: the loss is 1.1, plain torch's 1", pytest.approx(0.1))


@pytest.mark.parametrize(
    ("settings", "best"),
    [
        ([("equal", 3.0, 90), ("equal", 1.0, 150), ("close", 2.0, 105)], [2]),  # keeps to the budget, nearly, and is faster
        ([("equal", 9.0, 200), ("close", 4.0, 205), ("equal", 1.0, 300)], [2, 1]),  # none does: the fastest, and of the least
        ([("equal", 4.0, 200), ("close", 9.0, 205), ("equal", 3.9, 300)], [0]),  # which is nearly as fast as any
        ([("wrong", 1.0, 50), ("equal", 5.0, 500)], [1]),
        ([("wrong", 1.0, 50), ("failed", 0.0, 0)], []),
    ],
)
def test_the_best_setting_is_right_first_then_in_the_budget_then_fast(
    settings: list[tuple[str, float, int]], best: list[int]
) -> None:
    made = [runner.Setting({"n": n}, verdict, "", s, peak) for n, (verdict, s, peak) in enumerate(settings)]
    assert [setting.knobs["n"] for setting in runner.best_settings(made, 100)] == best


def test_a_search_is_kept_for_the_same_words_alone(tiny: str, tmp_path: Path) -> None:
    rows = '[[rows]]\nname = "a row"\nsettings = [{}, { a = 1 }]\n'
    peer(tmp_path / "peers", "one", rows, "pass")
    (one,) = listing.read_rows(tmp_path / "peers")
    benches = [
        runner._Bench(words(tiny, tmp_path, tmp_path / "build", **changed), lambda text: None, tmp_path)
        for changed in ({}, {"memory": 65 * MIB}, {"search": True})
    ]
    setting = runner.Setting({"a": 1}, "equal", "", 1.0, 2)
    benches[0]._keep(one, [setting])
    assert [bench._kept(one) for bench in benches] == [[setting], [], []]
    (one.folder / "run.py").write_text("another")
    assert benches[0]._kept(one) == []


def test_every_peer_is_read_and_what_is_no_row_is_refused(tmp_path: Path) -> None:
    rows = listing.read_rows()
    assert len({r.name for r in rows}) == len(rows)
    for r in rows:
        assert (r.folder / "run.py").is_file() or r.refused
        assert r.settings or r.refused
        assert r.offloads, r.name
    assert {r.peer for r in rows} >= {*QUICK, "deepspeed"}
    peer(tmp_path, "odd", '[[rows]]\nname = "odd"\nsettings = [{}]\nknob = 3\n', "")
    with pytest.raises(ValueError, match="knob"):
        listing.read_rows(tmp_path)


def test_a_name_that_no_peer_has_is_one_line(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no peer 'deepspeeed'; give some of .*deepspeed"):
        runner.compare(words(tiny, tmp_path, tmp_path, peers=("deepspeeed",)), lambda text: None)


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "requirements.txt").write_text("./no-such-folder\n")
    with pytest.raises(environments.InstallError, match=r"does not install: .*no-such-folder"):
        environments.environment(tmp_path / "peer", tmp_path / "build")


def test_what_the_dead_were_compiling_goes(tmp_path: Path) -> None:
    """Of two that compile one was killed; the other one has its lock open, as torch's FileBaton has."""
    dead, living = tmp_path / "one" / "lock", tmp_path / "other" / "lock"
    for lock in (dead, living):
        lock.parent.mkdir()
        lock.touch()
    with open(living):
        environments.drop_dead_extensions(tmp_path)
        assert (dead.parent.exists(), living.exists()) == (False, True)
    environments.drop_dead_extensions(tmp_path)
    assert not living.parent.exists()


def test_one_comparison_at_a_time(tiny: str, disk: Path, tmp_path: Path) -> None:
    with environments.alone(tmp_path), pytest.raises(process.PeerError, match=f"another comparison uses {tmp_path}: wait for"):
        runner.compare(words(tiny, disk, tmp_path), lambda _: None)


def test_a_machine_without_swap_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nSwapTotal:  4 kB\n")
    assert swap.swap_total(tmp_path / "meminfo") == 4096
    monkeypatch.setattr(swap, "swap_total", lambda: 0)
    with pytest.raises(swap.NoSwapError, match="no swap"):
        swap.prefix(MIB)


def test_what_hangs_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with (
        process.PeerProcess(Path(sys.executable), script, {"disk": str(tmp_path)}) as hanging,
        pytest.raises(process.PeerError, match="no answer to 'make' in 0 s"),
    ):
        hanging.ask("make", seconds=0.2)
    assert [path.name for path in tmp_path.iterdir()] == ["run.py"]


def test_deepspeed_finds_the_losses_of_plain_torch(tiny: str, disk: Path) -> None:
    """Where it was installed by an earlier run of the comparison."""
    if not (ROOT / "build" / "peers" / "deepspeed" / "made.json").is_file():
        pytest.skip("build/peers/deepspeed is not there; protrain bench --quick --peers deepspeed makes it")
    found = runner.compare(words(tiny, disk, ROOT / "build" / "peers", peers=("DeepSpeed ZeRO-2, CPU",)), lambda text: None)
    assert row(found, "DeepSpeed ZeRO-2, CPU")["verdict"] in ("equal", "close"), row(found, "DeepSpeed ZeRO-2, CPU")


# ---- the command ----


def test_options_before_a_command_are_wrong_words() -> None:
    result = CliRunner().invoke(commands, ["bench", "--quick", "step"])
    assert result.exit_code == 2
    assert "options of step come after it: quick" in result.output


def test_the_command_refuses_a_peer_that_is_not_there(tiny: str, disk: Path) -> None:
    words = ["--peers", "nobody", "--model", tiny, "--seq", "32", "--disk", str(disk)]
    result = CliRunner().invoke(commands, ["bench", "--quick", *words])
    assert isinstance(result.exception, CommandError)
    assert str(result.exception).startswith("no peer 'nobody'; give some of ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "nothing"], "no model 'nothing'; give a folder"),
        (["--model", "gpt2-bytes", "--seq", "999999"], "--seq 999999 is longer than the model's longest sequence of "),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_before_a_process_is_started(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "compare", None)
    result = CliRunner().invoke(commands, ["bench", "--quick", *words])
    assert isinstance(result.exception, CommandError), result.exception
    assert str(result.exception).startswith(line)
