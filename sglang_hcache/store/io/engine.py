"""What the store asks of an I/O engine: run a batch of operations, say how each one ended."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sglang_hcache.store.io.memory import ByteArray


class IOKind(Enum):
    READ = "read"
    WRITE = "write"
    SYNC = "sync"
    """fdatasync; no buffers."""


class OpenFile:
    """A file descriptor that is closed when nothing refers to it any more.

    So an operation that hangs keeps its file, and no other file can get its number meanwhile.
    """

    __slots__ = ("direct", "fd")

    def __init__(self, fd: int, direct: bool) -> None:
        self.fd = fd
        self.direct = direct
        """Opened with O_DIRECT."""

    def __del__(self) -> None:
        # A failing close (NFS) still closes; what counts was synced before.
        with contextlib.suppress(OSError):
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class IOOp:
    """One transfer between consecutive bytes of a file and a list of buffers.

    The caller keeps the buffers unchanged until the operation has ended. If the file is ``direct``, the offset
    and every buffer's address and length are multiples of 4096.
    """

    kind: IOKind
    stripe: int
    """Directory the file lies in: a device of its own, with its own queue."""
    file: OpenFile
    offset: int = 0
    buffers: tuple[ByteArray, ...] = ()

    @property
    def size(self) -> int:
        """Bytes to transfer."""
        return sum(buffer.size for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class IOResult:
    """How one operation ended. Complete means no error and ``done_bytes`` equal to the op's size."""

    done_bytes: int
    """Bytes transferred; fewer than asked without an error means the file ended there."""
    error: OSError | None = None
    in_flight: bool = False
    """It was given up but may still touch its buffers: they must not be used again."""


class Batch:
    """Operations that run together: engines :meth:`begin` and :meth:`end` each, the caller waits for all.

    Args:
        on_late: called with each operation that ends after it was given up, on the engine's thread.
    """

    def __init__(self, ops: Sequence[IOOp], on_late: Callable[[IOOp], None] | None = None) -> None:
        self.ops = tuple(ops)
        self._on_late = on_late
        self._results: list[IOResult | None] = [None] * len(self.ops)
        self._begun = [False] * len(self.ops)
        self._left = len(self.ops)
        self._given_up = False
        self._progress_at = time.monotonic()
        self._changed = threading.Condition()

    def begin(self, index: int) -> bool:
        """An engine is about to start operation ``index``; False if it must not."""
        with self._changed:
            if self._given_up:
                return False
            self._begun[index] = True
            return True

    def end(self, index: int, result: IOResult) -> None:
        """Operation ``index`` has ended and touches its buffers no more. Once an operation."""
        with self._changed:
            late = self._given_up
            if not late:
                self._results[index] = result
                self._progress_at = time.monotonic()
                self._left -= 1
                if not self._left:
                    self._changed.notify_all()
        if late and self._on_late is not None:
            self._on_late(self.ops[index])

    def wait(self, patience_s: float) -> list[IOResult]:
        """Results of all operations, in order, when all have ended or none did for ``patience_s`` seconds.

        What has not ended then fails with ETIMEDOUT if it was begun, with ECANCELED if not.
        """
        with self._changed:
            while self._left:
                patience_left = self._progress_at + patience_s - time.monotonic()
                if patience_left <= 0:
                    self._given_up = True
                    break
                self._changed.wait(patience_left)
            return [result or self._unfinished(index) for index, result in enumerate(self._results)]

    def _unfinished(self, index: int) -> IOResult:
        number = errno.ETIMEDOUT if self._begun[index] else errno.ECANCELED
        return IOResult(0, OSError(number, os.strerror(number)), in_flight=self._begun[index])


class IOEngine(Protocol):
    """Moves bytes. Methods may be called from any thread."""

    name: str
    """As ``--hcache-io-engine`` has it."""

    def submit(self, batch: Batch, indices: Iterable[int]) -> None:
        """Start the operations ``indices`` of ``batch``, in any order and in parallel; returns at once.

        Each is begun and, if ``begin`` allowed it, ended exactly once. A failing device is an ``IOResult`` with
        an error, never an exception. A directory whose device hangs does not hold up the others.
        """

    def close(self, timeout_s: float) -> bool:
        """Stop when what is under way has ended; False if that took longer than ``timeout_s`` seconds."""
