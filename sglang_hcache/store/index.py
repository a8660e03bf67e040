"""The durable index: one SQLite row a run (docs/store-format.md, "Index").

WAL with ``synchronous=NORMAL``: a killed process loses nothing that was committed. A power cut may lose
the last commits, which turns data into garbage but never garbage into data, and a cache may forget. A
commit then costs no fsync beyond the one of the data.

No file of it is mapped into memory (no ``-shm``, which exclusive locking makes needless): a page of a mapped file that
cannot be read is SIGBUS, which ends the server, where a failing ``pread`` is a miss. The price is that no other process
can open the index meanwhile: :meth:`Index.read` reads a copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sglang_hcache.core.errors import (
    StoreFormatError,
    StoreFullError,
    StoreIOError,
    StoreLockedError,
    StoreTimeoutError,
    TemporaryFolderError,
)
from sglang_hcache.store.format.record import FORMAT_VERSION
from sglang_hcache.store.format.rows import (
    RUN_COLUMNS,
    SCHEMA,
    IndexContents,
    Recency,
    RunPlace,
    decode,
    decode_quarantine,
    decode_recency,
    encode,
)
from sglang_hcache.store.index_files import check_openable, log_of, private_copy, remove_index

BATCH_ROWS = 64
"""Rows changed in one transaction: bounds the log."""

LOG_BYTES = 2**20
"""Longest log (``-wal``) that may still grow: longer, its pages did not get into the database."""

_SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError, MemoryError)
"""What a damaged database raises, also where its message quotes the damage or a record claims a huge length."""

_BUSY_MS = 1000
"""To wait for another program that has the index open; much less than what counts as a device that hangs."""

_STEPS = 50_000
"""Of SQLite's virtual machine: a few thousand rows."""

LOAD_S = 60.0
"""For each few thousand rows while an index is read or checked; the whole takes a second for 100,000 runs."""

_PAGE_BYTES = 4096
_TRANSACTION_PAGES = 256
"""More than one changes."""
_EXCLUSIVE = "PRAGMA locking_mode = EXCLUSIVE"

_T = TypeVar("_T")
GoOn = Callable[[], None]


class Index:
    """Rows of runs and the recency of segments. Made, used and closed on one thread, its directory's.

    Every method may do I/O, and raises StoreFormatError where it finds the database damaged.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._log_path = log_of(path)
        self._file = os.stat(path)

    @classmethod
    def create(cls, path: Path, store_id: str, max_bytes: int) -> Index:
        """A new index in place of whatever lies at ``path``; call :meth:`mark_complete` when it is filled.

        Raises:
            StoreIOError: it cannot be written.
        """
        try:
            remove_index(path)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            index = cls(_connect(path), path)
        except OSError as error:
            raise StoreIOError(f"cannot create the index {path}: {error}") from error
        try:
            with index._translated():
                index._configure(max_bytes)
                index._connection.executescript(SCHEMA)
                with index._transaction():
                    index._connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
                    index._connection.execute("INSERT INTO meta VALUES ('store_id', ?)", (store_id,))
        except BaseException:
            index.discard()
            raise
        return index

    @classmethod
    def open(cls, path: Path, store_id: str, max_bytes: int, go_on: GoOn = lambda: None) -> Index:
        """The index at ``path``; ``go_on()`` is called while it is checked, what it raises ends that.

        Raises:
            StoreFormatError, StoreIOError: missing, damaged, incomplete or of another store; rebuild it.
            StoreLockedError: another program, such as a SQLite shell, has it open.
            OSError: this process lacks files or memory, which says nothing of the index.
        """
        check_openable(path)
        index = cls(_connect(path), path)
        try:
            index._configure(max_bytes)
            with index._telling(go_on):
                index._verify(store_id)
        except (*_SQLITE_ERRORS, StoreFormatError) as error:
            index.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                raise StoreLockedError(f"{path} is open in another program; close that first") from None
            raise StoreFormatError(f"the index {path} cannot be used: {error}") from None
        return index

    @classmethod
    def read(
        cls, path: Path, num_stripes: int, store_id: str, go_on: GoOn = lambda: None
    ) -> tuple[IndexContents, dict[str, str]]:
        """Contents and meta values of the index at ``path``, beside what writes to it; ``go_on`` as for :meth:`open`.

        Raises:
            StoreTimeoutError: it changes too fast.
            StoreFormatError: missing, damaged, incomplete or of another store.
            TemporaryFolderError: there is no room for a copy of it.
            OSError: this process lacks files or memory, which says nothing of the index.
        """
        check_openable(path)
        try:
            with private_copy(path, go_on) as copy, contextlib.closing(_connect(copy)) as connection:
                index = cls(connection, copy)
                connection.execute(_EXCLUSIVE)
                with index._telling(go_on):
                    index._verify(store_id)
                return index.load(num_stripes, go_on), index.meta()
        except (TemporaryFolderError, StoreTimeoutError):
            raise
        except (*_SQLITE_ERRORS, OSError, StoreFormatError, StoreIOError) as error:
            raise StoreFormatError(f"the index {path} cannot be used: {error}") from None

    def mark_complete(self) -> None:
        """Say that all known runs are in: without it :meth:`open` refuses, so that a rebuild starts over."""
        self.save_meta({"complete": "1"})

    def load(self, num_stripes: int, go_on: GoOn = lambda: None) -> IndexContents:
        """Everything; ``go_on`` as for :meth:`open`.

        Raises:
            StoreIOError: it cannot be read.
        """
        execute = self._connection.execute
        with self._translated(), self._telling(go_on):
            runs: dict[int, RunPlace] = {}
            bad: list[int] = []
            for fields in execute(f"SELECT {RUN_COLUMNS} FROM runs ORDER BY run"):
                place = decode(fields, num_stripes)
                if place is None:
                    bad.append(fields[0])
                else:
                    runs[fields[0]] = place
            recency = decode_recency(execute("SELECT segment, last_used, score FROM segments"))
            quarantined = decode_quarantine(execute("SELECT run, chunk, reason FROM quarantine"))
        return IndexContents(runs, bad, recency, quarantined)

    def insert(self, runs: Mapping[int, RunPlace]) -> None:
        """Commit runs, at most 64, by number.

        Raises:
            StoreFullError: the index has reached its size.
            StoreIOError: it cannot be written.
        """
        marks = ", ".join("?" * len(RUN_COLUMNS.split(",")))
        with self._transaction():
            self._connection.executemany(
                f"INSERT INTO runs ({RUN_COLUMNS}) VALUES ({marks})", [encode(*item) for item in runs.items()]
            )

    def quarantine(self, run: int, chunks: Mapping[int, str]) -> None:
        """Remember which chunks of a run are not served, and why. Raises StoreIOError or StoreFullError."""
        with self._transaction():
            self._connection.executemany(
                "INSERT OR IGNORE INTO quarantine VALUES (?, ?, ?)",
                [(run, chunk, _as_text(reason)) for chunk, reason in chunks.items()],
            )

    def delete_runs(self, rows: Iterable[int]) -> None:
        """Remove rows, in several transactions. Raises StoreIOError."""
        for batch in batches(rows):
            numbers = [(row,) for row in batch]
            with self._transaction():
                self._connection.executemany("DELETE FROM runs WHERE run = ?", numbers)
                self._connection.executemany("DELETE FROM quarantine WHERE run = ?", numbers)

    def delete_namespaces(self, namespace_ids: Collection[bytes], go_on: GoOn = lambda: None) -> None:
        """Remove every row of theirs, also those that the store lost sight of; ``go_on`` as for :meth:`open`.

        Raises StoreIOError.
        """
        with self._translated(), self._telling(go_on):
            found = self._connection.execute("SELECT run, namespace_id FROM runs")
            self.delete_runs([run for run, namespace_id in found if namespace_id in namespace_ids])

    def delete_segment(self, segment: int, rows: Sequence[int]) -> None:
        """Remove a segment's rows and recency. Raises StoreIOError."""
        self.delete_runs(rows)
        self.delete_recency([segment])

    def delete_recency(self, segments: Iterable[int]) -> None:
        """Remove that of segments that are gone, in several transactions. Raises StoreIOError."""
        for batch in batches(segments):
            with self._transaction():
                self._connection.executemany(
                    "DELETE FROM segments WHERE segment = ?", [(segment,) for segment in batch]
                )

    def save_recency(self, recency: Mapping[int, Recency]) -> None:
        """Store last uses and scores of segments, at most 64. Raises StoreIOError or StoreFullError."""
        with self._transaction():
            self._connection.executemany(
                "INSERT OR REPLACE INTO segments VALUES (?, ?, ?)",
                [(segment, item.last_used, item.score) for segment, item in recency.items()],
            )

    def meta(self) -> dict[str, str]:
        """All named values. Raises StoreIOError."""
        with self._translated():
            return dict(self._connection.execute("SELECT name, value FROM meta"))

    def save_meta(self, values: Mapping[str, str]) -> None:
        """Store named values. Raises StoreIOError or StoreFullError."""
        with self._transaction():
            self._connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def empty_log(self) -> None:
        """Put all pages of the log into the database, which has older ones until then. Raises StoreIOError."""
        with self._translated():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            if self._log_path.stat().st_size:
                # Not "full": then segments would be evicted, which makes no room in the log.
                raise StoreIOError(f"{self._log_path} cannot be emptied")

    def file_bytes(self) -> int:
        """Size of the database without its log."""
        with self._translated():
            return int(self._connection.execute("PRAGMA page_count").fetchone()[0]) * _PAGE_BYTES

    def is_in_place(self) -> bool:
        """Whether the file at its path is still the one that is open. Raises OSError."""
        try:
            return os.path.samestat(os.stat(self._path), self._file)
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Checkpoint and close; an error here costs nothing that was committed."""
        with contextlib.suppress(*_SQLITE_ERRORS):
            self._connection.close()

    def discard(self) -> None:
        """Close and delete one that could not be filled, as far as possible: it takes room that another one needs."""
        self.close()
        with contextlib.suppress(OSError):
            remove_index(self._path)

    def _configure(self, max_bytes: int) -> None:
        execute = self._connection.execute
        execute(_EXCLUSIVE)  # before the log is opened, which maps -shm otherwise
        execute("PRAGMA mmap_size = 0")
        execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute("PRAGMA secure_delete = ON")  # keys of what was erased say which prompts were here
        execute("PRAGMA wal_autocheckpoint = 64")
        execute(f"PRAGMA journal_size_limit = {64 * _PAGE_BYTES}")
        execute(f"PRAGMA max_page_count = {max_bytes // _PAGE_BYTES}")

    def _verify(self, store_id: str) -> None:
        execute = self._connection.execute
        if execute("PRAGMA quick_check").fetchone()[0] != "ok":
            raise StoreFormatError("its check fails")
        version = execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT_VERSION:
            raise StoreFormatError(f"it has version {version}")
        meta = dict(execute("SELECT name, value FROM meta"))
        if meta.get("store_id") != store_id:
            raise StoreFormatError("it belongs to another store")
        if meta.get("complete") != "1":
            raise StoreFormatError("its rebuild was interrupted")

    def _bound_log(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._log_path.stat().st_size > LOG_BYTES:
                self.empty_log()

    def _has_pages(self) -> bool:
        """Whether it may still grow by what one transaction needs: then it is its disk that is full."""
        try:
            total, unused, most = (
                int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])
                for name in ("page_count", "freelist_count", "max_page_count")
            )
        except _SQLITE_ERRORS:
            return False
        return total - unused + min(_TRANSACTION_PAGES, most // 2) < most

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._translated():
            self._bound_log()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(*_SQLITE_ERRORS):
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _telling(self, go_on: GoOn) -> Iterator[None]:
        """Call ``go_on()`` now and then while SQLite works; what it raises ends that with an error of SQLite's."""
        self._connection.set_progress_handler(go_on, _STEPS)  # which returns None: SQLite goes on
        try:
            yield
        finally:
            self._connection.set_progress_handler(None, 0)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreIOError(f"the index failed: {error}") from error
        except _SQLITE_ERRORS as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL and self._has_pages():
                raise StoreIOError(f"the index failed: {error}") from OSError(
                    errno.ENOSPC, os.strerror(errno.ENOSPC)
                )
            if code == sqlite3.SQLITE_FULL:
                raise StoreFullError("the index has reached its size") from error
            if code == sqlite3.SQLITE_BUSY:
                raise StoreLockedError(f"another program has the index open: {error}") from error
            # CONSTRAINT: it has a row that the store knows nothing of.
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT):
                raise StoreFormatError(f"the index is damaged: {error}") from error
            raise StoreIOError(f"the index failed: {error}") from error


def batches(items: Iterable[_T]) -> Iterator[list[_T]]:
    """``items`` in groups for one transaction each."""
    remaining = iter(items)
    while batch := list(islice(remaining, BATCH_ROWS)):
        yield batch


def _as_text(reason: str) -> str:
    """A reason names a path, which may be no UTF-8."""
    return reason.encode(errors="backslashreplace").decode()


def _connect(path: Path) -> sqlite3.Connection:
    """
    Raises:
        StoreIOError: not even the file can be opened.
    """
    try:
        return sqlite3.connect(path, timeout=_BUSY_MS / 1000, isolation_level=None)
    except _SQLITE_ERRORS as error:
        raise StoreIOError(f"cannot open the index {path}: {error}") from error
