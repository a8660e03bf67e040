"""A device that fails: the error is ours, the store is consistent, and it works again afterwards."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.core.errors import CorruptExtentError, StoreError, StoreFullError, StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.engine import IOKind
from sglang_hcache.store.posix import PosixEngine
from sglang_hcache.testing.io_faults import Fault, FaultEngine, LatencyEngine, always, seeded
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)

OpenStore = Callable[..., DiskStore]
LAYERS = (8192, 5000)
OLD, NEW = make_keys(0, 3), make_keys(10, 3)


@pytest.fixture
def engine() -> FaultEngine:
    return FaultEngine(PosixEngine(2), lambda op, number: None)


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return small_config(tmp_path, 2)


@pytest.fixture
def store(config: StoreConfig, open_store: OpenStore, engine: FaultEngine) -> DiskStore:
    store = open_store(config, engine)
    write_keys(store, OLD, LAYERS)
    return store


def heal(engine: FaultEngine) -> None:
    engine.decide = lambda op, number: None


@pytest.mark.parametrize("kind", [IOKind.WRITE, IOKind.SYNC])
@pytest.mark.parametrize("stripe", [None, 0, 1])
def test_a_failed_write_stores_nothing_and_costs_nothing(
    store: DiskStore,
    config: StoreConfig,
    engine: FaultEngine,
    counters: Counters,
    kind: IOKind,
    stripe: int | None,
) -> None:
    engine.decide = always(kind, stripe=stripe)
    for _ in range(30):
        with pytest.raises(StoreIOError, match="Input/output error"):
            write_keys(store, NEW, LAYERS)
    assert counters["store.io_errors"] == 30
    assert store.match(NEW) == 0
    assert store.stats().segments == 1
    assert len(list(config.dirs[0].glob("segment-*"))) == 1
    heal(engine)
    write_keys(store, NEW, LAYERS)
    read_keys(store, [*OLD, *NEW])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_device_is_full_not_broken(store: DiskStore, engine: FaultEngine, number: int) -> None:
    engine.decide = always(IOKind.WRITE, number)
    with pytest.raises(StoreFullError):
        write_keys(store, NEW, LAYERS)
    heal(engine)
    write_keys(store, NEW, LAYERS)
    read_keys(store, NEW)


def test_a_write_that_comes_short(store: DiskStore, engine: FaultEngine) -> None:
    engine.decide = lambda op, number: Fault(0, share_done=0.5) if op.kind is IOKind.WRITE else None
    with pytest.raises(StoreIOError, match="bytes were written"):
        write_keys(store, NEW, LAYERS)
    heal(engine)
    assert store.match(NEW) == 0
    read_keys(store, OLD)


def test_a_transient_read_error_is_forgiven_once(
    store: DiskStore, engine: FaultEngine, counters: Counters
) -> None:
    engine.decide = always(IOKind.READ)
    with pytest.raises(StoreIOError, match="read failed"):
        read_keys(store, OLD)
    assert store.match(OLD) == 3
    heal(engine)
    read_keys(store, OLD)
    engine.decide = always(IOKind.READ)
    with pytest.raises(StoreIOError):
        read_keys(store, OLD)
    assert store.match(OLD) == 0
    assert counters["store.io_errors"] == 2


def test_errors_that_are_not_the_runs_fault_never_drop_it(store: DiskStore, engine: FaultEngine) -> None:
    engine.decide = always(IOKind.READ, errno.EMFILE)
    for _ in range(5):
        with pytest.raises(StoreIOError):
            read_keys(store, OLD)
    heal(engine)
    read_keys(store, OLD)


def test_a_read_that_comes_short_is_corruption(store: DiskStore, engine: FaultEngine) -> None:
    engine.decide = lambda op, number: Fault(0) if op.kind is IOKind.READ else None
    with pytest.raises(CorruptExtentError, match="the file ends"):
        read_keys(store, OLD)
    assert store.match(OLD) == 0


def test_after_any_mixture_of_faults_only_good_data_is_served(
    config: StoreConfig, open_store: OpenStore, engine: FaultEngine
) -> None:
    store = open_store(config, engine)
    engine.decide = seeded(7, 0.1)
    stored = []
    for number in range(60):
        keys = make_keys(10 * number, 3)
        try:
            write_keys(store, keys, LAYERS)
            stored.append(keys)
        except StoreError:
            assert store.match(keys) == 0
        assert physical_bytes(config.dirs) <= config.size_bytes
    assert 5 < len(stored) < 60
    heal(engine)
    for keys in stored:
        read_keys(store, keys)
    store.close()
    store = open_store(config)
    for keys in stored:
        read_keys(store, keys)
    assert store.stats().runs == len(stored)


def test_a_failing_index_is_an_io_error_and_eviction_goes_on(
    tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    config = small_config(tmp_path, size=8 * 2**20, segment=2**20)
    store = open_store(config)
    big = (32768,) * 3
    write_keys(store, make_keys(0, 6), big)
    store._index._connection.execute("PRAGMA query_only = ON")
    for number in range(1, 12):
        with pytest.raises(StoreIOError, match="index"):
            write_keys(store, make_keys(100 * number, 6), big)
        assert physical_bytes(config.dirs) <= config.size_bytes
    read_keys(store, make_keys(0, 6))
    store._index._connection.execute("PRAGMA query_only = OFF")
    write_keys(store, make_keys(5000, 6), big)
    read_keys(store, make_keys(5000, 6))


def test_a_slow_device_is_only_slow(config: StoreConfig, open_store: OpenStore) -> None:
    store = open_store(config, LatencyEngine(PosixEngine(1), 0.005))
    write_keys(store, OLD, LAYERS)
    read_keys(store, OLD)
