"""Reading headers: what counts as a run, and what a long scan says."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.store import DiskStore, scan
from sglang_hcache.store.scan import scan_segments
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.looking import look_at
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, small_config, write_keys
from tests.unit.store.conftest import wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (32768,) * 3
RUNS = [make_keys(4 * number, 4) for number in range(6)]


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
def store(tmp_path: Path, open_store: OpenStore) -> DiskStore:
    """Six segments of one run each, in two directories."""
    found = open_store(small_config(tmp_path, 2, segment=2**19))
    for keys in RUNS:
        write_keys(found, keys, LAYERS)
    return found


@pytest.mark.parametrize("layers", [LAYERS, (4096,)], ids=["both", "one"])
def test_each_header_says_where_its_run_is(
    tmp_path: Path, open_store: OpenStore, layers: tuple[int, ...]
) -> None:
    """A directory that can be read must have a part of a run; one that is out is believed to."""
    config = small_config(tmp_path, 2)
    store = open_store(config)
    for keys in RUNS:
        write_keys(store, keys, layers)
    written = [run.place for run in Inside(store).runs()]
    sight = look_at(config.dirs)
    assert scan_segments(range(8), sight.volumes)[0] == [(place, 0) for place in written]
    sight.volumes[1].health.take_out("the test says so")
    in_first = [place for place in written if place.shape.part_bytes[0]]
    assert scan_segments(range(8), sight.volumes)[0] == [(place, 0) for place in in_first]
    assert len(in_first) == (6 if len(layers) > 1 else 3)
    sight.close()
    for path in config.dirs[1].glob("*.seg"):
        path.unlink()
    sight = look_at(config.dirs)
    assert scan_segments(range(8), sight.volumes)[0] == [
        (place, 2 if place.shape.part_bytes[1] else 0) for place in in_first
    ]
    sight.close()


def test_a_long_scan_says_how_far_it_is(
    store: DiskStore, reads: Reads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scan, "_SAY_S", 0.05)
    caplog.set_level(logging.INFO)
    reads.held = 4
    sight = look_at([volume.path for volume in Inside(store).volumes])
    found: list[int] = []

    def read() -> None:
        found.append(len(scan_segments(range(6), sight.volumes)[0]))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait_until(lambda: "hcache: 4 of 6 segments are read" in caplog.messages)
    reads.go_on.set()
    thread.join(60)
    assert found == [6]
    sight.close()


def test_an_error_of_this_process_ends_the_scan_at_once(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fails(number: int, _volumes: object) -> list[object]:
        asked.append(number)
        time.sleep(0.005)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(scan, "_scan", fails)
    monkeypatch.setattr(scan, "_SCAN_THREADS", 1)
    with pytest.raises(OSError, match="Too many open files"):
        scan_segments(list(range(1000)), Inside(store).volumes)
    assert len(asked) < 1000
