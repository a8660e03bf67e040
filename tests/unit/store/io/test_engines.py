"""The contract of every engine: one result an operation, errors as values, short transfers told, bytes as written."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_hcache.store.io.engine import Batch, IOEngine, IOKind, IOOp, IOResult, OpenFile
from sglang_hcache.store.io.memory import aligned_empty, is_aligned
from sglang_hcache.store.io.nixl import NixlEngine, nixl_problem
from sglang_hcache.store.io.posix import PosixEngine, run_op

PATIENCE_S = 60.0
ENGINES: dict[str, Callable[[int, int], IOEngine]] = {"posix": PosixEngine, "nixl": NixlEngine}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[IOEngine]:
    """Three directories, four operations at once in each."""
    if request.param == "nixl" and (problem := nixl_problem()) is not None:
        pytest.skip(problem)
    engine = ENGINES[request.param](3, 4)
    assert engine.name == request.param
    yield engine
    assert engine.close(PATIENCE_S)


@pytest.fixture(params=["buffered", "direct"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> OpenFile:
    return opened(tmp_path / "file", direct=request.param == "direct")


def opened(path: Path, direct: bool = False, flags: int = os.O_RDWR | os.O_CREAT) -> OpenFile:
    try:
        return OpenFile(os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600), direct)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            pytest.skip("no O_DIRECT on the file system of the temporary folder")
        raise


def run(engine: IOEngine, ops: Sequence[IOOp]) -> list[IOResult]:
    batch = Batch(ops)
    engine.submit(batch, range(len(ops)))
    return batch.wait(PATIENCE_S)


def filled(size: int, value: int) -> Any:
    array = aligned_empty(size)
    array[:] = value
    return array


def random_bytes(size: int, seed: int = 0) -> Any:
    array = aligned_empty(size)
    array[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return array


class CountingBatch(Batch):
    """Counts how often an engine begins and ends each operation."""

    def __init__(self, ops: Sequence[IOOp]) -> None:
        super().__init__(ops)
        self.begun = [0] * len(ops)
        self.ended = [0] * len(ops)

    def begin(self, index: int) -> bool:
        self.begun[index] += 1
        return super().begin(index)

    def end(self, index: int, result: IOResult) -> None:
        self.ended[index] += 1
        super().end(index, result)


def test_a_batch_gathers_and_scatters(engine: IOEngine, file: OpenFile) -> None:
    writes = [
        IOOp(IOKind.WRITE, 0, file, 12288 * index, (filled(4096, index), filled(8192, 100 + index)))
        for index in range(24)
    ]
    assert run(engine, writes) == [IOResult(12288)] * 24
    outs = [[aligned_empty(8192), aligned_empty(4096)] for _ in writes]
    reads = [IOOp(IOKind.READ, 0, file, op.offset, tuple(out)) for op, out in zip(writes, outs, strict=True)]
    assert run(engine, reads) == [IOResult(12288)] * 24
    for index, out in enumerate(outs):
        whole = np.concatenate(out)
        assert (whole[:4096] == index).all()
        assert (whole[4096:] == 100 + index).all()


def test_buffers_of_any_size_and_address(engine: IOEngine, tmp_path: Path) -> None:
    file = opened(tmp_path / "file")
    data = random_bytes(10_001)[1:]
    parts = tuple(data[begin:end] for begin, end in [(0, 1), (1, 1), (1, 4097), (4097, 10_000)])
    assert run(engine, [IOOp(IOKind.WRITE, 1, file, 33, parts)]) == [IOResult(10_000)]
    out = np.zeros(10_000, np.uint8)
    assert run(engine, [IOOp(IOKind.READ, 1, file, 33, (out[:7], out[7:]))]) == [IOResult(10_000)]
    assert np.array_equal(out, data)


def test_more_buffers_than_a_system_call_takes(engine: IOEngine, tmp_path: Path) -> None:
    file = opened(tmp_path / "file")
    data = random_bytes(3000)
    parts = tuple(data[at : at + 1] for at in range(3000))
    for kind in (IOKind.WRITE, IOKind.READ):
        ops = [IOOp(kind, 0, file, 0, parts[:500]), IOOp(kind, 0, file, 500, parts[500:])]
        assert run(engine, ops) == [IOResult(500), IOResult(2500)]
    assert os.pread(file.fd, 4000, 0) == data.tobytes()


def test_nothing_to_transfer(engine: IOEngine, file: OpenFile) -> None:
    ops = [IOOp(IOKind.READ, 0, file), IOOp(IOKind.WRITE, 0, file, 0, (aligned_empty(0),))]
    assert run(engine, ops) == [IOResult(0), IOResult(0)]
    assert run(engine, []) == []


def test_the_end_of_a_file_is_a_short_result_not_an_error(engine: IOEngine, file: OpenFile) -> None:
    os.ftruncate(file.fd, 8292)
    buffers = [(aligned_empty(4096), aligned_empty(8192)) for _ in range(4)]
    ops = [IOOp(IOKind.READ, 0, file, 4096 * index, buffer) for index, buffer in enumerate(buffers)]
    assert [(result.done_bytes, result.error) for result in run(engine, ops)] == [
        (8292, None),
        (4196, None),
        (100, None),
        (0, None),
    ]


def test_one_failing_operation_does_not_spoil_its_batch(engine: IOEngine, file: OpenFile) -> None:
    os.ftruncate(file.fd, 3 * 4096)
    assert run(engine, [IOOp(IOKind.WRITE, 0, file, 0, (filled(3 * 4096, 7),))]) == [IOResult(3 * 4096)]
    good = aligned_empty(4096), aligned_empty(8192)
    results = run(
        engine,
        [
            IOOp(IOKind.READ, 0, file, 0, (good[0],)),
            IOOp(IOKind.READ, 0, OpenFile(10**6, direct=False), 0, (aligned_empty(4096),)),
            IOOp(IOKind.READ, 0, file, 4096, (good[1],)),
            IOOp(IOKind.SYNC, 0, file),
            IOOp(IOKind.SYNC, 0, OpenFile(10**6, direct=False)),
        ],
    )
    assert [result.error and result.error.errno for result in results] == [
        None,
        errno.EBADF,
        None,
        None,
        errno.EBADF,
    ]
    assert (np.concatenate(good) == 7).all()
    assert not any(result.in_flight for result in results)


def test_a_full_device_is_enospc(engine: IOEngine) -> None:
    full = opened(Path("/dev/full"), flags=os.O_WRONLY)
    (result,) = run(engine, [IOOp(IOKind.WRITE, 0, full, 0, (filled(4096, 1),))])
    assert result.error is not None
    assert result.error.errno == errno.ENOSPC


def test_every_operation_is_begun_and_ended_once(engine: IOEngine, tmp_path: Path) -> None:
    files = [opened(tmp_path / f"file{stripe}") for stripe in range(3)]
    missing = OpenFile(10**6, direct=False)
    ops: list[IOOp] = []
    for index in range(60):
        file = missing if index % 20 == 7 else files[index % 3]
        ops.append(IOOp(IOKind.WRITE, index % 3, file, 4096 * index, (filled(4096, index),)))
    ops += [IOOp(IOKind.SYNC, stripe, file) for stripe, file in enumerate(files)]
    batch = CountingBatch(ops)
    engine.submit(batch, range(0, len(ops), 2))
    engine.submit(batch, range(1, len(ops), 2))
    failed = [index for index, result in enumerate(batch.wait(PATIENCE_S)) if result.error is not None]
    assert failed == [7, 27, 47]
    assert batch.ended == [1] * len(ops)
    assert all(batch.begun)


def test_a_batch_that_was_given_up_is_not_started(engine: IOEngine, tmp_path: Path) -> None:
    file = opened(tmp_path / "file")
    out = filled(4096, 1)
    os.pwrite(file.fd, b"x" * 4096, 0)
    batch = CountingBatch([IOOp(IOKind.READ, 0, file, 0, (out,))])
    (result,) = batch.wait(0.0)
    assert not result.in_flight
    engine.submit(batch, [0])
    other = aligned_empty(4096)  # behind it in the queue
    assert run(engine, [IOOp(IOKind.READ, 0, file, 0, (other,))] * 4) == [IOResult(4096)] * 4
    assert batch.ended == [0]
    assert (out == 1).all()


def test_threads_may_submit_at_the_same_time(engine: IOEngine, tmp_path: Path) -> None:
    file = opened(tmp_path / "file")
    data = random_bytes(2**20)
    run(engine, [IOOp(IOKind.WRITE, 0, file, 0, (data,))])
    wrong = []

    def read(seed: int) -> None:
        offsets = np.random.default_rng(seed).integers(0, 2**20 - 5000, 30).tolist()
        for _ in range(5):
            outs = [aligned_empty(5000) for _ in offsets]
            ops = [IOOp(IOKind.READ, at % 3, file, at, (out,)) for at, out in zip(offsets, outs, strict=True)]
            if run(engine, ops) != [IOResult(5000)] * 30:
                wrong.append(seed)
            for at, out in zip(offsets, outs, strict=True):
                if not np.array_equal(out, data[at : at + 5000]):
                    wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each example has a file of its own
@given(
    sizes=st.lists(st.lists(st.integers(0, 70_000), max_size=5), min_size=1, max_size=12),
    gap=st.integers(0, 5000),
    seed=st.integers(0, 2**32),
)
def test_what_was_written_is_read(
    engine: IOEngine, tmp_path: Path, sizes: list[list[int]], gap: int, seed: int
) -> None:
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    file = opened(path)
    writes: list[IOOp] = []
    offset = gap
    for number, parts in enumerate(sizes):
        data = random_bytes(sum(parts), seed + number)
        buffers = tuple(np.split(data, np.cumsum(parts)[:-1])) if parts else ()
        writes.append(IOOp(IOKind.WRITE, number % 3, file, offset, buffers))
        offset += sum(parts) + gap
    assert [result.done_bytes for result in run(engine, writes)] == [op.size for op in writes]
    assert run(engine, [IOOp(IOKind.SYNC, 0, file)]) == [IOResult(0)]
    reads = [
        IOOp(IOKind.READ, op.stripe, file, op.offset, (np.zeros(op.size, np.uint8),))
        for op in reversed(writes)
    ]
    assert run(engine, reads) == [IOResult(op.size) for op in reads]
    for write, read in zip(reversed(writes), reads, strict=True):
        assert read.buffers[0].tobytes() == b"".join(part.tobytes() for part in write.buffers)


def test_short_transfers_are_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_write, real_read = os.pwritev, os.preadv

    def at_most_1000(real: Any) -> Any:
        def transfer(fd: int, views: list[memoryview], offset: int) -> int:
            return int(real(fd, [views[0][:1000]], offset))

        return transfer

    monkeypatch.setattr(os, "pwritev", at_most_1000(real_write))
    monkeypatch.setattr(os, "preadv", at_most_1000(real_read))
    file = opened(tmp_path / "file")
    data = random_bytes(10_000)
    assert run_op(IOOp(IOKind.WRITE, 0, file, 16, (data[:3333], data[3333:]))).done_bytes == 10_000
    out = np.zeros(10_000, np.uint8)
    assert run_op(IOOp(IOKind.READ, 0, file, 16, (out[:1], out[1:]))).done_bytes == 10_000
    assert np.array_equal(out, data)


def test_aligned_memory() -> None:
    for size in (0, 1, 4096, 10_000):
        array = aligned_empty(size)
        assert array.size == size
        assert is_aligned(array)
        assert array.flags.writeable
    assert not is_aligned(aligned_empty(10)[1:])
