"""Directories that hang, fail, fill up, vanish and come back."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from sglang_hcache.core.errors import (
    StoreError,
    StoreIOError,
    StoreLockedError,
    StoreTimeoutError,
    TierMissError,
)
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, aligned_empty
from sglang_hcache.store import store as store_module
from sglang_hcache.store.io import probing
from sglang_hcache.store.io.engine import Batch, IOKind, IOOp, IOResult
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.keeper import Keeper
from sglang_hcache.store.saved import SavedState
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.volumes import transfers
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.health import Condition, Health
from sglang_hcache.store.volumes.volume import Volume
from sglang_hcache.testing.io_faults import FaultEngine, HangingEngine, always
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import conditions, is_healthy, kill, open_when_unlocked, sick, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (8192, 4096, 8192)
UNALIGNED = (5000, 5000, 5000)
OLD, NEW = make_keys(0, 4), make_keys(10, 4)


def keep_out(volume: Volume) -> None:
    """Out, and not tried again."""
    volume.health.take_out("the test says so")
    volume.health._retry_at = float("inf")


# -- the keeper --------------------------------------------------------------------------------------


def test_a_call_begins_one_round_of_the_keeper() -> None:
    rounds: list[None] = []
    nothing: Any = MagicMock()
    keeper = Keeper((), nothing, nothing, Counters(), lambda: rounds.append(None), 600.0)
    keeper.start()
    keeper.wake()
    wait_until(lambda: bool(rounds))
    time.sleep(0.05)
    assert len(rounds) == 1
    assert keeper.close(10)


def test_what_nobody_foresaw_in_the_upkeep_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counters, nothing = Counters(), MagicMock()
    nothing.tend.side_effect = ZeroDivisionError
    keeper = Keeper((), nothing, nothing, counters, lambda: None, 600.0)
    for _ in range(3):
        keeper.round()
    assert counters.snapshot() == {"store.errors": 3, "store.upkeep_failures": 3}
    assert caplog.text.count("ZeroDivisionError") == 1


# -- the breaker -------------------------------------------------------------------------------------


def health(path: Path = Path("disk")) -> Health:
    return Health(path, Counters(), 0.0)


def test_three_failures_in_a_row_take_a_directory_out_two_do_not() -> None:
    breaker = health()
    for _ in range(10):
        for writing in (True, True, False, False):
            breaker.failed(OSError(errno.EIO, "I/O error"), writing=writing)
        breaker.succeeded(writing=True)
        breaker.succeeded(writing=False)
    assert breaker.condition is Condition.HEALTHY
    for _ in range(3):
        breaker.failed(OSError(errno.EIO, "I/O error"), writing=True)
        breaker.succeeded(writing=False)
    assert breaker.condition is Condition.READ_ONLY, "what can be read is served"
    for _ in range(3):
        breaker.failed(OSError(errno.EIO, "I/O error"), writing=False)
    assert breaker.condition is Condition.OUT
    assert breaker.reason == "I/O error"


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.ENODEV, errno.ESTALE])
def test_a_device_that_is_gone_is_out_at_once(number: int) -> None:
    breaker = health()
    breaker.failed(OSError(number, "gone"), writing=False)
    assert not breaker.readable


@pytest.mark.parametrize(
    ("number", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, False)]
)
def test_a_device_that_takes_no_writes_still_serves(number: int, is_full: bool) -> None:
    breaker = health()
    breaker.failed(OSError(number, "no"), writing=True)
    assert (breaker.condition, breaker.readable, breaker.writable) == (Condition.READ_ONLY, True, False)
    assert breaker.can_delete == is_full
    breaker.take_out("and now it fails")
    assert not breaker.readable


def test_it_is_not_probed_while_something_hangs() -> None:
    breaker = health()
    breaker.hangs()
    breaker.take_out("hangs")
    assert not breaker.is_due()
    breaker.returned()
    assert breaker.is_due()


def test_the_back_off_doubles_up_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_hcache.store.volumes.health.time", SimpleNamespace(monotonic=lambda: 100.0))
    breaker = Health(Path("disk"), Counters(), 1.0)
    breaker.take_out("x")
    waits = []
    for _ in range(8):
        waits.append(breaker._retry_at - 100)
        breaker.still_sick("x")
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(
    ("method", "change"), [("create_segment", Segment.create), ("trim_segment", Segment.trim)]
)
def test_files_that_cannot_be_made_or_cut_are_failed_writes(
    tmp_path: Path, method: str, change: Callable[[Segment], None]
) -> None:
    """What such a directory has is served on; as failed reads they would take it out."""
    directory: Any = MagicMock()
    directory.segment_bytes.return_value = 4096
    getattr(directory, method).side_effect = OSError(errno.EIO, "I/O error")
    volume = Volume(directory, health(tmp_path), 60.0)
    for number in range(3):
        with pytest.raises(StoreIOError):
            change(Segment(number, [volume], (0,), 4096))
    assert volume.health.condition is Condition.READ_ONLY
    assert volume.close(60.0)


def test_each_directory_has_a_thread_that_is_named_after_it(tmp_path: Path) -> None:
    volume = Volume(StoreDirectory(tmp_path), health(tmp_path), 60.0)
    assert volume.attempt(lambda: threading.current_thread().name) == f"hcache-dir {tmp_path}"
    assert volume.close(60.0)


# -- hanging -----------------------------------------------------------------------------------------


def hang(kind: IOKind, stripe: int) -> Callable[[IOOp], bool]:
    return lambda op: op.kind is kind and op.stripe == stripe


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> HangingEngine:
    """What hangs is given up as soon as it is all that is left of its batch. Nothing else is, however slow the disk."""
    engine = HangingEngine(PosixEngine(2, 2), lambda op: False)
    wait = Batch.wait

    def give_up(batch: Batch, patience_s: float) -> list[IOResult]:
        held = sum(each is batch for each, _ in engine._held)
        wait_until(lambda: not held or batch._left <= held)
        return wait(batch, 0.0 if held else patience_s)

    monkeypatch.setattr(Batch, "wait", give_up)
    return engine


def test_a_hung_read_is_given_up_and_the_late_bytes_go_where_nobody_looks(
    tmp_path: Path, open_store: OpenStore, hanging: HangingEngine
) -> None:
    store = open_store(small_config(tmp_path, 2), hanging)
    write_keys(store, OLD, LAYERS)
    hanging.hangs = hang(IOKind.READ, 1)
    stripe1 = next(layer for layer in range(3) if Inside(store).run_of(OLD[0]).place.shape.stripe(layer) == 1)
    out = aligned_empty(4 * LAYERS[stripe1])
    out[:] = 0xEE
    with store.lease(OLD) as lease, pytest.raises(StoreTimeoutError):
        store.read_layers(lease, {stripe1: out})
    assert conditions(store) == ["healthy", "out"]
    assert match_keys(store, OLD) == 0
    write_keys(store, NEW, LAYERS)  # striped over what is left
    read_keys(store, NEW)
    assert (out == 0xEE).all()
    store.clear()  # the file goes; the read that hangs keeps it
    hanging.let_go()
    assert not (out == 0xEE).all(), "the late read arrives in the memory it was given, and nowhere else"
    wait_until(lambda: is_healthy(store))
    write_keys(store, OLD, LAYERS)
    read_keys(store, OLD)


def test_chunks_whose_reads_hang_again_and_again_are_not_tried_for_ever(
    tmp_path: Path, open_store: OpenStore, hanging: HangingEngine
) -> None:
    """A drive may try a bad sector for longer than anybody waits. Each time the whole directory is out."""
    store = open_store(small_config(tmp_path, 1), hanging)
    write_keys(store, OLD, LAYERS)
    write_keys(store, NEW, LAYERS)
    hanging.hangs = hang(IOKind.READ, 0)
    with pytest.raises(StoreTimeoutError):
        read_keys(store, OLD)
    hanging.let_go()
    wait_until(lambda: is_healthy(store))
    assert match_keys(store, OLD) == 0
    read_keys(store, NEW)
    write_keys(store, OLD, LAYERS)  # elsewhere
    read_keys(store, OLD)


def test_chunks_are_not_to_blame_for_another_call_that_hangs(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path, 1))
    write_keys(store, OLD, LAYERS)
    volume = Inside(store).volumes[0]
    for _ in range(3):
        go_on, patience_s = threading.Event(), volume.patience_s
        volume._caller.post(lambda go_on=go_on: go_on.wait(120))
        volume.patience_s = 0.2
        with pytest.raises(StoreTimeoutError, match="earlier call"):
            read_keys(store, OLD)
        volume.patience_s = patience_s
        go_on.set()
        wait_until(lambda: is_healthy(store))
    read_keys(store, OLD)


def test_a_slow_disk_has_more_time_for_what_is_large(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: dict[IOKind, float] = {}
    wait = Batch.wait

    def note(batch: Batch, patience_s: float) -> list[IOResult]:
        for op in batch.ops:
            patience[op.kind] = max(patience.get(op.kind, 0.0), patience_s)
        return wait(batch, patience_s)

    monkeypatch.setattr(transfers, "SLOWEST_BYTES_PER_S", 500)
    monkeypatch.setattr(Batch, "wait", note)
    config = small_config(tmp_path, 1)
    store = open_store(config)
    write_keys(store, NEW, LAYERS)
    read_keys(store, NEW)
    assert patience[IOKind.READ] == config.io_timeout_s
    for kind in (IOKind.WRITE, IOKind.SYNC):
        assert patience[kind] >= config.io_timeout_s + 4 * sum(LAYERS) / 500


def test_a_hung_write_never_lands_on_a_later_run(
    tmp_path: Path, open_store: OpenStore, hanging: HangingEngine
) -> None:
    store = open_store(small_config(tmp_path, 2), hanging)
    write_keys(store, OLD, LAYERS)
    hanging.hangs = hang(IOKind.WRITE, 0)
    with pytest.raises(StoreTimeoutError):
        write_keys(store, NEW, LAYERS)
    assert match_keys(store, NEW) == 0
    assert conditions(store)[0] == "out"
    write_keys(store, make_keys(20, 4), LAYERS)
    hanging.let_go()
    wait_until(lambda: is_healthy(store))
    write_keys(store, make_keys(30, 4), LAYERS)
    read_keys(store, (*OLD, *make_keys(20, 4), *make_keys(30, 4)))
    assert store.stats().totals.get("corrupt_extents", 0) == 0


def _writes(store: DiskStore, keys: tuple[bytes, ...]) -> bool:
    try:
        write_keys(store, keys, LAYERS)
    except StoreError:
        return False
    return True


def test_a_file_system_that_hangs_holds_up_nobody_for_longer_than_the_deadline(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    hang_on = threading.Event()
    real, volume = StoreDirectory.free_bytes, Inside(store).volumes[1]
    patience_s = volume.patience_s

    def free_bytes(self: StoreDirectory) -> int:
        if self.path == config.dirs[1]:
            hang_on.wait(120)
        return real(self)

    monkeypatch.setattr(StoreDirectory, "free_bytes", free_bytes)
    volume.patience_s = 0.2
    wait_until(lambda: conditions(store)[1] == "out")
    began = time.monotonic()
    write_keys(store, NEW, LAYERS)
    read_keys(store, NEW)
    assert time.monotonic() - began < 60, "they waited until the file system answered"
    volume.patience_s = patience_s
    hang_on.set()
    wait_until(lambda: is_healthy(store))
    read_keys(store, (*OLD, *NEW))


def test_closing_with_a_read_that_hangs(
    tmp_path: Path, open_store: OpenStore, hanging: HangingEngine
) -> None:
    store = open_store(small_config(tmp_path, 1), hanging)
    write_keys(store, OLD, LAYERS)
    hanging.hangs = hang(IOKind.READ, 0)
    with store.lease(OLD) as lease, pytest.raises(StoreTimeoutError):
        store.read_layers(lease, {0: aligned_empty(4 * LAYERS[0])})
    store.close()
    hanging.let_go()


def test_what_hangs_while_the_store_is_closed_leaves_no_lock_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks one closes its store because another one cannot open its own, and all try again."""
    monkeypatch.setattr(store_module, "_CLOSE_S", 0.1)
    config, hangs, go_on = small_config(tmp_path), threading.Event(), threading.Event()
    store = DiskStore.open(config, Counters())
    write_keys(store, OLD, LAYERS)
    is_present = StoreDirectory.is_present

    def hang(self: StoreDirectory) -> bool:
        hangs.set()
        go_on.wait(60)
        return is_present(self)

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "is_present", hang)
        assert hangs.wait(60)
        store.close()
        with pytest.raises(StoreLockedError):
            DiskStore.open(config, Counters())
        go_on.set()
    store = open_when_unlocked(config)
    read_keys(store, OLD)
    store.close()


# -- coming and going --------------------------------------------------------------------------------


@pytest.mark.parametrize("stripe", [0, 1])
def test_a_deleted_directory_is_noticed_and_made_anew(
    tmp_path: Path, open_store: OpenStore, counters: Counters, stripe: int
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    # A state may be written there now.
    shutil.rmtree(config.dirs[stripe].rename(tmp_path / "gone"), ignore_errors=True)
    wait_until(lambda: counters["store.directory_recoveries"] == 1)
    assert match_keys(store, OLD) == 0, "half of it is gone"
    wait_until(lambda: _writes(store, NEW))
    read_keys(store, NEW)
    assert list(config.dirs[stripe].glob("segment-*")), "the new directory is used"
    assert counters["store.corrupt_extents"] == 0
    store.close()
    store = open_store(config)
    read_keys(store, NEW)


@pytest.mark.parametrize("stripe", [0, 1])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_without_one_directory_storing_goes_on(
    tmp_path: Path,
    open_store: OpenStore,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    stripe: int,
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    monkeypatch.setattr(Health, "is_due", lambda self: False)  # it would be taken in again
    for _ in range(3):
        Inside(store).volumes[stripe].health.failed(OSError(number, "no"), writing=number != errno.EIO)
    write_keys(store, NEW, LAYERS)
    assert conditions(store)[stripe] == ("out" if number == errno.EIO else "read-only")
    assert conditions(store)[1 - stripe] == "healthy"
    store.touch(OLD)
    store.close()
    monkeypatch.undo()
    store = open_store(config)
    read_keys(store, (*OLD, *NEW))
    assert counters["store.runs_lost"] == 0
    assert Inside(store).by_use[-1] == Inside(store).run_of(OLD[0]).segment.number


def test_what_the_directories_agree_on_is_written_down_as_soon_as_that_works_and_no_more(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    written: list[Path] = []
    write = StoreDirectory.write_superblock

    def fail_once(directory: StoreDirectory, block: Any) -> None:
        written.append(directory.path)
        if len(written) == 1:
            raise OSError(errno.EIO, "I/O error")
        write(directory, block)

    def noted() -> int:
        block = StoreDirectory(config.dirs[0]).read_superblock()
        return 0 if block is None else block.identity.epoch

    monkeypatch.setattr(StoreDirectory, "write_superblock", fail_once)
    saved = Inside(store).saved
    saved.outgrow(replace(saved.identity, epoch=saved.identity.epoch + 5))
    wait_until(lambda: noted() == saved.identity.epoch)
    saved.settle()  # as each round of the keeper does
    assert written == [config.dirs[0]] * 2


def test_a_directory_that_is_missing_at_the_start_is_left_out_and_taken_in_later(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    store.close()
    real = StoreDirectory.acquire

    def gone(self: StoreDirectory) -> None:
        if self.path == config.dirs[1]:
            raise OSError(errno.ENODEV, "No such device")
        real(self)

    monkeypatch.setattr(StoreDirectory, "acquire", gone)
    store = open_store(config)
    assert conditions(store) == ["healthy", "out"]
    assert match_keys(store, OLD) == 0
    write_keys(store, NEW, LAYERS)
    monkeypatch.undo()
    wait_until(lambda: is_healthy(store))
    read_keys(store, (*OLD, *NEW))
    monkeypatch.setattr(StoreDirectory, "acquire", gone)
    store.close()
    store = open_store(config)
    (config.dirs[1] / "superblock.json").unlink()
    before = sorted(config.dirs[1].glob("segment-*"))
    monkeypatch.undo()
    time.sleep(10 * config.retry_s)
    assert conditions(store) == ["healthy", "out"], "nobody knows whose segments these are"
    assert sorted(config.dirs[1].glob("segment-*")) == before


@pytest.mark.parametrize("came_back_without", [False, True])
def test_o_direct_is_tried_anew_where_a_directory_comes_back(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, came_back_without: bool
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    if not Inside(store).volumes[1].directory.direct:
        pytest.skip("no O_DIRECT here")
    if came_back_without:
        with store.lease(OLD) as lease:
            store.read_layers(lease, {0: aligned_empty(4 * LAYERS[0])})
            monkeypatch.setattr(probing, "_comes_back", _without_direct)
            Inside(store).volumes[1].health.take_out("the test says so")
            wait_until(lambda: is_healthy(store))
            read_keys(store, OLD)
    else:
        store.close()
        with monkeypatch.context() as patch:
            sick({"disk1"}, patch)
            store = open_store(config)
        wait_until(lambda: is_healthy(store))
    assert Inside(store).volumes[1].directory.direct is not came_back_without
    write_keys(store, NEW, UNALIGNED)
    for keys in (OLD, NEW):
        read_keys(store, keys)
    run = Inside(store).run_of(NEW[0])
    with store.lease(NEW):
        assert [run.segment.file(stripe).direct for stripe in (0, 1)] == [True, not came_back_without]


def _without_direct(_folder: Path, direct: bool) -> bool:
    if direct:
        raise OSError(errno.EINVAL, "Invalid argument")
    return True


def test_a_directory_that_goes_read_only_serves_on(tmp_path: Path, open_store: OpenStore) -> None:
    engine = FaultEngine(PosixEngine(2, 2), lambda op, number: None)
    store = open_store(small_config(tmp_path, 2), engine)
    write_keys(store, OLD, LAYERS)
    engine.decide = always(IOKind.WRITE, errno.EROFS, stripe=1)
    with pytest.raises(StoreIOError, match="Read-only"):
        write_keys(store, NEW, LAYERS)
    read_keys(store, OLD)


def test_a_file_system_that_is_mounted_read_only_serves_on(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    real = os.open

    def open_(path: Path, flags: int, *more: int, dir_fd: int | None = None) -> int:
        folder = Path(path).parent if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
        if flags & (os.O_RDWR | os.O_CREAT) and folder == config.dirs[1]:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *more, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_)
    wait_until(lambda: not _writes(store, NEW) or conditions(store)[1] == "read-only")
    for _ in range(4):
        read_keys(store, OLD)
    wait_until(lambda: _writes(store, NEW))  # elsewhere
    assert conditions(store) == ["healthy", "read-only"]
    monkeypatch.undo()
    wait_until(lambda: is_healthy(store))
    write_keys(store, make_keys(20, 4), LAYERS)
    read_keys(store, (*OLD, *NEW, *make_keys(20, 4)))
    assert len({*store.stats().totals} & {"corrupt_extents", "runs_lost"}) == 0


@pytest.mark.parametrize(
    ("kind", "condition"),
    [(IOKind.WRITE, "read-only"), (IOKind.SYNC, "read-only"), (IOKind.READ, "out")],
)
def test_files_that_can_be_listed_and_opened_say_nothing_about_their_data(
    tmp_path: Path, open_store: OpenStore, kind: IOKind, condition: str
) -> None:
    """One failure a run: before each there are calls that go well."""
    engine = FaultEngine(PosixEngine(2, 2), lambda op, number: None)
    store = open_store(small_config(tmp_path, 2), engine)
    runs, others = ([make_keys(base + 10 * number, 4) for number in range(3)] for base in (0, 100))
    for keys in runs:
        write_keys(store, keys, LAYERS[:2])
    engine.decide = always(kind, stripe=1)
    for number, keys in enumerate(runs):
        assert conditions(store)[1] == "healthy"
        with pytest.raises(StoreIOError):
            read_keys(store, keys) if kind is IOKind.READ else write_keys(store, others[number], LAYERS[:2])
    assert conditions(store)[1] == condition
    assert conditions(store)[0] == "healthy"


def test_what_was_cleared_while_a_directory_was_out_stays_cleared(
    tmp_path: Path, open_store: OpenStore
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    for volume in Inside(store).volumes[:1]:
        keep_out(volume)
    store.clear()
    store.close()
    store = open_store(config)
    assert store.stats().chunks == 0
    for folder in config.dirs:
        assert not list(folder.glob("segment-*"))


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_clearing_that_no_directory_takes_down_says_so(
    tmp_path: Path, open_store: OpenStore, is_killed: bool
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    for volume in Inside(store).volumes:
        keep_out(volume)
    with pytest.raises(StoreIOError) as caught:
        store.clear()
    for path in config.dirs:
        assert f"{path} is out" in str(caught.value)
    assert match_keys(store, OLD) == 0
    first = Inside(store).saved.identity.first_segment
    with pytest.raises(StoreIOError):
        store.clear()
    assert Inside(store).saved.identity.first_segment == first, "numbers last for ever"
    if is_killed:
        kill(store)
        assert match_keys(open_store(config), OLD) == 4, "that is why it says so"
        return
    Inside(store).retry_now()
    wait_until(lambda: clears(store))
    kill(store)
    store = open_store(config)
    assert match_keys(store, OLD) == 0
    store.clear()


def clears(store: DiskStore) -> bool:
    try:
        store.clear()
    except StoreIOError:
        return False
    return True


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_clearing_that_only_a_directory_with_an_older_epoch_knows_counts_when_it_is_back(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    away: set[str] = set()
    sick(away, monkeypatch)
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    Inside(store).keeper.close(5)
    with store.lease(OLD):  # files stay, as after a kill
        Inside(store).volumes[0].health.take_out("the test says so")
        store.clear()
        store.close()
    assert list(config.dirs[1].glob("segment-*"))
    away.add("disk1")
    for number in range(1, 5):  # settings change, and with them the epoch
        config = replace(config, size_bytes=config.size_bytes + number * 2**20)
        store = open_store(config)
        if number < 4:
            store.close()
    if is_killed:
        monkeypatch.setattr(SavedState, "outgrow", lambda self, other: None)
    away.clear()
    wait_until(lambda: is_healthy(store))
    if is_killed:
        kill(store)
        monkeypatch.undo()
        store = open_store(config)
    assert match_keys(store, OLD) == 0
    wait_until(lambda: not any(list(path.glob("segment-*")) for path in config.dirs))
    store.close()
    assert match_keys(open_store(config), OLD) == 0


def test_many_hung_operations_leave_no_thread_of_the_callers_behind(
    tmp_path: Path, open_store: OpenStore, hanging: HangingEngine
) -> None:
    store = open_store(small_config(tmp_path, 2), hanging)
    for number in range(4):
        write_keys(store, make_keys(10 * number, 4), LAYERS)
    hanging.hangs = lambda op: op.kind is IOKind.READ
    errors: list[StoreError | TierMissError] = []

    def read(number: int) -> None:
        try:
            with store.lease(make_keys(10 * number, 4)) as lease:
                store.read_layers(lease, {0: np.zeros(4 * LAYERS[0], np.uint8)})
        except (StoreError, TierMissError) as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number % 4,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(errors) == 12
    hanging.let_go()
    wait_until(lambda: is_healthy(store))
    for number in range(4):
        write_keys(store, make_keys(10 * number, 4), LAYERS)  # what hung is a miss
        read_keys(store, make_keys(10 * number, 4))


def test_open_files_do_not_grow(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path, 2))
    write_keys(store, OLD, LAYERS)
    read_keys(store, OLD)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read_keys(store, OLD)
        write_keys(store, NEW, LAYERS)
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_a_deletion_that_stops_half_way_costs_what_was_deleted_and_not_the_directory(
    tmp_path: Path, open_store: OpenStore
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    for name in ("lock", "superblock.json"):
        (config.dirs[1] / name).unlink()
    (config.dirs[1] / "segment-00000099.seg").write_bytes(bytes(8192))
    wait_until(lambda: (config.dirs[1] / "superblock.json").exists() and is_healthy(store))
    read_keys(store, OLD)
    wait_until(lambda: _writes(store, NEW))
    read_keys(store, (*OLD, *NEW))
    store.close()
    read_keys(open_store(config), (*OLD, *NEW))
    assert not (config.dirs[1] / "segment-00000099.seg").exists()
