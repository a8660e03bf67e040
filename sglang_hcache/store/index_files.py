"""The files of the index as files: which there are, whether they open, taking them away, and a private copy of them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sglang_hcache.core.errors import StoreFormatError, StoreTimeoutError, TemporaryFolderError
from sglang_hcache.store.format.names import INDEX_SUFFIXES
from sglang_hcache.store.volumes.health import FULL_ERRNOS, OWN_ERRNOS

_PATIENCE_S = 5.0
"""To copy an index that changes."""
_ATTEMPTS = 5
"""At least: one of a large index may take that long."""
_FIRST_PAUSE_S = 0.005
_PIECE_BYTES = 2**24
_HEADER_BYTES = 32
"""Header of the log. Its salts change whenever SQLite writes the log from its beginning again."""

_State = tuple[int, int, int, bytes]


def log_of(path: Path) -> Path:
    """SQLite's log of the database at ``path``."""
    return path.with_name(path.name + "-wal")


def remove_index(path: Path) -> None:
    """Delete the database at ``path``, then its log, without which it would be an older one. Raises OSError."""
    for suffix in INDEX_SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


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


@contextlib.contextmanager
def private_copy(path: Path, go_on: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """The database at ``path`` with its log, copied to a folder that only this user can read and that goes at the end.

    The database is copied before its log, and the log must not have begun anew meanwhile: then every page that a
    checkpoint wrote into the database during the copy is in the log that was copied, and is read from there.

    Args:
        go_on: called while it is copied; what it raises ends that.

    Raises:
        OSError: it cannot be read.
        TemporaryFolderError: there is no room for the copy.
        StoreTimeoutError: it changes too fast, which says nothing of it.
    """
    with _private_folder() as folder:
        copy, give_up_at, pause_s = Path(folder) / path.name, time.monotonic() + _PATIENCE_S, _FIRST_PAUSE_S
        attempts = 1
        while not _copied(path, copy, go_on):
            if time.monotonic() >= give_up_at and attempts >= _ATTEMPTS:
                raise StoreTimeoutError(f"the index {path} changed all the time while it was read; try again")
            attempts += 1
            time.sleep(pause_s)
            pause_s *= 1.5
        yield copy


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="hcache-index-", ignore_cleanup_errors=True)
    except OSError as error:  # FileNotFoundError where no folder at all takes a file
        raise TemporaryFolderError(
            f"no folder for temporary files takes a copy of the index: {error.strerror or error}; "
            "set TMPDIR to one that has room"
        ) from None


def _copied(path: Path, copy: Path, go_on: Callable[[], None]) -> bool:
    before = _state(path)
    try:
        _copy(path, copy, go_on)
        log_of(copy).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            _copy(log_of(path), log_of(copy), go_on)
    except OSError as error:
        if error.errno not in FULL_ERRNOS:  # of which only writing can be one
            raise
        raise TemporaryFolderError(
            f"there is no room for a copy of the index in {copy.parent.parent}, the folder for temporary files: "
            f"{error.strerror}; set TMPDIR to one that has room"
        ) from None
    return _state(path) == before


def _copy(path: Path, to: Path, go_on: Callable[[], None]) -> None:
    with path.open("rb") as source, to.open("wb") as target:
        while piece := source.read(_PIECE_BYTES):
            target.write(piece)
            go_on()


def _state(path: Path) -> _State:
    """What stays as long as a copy that was begun is good; the database's own state counts where there is no log."""
    header = b""
    with contextlib.suppress(FileNotFoundError), log_of(path).open("rb") as log:
        header = log.read(_HEADER_BYTES)
    found = path.stat()
    return (found.st_ino, *((0, 0) if header else (found.st_mtime_ns, found.st_size)), header)
