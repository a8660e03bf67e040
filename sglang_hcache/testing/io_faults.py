"""Wrappers of a real ``IOEngine`` that fail or hang on purpose. Thread-safe where the inner engine is."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import xxhash

from sglang_hcache.store.io.engine import Batch, IOEngine, IOKind, IOOp, IOResult
from sglang_hcache.store.io.posix import PosixEngine, run_op


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
        self.name = inner.name
        self._inner = inner
        self.decide = decide
        self._lock = threading.Lock()
        self._seen = 0

    def submit(self, batch: Batch, indices: Iterable[int]) -> None:
        for index in indices:
            with self._lock:
                number, self._seen = self._seen, self._seen + 1
            fault = self.decide(batch.ops[index], number)
            if fault is None:
                self._inner.submit(batch, [index])
            elif batch.begin(index):
                batch.end(index, _fail(batch.ops[index], fault))

    def close(self, timeout_s: float) -> bool:
        return self._inner.close(timeout_s)


def _fail(op: IOOp, fault: Fault) -> IOResult:
    done = 0
    kept = op.buffers[: int(len(op.buffers) * fault.share_done)]
    if kept:
        done = run_op(replace(op, buffers=kept)).done_bytes
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


def without_sync(num_stripes: int = 1) -> FaultEngine:
    """A real engine that only pretends to sync: for tests that write a lot and lose no power."""
    engine = PosixEngine(num_stripes, 1)
    return FaultEngine(engine, lambda op, _: Fault() if op.kind is IOKind.SYNC else None)


class HangingEngine:
    """Operations that ``hangs`` names are begun but do not end before :meth:`let_go`; then they are really done."""

    def __init__(self, inner: IOEngine, hangs: Callable[[IOOp], bool]) -> None:
        self.name = inner.name
        self._inner = inner
        self.hangs = hangs
        self._lock = threading.Lock()
        self._held: list[tuple[Batch, int]] = []

    def submit(self, batch: Batch, indices: Iterable[int]) -> None:
        for index in indices:
            with self._lock:  # else what hangs might be let go before it is held
                hangs = self.hangs(batch.ops[index])
                if hangs and batch.begin(index):
                    self._held.append((batch, index))
            if not hangs:
                self._inner.submit(batch, [index])

    def let_go(self) -> None:
        """End what hangs, and hang no more."""
        with self._lock:
            self.hangs = lambda op: False
            held, self._held = self._held, []
        for batch, index in held:
            batch.end(index, run_op(batch.ops[index]))

    def close(self, timeout_s: float) -> bool:
        return self._inner.close(timeout_s) and not self._held
