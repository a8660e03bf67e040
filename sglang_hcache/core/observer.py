"""How the layers report what happens, without knowing who listens."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
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
        self._measured: Counter[str] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def count(self, event: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[event] += amount
        if self._listener is not None:
            self._listener.count(event, amount)

    def observe(self, measure: str, value: float) -> None:
        with self._lock:
            self._measured[measure] += 1
            self._sums[measure] += value
        if self._listener is not None:
            self._listener.observe(measure, value)

    def snapshot(self) -> dict[str, int]:
        """All counters so far, sorted by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def measures(self) -> dict[str, dict[str, float]]:
        """How often each measure was observed, and the sum of its values, sorted by name."""
        with self._lock:
            return {
                measure: {"count": count, "sum": self._sums[measure]}
                for measure, count in sorted(self._measured.items())
            }

    def __getitem__(self, event: str) -> int:
        """Without the lock, which the thread may hold that a signal's handler interrupts."""
        return self._counts[event]
