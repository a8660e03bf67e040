"""An engine that reads no faster than it is told: a slower disk."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable

from sglang_hcache.store.io.engine import Batch, IOEngine, IOKind


class LimitedEngine:
    """Passes operations on to ``inner``; a read starts when a device of ``bytes_per_s`` would have ended it."""

    def __init__(self, inner: IOEngine, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be positive, got {bytes_per_s}")
        self.name = inner.name
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._reads: queue.SimpleQueue[tuple[Batch, int, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hcache-limit", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch, indices: Iterable[int]) -> None:
        now = time.monotonic()
        for index in indices:
            if batch.ops[index].kind is IOKind.READ:
                self._reads.put((batch, index, now))
            else:
                self._inner.submit(batch, [index])

    def close(self, timeout_s: float) -> bool:
        self._reads.put(None)
        self._thread.join(timeout_s)
        return self._inner.close(timeout_s) and not self._thread.is_alive()

    def _run(self) -> None:
        free_at = 0.0
        while (item := self._reads.get()) is not None:
            batch, index, asked_at = item
            # From when it was asked: a device that has more to do does not pause where a sleep ends late.
            free_at = max(free_at, asked_at) + batch.ops[index].size / self._bytes_per_s
            time.sleep(max(0.0, free_at - time.monotonic()))
            self._inner.submit(batch, [index])
