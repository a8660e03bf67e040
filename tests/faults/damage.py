"""A store that is made once, damaged in many copies, and examined after each damage."""

from __future__ import annotations

import faulthandler
import random
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from sglang_hcache.core.errors import CorruptExtentError, StoreError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.format.record import ExtentHeader
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    find_extents,
    make_keys,
    match_keys,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import wait_until

T = TypeVar("T")

FORMAT = Path(__file__).parents[2] / "docs" / "store-format.md"

SHAPES = ((8192, 5000, 4096, 100), (8192, 100), (8192, 5000, 4096), (5000,), (8192, 5000, 4096, 100))
"""Layers of each run: in two directories, up to two extents in each."""
RUNS = tuple(make_keys(10 * number, 3) for number in range(5))
"""What the store holds. In copies made while it was open the last two are newer than the state."""
ALL = set(range(len(RUNS)))
QUARANTINED = make_keys(90, 1)
NEW = make_keys(500, 2)
HANG_S = 60.0


@dataclass(frozen=True)
class Stores:
    """Folders to copy: a store that was closed, and one as a kill leaves it."""

    closed: Path
    killed: Path


def make_stores(base: Path) -> Stores:
    """Two directories; five runs that are well and one chunk that is not."""
    stores = Stores(base / "closed", base / "killed")
    config = small_config(stores.closed, 2)
    with_store = DiskStore.open(config, Counters())
    for keys, layers in zip((*RUNS[:3], QUARANTINED), SHAPES, strict=False):
        write_keys(with_store, keys, layers)
    path, offset, _ = next(item for item in extents(config) if item.header.place.keys == QUARANTINED)
    change(path, offset + BLOCK, b"damaged")
    assert not is_served(with_store, QUARANTINED)
    with_store.close()
    with_store = DiskStore.open(config, Counters())
    for keys, layers in zip(RUNS[3:], SHAPES[3:], strict=True):
        write_keys(with_store, keys, layers)
    shutil.copytree(stores.closed, stores.killed)
    with_store.close()
    return stores


def copy_of(store: Path, base: Path) -> StoreConfig:
    """A copy of ``store`` in ``base``, in place of an earlier one."""
    shutil.rmtree(base, ignore_errors=True)
    shutil.copytree(store, base)
    return small_config(base, 2)


class Extent(NamedTuple):
    path: Path
    offset: int
    header: ExtentHeader


def extents(config: StoreConfig) -> list[Extent]:
    return [Extent(*item) for directory in config.dirs for item in find_extents(directory)]


def read(path: Path, at: int, size: int) -> bytes:
    """Some bytes of a file."""
    with open(path, "rb") as file:
        file.seek(at)
        return file.read(size)


def change(path: Path, at: int, data: bytes) -> None:
    """Overwrite some bytes of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int, chance: random.Random) -> None:
    """Change one bit of a byte."""
    (byte,) = read(path, at, 1)
    change(path, at, bytes([byte ^ 1 << chance.randrange(8)]))


def is_served(store: DiskStore, keys: Sequence[bytes]) -> bool:
    """Whether all ``keys`` are there and have the right bytes; fails if they have others."""
    if match_keys(store, keys) < len(keys):
        return False
    try:
        read_keys(store, keys)
    except CorruptExtentError:
        return False
    return True


def served(store: DiskStore) -> set[int]:
    """Which of ``RUNS`` are served."""
    return {number for number, keys in enumerate(RUNS) if is_served(store, keys)}


def read_as(parse: Callable[[bytes], object], data: bytes) -> str:
    """What ``parse`` makes of the bytes of a file: those that are read as the same do the same to a store."""
    try:
        return repr(parse(data))
    except (ValueError, CorruptExtentError):
        return "nothing"


def examine(config: StoreConfig) -> set[int] | None:
    """What is served after a start, or None if the store refuses with an error of ours.

    Then it must be of use: take writes, evict, be closed, and serve the same after another start.
    """
    return in_time(lambda: _examine(config))


def _examine(config: StoreConfig) -> set[int] | None:
    try:
        store = DiskStore.open(config, Counters())
    except StoreError:
        return None
    try:
        before = served(store)
        assert not is_served(store, QUARANTINED)
        wait_until(lambda: takes_writes(store), HANG_S)
        assert Inside(store).is_kept
    finally:
        store.close()
    store = DiskStore.open(config, Counters())
    try:
        assert is_served(store, NEW)
        after = {number for number, keys in enumerate(RUNS) if match_keys(store, keys) == len(keys)}
        assert before <= after, "runs were lost by a clean restart"
        store.evict_one()
        store.clear()
        assert not any(store.contains(key) for keys in (*RUNS, NEW) for key in keys)
        store.stats()
        assert Inside(store).is_kept
    finally:
        store.close()
    return before


def takes_writes(store: DiskStore) -> bool:
    try:
        write_keys(store, NEW, SHAPES[0])
    except StoreError:
        return False
    return is_served(store, NEW)


def in_time(function: Callable[[], T], timeout_s: float = HANG_S) -> T:
    """What ``function()`` returns or raises; fails, and shows where all threads are, if it hangs."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        faulthandler.dump_traceback(sys.__stderr__)
        raise AssertionError(f"hangs for more than {timeout_s:g} s")
    if failure:
        raise failure[0]
    return outcome[0]


def rows_of_table(heading: str, first_column: str) -> Iterator[list[str]]:
    """Cells of the table in docs/store-format.md that follows ``heading`` and begins with ``first_column``."""
    text = FORMAT.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = re.search(rf"^\| {re.escape(first_column)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table, f"no such table under {heading!r}"
    for line in table.group(1).splitlines():
        yield [cell.strip() for cell in line.strip("|").split(" | ")]
