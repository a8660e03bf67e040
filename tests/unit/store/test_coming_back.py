"""A directory that was out is taken in again while something else is wrong."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.core.errors import StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, reconciler, removal
from sglang_hcache.store.config import FILE_SLACK_BYTES
from sglang_hcache.store.io import probing
from sglang_hcache.store.reader import LayerReader, SliceFailure
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.files import SegmentFile
from sglang_hcache.store.volumes.health import Condition, Health
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import conditions, is_healthy, kill, sick, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (8192, 5000)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("was_out", [True, False])
def test_a_disk_that_became_full_meanwhile_is_read_and_shrinks(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, was_out: bool, number: int
) -> None:
    store = open_store(small_config(tmp_path))
    runs = [make_keys(20 * index, 20) for index in range(6)]
    for keys in runs:
        write_keys(store, keys, (4096, 4096))
    gone: list[int] = []
    probe, unlink = StoreDirectory.probe, StoreDirectory.unlink_segment

    def full_until_some_went(self: StoreDirectory) -> None:
        if len(gone) < 2:
            raise OSError(number, "full")
        probe(self)

    def note(self: StoreDirectory, segment: int) -> None:
        unlink(self, segment)
        gone.append(segment)

    monkeypatch.setattr(StoreDirectory, "probe", full_until_some_went)
    monkeypatch.setattr(StoreDirectory, "unlink_segment", note)
    health = Inside(store).volumes[0].health
    if was_out:
        health.take_out("a read took long")
        wait_until(lambda: health.readable)
    else:
        for _ in range(3):
            health.failed(OSError(errno.EIO, "bad"), writing=True)
        assert not health.can_delete
    wait_until(lambda: health.writable)
    assert len(gone) == 2, "no more than it takes"
    kept = [keys for keys in runs if match_keys(store, keys)]
    assert len(kept) == 4
    for keys in kept:
        read_keys(store, keys)
    write_keys(store, make_keys(1000, 2), LAYERS)


@pytest.mark.usefixtures("no_keeper")
def test_a_disk_that_was_mounted_read_only_meanwhile_is_read(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(small_config(tmp_path, 2))
    inside, keys = Inside(store), make_keys(0, 20)
    write_keys(store, keys, (4096, 4096))
    refusing, probe = set(inside.volumes), StoreDirectory.probe

    def read_only(self: StoreDirectory) -> None:
        if any(volume.directory is self for volume in refusing):
            raise OSError(errno.EROFS, "read-only")
        probe(self)

    def retry() -> None:
        inside.retry_now()
        inside.keeper.round()

    monkeypatch.setattr(StoreDirectory, "probe", read_only)
    for volume in inside.volumes:
        volume.health.take_out("a read took long")
    for _ in range(2):
        retry()
        assert conditions(store) == ["read-only", "read-only"]
        assert not any(volume.health.can_delete for volume in inside.volumes)
        read_keys(store, keys)
    refusing.clear()
    retry()
    assert is_healthy(store)
    write_keys(store, make_keys(1000, 2), LAYERS)
    read_keys(store, keys)


def started_without_all_runs(
    config: StoreConfig, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int]
) -> tuple[DiskStore, set[str], tuple[bytes, ...]]:
    """A start without disk1, where a run lies alone; the directories that are sick, and the run's keys."""
    names = {"disk0"}
    open_store(config).close()
    sick(names, monkeypatch)
    store = open_store(config)
    alone = make_keys(0, 4)
    write_keys(store, alone, sizes)
    store.close()
    names.symmetric_difference_update(("disk0", "disk1"))
    return open_store(config), names, alone


def test_a_full_disk_that_cannot_be_read_either_stays_out(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(small_config(tmp_path))
    write_keys(store, make_keys(0, 20), (4096, 4096))
    tried: list[Path] = []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    def unreadable(path: Path, _flags: int) -> None:
        tried.append(path)
        raise OSError(errno.EIO, "bad")

    monkeypatch.setattr(StoreDirectory, "probe", full)
    monkeypatch.setattr(probing, "_read_block", unreadable)
    health = Inside(store).volumes[0].health
    health.take_out("for a test")
    wait_until(lambda: len(tried) > 1)
    assert (health.condition, health.reason) == (Condition.OUT, "bad")
    assert Inside(store).catalog.segments(), "nothing is given up for it"


def test_on_a_full_disk_what_another_thread_finds_meanwhile_counts(tmp_path: Path) -> None:
    health = Health(tmp_path, Counters(), 0.01)
    health.failed(OSError(errno.ENOSPC, "full"), writing=True)
    seen = health.condition
    health.take_out("it hangs")
    health.mark_read_only(OSError(errno.ENOSPC, "full"), seen)
    assert (health.condition, health.reason) == (Condition.OUT, "it hangs")


@pytest.mark.parametrize("is_out", [True, False])
def test_a_probe_that_went_well_does_not_overrule_what_began_to_hang_meanwhile(
    tmp_path: Path, is_out: bool
) -> None:
    """What is on a disk that takes no writes is read while the keeper probes it."""
    health = Health(tmp_path, Counters(), 0.0)
    health.failed(OSError(errno.EROFS, "read-only"), writing=True)
    seen = health.condition
    health.hangs()
    if is_out:
        health.failed(OSError(errno.ETIMEDOUT, "late"), writing=False)
    before = health.condition
    health.recover(seen)
    assert (health.condition, before) == (before, Condition.OUT if is_out else Condition.READ_ONLY)
    health.returned()
    assert health.is_due(), "then it is probed again"
    health.recover(before)
    assert health.writable


@pytest.mark.usefixtures("no_keeper")
def test_files_of_no_segment_go_when_the_directory_is_in_use_again_a_moment_in_each_round(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands, and nothing can be stored or cleared while they are deleted."""
    monkeypatch.setattr(removal, "_RETRY_S", -1.0)
    store = open_store(small_config(tmp_path))
    inside = Inside(store)
    (volume,) = inside.volumes
    inside.space._next_number = 10
    store.clear()  # lower numbers are of no use
    strays = [volume.directory.segment_path(number) for number in (7, 8, 9)]
    for path in strays:
        path.write_bytes(bytes(8192))
    volume.health.take_out("the test says so")
    inside.retry_now()
    before = inside.space.used_bytes()
    for left in (2, 1, 0):
        inside.keeper.round()
        assert is_healthy(store)
        assert sum(path.exists() for path in strays) == len(inside.leftovers) == left
        assert inside.space.used_bytes() - before == left * (8192 + FILE_SLACK_BYTES)
    write_keys(store, make_keys(0, 2), LAYERS)
    assert max(volume.segment_sizes()) > 9


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("refusal", [0, errno.ENOSPC])
def test_a_directory_with_thousands_of_files_has_as_much_time_to_list_them_as_at_start(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """Each is asked for its size, which takes longer than one operation may on a disk that is busy."""
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 20)
    write_keys(store, keys, (4096, 4096))
    inside = Inside(store)
    (volume,) = inside.volumes
    volume.patience_s = 2.0
    listed, probe = StoreDirectory.segment_files, StoreDirectory.probe

    def list_slowly(self: StoreDirectory) -> dict[int, SegmentFile]:
        time.sleep(3.0)
        return listed(self)

    def refuse(self: StoreDirectory) -> None:
        if refusal:
            raise OSError(refusal, os.strerror(refusal))
        probe(self)

    monkeypatch.setattr(StoreDirectory, "segment_files", list_slowly)
    monkeypatch.setattr(StoreDirectory, "probe", refuse)
    volume.health.take_out("the test says so")
    inside.retry_now()
    inside.keeper.round()
    assert conditions(store) == ["read-only" if refusal else "healthy"]
    read_keys(store, keys)


@pytest.mark.usefixtures("no_keeper")
def test_what_could_not_be_read_while_a_directory_was_away_is_not_forgotten_when_it_is_back_at_once(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is judged when all of its batch has ended, which may take seconds."""
    config = small_config(tmp_path)
    store = open_store(config)
    keys = make_keys(0, 2)
    write_keys(store, keys, LAYERS)
    folder, read = config.dirs[0], LayerReader.read

    def read_slowly(self: LayerReader, *arguments: Any) -> list[SliceFailure]:
        folder.rename(tmp_path / "unmounted")
        failures = read(self, *arguments)
        (tmp_path / "unmounted").rename(folder)
        Inside(store).retry_now()
        Inside(store).keeper.round()
        assert is_healthy(store)
        return failures

    with monkeypatch.context() as patch:
        patch.setattr(LayerReader, "read", read_slowly)
        with pytest.raises(StoreIOError, match="is out: the directory was deleted or unmounted"):
            read_keys(store, keys)
    read_keys(store, keys)


def test_what_is_stored_after_it_failed_again_does_not_count_as_cleared(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    open_store(config).close()
    names = {"disk0"}
    sick(names, monkeypatch)
    store = open_store(config)
    for index in range(5):
        write_keys(store, make_keys(10 * index, 2), LAYERS)
        store.clear()  # only disk1 knows
    store.close()
    names.symmetric_difference_update(("disk0", "disk1"))
    store = open_store(config)
    write_keys(store, make_keys(100, 2), LAYERS)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "again")

    healthy = reconciler.compare
    monkeypatch.setattr(reconciler, "compare", fail)
    names.clear()
    volume = Inside(store).volumes[1]
    wait_until(lambda: volume.health.reason == "again")
    later = make_keys(200, 2)
    write_keys(store, later, LAYERS)
    store.close()
    monkeypatch.setattr(reconciler, "compare", healthy)
    store = open_store(config)
    assert match_keys(store, later) == 2
    read_keys(store, later)


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_lies_only_in_a_directory_that_was_out_at_start_is_served_from_the_next_start_on(
    tmp_path: Path,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    counters: Counters,
    is_killed: bool,
) -> None:
    config = small_config(tmp_path, 2)
    store, names, alone = started_without_all_runs(config, open_store, monkeypatch, (4096,))
    assert match_keys(store, alone) == 0
    later = make_keys(100, 2)
    write_keys(store, later, LAYERS)
    names.clear()
    wait_until(lambda: is_healthy(store))
    read_keys(store, later)
    assert Inside(store).space.used_bytes() >= sum(
        path.stat().st_size for folder in config.dirs for path in folder.glob("*.seg")
    )
    if is_killed:
        kill(store)
    else:
        store.close()
    store = open_store(config)
    read_keys(store, alone)
    read_keys(store, later)
    assert counters["store.runs_lost"] == 0
