"""A disk that is full whatever is deleted: a quota that other files use up, or a snapshot that keeps the blocks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.core import throttle
from sglang_hcache.core.errors import StoreFullError, StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.io.probing import gives_direct_reads
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.health import Health
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import conditions, is_healthy, state_of

OpenStore = Callable[..., DiskStore]
LAYERS = (4096, 4096)
RUNS = 12
"""One a segment, of which each fills most."""


def keys_of(number: int) -> tuple[bytes, ...]:
    return make_keys(20 * number, 20)


def there(store: DiskStore) -> list[int]:
    """The runs that are served; reads them all."""
    found = [number for number in range(RUNS) if match_keys(store, keys_of(number)) == 20]
    for number in found:
        read_keys(store, keys_of(number))
    return found


class Full:
    """What needs room in the directory fails with ``number`` while this is set."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.lets_probes_pass = False
        self._folder = folder
        self._probe, self._create = StoreDirectory.probe, StoreDirectory.create_segment
        monkeypatch.setattr(StoreDirectory, "probe", lambda item: self._try_probe(item))
        monkeypatch.setattr(StoreDirectory, "create_segment", lambda *args: self._try_create(*args))

    def _try_probe(self, directory: StoreDirectory) -> None:
        if not self.lets_probes_pass:
            self._check(directory)
        self._probe(directory)

    def _try_create(self, directory: StoreDirectory, segment: int, size: int) -> None:
        self._check(directory)
        self._create(directory, segment, size)

    def _check(self, directory: StoreDirectory) -> None:
        if self.number and directory.path == self._folder:
            raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def config(tmp_path: Path, open_store: OpenStore) -> StoreConfig:
    """Of a closed store."""
    config = small_config(tmp_path)
    store = open_store(config)
    for number in range(RUNS):
        write_keys(store, keys_of(number), LAYERS)
    assert store.stats().segments == RUNS
    store.close()
    return config


@pytest.fixture
def full(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> Full:
    return Full(config.dirs[0], monkeypatch)


def retry(store: DiskStore) -> None:
    """A round of the keeper, in which every directory that is not well is tried."""
    Inside(store).retry_now()
    Inside(store).keeper.round()


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_start_serves_all_and_the_keeper_makes_room(
    config: StoreConfig, open_store: OpenStore, counters: Counters, full: Full, number: int
) -> None:
    full.number = number
    store = open_store(config)
    assert conditions(store) == ["read-only"]
    assert there(store) == [*range(RUNS)]
    volume = Inside(store).volumes[0]
    assert volume.directory.direct == gives_direct_reads(volume.directory.segment_path(RUNS - 1))
    retry(store)
    assert conditions(store) == ["read-only"]
    assert there(store) == [*range(1, RUNS)]
    full.number = 0
    retry(store)
    assert is_healthy(store)
    write_keys(store, make_keys(1000, 20), LAYERS)
    assert there(store) == [*range(1, RUNS)]
    assert counters["store.runs_lost"] == 0


@pytest.mark.usefixtures("no_keeper")
def test_a_start_on_a_full_disk_whose_oldest_file_cannot_be_deleted(
    config: StoreConfig, open_store: OpenStore, full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(StoreDirectory, "unlink_segment", refuse)
    full.number = errno.ENOSPC
    store = open_store(config)
    assert conditions(store) == ["read-only"]
    assert there(store) == [*range(RUNS)]


@pytest.mark.usefixtures("no_keeper")
def test_a_full_disk_that_cannot_be_read_either_is_refused(
    config: StoreConfig, full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(*_: object) -> None:
        raise OSError(errno.EIO, "bad")

    monkeypatch.setattr(StoreDirectory, "probe_reading", bad)
    full.number = errno.ENOSPC
    with pytest.raises(StoreIOError, match=r"cannot use .*disk0 .*: bad"):
        DiskStore.open(config, Counters())


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("lets_probes_pass", [False, True])
def test_while_a_store_runs_a_few_segments_go_and_then_one_now_and_then(
    config: StoreConfig,
    open_store: OpenStore,
    full: Full,
    monkeypatch: pytest.MonkeyPatch,
    lets_probes_pass: bool,
) -> None:
    """However often it is tried to probe it, or to write to it where a block finds room and a segment does not."""
    now = 1000.0
    monkeypatch.setattr(throttle.time, "monotonic", lambda: now)
    store = open_store(config)
    full.number, full.lets_probes_pass = errno.EDQUOT, lets_probes_pass

    def try_often() -> int:
        for _ in range(20):
            if lets_probes_pass:
                with pytest.raises(StoreFullError):
                    write_keys(store, make_keys(1000, 20), LAYERS)
            else:
                Inside(store).volumes[0].health.failed(OSError(errno.EDQUOT, "quota"), writing=True)
            retry(store)
        return len(there(store))

    left = try_often()
    assert RUNS - 5 <= left <= RUNS - 3
    assert try_often() == left
    now += 601
    assert try_often() == left - 1
    full.number = 0
    retry(store)
    write_keys(store, make_keys(1000, 20), LAYERS)
    full.number = errno.EDQUOT
    assert try_often() < left - 3, "room was found: the next time is another one"


@pytest.mark.usefixtures("no_keeper")
def test_a_state_on_a_full_disk_fails_once_and_is_brought_up_to_date_later(
    config: StoreConfig,
    open_store: OpenStore,
    counters: Counters,
    full: Full,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else every round would be an error, for as long as the disk is full."""
    write = StoreDirectory.write_state

    def write_if_room(directory: StoreDirectory, text: bytes) -> None:
        if full.number:
            raise OSError(full.number, os.strerror(full.number))
        write(directory, text)

    monkeypatch.setattr(StoreDirectory, "write_state", write_if_room)
    store = open_store(config)
    inside = Inside(store)
    full.number = errno.ENOSPC
    for number in range(5):
        store.touch(keys_of(number))
        inside.keeper.round()
    assert conditions(store) == ["read-only"]
    assert (counters["store.io_errors"], counters["store.upkeep_failures"]) == (1, 1)
    assert len(caplog.messages) == 2
    store.touch(keys_of(7))
    full.number = 0
    retry(store)
    by_use = [*state_of(config.dirs[0]).segments]
    assert by_use[:-3:-1] == [inside.run_of(keys_of(number)[0]).segment.number for number in (7, 4)]


@pytest.mark.usefixtures("no_keeper")
def test_a_state_that_a_full_disk_takes_all_the_same_says_that_it_is_full(
    config: StoreConfig, open_store: OpenStore
) -> None:
    """A small file finds room where a segment does not."""
    inside = Inside(open_store(config))
    inside.volumes[0].health.failed(OSError(errno.ENOSPC, "no space"), writing=True)
    inside.keeper.round()
    with StoreView.open(config.dirs) as view:
        assert [(item.condition, item.reason) for item in view.directories()] == [("read-only", "no space")]


def test_what_takes_no_writes_is_not_an_error_again_with_each_of_them(tmp_path: Path) -> None:
    """Such as each file of no segment on a file system that is mounted read-only, every second."""
    counters = Counters()
    health = Health(tmp_path, counters, 1.0)
    for _ in range(5):
        health.failed(OSError(errno.EROFS, "read-only"), writing=True)
    assert counters["store.io_errors"] == health.io_errors == 1
    health.failed(OSError(errno.EIO, "bad"), writing=False)
    assert counters["store.io_errors"] == health.io_errors == 2
