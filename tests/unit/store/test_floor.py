"""The free-space floor: file systems that show later what was deleted (XFS, ZFS, btrfs), disks that delete nothing."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreFullError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, free_space
from sglang_hcache.store.config import FILE_SLACK_BYTES
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys

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
        monkeypatch.setattr(free_space, "time", self)

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
        Inside(store).space.tend()
        assert counters["store.segments_evicted"] == expected
    disk.show()
    Inside(store).space.tend()
    assert disk.free() >= 100 * MIB


def test_a_directory_that_others_have_filled_says_that_nothing_new_is_stored(
    disk: SlowDisk, store: DiskStore
) -> None:
    def told() -> tuple[str, str]:
        Inside(store).space.tend()
        disk.show()
        [directory] = store.stats().directories
        return directory.condition, directory.reason

    assert told() == ("healthy", "")
    disk.others = 12 * MIB
    assert told() == ("healthy", ""), "it shrinks, and goes on"
    disk.others = 40 * MIB
    for _ in range(3):
        condition, reason = told()
    assert condition == "healthy"
    assert reason.startswith(
        "nothing new is stored: others fill the disk, and less than the floor of 104.9 MB ("
    )
    with pytest.raises(StoreFullError):
        write_keys(store, make_keys(5000, 6), LAYERS)
    disk.others = 0
    assert told() == ("healthy", "")


def test_what_shows_up_bit_by_bit_is_not_evicted_again(
    disk: SlowDisk, store: DiskStore, counters: Counters
) -> None:
    disk.others = 12 * MIB
    expected = missing_segments(disk)
    Inside(store).space.tend()
    whole = disk._hidden
    for part in range(10, -1, -1):
        disk._hidden = whole * part // 10
        Inside(store).space.tend()
    assert counters["store.segments_evicted"] == expected


def test_what_others_take_meanwhile_is_evicted_too(
    disk: SlowDisk, store: DiskStore, counters: Counters
) -> None:
    disk.others = 12 * MIB
    Inside(store).space.tend()
    disk.others += 2 * FILE_BYTES
    disk._hidden -= FILE_BYTES // 2
    before = counters["store.segments_evicted"]
    Inside(store).space.tend()
    assert counters["store.segments_evicted"] - before == 2


def test_what_was_freed_long_ago_is_not_waited_for(
    disk: SlowDisk, store: DiskStore, counters: Counters
) -> None:
    """Others keep filling the disk, or a snapshot keeps the blocks."""
    disk.others = 9 * MIB
    Inside(store).space.tend()
    first = counters["store.segments_evicted"]
    disk.wait(5)
    Inside(store).space.tend()
    assert counters["store.segments_evicted"] == first
    disk.wait(6)
    Inside(store).space.tend()
    assert counters["store.segments_evicted"] == 2 * first


def test_what_others_took_is_waited_for_once_though_evictions_go_on(
    disk: SlowDisk, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a neighbour who writes without end pushes the store below the floor, deletion by deletion."""
    disk.others = disk.free() - 100 * MIB
    unlink, taken = StoreDirectory.unlink_segment, [FILE_BYTES]

    def take_at_once(directory: StoreDirectory, segment: int) -> None:
        unlink(directory, segment)
        disk.show()
        disk.others += taken.pop() if taken else 0

    monkeypatch.setattr(StoreDirectory, "unlink_segment", take_at_once)
    Inside(store).space.tend()
    for _ in range(6):
        disk.wait(2)
        disk.others += FILE_BYTES
        Inside(store).space.tend()
    assert not taken
    assert missing_segments(disk) <= 0
    write_keys(store, make_keys(1000, 6), LAYERS)


def test_room_for_a_new_segment_costs_one_and_is_used_when_it_shows_up(
    disk: SlowDisk, store: DiskStore, counters: Counters
) -> None:
    disk.others = disk.free() - 100 * MIB
    for _ in range(3):
        Inside(store).space.tend()
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
    large = make_keys(2000, 24)
    write_keys(store, large, LAYERS)  # more than one segment makes room for
    assert disk.free() >= 100 * MIB
    read_keys(store, large)


def test_what_went_for_the_cap_is_not_waited_for_where_new_segments_took_its_room(
    disk: SlowDisk, store: DiskStore, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else others push the store below the floor, right after it wrote much."""
    disk.others = -20 * MIB  # a larger disk: the cap comes before the floor
    unlink = StoreDirectory.unlink_segment

    def show(directory: StoreDirectory, segment: int) -> None:
        unlink(directory, segment)
        disk.show()

    monkeypatch.setattr(StoreDirectory, "unlink_segment", show)
    for number in range(30):
        write_keys(store, make_keys(1000 + 10 * number, 6), LAYERS)
    assert counters["store.segments_evicted"] > 10
    disk.others += disk.free() - 97 * MIB
    Inside(store).space.tend()
    assert disk.free() >= 100 * MIB


class BadDisk:
    """Of two disks the first one, which is below the floor and deletes nothing."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = small_config(base, 2, size=24 * MIB, segment=MIB, floor=100 * MIB)
        self.free = [200 * MIB, 200 * MIB]
        self.error_number = 0
        unlink = StoreDirectory.unlink_segment

        def refuse(directory: StoreDirectory, segment: int) -> None:
            if self.error_number and self._number(directory) == 0:
                raise OSError(self.error_number, os.strerror(self.error_number))
            unlink(directory, segment)

        monkeypatch.setattr(StoreDirectory, "unlink_segment", refuse)
        monkeypatch.setattr(StoreDirectory, "device", lambda item: self._number(item))
        monkeypatch.setattr(StoreDirectory, "free_bytes", lambda item: self.free[self._number(item)])

    def _number(self, directory: StoreDirectory) -> int:
        return self.config.dirs.index(directory.path)


@pytest.fixture
def bad_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BadDisk:
    return BadDisk(tmp_path, monkeypatch)


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("error_number", [errno.EPERM, errno.EIO])
def test_a_disk_that_deletes_nothing_costs_few_segments_however_often_it_is_tried(
    open_store: OpenStore, bad_disk: BadDisk, error_number: int
) -> None:
    """Their files on the other disk go, which helps the first one in nothing."""
    store = open_store(bad_disk.config)
    written = [make_keys(10 * number, 6) for number in range(12)]
    for keys in written:
        write_keys(store, keys, LAYERS)
    bad_disk.error_number = error_number
    bad_disk.free[0] = 99 * MIB
    for _ in range(5):
        Inside(store).space.tend()
    there = [keys for keys in written if match_keys(store, keys)]
    assert len(there) == 9
    for keys in there:
        read_keys(store, keys)
    bad_disk.error_number = 0
    Inside(store).space.tend()
    assert 6 <= sum(bool(match_keys(store, keys)) for keys in written) < 9, "now it does: two more make 1 MiB"


@pytest.mark.usefixtures("no_keeper")
def test_a_file_system_that_turns_read_only_is_noticed_when_nothing_can_be_deleted(
    open_store: OpenStore, bad_disk: BadDisk
) -> None:
    store = open_store(bad_disk.config)
    for number in range(12):
        write_keys(store, make_keys(10 * number, 6), LAYERS)
    bad_disk.error_number = errno.EROFS
    bad_disk.free[0] = 99 * MIB
    for _ in range(5):
        Inside(store).space.tend()
    assert [item.condition for item in store.stats().directories] == ["read-only", "healthy"]
    assert store.stats().chunks == 9 * 6
