"""A reader's hold on chunks: what it names cannot be evicted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sglang_hcache.core.errors import TierMissError
from sglang_hcache.store.catalog import RunSlice


class ReadLease:
    """Pins the segments of some chunks until closed. Made by ``DiskStore.lease``; safe from any thread."""

    def __init__(
        self, keys: Sequence[bytes], slices: Sequence[RunSlice], release: Callable[[ReadLease], None]
    ) -> None:
        self.keys = tuple(keys)
        self.slices = tuple(slices)
        """The store's business: which runs hold the chunks."""
        self.chunk_layer_bytes: tuple[int, ...] = slices[0].run.place.shape.chunk_layer_bytes
        """Bytes of one chunk in each layer, the same for all chunks."""
        self._release = release
        self._lock = threading.Lock()
        self._closed = False
        self._readers = 0

    def close(self) -> None:
        """Let go of the chunks, after reads that are under way. Further calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = self._readers == 0
        if last:
            self._release(self)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps the pins while a read is under way, even if another thread closes the lease.

        Raises:
            TierMissError: the lease is closed.
        """
        with self._lock:
            if self._closed:
                raise TierMissError("the lease is closed")
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                last = self._closed and self._readers == 0
            if last:
                self._release(self)

    def __enter__(self) -> ReadLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
