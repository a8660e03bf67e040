"""Changing a store that no server uses: eviction, clearing and erasing."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_hcache.core.config import IOEngineName
from sglang_hcache.core.errors import StoreIOError, StoreLockedError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.erasure import Erased
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.inspect.view import DirectoryInfo, StoreView
from sglang_hcache.store.store import DiskStore
from sglang_hcache.store.volumes.health import Condition


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Sizes of a store."""

    directories: list[DirectoryInfo]
    chunks: int
    runs: int

    @classmethod
    def of(cls, view: StoreView) -> Snapshot:
        return cls(view.directories(), view.chunks(), len(view.places))

    @property
    def physical_bytes(self) -> int:
        return sum(item.physical_bytes for item in self.directories)

    @property
    def segment_files(self) -> int:
        return sum(item.segments for item in self.directories)


@dataclass(frozen=True, slots=True)
class Change:
    """What an operation did."""

    before: Snapshot
    after: Snapshot
    counts: dict[str, int]
    """Events of the store while it was open, such as ``store.segments_evicted``."""


def collect(dirs: Sequence[Path], to_bytes: int | None = None, max_age_s: float | None = None) -> Change:
    """Free what nobody needs: torn writes, files of no run, temporary files.

    With ``to_bytes`` also evict segments, lowest score first, until the store takes no more than that, or until
    nothing but the directories is left. With ``max_age_s`` also delete what is that old.

    Raises:
        StoreLockedError: a server runs.
        StoreError: the store cannot be opened, a directory is out, or files cannot be deleted.
    """
    with _opened(dirs, max_age_s) as (store, before, segment_bytes, counters):
        if to_bytes is not None:
            _shrink(store, to_bytes, segment_bytes, counters)
    return _change(dirs, before, counters)


def clear(dirs: Sequence[Path]) -> Change:
    """Remove all chunks, also where directories are missing or sick.

    Those lose their files when a server has them again: a note in the others says that what is there does not count.

    Raises:
        StoreLockedError: a server runs.
        StoreError: the store cannot be opened, or no directory takes the note.
    """
    with _opened(dirs, needs_all=False) as (store, before, _, counters):
        store.clear()
    return _change(dirs, before, counters)


def erase(dirs: Sequence[Path], namespace_ids: Collection[bytes]) -> tuple[Erased, Change]:
    """Remove all of these namespaces and no other's chunks, for good. Do it again if it was killed.

    Where a segment could not be read, nobody knows whose chunks are there: others' go as well.

    Raises:
        StoreLockedError: a server runs.
        StoreError: the store cannot be opened, a directory is missing or sick, or something could not be erased.
    """
    with _opened(dirs) as (store, before, _, counters):
        erased = store.erase(namespace_ids)
    return erased, _change(dirs, before, counters)


def config_of(identity: StoreIdentity, dirs: Sequence[Path]) -> StoreConfig:
    """The settings of the store's last server: with others, opening it might evict.

    Raises:
        ConfigError: they contradict each other.
    """
    return StoreConfig(
        dirs=tuple(dirs),
        size_bytes=identity.size_bytes,
        free_floor_bytes=identity.free_floor_bytes,
        free_floor_percent=identity.free_floor_percent,
        segment_bytes=identity.segment_bytes,
        io_engine=IOEngineName.POSIX,  # not worth comparing engines
    )


def refuse_if_locked(view: StoreView) -> None:
    """
    Raises:
        StoreLockedError: somebody uses the store.
    """
    if view.lock_holder is not None:
        raise StoreLockedError(f"{view.paths[0]} is in use by {view.lock_holder}; stop it first")


@contextlib.contextmanager
def _opened(
    dirs: Sequence[Path], max_age_s: float | None = None, *, needs_all: bool = True
) -> Iterator[tuple[DiskStore, Snapshot, int, Counters]]:
    """The store, opened as its last server did; what it held before; bytes of a segment; what it counts."""
    with StoreView.open(dirs) as view:
        refuse_if_locked(view)
        before, identity, paths = Snapshot.of(view), view.identity, view.paths
    for item in before.directories:
        if needs_all and item.condition != Condition.HEALTHY:
            # Opening would forget the runs that lie there.
            raise StoreIOError(
                f"{item.path}: {item.reason}; this needs all directories, see `hcache store fsck`"
            )
    counters = Counters()
    config = replace(config_of(identity, paths), max_age_s=max_age_s, makes_dirs=False)
    store = DiskStore.open(config, counters)
    try:
        store.delete_leftovers()
        yield store, before, identity.segment_bytes, counters
    finally:
        store.close()


def _change(dirs: Sequence[Path], before: Snapshot, counters: Counters) -> Change:
    with StoreView.open(dirs) as view:
        return Change(before, Snapshot.of(view), counters.snapshot())


def _shrink(store: DiskStore, to_bytes: int, segment_bytes: int, counters: Counters) -> None:
    """Evict until no more than ``to_bytes`` are allocated, or nothing is left.

    Raises:
        StoreIOError: files cannot be deleted, and evicting more, if more is there, would only cost chunks.
    """
    while (excess := store.allocated_bytes() - to_bytes) > 0:
        # Measuring takes long in a large store: several at once, but fewer than could be too many.
        for _ in range(max(1, excess // (2 * segment_bytes))):
            if not store.evict_one():
                if files := store.leftover_files():
                    left = store.stats().segments
                    stay = (
                        f"; until they are gone nothing else is evicted: {left} segments stay" if left else ""
                    )
                    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
                    raise StoreIOError(f"files cannot be deleted: {files[0]}{more}{stay}")
                return
