"""What is free is counted by file system, and what was deleted, or could be, by directory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_hcache.store.config import FILE_SLACK_BYTES, StoreConfig
from sglang_hcache.store.free_space import FreeSpace

FLOOR, FILE = 1000, 100
NEED = FILE + FILE_SLACK_BYTES


def directory(stripe: int, device: int, free: int, *, can_delete: bool = True, total: int = 0) -> Any:
    return SimpleNamespace(
        stripe=stripe,
        health=SimpleNamespace(can_delete=can_delete),
        directory=SimpleNamespace(device=lambda: device, free_bytes=lambda: free, total_bytes=lambda: total),
        call=lambda function, _doing: function(),
    )


def free_space(*volumes: Any, evictable: tuple[dict[int, int], ...] = (), percent: float = 0.0) -> FreeSpace:
    segments = [SimpleNamespace(freeable_bytes=sizes) for sizes in evictable]
    config = StoreConfig(
        dirs=(Path("/a"),),
        size_bytes=2**30,
        segment_bytes=2**20,
        free_floor_bytes=FLOOR,
        free_floor_percent=percent,
    )
    catalog: Any = SimpleNamespace(evictable=lambda: segments)
    return FreeSpace(config, volumes, catalog)


def test_what_was_deleted_counts_where_it_was() -> None:
    space = free_space(directory(0, 7, 0), directory(1, 8, 0))
    space.note_deleted(0, 10)
    space.note_deleted(1, 20)
    space.note_deleted(1, 5)
    assert [space.deleted_in(within) for within in (0b01, 0b10, 0b11, -1)] == [10, 25, 35, 35]


def test_eviction_makes_room_where_its_files_are() -> None:
    full = [directory(stripe, stripe, FLOOR) for stripe in range(3)]
    space = free_space(*full, evictable=({0: NEED - 1, 1: NEED}, {1: 1, 2: NEED}))
    found = space.usable(FILE)
    assert (found.now, found.soon, found.by_eviction) == ((), (), (1, 2))


def test_directories_of_one_file_system_need_room_for_a_file_each() -> None:
    for free, usable in ((FLOOR + 2 * NEED - 1, ()), (FLOOR + 2 * NEED, (0, 2))):
        space = free_space(directory(0, 7, free), directory(1, 8, 0), directory(2, 7, free))
        assert space.usable(FILE).now == usable


def test_a_floor_may_be_a_share_of_each_file_system() -> None:
    small, large = directory(0, 7, 3 * NEED, total=20 * NEED), directory(1, 8, 3 * NEED, total=30 * NEED)
    space = free_space(small, large, percent=10)
    assert space.usable(FILE).now == (0,), "of the large one it is as much as is free"
    assert [(item.mask, item.missing) for item in space.shortages(NEED, (0, 1))] == [(0b10, NEED)]
    assert free_space(small, percent=0.001).usable(FILE).now == (0,)


def test_where_nothing_can_be_deleted_nobody_looks() -> None:
    space = free_space(directory(0, 7, 10 * NEED), directory(1, 8, 0, can_delete=False))
    assert space.usable(FILE).by_eviction == (0,)
    assert [item.mask for item in space.shortages(20 * NEED, (0, 1))] == [0b01]
