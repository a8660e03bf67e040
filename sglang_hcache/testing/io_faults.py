"""Wrappers of a real ``IOEngine`` that fail or dawdle on purpose. Thread-safe where the inner engine is."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import xxhash

from sglang_hcache.store.engine import IOEngine, IOKind, IOOp, IOResult
from sglang_hcache.store.posix import PosixEngine


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens instead of an operation."""

    error_number: int = 0
    """``errno`` of the failure; 0: a short transfer without an error."""
    share_done: float = 0.0
    """Share of the operation's buffers really transferred before."""


Decide = Callable[[IOOp, int], Fault | None]
"""Given an operation and its number, counted from 0: the fault, or None to let it through."""


class FaultEngine:
    """Passes operations on unless ``decide`` names a fault. ``decide`` may be replaced at any time."""

    def __init__(self, inner: IOEngine, decide: Decide) -> None:
        self._inner = inner
        self.decide = decide
        self._lock = threading.Lock()
        self._seen = 0

    def run(self, ops: Sequence[IOOp]) -> list[IOResult]:
        with self._lock:
            first, self._seen = self._seen, self._seen + len(ops)
        return [self._one(op, first + index) for index, op in enumerate(ops)]

    def close(self) -> None:
        self._inner.close()

    def _one(self, op: IOOp, number: int) -> IOResult:
        fault = self.decide(op, number)
        if fault is None:
            return self._inner.run([op])[0]
        done = 0
        kept = op.buffers[: int(len(op.buffers) * fault.share_done)]
        if kept:
            done = self._inner.run([replace(op, buffers=kept)])[0].done_bytes
        if not fault.error_number:
            return IOResult(done)
        return IOResult(done, OSError(fault.error_number, os.strerror(fault.error_number)))


def always(kind: IOKind, error_number: int = errno.EIO, stripe: int | None = None) -> Decide:
    """Every operation of ``kind`` fails, in one directory or in all."""

    def decide(op: IOOp, _: int) -> Fault | None:
        return Fault(error_number) if op.kind is kind and stripe in (None, op.stripe) else None

    return decide


def seeded(seed: int, rate: float, error_number: int = errno.EIO) -> Decide:
    """A share ``rate`` of operations fails; which ones depends on ``seed`` and the operation's number alone."""

    def decide(op: IOOp, number: int) -> Fault | None:
        draw = xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"), seed) / 2**64
        return Fault(error_number, share_done=0.5) if draw < rate else None

    return decide


def without_sync() -> FaultEngine:
    """A real engine that only pretends to sync: for tests that write a lot and lose no power."""
    return FaultEngine(PosixEngine(1), lambda op, _: Fault() if op.kind is IOKind.SYNC else None)


class LatencyEngine:
    """Every batch takes ``delay_s`` seconds longer."""

    def __init__(self, inner: IOEngine, delay_s: float) -> None:
        self._inner = inner
        self.delay_s = delay_s

    def run(self, ops: Sequence[IOOp]) -> list[IOResult]:
        time.sleep(self.delay_s)
        return self._inner.run(ops)

    def close(self) -> None:
        self._inner.close()
