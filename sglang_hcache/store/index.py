"""The durable index: one SQLite row a run (docs/store-format.md, "Index").

WAL with ``synchronous=NORMAL``: a killed process loses nothing that was committed. A power cut may lose
the last commits, which turns data into garbage but never garbage into data, and a cache may forget. A
commit then costs no fsync beyond the one of the data.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sglang_hcache.core.errors import StoreFormatError, StoreFullError, StoreIOError, StoreLockedError
from sglang_hcache.core.keys import KEY_BYTES, NAMESPACE_ID_BYTES
from sglang_hcache.store.geometry import MAX_CHUNKS
from sglang_hcache.store.record import FORMAT_VERSION, RUN_ID_BYTES

_PAGE_BYTES = 4096
_BATCH_ROWS = 64
"""Rows changed in one transaction: bounds the log."""

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE segments (segment INTEGER PRIMARY KEY, last_used INTEGER NOT NULL);
CREATE TABLE runs (
    run INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL,
    run_id BLOB NOT NULL,
    namespace_id BLOB NOT NULL,
    first_chunk INTEGER NOT NULL,
    rotation INTEGER NOT NULL,
    keys BLOB NOT NULL,
    layer_bytes BLOB NOT NULL,
    offsets BLOB NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as the index keeps it."""

    run_id: bytes
    segment: int
    namespace_id: bytes
    first_chunk: int
    rotation: int
    keys: tuple[bytes, ...]
    chunk_layer_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    """Start of the run's part in each directory's file, bytes."""


class Index:
    """Rows of runs and the recency of segments. Safe from several threads; every method may do I/O."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.complete = False
        """Whether every run known to the store has its row."""

    @classmethod
    def create(cls, path: Path, store_id: str, max_bytes: int) -> Index:
        """A new index in place of whatever lies at ``path``; call :meth:`mark_complete` when it is filled.

        Raises:
            StoreIOError: it cannot be written.
        """
        try:
            for suffix in ("", "-wal", "-shm", "-journal"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StoreIOError(f"cannot create the index {path}: {error}") from error
        index = cls(_connect(path))
        with index._translated():
            index._configure(max_bytes)
            index._connection.executescript(_SCHEMA)
            with index._transaction():
                index._connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
                index._connection.execute("INSERT INTO meta VALUES ('store_id', ?)", (store_id,))
        return index

    @classmethod
    def open(cls, path: Path, store_id: str, max_bytes: int) -> Index:
        """The index at ``path``.

        Raises:
            StoreFormatError: missing, damaged, incomplete or of another store; rebuild it.
            StoreLockedError: another program, such as a SQLite shell, has it open.
        """
        if not path.is_file():
            raise StoreFormatError(f"the index {path} is missing")
        index = cls(_connect(path))
        try:
            index._configure(max_bytes)
            index._verify(store_id)
            index.complete = True
        except (sqlite3.Error, StoreFormatError) as error:
            index.close()
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY:
                raise StoreLockedError(f"{path} is open in another program; close that first") from None
            raise StoreFormatError(f"the index {path} cannot be used: {error}") from None
        return index

    def mark_complete(self) -> None:
        """Say that all known runs are in: without it :meth:`open` refuses, so that a rebuild starts over."""
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('complete', '1')")
        self.complete = True

    def load(self, num_stripes: int) -> tuple[list[tuple[int, RunRow]], list[int], dict[int, int]]:
        """Everything: (row number, row) by age, row numbers that make no sense, recency by segment.

        Raises:
            StoreIOError: it cannot be read.
        """
        good: list[tuple[int, RunRow]] = []
        bad: list[int] = []
        with self._lock, self._translated():
            rows = self._connection.execute(
                "SELECT run, run_id, segment, namespace_id, first_chunk, rotation, keys, layer_bytes, "
                "offsets FROM runs ORDER BY run"
            ).fetchall()
            recency = dict(self._connection.execute("SELECT segment, last_used FROM segments"))
        for number, *fields in rows:
            row = _decode(fields, num_stripes)
            if row is None:
                bad.append(number)
            else:
                good.append((number, row))
        return good, bad, recency

    def insert(self, row: RunRow, recency: Mapping[int, int]) -> int:
        """Commit a run, together with ``recency`` (at most 64 segments); returns the row's number.

        Raises:
            StoreFullError: the index has reached its size.
            StoreIOError: it cannot be written.
        """
        with self._transaction():
            cursor = self._connection.execute(
                "INSERT INTO runs (run_id, segment, namespace_id, first_chunk, rotation, keys, layer_bytes, "
                "offsets) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.run_id,
                    row.segment,
                    row.namespace_id,
                    row.first_chunk,
                    row.rotation,
                    b"".join(row.keys),
                    struct.pack(f"<{len(row.chunk_layer_bytes)}I", *row.chunk_layer_bytes),
                    struct.pack(f"<{len(row.offsets)}Q", *row.offsets),
                ),
            )
            self._save_recency(recency)
            number = cursor.lastrowid
        assert number is not None
        return number

    def delete_runs(self, rows: Iterable[int]) -> None:
        """Remove rows, in several transactions. Raises StoreIOError."""
        for batch in _batches(rows):
            with self._transaction():
                self._connection.executemany("DELETE FROM runs WHERE run = ?", [(row,) for row in batch])

    def delete_segment(self, segment: int, rows: Sequence[int]) -> None:
        """Remove a segment's rows and recency. Raises StoreIOError."""
        self.delete_runs(rows)
        with self._transaction():
            self._connection.execute("DELETE FROM segments WHERE segment = ?", (segment,))

    def save_recency(self, recency: Mapping[int, int]) -> None:
        """Store the logical time of last use of segments. Raises StoreIOError or StoreFullError."""
        for batch in _batches(recency):
            with self._transaction():
                self._save_recency({segment: recency[segment] for segment in batch})

    def file_bytes(self) -> int:
        """Size of the database without its log."""
        with self._translated(), self._lock:
            return int(self._connection.execute("PRAGMA page_count").fetchone()[0]) * _PAGE_BYTES

    def close(self) -> None:
        """Checkpoint and close; an error here costs nothing that was committed."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _configure(self, max_bytes: int) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")  # Before WAL: then there is no -shm file.
        execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
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

    def _save_recency(self, recency: Mapping[int, int]) -> None:
        self._connection.executemany("INSERT OR REPLACE INTO segments VALUES (?, ?)", recency.items())

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
                raise StoreFullError(f"the index is full: {error}") from error
            raise StoreIOError(f"the index failed: {error}") from error


def _connect(path: Path) -> sqlite3.Connection:
    # No waiting for locks: the directory's lock makes us the only user.
    return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)


def _batches(items: Iterable[int]) -> Iterator[list[int]]:
    remaining = iter(items)
    while batch := list(islice(remaining, _BATCH_ROWS)):
        yield batch


def _decode(fields: Sequence[object], num_stripes: int) -> RunRow | None:
    """The row of ``fields``; None if they cannot be one."""
    run_id, segment, namespace_id, first_chunk, rotation, keys, layer_bytes, offsets = fields
    if not (
        isinstance(segment, int) and isinstance(first_chunk, int) and isinstance(rotation, int)
        and isinstance(run_id, bytes) and isinstance(namespace_id, bytes)
        and isinstance(keys, bytes) and isinstance(layer_bytes, bytes) and isinstance(offsets, bytes)
    ):  # fmt: skip
        return None
    if (
        len(run_id) != RUN_ID_BYTES
        or len(namespace_id) != NAMESPACE_ID_BYTES
        or len(keys) % KEY_BYTES
        or not 0 < len(keys) <= MAX_CHUNKS * KEY_BYTES
        or not layer_bytes
        or len(layer_bytes) % 4
        or len(offsets) != 8 * num_stripes
        or not 0 <= rotation < num_stripes
        or segment < 0
        or not 0 <= first_chunk < 2**32
    ):
        return None
    return RunRow(
        run_id=run_id,
        segment=segment,
        namespace_id=namespace_id,
        first_chunk=first_chunk,
        rotation=rotation,
        keys=tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)),
        chunk_layer_bytes=struct.unpack(f"<{len(layer_bytes) // 4}I", layer_bytes),
        offsets=struct.unpack(f"<{num_stripes}Q", offsets),
    )
