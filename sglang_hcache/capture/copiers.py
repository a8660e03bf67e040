"""Threads that copy rows beside the assembler: one alone copies more slowly than a GPU computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from sglang_hcache.core.threads import started_threads

_MOST = 4
_CORES_FOR_ONE = 4


def copiers_for(cores: int) -> Copiers:
    """As many as a machine can spare."""
    return Copiers(max(1, min(_MOST, cores // _CORES_FOR_ONE)))


class Copiers:
    """Threads that copy, one of which is the caller's.

    Args:
        count: with the caller's; 1: nobody else copies.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # All begin now: one that cannot is an error of the start, not of a pass whose rows others copy already.
        # A pool without work has no thread.
        self._threads = started_threads(count - 1, "hcache-copier") if count > 1 else ThreadPoolExecutor(1)

    def carry_out(self, copies: Sequence[Callable[[], None]]) -> None:
        """Do all of ``copies``, in any order. At the end none is under way, also after an error, which is raised."""
        left = deque(copies)
        # Each takes the next one: a thread that got no core holds up the others by no more than one copy.
        others: list[Future[None]] = []
        try:
            while len(others) < min(self.count, len(copies)) - 1:
                others.append(self._threads.submit(_work, left))
            _work(left)
        finally:
            left.clear()
            begun = [other for other in others if not other.cancel()]
            if begun:
                wait(begun)
        for other in begun:
            other.result()

    def close(self) -> None:
        """Returns when the threads are gone."""
        self._threads.shutdown()


def _work(left: deque[Callable[[], None]]) -> None:
    while left:
        try:
            copy = left.popleft()
        except IndexError:  # somebody else was faster
            return
        copy()
