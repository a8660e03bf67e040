"""For log lines about faults that repeat: once now, then once in a while. The counters have the numbers."""

from __future__ import annotations

import threading
import time


class Throttle:
    """Says yes at most once in ``interval_s`` seconds. Thread-safe."""

    def __init__(self, interval_s: float = 60.0) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._next = 0.0

    def __call__(self) -> bool:
        """Whether it is time again."""
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                return False
            self._next = now + self._interval_s
            return True
