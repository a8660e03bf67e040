"""Threads that work beside those that decode."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_NICENESS = 10


def started_threads(count: int, name: str, begin: Callable[[], object] = lambda: None) -> ThreadPoolExecutor:
    """``count`` threads of low priority, all of which are there: a pool's own begin with the work that it is given.

    Args:
        name: begins each thread's.
        begin: called once on each of them.

    Raises:
        RuntimeError: one cannot be started; none is left then, nor after an error of ``begin``, which is raised.
    """
    threads = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_there = threading.Barrier(count)

    def begin_and_wait() -> None:
        try:
            let_others_go_first()
            begin()
        finally:
            all_there.wait()  # a thread that had nothing to do would take the next one's place

    try:
        for begun in [threads.submit(begin_and_wait) for _ in range(count)]:
            begun.result()
    except BaseException:
        all_there.abort()
        threads.shutdown()
        raise
    return threads


def let_others_go_first() -> None:
    """Lower the calling thread's priority: whoever decodes gets a core that both want."""
    own = threading.get_native_id()  # on Linux a priority is a thread's, not its process's
    with contextlib.suppress(OSError):  # a sandbox that forbids it: nothing but the order is lost
        os.setpriority(os.PRIO_PROCESS, own, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
