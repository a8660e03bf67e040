"""Flipped bits in extents: every field of the header, the payload; also with a digest that fits the damage."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import xxhash

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.format.geometry import BLOCK, extent_bytes
from sglang_hcache.store.format.record import MAGIC, parse_header
from tests.faults.damage import (
    ALL,
    RUNS,
    Extent,
    change,
    examine,
    extents,
    flip,
    in_time,
    read,
    read_as,
    rows_of_table,
    served,
)

LENGTHS = {"32 * n": 96, "8 * n": 24, "8 * D": 16, "4 * L": 4}
"""Bytes of the fields that vary, for three chunks, two directories and at least one layer."""
WAYS = ("closed", "without state", "running")


def header_fields() -> dict[str, tuple[int, int]]:
    """Name -> first byte and bytes behind it, as docs/store-format.md has them."""
    fields = {}
    for offset, size, name, _ in rows_of_table("Extent header", "offset"):
        fields[name] = (int(offset), int(offset) + (LENGTHS.get(size) or int(size)))
    return fields


FIELDS = header_fields()


def test_the_documented_fields_fill_the_header() -> None:
    ends = {"chunk keys": 2176, "chunk digests": 2688, "part offsets": 2816, "layer sizes": BLOCK}
    at = 0
    for name, (begin, end) in FIELDS.items():
        assert begin == at, name
        at = ends.get(name, end)
    assert at == BLOCK


Damage = Callable[[StoreConfig], None]


def found_after(how: str, config: StoreConfig, damage: Damage) -> set[int]:
    """Which runs are served after ``damage`` was done in one of three ways; fails where the store refuses."""
    if how == "running":
        return found_while_running(config, damage)
    damage(config)
    if how == "without state":
        for directory in config.dirs:
            (directory / "state.json").unlink()
    found = examine(config)
    assert found is not None, "refused"
    return found


def found_while_running(config: StoreConfig, damage: Damage) -> set[int]:
    store = DiskStore.open(config, Counters())
    try:
        assert served(store) == ALL
        damage(config)
        found = in_time(lambda: served(store))
        assert found == served(store)
        return found
    finally:
        store.close()


def an_extent(config: StoreConfig, chance: random.Random, runs: Sequence[tuple[bytes, ...]] = RUNS) -> Extent:
    return chance.choice([item for item in extents(config) if item.header.place.keys in runs])


@pytest.mark.parametrize("how", WAYS)
def test_a_bit_of_a_header(
    fresh: Callable[[], StoreConfig], chance: random.Random, flips: int, how: str
) -> None:
    """Its run is not served, all others are. That any bit is noticed: ``test_record.py``."""
    for turn in range(flips // 3):
        config = fresh()
        extent = an_extent(config, chance)
        # A start looks for the magic, and reads what follows it.
        at = extent.offset + chance.randrange(BLOCK if turn else len(MAGIC))
        found = found_after(how, config, lambda _, at=at, path=extent.path: flip(path, at, chance))
        assert found == ALL - {RUNS.index(extent.header.place.keys)}


@pytest.mark.parametrize("how", WAYS)
def test_a_header_that_is_wrong_in_itself(
    fresh: Callable[[], StoreConfig], chance: random.Random, how: str
) -> None:
    """With a digest that fits: a bit, all zeros or all ones in a field, also where a run has one header only.

    Where that makes no header, any bit does the same.
    """
    tried = set()
    for field, (begin, end) in FIELDS.items():
        for fill, runs in ((b"\0", RUNS), (b"\xff", RUNS), (b"\xff", RUNS[3:4]), (None, RUNS)):
            config = fresh()
            extent = an_extent(config, chance, runs)
            block = bytearray(read(extent.path, extent.offset, BLOCK))
            if fill is None:
                block[chance.randrange(begin, end)] ^= 1 << chance.randrange(8)
            else:
                block[begin:end] = fill * (end - begin)
            fix_digest(block)
            if read_as(parse_header, block) in ("nothing", repr(extent.header)):
                continue
            tried.add(field)
            data = bytes(block)
            found = found_after(how, config, lambda _, to=extent, data=data: change(to.path, to.offset, data))
            number = RUNS.index(extent.header.place.keys)
            assert found >= ALL - {number}, field
            assert how != "running" or number not in found, f"memory says something else of its {field}"
    assert tried >= {"namespace id", "run id", "first chunk", "chunk keys", "chunk digests", "part offsets"}


def fix_digest(block: bytearray) -> None:
    """Make it fit the other bytes of a header."""
    block[16:24] = bytes(8)
    block[16:24] = xxhash.xxh3_64_intdigest(block).to_bytes(8, "little")


@pytest.mark.parametrize("how", WAYS)
def test_a_bit_of_a_payload(
    fresh: Callable[[], StoreConfig], chance: random.Random, flips: int, how: str
) -> None:
    """Behind the last chunk it does not matter; else the chunk is not served, but all others are."""
    for _ in range(flips // 3):
        config = fresh()
        extent = an_extent(config, chance)
        place = chance.randrange(
            extent_bytes(len(extent.header.place.keys), extent.header.chunk_bytes) - BLOCK
        )
        at = extent.offset + BLOCK + place
        number = RUNS.index(extent.header.place.keys)
        found = found_after(how, config, lambda _, at=at, path=extent.path: flip(path, at, chance))
        assert found == (
            ALL - {number} if place < len(extent.header.place.keys) * extent.header.chunk_bytes else ALL
        )


def test_other_bytes_anywhere_in_the_files(
    fresh: Callable[[], StoreConfig], chance: random.Random, flips: int
) -> None:
    """Blocks of them, with and without a state: what is served is right, and most is."""
    for turn in range(flips // 2):
        config = fresh()
        for _ in range(turn % 4 + 1):
            path = chance.choice([item.path for item in extents(config)])
            size = path.stat().st_size
            change(path, chance.randrange(size) // BLOCK * BLOCK, chance.randbytes(BLOCK))
        if turn % 2:
            for directory in config.dirs:
                (directory / "state.json").unlink()
        found = examine(config)
        assert found is not None
        assert len(found) >= len(RUNS) - turn % 4 - 1
