"""The report: what is on the page is what was measured, it fetches nothing, and a browser shows it whole."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import transformers
from browser import WIDTHS, Tags, looks_of
from conftest import LanguageModel, TokenBatches
from program import answer, interrupted, run
from standin import StandIn
from twins import adamw, loss_of

import protrain
from protrain.cli import report, report_charts, report_pieces, words
from protrain.device import compute
from protrain.profiling import timeline
from protrain.runtime import samples
from protrain.runtime.homes import Homes

PARTS = ("parameter_bytes", "state_bytes", "slot_bytes", "ring_bytes", "gradient_bytes", "stash_bytes", "rest_bytes")


# ---- memory by kind ----


def watched(model: Any, optimizer: Any, batches: list[Any]) -> Any:
    found = protrain.session_of(model).watch_memory()
    for ids in batches:
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("modes", [["keep"] * 4, ["checkpoint"] * 4, ["swap", "keep", "checkpoint", "swap"]])
def test_the_kinds_of_memory_make_all_of_it(
    causal_lm: LanguageModel, token_batches: TokenBatches, fresh_disk: Path, modes: list[str]
) -> None:
    model = causal_lm("gpt2", hidden=128)
    model, optimizer = protrain.wrap(model, adamw(model), memory="14MiB", disk=fresh_disk, block_modes=modes)
    found = watched(model, optimizer, token_batches(3)).last
    assert found.step == 3
    assert [s.moment for s in found.samples if "forward of" in s.moment] == [f"after forward of block {i}" for i in range(4)]
    assert all(sum(getattr(s, part) for part in PARTS) == s.live_bytes <= s.highest_bytes for s in found.samples)
    first, last = found.samples[0], found.samples[-1]
    plan = found.plan
    assert first.slot_bytes == plan.slot_bytes
    assert first.ring_bytes == plan.ring_bytes
    assert first.parameter_bytes + first.state_bytes == plan.persistent_bytes
    assert first.rest_bytes < 64 << 10  # between steps: nothing but the batch
    assert last.rest_bytes < 64 << 10
    assert max(s.gradient_bytes for s in found.samples) > 0
    assert found.peak_bytes <= protrain.status(model).peak_memory_bytes <= 14 << 20
    protrain.unwrap(model)


def test_the_peak_of_a_step_is_seen_between_the_last_block_and_its_backward(
    causal_lm: LanguageModel, token_batches: TokenBatches, fresh_disk: Path
) -> None:
    """Where logits and their gradients are: what the loss takes is marked there too, which left nothing to the sample."""
    model = causal_lm("gpt2", hidden=64)
    model, optimizer = protrain.wrap(model, adamw(model), memory="1GiB", disk=fresh_disk)
    found = watched(model, optimizer, token_batches(3)).last
    before = next(s for s in found.samples if s.moment == "before backward of block 3")
    assert before.highest_bytes == found.peak_bytes
    assert 0.97 <= found.peak_bytes / protrain.status(model).peak_memory_bytes <= 1
    protrain.unwrap(model)


def test_a_step_without_a_watch_takes_no_sample(causal_lm: LanguageModel, token_batches: TokenBatches, fresh_disk: Path) -> None:
    model = causal_lm("gpt2", hidden=128)
    model, optimizer = protrain.wrap(model, adamw(model), memory="14MiB", disk=fresh_disk)
    loss_of(model, token_batches(1)[0]).backward()
    optimizer.step()
    session = protrain.session_of(model)
    assert session.samples is None
    assert session.clock.sampler is None
    protrain.unwrap(model)


def test_what_a_step_left_unused_goes_to_reading_ahead() -> None:
    headrooms: list[int] = []
    engine = SimpleNamespace(set_headroom=lambda headroom_bytes, _: headrooms.append(headroom_bytes))
    arrangement = SimpleNamespace(rise_bytes=0, headroom_bytes=50, recompute_bytes=0)
    homes = Homes(*cast("tuple[Any, ...]", (None, engine, None, None, arrangement)))
    for peak in (100, 60):
        homes.stash_goal_bytes, homes._headroom = 100, 40
        homes.adjust_headroom(peak)
    assert headrooms == [40, 10]  # nothing left under the goal; of 40 left three quarters


# ---- bad input ----


def test_a_step_of_very_many_moments_keeps_some_and_the_highest(
    causal_lm: LanguageModel, token_batches: TokenBatches, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "MOST_SAMPLES", 10)
    model = causal_lm("gpt2", hidden=128)
    model, optimizer = protrain.wrap(model, adamw(model), memory="14MiB", disk=fresh_disk, accumulate=8)
    found = protrain.session_of(model).watch_memory()
    for step in range(3):
        for ids in token_batches(8):
            loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(found._samples) <= 2 * 10 + 1
        assert len(found.last.samples) <= 10 + 3 + len(PARTS) + 1
        assert len(found.last.samples) + found.last.n_left_out > 8 * 2 * 4
        assert [found.last.samples[place].moment for place in (0, -1)] == ["step begins", "step ends"]
        assert found.last.step == step + 1
    assert max(s.gradient_bytes for s in found.last.samples) > 0


def test_what_is_left_out_of_samples_is_lower() -> None:
    draw = random.Random(3)
    whole = [
        samples.MemorySample(i / 7, str(i), live := draw.randrange(1 << 20), live + draw.randrange(1 << 20), *sizes)
        for i, sizes in enumerate([draw.randrange(1 << 20) for _ in PARTS] for _ in range(5000))
    ]
    few = samples.thinned(whole, 50)
    assert 50 <= len(few) <= 50 + 3 + len(PARTS) + 1
    for field in ("live_bytes", "highest_bytes", *PARTS):
        assert max(getattr(s, field) for s in few) == max(getattr(s, field) for s in whole)
    for before, sample in itertools.pairwise(few):
        between = whole[int(before.moment) + 1 : int(sample.moment) + 1]
        assert sample.highest_bytes == max(s.highest_bytes for s in between)
    assert samples.thinned(whole[:50], 50) == whole[:50]


def test_of_very_many_steps_the_highest_stay() -> None:
    def step(number: int, loss: float, peak: int) -> report.StepFigures:
        return report.StepFigures(number, loss, 0.5, 0.0, 0.0, peak, 0)

    steps = [step(i, 2.0, 100) for i in range(1, 30001)]
    steps[12345] = step(12346, 9.0, 100)
    steps[23456] = step(23457, 2.0, 101)
    few = report.thinned(steps, 400)
    assert 400 <= len(few) <= 400 + 6
    assert {1, 12346, 23457, 30000} <= {s.step for s in few}
    steps[777] = step(778, float("nan"), 100)
    assert 778 in {s.step for s in report.thinned(steps, 400)}


def test_a_report_that_cannot_be_made_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report.check_report(None)
    with pytest.raises(words.CommandError, match=r"ends in \.html"):
        report.check_report(str(tmp_path / "a.json"))
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(words.CommandError, match=r"pip install 'protrain\[report\]'"):
        report.check_report(str(tmp_path / "a.html"))
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(words.CommandError, match="nowhere"):
        report.check_report(str(tmp_path / "nowhere" / "a.html"))
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(words.CommandError, match="no ordinary file"):
        report.check_report(str(tmp_path / "folder.html"))


# ---- the page ----


@pytest.fixture
def gpt2_over_device(
    causal_lm: LanguageModel, token_batches: TokenBatches, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any, list[Any]]]:
    monkeypatch.setattr(compute, "stand_in", StandIn())
    model = causal_lm("gpt2", hidden=128)
    model, optimizer = protrain.wrap(model, adamw(model), memory="6MiB", host_memory="256MiB", disk=fresh_disk)
    yield model, optimizer, token_batches(3)
    protrain.unwrap(model)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model's config and a text."""
    pytest.importorskip("vl_convert", reason="no vl-convert-python: pip install 'protrain[report]'")
    folder = tmp_path_factory.mktemp("report")
    config = transformers.GPT2Config(
        vocab_size=300, bos_token_id=0, eos_token_id=0, n_embd=64, n_layer=4, n_head=4, n_positions=128
    )
    config.save_pretrained(folder / "tiny")
    (folder / "text.txt").write_text(Path(json.__file__).read_text() * 4)
    return folder


WORDS = ("train", "--model", "tiny", "--data", "text.txt", "--seq", 32, "--batch", 2, "--memory", "4MiB")


@pytest.fixture(scope="module")
def trained(work: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The page of a training of four steps, and its JSON lines."""
    result = run(work, *WORDS, "--steps", 4, "--json", "--report", "page.html")
    assert result.returncode == 0, result.stderr
    return work / "page.html", [json.loads(line) for line in result.stdout.splitlines()]


def test_the_page_has_each_part_with_its_figures(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    page = Tags(trained[0].read_text())
    *steps, last = trained[1]
    sections = [attrs["class"] for tag, attrs in page.tags if tag == "section"]
    assert sections == ["memory", "lanes", "plan", "prediction", "loss", "facts"]
    assert f"{steps[-1]['loss']:.4f}" in page.text
    assert f"From {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f} in 4 steps" in page.text
    assert f"of a budget of {words.size_text(4 << 20)}" in page.text
    assert words.size_text(last["plan"]["peak_bytes"]) in page.text
    assert "none: the plan was chosen by protrain" in page.text
    strips = [attrs for tag, attrs in page.tags if tag == "li" and re.match(r"(block|chunk) \d+: ", attrs.get("title") or "")]
    assert len(strips) == 4 + last["plan"]["n_chunks"]
    drawings = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(drawings) == 2 * 5  # wide and narrow
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in drawings)
    for word in ("forward", "backward", "after forward of block 3", "planned", "measured"):
        assert word in page.text, word


@pytest.mark.filterwarnings("ignore:protrain. steps took")  # of a busy machine
def test_the_page_of_a_long_training_says_what_it_leaves_out(
    work: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "MOST_SAMPLES", 10)
    monkeypatch.setattr(report, "MOST_STEPS", 4)
    words = ("--steps", 24, "--accumulate", 4, "--report", tmp_path / "page.html", "--json")
    code, printed, errors = answer(capfd, monkeypatch, work, *WORDS, *words)
    assert code == 0, errors
    page = Tags((tmp_path / "page.html").read_text())
    assert re.search(r"(\d+) of them are shown, evenly over the step, with the highest\.", page.text)
    assert re.search(r"\d+ of \d+ measurements, with the highest, in MiB", page.text)
    shown, steps = re.search(r"(\d+) of (\d+) steps, evenly, with the highest", page.text).groups()  # type: ignore[union-attr]
    assert (int(shown) < 12, steps) == (True, "24")
    losses = [json.loads(line)["loss"] for line in printed.splitlines()[:-1]]
    assert f"From {losses[0]:.4f} to {losses[-1]:.4f} in 24 steps" in page.text


def test_the_page_fetches_nothing_and_runs_nothing(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    text = trained[0].read_text()
    page = Tags(text)
    assert "http:" not in text
    assert "https:" not in text
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "image", "object"}
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") or name in ("src", "href") for name in attrs)]
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {path.name for path in trained[0].parent.iterdir()} == {"page.html", "text.txt", "tiny"}


def test_an_interrupted_training_leaves_a_page_of_what_was_measured(work: Path, tmp_path: Path) -> None:
    assert interrupted(work, *WORDS, "--steps", 1000000, "--report", tmp_path / "page.html") == (130, "")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert re.search(r"Training ended after step \d+ of 1000000\.", Tags((tmp_path / "page.html").read_text()).text)


def test_bench_step_writes_both_sides(work: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = ("--model", "tiny", "--seq", 32, "--rounds", 2, "--memory", "4MiB", "--json", "--report", page)
    result = run(work, "bench", "step", *given)
    assert result.returncode == 0, result.stderr
    found, text = json.loads(result.stdout), Tags(page.read_text()).text
    assert "recorded" not in found["protrain"]
    assert f"protrain takes {found['ratio']:.2f} times as long a step" in text
    assert words.duration_text(found["plain"]["median_seconds"]) in text


# ---- in a browser ----


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_shows_it_whole(trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path, theme: str) -> None:
    looks = looks_of(trained[0], tmp_path, theme)
    assert [look["width"] for look in looks] == WIDTHS
    for look in looks:
        assert look["charts"] == 5
        assert look["faults"] == []
        assert (look["ground"] == "rgb(18, 22, 27)") == (theme == "dark")


def figures(draw: random.Random, seconds: float) -> list[report_charts.Drawing]:
    """The charts of a training whose last step took so long, and of comparisons; everything else of them by chance."""
    rows = [report.Row("read", name, 1, seconds / 2, [[0.1 * seconds, 0.6 * seconds]]) for name in ("gradients to disk", "wait")]
    sizes = {part: draw.randrange(1 << draw.randint(20, 40)) for part in PARTS}
    taken = [
        {"seconds": t * seconds, "live_bytes": sum(sizes.values()), "highest_bytes": sum(sizes.values()), **sizes}
        for t in (0, 0.5, 1)
    ]
    loss = 10 ** draw.uniform(-3, 2)
    steps = [
        report.StepFigures(
            i, loss / i, seconds * draw.uniform(1, 2), 0.0, seconds, draw.randrange(1 << 40), draw.randrange(1 << 40)
        )
        for i in range(1, draw.choice((2, 4, 60, 99999)), 7)
    ]
    budget = draw.randrange(1 << 40)
    found = report.Recorded(steps, budget, {"peak_bytes": budget // 2}, steps[-1].step, seconds, taken, rows)
    sides = [report.Side(name, [seconds * draw.uniform(0.9, 2) for _ in range(5)], {}) for name in ("plain", "protrain")]
    points = [
        report.Point(mode, mode, draw.randrange(1 << 30, 1 << 34), draw.uniform(1, 2) / seconds, {})
        for mode in report_charts.SHAPES
    ]
    return [
        report_charts.memory(found, "memory"),
        report_charts.lanes(found, "lanes"),
        report_charts.course(steps, "loss", None, "", 1, "loss"),
        report_charts.course(steps, "seconds", "predicted_seconds", "s", 1, "seconds"),
        report_charts.rounds(sides, "rounds"),
        report_charts.tradeoff(points, "tradeoff"),
    ]


def test_axes_have_room_for_their_numbers_however_long_a_step_takes(work: Path, tmp_path: Path) -> None:
    draw = random.Random(7)
    lengths = [0.0500454, 0.0999, 0.1, 0.1001, 1.0001, 12.51, *(10 ** draw.uniform(-4, 3) for _ in range(14))]
    charts = [report_pieces.chart(drawing) for seconds in lengths for drawing in figures(draw, seconds)]
    (tmp_path / "page.html").write_text(report_pieces.document("charts", charts))
    for look in looks_of(tmp_path / "page.html", tmp_path, "light"):
        assert look["charts"] == len(charts)
        assert look["faults"] == []


def test_lanes_of_a_device_are_drawn(gpt2_over_device: Any, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="no vl-convert-python: pip install 'protrain[report]'")
    model, optimizer, batches = gpt2_over_device
    recorder = report.Recorder(model)
    for ids in batches:
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.after(loss.item(), protrain.status(model))
    found = recorder.recorded()
    assert found is not None
    assert {"upload", "offload"} <= {row.lane for row in found.rows}
    page = tmp_path / "page.html"
    report.write(str(page), report.Page("protrain train", "over a device", [], {"gpt2": found}))
    assert "parameters" in page.read_text()


def test_every_lane_has_its_colour() -> None:
    assert set(report_charts.LANE_COLOURS) == set(timeline.LANES) - {"step"}
