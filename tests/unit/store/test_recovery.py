"""Restarts: clean, killed, without a state, without a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.errors import CorruptExtentError, StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, removal
from sglang_hcache.store.config import SCRATCH_NAMESPACE
from sglang_hcache.store.format.geometry import BLOCK, extent_bytes
from sglang_hcache.store.format.record import pack_header
from sglang_hcache.store.format.state import SegmentState
from sglang_hcache.store.inspect.maintenance import clear, collect, erase
from sglang_hcache.store.inspect.rebuild import rebuild
from sglang_hcache.store.io.engine import OpenFile
from sglang_hcache.store.notes import Notes
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    find_extents,
    make_keys,
    make_run,
    match_keys,
    payload_of,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import kill, state_of, wait_until, write_state

OpenStore = Callable[..., DiskStore]
MIB = 2**20
LAYERS = (8192, 5000, 4096, 100)
RUNS = 6


@pytest.fixture(params=[1, 3])
def closed(request: pytest.FixtureRequest, tmp_path: Path, open_store: OpenStore) -> StoreConfig:
    """A closed store with six runs of four chunks in several segments."""
    config = small_config(tmp_path, request.param, segment=2**18)
    store = open_store(config)
    for number in range(RUNS):
        write_keys(store, run_keys(number), LAYERS)
    assert store.stats().segments >= 2
    store.close()
    return config


def run_keys(number: int) -> tuple[bytes, ...]:
    return make_keys(10 * number, 4)


def readable(store: DiskStore) -> list[int]:
    """Numbers of the runs that are present; reads and verifies them all."""
    present = [number for number in range(RUNS) if match_keys(store, run_keys(number)) == 4]
    for number in present:
        read_keys(store, run_keys(number))
    return present


def test_a_restart_serves_what_was_stored(
    closed: StoreConfig, open_store: OpenStore, counters: Counters
) -> None:
    store = open_store(closed)
    assert readable(store) == list(range(RUNS))
    assert counters["store.runs_recovered"] == RUNS
    assert counters["store.runs_lost"] == 0
    write_keys(store, make_keys(900, 4), LAYERS)
    read_keys(store, make_keys(900, 4))


def test_of_several_notes_those_that_make_sense_stay() -> None:
    assert Notes({"name": {"model": "hhkk"}, "other": 5}).all() == {"name": {"model": "hhkk"}}


def test_notes_do_not_grow_without_bound() -> None:
    notes = Notes(None)
    for number in range(1500):
        notes.put(str(number), {})
    assert [*notes.all()] == [str(number) for number in range(500, 1500)]
    notes.drop({"1499"})
    assert "1499" not in notes.all()


def test_missing_segment_file(closed: StoreConfig, open_store: OpenStore, counters: Counters) -> None:
    lost = sorted(closed.dirs[-1].glob("segment-*"))[0]
    names = {
        header.place.keys[0] for _, _, header in find_extents(closed.dirs[-1]) if header.place.segment == 0
    }
    lost.unlink()
    store = open_store(closed)
    gone = [number for number in range(RUNS) if run_keys(number)[0] in names]
    assert gone
    assert readable(store) == [number for number in range(RUNS) if number not in gone]
    assert counters["store.runs_lost"] == len(gone)
    assert not any((directory / lost.name).exists() for directory in closed.dirs)


def test_truncated_segment_file(closed: StoreConfig, open_store: OpenStore) -> None:
    path = sorted(closed.dirs[0].glob("segment-*"))[0]
    os.truncate(path, path.stat().st_size - BLOCK)
    store = open_store(closed)
    present = readable(store)
    assert 0 in present
    assert len(present) == RUNS - 1


def test_segment_files_without_runs_are_deleted(closed: StoreConfig, open_store: OpenStore) -> None:
    for directory in closed.dirs:
        (directory / "segment-00000077.seg").write_bytes(bytes(8 * BLOCK))
    store = open_store(closed)
    assert readable(store) == list(range(RUNS))
    assert not any((directory / "segment-00000077.seg").exists() for directory in closed.dirs)
    write_keys(store, make_keys(900, 1), LAYERS)
    assert (closed.dirs[0] / "segment-00000078.seg").exists(), "numbers are not used again"


def test_a_start_that_was_killed_while_it_measured_leaves_nothing(
    closed: StoreConfig, open_store: OpenStore, counters: Counters
) -> None:
    before = physical_bytes(closed.dirs)
    store = open_store(closed)
    written = store.stats().written_today_bytes
    with store.measuring():
        for number in range(3):
            keys = make_keys(1000 + 10 * number, 4)
            run = replace(make_run(keys, LAYERS), namespace_id=SCRATCH_NAMESPACE)
            store.write_run(run, payload_of(run))
        Inside(store).write_down()
        kill(store)
    store = open_store(closed)
    assert readable(store) == [*range(RUNS)]
    assert store.stats().runs == RUNS
    assert store.stats().written_today_bytes == written
    assert counters["store.runs_lost"] == 0
    store.close()
    assert physical_bytes(closed.dirs) <= before


def test_torn_tail(closed: StoreConfig, open_store: OpenStore, counters: Counters) -> None:
    """A run whose data is there but not all of its first headers: the crash came between the two."""
    for directory in closed.dirs:
        path, offset, header = find_extents(directory)[-1]
        size = extent_bytes(len(header.place.keys), header.chunk_bytes)
        torn = replace(header, place=replace(header.place, run_id=b"t" * 16))
        with open(path, "r+b") as file:
            file.seek(offset + size)
            file.write(pack_header(torn) + bytes(size - BLOCK))
    before = physical_bytes(closed.dirs)
    store = open_store(closed)
    assert readable(store) == list(range(RUNS))
    store.close()
    assert physical_bytes(closed.dirs) < before
    for directory in closed.dirs:
        assert not any(header.place.run_id == b"t" * 16 for _, _, header in find_extents(directory))


@pytest.mark.parametrize("damage", ["missing", "text", "empty", "half", "zeros", "a digit", "another folder"])
def test_a_state_that_is_lost_or_damaged_costs_no_chunk(
    closed: StoreConfig, open_store: OpenStore, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """What was used last, counts and quarantine are forgotten; a copy in another directory knows them."""
    path = closed.dirs[0] / "state.json"
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "another folder":
        path.unlink()
        path.mkdir()
    else:
        texts = {
            "text": b"this is no state " * 1000,
            "empty": b"",
            "half": data[: len(data) // 2],
            "zeros": bytes(len(data)),
            "a digit": data.replace(b'"serial": ', b'"serial": 1'),
        }
        path.write_bytes(texts[damage])
    store = open_store(closed)
    assert readable(store) == list(range(RUNS))
    assert store.stats().totals.get("chunks_written", 0) == (4 * RUNS if len(closed.dirs) > 1 else 0)
    assert len([line for line in caplog.messages if "it does not count" in line]) == (damage != "missing")
    if damage == "another folder":
        path.rmdir()
        wait_until(path.exists)
    store.close()
    assert state_of(closed.dirs[0]).segments


def test_of_several_states_the_newest_counts(closed: StoreConfig, open_store: OpenStore) -> None:
    for number, folder in enumerate(closed.dirs):
        write_state(folder, serial=10 + number, meta={"namespaces": {"who": number}})
    store = open_store(closed)
    assert not store.namespaces.get("who"), "no object"
    store.close()
    for number, folder in enumerate(closed.dirs[::-1]):
        write_state(folder, serial=100 - number, meta={"namespaces": {"who": {"name": folder.name}}})
    assert open_store(closed).namespaces.get("who") == {"name": closed.dirs[-1].name}


def test_what_is_known_of_segments_that_are_gone_does_not_stay_for_ever(
    closed: StoreConfig, open_store: OpenStore
) -> None:
    known = state_of(closed.dirs[0]).segments
    more = {1000 + number: SegmentState(1.0, 0) for number in range(200)}
    for folder in closed.dirs:
        write_state(folder, segments={**known, **more})
    store = open_store(closed)
    assert readable(store) == list(range(RUNS))
    write_keys(store, make_keys(900, 2), LAYERS)
    assert Inside(store).active.number == 1200, "a number that was in use is not used again at once"
    store.close()
    assert [*state_of(closed.dirs[0]).segments] == [*known, 1200]


def test_a_start_skips_runs_with_missing_or_damaged_headers(
    closed: StoreConfig, open_store: OpenStore
) -> None:
    path, offset, header = [item for item in find_extents(closed.dirs[0]) if item[2].begins_part][1]
    damaged = next(number for number in range(RUNS) if run_keys(number) == header.place.keys)
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"xxxx")
    store = open_store(closed)
    assert readable(store) == [number for number in range(RUNS) if number != damaged]


@pytest.mark.parametrize("change", [{"namespace_id": b"another tenant's"}, {"run_id": b"another run's id"}])
def test_a_start_finds_a_torn_run_when_it_is_read(
    closed: StoreConfig, open_store: OpenStore, change: dict[str, bytes]
) -> None:
    """It looks at the first header of each part only."""
    extents = [extent for directory in closed.dirs for extent in find_extents(directory)]
    path, offset, header = next(extent for extent in extents if not extent[2].begins_part)
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(pack_header(replace(header, place=replace(header.place, **change))))
    store = open_store(closed)
    with pytest.raises(CorruptExtentError):
        read_keys(store, header.place.keys)
    assert len(readable(store)) == RUNS - 1


def test_a_start_without_file_descriptors_does_not_take_segments_for_empty_ones(
    closed: StoreConfig, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(path.name for path in closed.dirs[0].glob("*.seg"))

    def refuse(self: StoreDirectory, segment: int, direct: bool) -> OpenFile:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "open_to_read", refuse)
        with pytest.raises(StoreIOError, match="Too many open files"):
            open_store(closed)
    assert sorted(path.name for path in closed.dirs[0].glob("*.seg")) == names
    store = open_store(closed)
    for number in range(RUNS):
        read_keys(store, run_keys(number))


def test_a_start_finds_runs_behind_a_hole(closed: StoreConfig, open_store: OpenStore) -> None:
    path, _, header = find_extents(closed.dirs[0])[0]
    with open(path, "r+b") as file:
        file.write(bytes(header.place.shape.part_bytes[0]))
    store = open_store(closed)
    assert readable(store) == list(range(1, RUNS))


def test_a_start_does_not_believe_a_file_under_another_name(
    closed: StoreConfig, open_store: OpenStore
) -> None:
    for directory in closed.dirs:
        first, second = sorted(directory.glob("segment-*"))[:2]
        first.rename(directory / "swap")
        second.rename(first)
        (directory / "swap").rename(second)
    store = open_store(closed)
    swapped = store.stats()
    assert swapped.runs < RUNS
    readable(store)


def left_by_a_killed_clearing(config: StoreConfig, number: int) -> list[Path]:
    """Files that are cleared and not deleted."""
    files = [config.dirs[0] / f"segment-{5000 + index:08d}.seg" for index in range(number)]
    for path in files:
        path.write_bytes(bytes(MIB))
    return files


@pytest.mark.usefixtures("no_keeper")
def test_a_start_deletes_files_of_no_run_for_a_moment_and_then_serves(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands. They count against the cap until they are gone."""
    monkeypatch.setattr(removal, "_RETRY_S", -1.0)
    config = small_config(tmp_path, size=16 * MIB)
    store = open_store(config)
    write_keys(store, run_keys(0), LAYERS)
    store.close()
    files = left_by_a_killed_clearing(config, 6)
    store = open_store(config)
    read_keys(store, run_keys(0))
    assert sum(path.exists() for path in files) == len(Inside(store).leftovers) == 5
    assert Inside(store).space.used_bytes() > 5 * MIB
    Inside(store).keeper.round()
    assert sum(path.exists() for path in files) == 4
    store.close()
    store = open_store(replace(config, size_bytes=8 * MIB))
    assert physical_bytes(config.dirs) <= Inside(store).reserved_bytes <= 8 * MIB, "the cap does not wait"
    assert readable(store) == [0], "nothing is evicted for them"


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("operation", [collect, clear, rebuild, lambda dirs: erase(dirs, [bytes(16)])])
def test_commands_delete_all_of_them(
    tmp_path: Path,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    operation: Callable[[tuple[Path, ...]], object],
) -> None:
    monkeypatch.setattr(removal, "_RETRY_S", -1.0)
    config = small_config(tmp_path)
    open_store(config).close()
    files = left_by_a_killed_clearing(config, 6)
    operation(config.dirs)
    assert not any(path.exists() for path in files)
