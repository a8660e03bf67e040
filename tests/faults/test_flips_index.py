"""Damage to the index: every column, the bytes of its files, also while the store is open."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.testing.open_store import Inside
from tests.faults.damage import ALL, HANG_S, change, examine, flip, in_time, served, takes_writes
from tests.unit.store.conftest import wait_until


def execute(path: Path, *statements: str) -> bool:
    """Change the database at ``path``; False if SQLite does not allow it."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            try:
                connection.execute(statement)
            except (sqlite3.IntegrityError, sqlite3.DataError):
                return False
    return True


def index_of(config: StoreConfig) -> Path:
    return config.dirs[0] / "index.sqlite"


COLUMNS = {
    "meta": ("name", "value"),
    "segments": ("segment", "last_used", "score"),
    "runs": ("run", "segment", "run_id", "namespace_id", "first_chunk", "members", "rotation", "keys",
             "layer_bytes", "offsets"),
    "quarantine": ("run", "chunk", "reason"),
}  # fmt: skip
CELLS = (
    "-1", "7", "9223372036854775807", "-9223372036854775808", "1.5", "9e999", "''", "'text'", "'{\"1\": Infinity}'",
    "replace(hex(zeroblob(9999)), '0', '[')", "CAST(x'ff' AS TEXT)", "x''", "zeroblob(16)", "randomblob(32)",
    "x'ffffffff'", "zeroblob(200000)",
)  # fmt: skip


def test_these_are_all_columns(fresh: Callable[[], StoreConfig]) -> None:
    with contextlib.closing(sqlite3.connect(index_of(fresh()))) as connection:
        for table in [
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]:
            names = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
            assert sorted(names) == sorted(COLUMNS[table])


@pytest.mark.parametrize(("table", "column"), [(table, name) for table in COLUMNS for name in COLUMNS[table]])
def test_a_cell_of_the_index(fresh: Callable[[], StoreConfig], flips: int, table: str, column: str) -> None:
    """Any value in one row or in all, in turns, or both with ``--flips 32``: the store opens, serves what is right and
    nothing else.
    """
    ways = ("", f" WHERE {column} = (SELECT min({column}) FROM {table})")
    first = COLUMNS[table].index(column)
    for number, cell in enumerate(CELLS, first):
        for where in ways if flips >= len(ways) * len(CELLS) else (ways[number % 2],):
            config = fresh()
            if not execute(index_of(config), f"UPDATE {table} SET {column} = {cell}{where}"):
                continue
            found = examine(config)
            assert found is not None, f"refused: {cell}{where}"
            if table == "segments" or (table, column) == ("quarantine", "reason"):
                assert found == ALL, "recency is of no consequence for what is served"


@pytest.mark.parametrize(("table", "column"), [(table, name) for table in COLUMNS for name in COLUMNS[table]])
def test_a_column_of_the_index_is_called_otherwise(
    fresh: Callable[[], StoreConfig], table: str, column: str
) -> None:
    config = fresh()
    assert execute(index_of(config), f"ALTER TABLE {table} RENAME COLUMN {column} TO another")
    assert examine(config) == ALL


@pytest.mark.parametrize(
    "change",
    [
        "sql = CAST(x'f3f3' AS TEXT)",
        "sql = 'CREATE TABLE'",
        "sql = NULL",
        "sql = zeroblob(9)",
        "sql = 'x', name = CAST(x'f3f3' AS TEXT)",  # which SQLite's message quotes
    ],
)
def test_the_schema_of_the_index_is_garbage(fresh: Callable[[], StoreConfig], change: str) -> None:
    config = fresh()
    update = f"UPDATE sqlite_master SET {change} WHERE name = 'runs'"
    assert execute(index_of(config), "PRAGMA writable_schema = ON", update)
    assert examine(config) == ALL


@pytest.mark.parametrize("table", COLUMNS)
def test_a_table_of_the_index_is_gone_or_empty(fresh: Callable[[], StoreConfig], table: str) -> None:
    config = fresh()
    execute(index_of(config), f"DROP TABLE {table}")
    assert examine(config) == ALL
    config = fresh()
    execute(index_of(config), f"DELETE FROM {table}")
    assert examine(config) == (set() if table == "runs" else ALL)


def test_other_bytes_in_the_index(
    fresh: Callable[[], StoreConfig], chance: random.Random, flips: int
) -> None:
    for turn in range(flips):
        config = fresh()
        path = index_of(config)
        size = path.stat().st_size
        if turn % 3 == 0:
            change(path, chance.randrange(size), chance.randbytes(chance.randint(1, 300)))
        elif turn % 3 == 1:
            flip(path, chance.randrange(size), chance)
        else:
            flip(path, chance.randrange(size) % 200, chance)  # the header of the file and the first page
        assert examine(config) is not None


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
def test_other_bytes_in_the_log(
    killed: Callable[[], StoreConfig], chance: random.Random, flips: int, suffix: str
) -> None:
    """What was in the database before is served in any case."""
    assert examine(killed()) == ALL
    for turn in range(flips):
        config = killed()
        path = config.dirs[0] / f"index.sqlite{suffix}"
        if suffix == "-shm":  # what a SQLite shell that was killed leaves
            path.write_bytes(bytes(2**15))
        data = path.read_bytes()
        if turn % 4 == 0:
            os.truncate(path, chance.randrange(len(data)))
        elif turn % 4 == 1:
            change(path, chance.randrange(len(data)), chance.randbytes(chance.randint(1, 300)))
        elif turn % 4 == 2:
            flip(path, chance.randrange(min(len(data), 100)), chance)
        else:
            flip(path, chance.randrange(len(data)), chance)
        found = examine(config)
        assert found is not None, "refused"
        assert found >= ALL - {3, 4}
        if suffix == "-shm":
            assert found == ALL, "it is not read"


def forgetful(store: DiskStore) -> None:
    """SQLite keeps no page in memory, as if the index were a large one."""
    index = Inside(store).index
    assert index is not None
    for name in ("cache_size = 0", "shrink_memory"):
        Inside(store).volumes[0].attempt(partial(index._connection.execute, f"PRAGMA {name}"))


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
def test_other_bytes_in_the_index_while_running(
    fresh: Callable[[], StoreConfig], chance: random.Random, flips: int, name: str
) -> None:
    """What is served comes from memory; writes may fail, but not for ever."""
    for _ in range(flips // 8):
        config = fresh()
        store = DiskStore.open(config, Counters())
        try:
            path = config.dirs[0] / name
            assert takes_writes(store)  # so that there is a log
            forgetful(store)
            before = in_time(lambda store=store: served(store))
            size = path.stat().st_size
            change(path, chance.randrange(size) // 2, chance.randbytes(size // 2))
            assert in_time(lambda store=store: served(store)) == before
            wait_until(lambda store=store: takes_writes(store), HANG_S)
            assert in_time(lambda store=store: served(store)) == before
            assert Inside(store).is_kept
        finally:
            store.close()
        assert examine(config) is not None
