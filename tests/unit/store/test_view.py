"""A store seen without its lock: what is in it, and what is wrong with its bytes."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.errors import CorruptExtentError, StoreFormatError
from sglang_hcache.store import DiskStore, Run, StoreConfig
from sglang_hcache.store.census import Contents, Files
from sglang_hcache.store.format.superblock import Superblock
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.verify import Verification
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.io.engine import Batch, IOResult
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.volume import Volume
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    find_extents,
    make_keys,
    payload_of,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import CHUNKS, flip, keys_of, save, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (8192, 5000, 4096)
RUNS = 6


@pytest.fixture
def closed(tmp_path: Path, open_store: OpenStore) -> StoreConfig:
    """A closed store of two directories: six runs of two namespaces, in several segments."""
    config = small_config(tmp_path, 2)
    store = open_store(config)
    for number in range(RUNS):
        run = Run(bytes([number // 3]) * 16, keys_of(number), 4 * number, LAYERS)
        store.write_run(run, payload_of(run))
    read_keys(store, keys_of(0))
    store.touch(keys_of(0))
    store.close()
    return config


def contents(config: StoreConfig) -> dict[Path, bytes]:
    return {path: path.read_bytes() for directory in config.dirs for path in directory.iterdir()}


def verified(view: StoreView) -> Verification:
    verification = Verification(view)
    steps = list(verification.steps())
    assert sum(steps) == verification.total_bytes
    return verification


# -- looking -------------------------------------------------------------------------------------


def test_a_closed_store_is_shown_as_it_was_and_stays_as_it_is(closed: StoreConfig) -> None:
    before = contents(closed)
    with StoreView.open(closed.dirs[::-1]) as view:
        directories = view.directories()
        assert view.paths == closed.dirs
        assert view.lock_holder is None
        assert [run.place.keys for run in view.runs()] == [keys_of(number) for number in range(RUNS)]
        assert all(run.is_available and not run.quarantined for run in view.runs())
        assert view.chunks() == RUNS * CHUNKS
        totals = view.totals()
        written = view.written_today_bytes()
        spaces = {item.namespace_id[0]: item for item in view.namespaces()}
    assert contents(closed) == before
    assert totals is not None
    assert (totals["chunks_written"], totals["chunks_read"]) == (RUNS * CHUNKS, 2 * CHUNKS)
    assert written == sum(run.disk_bytes for run in view.runs()) > RUNS * CHUNKS * sum(LAYERS)
    assert [item.condition for item in directories] == ["healthy", "healthy"]
    assert sum(item.physical_bytes for item in directories) == physical_bytes(closed.dirs)
    assert all(item.free_bytes > 0 and item.segments >= 2 for item in directories)
    assert [(spaces[name].runs, spaces[name].chunks) for name in (0, 1)] == [(3, 12), (3, 12)]
    assert abs((spaces[0].written_at or 0) - time.time()) < 60


def test_beside_a_server_its_process_and_its_view_of_the_directories(
    tmp_path: Path, open_store: OpenStore
) -> None:
    config = replace(small_config(tmp_path, 2), retry_s=60.0)  # so that it stays as it is
    store = open_store(config)
    write_keys(store, keys_of(0), LAYERS)
    Inside(store).volumes[1].health.failed(OSError(errno.ENOSPC, "no space"), writing=True)
    wait_until(lambda: "read-only" in json.dumps(dict(StoreView.open(config.dirs).state.meta)))
    with StoreView.open(config.dirs) as view:
        assert view.lock_holder is not None
        assert view.lock_holder.pid == str(os.getpid())
        assert [run.place.keys for run in view.runs()] == [keys_of(0)]
        assert [(item.condition, item.reason) for item in view.directories()] == [
            ("healthy", ""),
            ("read-only", "no space"),
        ]
    read_keys(store, keys_of(0))
    store.close()
    with StoreView.open(config.dirs) as view:  # what that server thought is over
        assert [item.condition for item in view.directories()] == ["healthy", "healthy"]


@pytest.mark.usefixtures("no_keeper")
def test_why_a_healthy_directory_takes_nothing_is_shown_as_long_as_its_server_runs(
    tmp_path: Path, open_store: OpenStore
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    Inside(store).saved.save_everywhere({"directories": [["healthy", "nothing new is stored", 0, 0]]})
    with StoreView.open(config.dirs) as view:
        assert [(item.condition, item.reason) for item in view.directories()] == [
            ("healthy", "nothing new is stored")
        ]
    store.close()
    with StoreView.open(config.dirs) as view:
        assert [item.reason for item in view.directories()] == [""]


@pytest.mark.usefixtures("no_keeper")
def test_health_that_makes_no_sense_is_not_shown(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    for told in ("x", {}, [[]], [["ill", "", 0, 0]], [["out", ""]], 7):
        Inside(store).saved.save_everywhere({"directories": told})
        with StoreView.open(config.dirs) as view:
            assert [item.condition for item in view.directories()] == ["healthy"]


def test_a_chunk_written_twice_counts_once_and_a_quarantined_one_not(
    tmp_path: Path, open_store: OpenStore
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, make_keys(0, 4), LAYERS)
    write_keys(store, make_keys(2, 4), LAYERS)
    path, offset, header = find_extents(config.dirs[0])[-1]
    flip(path, offset + 4096 + header.chunk_bytes * 3)
    with pytest.raises(CorruptExtentError):
        read_keys(store, make_keys(2, 4))
    store.close()
    with StoreView.open(config.dirs) as view:
        assert view.chunks() == 5
        [bad] = [run for run in view.runs() if run.quarantined]
        assert list(bad.quarantined) == [3]
        assert "digest" in bad.quarantined[3]


@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_without_a_state_the_runs_are_the_same(closed: StoreConfig, damage: str) -> None:
    with StoreView.open(closed.dirs) as view:
        expected = view.places
    for folder in closed.dirs:
        (folder / "state.json").unlink()
        if damage == "garbage":
            (folder / "state.json").write_bytes(b"no state " * 1000)
    with StoreView.open(closed.dirs) as view:
        assert view.places == expected
        assert view.totals() is None
        assert view.written_today_bytes() is None
        assert verified(view).damages == []


def test_what_was_cleared_is_not_shown(closed: StoreConfig) -> None:
    """As if the clearing could not delete: segments below ``first_segment`` count as gone."""
    for stripe, path in enumerate(closed.dirs):
        directory = StoreDirectory(path)
        directory.acquire()
        block = directory.read_superblock()
        assert block is not None
        directory.write_superblock(Superblock(block.identity.next(first_segment=2), stripe))
        directory.lock.release()
    with StoreView.open(closed.dirs) as view:
        assert min(run.place.segment for run in view.runs()) == 2
        assert not view.lost


@pytest.mark.parametrize("kind", ["missing", "empty", "damaged superblock", "file"])
def test_a_sick_directory_is_reported_and_its_runs_are_unavailable(closed: StoreConfig, kind: str) -> None:
    away = closed.dirs[1]
    if kind == "damaged superblock":
        (away / "superblock.json").write_text("{")
    else:
        away.rename(away.with_name("away"))
        if kind == "empty":
            away.mkdir(mode=0o700)
        elif kind == "file":
            away.write_text("")
    with StoreView.open(closed.dirs[::-1]) as view:
        assert view.paths == closed.dirs
        directories = view.directories()
        assert [item.condition for item in directories] == ["healthy", "out"]
        expected = {"missing": "not exist", "empty": "mounted?", "file": "Not a directory"}
        assert expected.get(kind, "damaged") in directories[1].reason
        assert [run.is_available for run in view.runs()] == [False] * RUNS
        verification = verified(view)
        assert (verification.total_bytes, verification.unavailable_runs) == (0, RUNS)
        assert verification.damages == []
    assert away.exists() == (kind != "missing")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a/disk0"],
            "has 3 directories, but 1 is named: .*directory 1 is not named, directory 2 is not named",
        ),
        (
            ["a/disk2", "a/disk0"],
            "but 2 are named: directory 0 is .*disk0, directory 1 is not named, directory 2",
        ),
        (["a/disk0", "a/disk1", "a/disk2", "nowhere"], "has 3 directories, but 4 are named"),
        (["a/disk0", "b/disk1", "a/disk2"], "directories of different stores"),
        (["a/disk0", "a/disk1", "a/copy"], "are both directory 1"),
        (["nowhere", "a"], "nowhere is not a directory of a store: it does not exist\n.*has no superblock"),
        (["old"], "old has store format 1, this version reads 5; .* delete all that is in its directories"),
    ],
)
def test_not_a_store(tmp_path: Path, open_store: OpenStore, names: Sequence[str], message: str) -> None:
    for name in ("a", "b"):
        open_store(small_config(tmp_path / name, 3)).close()
    (tmp_path / "a" / "copy").mkdir()
    block = (tmp_path / "a" / "disk1" / "superblock.json").read_text()
    (tmp_path / "a" / "copy" / "superblock.json").write_text(block)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "superblock.json").write_text('{"format_version": 1}')
    threads = set(threading.enumerate())
    with pytest.raises(StoreFormatError, match=f"(?s){message}"):
        StoreView.open([tmp_path / name for name in names])
    assert not (tmp_path / "nowhere").exists()
    assert set(threading.enumerate()) <= threads


# -- verifying -----------------------------------------------------------------------------------


def test_every_extent_is_read_and_damage_is_named_to_the_chunk(closed: StoreConfig) -> None:
    """One byte flipped in each extent of the store, each time in another chunk."""
    expected = set()
    for stripe, directory in enumerate(closed.dirs):
        for count, (path, offset, header) in enumerate(find_extents(directory)):
            chunk = (count + stripe) % CHUNKS
            flip(path, offset + 4096 + (chunk + 1) * header.chunk_bytes - 1)
            expected.add((header.place.keys[chunk], header.place.segment, header.layer, directory))
    assert len(expected) == RUNS * len(LAYERS)
    before = contents(closed)
    with StoreView.open(closed.dirs) as view:
        found = verified(view).damages
    assert {(item.keys[0], item.run.place.segment, item.layer, item.directory) for item in found} == expected
    assert all(len(item.keys) == 1 and "digest" in item.reason for item in found)
    assert contents(closed) == before


@pytest.mark.parametrize("kind", ["header", "other extent", "missing file", "short file"])
def test_damage_to_the_whole_run(closed: StoreConfig, kind: str) -> None:
    extents = find_extents(closed.dirs[1])
    path, offset, header = extents[-1]
    if kind == "header":
        flip(path, offset + 100)
    elif kind == "other extent":
        first, begin, _ = extents[0]
        data = bytearray(path.read_bytes())
        data[offset : offset + 4096] = first.read_bytes()[begin : begin + 4096]
        path.write_bytes(data)
    elif kind == "missing file":
        path.unlink()
    else:
        os.truncate(path, offset + 4096)
    with StoreView.open(closed.dirs) as view:
        last = [item for item in verified(view).damages if item.run.place.run_id == header.place.run_id]
    assert (header.place.keys, header.layer, closed.dirs[1]) in [
        (item.keys, item.layer, item.directory) for item in last
    ]


@pytest.mark.parametrize("kind", ["file", "first headers", "all of it"])
def test_runs_of_which_nothing_is_left_are_counted(closed: StoreConfig, kind: str) -> None:
    """The state knows how many there were."""
    with StoreView.open(closed.dirs) as view:
        last = max(place.segment for place in view.places)
        places = [place for place in view.places if place.segment == last]
    for stripe, folder in enumerate(closed.dirs):
        path = folder / f"segment-{last:08d}.seg"
        if kind == "file":
            path.unlink()
        elif kind == "all of it":
            path.write_bytes(bytes(path.stat().st_size))
        else:
            for place in places:
                flip(path, place.offsets[stripe] + 50)
    with StoreView.open(closed.dirs) as view:
        verification = verified(view)
        lost = {damage.run.place.run_id for damage in verification.damages}
        assert verification.lost_runs + len(lost) == len(places)
        assert any(item.is_error for item in check(view))
        assert len(view.runs()) == RUNS - len(places)


def test_a_disk_with_many_bad_sectors_is_read_to_its_end(
    closed: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sick = os.preadv, str(closed.dirs[1])

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(sick):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr("os.preadv", preadv)
    with StoreView.open(closed.dirs) as view:
        verification = verified(view)
    lost = {(item.run.place.run_id, item.layer) for item in verification.damages}
    assert len(lost) == sum(len(find_extents(path)) for path in closed.dirs[1:])
    assert all("Input/output error" in item.reason for item in verification.damages)
    assert verification.unavailable_runs == 0


def test_a_disk_that_hangs_is_given_up(closed: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sick, go = os.preadv, str(closed.dirs[1]), threading.Event()
    wait = Batch.wait

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(sick):
            go.wait(60)
        return real(fd, buffers, offset)

    def wait_less(self: Batch, patience_s: float) -> list[IOResult]:
        """For the sick one, so that a busy machine does not make the other one look so too."""
        is_sick = any(op.stripe == 1 for op in self.ops)
        return wait(self, 0.5 if is_sick else patience_s)

    monkeypatch.setattr(Batch, "wait", wait_less)
    with StoreView.open(closed.dirs) as view:
        verification = Verification(view)
        monkeypatch.setattr("os.preadv", preadv)
        list(verification.steps())
        assert verification.unavailable_runs == RUNS
        assert verification.damages == []
        assert [item.condition for item in view.directories()] == ["healthy", "out"]
        go.set()


def test_what_a_server_evicts_meanwhile_is_no_damage(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    for number in range(RUNS):
        write_keys(store, keys_of(number), LAYERS)
    with StoreView.open(config.dirs) as view:
        path, offset, header = find_extents(config.dirs[0])[-1]
        flip(path, offset + 4096)
        assert store.evict_one()
        verification = verified(view)
    assert not any(store.contains(key) for key in view.runs()[0].place.keys)
    assert [(item.keys, item.layer) for item in verification.damages] == [
        (header.place.keys[:1], header.layer)
    ]


def test_chunks_in_quarantine_are_no_news(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, keys_of(0), LAYERS)
    path, offset, header = find_extents(config.dirs[0])[0]
    flip(path, offset + 4096)
    with pytest.raises(CorruptExtentError):
        read_keys(store, keys_of(0))
    store.close()
    with StoreView.open(config.dirs) as view:
        assert verified(view).damages == []
    flip(path, offset + 4096 + header.chunk_bytes)
    with StoreView.open(config.dirs) as view:
        assert [item.keys for item in verified(view).damages] == [header.place.keys[1:2]]


@pytest.mark.usefixtures("no_keeper")
def test_what_a_server_clears_meanwhile_is_not_lost(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    for number in range(RUNS):
        write_keys(store, keys_of(number), LAYERS)
    save(store)
    listed = Files.listed

    def clear_first(first_segment: int, volumes: Sequence[Volume]) -> Files:
        store.clear()
        return listed(first_segment, volumes)

    monkeypatch.setattr(Files, "listed", clear_first)
    with StoreView.open(config.dirs) as view:
        assert view.state.segments
        assert not view.lost
        assert not [item.what for item in check(view) if item.is_error]


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("kind", ["new", "evicted", "fewer runs"])
def test_between_two_states_of_a_server_nothing_is_lost(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Files are listed between the states: what only one of them has may not be there yet, or not any more."""
    config = small_config(tmp_path)
    store = open_store(config)
    for number in range(RUNS - 1):  # the last segment is half full
        write_keys(store, keys_of(number), LAYERS)
    save(store)
    read = Files.read

    def change_then(files: Files, volumes: Sequence[Volume]) -> Contents:
        if kind == "evicted":
            assert store.evict_one()
        elif kind == "fewer runs":
            Inside(store).catalog.quarantine(
                Inside(store).runs()[-1], dict.fromkeys(range(CHUNKS), "damaged")
            )
        found = read(files, volumes)
        if kind == "new":
            for number in range(RUNS - 1, 2 * RUNS):
                write_keys(store, keys_of(number), LAYERS)
        save(store)
        return found

    monkeypatch.setattr(Files, "read", change_then)
    with StoreView.open(config.dirs) as view:
        assert not view.lost
