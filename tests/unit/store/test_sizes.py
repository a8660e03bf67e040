"""What a store takes, and what it costs to know that."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.store import DiskStore
from sglang_hcache.store.volumes import directory as plain_directory
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, physical_bytes, read_keys, small_config, write_keys

OpenStore = Callable[..., DiskStore]
SIZES = (4096, 4096)
AT_ONCE = 4 * 128
"""Files that are asked for their size in one round of the keeper."""
INDEX_BYTES = 2**18
"""By so much the index may grow meanwhile."""


@pytest.mark.usefixtures("no_keeper")
def test_a_round_does_not_cost_more_with_more_files(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), SIZES)
    others = 3 * AT_ONCE
    for number in range(others):
        (config.dirs[0] / f"other-{number}").write_bytes(b"1")
    asked: list[str] = []
    blocks = plain_directory._blocks

    def note(entry: os.DirEntry[str]) -> int:
        asked.append(entry.name)
        return blocks(entry)

    monkeypatch.setattr(plain_directory, "_blocks", note)
    before = store.last_stats.physical_bytes
    for turn in range(1, 4):
        Inside(store).keeper.round()
        assert len(asked) <= turn * AT_ONCE
        assert store.last_stats.physical_bytes == before, "until all were asked"
    Inside(store).keeper.round()
    assert len(set(asked)) == len(asked) > others
    found = store.last_stats.physical_bytes
    assert abs(found - physical_bytes(config.dirs)) <= INDEX_BYTES < found - before


@pytest.mark.usefixtures("no_keeper")
def test_where_asking_fails_it_begins_anew(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    for number in range(2 * AT_ONCE):
        (config.dirs[0] / f"other-{number}").write_bytes(b"1")
    Inside(store).keeper.round()

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "sick")

    with monkeypatch.context() as patch:
        patch.setattr(plain_directory, "_blocks", fail)
        Inside(store).keeper.round()
    for _ in range(3):
        Inside(store).keeper.round()
    assert abs(store.last_stats.physical_bytes - physical_bytes(config.dirs)) <= INDEX_BYTES


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("at_start", [False, True])
def test_a_directory_that_is_out_still_takes_what_it_took(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    config = replace(small_config(tmp_path, 2, segment=2**20), retry_s=60.0)
    store = open_store(config)
    write_keys(store, make_keys(0, 8), (2**15,) * 4)
    store.close()
    store = open_store(config)
    well = store.stats()
    acquire = StoreDirectory.acquire

    def sick(self: StoreDirectory) -> None:
        if self.path == config.dirs[1]:
            raise OSError(errno.EIO, "sick")
        acquire(self)

    if at_start:
        store.close()
        monkeypatch.setattr(StoreDirectory, "acquire", sick)
        store = open_store(config)
    else:
        Inside(store).volumes[1].health.take_out("sick")
        Inside(store).keeper.round()
    found = store.last_stats
    assert found.directories[1].condition == "out"
    taken: Any = [item.physical_bytes for item in found.directories]
    assert taken[1] >= 2**19, "the chunks that lie there"
    assert abs(taken[1] - well.directories[1].physical_bytes) < 2**17
    assert sum(taken) == found.physical_bytes <= found.reserved_bytes


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
