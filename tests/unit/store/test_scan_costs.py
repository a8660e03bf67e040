"""What a start reads of segment files, what it keeps when reads fail, and what it holds in memory."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.store.format.geometry import BLOCK, shape_of
from sglang_hcache.store.format.record import ExtentHeader, pack_header
from sglang_hcache.store.inspect.maintenance import erase
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    make_run,
    match_keys,
    payload_of,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import state_of

GOING = b"a tenant to go.."
LAYERS = (32768,) * 8


def test_behind_what_was_erased_a_start_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, segment=2**24, size=2**27)
    store = DiskStore.open(config, Counters())
    runs = [make_keys(10 * number, 4) for number in range(24)]
    for number, keys in enumerate(runs):
        run = make_run(keys, LAYERS)
        run = replace(run, namespace_id=GOING) if number % 2 else run
        store.write_run(run, payload_of(run))
    files = store.stats().segments
    store.close()
    erase(config.dirs, [GOING])
    pread, read = os.pread, list[int]()

    def counting(fd: int, size: int, offset: int) -> bytes:
        data = pread(fd, size, offset)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
            read.append(len(data))
        return data

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", counting)
        store = DiskStore.open(config, Counters())
    assert [match_keys(store, keys) for keys in runs] == [4, 0] * 12
    store.close()
    assert sum(read) < files * 2**18 + 12 * 4 * BLOCK, "a window at the front of each file, then blocks"


def test_after_a_failed_read_what_was_found_before_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, segment=2**24, size=2**27)
    store = DiskStore.open(config, Counters())
    runs = [make_keys(10 * number, 4) for number in range(6)]
    for keys in runs:
        run = make_run(keys, LAYERS)
        store.write_run(run, payload_of(run))
    assert store.stats().segments == 1
    store.close()
    with StoreView.open(config.dirs) as view:
        bad = view.places[3].offsets[0]
    pread, failed = os.pread, list[int]()

    def failing(fd: int, size: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".seg") and offset + size > bad:
            failed.append(offset)
            raise OSError(errno.EIO, "bad sector")
        return pread(fd, size, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing)
        store = DiskStore.open(config, Counters())
    assert len(failed) == 1, "a device that fails may take long each time"
    assert [match_keys(store, keys) for keys in runs] == [4, 4, 4, 0, 0, 0]
    store.close()
    assert [item.runs for item in state_of(config.dirs[0]).segments.values()] == [6]
    store = DiskStore.open(config, Counters())
    assert [match_keys(store, keys) for keys in runs] == [4] * 6
    store.close()


def test_runs_share_what_is_the_same(tmp_path: Path) -> None:
    """There may be a million: 64 bytes more of each are 64 MB."""
    config = small_config(tmp_path)
    store = DiskStore.open(config, Counters())
    for number in range(3):
        write_keys(store, make_keys(10 * number, 1), (4096,))
    store.close()
    store = DiskStore.open(config, Counters())
    runs = Inside(store).runs()
    assert len(runs) == 3
    for item in (
        lambda run: run.place.namespace_id,
        lambda run: run.place.shape,
        lambda run: run.quarantined,
    ):
        assert len({id(item(run)) for run in runs}) == 1
    store.close()


def test_what_a_failed_write_left_hides_nothing_behind_it(tmp_path: Path) -> None:
    """The room of a longer run was given back, and a shorter one failed there, too, in front of another."""
    config = small_config(tmp_path, segment=2**24, size=2**27)
    store = DiskStore.open(config, Counters())
    for number in range(3):
        write_keys(store, make_keys(10 * number, 4), LAYERS)
    place = Inside(store).run_of(make_keys(10, 1)[0]).place
    store.close()
    shape = shape_of(6, LAYERS, 1, (0,), 0)
    left = replace(place, run_id=bytes(16), keys=make_keys(100, 6), shape=shape)
    (path,) = config.dirs[0].glob("*.seg")
    with path.open("r+b") as file:
        file.seek(place.offsets[0])
        file.write(bytes(place.shape.part_bytes[0]))
        file.seek(left.extent_offset(1))
        file.write(pack_header(ExtentHeader(left, 1, (0,) * 6)))
    assert place.end(0) < left.end(0) <= path.stat().st_size
    store = DiskStore.open(config, Counters())
    assert [match_keys(store, make_keys(10 * number, 4)) for number in range(3)] == [4, 0, 4]
    store.close()
