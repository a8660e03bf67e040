from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.core.errors import StoreLockedError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.format.state import State
from sglang_hcache.store.io.engine import IOEngine
from sglang_hcache.store.keeper import Keeper
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys
from tests.waiting import wait_until as wait_until

CHUNKS = 4


def kill(store: DiskStore) -> None:
    """What ``kill -9`` leaves: nothing is saved any more, and the locks are free."""
    Inside(store).keeper.close(5)
    for volume in Inside(store).volumes:
        volume.directory.lock.release()


def save(store: DiskStore) -> None:
    """Write the state down now."""
    store._saved.save_everywhere(store._meta())


def open_when_unlocked(config: StoreConfig) -> DiskStore:
    """The store of ``config``, as soon as whatever held its directories has let them go."""
    opened: list[DiskStore] = []

    def is_open() -> bool:
        with contextlib.suppress(StoreLockedError):
            opened.append(DiskStore.open(config, Counters()))
        return bool(opened)

    wait_until(is_open)
    return opened[0]


def sick(names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories of these names cannot be opened."""
    acquire = StoreDirectory.acquire

    def fail(self: StoreDirectory) -> None:
        if self.path.name in names:
            raise OSError(errno.EIO, "sick")
        acquire(self)

    monkeypatch.setattr(StoreDirectory, "acquire", fail)


def keys_of(number: int) -> tuple[bytes, ...]:
    """A run of ``CHUNKS``."""
    return make_keys(10 * number, CHUNKS)


def served(config: StoreConfig, open_store: Callable[..., DiskStore], runs: int) -> list[int]:
    """Which of the first ``runs`` runs a server of this store has; reads them all."""
    store = open_store(config)
    found = [number for number in range(runs) if match_keys(store, keys_of(number)) == CHUNKS]
    for number in found:
        read_keys(store, keys_of(number))
    store.close()
    return found


def state_of(folder: Path) -> State:
    """What is written down there."""
    return State.from_bytes((folder / "state.json").read_bytes())


def write_state(folder: Path, **changes: Any) -> None:
    """As if a server had written it down so."""
    (folder / "state.json").write_bytes(replace(state_of(folder), **changes).to_bytes())


def conditions(store: DiskStore) -> list[str]:
    return [item.condition for item in store.stats().directories]


def is_healthy(store: DiskStore) -> bool:
    return set(conditions(store)) == {"healthy"}


def flip(path: Path, offset: int) -> None:
    """One bit is wrong then."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@contextlib.contextmanager
def preads(before: Callable[[Path, range], object]) -> Iterator[None]:
    """What reads segments without the I/O engine calls ``before(path, bytes)`` first, which may wait, or fail."""
    pread = os.pread

    def disturbed(fd: int, size: int, offset: int) -> bytes:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.suffix == ".seg":
            before(path, range(offset, offset + size))
        return pread(fd, size, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", disturbed)
        yield


def fail(number: int = errno.EIO, after_s: float = 0.0) -> None:
    time.sleep(after_s)
    raise OSError(number, os.strerror(number))


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens in the background: for tests that count what is evicted."""
    monkeypatch.setattr(Keeper, "start", lambda self: None)
    monkeypatch.setattr(Keeper, "close", lambda self, timeout_s: True)


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
