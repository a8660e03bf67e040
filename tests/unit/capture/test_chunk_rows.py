"""Requests that decode together: one row of each in every pass, copied by few calls."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from sglang_hcache.capture import chunk_rows
from sglang_hcache.capture.chunk_rows import ChunkRows
from sglang_hcache.core.layout import CHUNK_TOKENS
from tests.unit.capture.save_parts import SaveParts
from tests.unit.capture.test_assembler import SavePath


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SavePath]:
    monkeypatch.setattr(SaveParts, "copying_threads", request.param)
    monkeypatch.setattr(chunk_rows, "_WORTH_SHARING_BYTES", 1)
    made = SavePath(rows=1024)
    yield made
    made.finish()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call that copies single ones."""
    found: list[int] = []
    copy = ChunkRows._copy_part

    def counted(self: ChunkRows, taken: object, rows: list[int], *rest: object) -> None:
        found.append(len(rows))
        copy(self, taken, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ChunkRows, "_copy_part", counted)
    return found


class Decoding:
    """Requests, each with a prompt and answer of its own."""

    def __init__(self, path: SavePath, count: int) -> None:
        numbers, random = iter(range(1_000_000)), Random(0)
        self._path = path
        self.tokens = {f"r{number}": [next(numbers) for _ in range(400)] for number in range(count)}
        self.done = {rid: random.randint(1, 2 * CHUNK_TOKENS) for rid in self.tokens}
        for rid, done in self.done.items():
            path.begin(rid, [])
            path.forward([(rid, 0, self.tokens[rid][:done])])

    def step(self, rids: list[str]) -> None:
        parts = [(rid, self.done[rid], self.tokens[rid][self.done[rid] : self.done[rid] + 1]) for rid in rids]
        for rid in rids:
            self.done[rid] += 1
        self._path.forward(parts)

    def assert_saved(self, rids: list[str]) -> None:
        for rid in rids:
            tokens = self.tokens[rid][: self.done[rid]]
            assert self._path.sealed(tokens) == [True] * (len(tokens) // CHUNK_TOKENS)


def test_each_pass_is_copied_by_a_call_a_thread(path: SavePath, calls: list[int]) -> None:
    requests = Decoding(path, 9)
    for _ in range(150):
        requests.step(list(requests.done))
    path.settle()
    threads = SaveParts.copying_threads
    assert calls == [9 // threads] * (150 * threads)
    requests.assert_saved(list(requests.done))


def test_rows_between_which_others_are_not_saved(path: SavePath) -> None:
    """Requests end, and SGLang computes one row more of them; one is of nobody from the start."""
    requests, random = Decoding(path, 9), Random(1)
    path.end("r0")
    for step in range(150):
        if step in (40, 90):
            path.end(f"r{step // 10}")
        rids = list(requests.done)
        random.shuffle(rids)
        requests.step(rids)
    path.settle()
    requests.assert_saved([rid for rid in requests.done if rid not in ("r0", "r4", "r9")])
    assert not path.counters["capture.errors"]


def test_rows_that_staging_had_no_room_for_cost_their_requests_only(
    path: SavePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Decoding(path, 6)
    path.settle()
    reserve = path.ring.reserve
    with monkeypatch.context() as patch:
        patch.setattr(path.ring, "reserve", lambda count: reserve(count - 2))
        requests.step([f"r{number}" for number in range(6)])
    for _ in range(CHUNK_TOKENS):
        requests.step(list(requests.done))
    path.settle()
    assert path.counters["capture.chunks_dropped_staging_full"] == 2
    requests.assert_saved([f"r{number}" for number in range(4)])
    for rid in ("r4", "r5"):  # the chain of keys goes on
        assert not all(path.sealed(requests.tokens[rid][: requests.done[rid]]))


def test_a_copy_that_fails_costs_no_slot(path: SavePath, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Decoding(path, 6)
    path.settle()
    with monkeypatch.context() as patch:
        patch.setattr(ChunkRows, "_copy_part", lambda *_: 1 / 0)
        requests.step(list(requests.done))
        path.settle()
    assert path.counters["capture.errors"] == 1
    host = path.tiers.host
    assert sum(host.counts()) == host.num_slots, "no slot is open"
