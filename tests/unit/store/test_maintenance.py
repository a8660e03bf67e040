"""Checking, tidying, clearing and mending a store while no server runs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.core.errors import StoreError, StoreFormatError, StoreIOError, StoreLockedError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.census import Files
from sglang_hcache.store.format.record import ExtentHeader, pack_header
from sglang_hcache.store.inspect.check import Finding, check
from sglang_hcache.store.inspect.maintenance import clear, collect
from sglang_hcache.store.inspect.rebuild import rebuild
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.saved import SavedState
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    find_extents,
    make_keys,
    make_run,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import CHUNKS, flip, keys_of, kill, save, served, state_of, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (8192, 5000, 4096)
RUNS = 6


@pytest.fixture
def closed(tmp_path: Path, open_store: OpenStore) -> StoreConfig:
    """A closed store of two directories with six runs in three segments; the first one was read and used last."""
    return filled(tmp_path, open_store)


def filled(base: Path, open_store: OpenStore, first: int = 0) -> StoreConfig:
    config = small_config(base, 2)
    store = open_store(config)
    for number in range(first, first + RUNS):
        write_keys(store, keys_of(number), LAYERS)
    read_keys(store, keys_of(first))
    store.touch(keys_of(first))
    assert store.stats().segments == 3
    store.close()
    return config


def findings(config: StoreConfig) -> list[Finding]:
    with StoreView.open(config.dirs) as view:
        return check(view)


def bad_superblock(_: Path, second: Path) -> None:
    (second / "superblock.json").write_text("{}")


def lost_superblock(_: Path, second: Path) -> None:
    (second / "superblock.json").unlink()


def replaced_disk(_: Path, second: Path) -> None:
    shutil.rmtree(second)
    second.mkdir(mode=0o700)


def missing_directory(_: Path, second: Path) -> None:
    shutil.rmtree(second)


def missing_file(_: Path, second: Path) -> None:
    (second / "segment-00000001.seg").unlink()


def short_file(_: Path, second: Path) -> None:
    os.truncate(second / "segment-00000001.seg", 4096)


def bad_header(_: Path, second: Path) -> None:
    flip(second / "segment-00000001.seg", 50)


def stray_segment(first: Path, _: Path) -> None:
    shutil.copy(first / "segment-00000001.seg", first / "segment-00000077.seg")


def temporary(_: Path, second: Path) -> None:
    for name in ("superblock.tmp", "state.tmp"):
        (second / name).touch(mode=0o600)


def bad_state(first: Path, _: Path) -> None:
    flip(first / "state.json", 100)


def stranger(first: Path, _: Path) -> None:
    (first / "thesis.tex").touch(mode=0o600)


Damage = Callable[[Path, Path], None]


@pytest.mark.parametrize(
    ("damage", "what", "fix"),
    [
        (bad_superblock, "disk1: its superblock is damaged", "fsck --rebuild"),
        (lost_superblock, "disk1: it has no superblock", "fsck --rebuild"),
        (replaced_disk, "disk1: it is empty", "fsck --rebuild"),
        (missing_directory, "disk1: it does not exist", "make an empty directory"),
        (missing_file, "disk1/segment-00000001.seg: is missing, 2 runs are lost", "gc"),
        (short_file, "disk1/segment-00000001.seg: ends after 4096 bytes, 2 runs are cut off", "gc"),
        (bad_header, "disk1/segment-00000001.seg: 1 run is without the header", "gc"),
        (stray_segment, "disk0: segments of no run: segment-00000077.seg", "gc"),
        (temporary, "disk1: left behind by a crash: state.tmp, superblock.tmp", "gc"),
        (bad_state, "disk0/state.json cannot be used: its digest does not match", "gc"),
        (stranger, "disk0: holds other files: thesis.tex", "move them"),
    ],
)
def test_each_fault_is_found_and_its_fix_works(
    closed: StoreConfig, open_store: OpenStore, damage: Damage, what: str, fix: str
) -> None:
    assert findings(closed) == []
    damage(*closed.dirs)
    [found] = findings(closed)
    assert what in found.what
    assert fix in found.fix
    assert found.is_error or damage in (stray_segment, temporary)
    if "make an empty" in fix:
        closed.dirs[1].mkdir(mode=0o700)
    if "rebuild" in found.fix:
        rebuild(closed.dirs)
    elif "gc" in fix:
        collect(closed.dirs)
    else:
        (closed.dirs[0] / "thesis.tex").unlink()
    assert findings(closed) == []
    lost = {replaced_disk: range(6), missing_directory: range(6), missing_file: (2, 3), short_file: (2, 3)}
    gone = lost.get(damage, (2,) if damage is bad_header else ())
    assert served(closed, open_store, RUNS) == [number for number in range(RUNS) if number not in gone]


def test_temporary_files_go_at_a_start_and_none_that_is_being_written(
    closed: StoreConfig, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's own thread writes its first state as soon as the store is open."""
    temporary(*closed.dirs)
    with monkeypatch.context() as patch:
        patch.setattr(SavedState, "save", lambda *_, **__: None)
        open_store(closed).close()
    assert findings(closed) == []
    is_writing, gone = threading.Event(), list[str]()
    rename, delete_leftovers = os.rename, DiskStore.delete_leftovers

    def rename_late(source: str, target: str, **where: int) -> None:
        is_writing.set()
        time.sleep(0.2)
        try:
            rename(source, target, **where)
        except FileNotFoundError:
            gone.append(source)
            raise

    def delete_meanwhile(store: DiskStore) -> None:
        assert is_writing.wait(10)
        delete_leftovers(store)

    monkeypatch.setattr(os, "rename", rename_late)
    monkeypatch.setattr(DiskStore, "delete_leftovers", delete_meanwhile)
    collect(closed.dirs)
    assert gone == []


@pytest.mark.parametrize(
    ("floor", "free", "said"),
    [
        (2**20, 2**20, ""),
        (2**20, 2**20 - 1, ": 1.0 MB free, less than the floor of 1.0 MB (--hcache-disk-free-floor)"),
        (0, 2**14, ""),
        (0, 0, ": 0 B free"),
    ],
)
def test_a_disk_without_room_is_a_note(
    tmp_path: Path,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    floor: int,
    free: int,
    said: str,
) -> None:
    """A server that can write nothing cannot write down either that it is read-only."""
    open_store(small_config(tmp_path, floor=floor)).close()
    monkeypatch.setattr(StoreDirectory, "free_bytes", lambda _: free)
    with StoreView.open([tmp_path / "disk0"]) as view:
        found = check(view)
    assert [(item.what, item.is_error) for item in found] == [(f"{tmp_path / 'disk0'}{said}", False)] * bool(
        said
    )


def test_what_a_kill_leaves_is_a_note_and_a_running_server_is_no_fault(
    closed: StoreConfig, open_store: OpenStore
) -> None:
    store = open_store(closed)
    write_keys(store, keys_of(9), LAYERS)
    for path in closed.dirs:
        (path / "probe.tmp").touch(mode=0o600)
    assert findings(closed) == []
    lost = closed.dirs[1] / "segment-00000001.seg"
    lost.rename(lost.with_name("away"))
    assert [item.what for item in findings(closed) if item.is_error and "away" not in item.what] == [
        f"{lost}: is missing, 2 runs are lost"
    ]
    lost.with_name("away").rename(lost)
    for path in closed.dirs:
        (path / "probe.tmp").unlink()
    Inside(store).space.close = lambda: None  # type: ignore[method-assign]  # as a kill: the last segment is not cut
    store.close()
    tails = [item for item in findings(closed) if "behind the last runs" in item.what]
    assert len(tails) == 2
    assert not any(item.is_error for item in tails)
    size = physical_bytes(closed.dirs)
    collect(closed.dirs)
    assert physical_bytes(closed.dirs) < size
    assert findings(closed) == []


def test_what_a_server_evicts_meanwhile_is_no_fault(
    closed: StoreConfig, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks of the view, and also if it is killed before it writes the next state."""
    store = open_store(closed)
    listed = Files.listed.__func__  # type: ignore[attr-defined]

    def evict_first(cls: type[Files], *args: Any) -> Files:
        assert store.evict_one()
        return listed(cls, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "listed", classmethod(evict_first))
        assert findings(closed) == []
    kill(store)
    assert store.evict_one()
    assert not [item for item in findings(closed) if item.is_error]


def test_what_is_killed_while_it_writes_a_run_is_no_fault(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of it is there: data, the header in one directory, and runs behind it that were written at once."""
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, keys_of(0), LAYERS)
    save(store)
    assert state_of(config.dirs[0]).segments[0].runs == 1
    run, after = (
        Inside(store).space.reserve(make_run(keys, LAYERS)) for keys in (keys_of(1), make_keys(900, 1))
    )
    del after
    for stripe in (0, 1):
        layer = next(layer for layer in range(3) if run.place.shape.stripe(layer) == stripe)
        header = pack_header(ExtentHeader(run.place, layer, (0,) * CHUNKS))
        with open(config.dirs[stripe] / "segment-00000000.seg", "r+b") as file:
            file.seek(run.place.offsets[stripe])
            file.write(header)
        kept = [item for item in findings(config) if item.is_error]
        assert not kept, stripe
        if stripe == 0:
            with StoreView.open(config.dirs) as view:
                assert len(view.runs()) == 1
    kill(store)
    with StoreView.open(config.dirs) as view:
        assert not [item for item in check(view) if item.is_error]
        assert not view.lost


def test_the_newest_superblock_counts(closed: StoreConfig, open_store: OpenStore) -> None:
    path = closed.dirs[1] / "superblock.json"
    block = json.loads(path.read_text())
    path.write_text(json.dumps({**block, "epoch": block["epoch"] + 1}))
    [found] = findings(closed)
    assert "disk0: its superblock is older" in found.what
    assert not found.is_error
    assert served(closed, open_store, RUNS) == list(range(RUNS))


def test_a_read_only_file_system(closed: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real_access, real_statvfs = os.access, os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        found = list(real_statvfs(path))
        found[8] |= os.ST_RDONLY if path == closed.dirs[0] else 0
        return os.statvfs_result(found)

    monkeypatch.setattr("os.statvfs", statvfs)
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK and real_access(path, mode))
    closed.dirs[0].chmod(0o500)
    with StoreView.open(closed.dirs) as view:
        assert len(view.runs()) == RUNS
        assert [item.condition for item in view.directories()] == ["read-only", "healthy"]
        assert any("disk0: is read-only" in item.what for item in check(view))
    with pytest.raises(StoreIOError, match="disk0: its file system is read-only"):
        collect(closed.dirs)


def test_what_a_start_would_refuse_for_its_owner_or_mode(
    closed: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed.dirs[1].chmod(0o775)
    with pytest.raises(StoreFormatError) as refusal:
        DiskStore.open(closed, Counters())
    [found] = findings(closed)
    assert (found.what, found.is_error) == (str(refusal.value), True)
    with StoreView.open(closed.dirs) as view:
        assert [item.reason for item in view.directories()] == ["", found.what]
    closed.dirs[1].chmod(0o700)
    assert not findings(closed)
    user = os.getuid()
    monkeypatch.setattr("os.geteuid", lambda: user + 1)
    assert [item.what.partition(";")[0] for item in findings(closed)] == [
        f"{path} belongs to user {user}, not to {user + 1}" for path in closed.dirs
    ]
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert not findings(closed), "root may look at anybody's"


# -- gc and clear --------------------------------------------------------------------------------


def test_gc_frees_strays_and_evicts_nothing(closed: StoreConfig, open_store: OpenStore) -> None:
    stray_segment(*closed.dirs)
    change = collect(closed.dirs[::-1])
    assert change.before.physical_bytes - change.after.physical_bytes > 50_000
    assert change.after.physical_bytes == physical_bytes(closed.dirs)
    assert "store.segments_evicted" not in change.counts
    assert served(closed, open_store, RUNS) == list(range(RUNS))


def test_gc_shrinks_to_a_size_by_what_was_not_used(closed: StoreConfig, open_store: OpenStore) -> None:
    full = physical_bytes(closed.dirs)
    change = collect(closed.dirs, full - 1)
    assert change.counts["store.segments_evicted"] == 1
    assert change.after.physical_bytes == physical_bytes(closed.dirs) < full
    assert served(closed, open_store, RUNS) == [0, 1, 4, 5]  # the first segment was used last
    change = collect(closed.dirs, 0)
    assert (change.after.runs, change.after.segment_files) == (0, 0)
    with StoreView.open(closed.dirs) as view:
        assert view.identity.size_bytes == closed.size_bytes  # a server's cap stays


def test_clear_removes_all_chunks_and_keeps_the_counts(closed: StoreConfig, open_store: OpenStore) -> None:
    change = clear(closed.dirs)
    assert (change.before.chunks, change.after.chunks, change.after.segment_files) == (24, 0, 0)
    assert served(closed, open_store, RUNS) == []
    with StoreView.open(closed.dirs) as view:
        assert (view.totals() or {})["chunks_written"] == 24


@pytest.mark.parametrize("operation", [collect, clear, rebuild])
def test_changes_are_refused_while_a_server_runs(
    closed: StoreConfig, open_store: OpenStore, operation: Callable[[tuple[Path, ...]], object]
) -> None:
    store = open_store(replace(closed, retry_s=60.0))
    Inside(store).volumes[1].health.failed(OSError(errno.ENOSPC, "no space"), writing=True)
    wait_until(lambda: "is read-only: no space" in str(findings(closed)))
    with pytest.raises(StoreLockedError, match=f"in use by process {os.getpid()}"):
        operation(closed.dirs)
    assert store.stats().runs == RUNS


@pytest.mark.parametrize("number", [0, 1])
def test_clear_does_without_a_directory_that_is_away(
    closed: StoreConfig, open_store: OpenStore, number: int
) -> None:
    missing = closed.dirs[number]
    away = missing.rename(missing.with_name("away"))
    files = list(away.glob("*.seg"))
    assert files
    change = clear(closed.dirs)
    assert not missing.exists()
    assert [item.condition for item in change.after.directories if item.path == missing] == ["out"]
    assert not list(closed.dirs[1 - number].glob("*.seg"))
    assert served(closed, open_store, RUNS) == [], "a server without it"
    shutil.rmtree(missing, ignore_errors=True)  # which that server has made
    away.rename(missing)
    with StoreView.open(closed.dirs) as view:
        assert view.runs() == []
    store = open_store(closed)
    assert not list(missing.glob("*.seg"))
    write_keys(store, keys_of(3), LAYERS)
    store.close()
    assert served(closed, open_store, RUNS) == [3]


def test_clear_takes_no_other_directory_in(
    closed: StoreConfig, open_store: OpenStore, tmp_path: Path
) -> None:
    """Where one is named that is not the store's: else the right one could not come back."""
    wrong = tmp_path / "wrong"
    wrong.mkdir(mode=0o700)
    clear((closed.dirs[0], wrong))
    assert not list(wrong.iterdir())
    assert served(closed, open_store, RUNS) == []
    assert not list(closed.dirs[1].glob("*.seg"))


def test_what_is_cleared_without_any_directory_is_not_cleared_for_good(
    closed: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(StoreDirectory, "write_superblock", read_only)
    with pytest.raises(
        StoreIOError, match=r"no directory takes the note .*disk1 is read-only: Read-only file"
    ):
        clear(closed.dirs)


@pytest.mark.parametrize("operation", [collect, rebuild])
def test_a_directory_that_is_away_is_neither_made_nor_forgotten(
    closed: StoreConfig, open_store: OpenStore, operation: Callable[[tuple[Path, ...]], object]
) -> None:
    away = closed.dirs[1].rename(closed.dirs[1].with_name("away"))
    with pytest.raises(StoreIOError, match="disk1: it does not exist"):
        operation(closed.dirs)
    assert not closed.dirs[1].exists()
    away.rename(closed.dirs[1])
    assert served(closed, open_store, RUNS) == list(range(RUNS))


# -- rebuilding ----------------------------------------------------------------------------------


def test_rebuild_without_any_superblock_finds_the_places_by_the_headers(
    closed: StoreConfig, open_store: OpenStore
) -> None:
    for path in closed.dirs:
        (path / "superblock.json").unlink()
    done = rebuild(closed.dirs[::-1])
    assert "6 runs with 24 chunks" in done[-1]
    with StoreView.open(closed.dirs) as view:
        assert view.paths == closed.dirs
        assert view.directories()[0].physical_bytes < view.identity.size_bytes
    assert served(closed, open_store, RUNS) == list(range(RUNS))


def other_store(base: Path, open_store: OpenStore) -> Path:
    other = filled(base / "other", open_store, first=100)
    (other.dirs[1] / "superblock.json").unlink()
    return other.dirs[1]


def unreadable_segments(base: Path, _: OpenStore) -> Path:
    path = base / "garbage"
    path.mkdir(mode=0o700)
    (path / "segment-00000000.seg").write_bytes(b"?" * 10_000)
    return path


def somebodys_files(base: Path, _: OpenStore) -> Path:
    path = base / "home"
    path.mkdir(mode=0o700)
    (path / "thesis.tex").touch()
    return path


def same_part(base: Path, _: OpenStore) -> Path:
    path = base / "copy"
    shutil.copytree(base / "disk0", path)
    (path / "superblock.json").unlink()
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_store, "segments of another store"),
        (unreadable_segments, "without a readable header"),
        (somebodys_files, "holds other files"),
        (same_part, "the same part"),
    ],
)
def test_rebuild_takes_in_nothing_that_is_not_of_the_store(
    tmp_path: Path,
    closed: StoreConfig,
    open_store: OpenStore,
    make: Callable[[Path, OpenStore], Path],
    message: str,
) -> None:
    wrong = make(tmp_path, open_store)
    names = {path.name for path in wrong.iterdir()}
    before = {path: path.read_bytes() for path in closed.dirs[0].iterdir() if path.name != "lock"}
    with pytest.raises(StoreFormatError, match=message):
        rebuild((closed.dirs[0], wrong))
    assert {path: path.read_bytes() for path in closed.dirs[0].iterdir() if path.name != "lock"} == before
    assert {path.name for path in wrong.iterdir()} - {"lock"} == names - {"lock"}
    assert served(closed, open_store, RUNS) == list(range(RUNS))


def test_rebuild_keeps_what_is_complete_and_starts_the_counts_again(
    closed: StoreConfig, open_store: OpenStore
) -> None:
    path, offset, _ = find_extents(closed.dirs[0])[-1]
    flip(path, offset + 10)
    rebuild(closed.dirs)
    with StoreView.open(closed.dirs) as view:
        assert len(view.runs()) == RUNS - 1
        assert (view.totals() or {}).get("chunks_written", 0) == 0
        assert (
            json.loads((closed.dirs[1] / "superblock.json").read_text())["epoch"] == view.identity.epoch > 0
        )
    assert len(served(closed, open_store, RUNS)) == RUNS - 1


def test_what_one_directory_cleared_stays_cleared_whatever_the_newest_superblock_says(
    closed: StoreConfig, open_store: OpenStore
) -> None:
    """Each was used without the other."""
    for path, changes in zip(closed.dirs, ({"epoch": 50, "first_segment": 2}, {"epoch": 60}), strict=True):
        place = path / "superblock.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), **changes}))
    with StoreView.open(closed.dirs) as view:
        assert {run.place.segment for run in view.runs()} == {2}
    rebuild(closed.dirs)
    assert served(closed, open_store, RUNS) == [4, 5]


def test_rebuild_needs_something_to_go_by(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="neither a readable superblock nor a segment"):
        rebuild((tmp_path / "empty",))
    assert not list((tmp_path / "empty").iterdir())
    (tmp_path / "empty" / "segment-00000000.seg").write_bytes(bytes(8192))
    with pytest.raises(StoreError, match=r"no segment in .* has a readable header"):
        rebuild((tmp_path / "empty",))
