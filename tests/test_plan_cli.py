"""How plans are read: explain's text, the words of `protrain plan`, sweeps over budgets, their picture, plans from profiles."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import struct
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import program
import pytest
import torch
from click.testing import CliRunner
from standin import StandIn

from protrain import api
from protrain.cli import measured, sweep
from protrain.cli import plan as plan_command
from protrain.cli.main import commands
from protrain.cli.plan import more_bytes
from protrain.cli.words import CommandError, size_text
from protrain.device import compute
from protrain.device.overhead import Overhead
from protrain.dryrun.phases import DryRun, Phase
from protrain.errors import BudgetError, Error, PlanError
from protrain.model.layout import pack
from protrain.planner.explain import BAR_CHARACTERS, LETTERS, apportion, explain, gain, limit_of
from protrain.planner.planning import plan_from_profile
from protrain.planner.plans import MODES, WAITS, Forecast, Plan
from protrain.planner.profiles import LANES, Machine, Profile, Speed, Times

MIB, GIB = 1 << 20, 1 << 30


# ---- plans and profiles made by hand ----


def forecast(
    compute: float = 0.9,
    recompute: float = 0.1,
    update: float = 0.03,
    waits: dict[str, float] | None = None,
    busy: dict[str, float] | None = None,
) -> Forecast:
    return Forecast(
        compute_seconds=compute,
        recompute_seconds=recompute,
        fixed_seconds=0.004,
        drag_seconds=0.02,
        update_seconds=update,
        wait_seconds=dict.fromkeys(WAITS, 0.0) | (waits or {}),
        busy_seconds=dict.fromkeys(LANES, 0.0) | (busy or {}),
        moved_bytes={lane: 3 * 10**9 if busy and lane in busy else 0 for lane in LANES},
    )


def seconds_of(found: Forecast) -> float:
    parts = (found.compute_seconds, found.recompute_seconds, found.fixed_seconds, found.drag_seconds, found.update_seconds)
    return sum(parts) + sum(found.wait_seconds.values())


def plan_of(modes: list[str], found: Forecast | None = None, **changes: Any) -> Plan:
    plan = Plan(
        chunk_bytes=48 * MIB,
        n_chunks=24,
        n_persist=10,
        n_buffer=6,
        block_modes=tuple(modes),
        n_swap=modes.count("swap"),
        n_checkpoint=sum(mode.startswith("checkpoint") for mode in modes),
        step_seconds=seconds_of(found) if found else 0.0,
        peak_bytes=int(3.81 * GIB),
        host_bytes=0,
        disk_bytes=int(12.3 * GIB),
        budget_bytes=4 * GIB,
        persistent_bytes=GIB,
        slot_bytes=300 * MIB,
        ring_bytes=96 * MIB,
        forecast=found,
    )
    return dataclasses.replace(plan, **changes)


SWAPPED = forecast(waits={"chunk": 0.15, "stash_read": 0.02}, busy={"disk_read": 1.2, "disk_write": 0.7, "update": 0.4})


def profile_of(n_blocks: int = 6, block_bytes: int = 4 * MIB, saved_bytes: int = 6 * MIB, chunk_bytes: int = 2 * MIB) -> Profile:
    """Of a made-up model: an embedding, blocks that are alike, a norm; on a made-up machine with a disk."""
    parameters = [
        (3 * MIB, -1, True),
        *[(block_bytes // 4, i, True) for i in range(n_blocks) for _ in range(4)],
        (4096, -1, True),
    ]
    chunks = pack(parameters, chunk_bytes)
    of_block: list[list[int]] = [[] for _ in range(n_blocks)]
    for (_, block, _), (chunk, _) in zip(parameters, chunks.places, strict=True):
        if block >= 0 and chunk not in of_block[block]:
            of_block[block].append(chunk)
    first, last, inner, entry = chunks.places[0][0], chunks.places[-1][0], 2 * MIB, MIB // 4
    head, tail = n_blocks + 1, 2 * n_blocks + 2
    phases = [Phase(-1, False, 0, inner, 0, inner, inner)]
    reads, complete = [(first, 0)], {first: tail, last: head}
    for i in range(n_blocks):
        kept, left = i * saved_bytes, i * entry
        phases.append(Phase(i, False, kept, kept + saved_bytes + inner, left, left + saved_bytes + inner, saved_bytes + inner))
        reads += [(chunk, i + 1) for chunk in of_block[i]]
    kept, left = n_blocks * saved_bytes, n_blocks * entry
    phases.append(Phase(-1, False, kept, kept + inner, left, left + inner, inner))
    reads.append((last, head))
    for i in reversed(range(n_blocks)):
        kept, left, number = (i + 1) * saved_bytes, (i + 1) * entry, len(phases)
        phases.append(Phase(i, True, kept, kept + inner + block_bytes, left, left + saved_bytes + inner + block_bytes, inner))
        reads += [(chunk, number) for chunk in reversed(of_block[i])]
        complete |= dict.fromkeys(of_block[i], number)
    phases.append(Phase(-1, True, 0, 3 * MIB, 0, 3 * MIB, 3 * MIB))
    reads = [read for before, read in pairwise([(-1, -1), *reads]) if before != read]
    run = DryRun(
        phases=tuple(phases),
        accesses=tuple(chunk for chunk, _ in reads),
        access_phases=tuple(phase for _, phase in reads),
        complete_phase=complete,
        fixed_bytes=MIB,
        n_together=1,
        output_count=1,
        keep_peak_bytes=max(phase.keep_peak_bytes for phase in phases),
        checkpoint_peak_bytes=max(phase.checkpoint_peak_bytes for phase in phases),
    )
    times = tuple((0.001, 0.0) if p.block < 0 else (0.02, 0.01) if p.backward else (0.01, 0.0) for p in phases)
    machine = Machine(
        disk_read=Speed(1.5e9, 2e9, 2e-11),
        disk_write=Speed(1.5e9, 2e9, 2e-11),
        update=Speed(2e9, 4e9, 5e-11),
        step_update_bytes_per_second=20e9,
        step_fixed_seconds=1e-4,
        access_seconds=1e-6,
        checkpoint_seconds=1e-5,
        swap_seconds=1e-4,
    )
    return Profile(tuple(parameters), n_blocks, 2, chunk_bytes, run, Times(times), machine, model="made up")


# ---- explain ----


def blocks_named(text: str, n_blocks: int) -> set[tuple[int, str | None]]:
    """What a reader, or a script, that looks for blocks and their modes finds."""
    found = set()
    for line in text.splitlines():
        mode = re.search(r"\b(checkpoint_swap|checkpoint|swap|keep)\b", line)
        for first, last in re.findall(
            r"(?:^\W*|\bblocks?\W+|[a-z]\.)(\d+)(?:\s*(?:-|–|to|\.\.)\s*(\d+))?\b", line, re.IGNORECASE
        ):
            found |= {(block, mode and mode[0]) for block in range(int(first), min(int(last or first), n_blocks) + 1)}
    return found


def test_each_block_is_named_with_its_mode_and_nothing_else_is() -> None:
    rng = random.Random(5)
    for _ in range(300):
        n_blocks = rng.choice([0, 1, 2, 3, 12, 99, 100, 101, 250])
        stay = rng.choice([0.0, 0.5, 0.95])
        modes: list[str] = []
        for _ in range(n_blocks):
            modes.append(modes[-1] if modes and rng.random() < stay else rng.choice(MODES))
        waits = {reason: rng.choice([0.0, rng.random()]) for reason in WAITS}
        busy = {lane: rng.random() for lane in rng.sample(LANES, 3)}
        found = rng.choice([None, forecast(rng.random(), rng.random(), rng.random(), waits, busy)])
        changes = {"n_host": rng.choice([0, 3]), "host_bytes": rng.choice([0, 7 * GIB]), "disk_bytes": rng.choice([0, 5 * GIB])}
        plan = plan_of(modes, found, **changes)
        more = plan_of(rng.choices(MODES, k=n_blocks), found, n_persist=rng.randrange(24), budget_bytes=5 * GIB)
        text = plan.explain(rng.choice([None, more]))
        assert blocks_named(text, n_blocks) == set(enumerate(modes))
        assert not re.search(r"\d\s*(checkpoint|swap|keep)", "\n".join(x for x in text.splitlines() if not x.startswith("block")))
        assert max(map(len, text.splitlines())) <= 160
        strip = "".join(re.findall(r"^  (?:from +\d+  )?([kscx]+)$", text, re.MULTILINE))
        assert strip == "".join(LETTERS[mode] for mode in modes)


@pytest.mark.parametrize("scale", [1, 10**3, 10**5])
def test_no_line_is_too_long_however_large_the_figures(scale: int) -> None:
    busy = dict.fromkeys(LANES, 0.3 * scale)
    for limit in WAITS:
        found = forecast(0.2 * scale, 0.1 * scale, 0.1 * scale, dict.fromkeys(WAITS, 0.01 * scale) | {limit: 0.5 * scale}, busy)
        sizes = dict.fromkeys(("host_bytes", "disk_bytes", "slot_bytes", "ring_bytes", "persistent_bytes"), 1 + scale * GIB)
        counts = {"n_chunks": 3 * scale, "n_persist": scale, "n_host": scale, "n_buffer": scale}
        memory = {"peak_bytes": 4 * scale * GIB, "budget_bytes": 5 * scale * GIB}
        plan = plan_of(list(MODES) * 200, found, **sizes, **counts, **memory)
        more = dataclasses.replace(
            plan,
            n_persist=2 * scale,
            block_modes=("keep",) * 800,
            step_seconds=0.9 * plan.step_seconds,
            budget_bytes=6 * scale * GIB,
        )
        assert max(map(len, plan.explain(more).splitlines())) <= 160


def test_a_plan_says_what_lies_where_and_what_takes_its_time() -> None:
    modes = ["swap"] * 3 + ["checkpoint"] * 6 + ["keep"] * 3
    text = plan_of(modes, SWAPPED, n_host=4, host_bytes=2 * GIB).explain()
    assert "peak memory 3.81 GiB of a budget of 4.00 GiB, 2.00 GiB on the host, 12.30 GiB on disk" in text
    assert "10 at home in memory, 4 on the host, 10 on disk; 6 slots take turns" in text
    assert (
        "it is limited by reading: it waits 0.170 s (13.9 %), longest for parameters; "
        "the lane of disk reads is busy 98.0 % of the time" in text
    )
    assert "blocks, one character each: k keep (3), s swap (3), c checkpoint (6)\n  ssscccccckkk\n" in text
    assert text.splitlines()[-3:] == ["blocks 0-2 swap", "blocks 3-8 checkpoint", "blocks 9-11 keep"]
    assert text == plan_of(modes, SWAPPED, n_host=4, host_bytes=2 * GIB).explain()
    assert text.isascii()
    table = re.findall(r"^  (\S.*?) +([\d.]+) s +([\d.]+) %", text.split("time of a step")[1].split("\nlanes")[0], re.MULTILINE)
    assert sum(float(share) for *_, share in table) == pytest.approx(100, abs=1e-9)
    assert sum(float(seconds) for _, seconds, _ in table) == pytest.approx(seconds_of(SWAPPED), abs=0.001 * len(table))
    assert "waiting for gradients" not in text  # nothing waits for them


def test_bars_and_shares_add_up() -> None:
    rng = random.Random(3)
    for _ in range(500):
        amounts = [rng.choice([0.0, rng.random(), 1e-9, 1e9 * rng.random()]) for _ in range(rng.randrange(1, 8))]
        units = rng.choice([1, 60, 1000])
        shares = apportion(amounts, units)
        assert sum(shares) == (units if sum(amounts) > 0 else 0)
        for amount, share in zip(amounts, shares, strict=True):
            assert abs(share - (amount * units / sum(amounts) if sum(amounts) else 0)) < 1
    for _ in range(200):
        parts = [
            *(rng.choice([0, 1, rng.randrange(GIB)]) for _ in range(3)),
            rng.randrange(1, GIB),
            rng.choice([0, rng.randrange(GIB)]),
        ]
        sizes = dict(zip(("persistent_bytes", "slot_bytes", "ring_bytes"), parts, strict=False))
        plan = plan_of(["keep"], None, n_persist=0, n_buffer=0, peak_bytes=sum(parts[:4]), budget_bytes=sum(parts), **sizes)
        bar, *legend = re.findall(r"^  (?:\|(.*)\||(?=[#=~+.] ).*)$", plan.explain().split("\nchunks")[0], re.MULTILINE)
        assert len(bar) == BAR_CHARACTERS
        assert legend
        there = {glyph for glyph, size in zip("#=~+.", parts, strict=True) if size}
        assert set(bar) == there  # what is not nothing is seen


@pytest.mark.parametrize(
    ("found", "limit"),
    [
        (None, None),
        (forecast(waits={"chunk": 0.01}), "compute"),
        (forecast(compute=0.1, recompute=0.0, update=0.3), "update"),
        (forecast(waits={"chunk": 0.2, "stash_write": 0.1}, busy={"disk_read": 1.0}), "read"),
        (forecast(waits={"chunk": 0.1, "stash_read": 0.1, "stash_write": 0.15}, busy={"disk_write": 1.0}), "read"),
        (forecast(waits={"stash_write": 0.3}, busy={"disk_read": 1.0}), "write"),
        (forecast(waits={"gradients": 0.2, "update": 0.1}, busy={"disk_write": 1.0, "update": 0.5}), "write"),
        (forecast(waits={"gradients": 0.2, "update": 0.1}, busy={"disk_write": 0.5, "update": 1.0}), "update"),
        (forecast(waits={"update": 0.3}, busy={"upload": 0.9, "update": 0.5}), "read"),
        (forecast(waits={"update": 0.3}), "update"),
    ],
)
def test_what_limits_a_step(found: Forecast | None, limit: str | None) -> None:
    plan = plan_of(["keep"] * 2, found)
    assert limit_of(plan) == limit
    said = {"compute": "limited by computation", "read": "by reading", "write": "by writing", "update": "by the update"}
    assert [name for name, words in said.items() if words in plan.explain()] == ([limit] if limit else [])
    assert ("no time was predicted" in plan.explain()) == (limit is None)


def test_small_plans_are_short() -> None:
    nothing_away = {"disk_bytes": 0, "n_persist": 24, "n_buffer": 0}
    text = plan_of([], None, **nothing_away).explain()
    assert "blocks: none were found" in text
    assert "24 at home in memory\n" in text
    assert "slots take turns" not in text
    assert "tiers" not in text
    assert plan_of(["keep"], None, **nothing_away).explain().splitlines()[-1] == "block 0 keep"
    unknown = plan_of(["keep"], None, persistent_bytes=0, slot_bytes=0, ring_bytes=0).explain()
    assert "in use 3.81 GiB" in unknown  # which parts it has was not written down
    assert "persistent chunks" not in unknown


def test_long_models_wrap() -> None:
    lines = plan_of(["keep"] * 150 + ["swap"] * 100, None).explain().splitlines()
    start = lines.index("blocks, one character each: k keep (150), s swap (100)")
    assert lines[start + 1 : start + 4] == [
        f"  from   0  {'k' * 100}",
        f"  from 100  {'k' * 50}{'s' * 50}",
        f"  from 200  {'s' * 50}",
    ]
    assert lines[start + 4 :] == ["blocks 0-149 keep", "blocks 150-249 swap"]


def test_what_more_memory_buys() -> None:
    plan = plan_of(["swap", "checkpoint", "checkpoint"], SWAPPED)
    more = dataclasses.replace(
        plan, block_modes=("keep", "keep", "checkpoint"), n_persist=12, step_seconds=0.9 * plan.step_seconds, budget_bytes=5 * GIB
    )
    line = (
        "one more GiB (5.00 GiB): 1.102 s a step instead of 1.224 s, 10.0 % less; persistent +2, keep +2, swap -1, checkpoint -1"
    )
    assert gain(plan, more) == line
    assert line in explain(plan, more).splitlines()
    assert gain(more, dataclasses.replace(more, budget_bytes=5 * GIB + 512 * MIB)) == (
        "512 MiB more (5.50 GiB): no less time a step; the same decisions"
    )
    untimed = dataclasses.replace(plan, step_seconds=0.0, forecast=None)
    assert gain(untimed, more) == "one more GiB (5.00 GiB): no time was predicted; persistent +2, keep +2, swap -1, checkpoint -1"
    assert [more_bytes(size) for size in (64 * MIB, 4 * GIB - 8, 4 * GIB, 100 * GIB)] == [8 * MIB, GIB // 2 - 1, GIB, GIB]


# ---- sweeps ----


@pytest.mark.parametrize(
    ("smallest", "largest", "count", "found"),
    [(10, 10, 12, [10]), (1, 3, 12, [1, 2, 3]), (1, 8, 4, [1, 2, 4, 8]), (5, 9, 1, [5])],
)
def test_budgets_rise_by_one_factor(smallest: int, largest: int, count: int, found: list[int]) -> None:
    assert sweep.budgets(smallest, largest, count) == found


def test_a_sweep_goes_from_the_smallest_budget_to_where_all_is_kept() -> None:
    profile = profile_of()
    plans = sweep.sweep(lambda budget: plan_from_profile(profile, budget))
    first, last = plans[0], plans[-1]
    with pytest.raises(BudgetError):
        plan_from_profile(profile, first.budget_bytes - 4096)
    assert (last.n_persist, set(last.block_modes)) == (last.n_chunks, {"keep"})
    assert last.peak_bytes < last.budget_bytes < 1.05 * last.peak_bytes  # part of a budget stays free
    assert first.n_persist < first.n_chunks
    assert len(plans) == sweep.N_BUDGETS
    for a, b in pairwise(plans):
        assert a.budget_bytes < b.budget_bytes
        assert 0 < b.step_seconds <= 1.01 * a.step_seconds
        assert a.peak_bytes <= a.budget_bytes
    table = sweep.rows(plans)
    assert [row[0] for row in table] == [size_text(plan.budget_bytes) for plan in plans]
    assert table[0][5] == f"{first.n_persist}/{first.n_chunks}"
    assert table[-1][-5:] == ["6", "0", "0", "0", "nothing"]


@pytest.mark.parametrize("part", [16, 32])
def test_a_sweep_over_a_device_ends_where_all_is_kept(part: int) -> None:
    """A part of every budget is not for tensors there, and so of every peak."""
    profile = dataclasses.replace(over_device(profile_of()), overhead=Overhead(2 * MIB, part))
    plans = sweep.sweep(lambda budget: plan_from_profile(profile, budget, host_budget_bytes=64 * MIB))
    first, last = plans[0], plans[-1]
    with pytest.raises(BudgetError):
        plan_from_profile(profile, first.budget_bytes - 4096, host_budget_bytes=64 * MIB)
    assert first.n_persist < first.n_chunks
    assert (last.n_persist, set(last.block_modes)) == (last.n_chunks, {"keep"})
    assert last.peak_bytes <= last.budget_bytes < 1.08 * last.peak_bytes
    for a, b in pairwise(plans):
        assert a.budget_bytes < b.budget_bytes
        assert 0 < b.step_seconds <= 1.01 * a.step_seconds


def test_a_sweep_has_chunks_of_the_size_that_its_smallest_budget_asks_for() -> None:
    """Smaller chunks have a smaller budget, which asks for smaller ones yet."""
    asked = []

    def profile_for(budget: int) -> Any:
        asked.append(budget)
        return SimpleNamespace(chunk_bytes=next(size for size in (100, 50, 25) if size <= budget // 4 or size == 25))

    def planned(profile: Any, budget: int) -> Plan:
        if budget < 3 * profile.chunk_bytes:
            raise BudgetError("", needed_bytes=0, budget_bytes=budget, smallest_bytes=3 * profile.chunk_bytes)
        return plan_of(["keep"], None, peak_bytes=budget, budget_bytes=budget)

    assert plan_command.profile_for_sweep(plan_command.Source("", ("", ""), profile_for, planned, 1000), 1000).chunk_bytes == 25
    assert asked == [1000, 300, 150, 75]


def test_the_smallest_budget_is_found_where_refusals_do_not_name_it() -> None:
    needed, asked = 12_345_678, []

    def plan_for(budget: int) -> Plan:
        asked.append(budget)
        if budget < needed:  # of another tier: its figures are not of this budget
            raise BudgetError("memory: the host is full", needed_bytes=99, budget_bytes=50, smallest_bytes=99)
        return plan_of(["keep"], None, peak_bytes=min(budget, 40 * MIB), budget_bytes=budget)

    found = sweep.smallest_budget(plan_for)
    assert needed <= found <= needed * (1 + 1 / sweep.FINENESS) + 1
    assert len(asked) < 20
    with pytest.raises(BudgetError, match="the host is full"):
        sweep.smallest_budget(plan_for, ceiling_bytes=needed - 1)


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:16] == b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from protrain.cli.plan_plot import draw

    modes = [["swap", "checkpoint", "checkpoint_swap"], ["checkpoint", "keep", "keep"], ["keep"] * 3]
    timed = [plan_of(m, SWAPPED, budget_bytes=(i + 4) * GIB) for i, m in enumerate(modes)]
    untimed = [dataclasses.replace(plan, step_seconds=0.0, forecast=None) for plan in timed]
    without_blocks = [dataclasses.replace(plan, block_modes=()) for plan in untimed]
    heights = []
    for number, plans in enumerate((timed, untimed, without_blocks, timed[:1])):
        picture = tmp_path / f"{number}.png"
        picture.write_text("old")
        draw(str(picture), "a model " * 20, plans)
        width, height = png_size(picture)
        assert width == 1350
        heights.append(height)
    assert heights == [1200, 750, 570, 1200]
    assert len(list(tmp_path.iterdir())) == 4


# ---- the words ----


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--profile", "p.json"], "--profile needs --memory"),
        (["--profile", "p.json", "--memory", "1GiB", "--model", "gpt2", "--batch", "2"], "leave --model and --batch out"),
        (["--profile", "p.json", "--memory", "1GiB", "--hardware", "cpu"], "leave --hardware out"),
        (["--profile", "p.json", "--memory", "1GiB", "--save-profile", "q.json"], "leave --save-profile out"),
        (["--profile", "p.json", "--memory", "1GiB", "--accumulate", "2"], "leave --accumulate out"),
        (["--hardware", "cpu", "--save-profile", "q.json"], "leave --save-profile out"),
        (["--hardware", "cpu", "--accumulate", "2", "--max-grad-norm", "1"], "leave --accumulate and --max-grad-norm out"),
        (["--devices", "2"], "--devices 2 needs --hardware"),
        (["--host-memory", "1GiB"], "--host-memory needs --device cuda, --hardware or --profile"),
        (["--device", "cuda", "--hardware", "a100x4"], "leave --device out"),
        (["--device", "cuda", "--profile", "a.json", "--memory", "1GiB"], "leave --device out"),
        (["--device", "tpu"], "'tpu' is no device"),
        (["--sweep", "--memory", "1GiB"], "leave --memory out"),
        (["--out", "a.png"], "give --sweep too"),
        (["--host-memory", "much", "--hardware", "cpu"], "'much' is not a size"),
        (["--devices", "0", "--hardware", "cpu"], "--devices"),
    ],
)
def test_words_that_do_not_go_together_are_2(arguments: list[str], named: str) -> None:
    with pytest.raises(click.UsageError) as caught, commands.make_context("protrain", ["plan", *arguments]) as context:
        commands.invoke(context)
    assert named in caught.value.format_message()
    assert caught.value.exit_code == 2
    result = CliRunner().invoke(commands, ["plan", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: ")
    assert named in result.stderr.splitlines()[-1]


def test_help_names_the_words() -> None:
    text = CliRunner().invoke(commands, ["plan", "--help"]).stdout
    words = ("--profile", "--save-profile", "--hardware", "--host-memory", "--devices", "--sweep", "--out", "--memory", "--json")
    assert [word for word in words if word not in text] == []


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return program.run(folder, "plan", *arguments)


def fine(result: subprocess.CompletedProcess[str]) -> str:
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def said(*arguments: object) -> str:
    """In this process: stdout."""
    result = CliRunner().invoke(commands, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refused(*arguments: object) -> str:
    """In this process: what would be the one line on stderr, with exit code 1."""
    result = CliRunner().invoke(commands, ["plan", *map(str, arguments)])
    assert result.stdout == ""
    assert isinstance(result.exception, (CommandError, Error)), result.exception
    message = str(result.exception)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--profile", "nowhere.json"], "nowhere.json"),
        (["--profile", "full"], "full"),
        (["--profile", "pipe"], "--profile 'pipe' cannot be read: it is no regular file; give a file"),
        (["--profile", "/dev/zero"], "--profile '/dev/zero' cannot be read: it is no regular file; give a file"),
        (["--profile", "bytes"], "bytes"),
        (["--profile", "plan.json"], "--profile 'plan.json': this JSON is no profile"),
        (["--profile", "empty.json"], "--profile 'empty.json': this JSON is no profile"),
        (["--profile", "none.json"], "--profile 'none.json': this JSON is no profile: it has no parameters"),
        (["--profile", "large.json"], "--profile 'large.json': the parameters up to number 0 have more than"),
        (["--profile", "profile.json", "--host-memory", "1GiB"], "--host-memory"),
        (["--profile", "profile.json", "--memory", "64KiB"], "the smallest budget that works is"),
    ],
)
def test_a_profile_that_cannot_be_planned_from_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "plan.json").write_text(plan_of(["keep"], None).to_json())
    (tmp_path / "profile.json").write_text(profile_of().to_json())
    (tmp_path / "empty.json").touch()
    large = json.loads(profile_of().to_json())
    large["parameters"][0][0] = 1 << 61
    (tmp_path / "none.json").write_text(json.dumps(large | {"parameters": []}))
    (tmp_path / "large.json").write_text(json.dumps(large))
    assert named in refused(*(["--memory", "1GiB"] if "--memory" not in arguments else []), *arguments)


def test_a_refusal_is_one_line_and_1(tmp_path: Path) -> None:
    result = run(tmp_path, "--profile", "nowhere.json", "--memory", "1GiB")
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1), result.stderr
    assert "nowhere.json" in result.stderr


def test_a_picture_that_cannot_be_drawn_is_refused_first(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for out, named in (("a.svg", "PNG"), (tmp_path / "nowhere" / "a.png", "nowhere")):
        assert named in refused("--profile", "no profile either", "--sweep", "--out", out)


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from protrain.cli import words

    monkeypatch.setattr(words.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(words.CommandError, match=r"pip install 'protrain\[bench\]'"):
        words.check_picture("--out", str(tmp_path / "a.png"))


def test_a_profile_plans_as_the_library_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile = profile_of()
    (tmp_path / "profile.json").write_text(profile.to_json())
    words = ("--profile", "profile.json", "--memory", 24 * MIB)
    plan = plan_from_profile(profile, 24 * MIB)
    assert said(*words, "--json") == f"{json.dumps(json.loads(plan.to_json()))}\n"
    title, *lines = said(*words).splitlines()
    assert title == "made up, 108 MiB of states, from profile.json, budget 24.0 MiB"
    assert lines == plan.explain(plan_from_profile(profile, 27 * MIB)).splitlines()


def test_a_plan_given_is_itself_and_an_older_one_keeps_its_slots() -> None:
    profile, found = profile_of(), set()
    for budget in range(23 * MIB, 90 * MIB, 6 * MIB):
        plan = plan_from_profile(profile, budget)
        found.add(plan.n_ahead)
        assert plan_from_profile(profile, budget, given=plan) == plan
        said = json.loads(plan.to_json())
        del said["n_ahead"]
        older = Plan.from_json(json.dumps(said))
        assert older.n_ahead == 0
        again = plan_from_profile(profile, budget, given=older)
        assert (again.n_persist, again.n_buffer, again.block_modes) == (plan.n_persist, plan.n_buffer, plan.block_modes)
    assert len(found) > 1


def test_a_profile_of_a_gpu_needs_the_hosts_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile = over_device(profile_of())
    (tmp_path / "profile.json").write_text(profile.to_json())
    words = ("--profile", "profile.json", "--memory", 32 * MIB)
    assert "give --host-memory too" in refused(*words)
    assert "host_memory of 1.00 MiB does not hold" in refused(*words, "--host-memory", "1MiB")
    plan = plan_from_profile(profile, 32 * MIB, host_budget_bytes=64 * MIB)
    assert said(*words, "--host-memory", "64MiB", "--json") == f"{json.dumps(json.loads(plan.to_json()))}\n"
    assert 0 < plan.host_bytes <= 64 * MIB
    assert plan.ring_bytes == 0
    with pytest.raises(BudgetError) as caught:
        plan_from_profile(profile, 2 * MIB, host_budget_bytes=64 * MIB)
    smallest = caught.value.smallest_bytes  # with what libraries take of it
    assert plan_from_profile(profile, smallest, host_budget_bytes=64 * MIB).peak_bytes <= smallest
    with pytest.raises(BudgetError):
        plan_from_profile(profile, smallest - 4096, host_budget_bytes=64 * MIB)


def over_device(profile: Profile) -> Profile:
    """As if a device with a link of 10 GB/s had been measured, where 2 MiB and a sixteenth of a budget are not for tensors."""
    link = Speed(1e10)
    beside = dataclasses.replace(profile.machine, upload=link, offload=link)
    return dataclasses.replace(profile, machine=beside, overhead=Overhead(2 * MIB, 16))


@pytest.mark.usefixtures("fresh_cache")
def test_a_gpu_is_planned_for_as_it_trains(tiny: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the core's host device in its place: the budgets of both tiers, and a profile that plans the same elsewhere."""
    monkeypatch.chdir(tiny)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(compute, "stand_in", StandIn())
    words = ("--model", "tiny", "--seq", 32, "--device", "cuda", "--memory", "3MiB", "--host-memory", "24MiB", "--disk", disk)
    first = json.loads(said(*words, "--save-profile", "profile.json", "--json"))
    assert (first["budget_bytes"], first["ring_bytes"]) == (3 * MIB, 0)
    assert 0 < first["host_bytes"] <= 24 * MIB
    assert first["step_seconds"] > 0
    elsewhere = ("--profile", "profile.json", "--memory", "3MiB", "--host-memory", "24MiB", "--json")
    assert json.loads(said(*elsewhere)) == first
    text = said(*words)
    assert "on cuda and 24.0 MiB of host memory, budget 3.00 MiB" in text
    assert "on the host" in text
    assert "cuda:0 alone" in refused("--model", "tiny", "--device", "cuda:1")
    assert "host_memory of 1.00 MiB does not hold" in refused(*words[:-4], "--host-memory", "1MiB", "--disk", disk)


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no GPU here" in refused("--device", "cuda", "--model", "gpt2-demo")


def test_a_sweep_is_a_table_json_lines_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib")
    profile = profile_of()
    (tmp_path / "profile.json").write_text(profile.to_json())
    words = ("--profile", "profile.json", "--sweep")
    plans = sweep.sweep(lambda budget: plan_from_profile(profile, budget))
    lines = said(*words, "--json", "--out", "a.png").splitlines()
    assert [json.loads(line) for line in lines] == [json.loads(p.to_json()) | {"limit": limit_of(p)} for p in plans]
    assert png_size(tmp_path / "a.png")[0] == 1350
    text = said(*words)
    assert all(re.search(r"\s+".join(map(re.escape, filter(None, row))), text) for row in sweep.rows(plans))


@pytest.mark.parametrize("words", [("--sweep", "--out", "a.png"), ("--memory", "64MiB", "--save-profile", "p.json")])
def test_what_was_planned_is_shown_where_a_file_cannot_be_written(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took minutes, and the disk may be full only now."""
    pytest.importorskip("matplotlib")
    from protrain.base import replacing
    from protrain.cli import plan_plot

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    profile = profile_of()
    source = plan_command.Source("a model", ("--memory", ""), lambda _: profile, plan_from_profile, 64 * MIB)
    monkeypatch.setattr(plan_command, "_source", lambda *_: source)
    monkeypatch.setattr(replacing, "write_file", full)
    monkeypatch.setattr(plan_plot, "write_file", full)
    result = CliRunner().invoke(commands, ["plan", *words])
    assert isinstance(result.exception, CommandError)
    assert f"{words[-2]} '{words[-1]}' cannot be written: No space left on device" in str(result.exception)
    assert result.stdout.startswith("a model, ")
    assert len(result.stdout.splitlines()) > 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model's config."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny")
    ids = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, n_positions=128, **ids).save_pretrained(folder / "tiny")
    return folder


@pytest.mark.usefixtures("fresh_cache")
def test_a_measured_profile_is_saved_and_reproduces_the_plan(tiny: Path, disk: Path) -> None:
    model = ("--model", "tiny", "--seq", 32, "--batch", 2, "--disk", disk)
    first = fine(run(tiny, *model, "--memory", "6MiB", "--save-profile", "measured.json", "--json"))
    assert said("--profile", tiny / "measured.json", "--memory", "6MiB", "--json") == first
    profile = Profile.from_json((tiny / "measured.json").read_text())
    assert profile.model == "tiny, batch 2 x 32 tokens"
    assert plan_from_profile(profile, 6 * MIB) == Plan.from_json(first)


def test_a_plan_for_hardware_that_is_not_here(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from protrain.planner.hardware import load_hardware, shipped_hardware

    monkeypatch.chdir(tiny)
    name = next(name for name in shipped_hardware() if load_hardware(name).n_devices > 1)
    words = ("--model", "tiny", "--seq", 32, "--hardware", name)
    whole = json.loads(said(*words, "--json"))
    assert whole["budget_bytes"] == load_hardware(name).device_bytes
    alone = json.loads(said(*words, "--devices", 1, "--json"))
    assert alone["n_persist"] == alone["n_chunks"]
    more = f"one more GiB ({(load_hardware(name).device_bytes + GIB) / GIB:.2f} GiB): "  # more than the machine has: to be bought
    assert more in said(*words)
    text = said(*words, "--memory", "8MiB", "--devices", 1, "--host-memory", "1GiB", "--precision", "fp32")
    assert f"fp32, batch 1 x 32 tokens for each device, 1 device of {load_hardware(name).name}, budget 8.00 MiB" in text
    for wrong, named in (
        (["--hardware", name, "--devices", 999], "999"),
        (["--hardware", name, "--memory", "900GiB"], "--memory 900 GiB is more than"),
        (["--hardware", name, "--host-memory", "9000TiB"], "--host-memory"),
        (["--hardware", "cpu", "--host-memory", "1MiB"], "leave the option out"),
        (["--hardware", "abacus"], "abacus"),
        (["--hardware", name, "--batch", 1 << 31], f"--hardware '{name}', --batch {1 << 31}, --seq 32: a step of this batch "),
        (["--batch", 1 << 31], f"--batch {1 << 31}, --seq 32: the tokens alone take 512 GiB, and "),
    ):
        assert named in refused("--model", "tiny", "--seq", 32, *wrong)
    passes = CliRunner().invoke(commands, ["plan", "--model", "tiny", "--seq", "32", "--accumulate", str(1 << 31)])
    assert passes.exit_code == 2
    assert f"'--accumulate': {1 << 31} is not in the range 1<=x<=65536." in passes.stderr


# ---- what was measured before ----


def test_plans_of_an_hour_come_from_one_measurement(
    tiny: Path, disk: Path, fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for another budget; not for another batch, with --save-profile, or of long ago."""
    monkeypatch.chdir(tiny)
    measured_for: list[int] = []
    real = api.profile

    def profile(*args: Any, measured: Profile | None = None, **kwargs: Any) -> Profile:
        if measured is None:
            measured_for.append(kwargs["memory"])
        return real(*args, measured=measured, **kwargs)

    monkeypatch.setattr(api, "profile", profile)

    def planned(memory: str, *more: object) -> dict[str, Any]:
        return dict(json.loads(said("--model", "tiny", "--seq", 32, "--disk", disk, "--memory", memory, *more, "--json")))

    first, again = planned("6MiB", "--batch", 2), planned("6MiB", "--batch", 2)
    assert first == again
    assert first["step_seconds"] > 0
    larger = planned("64MiB", "--batch", 2, "--accumulate", 3)
    assert larger["budget_bytes"] == 64 * MIB
    assert measured_for == [6 * MIB]
    text = said("--model", "tiny", "--seq", 32, "--disk", disk, "--memory", "6MiB", "--batch", 2)
    assert "\nmeasured within the last minute; with --save-profile it is measured anew\n" in text
    planned("6MiB", "--batch", 1)
    planned("6MiB", "--batch", 2, "--save-profile", str(tmp_path / "p.json"))
    assert measured_for == [6 * MIB] * 3
    kept = sorted((fresh_cache / "protrain").iterdir())
    assert len(kept) == 2
    for path in kept:
        os.utime(path, (path.stat().st_mtime - measured.KEPT_SECONDS - 1,) * 2)
    fresh = planned("6MiB", "--batch", 2)
    assert measured_for == [6 * MIB] * 4
    assert len(list((fresh_cache / "protrain").iterdir())) == 1  # what is too old is gone
    assert planned("6MiB", "--batch", 2) == fresh


@pytest.mark.parametrize("kept", ["damaged", "other", "nowhere"])
def test_a_measurement_that_cannot_be_used_is_made_anew(kept: str, fresh_cache: Path) -> None:
    of, made = {"model": "a"}, profile_of()
    if kept == "nowhere":
        fresh_cache.write_text("a file is in the way of the folder")

    def make(known: Profile | None) -> Profile:
        if known is not None and len(known.run.phases) != len(made.run.phases):
            raise PlanError("measured: a step of this model and batch computes something else")
        return made

    first = measured.Measured(of, anew=False)
    assert first.profile(lambda known: made if known is None else profile_of(2)) is made
    assert first.profile(lambda known: made if known == made else profile_of(2)) is made  # in one process it is known
    assert first.age() == ""
    for path in (fresh_cache / "protrain").glob("*.json"):
        path.write_text(profile_of(3).to_json() if kept == "other" else "no JSON")
    second = measured.Measured(of, anew=False)
    assert second.profile(make) is made
    assert second.age() == ""
    third = measured.Measured(of, anew=False)
    assert (third.age() == "") == (kept == "nowhere")


def test_a_measurement_is_of_all_that_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config, other = (transformers.GPT2Config(n_embd=size, n_layer=2, n_head=2) for size in (64, 32))

    def of(config: Any = config, batch: int = 1, seq: int = 8, precision: str = "fp32", device: str = "cpu") -> dict[str, Any]:
        return measured.described(config, batch, seq, precision, device, str(tmp_path))

    def file() -> Path | None:
        return measured.Measured(of(), anew=True)._path

    assert of() == of()
    changed = [of(other), of(batch=2), of(seq=9), of(precision="bf16"), of(device="cuda")]
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    changed.append(of())
    assert all(found != of() for found in changed[:-1])
    here = file()
    monkeypatch.delenv("MKL_CBWR")
    assert here != file()
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measured.folder() == tmp_path / ".cache" / "protrain"


def test_profiles_of_one_measurement_have_its_times_and_lanes(disk: Path, causal_lm: Any, token_batches: Any) -> None:
    model = causal_lm("gpt2", hidden=192)
    batch = {"input_ids": token_batches(1)[0], "labels": token_batches(1)[0]}
    first = api.profile(model, batch, memory="64MiB", disk=disk)
    second = api.profile(model, batch, memory="2MiB", disk=disk, measured=first)
    assert (second.times, second.machine) == (first.times, first.machine)
    assert second.chunk_bytes < first.chunk_bytes
    with pytest.raises(PlanError, match="measured: a step of this model and batch computes something else"):
        api.profile(model, {"input_ids": batch["input_ids"][:1]} | {"labels": batch["labels"][:1]}, disk=disk, measured=first)
    with pytest.raises(TypeError, match="measured is"):
        api.profile(model, batch, disk=disk, measured=first.to_json())  # type: ignore[arg-type]
