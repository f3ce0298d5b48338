"""The profile that real steps make of a model: it foretells the plan in use, and plans by it elsewhere."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import program
import pytest
import transformers
from nets import Chain, inputs, steps
from twins import MIB, adafactor, adamw

import protrain
from protrain.planner.planning import plan_from_profile
from protrain.planner.profiles import Profile


def trained(memory: int, n_steps: int = 4, optimizer: Any = adamw, **options: Any) -> tuple[Any, protrain.Status]:
    model: Any = Chain()
    model, made = protrain.wrap(model, optimizer(model), memory=memory, **options)
    steps([x.to(next(model.parameters()).dtype) for x in inputs(n_steps, 512)])(model, made, False)
    return model, protrain.status(model)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"max_grad_norm": 1.0}, {"accumulate": 2}])
def test_it_foretells_the_plan_in_use(options: dict[str, Any]) -> None:
    model, status = trained(24 * MIB, 8, **options)
    profile = Profile.from_json(status.profile().to_json())
    protrain.unwrap(model)
    assert profile == status.profile()
    again = plan_from_profile(profile, 24 * MIB, given=status.plan)
    assert again.step_seconds == status.plan.step_seconds > 0
    assert again.peak_bytes == status.plan.peak_bytes
    assert (again.block_modes, again.n_persist) == (status.plan.block_modes, status.plan.n_persist)


def test_it_plans_for_other_budgets() -> None:
    model, status = trained(24 * MIB)
    protrain.unwrap(model)
    profile = status.profile()
    plans = [plan_from_profile(profile, size * MIB) for size in (24, 32, 80)]
    assert [plan.n_persist for plan in plans] == sorted(plan.n_persist for plan in plans)
    assert plans[-1].n_persist == plans[-1].n_chunks
    assert plans[-1].step_seconds < plans[0].step_seconds
    with pytest.raises(protrain.BudgetError):
        plan_from_profile(profile, MIB)


def test_of_steps_all_in_memory_it_plans_for_less() -> None:
    """They needed no disk, which is measured when it is asked for."""
    model, status = trained(200 * MIB)
    protrain.unwrap(model)
    assert status.plan.n_persist == status.plan.n_chunks
    profile = status.profile()
    plan = plan_from_profile(profile, 24 * MIB)
    assert plan.n_persist < plan.n_chunks
    assert plan.step_seconds > status.plan.step_seconds


def test_a_status_keeps_no_model_alive() -> None:
    model, status = trained(24 * MIB)
    session = weakref.ref(protrain.session_of(model))
    protrain.unwrap(model)
    del model
    gc.collect()
    assert session() is None
    assert status.profile().n_blocks == 8


def test_where_nothing_was_measured_there_is_none() -> None:
    model, status = trained(24 * MIB, 1)
    with pytest.raises(protrain.StepError, match="no plan was made from measured steps yet"):
        status.profile()
    protrain.unwrap(model)
    model, status = trained(24 * MIB, 4, plan=status.plan)
    with pytest.raises(protrain.StepError, match="without a plan"):
        status.profile()
    protrain.unwrap(model)
    model, status = trained(40 * MIB, 4, adafactor)
    with pytest.raises(protrain.StepError, match="has a kernel"):
        status.profile()
    protrain.unwrap(model)


def test_a_copy_of_a_status_has_figures_alone() -> None:
    model, status = trained(24 * MIB)
    assert status.profile().n_blocks == 8
    for other in (copy.deepcopy(status), pickle.loads(pickle.dumps(status))):
        assert other == status
        with pytest.raises(protrain.StepError, match="profile"):
            other.profile()
    protrain.unwrap(model)


def test_the_command_line_saves_it_and_plans_by_it(tmp_path: Path) -> None:
    words = ("--seq", 32, "--batch", 2, "--memory", "12MiB", "--json")
    transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, n_positions=64, vocab_size=300).save_pretrained(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text("a word and another one, and so on\n" * 400)
    tiny = ("--model", "tiny", "--data", "text.txt")
    done = program.run(tmp_path, "train", *tiny, *words, "--steps", 6, "--save-profile", "steps.json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["save_profile"] == "steps.json"
    planned = program.run(tmp_path, "plan", "--profile", "steps.json", "--memory", "14MiB", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["step_seconds"] > 0
    done = program.run(tmp_path, "train", *tiny, *words, "--steps", 1, "--save-profile", "none.json")
    assert done.returncode == 1
    assert "must be two at least" in done.stderr
    assert not (tmp_path / "none.json").exists()
