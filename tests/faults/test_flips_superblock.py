"""Damage to the files that name a store: superblocks and lock files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.format.superblock import Superblock
from sglang_hcache.testing.open_store import Inside
from tests.faults.damage import ALL, HANG_S, examine, flip, read_as, rows_of_table, served, takes_writes
from tests.unit.store.conftest import wait_until

MISSING = object()


def superblock_keys() -> list[str]:
    cells = rows_of_table("Directories", "name")
    return [name.strip(" `") for names, *_ in cells for name in names.split(",")]


KEYS = superblock_keys()
VALUES: dict[str, object] = {
    "missing": MISSING, "null": None, "true": True, "text": "x", "empty": "", "negative": -1, "zero": 0,
    "one": 1, "two": 2, "half": 1.5, "nan": float("nan"), "31 bits": 2**31, "63 bits": 2**63 - 1, "64 bits": 2**64,
    "200 bits": 2**200, "list": [], "deep": [[[0]]], "object": {}, "other id": "0" * 32, "other fs": [1, 2],
}  # fmt: skip


def superblocks(config: StoreConfig) -> list[Path]:
    return [directory / "superblock.json" for directory in config.dirs]


def test_every_key_is_documented(fresh: Callable[[], StoreConfig]) -> None:
    for path in superblocks(fresh()):
        assert json.loads(path.read_text()).keys() == set(KEYS)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("key", KEYS)
def test_a_superblock_with_another_value(
    fresh: Callable[[], StoreConfig], chance: random.Random, key: str, both: bool
) -> None:
    seen = set()
    for value in VALUES.values():
        config = fresh()
        paths = superblocks(config) if both else [chance.choice(superblocks(config))]
        before = {path: path.read_bytes() for path in paths}
        for path in paths:
            block = {**json.loads(path.read_text()), key: value}
            if value is MISSING:
                del block[key]
            path.write_text(json.dumps(block))
        found = str([read_as(Superblock.from_json, path.read_bytes()) for path in superblocks(config)])
        if found not in seen:
            seen.add(found)
            expect_right_or_harmless(config, before)


def expect_right_or_harmless(config: StoreConfig, before: dict[Path, bytes]) -> None:
    """A store that is refused serves all it has when the files are as they were."""
    if examine(config) is None:
        for path, data in before.items():
            path.write_bytes(data)
        assert examine(config) == ALL


GARBAGE = {
    "nothing": b"", "a word": b"garbage", "a list": b"[]", "nested": b"[" * 60_000, "digits": b"1" * 10_000,
    "not utf-8": b'{"format_version": "\xff"}', "zeros": bytes(500), "a comma": b'{"format_version": 2,}',
    "large": b" " * 2**22,
}  # fmt: skip


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", GARBAGE)
def test_a_superblock_of_garbage(fresh: Callable[[], StoreConfig], name: str, both: bool) -> None:
    """One directory is left out, two are refused."""
    config = fresh()
    paths = superblocks(config)[: 1 + both]
    before = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.write_bytes(GARBAGE[name])
    if both:
        expect_right_or_harmless(config, before)
    else:
        assert examine(config) is not None


def test_bits_of_a_superblock(fresh: Callable[[], StoreConfig], chance: random.Random, flips: int) -> None:
    for _ in range(flips):
        config = fresh()
        path = chance.choice(superblocks(config))
        before = {path: path.read_bytes()}
        flip(path, chance.randrange(len(before[path])), chance)
        expect_right_or_harmless(config, before)


def test_a_superblock_becomes_garbage_while_running(fresh: Callable[[], StoreConfig]) -> None:
    """The directory goes and comes, and is not taken in before its superblock is itself again."""
    config = fresh()
    store = DiskStore.open(config, Counters())
    try:
        (path, _) = superblocks(config)
        before = path.read_bytes()
        health = Inside(store).volumes[0].health
        for data in GARBAGE.values():
            path.write_bytes(data)
            health.take_out("the test says so")
            Inside(store).retry_now()
            wait_until(lambda: health._retry_at > 0, HANG_S)
            assert not health.readable
            wait_until(lambda: takes_writes(store), HANG_S)
        path.write_bytes(before)
        Inside(store).retry_now()
        wait_until(lambda: store.stats().directories[0].condition == "healthy", HANG_S)
        assert served(store) == ALL
        assert Inside(store).is_kept
    finally:
        store.close()


# -- lock files --------------------------------------------------------------------------------------


def replace_lock(path: Path, kind: str) -> None:
    if kind in ("0", "99999999999999999999", "pid", "\0" * 10_000):
        path.write_text(kind)
        return
    path.unlink()
    if kind == "a directory":
        path.mkdir()
    elif kind == "a link":
        path.symlink_to(path.parent / "elsewhere")
    elif kind == "a pipe":
        os.mkfifo(path)


@pytest.mark.parametrize(
    "kind",
    ["0", "99999999999999999999", "pid", "\0" * 10_000, "missing", "a directory", "a link", "a pipe"],
    ids=str.strip,
)
@pytest.mark.parametrize("both", [False, True])
def test_a_lock_file(fresh: Callable[[], StoreConfig], kind: str, both: bool) -> None:
    config = fresh()
    for directory in config.dirs[: 1 + both]:
        replace_lock(directory / "lock", kind)
    found = examine(config)
    if kind not in ("a directory", "a link", "a pipe"):
        assert found == ALL
    assert not any((directory / "elsewhere").exists() for directory in config.dirs)
