"""Reading headers in the background: who waits for it, what is read twice, and what it says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.store import DiskStore, scan, space
from sglang_hcache.store.format.geometry import ShapeTable
from sglang_hcache.store.scan import scan_segments
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.looking import look_at
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import sick, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (32768,) * 3
OLD, NEW = [make_keys(4 * number, 4) for number in range(6)], make_keys(1000, 4)


class Reads:
    """Which segment files are opened to be scanned; holds up those of a number from ``held`` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[int] = []
        self.held = 10**9
        self.go_on = threading.Event()
        open_to_read = StoreDirectory.open_to_read

        def slow(directory: StoreDirectory, segment: int, direct: bool) -> object:
            self.opened.append(segment)
            if segment >= self.held:
                assert self.go_on.wait(60)
            return open_to_read(directory, segment, direct)

        monkeypatch.setattr(StoreDirectory, "open_to_read", slow)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def store(
    no_keeper: None, tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> DiskStore:
    """Six segments whose index was in a directory that was out at the start, and is back now."""
    config = small_config(tmp_path, 2, segment=2**19)
    first = open_store(config)
    for keys in OLD:
        write_keys(first, keys, LAYERS)
    first.close()
    with monkeypatch.context() as patch:
        sick({"disk0"}, patch)
        found = open_store(config)
    home = Inside(found).volumes[0]
    home.health._retry_at = 0.0
    Inside(found).keeper._take_again(home)
    assert home.health.writable
    return found


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_SCAN_THREADS", 1)
    monkeypatch.setattr(space, "_SCAN_S", 0.01)


@pytest.mark.usefixtures("one_thread")
def test_the_store_is_written_to_while_headers_are_read(store: DiskStore, reads: Reads) -> None:
    reads.held = 0
    inside = Inside(store)
    inside.space.rejoin()
    inside.space.rejoin()
    write_keys(store, NEW, LAYERS)
    assert sum(match_keys(store, keys) for keys in OLD) == 0
    reads.go_on.set()
    wait_until(lambda: (inside.space.rejoin(), not inside.ledger.is_partial)[1])
    for keys in [*OLD, NEW]:
        read_keys(store, keys)


@pytest.mark.usefixtures("one_thread")
def test_what_was_read_is_not_read_again_where_a_directory_went_out_meanwhile(
    store: DiskStore, reads: Reads
) -> None:
    reads.held = 3
    inside, other = Inside(store), Inside(store).volumes[1]
    inside.space.rejoin()
    wait_until(lambda: 3 in reads.opened)
    other.health.take_out("the test says so")
    reads.go_on.set()
    read = inside.space._reconciler._scan
    assert read is not None
    wait_until(lambda: read.is_over(0.01))
    assert read.seen_whole == {0, 1, 2}
    reads.opened.clear()
    other.health.recover()
    wait_until(lambda: (inside.space.rejoin(), not inside.ledger.is_partial)[1])
    assert {*reads.opened} == {3, 4, 5}
    for keys in OLD:
        read_keys(store, keys)


def test_a_segment_that_was_evicted_meanwhile_is_not_served(store: DiskStore, reads: Reads) -> None:
    inside = Inside(store)
    scan_ = inside.space._reconciler.begin_scan()
    assert scan_ is not None
    wait_until(lambda: scan_.is_over(0.1))
    assert store.evict_one()
    inside.space.rejoin()
    assert not inside.ledger.is_partial
    there = [keys for keys in OLD if match_keys(store, keys)]
    assert len(there) == 5
    for keys in there:
        read_keys(store, keys)


@pytest.mark.usefixtures("one_thread")
def test_a_store_that_is_closed_reads_no_more(store: DiskStore, reads: Reads) -> None:
    reads.held = 1
    Inside(store).space.rejoin()
    wait_until(lambda: 1 in reads.opened)
    found = Inside(store).space._reconciler._scan
    store.close()
    reads.go_on.set()
    assert found is not None
    wait_until(lambda: found.is_over(0.01))
    assert {*reads.opened} == {0, 1}


def test_a_long_scan_says_how_far_it_is(
    store: DiskStore, reads: Reads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scan, "_SAY_S", 0.05)
    caplog.set_level(logging.INFO)
    reads.held = 4
    sight = look_at([volume.path for volume in Inside(store).volumes])
    found: list[int] = []

    def read() -> None:
        found.append(len(scan_segments(range(6), sight.volumes, ShapeTable(2))))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait_until(lambda: "hcache: 4 of 6 segments are read" in caplog.messages)
    reads.go_on.set()
    thread.join(60)
    assert found == [6]
    sight.close()
