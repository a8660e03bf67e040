"""Directories of one store that were each used without the other, or came back while something could not be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.testing.stored_chunks import make_keys, small_config
from tests.unit.store.conftest import sick, state_of
from tests.unit.store.test_unread import RUNS, write_without


def test_what_one_directory_let_go_alone_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, counters = small_config(tmp_path, 2), Counters()
    write_without(config, None, RUNS, monkeypatch)
    with monkeypatch.context() as patch:
        sick({"disk1"}, patch)
        store = DiskStore.open(replace(config, retry_s=50.0), Counters())
        assert store.evict_one()
        store.close()
    for _ in range(4):
        write_without(config, 0, [make_keys(5000, 1)], monkeypatch)
    first, second = (state_of(path) for path in config.dirs)
    assert first.serial < second.serial
    assert second.segments.keys() - first.segments.keys()
    with StoreView.open(config.dirs) as view:
        assert not [item.what for item in check(view) if item.is_error]
    DiskStore.open(config, counters).close()
    assert counters["store.runs_lost"] == 0
