"""What the store asks of an I/O engine: run a batch, say how each operation went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sglang_hcache.store.memory import ByteArray


class IOKind(Enum):
    READ = "read"
    WRITE = "write"
    SYNC = "sync"
    """fdatasync; no buffers."""


@dataclass(frozen=True, slots=True)
class IOOp:
    """One transfer between consecutive bytes of a file and a list of buffers.

    The caller owns the buffers and keeps them alive and unchanged until the batch returns. With
    ``direct``, offset and every buffer's address and length are multiples of 4096.
    """

    kind: IOKind
    stripe: int
    """Directory the file lies in; for accounting and fault handling."""
    fd: int
    direct: bool
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


class IOEngine(Protocol):
    """Moves bytes. Methods may be called from any thread."""

    def run(self, ops: Sequence[IOOp]) -> list[IOResult]:
        """Run all ``ops``, in any order and in parallel, and return when every one has ended.

        One result an op, in order. A failing device is an ``IOResult`` with an error, never an exception.
        """

    def close(self) -> None:
        """Wait for running batches and stop the threads."""
