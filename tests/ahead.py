"""Work that tests wait for, begun ahead on all cores: processes, and what only waits for processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class Ahead:
    """For the whole session: what has begun runs in the order in which it was begun, each in a thread of its own.

    Nothing of one test function, or of one module that begins all it needs, runs while tests of another do, but where a test
    failed early.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._begun: dict[Hashable, Future[Any]] = {}

    def begin(self, key: Hashable, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """work(*arguments), once for each key. It may wait for what was begun before it."""
        if key not in self._begun:
            self._begun[key] = self.pool.submit(work, *arguments)
        return self._begun[key]

    def result(self, request: pytest.FixtureRequest, work: Callable[[dict[str, Any]], T]) -> T:
        """work(parameters) for the test that asks; the first one to ask begins that of all chosen tests of its function."""
        chosen = [item for item in request.session.items if getattr(item, "function", None) is request.function]
        for item in chosen:
            self.begin(item.nodeid, work, item.callspec.params)  # type: ignore[attr-defined]
        found: T = self._begun[request.node.nodeid].result()
        return found
