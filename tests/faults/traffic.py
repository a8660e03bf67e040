"""Threads that use a store as a server would, only faster, and note what happens."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sglang_hcache.core.errors import CorruptExtentError, StoreError, TierMissError
from sglang_hcache.store import DiskStore, ReadLease, StoreConfig
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, physical_bytes, read_keys, write_keys

SHAPES = ((8192, 5000, 4096, 100), (4096, 3000, 8192), (12_288,))
"""Layers of the runs, bytes a chunk."""

MOST_CHUNKS = 8
"""In a run."""

_PAUSE_S = 0.005
"""After an error: it would come again at once."""


@dataclass(frozen=True)
class Habits:
    """What each thread does how often."""

    seed: str
    num_threads: int
    num_keys: int
    """Keys 0 to ``num_keys - 1`` are written, again and again."""
    clear_rate: float = 0.0
    """Share of clears."""
    clear_above: float = 2.0
    """Clear when this share of the cap is used: where nothing shall be evicted."""


class Traffic:
    """Writes, reads, leases and clears from several threads between ``__enter__`` and ``__exit__``.

    A ``StoreError`` or a miss is an answer; wrong bytes and any other exception are kept in ``broken``.
    """

    def __init__(self, store: DiskStore, habits: Habits) -> None:
        self.store = store
        self.habits = habits
        self.counts: Counter[str] = Counter()
        """Calls that ended, by what they ended with."""
        self.broken: list[str] = []
        """Tracebacks of what must not happen."""
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._use, args=(number,), daemon=True)
            for number in range(habits.num_threads)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self.join(60.0)
        if kind is None:
            assert not self.broken, self.broken[0]

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the threads; fails if one hangs."""
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "a thread that uses the store hangs"

    def _use(self, thread: int) -> None:
        chance = random.Random(f"{self.habits.seed} {thread}")
        leases: list[ReadLease] = []
        try:
            while not self._stop.is_set():
                self._step(chance, leases)
        except BaseException:
            self.fail(traceback.format_exc())
        for lease in leases:
            lease.close()

    def fail(self, text: str) -> None:
        self.broken.append(text)

    def _step(self, chance: random.Random, leases: list[ReadLease]) -> None:
        draw = chance.random()
        stats = self.store.stats()
        if draw < self.habits.clear_rate or stats.used_bytes > self.habits.clear_above * stats.cap_bytes:
            self.clear()
        elif draw < 0.6:
            self.write(*self._range(chance), chance.choice(SHAPES))
        elif draw < 0.9:
            self.read(*self._range(chance))
        elif leases and (draw < 0.95 or len(leases) > 2):
            leases.pop().close()
        else:
            self._hold(chance, leases)

    def clear(self) -> None:
        try:
            self.store.clear()
            self.counts["cleared"] += 1
        except StoreError as error:
            self.counts[f"clear {type(error).__name__}"] += 1

    def write(self, first: int, count: int, layers: tuple[int, ...]) -> None:
        try:
            write_keys(self.store, make_keys(first, count), layers)
            self.counts["written"] += 1
        except StoreError as error:
            self.counts[f"write {type(error).__name__}"] += 1
            time.sleep(_PAUSE_S)

    def read(self, first: int, count: int) -> None:
        keys = make_keys(first, count)
        found = keys[: match_keys(self.store, keys)]
        if not found:
            return
        try:
            read_keys(self.store, found)
            self.counts["read"] += 1
        except TierMissError:  # evicted meanwhile, or of runs with different layers
            self.counts["missed"] += 1
        except CorruptExtentError as error:
            self.corrupt(first, len(found), str(error))
        except StoreError as error:
            self.read_failed(error)

    def corrupt(self, first: int, count: int, text: str) -> None:
        self.counts["read CorruptExtentError"] += 1

    def read_failed(self, error: StoreError) -> None:
        self.counts[f"read {type(error).__name__}"] += 1
        time.sleep(_PAUSE_S)

    def _hold(self, chance: random.Random, leases: list[ReadLease]) -> None:
        first, _ = self._range(chance)
        try:
            leases.append(self.store.lease(make_keys(first, 1)))
        except TierMissError:
            return

    def _range(self, chance: random.Random) -> tuple[int, int]:
        count = chance.randint(1, MOST_CHUNKS)
        return chance.randrange(self.habits.num_keys - count + 1), count


class Watch:
    """Asks ``complaint`` every few milliseconds, on a thread of its own, and keeps the first answer."""

    def __init__(self, complaint: Callable[[], str | None], interval_s: float = 0.005) -> None:
        self._complaint = complaint
        self._interval_s = interval_s
        self.samples = 0
        self.found: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(60.0)
        if kind is None:
            assert not self._thread.is_alive()
            assert self.found is None, self.found
            assert self.samples > 0

    def _run(self) -> None:
        try:
            while self.found is None and not self._stop.is_set():
                self.found = self._complaint()
                self.samples += 1
                time.sleep(self._interval_s)
        except BaseException:
            self.found = traceback.format_exc()


def over_cap(config: StoreConfig) -> str | None:
    """For a :class:`Watch`: the store takes more than it may."""
    used = physical_bytes(config.dirs)
    return f"{used} of {config.size_bytes}" if used > config.size_bytes else None
