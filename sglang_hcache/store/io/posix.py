"""The engine every machine has: preadv and pwritev in threads, some for each directory."""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Callable, Iterable

from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.io.engine import Batch, IOKind, IOOp, IOResult
from sglang_hcache.store.io.workers import WorkerPool

MAX_VIEWS = os.sysconf("SC_IOV_MAX")
"""Buffers that one system call takes."""

NUM_THREADS = 8
"""Operations that each directory's device sees at once."""


class PosixEngine:
    """An ``IOEngine`` over blocking system calls, which release the GIL.

    Args:
        num_stripes: directories.
        num_threads: for each of them.
        on_error: called after an error that nobody foresaw.
    """

    name = "posix"

    def __init__(
        self,
        num_stripes: int,
        num_threads: int = NUM_THREADS,
        on_error: Callable[[], object] = lambda: None,
    ) -> None:
        self._pools = [
            WorkerPool(f"hcache-io{stripe}", num_threads, on_error) for stripe in range(num_stripes)
        ]

    def submit(self, batch: Batch, indices: Iterable[int]) -> None:
        for index in indices:
            try:
                self._pools[batch.ops[index].stripe].submit(functools.partial(_run, batch, index))
            except OSError as error:  # no thread for it
                if batch.begin(index):
                    batch.end(index, IOResult(0, error))

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        stopped = [pool.close(max(0.0, deadline - time.monotonic())) for pool in self._pools]
        return all(stopped)


def _run(batch: Batch, index: int) -> None:
    if batch.begin(index):
        batch.end(index, run_op(batch.ops[index]))


def run_op(op: IOOp) -> IOResult:
    """Do one operation to its end: resumes after short transfers, stops at the end of a file."""
    done = 0
    try:
        if op.kind is IOKind.SYNC:
            os.fdatasync(op.file.fd)
            return IOResult(0)
        transfer = os.preadv if op.kind is IOKind.READ else os.pwritev
        views = [buffer.data for buffer in op.buffers]
        while views:
            count = transfer(op.file.fd, views[:MAX_VIEWS], op.offset + done)
            done += count
            views = _rest(views, count)
            if count == 0 or (op.file.direct and count % BLOCK):
                break  # The end of the file, which is off the block grid only where it was cut.
    except OSError as error:
        return IOResult(done, error.with_traceback(None))  # its frames hold the file and the buffers
    except Exception as error:
        # Such as MemoryError: an operation that never ends would count as one that hangs.
        return IOResult(done, OSError(errno.EIO, f"{type(error).__name__}: {error}"))
    return IOResult(done)


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``views`` after ``count`` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []
