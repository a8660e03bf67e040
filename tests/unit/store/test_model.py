"""Any sequence of writes, reads, leases, faults and restarts against a model that remembers everything."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_hcache.core.errors import CorruptExtentError, StoreFullError, StoreIOError, TierMissError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, ReadLease
from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.keeper import Keeper
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    match_keys,
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
        self.keeper = mock.patch.multiple(
            Keeper, start=mock.DEFAULT, close=mock.DEFAULT
        )  # its rounds are steps of the machine instead
        self.keeper.start()
        self.base = Path(tempfile.mkdtemp())
        self.counters = Counters()
        self.written: set[bytes] = set()
        self.leases: list[ReadLease] = []

    @initialize(num_dirs=st.integers(1, 3))
    def start(self, num_dirs: int) -> None:
        self.config = small_config(self.base, num_dirs, size=6 * MIB, segment=2**18)
        self.store = DiskStore.open(self.config, self.counters)
        self.damaged = 0

    @property
    def out(self) -> set[int]:
        """Directories that are out."""
        return {volume.stripe for volume in Inside(self.store).volumes if not volume.health.readable}

    @rule(stripe=st.integers(0, 2))
    def lose_directory(self, stripe: int) -> None:
        if stripe < len(self.config.dirs):
            health = Inside(self.store).volumes[stripe].health
            health.take_out("the test says so")
            health._retry_at = math.inf

    @precondition(lambda self: self.out)
    @rule()
    def find_directories_again(self) -> None:
        Inside(self.store).retry_now()
        Inside(self.store).keeper.round()
        assert not self.out

    @rule()
    def upkeep(self) -> None:
        Inside(self.store).keeper.round()

    @precondition(lambda self: not self.out)
    @rule(first=st.integers(0, NUM_KEYS), layer=st.integers(0, 2))
    def damage(self, first: int, layer: int) -> None:
        """One byte of one layer of a chunk: that chunk is lost, and only that one."""
        (key,) = make_keys(first, 1)
        if not self.store.contains(key):
            return
        before = self.present()
        place = Inside(self.store).run_of(key).place
        index = place.keys.index(key)
        stripe = place.shape.stripe(layer)
        at = place.extent_offset(layer) + BLOCK + index * LAYERS[layer] + 17
        path = Inside(self.store).volumes[stripe].directory.segment_path(place.segment)
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x40]))
            file.flush()
            os.fsync(file.fileno())
        with pytest.raises(CorruptExtentError):
            read_keys(self.store, [key])
        self.damaged += 1
        assert self.present() == before - {key}

    def present(self) -> set[bytes]:
        return {key for key in make_keys(0, NUM_KEYS + 10) if self.store.contains(key)}

    @rule(first=st.integers(0, NUM_KEYS), count=st.integers(1, 9))
    def write(self, first: int, count: int) -> None:
        keys = make_keys(first, count)
        try:
            write_keys(self.store, keys, LAYERS)
        except StoreFullError:
            assert self.leases or self.out
        except StoreIOError:
            assert self.out
        else:
            self.written.update(keys)
            assert match_keys(self.store, keys) == count

    @rule(first=st.integers(0, NUM_KEYS), count=st.integers(1, 12), skew=st.sampled_from([0, 1]))
    def read(self, first: int, count: int, skew: int) -> None:
        keys = make_keys(first, count)
        matched = match_keys(self.store, keys)
        if matched:
            read_keys(self.store, keys[:matched], skew)
        if matched < count:
            assert not self.store.contains(keys[matched])

    @rule(first=st.integers(0, NUM_KEYS), count=st.integers(1, 5))
    def hold(self, first: int, count: int) -> None:
        try:
            self.leases.append(self.store.lease(make_keys(first, count)))
        except TierMissError:
            assert match_keys(self.store, make_keys(first, count)) < count

    @precondition(lambda self: self.leases)
    @rule()
    def let_go(self) -> None:
        self.leases.pop().close()

    @rule()
    def clear(self) -> None:
        if len(self.out) < len(self.config.dirs):
            self.store.clear()
            self.written.clear()
        else:  # there is nobody to remember it over a restart
            with pytest.raises(StoreIOError):
                self.store.clear()

    @rule(lose_state=st.booleans())
    def restart(self, lose_state: bool) -> None:
        lease_at_close, self.leases = self.leases, []
        before = self.present()
        self.store.close()
        for lease in lease_at_close:
            lease.close()
        if lose_state:
            for directory in self.config.dirs:
                (directory / "state.json").unlink(missing_ok=True)
            # Damage is found again.
            self.damaged += 1
        self.store = DiskStore.open(self.config, self.counters)
        assert before <= self.present()
        for key in self.present() - before:
            with contextlib.suppress(CorruptExtentError):
                read_keys(self.store, [key])
                assert key in self.written

    @invariant()
    def what_is_there_was_written(self) -> None:
        if hasattr(self, "store"):
            assert physical_bytes(self.config.dirs) <= self.config.size_bytes
            assert (self.counters["store.corrupt_extents"] > 0) <= (self.damaged > 0)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.base)
        self.keeper.stop()


StoreMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestStore = StoreMachine.TestCase
