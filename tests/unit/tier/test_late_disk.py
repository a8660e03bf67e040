"""A disk tier that is opened while the tiers are used already."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.errors import StoreLockedError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, StoreStats
from sglang_hcache.store.io.workers import DeadlineCaller
from sglang_hcache.tier import tiered
from sglang_hcache.tier.demoter import Demoter
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.late_disk import LateDisk
from sglang_hcache.tier.tiered import DISK, HOST, TieredStore
from tests.unit.tier.test_tiered import LAYOUT, key, open_tiers, put, read, wait_until_saved
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(*arguments: object) -> LateDisk:
        return LateDisk(*arguments, pause_s=0.01)  # type: ignore[arg-type]

    monkeypatch.setattr(tiered, "LateDisk", at_once)


def config_of(folder: Path) -> StoreConfig:
    return StoreConfig(
        dirs=(folder,),
        size_bytes=64 * 2**20,
        free_floor_bytes=0,
        segment_bytes=4 * 2**20,
        io_engine="posix",
    )


def without_disk(folder: Path, open_: Callable[[], DiskStore], slots: int = 8) -> TieredStore:
    host = HostTier(np.zeros(slots * LAYOUT.chunk_bytes, np.uint8), LAYOUT, Counters(), keep_dirty=False)
    left_out = StoreStats.not_opened(config_of(folder), "it is in use")
    policy = WritePolicy.WRITE_BACK
    return TieredStore(
        host, None, Counters(), write_policy=policy, run_chunks=4, left_out=left_out, open_late=open_
    )


def stored(folder: Path, names: list[int]) -> TieredStore:
    """The tiers of another server, with these on disk."""
    tiers = open_tiers(folder)
    for name in names:
        put(tiers, name)
    assert tiers.flush(60)
    return tiers


def test_what_another_server_has_let_go_is_served(tmp_path: Path) -> None:
    """As in a rolling update: the new one starts while the old one has the directories."""
    old = stored(tmp_path / "store", [1, 2])
    tiers = without_disk(
        tmp_path / "store", lambda: DiskStore.open(config_of(tmp_path / "store"), Counters())
    )
    put(tiers, 11)
    put(tiers, 1)
    assert tiers.host.counts() == (6, 2, 0), "clean, for nobody writes them"

    def reason() -> str:
        assert tiers.disk_stats is not None
        return tiers.disk_stats.directories[0].reason

    wait_until(
        lambda: "cannot be opened, and is tried again: " in reason() and "in use by process" in reason()
    )
    assert tiers.disk is None
    old.close()
    wait_until(lambda: tiers.disk is not None and tiers.disk_stats is not None)
    assert tiers.host.counts() == (6, 1, 1), "one is on disk"
    assert read(tiers, [1, 2]) == (HOST, DISK)
    assert read(tiers, [11]) == (HOST,)
    put(tiers, 12)
    tiers.demote_all()
    wait_until_saved(tiers)
    assert tiers.disk is not None
    assert all(tiers.disk.contains(key(name)) for name in (11, 12)), (
        "what came before is written like all else"
    )
    tiers.close()
    again = open_tiers(tmp_path / "store")
    assert read(again, [11, 12]) == (DISK, DISK)
    again.close()


def test_what_was_cleared_meanwhile_is_not_back(tmp_path: Path) -> None:
    stored(tmp_path / "store", [1, 2]).close()
    may_open = threading.Event()

    def open_() -> DiskStore:
        if not may_open.is_set():
            raise StoreLockedError("in use")
        return DiskStore.open(config_of(tmp_path / "store"), Counters())

    tiers = without_disk(tmp_path / "store", open_)
    tiers.clear()
    assert tiers.is_clearing
    may_open.set()
    wait_until(lambda: tiers.disk is not None)
    assert tiers.match([key(1)]) == 0
    wait_until(lambda: not tiers.is_clearing)
    tiers.close()
    again = open_tiers(tmp_path / "store")
    assert again.match([key(1)]) == 0
    again.close()


def test_one_that_is_opened_after_the_end_is_closed(tmp_path: Path) -> None:
    is_opening, go_on = threading.Event(), threading.Event()

    def open_() -> DiskStore:
        is_opening.set()
        go_on.wait(60)
        return DiskStore.open(config_of(tmp_path / "store"), Counters())

    tiers = without_disk(tmp_path / "store", open_)
    assert is_opening.wait(60)
    tiers.close()
    go_on.set()
    wait_until(lambda: all(thread.name != "hcache-late-disk" for thread in threading.enumerate()))
    assert tiers.disk is None
    open_tiers(tmp_path / "store").close()


def test_it_is_not_tried_while_the_last_try_hangs(tmp_path: Path) -> None:
    """Each try would leave a thread behind."""
    is_over, tries = threading.Event(), []

    def open_() -> DiskStore:
        tries.append(None)
        if not is_over.is_set():
            disk = DeadlineCaller("on a disk that hangs")
            try:
                disk.call(is_over.wait, 0.001)
            finally:
                disk.close(0.0)
        return DiskStore.open(config_of(tmp_path / "store"), Counters())

    tiers = without_disk(tmp_path / "store", open_)
    wait_until(lambda: bool(tries))
    time.sleep(0.5)
    assert len(tries) == 1
    is_over.set()
    wait_until(lambda: tiers.disk is not None)
    tiers.close()


def test_an_error_that_nobody_expects_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tries = 0

    def open_() -> DiskStore:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise RuntimeError("a bug")
        return DiskStore.open(config_of(tmp_path / "store"), Counters())

    tiers = without_disk(tmp_path / "store", open_)
    wait_until(lambda: tiers.disk is not None)
    assert "a bug" in caplog.text
    tiers.close()


def test_one_that_cannot_be_attached_is_closed_and_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(tiered, "Demoter", no_thread)
        tiers = without_disk(
            tmp_path / "store", lambda: DiskStore.open(config_of(tmp_path / "store"), Counters())
        )
        wait_until(
            lambda: (
                tiers.disk_stats is not None
                and "can't start new thread" in tiers.disk_stats.directories[0].reason
            )
        )
        assert tiers.disk is None
    wait_until(lambda: tiers.host.keep_dirty)
    put(tiers, 1)
    assert tiers.flush(60)
    assert tiers.disk is not None
    assert tiers.disk.contains(key(1))
    tiers.close()


def test_a_signal_to_stop_that_comes_while_it_is_attached_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **more: Any) -> Demoter:
        demoter = Demoter(*arguments, **more)
        tiers.write_from_now_on()
        return demoter

    monkeypatch.setattr(tiered, "Demoter", interrupted)
    tiers = without_disk(
        tmp_path / "store", lambda: DiskStore.open(config_of(tmp_path / "store"), Counters())
    )
    wait_until(lambda: tiers.host.keep_dirty)
    put(tiers, 1)
    wait_until(lambda: key(1) in tiers.host and not tiers.host.counts().dirty)
    assert tiers.disk is not None
    assert tiers.disk.contains(key(1))
    tiers.close()
