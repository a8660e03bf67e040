"""Files that cannot be deleted: how many are tried, for how long eviction stops for them, and what the log says."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreIOError
from sglang_hcache.store import DiskStore, removal
from sglang_hcache.store.inspect.maintenance import collect
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, small_config, write_keys

OpenStore = Callable[..., DiskStore]
MIB = 2**20
LAYERS = (64 * 1024,) * 2


class Files:
    """Which segments cannot be deleted, why, and which were tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: Callable[[int], bool] = lambda segment: False
        self.number = errno.EPERM
        self.tried: list[int] = []
        unlink = StoreDirectory.unlink_segment

        def refuse(directory: StoreDirectory, segment: int) -> None:
            self.tried.append(segment)
            if self.kept(segment):
                raise OSError(self.number, os.strerror(self.number))
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
    now += 601
    assert not evict(store)
    assert set(files.tried) == {0, 1, 2, 3}, "one at a time"
    now += 599
    assert not evict(store)
    assert set(files.tried) == {0, 1, 2, 3}
    now += 2
    assert not evict(store)
    [line] = [record.message for record in caplog.records if "eviction stopped" in record.message]
    assert line.startswith(f"hcache: eviction stopped in {path}: 3 files cannot be deleted (")
    assert "Operation not permitted); until one can, another one is tried every 600 s" in line
    now += 601
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


@pytest.mark.usefixtures("no_keeper")
def test_thousands_of_them_are_no_more_than_three(store: DiskStore, files: Files) -> None:
    """A file system that has become read-only, and a clear call."""
    remover = Inside(store).space._remover
    files.kept = lambda segment: True
    store.clear()
    assert len(Inside(store).leftovers) == 16
    files.kept = lambda segment: False
    remover.retry()
    assert not Inside(store).leftovers


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO])
def test_gc_to_a_size_stops_where_files_cannot_be_deleted(
    store: DiskStore, files: Files, number: int
) -> None:
    """It would cost all chunks, and free nothing."""
    dirs = [volume.path for volume in Inside(store).volumes]
    store.close()
    files.kept, files.number = lambda segment: True, number
    for _ in range(2):
        match = rf"files cannot be deleted: {dirs[0]}/segment-\d+\.seg and 2 more; .*: 13 segments stay$"
        with pytest.raises(StoreIOError, match=match):
            collect(dirs, 0)
        with StoreView.open(dirs) as view:
            assert len(view.runs()) == 16, "they are there"
    files.kept = lambda segment: segment > 14
    with pytest.raises(StoreIOError, match=rf"files cannot be deleted: {dirs[0]}/segment-00000015\.seg$"):
        collect(dirs, 0)
    files.kept = lambda segment: False
    assert collect(dirs, 0).after.segment_files == 0


@pytest.fixture
def striped(tmp_path: Path, open_store: OpenStore) -> DiskStore:
    """Several segments with a file in each of two directories."""
    opened = open_store(small_config(tmp_path, 2, size=32 * MIB, segment=MIB))
    for number in range(8):
        write_keys(opened, make_keys(10 * number, 6), LAYERS)
    return opened


@pytest.mark.usefixtures("no_keeper")
def test_what_is_gone_is_not_deleted_again_while_another_directory_is_out(
    striped: DiskStore, files: Files
) -> None:
    inside = Inside(striped)
    inside.volumes[1].health.take_out("gone for days")
    assert striped.evict_one()
    assert striped.evict_one()
    assert len(files.tried) == 2
    for _ in range(3):
        inside.space.tend()
    assert len(files.tried) == 2, "each round would ask for each file of each of thousands of segments"
    assert len(inside.leftovers) == 2, "they count until they are gone everywhere"
    inside.volumes[1].health.recover(inside.volumes[1].health.condition)
    inside.space.tend()
    assert len(files.tried) == 4
    assert not inside.leftovers
    assert not any((volume.path / "segment-00000000.seg").exists() for volume in inside.volumes)


@pytest.mark.usefixtures("no_keeper")
def test_a_round_deletes_for_a_moment_and_nothing_is_evicted_before_the_rest(
    striped: DiskStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Inside(striped)
    inside.volumes[1].health.take_out("gone for days")
    for _ in range(3):
        assert striped.evict_one()
    inside.volumes[1].health.recover(inside.volumes[1].health.condition)
    monkeypatch.setattr(removal, "_RETRY_S", -1.0)
    inside.space._remover.retry()
    assert len(inside.leftovers) == 2
    segments = striped.stats().segments
    assert evict(striped)
    assert evict(striped)
    assert striped.stats().segments == segments
    assert not inside.leftovers
    assert evict(striped)
    assert striped.stats().segments == segments - 1
