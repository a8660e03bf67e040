"""Threads that a hung device may keep."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from sglang_hcache.store.io.workers import DeadlineCaller, WorkerPool

LONG_S = 60.0
SHORT_S = 0.02


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """What a hung device waits for."""
    event = threading.Event()
    yield event
    event.set()


def test_a_pool_runs_jobs_in_order_and_ends_behind_them() -> None:
    pool = WorkerPool("test", 1)
    done: list[int] = []
    for number in range(20):
        pool.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert pool.close(LONG_S)
    assert done == list(range(20))


def test_a_pool_runs_as_many_jobs_at_once_as_it_has_threads() -> None:
    pool = WorkerPool("test", 3)
    barrier = threading.Barrier(3, timeout=LONG_S)
    for _ in range(3):
        pool.submit(lambda: barrier.wait() and None)
    assert pool.close(LONG_S)
    assert not barrier.broken


def test_a_job_that_raises_is_counted_and_its_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[None] = []
    pool = WorkerPool("test", 1, lambda: errors.append(None))
    for _ in range(3):
        pool.submit(lambda: 1 // 0 and None)
    assert pool.close(LONG_S)
    assert len(errors) == 3
    assert caplog.text.count("a job failed") == 1


def test_closing_a_pool_does_not_wait_for_a_job_that_hangs(hang: threading.Event) -> None:
    pool = WorkerPool("test", 2)
    pool.submit(lambda: hang.wait() and None)
    assert not pool.close(SHORT_S)


def test_a_pool_that_was_not_used_is_closed() -> None:
    assert WorkerPool("test", 1).close(0.0)


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="thread"):
        WorkerPool("test", 0)


def test_a_lane_returns_and_raises_what_the_function_does() -> None:
    caller = DeadlineCaller("test")
    assert caller.call(lambda: 42, LONG_S) == 42
    with pytest.raises(KeyError):
        caller.call(lambda: {}["x"], LONG_S)
    assert caller.close(LONG_S)


def test_a_call_that_hangs_is_given_up(hang: threading.Event) -> None:
    caller = DeadlineCaller("test")
    with pytest.raises(TimeoutError) as caught:
        caller.call(hang.wait, SHORT_S)
    assert caught.value.errno == errno.ETIMEDOUT
    assert not caller.close(LONG_S)


def test_while_a_call_hangs_others_fail_at_once(hang: threading.Event) -> None:
    caller = DeadlineCaller("test")
    with pytest.raises(TimeoutError):
        caller.call(hang.wait, SHORT_S)
    ran = threading.Event()
    with pytest.raises(TimeoutError):
        caller.call(ran.set, LONG_S)
    assert not ran.is_set()


def test_a_call_behind_one_that_hangs_is_never_run(hang: threading.Event) -> None:
    caller = DeadlineCaller("test")
    begun, ran = threading.Event(), threading.Event()

    def first() -> None:
        with pytest.raises(TimeoutError):
            caller.call(lambda: begun.set() or hang.wait(), 10 * SHORT_S)

    other = threading.Thread(target=first)
    other.start()
    begun.wait(LONG_S)
    with pytest.raises(TimeoutError):
        caller.call(ran.set, SHORT_S)
    other.join(LONG_S)
    hang.set()
    assert caller._pool.close(LONG_S)
    assert not ran.is_set()


def test_a_call_is_not_given_up_by_one_behind_it_that_has_less_time(hang: threading.Event) -> None:
    given_up: list[str] = []
    caller = DeadlineCaller("test", lambda: given_up.append("long"))
    begun, looked = threading.Event(), threading.Event()
    outcomes: list[object] = []
    overruns = caller._overruns

    def seen(timeout_s: float) -> bool:
        found = overruns(timeout_s)
        looked.set()
        return found

    caller._overruns = seen  # type: ignore[method-assign]
    calls = [
        threading.Thread(
            target=lambda: outcomes.append(caller.call(lambda: begun.set() or hang.wait(), LONG_S))
        ),
        threading.Thread(target=lambda: outcomes.append(caller.call(lambda: "short", SHORT_S))),
    ]
    calls[0].start()
    assert begun.wait(LONG_S)
    calls[1].start()
    assert looked.wait(LONG_S), "whoever waits behind it looks when its own time is over"
    hang.set()
    for call in calls:
        call.join(LONG_S)
    assert ({*outcomes}, given_up) == ({True, "short"}, []), "whichever of the two is told first"
    assert caller.close(LONG_S)


def test_a_lane_recovers_when_the_call_ends(hang: threading.Event) -> None:
    caller = DeadlineCaller("test")
    ended = threading.Event()
    with pytest.raises(TimeoutError):
        caller.call(hang.wait, SHORT_S)
    hang.set()
    caller._pool.submit(ended.set)  # runs when the call before it is over
    assert ended.wait(LONG_S)
    assert caller.call(lambda: "again", LONG_S) == "again"
    assert caller.close(LONG_S)


def test_a_timeout_that_the_function_raises_itself_is_not_a_hang() -> None:
    caller = DeadlineCaller("test")

    def fails() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        caller.call(fails, LONG_S)
    assert caller.call(lambda: 42, LONG_S) == 42


def test_a_closed_lane_refuses_instead_of_waiting_for_ever() -> None:
    caller = DeadlineCaller("test")
    assert caller.call(lambda: 7, LONG_S) == 7
    assert caller.close(LONG_S)
    with pytest.raises(OSError, match="closed") as caught:
        caller.call(lambda: 7, 0.1)
    assert caught.value.errno == errno.ESHUTDOWN


def test_a_call_that_ends_while_it_is_given_up_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, ended = DeadlineCaller("test"), threading.Event()
    result = Future.result

    def too_late(self: Future[int], timeout: float | None = None) -> int:
        if timeout is None:
            return result(self)
        ended.wait(LONG_S)
        result(self)
        raise TimeoutError  # just before the function ended

    monkeypatch.setattr(Future, "result", too_late)
    assert caller.call(lambda: ended.set() or 7, 0.1) == 7  # type: ignore[func-returns-value]
    caller.close(LONG_S)


def test_a_call_that_goes_on_is_told_when_it_was_given_up() -> None:
    told: list[str] = []
    given_up, ended = threading.Event(), threading.Event()
    caller = DeadlineCaller("test", lambda: told.append("hangs"), lambda: told.append("returned"))

    def hang() -> None:
        caller.goes_on()
        given_up.wait(LONG_S)
        try:
            caller.goes_on()
        except OSError:
            ended.set()

    with pytest.raises(TimeoutError):
        caller.call(hang, 0.05)
    assert told == ["hangs"]
    with pytest.raises(TimeoutError, match="still hangs"):
        caller.call(lambda: None, 0.05)
    given_up.set()
    assert ended.wait(LONG_S)
    assert caller.close(LONG_S)
    assert told == ["hangs", "returned"]


def test_closing_a_lane_ends_a_call_that_asks_whether_it_goes_on() -> None:
    caller, started = DeadlineCaller("test"), threading.Event()

    def work() -> None:
        while True:
            started.set()
            caller.goes_on()

    def wait() -> None:
        with pytest.raises(OSError, match="given up"):
            caller.call(work, LONG_S)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert started.wait(LONG_S)
    assert caller.close(LONG_S)
    waiting.join(LONG_S)
    assert not waiting.is_alive()


def test_what_is_posted_is_done_without_waiting(hang: threading.Event) -> None:
    caller, done = DeadlineCaller("test"), threading.Event()
    caller.post(hang.wait)
    caller.post(done.set)
    assert not done.is_set()
    with pytest.raises(TimeoutError):
        caller.call(lambda: None, 0.05)
    hang.set()
    assert done.wait(LONG_S)
    assert caller.close(LONG_S)
    done.clear()
    caller.post(done.set)
    assert done.is_set(), "a closed caller does it at once"


def test_a_pool_does_with_fewer_threads_and_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left, start = [0], threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name.startswith("limited") and not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    pool, done = WorkerPool("limited", 3), threading.Event()
    with pytest.raises(OSError, match="no thread") as caught:
        pool.submit(done.set)
    assert caught.value.errno == errno.EAGAIN
    left[0] = 1
    pool.submit(done.set)
    assert done.wait(LONG_S)
    left[0], barrier = 2, threading.Barrier(3, timeout=LONG_S)
    for _ in range(3):
        pool.submit(barrier.wait)
    assert pool.close(LONG_S)
    assert not barrier.broken
