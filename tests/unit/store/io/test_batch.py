"""What a batch says when operations end, end late, or never end."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from sglang_hcache.store.io.engine import Batch, IOKind, IOOp, IOResult, OpenFile


@pytest.fixture
def ops(tmp_path: Path) -> list[IOOp]:
    file = OpenFile(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600), direct=False)
    return [IOOp(IOKind.READ, 0, file, 4096 * index) for index in range(3)]


def outcome(result: IOResult) -> tuple[int, int | None, bool]:
    return result.done_bytes, result.error and result.error.errno, result.in_flight


def test_results_come_in_the_order_of_the_operations(ops: list[IOOp]) -> None:
    batch = Batch(ops)
    for index in (2, 0, 1):
        assert batch.begin(index)
        batch.end(index, IOResult(index))
    assert batch.wait(0.0) == [IOResult(0), IOResult(1), IOResult(2)]


def test_an_empty_batch_has_ended() -> None:
    assert Batch([]).wait(0.0) == []


def test_wait_returns_when_the_last_operation_ends(ops: list[IOOp]) -> None:
    batch = Batch(ops)
    waiter_results: list[list[IOResult]] = []
    waiter = threading.Thread(target=lambda: waiter_results.append(batch.wait(60.0)))
    waiter.start()
    for index in range(3):
        batch.begin(index)
        batch.end(index, IOResult(1))
    waiter.join(60.0)
    assert waiter_results == [[IOResult(1)] * 3]


def test_what_has_not_ended_is_late_if_it_was_begun_and_cancelled_if_not(ops: list[IOOp]) -> None:
    batch = Batch(ops)
    batch.begin(0)
    batch.end(0, IOResult(5))
    batch.begin(1)
    results = batch.wait(0.01)
    assert [outcome(result) for result in results] == [
        (5, None, False),
        (0, errno.ETIMEDOUT, True),
        (0, errno.ECANCELED, False),
    ]


def test_after_giving_up_nothing_begins(ops: list[IOOp]) -> None:
    batch = Batch(ops)
    batch.wait(0.0)
    assert not any(batch.begin(index) for index in range(3))


def test_a_late_end_is_told_and_changes_no_result(ops: list[IOOp]) -> None:
    late: list[IOOp] = []
    batch = Batch(ops, late.append)
    batch.begin(0)
    batch.begin(2)
    batch.end(2, IOResult(7))
    before = [outcome(result) for result in batch.wait(0.01)]
    assert late == []
    batch.end(0, IOResult(7))
    assert late == [ops[0]]
    assert [outcome(result) for result in batch.wait(0.0)] == before


def test_a_late_end_without_anyone_to_tell(ops: list[IOOp]) -> None:
    batch = Batch(ops[:1])
    batch.begin(0)
    batch.wait(0.0)
    batch.end(0, IOResult(0))


def test_progress_renews_the_patience(ops: list[IOOp], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("sglang_hcache.store.io.engine.time.monotonic", lambda: now[0])
    batch = Batch(ops[:2])
    batch.begin(0)
    batch.begin(1)
    now[0] += 8
    batch.end(0, IOResult(1))
    now[0] += 8
    ender = threading.Timer(0.01, batch.end, (1, IOResult(2)))
    ender.start()
    assert batch.wait(10.0) == [IOResult(1), IOResult(2)]  # 16 s after the start, 8 s after the last end
    ender.join()


def test_a_file_is_open_as_long_as_an_operation_refers_to_it(tmp_path: Path) -> None:
    file = OpenFile(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600), direct=False)
    fd = file.fd
    op = IOOp(IOKind.SYNC, 0, file)
    del file
    os.fstat(fd)
    del op
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_the_size_of_an_operation_is_that_of_its_buffers(ops: list[IOOp]) -> None:
    assert ops[0].size == 0
