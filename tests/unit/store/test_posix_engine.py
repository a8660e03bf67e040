"""The engine's contract: one result an operation, errors as values, short transfers finished."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hcache.store.engine import IOKind, IOOp
from sglang_hcache.store.memory import aligned_empty, is_aligned
from sglang_hcache.store.posix import PosixEngine, run_op


@pytest.fixture
def engine() -> Iterator[PosixEngine]:
    engine = PosixEngine(2)
    yield engine
    engine.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


def filled(size: int, value: int) -> Any:
    array = aligned_empty(size)
    array[:] = value
    return array


def test_a_batch_gathers_and_scatters(engine: PosixEngine, fd: int) -> None:
    writes = [
        IOOp(IOKind.WRITE, 0, fd, False, 8192 * index, (filled(4096, index), filled(4096, 100 + index)))
        for index in range(8)
    ]
    assert [result.done_bytes for result in engine.run(writes)] == [8192] * 8
    outs = [(aligned_empty(1000), aligned_empty(7192)) for _ in range(8)]
    reads = [IOOp(IOKind.READ, 0, fd, False, 8192 * index, out) for index, out in enumerate(outs)]
    assert all(result.error is None for result in engine.run(reads))
    for index, out in enumerate(outs):
        whole = np.concatenate(out)
        assert (whole[:4096] == index).all()
        assert (whole[4096:] == 100 + index).all()


def test_the_end_of_a_file_is_a_short_result_not_an_error(engine: PosixEngine, fd: int) -> None:
    os.pwrite(fd, b"x" * 5000, 0)
    (result,) = engine.run([IOOp(IOKind.READ, 0, fd, False, 0, (aligned_empty(4096), aligned_empty(4096)))])
    assert (result.done_bytes, result.error) == (5000, None)


def test_one_failing_operation_does_not_spoil_its_batch(engine: PosixEngine, fd: int) -> None:
    os.pwrite(fd, b"y" * 4096, 0)
    good = aligned_empty(4096)
    results = engine.run(
        [
            IOOp(IOKind.READ, 0, fd, False, 0, (good,)),
            IOOp(IOKind.READ, 0, 10**6, False, 0, (aligned_empty(4096),)),
            IOOp(IOKind.SYNC, 0, fd, False),
        ]
    )
    assert [result.error is None for result in results] == [True, False, True]
    assert results[1].error is not None
    assert results[1].error.errno == errno.EBADF
    assert (good == ord("y")).all()


def test_short_transfers_are_resumed(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    real_write, real_read = os.pwritev, os.preadv

    def at_most_1000(real: Any) -> Any:
        def transfer(fd: int, views: list[memoryview], offset: int) -> int:
            return int(real(fd, [views[0][:1000]], offset))

        return transfer

    monkeypatch.setattr(os, "pwritev", at_most_1000(real_write))
    monkeypatch.setattr(os, "preadv", at_most_1000(real_read))
    data = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)
    assert run_op(IOOp(IOKind.WRITE, 0, fd, False, 16, (data[:3333], data[3333:]))).done_bytes == 10_000
    out = np.zeros(10_000, np.uint8)
    assert run_op(IOOp(IOKind.READ, 0, fd, False, 16, (out[:1], out[1:]))).done_bytes == 10_000
    assert np.array_equal(out, data)


def test_aligned_memory() -> None:
    for size in (0, 1, 4096, 10_000):
        array = aligned_empty(size)
        assert array.size == size
        assert is_aligned(array)
        assert array.flags.writeable
    assert not is_aligned(aligned_empty(10)[1:])
