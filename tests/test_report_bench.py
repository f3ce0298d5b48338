"""The page of the comparison with peers: made from the record alone, whatever the record has; a browser shows it whole."""

from __future__ import annotations

import copy
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import WIDTHS, Tags, looks_of
from click.testing import CliRunner

from protrain.cli import report, report_charts
from protrain.cli.main import commands
from protrain.cli.words import MIB, CommandError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from peers import page, runner, show  # noqa: E402

RECORD = ROOT / "benchmarks" / "results" / "peers.json"


@pytest.fixture
def record() -> dict[str, Any]:
    """The comparison as it was last measured."""
    pytest.importorskip("vl_convert", reason="no vl-convert-python: pip install 'protrain[report]'")
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


LARGEST = {
    "largest_layers": 64,
    "largest_parameters": 10**8,
    "largest_at_least": True,
    "largest_ended": "96 layers were not begun after 10 minutes",
}


def doubled(record: dict[str, Any]) -> dict[str, Any]:
    """Each peer in two settings, with a largest model: as many points as a full run has, near each other."""
    found = copy.deepcopy(record)
    rows = []
    for row in found["rows"]:
        row |= LARGEST if row["seconds"] else {}
        if row["name"] in page.KINDS or row["seconds"] is None or row.get("setting"):
            rows.append(row)
            continue
        for number, setting in enumerate(("fastest", "leanest")):
            changed = {
                "name": f"{row['name']}, {setting}",
                "setting": setting,
                "seconds": [s + 0.2 * number for s in row["seconds"]],
            }
            rows.append({**row, **changed, "peak_bytes": row["peak_bytes"] - number * 40 * MIB})
            row["searched"] = []
    return {**found, "rows": rows, "took_seconds": 754.0}


def sections(shown: Tags) -> list[str | None]:
    return [attrs["class"] for tag, attrs in shown.tags if tag == "section"]


def test_the_pages_in_the_repository_are_those_of_the_record(record: dict[str, Any]) -> None:
    assert RECORD.with_suffix(".md").read_text() == show.markdown(record)
    assert numbered(RECORD.with_suffix(".html").read_text()) == numbered(page.html(record))


def numbered(text: str) -> str:
    """Without the numbers of drawings, which go on from page to page of a process."""
    return re.sub(r"c\d+-", "c-", text)


# ---- what is on it ----


def test_the_page_has_every_row_with_its_figures_or_its_reason(record: dict[str, Any]) -> None:
    shown = Tags(page.html(record))
    parts = [part for part in sections(shown) if part != "standing"]
    largest = ["largest"] if show.grown(record) else []
    assert parts == ["compared", "against", "steps", *largest, "settings", "missing", "facts"]
    for row in record["rows"]:
        assert row["name"] in shown.text
        if row["seconds"] is None:
            assert row["reason"] in shown.text
            continue
        assert f"{row['tokens_per_second']:,.0f}" in shown.text
        assert f"{row['peak_bytes'] / MIB:,.0f} MiB" in shown.text
        assert all(f"{name}={json.dumps(value)}" in shown.text for name, value in row["knobs"].items())
    for told in (record["command"], record["date"], record["machine"]["cpu"], record["machine"]["torch"], "seed 0"):
        assert told in shown.text
    assert (
        len([tag for tag, attrs in shown.tags if tag == "tr" and attrs.get("class") == "strong"]) > 1
    )  # protrain, and kept ones


def test_charts_say_their_figures_in_words(record: dict[str, Any]) -> None:
    drawings = [attrs for tag, attrs in Tags(page.html(record)).tags if tag == "svg"]
    assert len(drawings) == 2 * 2  # wide and narrow
    ours = next(row for row in record["rows"] if row["name"] == "protrain")
    said = [attrs["aria-label"] or "" for attrs in drawings]
    assert all(attrs["role"] == "img" for attrs in drawings)
    assert (
        sum(f"protrain {ours['tokens_per_second']:,.0f} tokens/s at {ours['peak_bytes'] / MIB:,.0f} MiB" in s for s in said) == 2
    )
    assert sum(f"protrain {ours['median_seconds']:.3f}, " in s for s in said) == 2


def test_the_page_fetches_nothing_and_runs_nothing(record: dict[str, Any]) -> None:
    text = page.html(record)
    shown = Tags(text)
    assert "default-src 'none'" in text
    assert not {tag for tag, _ in shown.tags} & {"script", "link", "img", "iframe", "image", "object"}
    assert "url(" not in re.sub(r"url\(#", "", text)
    for tag, attrs in shown.tags:
        assert "src" not in attrs
        assert not [name for name in attrs if name.startswith("on")]
        assert "href" not in attrs or (tag == "a" and (attrs["href"] or "").startswith("https://"))
    ids = [attrs["id"] for _, attrs in shown.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_two_settings_of_a_peer_are_shown_together_and_what_the_record_adds_is_there(record: dict[str, Any]) -> None:
    found = doubled(record)
    text = page.html(found)
    names = re.findall(r'<div class="peer"><h3>([^<]*)</h3>', text)
    assert len(names) == len(set(names))
    assert not [name for name in names if name.endswith(("fastest", "leanest"))]
    shown = Tags(text).text
    assert "≥ 100 M" in shown
    assert "in 12 min 34 s" in shown


def test_markup_in_the_record_is_text(record: dict[str, Any]) -> None:
    record["rows"][1] |= {"name": "<b>odd</b>", "note": "<script>alert(1)</script>", "knobs": {"<i>": "</code>"}}
    record["rows"][2] |= {"name": "<u>", "reason": "<img src=x>"}
    record |= {"model": "</title>"}
    assert not {tag for tag, _ in Tags(page.html(record)).tags} & {"script", "img", "u"}
    assert not [attrs for tag, attrs in Tags(page.html(record)).tags if tag in ("b", "i") and not attrs and tag == "i"]


@pytest.mark.parametrize("measured", [0, 1, 2])
def test_an_interrupted_comparison_has_a_page_of_what_was_measured(record: dict[str, Any], measured: int) -> None:
    for number, row in enumerate(record["rows"]):
        if number >= measured:
            row |= {"seconds": None, "median_seconds": None, "verdict": "not run", "reason": "interrupted before it was measured"}
        else:
            row["seconds"] = row["seconds"][:1]
    shown = Tags(page.html({**record, "interrupted": True}))
    assert f"interrupted with {measured} of {len(record['rows'])} rows measured" in shown.text
    assert ("against" in sections(shown)) == (measured > 0)


# ---- labels ----


@pytest.mark.parametrize("count", [1, 5, 12])
def test_names_at_points_cover_nothing(count: int) -> None:
    draw = random.Random(count)
    placed = 0
    for _ in range(30):
        dots = [(draw.uniform(0, 900), draw.uniform(0, 340)) for _ in range(count)]
        widths = [draw.uniform(10, 200) for _ in range(count)]
        taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
        found = report_charts._places(dots, widths, taken, 950, 340)
        if found is None:
            continue
        placed += 1
        boxes = list(taken)
        for (x, y, align), wide in zip(found, widths, strict=True):
            left = {"left": x, "right": x - wide, "center": x - wide / 2}[align]
            box = (left, y - 7, left + wide, y + 7)
            assert box[0] >= 0
            assert box[2] <= 950
            assert not [b for b in boxes if box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3]]
            boxes.append(box)
    assert placed > 10


def test_where_names_find_no_room_there_are_numbers(record: dict[str, Any]) -> None:
    rows = [report.Compared(f"a peer with a rather long name {i}", "peer", 256, [1.0, 1.1], 900 * MIB + i) for i in range(9)]
    drawing, named = report_charts.against(rows, 700 * MIB, 770 * MIB, "all at one place")
    assert not named
    assert "rather long" not in drawing.wide


# ---- the command ----


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], disk: Path) -> Any:
    """`protrain bench` that measures nothing and finds what the record says; `asked` is how often it measured."""
    asked: list[Any] = []

    def compare(words: Any, say: Any) -> dict[str, Any]:
        asked.append(words)
        return {key: value for key, value in record.items() if key not in ("date", "command", "machine")}

    monkeypatch.setattr(runner, "compare", compare)

    def invoke(*words: str) -> Any:
        return CliRunner().invoke(commands, ["bench", "--disk", str(disk), *words])

    return invoke, asked


def test_the_command_writes_the_page(bench: Any, record: dict[str, Any], tmp_path: Path) -> None:
    invoke, asked = bench
    result = invoke("--quick", "--report", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.output
    assert len(asked) == 1
    assert f"report in {tmp_path / 'page.html'}" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "protrain and its peers" in (tmp_path / "page.html").read_text()
    record["interrupted"] = True
    result = invoke("--json", "--report", str(tmp_path / "page.html"))
    assert result.exit_code == 1
    assert json.loads(result.stdout)["interrupted"]
    assert "The comparison was interrupted" in (tmp_path / "page.html").read_text()


def test_a_report_that_cannot_be_made_is_refused_before_anything_is_measured(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke, asked = bench
    (tmp_path / "folder.html").mkdir()
    told = {"page.json": r"ends in \.html", "nowhere/page.html": "No such file", "folder.html": "no ordinary file"}
    for name, text in told.items():
        result = invoke("--report", str(tmp_path / name))
        assert isinstance(result.exception, CommandError)
        assert re.search(text, str(result.exception))
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    result = invoke("--report", str(tmp_path / "page.html"))
    assert "pip install 'protrain[report]'" in str(result.exception)
    assert not asked
    assert invoke("--report", "page.html", "step").exit_code == 2


# ---- in a browser ----


@pytest.mark.parametrize(("theme", "two_settings"), [("light", False), ("dark", False), ("light", True)])
def test_a_browser_shows_it_whole(record: dict[str, Any], tmp_path: Path, theme: str, two_settings: bool) -> None:
    page.write(str(tmp_path / "page.html"), doubled(record) if two_settings else record)
    looks = looks_of(tmp_path / "page.html", tmp_path, theme)
    assert [look["width"] for look in looks] == WIDTHS
    for look in looks:
        assert look["charts"] == 2
        assert look["faults"] == []
        assert (look["ground"] == "rgb(18, 22, 27)") == (theme == "dark")
