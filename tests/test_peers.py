"""The comparison with peers: who is in it, what a search keeps, wrong losses without a time, a run of what needs torch alone."""

from __future__ import annotations

import importlib.util
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
QUICK = ("plain", "checkpoint", "save_on_cpu", "python_disk_hook", "kernel_swap", "protrain")


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
    names = ("plain torch", "all-checkpoint", "save_on_cpu", "Python disk hook", "protrain")
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
    assert show.cells(wrong)[1:7] == ["–", "–", "–", "–", "", "wrong"]


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
    whole = {"date": "today", "command": "protrain bench", "machine": machine, **json.loads(json.dumps(found))}
    written = show.write(tmp_path, whole)
    assert json.loads((tmp_path / "peers.json").read_text()) == whole
    page = (tmp_path / "peers.md").read_text()
    show.print_table(whole)
    shown = capsys.readouterr().out
    for r in whole["rows"]:
        assert f"### {r['name']}" in page
        assert r["name"] in shown
        assert (f"{r['tokens_per_second']:,.0f}" if r["seconds"] else r["reason"]) in shown
    assert ("peers.png" in written) == (importlib.util.find_spec("matplotlib") is not None)


# ---- the largest model ----

# Speaks for a peer that needs 10 MiB for each layer.
GROWING = """
    import json, pathlib, sys

    layers = json.loads((pathlib.Path(json.loads(sys.argv[1])["model_folder"]) / "about.json").read_text())["layers"]
    for line in sys.stdin:
        answer = {"seconds": 0.1, "loss": 4.0, "base_bytes": 0, "versions": {}}
        print(json.dumps(answer | {"peak_bytes": layers * 10 << 20, "whole_peak_bytes": 0}), flush=True)
"""


@pytest.mark.parametrize(("most", "largest", "tried"), [(256, (7, False), [1, 2, 4, 8, 6, 7]), (4, (4, True), [1, 2, 4])])
def test_the_largest_model_is_the_one_whose_peak_the_budget_holds(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, largest: tuple[int, bool], tried: list[int]
) -> None:
    made = []

    def write_model(self: runner._Bench, name: str, layers: int) -> Path:
        made.append(layers)
        (self._scratch / name).mkdir()
        (self._scratch / name / "about.json").write_text(json.dumps({"layers": layers, "parameters": 1000 * layers}))
        return self._scratch / name

    monkeypatch.setattr(runner._Bench, "write_model", write_model)
    peer(tmp_path / "peers", "one", one_row("one"), GROWING)
    (found,) = runner.grow(words(tiny, tmp_path, tmp_path / "build", peers=("one",)), lambda text: None, most, tmp_path / "peers")
    assert (found.largest_layers, found.largest_at_least, found.largest_parameters) == (*largest, 1000 * largest[0])
    assert made == tried


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
    """It comes when the second of two has been asked for a step, and has not answered."""
    for name in (listing.REFERENCE, "another"):
        peer(tmp_path / "peers", name, one_row(name), FALLING)
    whole, asked = runner._Runner.round, []

    def stopped(self: runner._Runner) -> None:
        asked.append(self.row.name)
        if len(asked) == 2 * (rounds + 1):
            assert self._process is not None
            assert self._process._process.stdin is not None
            self._process._process.stdin.write(b"step\n")
            self._process._process.stdin.flush()
            self._process._owes = True
            raise KeyboardInterrupt
        whole(self)

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
    result = CliRunner().invoke(commands, ["bench", "--model", tiny, "--disk", str(disk), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert json.loads((tmp_path / "out" / "peers.json").read_text())["interrupted"]
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
        ([("equal", 3.0, 90), ("equal", 1.0, 150), ("close", 2.0, 105)], 2),  # keeps to the budget, nearly, and is faster
        ([("equal", 9.0, 200), ("close", 4.0, 205), ("equal", 1.0, 300)], 1),  # none does: the fastest of the least
        ([("wrong", 1.0, 50), ("equal", 5.0, 500)], 1),
        ([("wrong", 1.0, 50), ("failed", 0.0, 0)], None),
    ],
)
def test_the_best_setting_is_right_first_then_in_the_budget_then_fast(
    settings: list[tuple[str, float, int]], best: int | None
) -> None:
    made = [runner.Setting({"n": n}, verdict, "", s, peak) for n, (verdict, s, peak) in enumerate(settings)]
    kept = runner.best_setting(made, 100)
    assert (None if kept is None else kept.knobs["n"]) == best


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
    assert {r.peer for r in rows} >= {*QUICK, "deepspeed", "fsdp2"}
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
    result = CliRunner().invoke(commands, ["bench", "--quick", "--peers", "nobody", "--model", tiny, "--disk", str(disk)])
    assert isinstance(result.exception, CommandError)
    assert str(result.exception).startswith("no peer 'nobody'; give some of ")
