"""A plugin of pytest under which every plan by time is of random times: what blocks take is up to ten times more or less than was
measured, what lanes cost likewise, and what the disk carries up to a hundred times. After half of the steps there is another.

    PYTHONPATH=tests PROTRAIN_FUZZ_SEED=7 python -m pytest -p random_plans tests/test_exact.py

Bits, budgets and errors are to be the same under any plan that fits, so tests of these hold; those of what a plan takes do not.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from protrain.dryrun.phases import DryRun
from protrain.planner.profiles import Times
from protrain.runtime.pacing import Pacer

SEED = os.environ.get("PROTRAIN_FUZZ_SEED", "1")


@pytest.fixture(autouse=True)
def random_plans(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Each test has a seed of its own, so that one that fails does so again alone."""
    choose = random.Random(f"{SEED} {request.node.nodeid}")
    plan, after_step = Pacer._plan, Pacer.after_step

    def factor(most: float) -> float:
        return float(most ** choose.uniform(-1, 1))

    def plan_at_random(pacer: Pacer, run: DryRun, update_seconds: float, update_bytes: int, _waited: float | None = None) -> None:
        before = pacer._times, pacer._disk_factor, pacer._drag_factor
        try:
            if pacer._times is not None:
                phases = tuple((seconds * factor(10), again * factor(10)) for seconds, again in pacer._times.phases)
                pacer._times = Times(phases)
            pacer._disk_factor, pacer._drag_factor = factor(100), factor(10)
            plan(pacer, run, update_seconds, update_bytes)
        finally:
            pacer._times, pacer._disk_factor, pacer._drag_factor = before

    def plan_again(pacer: Pacer, *figures: Any, **more: Any) -> None:
        after_step(pacer, *figures, **more)
        timed = pacer._times is not None and pacer._wrapped.settings.plan is None
        if pacer._run is not None and timed and choose.random() < 0.5:
            _, _, update_seconds, update_bytes = figures
            pacer._plan(pacer._run, update_seconds, update_bytes)

    monkeypatch.setattr(Pacer, "_plan", plan_at_random)
    monkeypatch.setattr(Pacer, "after_step", plan_again)
