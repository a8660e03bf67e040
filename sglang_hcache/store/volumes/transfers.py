"""Batches of operations with a deadline: what hangs is given up, and every outcome moves a directory's health."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence

from sglang_hcache.core.errors import CorruptExtentError, StoreIOError
from sglang_hcache.store.io.engine import Batch, IOEngine, IOKind, IOOp, IOResult
from sglang_hcache.store.volumes.volume import Volume, storage_error

SLOWEST_BYTES_PER_S = 20 * 10**6
"""A device that writes so fast does not hang."""


class Transfers:
    """Runs operations through an engine. Safe from several threads.

    Args:
        patience_s: a batch of which nothing ended for so long is given up, seconds; later by what it writes.
    """

    def __init__(self, engine: IOEngine, volumes: Sequence[Volume], patience_s: float) -> None:
        self._engine = engine
        self._volumes = volumes
        self._patience_s = patience_s

    def run(self, ops: Sequence[IOOp], unsynced_bytes: int = 0) -> list[IOResult]:
        """Results of ``ops``, in order. Those of directories that are out fail with ENODEV at once.

        ``unsynced_bytes``: most that one directory may have to write for a SYNC among them.
        """
        wanted = [index for index, op in enumerate(ops) if self._volumes[op.stripe].health.readable]
        batch = Batch([ops[index] for index in wanted], self._late)
        if wanted:
            self._engine.submit(batch, range(len(wanted)))
        out = IOResult(0, OSError(errno.ENODEV, "its directory is out"))
        results = [out] * len(ops)
        # Reads come in small pieces. A write is one operation however large it is, and so is a sync.
        written = Counter({-1: unsynced_bytes})
        for op in ops:
            written[op.stripe] += op.size if op.kind is IOKind.WRITE else 0
        patience_s = self._patience_s + max(written.values()) / SLOWEST_BYTES_PER_S
        for index, result in zip(wanted, batch.wait(patience_s), strict=True):
            results[index] = result
            self._note(ops[index], result)
        return results

    def _note(self, op: IOOp, result: IOResult) -> None:
        health = self._volumes[op.stripe].health
        if result.in_flight:
            health.hangs()
        if result.error is not None:
            if result.error.errno != errno.ECANCELED:
                health.failed(result.error, writing=op.kind is not IOKind.READ)
        elif op.kind is not IOKind.WRITE:  # what is written counts when it is synced
            health.succeeded(writing=op.kind is IOKind.SYNC)

    def _late(self, op: IOOp) -> None:
        self._volumes[op.stripe].health.returned()


def check_complete(ops: Sequence[IOOp], results: Sequence[IOResult]) -> None:
    """
    Raises:
        StoreTimeoutError: one of ``ops`` is in flight: memory and room must not be used again, whatever else failed.
        StoreError: one failed.
        CorruptExtentError, StoreIOError: a read, or a write, moved fewer bytes than it was to.
    """
    for op, result in sorted(zip(ops, results, strict=True), key=lambda pair: not pair[1].in_flight):
        if result.error is not None:
            raise storage_error(result.error, f"{op.kind.value} failed") from result.error
        if result.done_bytes != op.size:
            if op.kind is IOKind.READ:
                raise CorruptExtentError(f"the file ends after {result.done_bytes} of {op.size} bytes")
            raise StoreIOError(f"only {result.done_bytes} of {op.size} bytes were written")
