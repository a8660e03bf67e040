"""What files count against the cap that a start cannot ask, for their directory is out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    match_keys,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import kill, sick, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (8192,) * 4
MIB = 2**20
RUNS = 12


def keys_of(run: int) -> tuple[bytes, ...]:
    return make_keys(10 * run, 6)


def small_segments(tmp_path: Path) -> StoreConfig:
    """Of about one run each."""
    return small_config(tmp_path, 2, segment=MIB // 4)


def stored(config: StoreConfig, open_store: OpenStore) -> DiskStore:
    store = open_store(config)
    for run in range(RUNS):
        write_keys(store, keys_of(run), LAYERS)
    assert Inside(store).catalog.counts().segments == RUNS
    return store


def test_a_larger_segment_size_is_not_taken_for_that_of_older_segments(
    tmp_path: Path, open_store: OpenStore, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_segments(tmp_path)
    stored(config, open_store).close()
    with monkeypatch.context() as patch:
        sick({"disk1"}, patch)
        store = open_store(replace(config, segment_bytes=4 * MIB))
        assert counters["store.segments_evicted"] == 0
    wait_until(lambda: match_keys(store, keys_of(0)) == 6)
    for run in range(RUNS):
        read_keys(store, keys_of(run))


@pytest.mark.usefixtures("no_keeper")
def test_a_segment_that_was_being_filled_counts_in_full(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the segment size is now: its files are as long as they were made, all of them."""
    config = replace(small_segments(tmp_path), segment_bytes=4 * MIB)
    store = open_store(config)
    write_keys(store, keys_of(0), LAYERS)
    kill(store)
    sick({"disk1"}, monkeypatch)
    store = open_store(replace(config, segment_bytes=MIB // 4))
    assert physical_bytes(config.dirs[1:]) > 2 * MIB
    assert sum(item.accounted[1] for item in Inside(store).catalog.segments()) > 2 * MIB
