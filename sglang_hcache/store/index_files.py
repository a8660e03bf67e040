"""The files of the index as files: which there are, whether they open, taking them away."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.store.format.names import INDEX_SUFFIXES
from sglang_hcache.store.volumes.health import OWN_ERRNOS


def log_of(path: Path) -> Path:
    """SQLite's log of the database at ``path``."""
    return path.with_name(path.name + "-wal")


def remove_index(path: Path) -> None:
    """Delete the database at ``path`` and what belongs to it. Raises OSError."""
    for suffix in INDEX_SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def replace_index(new: Path, path: Path) -> None:
    """Durably put the closed database ``new`` in the place of the one at ``path``. Raises OSError."""
    for suffix in INDEX_SUFFIXES[1:]:  # SQLite would take them for those of the new one
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.replace(new, path)
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_openable(path: Path) -> None:
    """As many files as SQLite opens, for it says of all errors alike that it is unable to open the database.

    Raises:
        StoreFormatError: the database is missing, or damaged so that it cannot be opened.
        OSError: this process lacks files or memory.
    """
    log = log_of(path)
    with contextlib.ExitStack() as opened:
        try:
            for file in (path, log if os.path.lexists(log) else path, path.parent):
                opened.callback(os.close, os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except FileNotFoundError:
            raise StoreFormatError(f"the index {path} is missing") from None
        except OSError as error:
            if error.errno in OWN_ERRNOS:
                raise
            raise StoreFormatError(f"the index {path} cannot be used: {error}") from None
