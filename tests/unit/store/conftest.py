from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.engine import IOEngine


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def open_store(counters: Counters) -> Iterator[Callable[..., DiskStore]]:
    """Opens stores that are closed at the end of the test."""
    opened: list[DiskStore] = []

    def open_(config: StoreConfig, engine: IOEngine | None = None) -> DiskStore:
        opened.append(DiskStore.open(config, counters, engine))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()
