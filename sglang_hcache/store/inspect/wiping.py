"""Deleting a store's own files, whatever version made them: they are known by their names, and nothing is read."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_hcache.core.errors import StoreFormatError, StoreIOError
from sglang_hcache.store.format.names import LOCK_NAME, SUPERBLOCK_NAME
from sglang_hcache.store.volumes.directory import StoreDirectory


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """What one directory holds of a store."""

    path: Path
    files: int
    bytes: int
    """Allocated, as ``du`` counts."""


def look_for_own(dirs: Sequence[Path]) -> list[OwnFiles]:
    """What :func:`wipe` would delete; of a directory without any there is nothing to say.

    Raises:
        StoreLockedError: a server runs.
        StoreFormatError: no store is in one of them.
        StoreIOError: one is missing or sick.
    """
    with _locked(dirs):
        return [_counted(path, _own(path)) for path in dirs]


def wipe(dirs: Sequence[Path]) -> list[OwnFiles]:
    """Delete the store's own files but for ``lock``, which may be somebody's by now; others' files stay.

    A superblock goes last: who is killed can do it again.

    Raises:
        StoreLockedError: a server runs.
        StoreFormatError: no store is in one of them; nothing is deleted.
        StoreIOError: one is missing or sick, or a file cannot be deleted.
    """
    with _locked(dirs):
        own = {path: _own(path) for path in dirs}
        done = [_counted(path, files) for path, files in own.items()]
        for files in own.values():
            for file in sorted(files, key=lambda file: file.name == SUPERBLOCK_NAME):
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
        StoreFormatError: there are such files but no superblock: they may be of another program.
        OSError: it cannot be asked.
    """
    directory = StoreDirectory(path)
    names = {entry.name for entry in path.iterdir()} - {*directory.strangers(), LOCK_NAME}
    files: dict[Path, int] = {}
    for name in names:
        found = (path / name).lstat()
        if stat.S_ISREG(found.st_mode):
            files[path / name] = found.st_blocks * 512
    if files and path / SUPERBLOCK_NAME not in files:
        raise StoreFormatError(
            f"{path} has no {SUPERBLOCK_NAME}: are its files of a store? Delete them by hand"
        )
    return files


def _counted(path: Path, files: dict[Path, int]) -> OwnFiles:
    return OwnFiles(path, len(files), sum(files.values()))
