"""Directories that hang while headers are read at a start: they are left out, and the server starts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, scan
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes import looking
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.volume import Volume
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import conditions, open_when_unlocked, preads, wait_until

LAYERS = (8192, 4096, 8192)
OLD, NEW = make_keys(0, 40), make_keys(100, 4)


class Hang:
    """Calls that name a file under a folder stand still until :meth:`let_go`."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.pread = os.pread
        self._go_on = threading.Event()

    def wait(self, path: Path) -> None:
        if self.folder is not None and self.folder in path.parents:
            self._go_on.wait(90)

    def let_go(self) -> None:
        self.folder = None
        self._go_on.set()


@pytest.fixture
def hang() -> Iterator[Hang]:
    """Holds up reading of segments, and whatever else a test has wait for it."""
    found = Hang()
    with preads(lambda path, _: found.wait(path)):
        yield found
        found.let_go()


@pytest.fixture
def given_up_soon(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory that hangs, for as long as it does; a healthy one never, however busy the machine is."""
    patience_s = property(lambda volume: 0.5 if volume.path == hang.folder else 60.0, lambda *_: None)
    monkeypatch.setattr(Volume, "patience_s", patience_s, raising=False)


def filled(base: Path, num_dirs: int = 2) -> StoreConfig:
    """A closed store with ten runs in some segments."""
    config = small_config(base, num_dirs)
    store = DiskStore.open(config, Counters())
    for first in range(0, 40, 4):
        write_keys(store, OLD[first : first + 4], LAYERS)
    assert store.stats().segments > 2
    store.close()
    return config


class Opening:
    """A start on a thread of its own: what it waits for must not hold up the test."""

    def __init__(self, config: StoreConfig) -> None:
        self.store: DiskStore | None = None
        self.error: Exception | None = None
        self._config = config
        self._thread = threading.Thread(target=self._open, daemon=True)
        self._thread.start()

    def result(self) -> DiskStore | None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the start hangs"
        return self.store

    def _open(self) -> None:
        try:
            self.store = DiskStore.open(self._config, Counters())
        except Exception as error:
            self.error = error


@pytest.mark.usefixtures("given_up_soon")
@pytest.mark.parametrize("stripe", [0, 1])
def test_a_directory_that_hangs_while_headers_are_read_is_left_out(
    tmp_path: Path, hang: Hang, stripe: int
) -> None:
    config = filled(tmp_path)
    hang.folder = config.dirs[stripe]
    store = Opening(config).result()
    assert store is not None
    try:
        assert conditions(store)[stripe] == "out"
        assert conditions(store)[1 - stripe] == "healthy"
        assert match_keys(store, OLD) == 0
        write_keys(store, NEW, LAYERS)
        assert conditions(store)[stripe] == "out", "not tried while something hangs there"
        hang.let_go()
        wait_until(lambda: match_keys(store, OLD) == 40)
        read_keys(store, OLD)
        read_keys(store, NEW)
    finally:
        hang.let_go()
        store.close()


@pytest.mark.usefixtures("given_up_soon")
def test_without_any_other_directory_the_start_is_refused(tmp_path: Path, hang: Hang) -> None:
    config = filled(tmp_path, 1)
    hang.folder = config.dirs[0]
    opening = Opening(config)
    assert opening.result() is None
    assert isinstance(opening.error, StoreIOError)
    assert "nothing was changed" in str(opening.error)
    hang.let_go()
    store = DiskStore.open(config, Counters())
    read_keys(store, OLD)
    store.close()


@pytest.mark.parametrize("method", ["acquire", "read_superblock", "probe"])
def test_what_hung_at_a_start_leaves_no_lock_behind(
    tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The same process tries again (``--hcache-disk-at-start optional``)."""
    config = small_config(tmp_path)
    DiskStore.open(config, Counters()).close()
    real = getattr(StoreDirectory, method)

    def slowly(self: StoreDirectory) -> object:
        found = real(self)
        hang.wait(self.path / "any")
        return found

    monkeypatch.setattr(StoreDirectory, method, slowly)
    hang.folder = config.dirs[0]
    opening = Opening(replace(config, io_timeout_s=0.5))
    assert opening.result() is None
    assert isinstance(opening.error, StoreIOError)
    hang.let_go()
    open_when_unlocked(config).close()


@pytest.mark.usefixtures("given_up_soon")
@pytest.mark.parametrize("what", ["read_state", "write_state"])
def test_a_directory_that_hangs_over_its_state_is_left_out(
    tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    config = filled(tmp_path)
    real = getattr(StoreDirectory, what)

    def hanging(self: StoreDirectory, *args: bytes) -> object:
        hang.wait(self.path / "state.json")
        return real(self, *args)

    monkeypatch.setattr(StoreDirectory, what, hanging)
    # Reading of segments goes on.
    monkeypatch.setattr(os, "pread", hang.pread)
    hang.folder = config.dirs[0]
    store = Opening(config).result()
    assert store is not None
    try:
        write_keys(store, NEW, LAYERS) if what == "read_state" else store.touch(OLD)
        wait_until(lambda: conditions(store) == ["out", "healthy"])
        hang.let_go()
        wait_until(lambda: match_keys(store, OLD) == 40)
        read_keys(store, OLD)
    finally:
        hang.let_go()
        store.close()


def test_looking_at_a_store_does_not_hang(
    tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = filled(tmp_path)
    monkeypatch.setattr(looking, "_PATIENCE_S", 1.5)
    hang.folder = config.dirs[1]
    seen: list[list[str]] = []

    def look() -> None:
        with StoreView.open(config.dirs) as view:
            seen.append([item.condition for item in view.directories()])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(60)
    assert seen == [["healthy", "out"]]


def test_a_device_that_is_slow_but_goes_on_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it takes longer than one operation may."""
    config = replace(filled(tmp_path), io_timeout_s=2.0)
    monkeypatch.setattr(scan, "_NEAR_BYTES", 0)  # a read for each header
    began = time.monotonic()
    with preads(lambda *_: time.sleep(0.5)):
        store = DiskStore.open(config, Counters())
    assert time.monotonic() - began > config.io_timeout_s
    assert conditions(store) == ["healthy", "healthy"]
    read_keys(store, OLD)
    store.close()
