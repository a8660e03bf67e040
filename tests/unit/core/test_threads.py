"""Threads that are all there before anybody has work for them."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from sglang_hcache.core.threads import started_threads


def threads_named(name: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(name)]


def test_all_are_there_and_have_begun() -> None:
    begun: list[int] = []
    threads = started_threads(3, "all-there", lambda: begun.append(threading.get_ident()))
    assert len(set(begun)) == 3
    assert len(threads_named("all-there")) == 3
    threads.shutdown()


def test_an_error_of_one_that_begins_is_told_and_leaves_none() -> None:
    numbers = iter(range(3))

    def begin() -> None:
        if next(numbers) == 1:
            raise MemoryError("no room for one")

    told: Future[None] = Future()

    def start() -> None:
        try:
            started_threads(3, "one-fails", begin)
        except MemoryError as error:
            told.set_exception(error)

    threading.Thread(target=start, daemon=True).start()  # of its own: it must not take the tests along
    with pytest.raises(MemoryError, match="no room for one"):
        told.result(timeout=60)
    assert not threads_named("one-fails")
