"""How fast an engine reads from a directory, by a file that is written for it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sglang_hcache.store.io.engine import Batch, IOEngine, IOKind, IOOp, OpenFile
from sglang_hcache.store.io.memory import ByteArray, aligned_empty
from sglang_hcache.store.io.probing import probe_file

OP_BYTES = 512 * 2**10
OPS_AT_ONCE = 16
LEAST_PROBE_BYTES = 4 * 2**20
MOST_PROBE_BYTES = 16 * 2**20
MAX_ROUNDS = 5
ROUNDS_S = 0.4
"""No further round after this time."""

PATIENCE_S = 1.0
"""Without any progress; the device hangs."""


def probe_bytes(spare_bytes: int) -> int:
    """Size of the file, given how large it may be; 0: too small to measure anything."""
    size = min(MOST_PROBE_BYTES, spare_bytes) // OP_BYTES * OP_BYTES
    return size if size >= LEAST_PROBE_BYTES else 0


def read_rates(engines: Sequence[IOEngine], directory: Path, direct: bool, size: int) -> list[float]:
    """Bytes a second that each engine reads, in its best of a few rounds; they take turns.

    Args:
        size: bytes of the file, from :func:`probe_bytes`.

    Raises:
        OSError: a transfer failed, was short, or hung.
    """
    data, out = aligned_empty(size), aligned_empty(size)
    data[:] = np.random.default_rng().integers(0, 256, size, dtype=np.uint8)
    best = [0.0] * len(engines)
    with probe_file(directory, direct) as file:
        _transfer(engines[0], IOKind.WRITE, file, data)
        _run(engines[0], [IOOp(IOKind.SYNC, 0, file)])
        started = time.monotonic()
        for number in range(MAX_ROUNDS):
            if number and time.monotonic() - started > ROUNDS_S:
                break
            for which, engine in enumerate(engines):
                best[which] = max(best[which], _read(engine, file, data, out))
    return best


def _read(engine: IOEngine, file: OpenFile, expected: ByteArray, out: ByteArray) -> float:
    """Bytes a second.

    All reads go to the same ``out``: how its pages lie in memory can count for more than the engine.
    """
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    out[:] = 0
    begun = time.monotonic()
    _transfer(engine, IOKind.READ, file, out)
    taken_s = time.monotonic() - begun
    if not np.array_equal(out, expected):
        raise OSError(f"the {engine.name} engine read other bytes than were written")
    return expected.size / taken_s


def _transfer(engine: IOEngine, kind: IOKind, file: OpenFile, data: ByteArray) -> None:
    for begin in range(0, data.size, OPS_AT_ONCE * OP_BYTES):
        end = min(begin + OPS_AT_ONCE * OP_BYTES, data.size)
        _run(
            engine,
            [IOOp(kind, 0, file, at, (data[at : at + OP_BYTES],)) for at in range(begin, end, OP_BYTES)],
        )


def _run(engine: IOEngine, ops: Sequence[IOOp]) -> None:
    batch = Batch(ops)
    engine.submit(batch, range(len(ops)))
    for op, result in zip(ops, batch.wait(PATIENCE_S), strict=True):
        if result.error is not None:
            raise result.error
        if result.done_bytes != op.size:
            raise OSError(f"the {engine.name} engine moved {result.done_bytes} of {op.size} bytes")
