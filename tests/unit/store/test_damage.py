"""One test per way a file can be bad. A damaged run is a miss; the others are still served."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from sglang_hcache.core.errors import CorruptExtentError, StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, aligned_empty
from sglang_hcache.store.format.geometry import BLOCK, extent_bytes
from sglang_hcache.store.format.record import ExtentHeader, pack_header
from sglang_hcache.store.saved import SavedState
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    find_extents,
    make_keys,
    match_keys,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import flip, state_of

OpenStore = Callable[..., DiskStore]
LAYERS = (8192, 5000, 8192)
BAD, GOOD = make_keys(0, 4), make_keys(10, 4)


@pytest.fixture
def store(tmp_path: Path, open_store: OpenStore) -> DiskStore:
    store = open_store(small_config(tmp_path, 2))
    write_keys(store, BAD, LAYERS)
    write_keys(store, GOOD, LAYERS)
    return store


def extent_of(base: Path, layer: int, keys: tuple[bytes, ...] = BAD) -> tuple[Path, int, ExtentHeader]:
    found = [item for number in (0, 1) for item in find_extents(base / f"disk{number}")]
    (extent,) = [item for item in found if item[2].layer == layer and item[2].place.keys == keys]
    return extent


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def expect_corrupt(
    store: DiskStore, counters: Counters, match: str, chunks: tuple[int, ...] = (0, 1, 2, 3)
) -> None:
    """Reading ``BAD`` fails once; then its ``chunks`` are quarantined and everything else is served."""
    with pytest.raises(CorruptExtentError, match=match):
        read_keys(store, BAD)
    assert counters["store.corrupt_extents"] == 1
    assert counters["store.chunks_quarantined"] == store.stats().quarantined == len(chunks)
    for number, key in enumerate(BAD):
        assert store.contains(key) == (number not in chunks)
        if number not in chunks:
            read_keys(store, [key])
    read_keys(store, GOOD)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda header: b"x", "magic"),
        (
            lambda header: pack_header(replace(header, place=replace(header.place, run_id=b"i" * 16))),
            "of layer . of run ",
        ),
    ],
    ids=["not a header", "of another run of the same keys"],
)
def test_a_bad_header(
    tmp_path: Path,
    store: DiskStore,
    counters: Counters,
    damage: Callable[[ExtentHeader], bytes],
    match: str,
) -> None:
    """Which fields are compared: ``test_record.py``; every field damaged: ``tests/faults/test_flips.py``."""
    path, offset, header = extent_of(tmp_path, 1)
    overwrite(path, offset, damage(header))
    expect_corrupt(store, counters, match)


def test_the_whole_extent_of_another_layer(tmp_path: Path, store: DiskStore, counters: Counters) -> None:
    path, offset, header = extent_of(tmp_path, 2)
    data = path.read_bytes()[offset : offset + extent_bytes(len(header.place.keys), header.chunk_bytes)]
    path, offset, _ = extent_of(tmp_path, 0)
    overwrite(path, offset, data)
    expect_corrupt(store, counters, "layer 2")


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("chunk", [0, 3])
def test_payload_bit_flip(
    tmp_path: Path, store: DiskStore, counters: Counters, layer: int, chunk: int
) -> None:
    path, offset, header = extent_of(tmp_path, layer)
    at = offset + BLOCK + chunk * header.chunk_bytes + 123
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 4]))
    expect_corrupt(store, counters, f"digest of layer {layer}", (chunk,))


def test_a_bit_flip_outside_the_chunks_read_does_not_matter(tmp_path: Path, store: DiskStore) -> None:
    path, offset, header = extent_of(tmp_path, 0)
    overwrite(path, offset + BLOCK + 3 * header.chunk_bytes, b"damaged")
    read_keys(store, BAD[:3])
    with pytest.raises(CorruptExtentError):
        read_keys(store, BAD[1:])
    assert match_keys(store, BAD) == 3
    read_keys(store, BAD[:3])


def test_what_the_log_leaves_out_the_next_line_counts(
    tmp_path: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    third = make_keys(20, 4)
    write_keys(store, third, LAYERS)
    answers = iter([True, False, True])
    monkeypatch.setattr(store._judge, "_may_warn", lambda: next(answers))
    for keys in (BAD, GOOD, third):
        path, offset, _ = extent_of(tmp_path, 0, keys)
        overwrite(path, offset, b"x")
        with pytest.raises(CorruptExtentError):
            read_keys(store, keys)
    first, second = caplog.messages
    assert first.startswith(f"hcache: chunk {BAD[0].hex()[:16]} and 3 more: damaged and not served again (")
    assert "other runs" not in first
    assert second.startswith(f"hcache: chunk {third[0].hex()[:16]} and 3 more: ")
    assert "and so are chunks of 1 other runs since the last such line; see hcache store ls" in second


@pytest.mark.parametrize("bad", [0, 1])
def test_a_quarantined_chunk_is_kept_logged_once_and_written_again(
    tmp_path: Path,
    store: DiskStore,
    counters: Counters,
    open_store: OpenStore,
    caplog: pytest.LogCaptureFixture,
    bad: int,
) -> None:
    path, offset, header = extent_of(tmp_path, 0)
    overwrite(path, offset + BLOCK + bad * header.chunk_bytes, b"damaged")
    leases = [store.lease(BAD), store.lease(BAD)]
    for lease in leases:
        with pytest.raises(CorruptExtentError):
            store.read_layers(lease, {0: aligned_empty(4 * LAYERS[0])})
        lease.close()
    assert caplog.messages == [
        f"hcache: chunk {BAD[bad].hex()[:16]}: damaged and not served again ({path}: the digest of layer 0 does not "
        "match); see hcache store ls --quarantined"
    ]
    store.close()
    store = open_store(small_config(tmp_path, 2))
    assert [number for number, key in enumerate(BAD) if not store.contains(key)] == [bad]
    assert extent_of(tmp_path, 0)[1] == offset, "kept for inspection"
    assert store.stats().totals["chunks_quarantined"] == 1
    damaged = {item.path: item.corrupt_extents for item in store.stats().directories}
    assert damaged == {folder: 2 * (folder == path.parent) for folder in damaged}, "also after a restart"
    write_keys(store, BAD[bad : bad + 1], LAYERS)
    read_keys(store, BAD)


def test_a_directory_whose_name_is_no_utf_8(
    tmp_path: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A quarantine names it; neither the state nor the end of the store minds."""
    caplog.set_level(logging.CRITICAL)  # pytest-xdist could not send what the log says
    config = small_config(tmp_path / os.fsdecode(b"d\xff"))
    store = open_store(config)
    write_keys(store, BAD, LAYERS)
    place = Inside(store).run_of(BAD[1]).place
    (path,) = config.dirs[0].glob("*.seg")
    flip(path, place.extent_offset(0) + BLOCK + LAYERS[0])
    with pytest.raises(CorruptExtentError):
        read_keys(store, BAD)
    store.close()
    again = open_store(config)
    assert again.stats().quarantined == 1
    assert match_keys(again, BAD) == 1


def test_an_error_that_nobody_foresaw_leaves_no_lock_behind(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, BAD, LAYERS)
    Inside(store).keeper.close(5)
    with monkeypatch.context() as patch:
        patch.setattr(SavedState, "save", Mock(side_effect=RuntimeError("unforeseen")))
        with pytest.raises(RuntimeError, match="unforeseen"):
            store.close()
    assert match_keys(open_store(config), BAD) == len(BAD)


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("is_gone", [False, True])
def test_what_cannot_be_read_is_written_down_by_the_keeper_and_no_reader_waits_for_that(
    tmp_path: Path, store: DiskStore, is_gone: bool
) -> None:
    path, offset, _ = extent_of(tmp_path, 0)
    overwrite(path, offset, b"x")
    if is_gone:
        path.unlink()
    failed = threading.Event()

    def read() -> None:
        with pytest.raises(StoreIOError if is_gone else CorruptExtentError):
            read_keys(store, BAD)
        failed.set()

    inside = Inside(store)
    with inside.saved._lock:  # as whoever waits for a slow disk holds it
        threading.Thread(target=read, daemon=True).start()
        assert failed.wait(60)
    assert match_keys(store, BAD) == 0
    inside.write_down()
    state = state_of(tmp_path / "disk0")
    assert [len(chunks) for chunks in state.quarantined.values()] == ([] if is_gone else [len(BAD)])
    assert [item.runs for item in state.segments.values()] == [0 if is_gone else 1]


def test_truncated_file(tmp_path: Path, store: DiskStore, counters: Counters) -> None:
    path, offset, _ = extent_of(tmp_path, 2)
    os.truncate(path, offset + BLOCK + 8192)
    with pytest.raises(CorruptExtentError, match="the file ends"):
        read_keys(store, BAD)
    assert counters["store.corrupt_extents"] == 1
    assert match_keys(store, BAD) == 0


def test_file_truncated_off_the_block_grid(tmp_path: Path, store: DiskStore) -> None:
    path, offset, _ = extent_of(tmp_path, 2)
    os.truncate(path, offset + BLOCK + 777)
    with pytest.raises(CorruptExtentError, match="the file ends"):
        read_keys(store, BAD)


def test_missing_segment_file_while_running(tmp_path: Path, store: DiskStore, counters: Counters) -> None:
    extent_of(tmp_path, 1)[0].unlink()
    with pytest.raises(StoreIOError, match="cannot open"):
        read_keys(store, BAD)
    assert counters["store.io_errors"] == 0, "the device is well"
    assert match_keys(store, BAD) == 0


def test_of_a_missing_file_nobody_else_waits_for_the_other_runs(
    tmp_path: Path, open_store: OpenStore, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(small_config(tmp_path, size=2**26, segment=2**22))
    runs = [make_keys(10 * number, 4) for number in range(5)]
    for keys in runs:
        write_keys(store, keys, LAYERS)
    path, *others = {item[0] for item in find_extents(tmp_path / "disk0")}
    assert not others
    path.unlink()
    with pytest.raises(StoreIOError, match="cannot open"):
        read_keys(store, runs[2])
    assert [match_keys(store, keys) for keys in runs] == [0] * 5
    lines = [record.message for record in caplog.records if "forgotten" in record.message]
    assert len(lines) == 1
    assert lines[0].startswith("hcache: stored runs are forgotten (5): ")
    assert counters["store.runs_lost"] == 5


def test_a_damaged_run_stays_forgotten(
    tmp_path: Path, store: DiskStore, counters: Counters, open_store: OpenStore
) -> None:
    store.close()
    store = open_store(small_config(tmp_path, 2))
    path, offset, _ = extent_of(tmp_path, 0)
    overwrite(path, offset, b"x")
    expect_corrupt(store, counters, "magic")
    store.close()
    store = open_store(small_config(tmp_path, 2))
    assert match_keys(store, BAD) == 0
    read_keys(store, GOOD)


def test_one_bad_run_of_a_lease_leaves_the_other_in_place(tmp_path: Path, store: DiskStore) -> None:
    path, offset, _ = extent_of(tmp_path, 0)
    overwrite(path, offset + BLOCK, b"damaged")
    with pytest.raises(CorruptExtentError):
        read_keys(store, [*GOOD, *BAD])
    assert match_keys(store, GOOD) == 4
    assert [store.contains(key) for key in BAD] == [False, True, True, True]
    write_keys(store, BAD, LAYERS)
    read_keys(store, [*GOOD, *BAD])


class Sick:
    """A directory's entry of which nothing but the name can be had."""

    def __init__(self, entry: os.DirEntry[str], number: int) -> None:
        self.name, self.path, self._number = entry.name, entry.path, number

    def fail(self, *, follow_symlinks: bool) -> None:
        raise OSError(self._number, os.strerror(self._number), self.path)

    is_file = stat = fail


def damage_entries(monkeypatch: pytest.MonkeyPatch, names: set[str], number: int = errno.EUCLEAN) -> None:
    """Files of these names cannot be asked for anything, nor deleted."""
    entries, unlink = StoreDirectory._entries, StoreDirectory.unlink_segment

    def some(self: StoreDirectory) -> Iterator[os.DirEntry[str] | Sick]:
        for entry in entries(self):
            yield Sick(entry, number) if entry.name in names else entry

    def fail(self: StoreDirectory, segment: int) -> None:
        if self.segment_path(segment).name in names:
            raise OSError(number, os.strerror(number))
        unlink(self, segment)

    monkeypatch.setattr(StoreDirectory, "_entries", some)
    monkeypatch.setattr(StoreDirectory, "unlink_segment", fail)


def two_segments(base: Path, open_store: OpenStore) -> StoreConfig:
    for keys in (BAD, GOOD):  # each start begins a segment
        store = open_store(small_config(base, 2))
        write_keys(store, keys, LAYERS)
        store.close()
    return small_config(base, 2)


@pytest.mark.parametrize("number", [errno.EUCLEAN, errno.EIO])
def test_a_file_that_cannot_be_asked_costs_its_runs_and_not_the_directory(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    config = two_segments(tmp_path, open_store)
    damage_entries(monkeypatch, {"segment-00000000.seg"}, number)
    store = open_store(config)
    assert [item.condition for item in store.stats().directories] == ["healthy", "healthy"]
    assert match_keys(store, BAD) == 0
    read_keys(store, GOOD)
    write_keys(store, BAD, LAYERS)
    read_keys(store, BAD)
    assert store.stats().used_bytes > 0


def test_a_directory_of_which_no_file_can_be_asked_is_out(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = two_segments(tmp_path, open_store)
    with monkeypatch.context() as patch:
        damage_entries(patch, {"segment-00000000.seg", "segment-00000001.seg"})
        with pytest.raises(StoreIOError):
            open_store(config)
    store = open_store(config)
    read_keys(store, BAD)
    read_keys(store, GOOD)


def test_a_device_that_goes_while_it_is_listed_is_no_damaged_file(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = two_segments(tmp_path, open_store)
    damage_entries(monkeypatch, {"segment-00000000.seg"}, errno.ESTALE)
    with pytest.raises(StoreIOError):
        open_store(config)
    assert len(list(config.dirs[0].glob("*.seg"))) == 2
