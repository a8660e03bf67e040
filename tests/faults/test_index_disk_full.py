"""The disk of the index is full of other things: the index is given up, and nothing stored elsewhere goes for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.testing.open_store import Inside
from tests.faults.damage import HANG_S
from tests.faults.small_disk import SmallDisk, small_disk
from tests.faults.test_small_disk import OpenStore, config_on, served, takes_writes, write
from tests.unit.store.conftest import conditions, sick, wait_until

FIRST = range(10)
FOR_OTHERS = 3 * 2**19
"""What is free for an index at first, and not for a segment."""


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    disk = small_disk(request.param, tmp_path)
    try:
        disk.fill(FOR_OTHERS)
        yield disk
    finally:
        disk.close()


def config_beside(disk: SmallDisk, tmp_path: Path) -> StoreConfig:
    """A store in a folder of the disk, which has no room for segments, and in one that has."""
    config = config_on(disk, tmp_path / "well")
    return replace(config, segment_bytes=4 * 2**20)


def test_storing_goes_on_where_others_have_filled_the_disk_of_the_index(
    disk: SmallDisk, tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    store = open_store(config_beside(disk, tmp_path))
    write(store, FIRST)
    assert Inside(store).ledger.identity.index_stripe == 0
    assert {segment.members for segment in Inside(store).catalog.segments()} == {(1,)}
    disk.fill()
    later = range(10, 40)
    wait_until(lambda: takes_writes(store, 10) and Inside(store).is_index_given_up, HANG_S)
    write(store, later)
    assert served(store, range(40)) == [*FIRST, *later]
    assert counters["store.segments_evicted"] == 0


def test_nothing_is_evicted_for_an_index_on_a_disk_that_others_have_filled(
    disk: SmallDisk,
    tmp_path: Path,
    open_store: OpenStore,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The directory with the index is away for a moment, and the other one has hardly any room."""
    config = config_beside(disk, tmp_path)
    store: DiskStore = open_store(replace(config, dirs=config.dirs[::-1]))
    write(store, FIRST)
    disk.fill(32 * 2**10)  # for a superblock
    with monkeypatch.context() as patch:
        sick({"well"}, patch)
        Inside(store).volumes[0].health.take_out("gone")
        wait_until(lambda: Inside(store).is_index_given_up, HANG_S)
        assert conditions(store)[0] == "out"
    wait_until(lambda: conditions(store)[0] == "healthy", HANG_S)
    wait_until(lambda: served(store, FIRST) == [*FIRST], HANG_S)
    assert counters["store.segments_evicted"] == 0
    assert not (disk.mount_point / "hcache" / "index.sqlite").exists()
