"""How the layers report what happens, without knowing who listens."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Protocol


class Observer(Protocol):
    """Receives counts of events and measurements. Methods are called from any thread; they must not raise or block."""

    def count(self, event: str, amount: int = 1) -> None:
        """Add ``amount`` to the counter ``event``, a dotted name such as ``store.chunks_written``."""

    def observe(self, measure: str, value: float) -> None:
        """One measurement of ``measure``, a dotted name such as ``restore.seconds``."""


class Counters:
    """An :class:`Observer` that adds up, thread-safe.

    Args:
        listener: is told everything as well.
    """

    def __init__(self, listener: Observer | None = None) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, event: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[event] += amount
        if self._listener is not None:
            self._listener.count(event, amount)

    def observe(self, measure: str, value: float) -> None:
        """For the listener only."""
        if self._listener is not None:
            self._listener.observe(measure, value)

    def snapshot(self) -> dict[str, int]:
        """All counters so far, sorted by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def __getitem__(self, event: str) -> int:
        """Without the lock, which the thread may hold that a signal's handler interrupts."""
        return self._counts[event]
