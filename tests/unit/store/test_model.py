"""Any sequence of writes, reads, leases, clears and restarts against a model that remembers everything."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_hcache.core.errors import StoreFullError, TierMissError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, ReadLease
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)

LAYERS = (4096, 3000, 8192)
NUM_KEYS = 60
MIB = 2**20


class StoreMachine(RuleBasedStateMachine):
    """The model is the set of keys written since the last clear; eviction may only take away from it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp())
        self.counters = Counters()
        self.written: set[bytes] = set()
        self.leases: list[ReadLease] = []

    @initialize(num_dirs=st.integers(1, 3))
    def start(self, num_dirs: int) -> None:
        self.config = small_config(self.base, num_dirs, size=5 * MIB, segment=2**18)
        self.store = DiskStore.open(self.config, self.counters)

    @rule(first=st.integers(0, NUM_KEYS), count=st.integers(1, 9))
    def write(self, first: int, count: int) -> None:
        keys = make_keys(first, count)
        try:
            write_keys(self.store, keys, LAYERS)
        except StoreFullError:
            assert self.leases
        else:
            self.written.update(keys)
            assert self.store.match(keys) == count

    @rule(first=st.integers(0, NUM_KEYS), count=st.integers(1, 12), skew=st.sampled_from([0, 1]))
    def read(self, first: int, count: int, skew: int) -> None:
        keys = make_keys(first, count)
        matched = self.store.match(keys)
        if matched:
            read_keys(self.store, keys[:matched], skew)
        if matched < count:
            assert not self.store.contains(keys[matched])

    @rule(first=st.integers(0, NUM_KEYS), count=st.integers(1, 5))
    def hold(self, first: int, count: int) -> None:
        try:
            self.leases.append(self.store.lease(make_keys(first, count)))
        except TierMissError:
            assert self.store.match(make_keys(first, count)) < count

    @precondition(lambda self: self.leases)
    @rule()
    def let_go(self) -> None:
        self.leases.pop().close()

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.written.clear()

    @rule(lose_index=st.booleans())
    def restart(self, lose_index: bool) -> None:
        lease_at_close, self.leases = self.leases, []
        before = {key for key in make_keys(0, NUM_KEYS + 10) if self.store.contains(key)}
        self.store.close()
        for lease in lease_at_close:
            lease.close()
        if lose_index:
            (self.config.dirs[0] / "index.sqlite").unlink()
        self.store = DiskStore.open(self.config, self.counters)
        assert all(self.store.contains(key) for key in before)

    @invariant()
    def what_is_there_was_written(self) -> None:
        if hasattr(self, "store"):
            assert physical_bytes(self.config.dirs) <= self.config.size_bytes
            assert self.counters["store.corrupt_extents"] == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.base)


StoreMachine.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestStore = StoreMachine.TestCase
