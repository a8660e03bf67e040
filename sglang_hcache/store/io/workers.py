"""Threads that a hung device may keep: daemons, so that they never hold up the end of the process."""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from sglang_hcache.core.throttle import Throttle

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Worker(threading.Thread):
    """Of a pool."""


def workers() -> set[threading.Thread]:
    """The threads of every pool in this process. Of one that is closed, those are left that hang."""
    return {thread for thread in threading.enumerate() if isinstance(thread, _Worker)}


class WorkerPool:
    """Runs jobs in the order of submission on up to ``num_threads`` threads, started at the first job.

    Args:
        name: of the threads, which are numbered if there are several.
        on_error: called on its thread when a job raised something.
    """

    def __init__(self, name: str, num_threads: int, on_error: Callable[[], object] = lambda: None) -> None:
        if num_threads < 1:
            raise ValueError(f"a pool needs a thread, got {num_threads}")
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            _Worker(target=self._work, name=thread_name, daemon=True)
            for thread_name in ([name] if num_threads == 1 else [f"{name}-{i}" for i in range(num_threads)])
        ]
        self._on_error = on_error
        self._may_trace = Throttle()
        self._lock = threading.Lock()
        self._unstarted = list(self._threads)
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def submit(self, job: Callable[[], None]) -> None:
        """Queue ``job``. What it raises is logged and counted.

        Raises:
            OSError: the pool is closed, or the system gives it no thread.
        """
        with self._lock:
            if self._closed:
                raise OSError(errno.ESHUTDOWN, "closed")
            while self._unstarted:
                thread = self._unstarted[-1]
                try:
                    thread.start()
                except RuntimeError as error:
                    if len(self._unstarted) == len(self._threads):
                        raise OSError(errno.EAGAIN, f"no thread for input and output: {error}") from None
                    break  # fewer do as well; the next job tries again
                self._unstarted.pop()
            self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Stop behind the jobs queued so far; False if some still run after ``timeout_s`` seconds."""
        with self._lock:
            self._closed = True
            started = [thread for thread in self._threads if thread not in self._unstarted]
            for _ in started:
                self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in started)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # our bug; the thread outlives it
                if self._may_trace():
                    logger.exception("hcache: a job failed")
                self._on_error()
            job = None  # the next one may be long in coming, and this one holds buffers


_LOOK_S = 0.5
"""A signal that comes just before a wait is handled when that ends: Ctrl-C must not wait for a deadline."""


class DeadlineCaller:
    """Calls that may hang, one at a time on a thread of their own, with a deadline.

    While a call hangs, further ones fail at once. Safe from several threads.

    Args:
        on_hang: called when a call is given up.
        on_return: called when a call that was given up has ended, on its thread.
    """

    def __init__(
        self,
        name: str,
        on_hang: Callable[[], None] = lambda: None,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_hang = on_hang
        self._on_return = on_return
        self._pool = WorkerPool(name, 1)
        self._lock = threading.Lock()
        self._running_since: float | None = None
        self._running_limit_s = 0.0
        """Limit of the running call. A call that waits behind it with less patience does not give it up earlier."""
        self._stuck = False
        """A call that overran its deadline still runs."""

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """What ``function()`` returns or raises.

        Raises:
            TimeoutError: it runs for longer than ``timeout_s`` seconds, or an earlier call does and for longer than
                that one may. It may still take effect.
            OSError: this is closed; nothing is done.
        """
        if self._stuck:
            raise TimeoutError(errno.ETIMEDOUT, "an earlier call still hangs")
        future: Future[T] = Future()
        self._pool.submit(lambda: self._run(function, future, timeout_s))
        while True:
            try:
                return future.result(min(timeout_s, _LOOK_S))
            except FutureTimeout:
                if future.done():  # just now, or the function itself raised a TimeoutError
                    return future.result()
                if self._overruns(timeout_s):
                    reason = (
                        "an earlier call hangs" if future.cancel() else f"no answer within {timeout_s:g} s"
                    )
                    raise TimeoutError(errno.ETIMEDOUT, reason) from None

    def goes_on(self) -> None:
        """The running call, which calls this, has its time anew.

        Raises:
            OSError: it was given up, or this is closed: it must end.
        """
        with self._lock:
            if self._stuck or self._pool.is_closed:
                raise OSError(errno.ECANCELED, "given up")
            self._running_since = time.monotonic()

    def post(self, function: Callable[[], object]) -> None:
        """Have ``function()`` called some time. Never waits; once this is closed it is called at once."""
        try:
            self._pool.submit(lambda: self._run(function, Future(), 0.0))
        except OSError:
            function()

    def close(self, timeout_s: float) -> bool:
        """Stop behind the running call, which ends when it asks whether it goes on; False if it hangs."""
        return self._pool.close(0.0 if self._stuck else timeout_s)

    def _overruns(self, timeout_s: float) -> bool:
        with self._lock:
            since, limit_s = self._running_since, max(timeout_s, self._running_limit_s)
            if since is not None and time.monotonic() - since >= limit_s and not self._stuck:
                self._stuck = True
                self._on_hang()
            return self._stuck

    def _run(self, function: Callable[[], T], future: Future[T], limit_s: float) -> None:
        if not future.set_running_or_notify_cancel():
            return
        with self._lock:
            self._running_since, self._running_limit_s = time.monotonic(), limit_s
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                self._running_since = None
                was_stuck, self._stuck = self._stuck, False
            if was_stuck:
                self._on_return()
