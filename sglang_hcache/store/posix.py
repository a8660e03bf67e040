"""The engine every machine has: preadv and pwritev in threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from sglang_hcache.store.engine import IOKind, IOOp, IOResult
from sglang_hcache.store.geometry import BLOCK


class PosixEngine:
    """An ``IOEngine`` over blocking system calls, which release the GIL."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"an engine needs a thread, got {num_threads}")
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="hcache-io")

    def run(self, ops: Sequence[IOOp]) -> list[IOResult]:
        if len(ops) == 1:
            return [run_op(ops[0])]
        futures = [self._pool.submit(run_op, op) for op in ops]
        wait(futures)  # All of them, even if one raises: until then the buffers are in use.
        return [future.result() for future in futures]

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def run_op(op: IOOp) -> IOResult:
    """Do one operation to its end: resumes after short transfers, stops at the end of a file."""
    done = 0
    try:
        if op.kind is IOKind.SYNC:
            os.fdatasync(op.fd)
            return IOResult(0)
        transfer = os.preadv if op.kind is IOKind.READ else os.pwritev
        views = [buffer.data for buffer in op.buffers]
        while views:
            count = transfer(op.fd, views, op.offset + done)
            done += count
            views = _rest(views, count)
            if count == 0 or (op.direct and count % BLOCK):
                break  # The end of the file, which is off the block grid only where it was cut.
    except OSError as error:
        return IOResult(done, error)
    return IOResult(done)


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``views`` after ``count`` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []
