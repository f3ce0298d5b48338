"""Processes that tests wait for, begun ahead: those that the chosen tests of one function need run at once, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class Ahead:
    """For the whole session. Nothing of one test function runs while tests of another do, but where a test failed early."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._begun: dict[Any, dict[str, Future[Any]]] = {}

    def result(self, request: pytest.FixtureRequest, work: Callable[[dict[str, Any]], T]) -> T:
        """work(parameters) for the test that asks; the first one to ask begins that of all chosen tests of its function, each in
        a thread, so work must only start processes and wait for them."""
        function = request.function
        if function not in self._begun:
            items = [item for item in request.session.items if getattr(item, "function", None) is function]
            self._begun[function] = {item.nodeid: self.pool.submit(work, item.callspec.params) for item in items}  # type: ignore[attr-defined]
        found: T = self._begun[function][request.node.nodeid].result()
        return found
