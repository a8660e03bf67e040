"""How the layers report what happens, without knowing who listens."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Protocol


class Observer(Protocol):
    """Receives counts of events. Methods may be called from any thread and must not raise or block."""

    def count(self, event: str, amount: int = 1) -> None:
        """Add ``amount`` to the counter ``event``, a dotted name such as ``store.chunks_written``."""


class Counters:
    """An :class:`Observer` that adds up, thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, event: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[event] += amount

    def snapshot(self) -> dict[str, int]:
        """All counters so far, sorted by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def __getitem__(self, event: str) -> int:
        with self._lock:
            return self._counts[event]
