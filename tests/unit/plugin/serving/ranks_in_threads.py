"""Ranks that are threads of one process, each with the same work to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_PATIENCE_S = 20.0


class _Table:
    """Where they meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, question: str, value: Any) -> list[Any]:
        """What each of them says. Fails if one of them asks something else, or nothing."""
        self._said[rank] = question, value
        self._barrier.wait(_PATIENCE_S)
        said = list(self._said)
        self._barrier.wait(_PATIENCE_S)
        questions = {question for question, _ in said}
        assert len(questions) == 1, questions
        return [value for _, value in said]

    def leave(self) -> None:
        """Somebody has failed: nobody waits for it."""
        self._barrier.abort()


class ThreadRank:
    """One of them, as ``seam.ranks.Ranks``."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank, self.size, self._table = rank, table.size, table
        self._now = 0.0
        self.num_asked = 0
        """How often it has asked the others."""

    def _ask(self, question: str, value: Any) -> list[Any]:
        self.num_asked += 1
        return self._table.exchange(self.rank, question, value)

    def minimum(self, *values: float) -> tuple[float, ...]:
        if not values:
            return ()
        return tuple(min(column) for column in zip(*self._ask("minimum", values), strict=True))

    def from_first(self, value: Any) -> Any:
        return self._ask("from_first", value)[0]

    def all_of(self, value: Any) -> list[Any]:
        return self._ask("all", value)

    def sync(self, **state: float) -> None:
        told = self._ask("sync", (time.monotonic(), state))
        assert [other for _, other in told] == [state] * self.size
        self._now = told[0][0]

    def now(self) -> float:
        return self._now


def in_step(size: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """What ``work`` returns on each of ``size`` ranks. The first error of any of them is raised."""
    table = _Table(size)

    def run(rank: int) -> Any:
        try:
            return work(ThreadRank(rank, table))
        except BaseException:
            table.leave()
            raise

    with ThreadPoolExecutor(size) as threads:
        runs = [threads.submit(run, rank) for rank in range(size)]
    errors = [run.exception() for run in runs]
    real = [
        error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)
    ]
    for error in [*real, *filter(None, errors)]:
        raise error
    return [run.result() for run in runs]
