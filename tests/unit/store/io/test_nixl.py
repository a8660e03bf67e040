"""What only the NIXL engine does: transfers of several operations, a poller, ways out when NIXL fails."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.store.io import nixl, rings
from sglang_hcache.store.io.engine import Batch, IOKind, IOOp, IOResult, OpenFile
from sglang_hcache.store.io.memory import aligned_empty
from sglang_hcache.store.io.nixl import NixlEngine, nixl_problem

PATIENCE_S = 60.0


@pytest.fixture
def make_engine() -> Iterator[Callable[..., NixlEngine]]:
    if (problem := nixl_problem()) is not None:
        pytest.skip(problem)
    made: list[NixlEngine] = []

    def make(num_stripes: int = 1, depth: int = 4, **options: Any) -> NixlEngine:
        made.append(NixlEngine(num_stripes, depth, **options))
        return made[-1]

    yield make
    closed = [engine.close(PATIENCE_S) for engine in made]
    assert all(closed)


def opened(path: Path, content: bytes = b"") -> OpenFile:
    path.write_bytes(content)
    return OpenFile(os.open(path, os.O_RDWR), direct=False)


def run(engine: NixlEngine, ops: list[IOOp]) -> list[IOResult]:
    batch = Batch(ops)
    engine.submit(batch, range(len(ops)))
    return batch.wait(PATIENCE_S)


def read(file: OpenFile, size: int, offset: int = 0, stripe: int = 0) -> IOOp:
    return IOOp(IOKind.READ, stripe, file, offset, (aligned_empty(size),))


class WatchedBatch(Batch):
    """Knows when an engine begins its first operation."""

    def __init__(self, ops: list[IOOp], on_late: Callable[[IOOp], None] | None = None) -> None:
        super().__init__(ops, on_late)
        self.under_way = threading.Event()

    def begin(self, index: int) -> bool:
        begun = super().begin(index)
        self.under_way.set()
        return begun


class HungFile:
    """A file whose reads do not end: a pipe without data, which io_uring reads like any other file."""

    def __init__(self) -> None:
        fd, self._other_end = os.pipe()
        self.file = OpenFile(fd, direct=False)

    def answer(self, data: bytes) -> None:
        os.write(self._other_end, data)

    def close(self) -> None:
        os.close(self._other_end)


@pytest.fixture
def hung() -> Iterator[HungFile]:
    hung = HungFile()
    yield hung
    hung.close()


@pytest.mark.parametrize("depth", [1, 2, 7, 64])
def test_more_operations_than_run_at_once(
    make_engine: Callable[..., NixlEngine], tmp_path: Path, depth: int
) -> None:
    file = opened(tmp_path / "file", bytes(range(200)))
    ops = [read(file, 1, offset) for offset in range(200)]
    assert run(make_engine(depth=depth), ops) == [IOResult(1)] * 200
    assert [int(op.buffers[0][0]) for op in ops] == list(range(200))


def test_a_transfer_of_more_extents_than_nixl_submits_in_one_go(
    make_engine: Callable[..., NixlEngine], tmp_path: Path
) -> None:
    file = opened(tmp_path / "file", bytes(range(256)) * 4)
    buffers = tuple(aligned_empty(1) for _ in range(1000))
    assert run(make_engine(), [IOOp(IOKind.READ, 0, file, 0, buffers)] * 4) == [IOResult(1000)] * 4
    assert [int(buffer[0]) for buffer in buffers] == [index % 256 for index in range(1000)]


def test_another_file_may_get_the_number_of_a_closed_one(
    make_engine: Callable[..., NixlEngine], tmp_path: Path
) -> None:
    engine = make_engine()
    first = opened(tmp_path / "first", b"1" * 4096)
    op = read(first, 4096)
    assert run(engine, [op]) == [IOResult(4096)]
    assert op.buffers[0].tobytes() == b"1" * 4096
    second = opened(tmp_path / "second", b"2" * 4096)
    os.dup2(second.fd, first.fd)
    op = read(first, 4096)
    assert run(engine, [op]) == [IOResult(4096)]
    assert op.buffers[0].tobytes() == b"2" * 4096


def test_a_directory_that_hangs_does_not_hold_up_another(
    make_engine: Callable[..., NixlEngine], tmp_path: Path, hung: HungFile
) -> None:
    engine = make_engine(num_stripes=2)
    waiting = Batch([read(hung.file, 4096)])
    engine.submit(waiting, [0])
    file = opened(tmp_path / "file", b"x" * 4096)
    assert run(engine, [read(file, 4096, stripe=1)] * 10) == [IOResult(4096)] * 10
    assert run(engine, [IOOp(IOKind.SYNC, 1, file)]) == [IOResult(0)]
    hung.answer(b"y" * 4096)
    assert waiting.wait(PATIENCE_S) == [IOResult(4096)]


def test_what_hangs_is_given_up_and_ends_late(
    make_engine: Callable[..., NixlEngine], tmp_path: Path, hung: HungFile
) -> None:
    engine = make_engine(depth=1)
    late = threading.Event()
    ended: list[IOOp] = []

    def on_late(op: IOOp) -> None:
        ended.append(op)
        late.set()

    batch = WatchedBatch([read(hung.file, 4096), read(hung.file, 4096)], on_late)
    engine.submit(batch, [0, 1])
    assert batch.under_way.wait(PATIENCE_S)
    results = batch.wait(0.0)
    assert [result.error and result.error.errno for result in results] == [errno.ETIMEDOUT, errno.ECANCELED]
    assert [result.in_flight for result in results] == [True, False]
    assert not engine.close(0.01)
    assert not ended
    hung.answer(b"y" * 4096)
    assert late.wait(PATIENCE_S)
    assert ended == [batch.ops[0]]


def test_a_transfer_fails_when_all_of_it_has_ended(
    make_engine: Callable[..., NixlEngine], hung: HungFile
) -> None:
    """NIXL cancels what still runs; the other operation is done again, by a system call that pipes refuse."""
    batch = Batch([read(hung.file, 4096), read(OpenFile(10**6, direct=False), 4096)])
    make_engine(depth=8).submit(batch, [0, 1])
    errors = [result.error and result.error.errno for result in batch.wait(PATIENCE_S)]
    assert errors == [errno.ESPIPE, errno.EBADF]


def test_a_late_failure_is_not_done_again(make_engine: Callable[..., NixlEngine], tmp_path: Path) -> None:
    late = threading.Event()
    file = opened(tmp_path / "file", b"x" * 100)
    batch = Batch([read(file, 4096)], lambda op: late.set())
    batch.begin(0)
    batch.wait(0.0)
    make_engine()._stripes[0]._help(batch, [0], begun=True)
    assert late.wait(PATIENCE_S)
    assert batch.ops[0].buffers[0].tobytes() == bytes(4096)


def test_without_its_ring_the_engine_polls(
    make_engine: Callable[..., NixlEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    hung: HungFile,
) -> None:
    monkeypatch.setattr(nixl, "ring_fds", set)
    engine = make_engine()
    waiting = Batch([read(hung.file, 1)])
    engine.submit(waiting, [0])
    file = opened(tmp_path / "file", b"x" * 4096)
    assert run(engine, [read(file, 4096)] * 10) == [IOResult(4096)] * 10
    hung.answer(b"y")
    assert waiting.wait(PATIENCE_S) == [IOResult(1)]


@pytest.mark.parametrize("step", ["prepare", "post"])
def test_what_nixl_refuses_is_done_with_system_calls(
    make_engine: Callable[..., NixlEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    step: str,
) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(nixl._Agent, step, refuses)
    file = opened(tmp_path / "file", b"x" * 100)
    results = run(make_engine(), [read(file, 50, offset) for offset in range(0, 200, 25)])
    assert [result.done_bytes for result in results] == [50, 50, 50, 25, 0, 0, 0, 0]


def test_after_closing_operations_are_refused(make_engine: Callable[..., NixlEngine], tmp_path: Path) -> None:
    engine = make_engine()
    assert engine.close(PATIENCE_S)
    file = opened(tmp_path / "file", b"x" * 100)
    results = run(engine, [read(file, 100), IOOp(IOKind.SYNC, 0, file)])
    assert [result.error and result.error.errno for result in results] == [errno.ESHUTDOWN] * 2


def test_the_thread_survives_what_a_batch_raises(
    make_engine: Callable[..., NixlEngine],
    tmp_path: Path,
    hung: HungFile,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(op: IOOp) -> None:
        raise RuntimeError("on_late")

    errors: list[None] = []
    engine = make_engine(on_error=lambda: errors.append(None))
    batch = WatchedBatch([read(hung.file, 1)], fails)
    engine.submit(batch, [0])
    assert batch.under_way.wait(PATIENCE_S)
    batch.wait(0.0)
    hung.answer(b"y")
    file = opened(tmp_path / "file", b"x" * 100)
    while "stumbled" not in caplog.text:
        assert run(engine, [read(file, 100)]) == [IOResult(100)]
    assert run(engine, [read(file, 100)]) == [IOResult(100)]
    assert errors


def test_it_says_nothing_on_stdout_and_stderr(
    make_engine: Callable[..., NixlEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(make_engine(), [read(opened(tmp_path / "file", b"x" * 100), 100)])
    assert capfd.readouterr() == ("", "")


def test_a_process_ends_while_a_read_hangs() -> None:
    if (problem := nixl_problem()) is not None:
        pytest.skip(problem)
    code = """
import os, time
from sglang_hcache.store.io.engine import Batch, IOKind, IOOp, OpenFile
from sglang_hcache.store.io.memory import aligned_empty
from sglang_hcache.store.io.nixl import NixlEngine
batch = Batch([IOOp(IOKind.READ, 0, OpenFile(os.pipe()[0], False), 0, (aligned_empty(4096),))])
engine = NixlEngine(1, 4)
engine.submit(batch, [0])
while not batch._begun[0]:
    time.sleep(0.001)
assert batch.wait(0.05)[0].in_flight
assert not engine.close(0.01)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")


def test_not_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert nixl_problem() == "NIXL is not installed (pip install '/path/to/sglang-hcache[nixl]')"
    with pytest.raises(ConfigError, match="--hcache-io-engine nixl: NIXL is not installed"):
        NixlEngine(1, 4)


def test_a_broken_installation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("libsomething.so: cannot open shared object file")

    monkeypatch.setattr(nixl, "_bindings", fails)
    assert nixl_problem() == "NIXL cannot be loaded: libsomething.so: cannot open shared object file"


def test_old_releases_are_refused(
    make_engine: Callable[..., NixlEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.1")
    assert nixl_problem() == "NIXL 1.0.1 is too old, 1.5 or newer is needed"


def test_a_kernel_without_io_uring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a container's seccomp profile, by giving the kernel no room for a descriptor."""
    if (problem := rings.ring_problem()) is not None:
        pytest.skip(problem)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        problem = rings.ring_problem()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert problem is not None
    assert problem.startswith("io_uring is not allowed here (Too many open files)")


def test_depth_must_be_positive(make_engine: Callable[..., NixlEngine]) -> None:
    with pytest.raises(ValueError, match="depth"):
        make_engine(depth=0)
