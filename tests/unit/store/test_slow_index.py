"""An index that is large: as long as reading it goes on it is waited for, and one that is slow is not called bad."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, index, recovery
from sglang_hcache.store.index import Index
from sglang_hcache.store.inspect import view as view_module
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.io import workers
from sglang_hcache.store.volumes import looking
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, small_config, write_keys

OpenStore = Callable[..., DiskStore]
LAYERS = (4096,)
NUM_RUNS = 40
_PIECE_S = 0.05
_PATIENCE_S = 0.5


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    """A closed store of many runs in one segment."""
    found = small_config(tmp_path, segment=4 * 2**20)
    store = DiskStore.open(found, Counters())
    for number in range(NUM_RUNS):
        write_keys(store, make_keys(number, 1), LAYERS)
    assert store.stats().segments == 1
    store.close()
    return found


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called for each row or header: it takes ``_PIECE_S``, by the clock that deadlines are measured with, too.

    Nothing else takes any time by that clock, so that a busy machine is not taken for one that hangs.
    """
    passed_s = 0.0

    def pass_time() -> None:
        nonlocal passed_s
        time.sleep(_PIECE_S)
        passed_s += _PIECE_S

    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: passed_s))
    return pass_time


@pytest.fixture
def slow_rows(monkeypatch: pytest.MonkeyPatch, slowly: Callable[[], None]) -> None:
    """All rows together take longer than may pass without a sign that it goes on."""
    decode = index.decode

    def slow_decode(*args: Any) -> Any:
        slowly()
        return decode(*args)

    monkeypatch.setattr(index, "decode", slow_decode)
    monkeypatch.setattr(index, "_STEPS", 10)
    monkeypatch.setattr(recovery, "LOAD_S", _PATIENCE_S)
    monkeypatch.setattr(view_module, "LOAD_S", _PATIENCE_S)


@pytest.mark.usefixtures("slow_rows")
def test_a_server_reads_a_large_index_to_its_end(
    config: StoreConfig, open_store: OpenStore, counters: Counters
) -> None:
    store = open_store(config)
    assert counters["store.index_rebuilds"] == 0
    assert match_keys(store, make_keys(0, NUM_RUNS)) == NUM_RUNS


@pytest.mark.usefixtures("slow_rows")
def test_tools_do_too(config: StoreConfig) -> None:
    with StoreView.open(config.dirs) as view:
        assert view.index_problem == ""
        assert len(view.contents.runs) == NUM_RUNS


def test_no_rebuilding_is_advised_for_an_index_that_is_not_read_in_time(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, load = threading.Event(), Index.load

    def hang(self: Index, *args: Any) -> Any:
        go_on.wait(60)
        return load(self, *args)

    monkeypatch.setattr(Index, "load", hang)
    monkeypatch.setattr(view_module, "LOAD_S", 0.3)
    try:
        with StoreView.open(config.dirs) as view:
            [finding] = check(view)
    finally:
        go_on.set()
    assert (
        "no answer within 0.3 s: it is slow or hangs, which says nothing of what is in the index"
        in finding.what
    )
    assert finding.fix.startswith(
        "check its device and look again; `hcache store fsck --rebuild` would forget"
    )


def test_the_headers_of_a_segment_are_waited_for_as_long_as_they_come(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, slowly: Callable[[], None]
) -> None:
    pread = os.pread

    def slow_pread(fd: int, size: int, offset: int) -> bytes:
        slowly()
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", slow_pread)
    monkeypatch.setattr(looking, "_PATIENCE_S", _PATIENCE_S)
    with StoreView.open(config.dirs) as view:
        assert check(view) == []
