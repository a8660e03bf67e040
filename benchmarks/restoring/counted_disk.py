"""A disk store that counts what its device is asked to do."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from sglang_hcache.core.observer import Counters
from sglang_hcache.core.units import parse_size
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.io.engine import Batch, IOEngine, IOKind
from sglang_hcache.store.io.limit import LimitedEngine
from sglang_hcache.store.io.posix import PosixEngine

IO_THREADS = 8
"""What the store's configuration has by default."""


class CountingEngine:
    """Passes operations on to ``inner`` and counts those of one ``kind``."""

    def __init__(self, inner: IOEngine, kind: IOKind) -> None:
        self.name = inner.name
        self._inner = inner
        self._kind = kind
        self._lock = threading.Lock()
        self._count = self._bytes = 0

    def submit(self, batch: Batch, indices: Iterable[int]) -> None:
        indices = list(indices)
        sizes = [batch.ops[index].size for index in indices if batch.ops[index].kind is self._kind]
        with self._lock:
            self._count += len(sizes)
            self._bytes += sum(sizes)
        self._inner.submit(batch, indices)

    def close(self, timeout_s: float) -> bool:
        return self._inner.close(timeout_s)

    def take(self) -> tuple[int, int]:
        """Operations and bytes since the last call."""
        with self._lock:
            found = self._count, self._bytes
            self._count = self._bytes = 0
            return found


def open_disk(folder: Path, kind: IOKind, limit: str = "") -> tuple[DiskStore, CountingEngine]:
    """A new store in ``folder`` whose operations of ``kind`` are counted.

    Args:
        limit: it is read no faster than this, such as ``500MB``, a second; empty: as fast as it goes.
    """
    config = StoreConfig(
        dirs=(folder,), size_bytes=16 * 2**30, free_floor_bytes=0, segment_bytes=2**28, io_timeout_s=60.0
    )
    engine: IOEngine = PosixEngine(1, IO_THREADS)
    if limit:
        engine = LimitedEngine(engine, parse_size(limit))
    counting = CountingEngine(engine, kind)
    return DiskStore.open(config, Counters(), counting), counting
