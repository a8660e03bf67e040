"""What a store takes, and what it costs to know that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.store import DiskStore
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, physical_bytes, read_keys, small_config, write_keys
from tests.unit.store.conftest import kill, sick

OpenStore = Callable[..., DiskStore]
LAYERS = (2**15,) * 4
SMALL = 2**18
"""The state, what is allowed for each file, superblock and lock: together no more than this."""


@pytest.mark.usefixtures("no_keeper")
def test_what_is_taken_is_known_without_asking_for_the_segments(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2, segment=2**20)
    store = open_store(config)
    for first in range(0, 40, 8):
        write_keys(store, make_keys(first, 8), LAYERS)
    with monkeypatch.context() as patch:
        for name in ("segment_bytes", "segment_sizes", "allocated_bytes"):
            patch.delattr(StoreDirectory, name)
        Inside(store).keeper.round()
    full = store.stats().used_bytes
    assert abs(full - physical_bytes(config.dirs)) <= SMALL
    for _ in range(3):
        assert store.evict_one()
    Inside(store).keeper.round()
    assert (
        abs(store.stats().used_bytes - physical_bytes(config.dirs)) <= SMALL < full - store.stats().used_bytes
    )


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("at_start", [False, True])
def test_a_directory_that_is_out_still_takes_what_it_took(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    config = replace(small_config(tmp_path, 2, segment=2**20), retry_s=60.0)
    store = open_store(config)
    write_keys(store, make_keys(0, 8), LAYERS)
    store.close()
    store = open_store(config)
    well = store.stats().used_bytes
    assert well > 2**20, "the chunks"
    if at_start:
        store.close()
        sick({"disk1"}, monkeypatch)
        store = open_store(config)
    else:
        Inside(store).volumes[1].health.take_out("sick")
        Inside(store).keeper.round()
    found = store.stats()
    assert found.directories[1].condition == "out"
    assert abs(found.used_bytes - well) < SMALL


def test_segments_of_another_size_stay_in_use(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path, 2, size=24 * 2**20)
    runs = [make_keys(10 * number, 10) for number in range(8)]
    for number, segment_bytes in enumerate((2**18, 2**21, 2**19, 2**20)):
        store = open_store(replace(config, segment_bytes=segment_bytes))
        for keys in runs[2 * number : 2 * number + 2]:
            write_keys(store, keys, (4096,) * 4)
        for keys in runs[: 2 * number + 2]:
            read_keys(store, keys)
        assert physical_bytes(config.dirs) <= config.size_bytes
        store.close()


@pytest.mark.usefixtures("no_keeper")
def test_a_start_asks_for_no_file_that_it_has_listed(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(small_config(tmp_path, 2, segment=2**20), max_age_s=86_400.0)
    store = open_store(config)
    for first in range(0, 40, 8):
        write_keys(store, make_keys(first, 8), LAYERS)
    write_keys(store, make_keys(100, 2), LAYERS)
    kill(store)
    trimmed: list[int] = []
    trim = StoreDirectory.trim_segment

    def trim_segment(directory: StoreDirectory, segment: int, size: int) -> None:
        trimmed.append(segment)
        trim(directory, segment, size)

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "trim_segment", trim_segment)
        again = open_store(config)
    last = max(segment.number for segment in Inside(again).catalog.segments())
    assert last >= 3
    assert {*trimmed} == {last}, "the one that was being filled"
    assert abs(again.stats().used_bytes - physical_bytes(config.dirs)) <= SMALL
    again.close()
    with monkeypatch.context() as patch:
        for name in ("segment_bytes", "trim_segment"):
            patch.delattr(StoreDirectory, name)
        again = open_store(config)
    assert abs(again.stats().used_bytes - physical_bytes(config.dirs)) <= SMALL
    for first in range(0, 40, 8):
        read_keys(again, make_keys(first, 8))
