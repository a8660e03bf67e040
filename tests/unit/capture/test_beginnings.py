"""Requests that begin inside of a chunk: with the rows of an earlier one, or not at all."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hcache.core.keys import chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS
from tests.unit.capture.test_assembler import NAMESPACE, SavePath

ROOT = NAMESPACE.root_key()
GONE = "capture.chunks_dropped_beginning_gone"


@pytest.fixture
def path() -> Iterator[SavePath]:
    made = SavePath()
    yield made
    made.finish()


def run(path: SavePath, rid: str, tokens: list[int], prefix: int = 0) -> None:
    """A request that finds ``prefix`` tokens on the device and computes the others, until all is saved."""
    ask(path, rid, tokens, prefix)
    path.settle()


def ask(path: SavePath, rid: str, tokens: list[int], prefix: int = 0) -> None:
    """The same, and nobody waits."""
    path.begin(rid, tokens[:prefix])
    path.forward([(rid, prefix, tokens[prefix:])])
    path.end(rid)


def covers(path: SavePath, tokens: list[int]) -> bool:
    """Whether a request may begin behind ``tokens``."""
    keys = chunk_keys(ROOT, tokens)
    tail = array("q", tokens[len(keys) * CHUNK_TOKENS :])
    return path.assembler.beginnings.covers(keys[-1] if keys else ROOT, tail)


def test_behind_what_an_ended_request_left_unfinished(path: SavePath) -> None:
    tokens = list(range(250))
    run(path, "first turn", tokens[:100])
    assert covers(path, tokens[:100])
    assert not covers(path, tokens[:101])
    run(path, "second turn", tokens[:150], prefix=100)
    run(path, "third turn", tokens, prefix=149)
    assert path.sealed(tokens) == [True, True, True]
    assert path.counters[GONE] == 0


def test_a_request_that_goes_on_where_another_ended_takes_its_chunk_over(path: SavePath) -> None:
    tokens = list(range(120))

    def open_slots() -> int:
        return path.tiers.host.num_slots - sum(path.tiers.host.counts())

    run(path, "first turn", tokens[:100])
    assert open_slots() == 1
    path.begin("second turn", tokens[:100])
    path.settle()
    assert open_slots() == 1
    assert covers(path, tokens[:100]), "for others too"
    path.begin("again", tokens[:90])
    path.settle()
    assert open_slots() == 2, "the second turn goes on with the rest"
    path.forward([("second turn", 100, tokens[100:])])
    path.forward([("again", 90, [7] * 38)])
    path.end(None)
    path.settle()
    assert path.sealed([*tokens[:90], *[7] * 38]) == [True, True]
    run(path, "third turn", [*tokens, *[8] * 8], prefix=120)
    assert path.sealed([*tokens, *[8] * 8]) == [True, True]
    assert path.counters[GONE] == 0


def test_inside_of_a_filled_chunk(path: SavePath) -> None:
    system, one, two = [1] * 100, [2] * 100, [3] * 100
    run(path, "a", [*system, *one])
    run(path, "b", [*system, *two], prefix=100)
    assert path.sealed([*system, *one]) == [True, True, True]
    assert path.sealed([*system, *two]) == [True, True, True]


def test_inside_of_the_chunk_that_another_request_fills(path: SavePath) -> None:
    tokens = [1] * 100
    path.begin("a", [])
    path.forward([("a", 0, tokens)])
    run(path, "b", [*tokens, *[2] * 40], prefix=80)
    path.forward([("a", 100, [3] * 40)])
    path.settle()
    assert path.sealed([*tokens, *[2] * 40]) == [True, True]
    assert path.sealed([*tokens, *[3] * 40]) == [True, True]


def test_without_its_first_rows_a_chunk_is_dropped_and_what_follows_as_well(path: SavePath) -> None:
    tokens = list(range(192))
    assert not covers(path, tokens[:100])
    run(path, "a", tokens, prefix=100)
    assert path.counters[GONE] == 1
    assert path.sealed(tokens) == [False, False, False]


def test_other_tokens_are_no_beginning(path: SavePath) -> None:
    run(path, "a", [1] * 20)
    assert not covers(path, [1] * 10 + [2])
    run(path, "b", [*[2] * 20, *[1] * 44], prefix=20)
    assert path.sealed([*[2] * 20, *[1] * 44]) == [False]


def test_unfinished_chunks_take_an_eighth_of_the_host_tier() -> None:
    path = SavePath(slots=16)
    for name in range(5):
        run(path, str(name), [name] * 10)
    assert [covers(path, [name] * 10) for name in range(5)] == [False, False, False, True, True]
    assert path.tiers.host.counts() == (14, 0, 0)


def test_no_more_is_remembered_than_is_of_use() -> None:
    path = SavePath(slots=16)
    beginnings = path.assembler.beginnings
    for name in range(70):
        path.begin(str(name), [])
    path.settle()
    assert len(beginnings._by_parent[ROOT]) == 64, "to look through more would take too long"
    path.end(None)
    for name in range(40):
        run(path, str(name), [name] * 150)
    remembered = [chunk for siblings in beginnings._by_parent.values() for chunk in siblings]
    assert set(remembered) == {*beginnings._filled, *beginnings._unfinished}
    assert len(remembered) == 16 + 2
    path.finish()


@pytest.mark.parametrize("slots", [32, 128])
def test_one_that_is_older_than_what_had_to_go_is_forgotten(slots: int) -> None:
    """The conversation has left the device long ago, and nobody goes on inside of its last chunk."""
    path = SavePath(slots=slots)
    for name in (1, 2):
        run(path, str(name), [name] * 10)
    for name in range(3, slots // 2):
        run(path, str(name), [*[0] * 64, *[name] * 64])
    assert covers(path, [1] * 10), "while slots are free nothing has to go"
    assert covers(path, [2] * 10)
    run(path, "new", [1000] * 10)
    for name in range(1001, 1001 + slots):
        assert covers(path, [1] * 10), "whoever asks for it uses it"
        run(path, str(name), [*[0] * 64, *[name] * 64])
    assert not covers(path, [2] * 10)
    assert not covers(path, [1000] * 10)
    path.finish()


def test_a_full_host_tier_takes_them_back() -> None:
    path = SavePath(slots=8)
    run(path, "a", [1] * 10)
    for name in range(2, 10):
        path.begin(str(name), [])
    path.forward([(str(name), 0, [name] * 10) for name in range(2, 10)])
    path.settle()
    assert not covers(path, [1] * 10)
    assert path.counters["capture.chunks_dropped_host_full"] == 0
    path.finish()


def test_a_longer_one_takes_the_place_of_a_shorter_one(path: SavePath) -> None:
    tokens = list(range(64))
    for end in (10, 20, 30):
        run(path, str(end), tokens[:end], prefix=max(0, end - 10))
        assert path.tiers.host.counts() == (63, 0, 0)
    run(path, "whole", tokens, prefix=30)
    assert path.tiers.host.counts() == (63, 1, 0)
    assert covers(path, tokens[:63])


def test_an_evicted_chunk_is_no_beginning() -> None:
    path = SavePath(slots=2)
    run(path, "a", [1] * 64)
    assert covers(path, [1] * 50)
    for name in (2, 3):
        run(path, str(name), [name] * 64)
    assert not covers(path, [1] * 50)
    path.finish()


def test_room_for_a_copy_is_not_made_of_what_is_copied() -> None:
    path = SavePath(slots=2)
    run(path, "a", [1] * 64)
    run(path, "b", [2] * 64)
    run(path, "c", [*[1] * 50, *[3] * 14], prefix=50)
    assert path.sealed([*[1] * 50, *[3] * 14]) == [True]
    assert path.sealed([1] * 64) == [True]
    assert path.counters[GONE] == 0
    path.finish()


def test_a_chunk_that_leaves_before_its_rows_are_copied_is_gone(
    path: SavePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others evict beside the assembler, and have everything forgotten."""
    run(path, "a", [1] * 64)
    monkeypatch.setattr(path.tiers.host, "pin", lambda _key: None)
    with path.assembler.beginnings.rows_of(ROOT, array("q", [1] * 50)) as source:
        assert source is None


def test_the_only_unfinished_chunk_may_become_its_own_copy() -> None:
    path = SavePath(slots=8)
    run(path, "a", [1] * 10)
    for name in range(2, 9):
        path.begin(str(name), [])
    path.forward([(str(name), 0, [name] * 10) for name in range(2, 9)])
    run(path, "b", [1] * 64, prefix=9)
    assert path.sealed([1] * 64) == [True]
    path.finish()


def test_rows_that_are_held_are_nobody_elses_room() -> None:
    path = SavePath(slots=8)
    run(path, "a", [1] * 10)
    beginnings = path.assembler.beginnings
    with beginnings.rows_of(ROOT, array("q", [1] * 9)) as source:
        assert source is not None
        beginnings.give_one_back()
        assert covers(path, [1] * 10)
    beginnings.give_one_back()
    assert not covers(path, [1] * 10)
    path.finish()


def test_what_is_forgotten_frees_its_slots(path: SavePath) -> None:
    run(path, "a", [1] * 100)
    path.assembler.publish(path.assembler.beginnings.clear)
    path.settle()
    assert not covers(path, [1] * 100)
    assert not covers(path, [1] * 10)
    assert path.tiers.host.counts() == (63, 1, 0)


def test_a_failed_event_leaves_no_beginning(path: SavePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens may be ahead of its rows."""
    path.begin("a", [])
    path.forward([("a", 0, [1] * 10)])
    path.settle()
    with monkeypatch.context() as patch:
        patch.setattr(path.ring, "groups", None)
        path.forward([("a", 10, [1] * 10)])
        path.settle()
    assert path.counters["capture.errors"] == 1
    assert not covers(path, [1] * 20)
    assert not covers(path, [1] * 10)
    assert path.tiers.host.counts() == (64, 0, 0)


def test_a_copy_that_fails_costs_no_slot(path: SavePath, monkeypatch: pytest.MonkeyPatch) -> None:
    path.begin("a", [])
    with monkeypatch.context() as patch:
        patch.setattr(path.assembler._requests._rows, "copy", lambda *_: 1 / 0)
        path.forward([("a", 0, [1] * 10)])
        path.settle()
    assert path.counters["capture.errors"] == 1
    assert path.tiers.host.counts() == (64, 0, 0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_branching_conversations_never_get_wrong_rows(seed: int) -> None:
    """Requests that continue any earlier one at any token, in a host tier that is too small for all."""
    random = Random(seed)
    path = SavePath(slots=random.choice([4, 16, 64]))
    known: list[list[int]] = [[]]
    for name in range(30):
        history = random.choice(known)
        begin = random.randint(0, len(history))
        tokens = [*history[:begin], *[name + 1] * random.randint(1, 90)]
        run(path, str(name), tokens, prefix=begin)
        known.append(tokens)
        path.sealed(tokens)  # compares the rows of those that are stored
    path.finish()
