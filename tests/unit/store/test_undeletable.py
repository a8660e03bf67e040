"""Files that cannot be deleted: how many are tried, for how long eviction stops for them, and what the log says."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.store import DiskStore, removal
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, small_config, write_keys

OpenStore = Callable[..., DiskStore]
MIB = 2**20
LAYERS = (64 * 1024,) * 2


class Files:
    """Which segments cannot be deleted, and which were tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: Callable[[int], bool] = lambda segment: False
        self.tried: list[int] = []
        unlink = StoreDirectory.unlink_segment

        def refuse(directory: StoreDirectory, segment: int) -> None:
            self.tried.append(segment)
            if self.kept(segment):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            unlink(directory, segment)

        monkeypatch.setattr(StoreDirectory, "unlink_segment", refuse)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(monkeypatch)


@pytest.fixture
def store(tmp_path: Path, open_store: OpenStore) -> DiskStore:
    """Sixteen segments, all but the last one of which may be evicted."""
    opened = open_store(small_config(tmp_path, size=32 * MIB, segment=MIB))
    for number in range(16):
        write_keys(opened, make_keys(10 * number, 6), LAYERS)
    assert opened.stats().segments == 16
    return opened


def evict(store: DiskStore) -> bool:
    space = Inside(store).space
    with space._lock:
        return space._eviction._evict_to_gain()


@pytest.mark.usefixtures("no_keeper")
def test_some_files_among_many_stop_nothing(store: DiskStore, files: Files) -> None:
    files.kept = lambda segment: segment % 3 != 0
    assert all(evict(store) for _ in range(5))
    assert Inside(store).space._remover.stopped() == 0
    assert len(Inside(store).leftovers) == 8


@pytest.mark.usefixtures("no_keeper")
def test_three_in_a_row_stop_eviction_for_a_while(
    store: DiskStore, files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(removal.time, "monotonic", lambda: now)
    files.kept = lambda segment: segment < 5
    for _ in range(4):
        assert not evict(store)
        Inside(store).space._remover.retry()
    assert set(files.tried) == {0, 1, 2}, "what is tried again is not counted again"
    path = Inside(store).volumes[0].path
    [line] = [record.message for record in caplog.records if "eviction stopped" in record.message]
    assert line == (
        f"hcache: eviction stopped in {path}: 3 files cannot be deleted (EPERM); another one is tried in 60 s"
    )
    now += 61
    assert not evict(store)
    assert set(files.tried) == {0, 1, 2, 3}, "one at a time"
    now += 61
    assert not evict(store)
    assert set(files.tried) == {0, 1, 2, 3}, "slower each time"
    now += 61
    assert not evict(store)
    now += 241
    assert evict(store)
    assert set(files.tried) == {0, 1, 2, 3, 4, 5}
    assert evict(store), "one that went ends it"
    files.kept = lambda segment: True
    assert not evict(store)
    assert len(set(files.tried)) == 10, "three more"
    files.kept = lambda segment: False
    Inside(store).space._remover.retry()
    assert evict(store), "as does an older one that goes at last"
    assert not Inside(store).leftovers
