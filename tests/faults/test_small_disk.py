"""A real disk that is full, goes read-only, or is unmounted, under a running store."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreError, TierMissError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, look_ahead
from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    match_keys,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)
from tests.faults.damage import HANG_S
from tests.faults.small_disk import SmallDisk, small_disk
from tests.faults.traffic import Habits, Traffic, Watch, over_cap
from tests.unit.store.conftest import conditions, is_healthy, wait_until

OpenStore = Callable[..., DiskStore]
MIB = 2**20
LAYERS = (16_384, 10_000, 16_384)
NUM_KEYS = 6
"""In a run of ``fill``; about 270 KiB."""
IO_TIMEOUT_S = 30.0


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    disk = small_disk(request.param, tmp_path)
    try:
        yield disk
    finally:
        disk.close()


def config_on(disk: SmallDisk, *others: Path, floor: int = 0, cap: int = 40 * MIB) -> StoreConfig:
    """A store in a folder of the disk, and in ``others``."""
    config = small_config(disk.mount_point, size=cap, segment=MIB, floor=floor)
    return replace(
        config, dirs=(disk.mount_point / "hcache", *others), io_timeout_s=IO_TIMEOUT_S, retry_s=0.05
    )


def keys_of(run: int) -> tuple[bytes, ...]:
    return make_keys(10 * run, NUM_KEYS)


def write(store: DiskStore, runs: range) -> None:
    for run in runs:
        write_keys(store, keys_of(run), LAYERS)


def takes_writes(store: DiskStore, run: int) -> bool:
    try:
        write(store, range(run, run + 1))
    except StoreError:
        return False
    return True


def served(store: DiskStore, runs: range) -> list[int]:
    """Which of ``runs`` are there; reads them all, and fails if one cannot be read."""
    found = []
    for run in runs:
        with contextlib.suppress(TierMissError):
            read_keys(store, keys_of(run))
            found.append(run)
    return found


@contextmanager
def greedy_neighbour(disk: SmallDisk) -> Iterator[None]:
    """Somebody who takes whatever is free, and whatever the store gives up."""
    stop = threading.Event()

    def fill() -> None:
        while not stop.wait(0.001):
            disk.fill()

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(HANG_S)
        disk.empty()


def test_a_disk_that_others_fill_up_under_load(disk: SmallDisk, open_store: OpenStore, seed: int) -> None:
    """Writes are refused, what is leased is served; when there is room again, everything works again."""
    config = config_on(disk)
    store = open_store(config)
    write(store, range(100, 104))
    lease = store.lease(keys_of(100))
    habits = Habits(seed=str(seed), num_threads=2, num_keys=900)
    with Watch(lambda: over_cap(config)), Traffic(store, habits) as traffic:
        wait_until(lambda: traffic.counts["written"] > 20, HANG_S)
        with greedy_neighbour(disk):
            wait_until(lambda: traffic.counts["write StoreFullError"] > 20, HANG_S)
            assert match_keys(store, keys_of(100)) == NUM_KEYS
            read_keys(store, keys_of(100))
        written = traffic.counts["written"]
        wait_until(lambda: traffic.counts["written"] > written + 20, HANG_S)
        assert traffic.counts["read CorruptExtentError"] == 0
    lease.close()
    wait_until(lambda: is_healthy(store), HANG_S)
    write(store, range(200, 204))
    assert Inside(store).is_kept
    store.close()
    store = open_store(config)
    assert served(store, range(200, 204)) == [200, 201, 202, 203]


def test_the_floor_holds_while_we_write_and_when_others_do(disk: SmallDisk, open_store: OpenStore) -> None:
    floor = 16 * MIB
    config = config_on(disk, floor=floor)
    store = open_store(config)

    def below_floor() -> str | None:
        free = disk.free_bytes()
        return f"{free} bytes are free" if free < floor else None

    with Watch(below_floor), Watch(lambda: over_cap(config)):
        write(store, range(150))
    assert store.stats().totals["segments_evicted"] > 5
    before = physical_bytes(config.dirs)
    assert before > 20 * MIB, "the floor, not the cap"
    disk.fill(leave_bytes=floor // 2)
    wait_until(lambda: below_floor() is None, HANG_S)
    assert physical_bytes(config.dirs) < before - 6 * MIB
    with Watch(below_floor):
        for run in range(200, 250):
            # What others took while files were deleted looks like what does not show as free yet, which is waited for.
            wait_until(lambda run=run: takes_writes(store, run), HANG_S)
    assert served(store, range(245, 250)) == [245, 246, 247, 248, 249]
    disk.fill(leave_bytes=0)
    disk.empty()
    wait_until(lambda: takes_writes(store, 300), HANG_S)
    assert served(store, range(300, 301))


def test_starting_on_a_full_disk(disk: SmallDisk, open_store: OpenStore) -> None:
    """As much is given up as is needed to start, the rest is served."""
    config = config_on(disk)
    store = open_store(config)
    write(store, range(40))
    store.close()
    disk.fill()
    store = open_store(config)
    found = served(store, range(40))
    assert 20 <= len(found) < 40
    wait_until(lambda: takes_writes(store, 50), HANG_S)
    assert served(store, range(50, 51))
    store.close()
    store = open_store(config)
    assert served(store, range(50, 51))


def test_starting_on_a_disk_that_stays_full(disk: SmallDisk, open_store: OpenStore) -> None:
    """Links keep what is deleted, as snapshots do: a few segments go, the rest is served."""
    config = config_on(disk)
    store = open_store(config)
    write(store, range(40))
    store.close()
    links = disk.mount_point / "links"
    links.mkdir()
    before = [file.name for file in config.dirs[0].glob("segment-*")]
    for name in before:
        os.link(config.dirs[0] / name, links / name)
    disk.fill()
    store = open_store(config)
    time.sleep(3)  # it is tried again and again
    assert conditions(store) == ["read-only"]
    left = served(store, range(40))
    assert len(left) >= 40 - 3 * 8
    shutil.rmtree(links)
    disk.empty()
    wait_until(lambda: takes_writes(store, 50), HANG_S)
    assert served(store, range(51)) == [*left, 50]


def test_starting_on_a_disk_that_is_full_of_other_things(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises(StoreError, match="No space left"):
        DiskStore.open(config_on(disk), Counters())
    disk.empty()
    DiskStore.open(config_on(disk), Counters()).close()


def test_a_disk_that_goes_read_only_and_comes_back(
    disk: SmallDisk, tmp_path: Path, open_store: OpenStore
) -> None:
    config = config_on(disk, tmp_path / "plain")
    store = open_store(config)
    write(store, range(10))
    disk.cover()
    # Who writes the state may find it before a run does, which then goes to the other directory.
    found = ["read-only", "healthy"]
    wait_until(lambda: conditions(store) == found or not takes_writes(store, 20), HANG_S)
    wait_until(lambda: conditions(store) == found, HANG_S)
    assert served(store, range(10)) == list(range(10))
    wait_until(lambda: takes_writes(store, 30), HANG_S)
    assert served(store, range(30, 31)), "the other directory goes on"
    disk.unmount()
    wait_until(lambda: is_healthy(store), HANG_S)
    write(store, range(40, 50))
    assert [run for run in served(store, range(50)) if run != 20] == [*range(10), 30, *range(40, 50)]


def test_starting_on_a_disk_that_is_mounted_read_only(
    disk: SmallDisk, open_store: OpenStore, counters: Counters
) -> None:
    config = config_on(disk)
    store = open_store(config)
    write(store, range(10))
    store.close()
    disk.cover()
    look_ahead(config)
    store = open_store(config)
    assert conditions(store) == ["read-only"]
    assert served(store, range(10)) == list(range(10))
    assert not takes_writes(store, 20)
    assert counters["store.runs_lost"] == 0
    disk.unmount()
    wait_until(lambda: takes_writes(store, 20), HANG_S)
    write(store, range(21, 30))
    store.close()
    store = open_store(config)
    assert served(store, range(30)) == [*range(10), *range(20, 30)]


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = small_disk("ext4", tmp_path)
    try:
        yield disk
    finally:
        disk.close()


def test_a_file_system_that_aborts(
    ext4: SmallDisk, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    """ext4 found itself damaged and takes no more writes: the store serves on from it."""
    caplog.set_level(logging.CRITICAL, "sglang_hcache")  # records hold errors, which hold open files
    config = config_on(ext4)
    store = open_store(config)
    write(store, range(10))
    ext4.abort()
    wait_until(lambda: not takes_writes(store, 20), HANG_S)
    wait_until(lambda: conditions(store) == ["read-only"], HANG_S)
    assert served(store, range(10)) == list(range(10))
    with pytest.raises(StoreError, match="no directory takes the note"):
        store.clear()  # noted in memory only
    assert served(store, range(10)) == []
    store.close()
    with StoreView.open(config.dirs) as view:
        assert [item.condition for item in view.directories()] == ["read-only"]


def test_where_nothing_can_be_preallocated_no_block_is_written_for_it(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """glibc would write to each of them, which takes minutes over NFS: the disk would count as one that hangs."""
    disk = small_disk("ext3", tmp_path)
    try:
        store = open_store(config_on(disk))
        write(store, range(1))
        (file,) = (disk.mount_point / "hcache").glob("segment-*.seg")
        assert file.stat().st_size == MIB > 2 * 512 * file.stat().st_blocks
        assert served(store, range(1)) == [0]
        store.close()
    finally:
        disk.close()


@pytest.mark.parametrize("folder", ["", "hcache"])
def test_a_disk_that_is_unmounted_and_mounted_again(
    ext4: SmallDisk, tmp_path: Path, open_store: OpenStore, folder: str
) -> None:
    """Its chunks are misses and come back; nothing is written to the folder that it was mounted on."""

    def something_below() -> str | None:
        return ", ".join(str(path) for path in ext4.mount_point.iterdir()) or None

    on_disk = ext4.mount_point / folder
    config = replace(config_on(ext4), dirs=(on_disk, tmp_path / "plain"))
    store = open_store(config)
    write(store, range(10))
    for turn in range(3):
        ext4.unmount()
        with Watch(something_below, 0.001):
            with pytest.raises(FileNotFoundError):  # as if the store had not noticed yet
                Inside(store).volumes[0].directory.create_segment(999, BLOCK)
            wait_until(lambda turn=turn: takes_writes(store, 100 + turn), HANG_S)
            wait_until(lambda: conditions(store) == ["out", "healthy"], HANG_S)
            for run in range(20, 30):
                takes_writes(store, run)
            assert served(store, range(10)) == []
            time.sleep(0.3)  # the store looks whether it is back
        ext4.mount()
        wait_until(lambda: is_healthy(store), HANG_S)
        assert served(store, range(10)) == list(range(10))
        write(store, range(30 + turn, 35 + turn))
    assert Inside(store).is_kept
    store.close()
    store = open_store(config)
    assert served(store, range(30)) == [*range(10), *range(20, 30)]
    store.close()
    ext4.unmount()
    assert not list(ext4.mount_point.iterdir())
