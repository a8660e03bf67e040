"""All at once under traffic: a device that fails, fills up, comes short and hangs, and a directory that is deleted.

Then everything is well again.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.errors import CorruptExtentError, TierMissError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.io.engine import IOOp
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.volumes import health as health_module
from sglang_hcache.testing.io_faults import Fault, FaultEngine, HangingEngine
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, physical_bytes, read_keys, small_config, write_keys
from tests.faults.damage import HANG_S, in_time
from tests.faults.traffic import SHAPES, Habits, Traffic, Watch, over_cap
from tests.unit.store.conftest import is_healthy, wait_until

MIB = 2**20
SOAK_S = 8.0
HANGS_FOR_S = 1.0
NUM_KEYS = 200
FAULTS = (
    Fault(errno.EIO), Fault(errno.EIO, share_done=0.5), Fault(errno.ENOSPC), Fault(errno.EROFS),
    Fault(errno.ENODEV), Fault(0, share_done=0.5), Fault(0),
)  # fmt: skip


class Trouble:
    """An engine whose device is well for a while, then fails or hangs now and then, then is well again.

    An operation that comes short is rare: it counts as damage, and too much of it would leave nothing to serve.
    """

    def __init__(self, num_dirs: int, chance: random.Random) -> None:
        self._chance = chance
        self.hanging = HangingEngine(PosixEngine(num_dirs, 2), self._hangs)
        self.engine = FaultEngine(self.hanging, self._decide)
        self.rate = 0.0
        """Share of operations in trouble."""
        self.hung = 0
        self.failed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Trouble:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(HANG_S)
        self.rate = 0.0
        self.hanging.let_go()

    def _run(self) -> None:
        while not self._stop.wait(HANGS_FOR_S):
            self.rate = self._chance.choice([0.0, 0.02, 0.1])
            self.hanging.let_go()
            self.hanging.hangs = self._hangs

    def _decide(self, op: IOOp, number: int) -> Fault | None:
        if self._chance.random() >= self.rate:
            return None
        self.failed += 1
        fault = self._chance.choice(FAULTS)
        return fault if fault.error_number or self._chance.random() < 0.2 else None

    def _hangs(self, op: IOOp) -> bool:
        hangs = self._chance.random() < self.rate / 10
        self.hung += hangs
        return hangs


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("num_dirs", [1, 2])
def test_after_everything_that_can_happen_all_is_well(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chance: random.Random,
    note: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    num_dirs: int,
) -> None:
    caplog.set_level(logging.CRITICAL, "sglang_hcache")  # records hold errors, which hold open files
    monkeypatch.setattr(health_module, "_LONGEST_RETRY_S", 0.2)
    config = replace(small_config(tmp_path, num_dirs, size=10 * MIB, segment=MIB // 2), io_timeout_s=0.75)
    trouble = Trouble(num_dirs, chance)
    store = DiskStore.open(config, Counters(), trouble.engine)
    habits = Habits(seed=str(chance.random()), num_threads=3, num_keys=NUM_KEYS, clear_rate=0.002)
    try:
        with Watch(lambda: over_cap(config)) as watch, Traffic(store, habits) as traffic:
            with trouble:
                time.sleep(SOAK_S / 4)
                shutil.rmtree(config.dirs[-1], ignore_errors=True)
                time.sleep(SOAK_S / 4)
            be_patient(store)
            wait_until(lambda: is_healthy(store), HANG_S)
            written = traffic.counts["written"]
            wait_until(lambda: traffic.counts["written"] > written + 10, HANG_S)
        in_time(lambda: check_all_is_well(store, config))
    finally:
        in_time(store.close)
    note(
        f"soak, {num_dirs} directories: {trouble.failed} operations failed, {trouble.hung} hung, {watch.samples} "
        f"samples of the cap; {dict(sorted(traffic.counts.items()))}"
    )
    store = DiskStore.open(config, Counters())
    try:
        read_keys(store, make_keys(1000, 4))
        read_everything(store)
    finally:
        store.close()
    assert not open_segments(tmp_path)


def be_patient(store: DiskStore) -> None:
    """Nothing hangs any more, but a disk may be slow."""
    store._reader._transfers._patience_s = HANG_S
    for volume in Inside(store).volumes:
        volume.patience_s = HANG_S


def check_all_is_well(store: DiskStore, config: StoreConfig) -> None:
    wait_until(lambda: is_healthy(store), HANG_S)
    write_keys(store, make_keys(1000, 4), SHAPES[0])
    read_keys(store, make_keys(1000, 4))
    read_everything(store)
    assert Inside(store).is_kept
    # What was cleared under a lease goes by and by.
    wait_until(lambda: not Inside(store).leftovers, HANG_S)
    segments = Inside(store).catalog.segments()
    assert [segment.pins for segment in segments] == [0] * len(segments)
    assert store._operations.drain(0)
    gc.collect()
    wait_until(lambda: not open_segments(config.dirs[0].parent), HANG_S)
    for volume in Inside(store).volumes:
        expected = {segment.number for segment in segments if volume.stripe in segment.members}
        assert volume.directory.segment_sizes().keys() == expected
        assert volume._caller.call(lambda: True, HANG_S)
    assert physical_bytes(config.dirs) <= Inside(store).reserved_bytes <= config.size_bytes


def read_everything(store: DiskStore) -> int:
    """Reads every key; those that were damaged are misses. Returns how many are served."""
    served = 0
    for key in make_keys(0, NUM_KEYS):
        with contextlib.suppress(TierMissError, CorruptExtentError):
            read_keys(store, [key])
            served += 1
    return served


def open_segments(base: Path) -> list[str]:
    """Segment files that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith(str(base)) and "segment-" in name:
                found.append(name)
    return found
