"""Changing a store that no server uses: eviction, clearing, erasing, and deleting its files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_hcache.core.config import IOEngineName
from sglang_hcache.core.errors import StoreFormatError, StoreIOError, StoreLockedError
from sglang_hcache.core.observer import Counters
from sglang_hcache.core.paths import ranks_named_by
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.erasure import Erased
from sglang_hcache.store.format.names import LOCK_NAME, STATE_TMP_NAME, SUPERBLOCK_NAME, SUPERBLOCK_TMP_NAME
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.inspect.view import DirectoryInfo, StoreView
from sglang_hcache.store.store import DiskStore
from sglang_hcache.store.volumes.directory import StoreDirectory
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
        for item in before.directories:
            if item.condition == Condition.HEALTHY:  # one that hangs would hold us up for good
                with contextlib.suppress(OSError):
                    for name in (SUPERBLOCK_TMP_NAME, STATE_TMP_NAME):
                        (Path(item.path) / name).unlink(missing_ok=True)
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


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """What one directory holds of a store."""

    path: Path
    files: int
    bytes: int
    """Allocated, as ``du`` counts."""


def look_for_own(dirs: Sequence[Path]) -> list[OwnFiles]:
    """What :func:`wipe` would delete.

    Raises:
        StoreLockedError: a server runs.
        StoreFormatError: no store is in one of them.
        StoreIOError: one is missing or sick.
    """
    with _locked(dirs):
        return [_counted(path, _own(path)) for path in dirs]


def wipe(dirs: Sequence[Path]) -> list[OwnFiles]:
    """Delete the store's own files but for ``lock``, which may be somebody's by now; others' files stay.

    Superblocks go last, when nothing else is left in any directory: who is killed can do it again,
    between two superblocks with those directories that have one.

    Raises:
        StoreLockedError: a server runs.
        StoreFormatError: no store is in one of them; nothing is deleted.
        StoreIOError: one is missing or sick, or a file cannot be deleted.
    """
    with _locked(dirs):
        own = {path: _own(path) for path in dirs}
        done = [_counted(path, files) for path, files in own.items()]
        every = [file for files in own.values() for file in files]
        for file in sorted(every, key=lambda file: file.name == SUPERBLOCK_NAME):
            file.unlink(missing_ok=True)
        return done


@contextlib.contextmanager
def _locked(dirs: Sequence[Path]) -> Iterator[None]:
    """No server begins meanwhile. Raises StoreLockedError; StoreIOError for whatever the file system says."""
    with contextlib.ExitStack() as stack:
        try:
            for path in sorted(dirs):
                if not path.is_dir():
                    raise StoreIOError(f"{path} is not a directory")
                lock = StoreDirectory(path).lock
                if (path / SUPERBLOCK_NAME).exists():  # else even the lock may be of another program
                    lock.take()
                    stack.callback(lock.release)
            yield
        except OSError as error:
            raise StoreIOError(f"cannot remove the store: {error}") from error


def _own(path: Path) -> dict[Path, int]:
    """The store's files in a directory with allocated bytes, but for the lock.

    Raises:
        StoreFormatError: there are such files but no superblock: they may be of another program. Or there are none, or
            stores of ranks are below.
        OSError: it cannot be asked.
    """
    directory = StoreDirectory(path)
    named = [path / name for name in directory.strangers() if ranks_named_by(name) is not None]
    ranks = [rank for rank in named if rank.is_dir()]
    if any(map(_own_names, ranks)):
        raise StoreFormatError(f"{path} holds stores of ranks ({ranks[0].name} and so on); name those")
    files: dict[Path, int] = {}
    for name in _own_names(path):
        found = (path / name).lstat()
        if stat.S_ISREG(found.st_mode):
            files[path / name] = found.st_blocks * 512
    if files and path / SUPERBLOCK_NAME not in files:
        raise StoreFormatError(
            f"{path} has no {SUPERBLOCK_NAME}: are its files of a store? Delete them by hand"
        )
    # A lock is no sign of a store: on the mount point of a disk that is not mounted it would pass for a purged one.
    if not files:
        why = "is it the right directory?"
        if ranks or os.path.lexists(path / LOCK_NAME):
            why = "is its disk mounted? If its store was deleted before, name only the others"
        elif directory.is_empty():
            why = "it is empty: is its disk mounted?"
        raise StoreFormatError(f"{path} holds no store; {why}")
    return files


def _own_names(path: Path) -> set[str]:
    """What a store made in a directory, but for the lock."""
    return {entry.name for entry in path.iterdir()} - {*StoreDirectory(path).strangers(), LOCK_NAME}


def _counted(path: Path, files: dict[Path, int]) -> OwnFiles:
    return OwnFiles(path, len(files), sum(files.values()))
