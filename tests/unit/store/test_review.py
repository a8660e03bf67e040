"""Faults that a review of the store found."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreError, StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, aligned_empty
from sglang_hcache.store.io import engine
from sglang_hcache.store.io.engine import IOKind, IOOp, OpenFile
from sglang_hcache.store.io.posix import PosixEngine, run_op
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.io_faults import HangingEngine
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    match_keys,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import kill, sick, state_of, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (8192, 5000)
MIB = 2**20


def test_files_of_a_segment_that_could_not_be_made_are_counted_and_go_later(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    create, unlink = StoreDirectory.create_segment, StoreDirectory.unlink_segment

    def bad_create(self: StoreDirectory, segment: int, size: int) -> None:
        if self.path.name == "disk1":
            raise OSError(errno.EIO, "broken")
        create(self, segment, size)

    def bad_unlink(self: StoreDirectory, segment: int) -> None:
        if self.path.name == "disk0":
            raise OSError(errno.EPERM, "not permitted")
        unlink(self, segment)

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "create_segment", bad_create)
        patch.setattr(StoreDirectory, "unlink_segment", bad_unlink)
        with pytest.raises(StoreError):
            write_keys(store, make_keys(0, 2), LAYERS)
        assert list(config.dirs[0].glob("*.seg"))
        assert Inside(store).reserved_bytes >= config.reserve_bytes + config.file_bytes
    wait_until(lambda: not list(config.dirs[0].glob("*.seg")))
    wait_until(lambda: Inside(store).reserved_bytes == config.reserve_bytes)


def test_large_files_in_a_directory_that_is_out_count_in_full(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 32 * MIB
    store = open_store(small_config(tmp_path, 2, size=size, segment=8 * MIB))
    for number in range(40):
        write_keys(store, make_keys(8 * number, 8), (32768, 32768))
    store.close()
    acquire = StoreDirectory.acquire

    def sick(self: StoreDirectory) -> None:
        if self.path.name == "disk1":
            raise OSError(errno.EIO, "sick")
        acquire(self)

    monkeypatch.setattr(StoreDirectory, "acquire", sick)
    config = small_config(tmp_path, 2, size=size)  # with smaller segments than those that are there
    store = open_store(config)
    assert Inside(store).reserved_bytes >= physical_bytes(config.dirs)


def test_a_file_that_cannot_be_deleted_does_not_keep_a_directory_out(
    tmp_path: Path, open_store: OpenStore, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(small_config(tmp_path, 2))
    Inside(store).space._next_number = 901
    store.clear()  # lower numbers are of no use
    keys = make_keys(0, 2)
    write_keys(store, keys, LAYERS)
    volume = Inside(store).volumes[1]
    stray = volume.path / "segment-00000900.seg"
    stray.write_bytes(bytes(MIB))
    before = Inside(store).reserved_bytes
    unlink = StoreDirectory.unlink_segment

    def immutable(self: StoreDirectory, segment: int) -> None:
        if segment == 900:
            raise OSError(errno.EPERM, "not permitted")
        unlink(self, segment)

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "unlink_segment", immutable)
        volume.health.take_out("for a test")
        wait_until(lambda: volume.health.writable)
        read_keys(store, keys)
        wait_until(lambda: counters["store.unlink_failures"] >= 1)
        assert Inside(store).reserved_bytes >= before + MIB
    wait_until(lambda: not stray.exists())
    wait_until(lambda: Inside(store).reserved_bytes == before)


def test_a_file_that_cannot_be_deleted_does_not_cost_the_segment_of_its_number(
    tmp_path: Path, open_store: OpenStore, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = {"disk1"}
    config = small_config(tmp_path, 2)
    open_store(config).close()
    sick(names, monkeypatch)
    store = open_store(config)
    keys = make_keys(0, 2)
    write_keys(store, keys, LAYERS)
    (segment,) = Inside(store).catalog.segments()
    assert segment.members == (0,)
    stray = config.dirs[1] / f"segment-{segment.number:08d}.seg"
    stray.write_bytes(bytes(MIB))
    unlink = StoreDirectory.unlink_segment

    def immutable(self: StoreDirectory, segment: int) -> None:
        if self.path == config.dirs[1]:
            raise OSError(errno.EPERM, "not permitted")
        unlink(self, segment)

    monkeypatch.setattr(StoreDirectory, "unlink_segment", immutable)
    names.clear()
    wait_until(lambda: Inside(store).volumes[1].health.writable)
    assert stray.exists()
    Inside(store).volumes[0].health.take_out("for a test")
    wait_until(lambda: Inside(store).volumes[0].health.writable)
    read_keys(store, keys)
    assert counters["store.runs_lost"] == 0


def test_letting_go_of_a_lease_does_not_wait_for_a_close_that_hangs(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 2)
    write_keys(store, keys, LAYERS)
    lease = store.lease(keys)
    store.read_layers(lease, {0: aligned_empty(2 * LAYERS[0])})
    (file,) = lease.slices[0].run.segment._files.values()
    go, fd = threading.Event(), file.fd
    del file
    close = os.close

    def hang(number: int) -> None:
        if number == fd:
            assert go.wait(60), "who lets go waits for it"
        close(number)

    monkeypatch.setattr(engine.os, "close", hang)
    try:
        lease.close()
        store.touch(keys)
        store.lease(keys).close()
    finally:
        go.set()
    wait_until(lambda: not os.path.exists(f"/proc/self/fd/{fd}"))


def test_an_error_holds_neither_files_nor_memory(tmp_path: Path, open_store: OpenStore) -> None:
    file = OpenFile(os.open(os.devnull, os.O_RDONLY), direct=False)
    fd = file.fd
    result = run_op(IOOp(IOKind.WRITE, 0, file, 0, (aligned_empty(8),)))
    assert result.error is not None
    del file
    assert not os.path.exists(f"/proc/self/fd/{fd}")


def test_after_a_kill_the_newest_segment_counts_as_used_last(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path, size=8 * MIB)
    store = open_store(config)
    number = 0
    while Inside(store).floor < 5:
        write_keys(store, make_keys(8 * number, 8), LAYERS)
        number += 1
    Inside(store).keeper.close(5)  # so that nobody saves what the last run's segment is worth
    active = Inside(store).active
    while Inside(store).active is active:
        write_keys(store, make_keys(8 * number, 8), LAYERS)
        number += 1
    floor = Inside(store).floor
    kill(store)
    store = open_store(config)
    assert Inside(store).floor >= floor - 1
    assert store.evict_one()
    assert match_keys(store, make_keys(8 * number - 8, 8)) == 8


def test_recency_is_saved_without_a_read_or_a_write(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    keys = make_keys(0, 2)
    write_keys(store, keys, LAYERS)
    time.sleep(0.3)
    store.touch(keys)
    (segment,) = Inside(store).catalog.segments()
    wait_until(lambda: state_of(config.dirs[0]).segments[segment.number].score == segment.score)


@pytest.mark.usefixtures("no_keeper")
def test_what_was_used_last_is_saved_although_no_score_changes(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    inside, runs = Inside(store), [make_keys(10 * number, 2) for number in range(3)]
    for keys in runs:
        write_keys(store, keys, (60_000,) * 2)
        store.touch(keys)
    assert len(inside.by_use) == 3
    inside.write_down()
    before = state_of(config.dirs[0]).segments
    store.touch(runs[0])
    inside.saved._next_at = 0.0
    inside.write_down()
    after = state_of(config.dirs[0]).segments
    assert after == before
    assert [*after] == inside.by_use != [*before]
    kill(store)
    store = open_store(config)
    assert Inside(store).by_use == [*after]
    assert store.evict_one()
    assert [store.contains(keys[0]) for keys in runs] == [True, False, True]


@pytest.mark.usefixtures("no_keeper")
def test_recency_that_could_not_be_saved_is_saved_later(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 2)
    write_keys(store, keys, LAYERS)
    Inside(store).write_down()
    before = state_of(tmp_path / "disk0")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    Inside(store).saved._next_at = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        store.touch(keys)
        with pytest.raises(StoreIOError):
            Inside(store).write_down()
    assert state_of(tmp_path / "disk0") == before
    assert not (tmp_path / "disk0" / "state.tmp").exists()
    Inside(store).write_down()
    (segment,) = Inside(store).catalog.segments()
    assert state_of(tmp_path / "disk0").segments[segment.number].score == segment.score


def test_a_directory_that_was_deleted_is_used_again_however_late_the_keeper_is(
    tmp_path: Path, open_store: OpenStore
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), LAYERS)
    Inside(store).keeper.close(5)
    shutil.rmtree(config.dirs[0])
    Inside(store).volumes[0].check_presence()
    time.sleep(2 * config.retry_s)
    Inside(store).keeper.round()
    write_keys(store, make_keys(10, 2), LAYERS)
    store.close()
    read_keys(open_store(config), make_keys(10, 2))


def test_an_interrupted_write_keeps_the_room_it_may_still_write_to(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = HangingEngine(PosixEngine(1, 2), lambda op: False)
    store = open_store(small_config(tmp_path), hanging)
    write_keys(store, make_keys(0, 1), LAYERS)
    hanging.hangs = lambda op: op.kind is IOKind.WRITE

    def interrupt(self: engine.Batch, patience_s: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.Batch, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_keys(store, make_keys(10, 2), LAYERS)
    hanging.hangs = lambda op: False
    thread = threading.Thread(target=write_keys, args=(store, make_keys(20, 2), LAYERS))
    thread.start()
    thread.join()
    hanging.let_go()
    read_keys(store, make_keys(20, 2))


def test_two_changes_of_condition_at_once_leave_the_mask_right(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path, 2))
    Inside(store).keeper.close(5)  # it would take the directory in again
    looked, go = threading.Event(), threading.Event()
    set_out = Inside(store).catalog.set_out

    def slow(mask: int) -> None:
        if not looked.is_set():
            looked.set()
            go.wait(1)
        set_out(mask)

    Inside(store).catalog.set_out = slow  # type: ignore[method-assign]
    first = threading.Thread(target=store._on_health)
    first.start()
    assert looked.wait(60)
    second = threading.Thread(target=Inside(store).volumes[1].health.take_out, args=("for a test",))
    second.start()
    second.join(0.2)
    go.set()
    first.join()
    second.join()
    assert Inside(store).catalog._out_mask == 2


def test_a_forked_child_does_not_keep_the_locks(tmp_path: Path) -> None:
    directory = StoreDirectory(tmp_path / "disk")
    directory.acquire()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        directory.lock.release()  # as the end of this process would
        wait_until(lambda: directory.lock.holder() is None)
        other = StoreDirectory(tmp_path / "disk")
        other.acquire()
        other.lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_statistics_of_a_closed_store(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path))
    write_keys(store, make_keys(0, 1), [512])
    before = store.stats()
    store.close()
    after = store.stats()
    assert (after.chunks, after.segments) == (before.chunks, before.segments) == (1, 1)
    assert after.used_bytes > 0


@pytest.mark.parametrize("restart", [False, True])
def test_directories_that_were_used_one_without_the_other_agree_again(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    names = {"disk1"}
    sick(names, monkeypatch)
    Inside(store).volumes[1].health.take_out("for a test")
    on_first = make_keys(0, 2)
    write_keys(store, on_first, LAYERS)
    store.close()
    names.clear()
    names.add("disk0")
    store = open_store(config)
    store.clear()
    on_second = make_keys(10, 2)
    write_keys(store, on_second, LAYERS)
    store.close()
    names.clear()
    names.add("disk1")
    store = open_store(config)
    assert match_keys(store, on_first) == 2, "disk0 does not know that it was cleared"
    later = make_keys(20, 2)
    write_keys(store, later, LAYERS)
    if restart:
        store.close()
        names.clear()
        store = open_store(config)
    else:
        names.clear()
        wait_until(lambda: Inside(store).volumes[1].health.writable)
    assert match_keys(store, on_first) == 0
    write_keys(store, make_keys(30, 2), LAYERS)
    store.close()
    blocks = [StoreDirectory(path).read_superblock() for path in config.dirs]
    assert len({block.identity for block in blocks if block is not None}) == 1
    store = open_store(config)
    read_keys(store, make_keys(30, 2))
    assert match_keys(store, on_first) == 0


def test_a_clear_voids_what_was_stored_by_a_start_without_that_directory(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both starts go on from the same number: what the one wrote must not look newer than the clearing of the other."""
    config = small_config(tmp_path, 2)
    open_store(config).close()
    names = {"disk1"}
    sick(names, monkeypatch)
    store = open_store(config)
    on_first = make_keys(0, 2)
    write_keys(store, on_first, LAYERS)
    store.close()
    names.clear()
    names.add("disk0")
    store = open_store(config)
    store.clear()
    store.close()
    names.clear()
    names.add("disk1")
    store = open_store(config)
    names.clear()
    wait_until(lambda: Inside(store).volumes[1].health.writable)
    wait_until(lambda: match_keys(store, on_first) == 0)
    store.close()
    store = open_store(config)
    assert match_keys(store, on_first) == 0
