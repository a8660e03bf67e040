"""A device that fails: the error is ours, the store is consistent, and it works again afterwards."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sglang_hcache.core.errors import (
    CorruptExtentError,
    StoreError,
    StoreFullError,
    StoreIOError,
)
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.io.engine import IOKind, OpenFile
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.io_faults import Fault, FaultEngine, always, seeded
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    match_keys,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import state_of, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (8192, 5000)
OLD, NEW = make_keys(0, 3), make_keys(10, 3)


@pytest.fixture
def engine() -> FaultEngine:
    return FaultEngine(PosixEngine(3, 2), lambda op, number: None)


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return small_config(tmp_path, 2)


@pytest.fixture
def store(config: StoreConfig, open_store: OpenStore, engine: FaultEngine) -> DiskStore:
    store = open_store(config, engine)
    write_keys(store, OLD, LAYERS)
    return store


def heal(engine: FaultEngine) -> None:
    engine.decide = lambda op, number: None


@pytest.mark.parametrize(
    ("number", "counts"),
    [
        *((number, True) for number in (errno.ENODATA, errno.EREMOTEIO, errno.EILSEQ, errno.ENOLINK)),
        *((number, True) for number in (errno.EUCLEAN, errno.EBADMSG, errno.EIO)),
        *((number, False) for number in (errno.EMFILE, errno.ENOMEM, errno.ENODEV, errno.ESTALE)),
    ],
)
def test_whatever_a_bad_sector_says_it_is_not_read_for_ever(
    store: DiskStore, engine: FaultEngine, number: int, counts: bool
) -> None:
    engine.decide = always(IOKind.READ, number)
    with pytest.raises(StoreIOError):
        read_keys(store, OLD)
    heal(engine)
    wait_until(lambda: all(item.condition == "healthy" for item in store.stats().directories))
    assert match_keys(store, OLD) == (0 if counts else len(OLD))


@pytest.mark.parametrize("kind", [IOKind.WRITE, IOKind.SYNC])
@pytest.mark.parametrize("stripe", [None, 0, 1])
def test_a_failed_write_stores_nothing_and_costs_nothing(
    store: DiskStore,
    config: StoreConfig,
    engine: FaultEngine,
    counters: Counters,
    kind: IOKind,
    stripe: int | None,
) -> None:
    engine.decide = always(kind, stripe=stripe)
    for turn in range(30):
        with pytest.raises(StoreIOError, match="Input/output error" if not turn else "."):
            write_keys(store, NEW, LAYERS)
        assert match_keys(store, NEW) == 0
        assert physical_bytes(config.dirs) <= config.size_bytes
        if stripe is not None and store.stats().directories[stripe].condition != "healthy":
            break
    heal(engine)
    wait_until(lambda: all(item.condition == "healthy" for item in store.stats().directories))
    write_keys(store, NEW, LAYERS)
    read_keys(store, [*OLD, *NEW])
    assert counters["store.io_errors"] >= 1
    assert store.stats().segments == 2


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("looks", [1, 2, 3])
def test_directories_that_fail_while_room_is_looked_for_cost_nothing(
    store: DiskStore, engine: FaultEngine, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """Their room cannot be seen any more, which is no lack of room."""
    engine.decide = always(IOKind.SYNC)
    with pytest.raises(StoreIOError):
        write_keys(store, NEW, LAYERS)  # the segment of OLD is not written to any more, and may be evicted
    asked: list[Path] = []
    free_bytes = StoreDirectory.free_bytes

    def and_fail(self: StoreDirectory) -> int:
        asked.append(self.path)
        free = free_bytes(self)
        if len(asked) == looks * len(Inside(store).volumes):
            for volume in Inside(store).volumes:
                volume.health.failed(OSError(errno.EROFS, os.strerror(errno.EROFS)), writing=True)
        return free

    monkeypatch.setattr(StoreDirectory, "free_bytes", and_fail)
    Inside(store).space.tend()
    assert all(volume.health.condition == "read-only" for volume in Inside(store).volumes)
    read_keys(store, OLD)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_device_is_full_not_broken(store: DiskStore, engine: FaultEngine, number: int) -> None:
    engine.decide = always(IOKind.WRITE, number)
    with pytest.raises(StoreFullError):
        write_keys(store, NEW, LAYERS)
    read_keys(store, OLD)
    heal(engine)
    wait_until(lambda: all(item.condition == "healthy" for item in store.stats().directories))
    write_keys(store, NEW, LAYERS)
    read_keys(store, NEW)


def test_a_write_that_comes_short(store: DiskStore, engine: FaultEngine) -> None:
    engine.decide = lambda op, number: Fault(0, share_done=0.5) if op.kind is IOKind.WRITE else None
    with pytest.raises(StoreIOError, match="bytes were written"):
        write_keys(store, NEW, LAYERS)
    heal(engine)
    assert match_keys(store, NEW) == 0
    read_keys(store, OLD)


def test_a_run_that_cannot_be_read_is_a_miss_until_the_next_start(
    store: DiskStore,
    config: StoreConfig,
    open_store: OpenStore,
    engine: FaultEngine,
    counters: Counters,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.decide = always(IOKind.READ)
    with pytest.raises(StoreIOError, match="read failed"):
        read_keys(store, OLD)
    heal(engine)
    assert match_keys(store, OLD) == 0
    assert counters["store.io_errors"] == 1
    assert store.stats().quarantined == 0
    assert "segment-00000000.seg: read failed" in caplog.text
    written = store.stats().written_today_bytes
    store.close()
    again = open_store(config)
    assert again.stats().written_today_bytes == written, "not counted as one that was written since"
    read_keys(again, OLD)


@pytest.mark.parametrize("is_cleared", [False, True])
def test_what_is_damaged_of_a_run_that_cannot_be_read_stays_in_quarantine(
    store: DiskStore, config: StoreConfig, open_store: OpenStore, engine: FaultEngine, is_cleared: bool
) -> None:
    inside = Inside(store)
    run = inside.run_of(OLD[0])
    inside.catalog.quarantine(run, {2: "the test says so"})
    engine.decide = always(IOKind.READ)
    with pytest.raises(StoreIOError, match="read failed"):
        read_keys(store, OLD[:2])
    heal(engine)
    assert match_keys(store, OLD) == 0
    if is_cleared:
        store.clear()
    assert store.stats().quarantined == (0 if is_cleared else 1)
    store.close()
    state = state_of(config.dirs[0])
    assert [*state.quarantined] == ([] if is_cleared else [run.place.run_id])
    assert [item.runs for item in state.segments.values()] == ([] if is_cleared else [1])
    again = open_store(config)
    assert match_keys(again, OLD) == (0 if is_cleared else 2)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
@pytest.mark.parametrize("where", ["read", "open"])
def test_what_the_process_lacks_is_no_fault_of_runs_or_directories(
    store: DiskStore, engine: FaultEngine, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    def refuse(*_: object) -> OpenFile:
        raise OSError(number, os.strerror(number))

    if where == "read":
        engine.decide = always(IOKind.READ, number)
    else:
        monkeypatch.setattr(StoreDirectory, "open_to_read", refuse)
        monkeypatch.setattr(StoreDirectory, "open_to_write", refuse)
    for _ in range(5):
        with pytest.raises(StoreIOError, match=os.strerror(number)):
            read_keys(store, OLD)
        if where == "open":
            with pytest.raises(StoreIOError, match=os.strerror(number)):
                write_keys(store, NEW, LAYERS)
    assert {item.condition for item in store.stats().directories} == {"healthy"}
    heal(engine)
    monkeypatch.undo()
    read_keys(store, OLD)
    write_keys(store, NEW, LAYERS)


def test_a_read_that_comes_short_is_corruption(store: DiskStore, engine: FaultEngine) -> None:
    engine.decide = lambda op, number: Fault(0) if op.kind is IOKind.READ else None
    with pytest.raises(CorruptExtentError, match="the file ends"):
        read_keys(store, OLD)
    assert match_keys(store, OLD) == 0


def test_after_any_mixture_of_faults_only_good_data_is_served(
    config: StoreConfig, open_store: OpenStore, engine: FaultEngine
) -> None:
    store = open_store(config, engine)
    engine.decide = seeded(7, 0.1)
    stored = []
    for number in range(60):
        keys = make_keys(10 * number, 3)
        try:
            write_keys(store, keys, LAYERS)
            stored.append(keys)
        except StoreError:
            assert match_keys(store, keys) == 0
        assert physical_bytes(config.dirs) <= config.size_bytes
    assert 5 < len(stored) < 60
    heal(engine)
    wait_until(lambda: all(item.condition == "healthy" for item in store.stats().directories))
    for keys in stored:
        read_keys(store, keys)
    store.close()
    store = open_store(config)
    for keys in stored:
        read_keys(store, keys)
    assert store.stats().runs == len(stored)


def test_while_no_state_can_be_written_storing_and_eviction_go_on(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, size=9 * 2**20, segment=2**20)
    store = open_store(config)
    big = (32768,) * 3
    write_keys(store, make_keys(0, 6), big)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(StoreDirectory, "write_state", fail)
    for number in range(1, 20):
        wait_until(partial(is_written, store, make_keys(100 * number, 6), big))
        assert physical_bytes(config.dirs) <= config.size_bytes
    assert match_keys(store, make_keys(0, 6)) == 0, "eviction goes on"
    monkeypatch.undo()
    store.close()
    store = open_store(config)
    read_keys(store, make_keys(1900, 6))
    assert store.stats().directories[0].condition == "healthy"


def is_written(store: DiskStore, keys: tuple[bytes, ...], layers: tuple[int, ...]) -> bool:
    try:
        write_keys(store, keys, layers)
    except StoreError:
        return False
    return True


def test_a_slow_device_is_only_slow(config: StoreConfig, open_store: OpenStore) -> None:
    store = open_store(config, FaultEngine(PosixEngine(3, 1), lambda *_: time.sleep(0.005)))
    write_keys(store, OLD, LAYERS)
    read_keys(store, OLD)
