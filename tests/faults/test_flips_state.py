"""Damage to what a store knows beside its segments: every field of the state, and its bytes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.format.geometry import MAX_SEGMENT
from sglang_hcache.store.format.state import SegmentState, State
from sglang_hcache.testing.open_store import Inside
from tests.faults.damage import ALL, examine, flip, in_time, read_as, rows_of_table, served, takes_writes

FIELDS = ("store_id", "serial", "segments", "going", "quarantined", "meta")
META = ("totals", "written", "directories", "namespaces")
VALUES = (
    None, True, -1, 0, 7, 2**62, 2**200, 1.5, float("nan"), float("inf"), "", "text", [], [[[0]]], [1, "x"], {},
    {"x": 1}, {"0": None}, {"0": [1]}, {"-1": [1, 1]}, {"0": [float("nan"), 1]}, {"0": [1.0, float("inf")]},
    {"0": [1.0, 2**70]}, {"0": ["x", "y"]}, {"0": {"model": 5}}, {"zz": {}},
    {"00" * 16: {"0": 5, "99": "x", "-1": "y"}}, "[" * 10_000, [["healthy", "", 1]], [["x", "", 1, 1]],
    [["healthy", "", 2**70, "x"]],
)  # fmt: skip


def states(config: StoreConfig) -> list[Path]:
    return [directory / "state.json" for directory in config.dirs]


def rewrite(path: Path, fields: object) -> None:
    """As if a server had written it so."""
    line = json.dumps(fields).encode()
    path.write_bytes(line + b'\n"%016x"\n' % xxhash.xxh3_64_intdigest(line))


def test_every_field_is_documented(fresh: Callable[[], StoreConfig]) -> None:
    documented = [
        name.strip(" `") for names, *_ in rows_of_table("State", "name") for name in names.split(",")
    ]
    assert documented == [*FIELDS]
    assert [name.strip(" `") for name, *_ in rows_of_table("State", "name in `meta`")] == [*META]
    for path in states(fresh()):
        fields = json.loads(path.read_bytes().partition(b"\n")[0])
        assert fields.keys() == {*FIELDS}
        assert fields["meta"].keys() == {*META}


@pytest.mark.parametrize("field", [*FIELDS, *META])
def test_a_field_with_another_value(fresh: Callable[[], StoreConfig], field: str) -> None:
    """With a digest that fits, in all directories: all runs are served, and the damaged chunk is not."""
    seen = set()
    for value in VALUES:
        config = fresh()
        for path in states(config):
            fields = json.loads(path.read_bytes().partition(b"\n")[0])
            (fields["meta"] if field in META else fields)[field] = value
            rewrite(path, fields)
        found = str([read_as(State.from_bytes, path.read_bytes()) for path in states(config)])
        assert found in seen or examine(config) == ALL, value
        seen.add(found)


@pytest.mark.parametrize(
    ("number", "score", "runs"),
    [
        *((0, score, 1) for score in (-1.0, math.inf, math.nan)),
        (0, 1.0, -1),
        (-1, 1.0, 1),
        (MAX_SEGMENT + 1, 1.0, 1),
    ],
)
def test_nothing_is_known_of_a_segment_whose_numbers_cannot_be(number: int, score: float, runs: int) -> None:
    known = SegmentState(1.0, 1)
    state = State("a store", 1, {number: SegmentState(score, runs), 7: known})
    assert State.from_bytes(state.to_bytes()).segments == {7: known}


def test_bits_of_a_state(fresh: Callable[[], StoreConfig], chance: random.Random, flips: int) -> None:
    """The copy in the other directory counts, or none does."""
    for turn in range(flips):
        config = fresh()
        for path in states(config)[: 1 + turn % 2]:
            flip(path, chance.randrange(path.stat().st_size), chance)
        assert examine(config) == ALL


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", b"[]", b"{}", b"\n", b"[" * 60_000, bytes(500), b"\xff" * 100, b" " * 2**22],
    ids=["nothing", "a word", "a list", "an object", "a line", "nested", "zeros", "ones", "large"],
)
def test_a_state_of_garbage(fresh: Callable[[], StoreConfig], data: bytes) -> None:
    config = fresh()
    for path in states(config):
        path.write_bytes(data)
    assert examine(config) == ALL
    config = fresh()
    for path in states(config):
        path.write_bytes(data + b'\n"%016x"\n' % xxhash.xxh3_64_intdigest(data))
    assert examine(config) == ALL


def test_a_state_that_was_cut(killed: Callable[[], StoreConfig], chance: random.Random, flips: int) -> None:
    for _ in range(flips // 4):
        config = killed()
        for path in states(config):
            if path.exists():
                data = path.read_bytes()
                path.write_bytes(data[: chance.randrange(len(data))])
        assert examine(config) == ALL


def test_a_state_becomes_garbage_while_running(fresh: Callable[[], StoreConfig]) -> None:
    config = fresh()
    store = DiskStore.open(config, Counters())
    try:
        for path in states(config):
            path.write_bytes(b"garbage")
        assert in_time(lambda: served(store)) == ALL
        assert takes_writes(store)
        assert Inside(store).is_kept
    finally:
        store.close()
    assert examine(config) == ALL
