"""What is being done now, so that whoever closes a store can wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_hcache.core.errors import StoreIOError


class Operations:
    """Safe from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    @contextmanager
    def one(self) -> Iterator[None]:
        """Something :meth:`drain` waits for.

        Raises:
            StoreIOError: no more may begin.
        """
        with self._changed:
            if self._closed:
                raise StoreIOError("the store is closed")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Let no more begin; False if somebody said so before."""
        with self._changed:
            closed, self._closed = self._closed, True
        return not closed

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until none runs; False if that takes longer than ``timeout_s`` seconds (None: however long)."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, timeout_s)
