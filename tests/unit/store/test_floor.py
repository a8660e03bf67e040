"""The free-space floor where a file system shows what was deleted only later, as XFS, ZFS and btrfs do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreFullError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.store import room as room_module
from sglang_hcache.store.config import FILE_SLACK_BYTES
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.stored_chunks import make_keys, read_keys, small_config, write_keys

OpenStore = Callable[..., DiskStore]

MIB = 2**20
LAYERS = (32768,) * 3
"""Six chunks of it are one segment, of 614,400 bytes when it is cut."""
FILE_BYTES = 150 * 4096


class SlowDisk:
    """A disk of 120 MiB that shows what was deleted when :meth:`show` is called. ``others`` use some of it."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others = 0
        self.config = small_config(base, size=24 * MIB, segment=MIB, floor=100 * MIB)
        self._base = base
        self._hidden = 0
        self._ahead_s = 0.0
        unlink = StoreDirectory.unlink_segment

        def hide(directory: StoreDirectory, segment: int) -> None:
            before = self._used()
            unlink(directory, segment)
            self._hidden += before - self._used()

        monkeypatch.setattr(StoreDirectory, "unlink_segment", hide)
        monkeypatch.setattr(StoreDirectory, "free_bytes", lambda _: self.free())
        monkeypatch.setattr(room_module, "time", self)

    def show(self) -> None:
        self._hidden = 0

    def free(self) -> int:
        return 120 * MIB - self.others - self._hidden - self._used()

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def wait(self, seconds: float) -> None:
        self._ahead_s += seconds

    def _used(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in self._base.rglob("segment-*.seg"))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(tmp_path, monkeypatch)


@pytest.fixture
def store(disk: SlowDisk, open_store: OpenStore, no_keeper: None) -> DiskStore:
    """With 20 sealed segments, and one that is being filled."""
    store = open_store(disk.config)
    for number in range(21):
        write_keys(store, make_keys(10 * number, 6), LAYERS)
    return store


def missing_segments(disk: SlowDisk) -> int:
    """How many have to go until the floor is free, and room for the next one."""
    need = disk.config.free_floor_bytes + disk.config.file_bytes + FILE_SLACK_BYTES
    return -(-(need - disk.free()) // FILE_BYTES)


def test_no_more_is_evicted_than_was_missing_at_one_look(
    disk: SlowDisk, store: DiskStore, counters: Counters
) -> None:
    disk.others = 12 * MIB
    expected = missing_segments(disk)
    assert 3 < expected < 15
    for _ in range(5):
        store._space.tend()
        assert counters["store.segments_evicted"] == expected
    disk.show()
    store._space.tend()
    assert disk.free() >= 100 * MIB


def test_what_shows_up_bit_by_bit_is_not_evicted_again(
    disk: SlowDisk, store: DiskStore, counters: Counters
) -> None:
    disk.others = 12 * MIB
    expected = missing_segments(disk)
    store._space.tend()
    whole = disk._hidden
    for part in range(10, -1, -1):
        disk._hidden = whole * part // 10
        store._space.tend()
    assert counters["store.segments_evicted"] == expected


def test_what_others_take_meanwhile_is_evicted_too(
    disk: SlowDisk, store: DiskStore, counters: Counters
) -> None:
    disk.others = 12 * MIB
    store._space.tend()
    disk.others += 2 * FILE_BYTES
    disk._hidden -= FILE_BYTES // 2
    before = counters["store.segments_evicted"]
    store._space.tend()
    assert counters["store.segments_evicted"] - before == 2


def test_what_was_freed_long_ago_is_not_waited_for(
    disk: SlowDisk, store: DiskStore, counters: Counters
) -> None:
    """Others keep filling the disk, or a snapshot keeps the blocks."""
    disk.others = 9 * MIB
    store._space.tend()
    first = counters["store.segments_evicted"]
    disk.wait(9)
    store._space.tend()
    assert counters["store.segments_evicted"] == first
    disk.wait(2)
    store._space.tend()
    assert counters["store.segments_evicted"] == 2 * first


def test_room_for_a_new_segment_costs_one_and_is_used_when_it_shows_up(
    disk: SlowDisk, store: DiskStore, counters: Counters
) -> None:
    disk.others = disk.free() - 100 * MIB
    for _ in range(3):
        store._space.tend()
        with pytest.raises(StoreFullError, match="--hcache-disk-free-floor"):
            write_keys(store, make_keys(1000, 6), LAYERS)
    evicted = counters["store.segments_evicted"]
    assert evicted == 2, "a segment has 1 MiB before it is cut"
    disk.show()
    write_keys(store, make_keys(1000, 6), LAYERS)
    assert counters["store.segments_evicted"] == evicted
    read_keys(store, make_keys(1000, 6))


def test_a_disk_that_shows_all_at_once_takes_one_new_segment_after_the_other(
    disk: SlowDisk, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others write in between, a little each time, is not waited for."""
    disk.others = disk.free() - 100 * MIB
    unlink = StoreDirectory.unlink_segment

    def show(directory: StoreDirectory, segment: int) -> None:
        unlink(directory, segment)
        disk.show()
        disk.others += 4096

    monkeypatch.setattr(StoreDirectory, "unlink_segment", show)
    for number in range(30):
        write_keys(store, make_keys(1000 + 10 * number, 6), LAYERS)
    assert disk.free() >= 100 * MIB
