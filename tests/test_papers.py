"""The papers' experiments: each at its smallest size, its processes in this one; how processes take turns; pages."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.papers import __main__ as every  # noqa: E402
from benchmarks.papers import beside, turns  # noqa: E402
from benchmarks.papers.patrickstar import static_partition  # noqa: E402
from benchmarks.papers.placement import Placement, same_state  # noqa: E402
from benchmarks.papers.protrain import figure5_ablations, figure6_in_training  # noqa: E402
from benchmarks.papers.records import Experiment, Settings  # noqa: E402
from benchmarks.papers.ssdtrain import lifespan, rok_curve  # noqa: E402
from benchmarks.papers.training import Shape, Way, train  # noqa: E402

MIB = 1 << 20
TINY = Shape("gpt2", 64, 2, 1, 32)


class Here:
    """`Turns` in this process: what makes them slow is the start of others."""

    def __init__(self, function: Callable[..., Any], *words: Any) -> None:
        self._generator, self._error = function(*words), ""
        try:
            next(self._generator)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self._generator.close()

    def ask(self, word: Any = None) -> Any:
        if not self._error:
            try:
                return self._generator.send(word)
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"
        raise turns.RefusedError(self._error)


def rows_of_peers(settings: Settings, shape: Shape, memory: int, names: tuple[str, ...], *_: Any) -> list[dict[str, Any]]:
    """What benchmarks/peers would say, which has tests of its own."""
    fields = {"tokens_per_second": 10.0, "peak_bytes": memory, "within_budget": True, "layers": 2, "at_least": True, "reason": ""}
    return [{"name": name, **fields} for name in names]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [turns, *map(module_of, every.names())]:
        if hasattr(module, "Turns"):
            monkeypatch.setattr(module, "Turns", Here)
        for name in ("compared", "largest_here"):
            if hasattr(module, name) and module.__name__.endswith(("figure3_throughput", "table2_largest_model")):
                monkeypatch.setattr(module, name, rows_of_peers)


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.papers.{name}")


NEEDS_PROCESSES = ("ssdtrain.rok_curve",)  # of `protrain bench activations`, which has tests of its own


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", [name for name in every.names() if name not in NEEDS_PROCESSES])
def test_every_experiment_runs_and_makes_a_page_of_its_record(name: str, disk: Path, tmp_path: Path) -> None:
    experiment: Experiment = module_of(name).EXPERIMENT
    record = experiment.record(Settings(tiny=True, disk=str(disk)))
    written = experiment.write(json.loads(json.dumps(record)), tmp_path)
    assert f"{experiment.name.replace('/', '.')}" == name
    assert [path.relative_to(tmp_path / "papers").with_suffix("").as_posix() for path in written] == [experiment.name] * 2
    page = written[-1].read_text()
    assert page.startswith(f"# {experiment.title}\n\nBy `python -m benchmarks.papers.{name} ")
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    assert tables
    assert all(len({line.count(" | ") for line in lines}) == 1 for lines in tables)


def test_the_curve_is_made_of_what_bench_activations_writes(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (ROOT / "benchmarks/results/activations.jsonl").read_text().splitlines()]
    record = {"title": "t", "command": "c", "date": "d", "device": "cpu", "machine": {"cpu": "p", "cores": 2, "torch": "2"}}
    record |= {"summary": lines[-1], "points": [lines[-2], *lines[:-2]]}
    page = rok_curve.EXPERIMENT.page(record)
    for one in record["points"]:
        assert f"| {one['name']} |" in page
    if importlib.util.find_spec("matplotlib") is not None:
        written = rok_curve.EXPERIMENT.write(record, tmp_path)
        assert [path.suffix for path in written] == [".json", ".png", ".md"]
        assert "](rok_curve.png)" in written[-1].read_text()


def test_readme_has_every_script_and_no_other() -> None:
    lines = (ROOT / "benchmarks/papers/README.md").read_text().splitlines()
    assert sorted(line.split("`")[1] for line in lines if line.startswith("| `")) == sorted(every.names())


# ---- where the machine's cores are ----


def test_copies_tell_two_states_apart() -> None:
    assert same_state([1.1, 1.2, 1.1], [1.2, 9.0, 1.1])  # one that something came between is no state
    assert not same_state([1.1, 1.2, 1.1], [1.8, 1.8, 1.1])
    assert 0 < Placement().seconds() < 10


@pytest.mark.parametrize(
    ("profiled", "confirming", "measured", "steady"),
    [
        (1.1, 1.1, (1.1, 1.1), True),
        (1.8, 1.8, (1.8, 1.8), True),
        (1.8, 1.1, (1.1, 1.1), False),
        (1.1, 1.8, (1.1, 1.1), False),
        (1.1, 1.1, (1.8, 1.8), False),
        (1.1, 1.1, (1.1, 1.8), False),
        (1.1, 1.1, (1.8, 1.1), False),
    ],
)
def test_a_training_in_which_cores_were_moved_is_made_again(
    profiled: float, confirming: float, measured: tuple[float, float], steady: bool, monkeypatch: pytest.MonkeyPatch, disk: Path
) -> None:
    half = figure6_in_training.MEASURED_STEPS // 2
    copies = [profiled] * 2 + [confirming] * 9 + [measured[0]] * half + [measured[1]] * (half + 1)
    made: list[int] = []

    class Process:
        def __init__(self, *_words: Any) -> None:
            made.append(0)

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, word: tuple[int, int]) -> dict[str, Any]:
            return {"copy_seconds": copies if word[1] > 1 else [1.0], "peak_bytes": 100}

    monkeypatch.setattr(figure6_in_training, "Turns", Process)
    monkeypatch.setattr(figure6_in_training, "case_of", lambda _shape, found: found["n_trainings"])
    found = figure6_in_training.compared(TINY, Settings(disk=str(disk)))
    assert found == [1 if steady else figure6_in_training.MOST_TRAININGS] * 3
    assert len(made) == 1 + sum(found)


@pytest.mark.parametrize(
    ("kept", "forecasts", "expected"),
    [
        (28, [1.0] * 28, (1.0, 24.0)),
        (28, [1.0] * 21 + [2.0] * 7, (1.0, 24.0)),  # what is foretold in the midst of the steps that count is not for them
        (5, [1.0] * 23 + [3.0] * 5, (3.0, 27.0)),  # homes move in the first step by a plan
        (1, [1.0] * 27 + [3.0], (1.0, 24.0)),  # no step was made by the last plan
    ],
)
def test_a_forecast_is_set_beside_steps_behind_it(kept: int, forecasts: list[float], expected: tuple[float, float]) -> None:
    n_persist = [0] * (28 - kept) + [1] * kept
    plans = [
        {"n_persist": n, "n_buffer": 2, "block_modes": ["keep"], "step_seconds": seconds, "peak_bytes": 10}
        for n, seconds in zip(n_persist, forecasts, strict=True)
    ]
    found = {
        "plans": plans, "step_seconds": [float(number) for number in range(1, 29)], "peak_bytes": 10, "budget_bytes": 11,
        "copy_seconds": [1.0] * 28, "n_trainings": 1,
    }  # fmt: skip
    case = figure6_in_training.case_of(TINY, found)
    assert (case["planned_seconds"], case["step_seconds"]) == expected


# ---- taking turns ----


def test_a_process_trains_as_one_trains_here(disk: Path) -> None:
    way = Way(64 * MIB, disk=str(disk))
    with turns.Turns(train, TINY, way) as process, Here(train, TINY, way) as here:
        first, second = process.ask(1), process.ask(2)
        assert [*first["losses"], *second["losses"]] == here.ask(3)["losses"]
    assert len(second["seconds"]) == len(second["step_seconds"]) == 2


@pytest.mark.usefixtures("quick")
def test_ways_take_turns_and_find_equal_losses(disk: Path) -> None:
    ways = {name: Way(64 * MIB, disk=str(disk)) for name in ("first", "second")}
    found = turns.take_turns(TINY, ways, rounds=2, warm=1)
    assert list(found) == ["first", "second"]
    assert (len(found["second"]["seconds"]), found["first"]["ratio"]) == (2, 1.0)
    assert found["first"]["losses"] == found["second"]["losses"]
    assert len(set(found["first"]["losses"])) == 3


def test_a_process_that_ends_says_how() -> None:
    with turns.Turns(exit, 3) as process, pytest.raises(turns.RefusedError, match="the process ended with exit code 3"):
        process.ask()


@pytest.mark.usefixtures("quick")
def test_a_way_with_other_losses_has_no_figures(disk: Path) -> None:
    with pytest.raises(RuntimeError, match=r"other, step 2: the loss is "):
        turns.check_losses([2.0, 1.0], [2.0, 1.0000001], "other", exact=True)
    turns.check_losses([2.0, 1.0], [2.0, 1.0000001], "other", exact=False)
    with pytest.raises(turns.RefusedError, match="BudgetError"):
        turns.take_turns(TINY, {"first": Way(1000, disk=str(disk))}, rounds=1)
    ways = {"first": Way(64 * MIB, disk=str(disk)), "refused": Way(1000, disk=str(disk))}
    assert turns.take_turns(TINY, ways, rounds=1)["refused"]["reason"].startswith("BudgetError: ")


@pytest.mark.usefixtures("quick")
def test_rates_set_late_are_the_same_training_with_no_update_behind_backward(disk: Path) -> None:
    way = Way(6 * MIB, disk=str(disk))
    found = turns.take_turns(
        Shape("gpt2", 128, 4, 1, 32), {"early": way, "late": Way(6 * MIB, late=True, disk=str(disk))}, rounds=2
    )
    assert found["late"]["step_write_bytes"] > found["early"]["step_write_bytes"]  # gradients wait on the disk


# ---- parts ----


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5", "vit", "encoder"])
def test_every_family_has_blocks_and_takes_its_batches(family: str) -> None:
    from protrain.model.blocks import find_blocks

    shape = Shape(family, 64, 4, 1, 32)
    model = shape.model()
    assert len(find_blocks(model)) == 4
    output = model(**shape.inputs(0))
    assert (output.loss if hasattr(output, "loss") else output).isfinite().all()


def test_eviction_is_counted_by_the_order_of_a_step() -> None:
    accesses, two_slots = [0, 1, 2, 2, 1, 0], [0, 1, 0]
    assert static_partition.loads_by_slots(accesses, two_slots) == 2  # 2, then 0 again; 1 stays
    assert static_partition.loads_by_choice(accesses, 2, static_partition.farthest_next_use) == 2
    assert static_partition.loads_by_choice(accesses, 2, static_partition.least_recently_used) == 2
    assert static_partition.loads_by_choice([0, 1, 2], 2, static_partition.least_recently_used) == 3
    assert static_partition.loads_by_choice([0, 1, 2], 2, static_partition.farthest_next_use) == 1
    assert static_partition.loads_by_choice(accesses, 3, static_partition.farthest_next_use) == 0


def test_lifespan_and_bandwidth_are_the_papers_formulas() -> None:
    found = lifespan.model_of(24_000_000_000, 4.0)
    assert found["write_bytes_per_second"] == 12e9
    assert found["lifespan_years"] == pytest.approx(4 * 600e12 * 86 * 4.0 / 24e9 / (365 * 86400))


def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.papers.records.has_gpu", lambda: False)
    assert lifespan.EXPERIMENT.main(["--device", "cuda"]) == 0
    assert capsys.readouterr().out == "ssdtrain/lifespan: skipped: no GPU\n"


def test_on_a_gpu_the_largest_is_bisected_until_a_system_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(settings: Settings, shape: Shape, memory: int, name: str) -> dict[str, Any]:
        asked.append(shape.layers)
        return {"step_seconds": 1.0} if shape.layers <= 5 else {"does_not_fit": "no memory"}

    monkeypatch.setattr(beside, "_run_on_gpu", run)
    (found,) = beside.largest(Settings(device="cuda"), TINY, MIB, ["plain torch"], 64)
    assert found == {"name": "plain torch", "layers": 5, "at_least": False, "reason": "no memory"}
    assert asked == [1, 2, 4, 8, 6, 5]
    (found,) = beside.largest(Settings(device="cuda"), TINY, MIB, ["plain torch"], 4)
    assert (found["layers"], found["at_least"]) == (4, True)


# ---- what a page says of its figures ----


def row_of(ratio: float, quartiles: tuple[float, float], waits: float = 0.0, read_bytes: int = 0) -> dict[str, Any]:
    status = {"wait_seconds": waits, "plan": {"n_persist": read_bytes >> 20}}
    return {"ratio": ratio, "quartiles": quartiles, "status": status, "step_read_bytes": read_bytes, "step_write_bytes": 0}


def test_pages_say_where_figures_are_not_as_in_the_paper() -> None:
    own = row_of(1.0, (1.0, 1.0), waits=0.147, read_bytes=300 << 20)
    faster, alike, slower = row_of(0.89, (0.88, 0.95)), row_of(0.99, (0.97, 1.02)), row_of(1.2, (1.1, 1.3))
    ways = {"protrain": own, "a": faster, "b": alike, "c": slower, "d": {"reason": "no room"}}
    lines = figure5_ablations.not_as_in_the_paper({"batch": 1, "ways": ways})
    assert [line.split(",")[0] for line in lines] == ["- Not as in the paper: a", "- Not as in the paper: b"]
    assert "faster than protrain's own plan (0.89" in lines[0]
    assert "waits 0.147 s, this one 0 MiB and 0.000 s" in lines[0]
    assert "by no more than noise (0.99" in lines[1]
    lines = static_partition.verdicts(ways)
    assert [line.split(" is ")[0] for line in lines] == ["- As in the paper, a share that", "- a", "- b"]
    assert "cannot train at all: d." in lines[0]
    assert static_partition.verdicts({"protrain": own, "c": slower}) == []
    (line,) = static_partition.verdicts({"protrain": own, "e": row_of(0.94, (0.9, 0.96), read_bytes=300 << 20)})
    assert "is protrain's plan over again: 0.94" in line


@pytest.mark.parametrize(("swap_mib", "where"), [(150, "left of"), (200, "at"), (212, "right of")])
def test_the_curves_page_says_where_swap_lies(swap_mib: int, where: str) -> None:
    points = {"keep": (704, 1.0), "swap": (swap_mib, 1.05), "checkpoint": (200, 1.22)}
    text = rok_curve.verdict({k: {"activation_peak_bytes": p << 20, "ratio_to_keep": r} for k, (p, r) in points.items()})
    assert text.startswith(f"Swap lies {where} full recomputation, at {swap_mib / 200:.2f} of its peak")
    assert "1.05 of keep's step, recomputation 1.22" in text


@pytest.mark.parametrize("name", every.names())
def test_the_page_in_the_repository_is_that_of_its_record(name: str) -> None:
    file = ROOT / "benchmarks/results/papers" / f"{name.replace('.', '/')}.json"
    experiment: Experiment = module_of(name).EXPERIMENT
    picture = file.with_suffix(".png").name if experiment.draw else None
    assert file.with_suffix(".md").read_text() == experiment.page(json.loads(file.read_text()), picture)
