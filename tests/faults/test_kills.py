"""kill -9 at random instants, again and again in the same directories, also after the state was damaged.

``--kills N`` says how often; ``--fault-seed`` what the processes do and what is damaged between them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sglang_hcache.core.errors import StoreFormatError, TierMissError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, physical_bytes, read_keys, small_config
from tests.faults.survivors import Survivors
from tests.faults.traffic import MOST_CHUNKS, Habits
from tests.faults.worker import BROKEN, CORRUPT, OPENED, REFUSED, Job, Report, work
from tests.waiting import wait_until

T = TypeVar("T")

MIB = 2**20
NUM_KEYS = 240
LARGE, SMALL = 96 * MIB, 9 * MIB
"""Caps: with the large one nothing is evicted, with the small one all the time."""
LONG_S = 60.0
"""Longer than any step takes, however busy the machine is."""
OWN_NAMES = ("lock", "superblock.json", "superblock.tmp", "state.json", "state.tmp", "segment-*.seg")


def config_of(base: Path, num_dirs: int, size: int) -> StoreConfig:
    return replace(small_config(base, num_dirs, size=size, segment=MIB // 2), io_timeout_s=LONG_S)


class Killing:
    """One store, the processes that use it, and what is known of it."""

    def __init__(self, base: Path, num_dirs: int, seed: str) -> None:
        self.base = base
        self.config = config_of(base, num_dirs, LARGE)
        self.bound = LARGE
        """The cap with which the store was last opened to the end: until the next one no more is there."""
        self.chance = random.Random(seed)
        self.seed = seed
        self.model = Survivors()
        self.counts: Counter[str] = Counter()
        self.decks: dict[str, list[Any]] = {}
        self.slowest_open_s = 0.0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([work.__module__])

    def round(self) -> None:
        """A process uses the store and is killed; sometimes something is damaged; mostly the store is checked."""
        self._use_and_kill(self._draw("caps", [LARGE, SMALL]))
        self.counts["kills"] += 1
        self._look()
        damage = self._draw("damages", ["", "", "", "lose", "garble", "empty"])
        if damage:
            {"lose": self.lose_state, "garble": self.garble_state, "empty": self.empty_directory}[damage]()
        if damage or self.chance.random() < 0.6:
            self.check()

    def _draw(self, deck: str, cards: Sequence[T]) -> T:
        """One of ``cards``, each of them before any comes again: few rounds see all."""
        left = self.decks.setdefault(deck, [])
        if not left:
            left += self.chance.sample(cards, len(cards))
        return left.pop()

    def _use_and_kill(self, cap: int) -> None:
        self.config = config_of(self.base, len(self.config.dirs), cap)
        self.bound = max(self.bound, cap)
        habits = Habits(
            seed=f"{self.seed} {self.counts['kills']}",
            num_threads=self.chance.randint(1, 3),
            num_keys=NUM_KEYS,
            clear_rate=self.chance.choice([0.0, 0.02]),
            clear_above=0.7 if cap == LARGE else 2.0,
        )
        job = Job(self.config, habits, sync=self.chance.random() < 0.5)
        reports, sender = self.context.Pipe(duplex=False)
        process = self.context.Process(target=work, args=(job, sender))
        process.start()
        sender.close()
        try:
            self._follow(reports)
        finally:
            process.kill()
            process.join(LONG_S)
        assert process.exitcode == -9, f"the process ended by itself: {process.exitcode}"
        self._drain(reports)
        self.model.killed()
        if cap == SMALL:
            self.model.lost()
        self._measure()

    def _follow(self, reports: Connection) -> None:
        """Listen and measure until the instant of the kill comes: a time, or a report."""
        kill_at = time.monotonic() + self.chance.uniform(0, self._draw("times", [0.08, 0.7, 0.7]))
        reports_left = self.chance.choice([10_000, self.chance.randint(1, 60)])
        while time.monotonic() < kill_at and reports_left > 0:
            while reports_left > 0 and reports.poll(0.004):
                self._learn(reports.recv())
                reports_left -= 1
            self._measure()

    def _measure(self) -> None:
        used = physical_bytes(self.config.dirs)
        assert used <= self.bound, "over the cap"
        self.counts["samples"] += 1
        self.counts["highest"] = max(self.counts["highest"], 100 * used // self.bound)

    def _drain(self, reports: Connection) -> None:
        """What it said before it died; the last report may be cut off."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._learn(reports.recv())

    def _learn(self, report: Report) -> None:
        assert report.what != BROKEN, report.text
        if report.what == OPENED:  # what was too much for a smaller cap is gone
            self.bound = self.config.size_bytes
        if report.what == REFUSED:
            assert self.config.size_bytes == SMALL, report.text
        if report.what == CORRUPT:
            raise AssertionError(f"chunks {report.keys} are damaged, but nothing was")
        self.model.learn(report)

    def _look(self) -> None:
        """What a kill leaves is no damage, whether it came while a run was written, evicted or cleared."""
        with contextlib.suppress(StoreFormatError), StoreView.open(self.config.dirs) as view:
            errors = [item.what for item in check(view) if item.is_error]
            assert not errors

    # -- damage ----------------------------------------------------------------------------------

    def _state_files(self) -> list[Path]:
        return [path for directory in self.config.dirs for path in directory.glob("state.json")]

    def lose_state(self) -> None:
        self.counts["states lost"] += 1
        for path in self._state_files():
            path.unlink()

    def garble_state(self) -> None:
        """Change, cut or remove one of its files."""
        self.counts["states garbled"] += 1
        for path in self.chance.sample(self._state_files(), min(1, len(self._state_files()))):
            data = bytearray(path.read_bytes())
            at = self.chance.randrange(len(data) + 1)
            kind = self.chance.choice(["bytes", "cut", "all", "gone"])
            if kind == "gone":
                path.unlink()
                continue
            if kind == "bytes":
                data[at : at + 100] = self.chance.randbytes(len(data[at : at + 100]))
            path.write_bytes({"cut": data[:at], "all": self.chance.randbytes(len(data))}.get(kind, data))

    def empty_directory(self) -> None:
        self.counts["directories emptied"] += 1
        directory = self.chance.choice(self.config.dirs)
        shutil.rmtree(directory, ignore_errors=True)
        if self.chance.random() < 0.5:
            directory.mkdir(mode=0o700)
        self.model.lost(everything=len(self.config.dirs) == 1)

    # -- checking --------------------------------------------------------------------------------

    def check(self) -> None:
        """Open the store, compare it with the model and with its own files."""
        self.counts["checks"] += 1
        begun = time.monotonic()
        counters = Counters()
        store = DiskStore.open(self.config, counters)
        self.slowest_open_s = max(self.slowest_open_s, time.monotonic() - begun)
        assert self.slowest_open_s < LONG_S
        try:
            self.bound = self.config.size_bytes
            self._measure()
            # One that was emptied is out at first.
            wait_until(lambda: all(item.condition == "healthy" for item in store.stats().directories), LONG_S)
            with Inside(store).space._lock:  # the keeper may be evicting
                check_files(store)
            evicted = store.stats().totals.get("segments_evicted", 0)  # begins anew with a new state
            self.counts["segments evicted"] = max(self.counts["segments evicted"], evicted)
            present = self._served(store)
            missing = self.model.must - present
            assert not missing, f"acknowledged, but not served: {sorted(missing)}"
            strange = present - self.model.may
            assert not strange, f"served, but cleared or never written: {sorted(strange)}"
            assert not counters.snapshot().get("store.corrupt_extents"), "damaged, but nothing was"
            self.model.found(present)
        finally:
            store.close()
        self._measure()

    def _served(self, store: DiskStore) -> set[int]:
        """Reads everything, as many keys at a time as a run has at most."""
        served: set[int] = set()
        for first in range(0, NUM_KEYS, MOST_CHUNKS):
            here = [n for n in range(first, first + MOST_CHUNKS) if store.contains(make_keys(n, 1)[0])]
            try:
                if here:
                    read_keys(store, [make_keys(number, 1)[0] for number in here])
                served.update(here)
            except TierMissError:  # of runs with layers of other sizes
                served.update(number for number in here if self._is_served(store, number))
        return served

    def _is_served(self, store: DiskStore, number: int) -> bool:
        key = make_keys(number, 1)
        if not store.contains(key[0]):
            return False
        read_keys(store, key)
        return True

    def summary(self) -> str:
        names = (
            "kills",
            "checks",
            "states lost",
            "states garbled",
            "directories emptied",
            "segments evicted",
            "samples",
        )
        counts = ", ".join(f"{self.counts[name]} {name}" for name in names)
        return (
            f"{len(self.config.dirs)} directories: {counts}, {self.model.acknowledged} runs and "
            f"{self.model.cleared} clears acknowledged, at most {self.counts['highest']} % of the cap, "
            f"slowest start {self.slowest_open_s:.2f} s"
        )


def check_files(store: DiskStore) -> None:
    """Files and memory agree: nothing is left behind by whoever was killed."""
    segments = Inside(store).catalog.segments()
    for volume in Inside(store).volumes:
        sizes = volume.directory.segment_sizes()
        assert sizes.keys() <= {item.number for item in segments if volume.stripe in item.members}
        used = {item.number: item.used[volume.stripe] for item in segments if item.used[volume.stripe]}
        assert {number: size for number, size in sizes.items() if size} == used
        names = [path for path in volume.path.iterdir() if not any(path.match(name) for name in OWN_NAMES)]
        assert not names, "left behind"


@pytest.mark.parametrize("num_dirs", [1, 2, 3])
def test_kill_9_again_and_again(
    tmp_path: Path, pytestconfig: pytest.Config, seed: int, note: Callable[[str], None], num_dirs: int
) -> None:
    kills = (int(pytestconfig.getoption("--kills")) + num_dirs - 1) // 3
    killing = Killing(tmp_path, num_dirs, f"{seed} {num_dirs}")
    try:
        for _ in range(kills):
            killing.round()
        killing.check()
        assert killing.model.acknowledged >= kills
    finally:
        note(f"kill -9, {killing.summary()}")
