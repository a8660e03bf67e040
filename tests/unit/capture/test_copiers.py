"""Several threads that copy: by themselves, and as the assembler's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from sglang_hcache.capture.copiers import Copiers, copiers_for
from sglang_hcache.core.layout import CHUNK_TOKENS
from tests.unit.capture.save_parts import SaveParts
from tests.unit.capture.test_assembler import SavePath
from tests.waiting import wait_until

_TIMEOUT_S = 30.0


@pytest.fixture
def copiers() -> Iterator[Copiers]:
    made = Copiers(3)
    assert len(of_copiers()) == 2
    yield made
    made.close()
    assert not of_copiers()


def of_copiers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hcache-copier")]


def path_with(threads: int, **sizes: int) -> SavePath:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveParts, "copying_threads", threads)
        return SavePath(**sizes)


# -- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "threads"), [(1, 0), (2, 0), (7, 0), (8, 1), (15, 2), (16, 3), (192, 3)])
def test_a_quarter_of_the_cores_copies(cores: int, threads: int) -> None:
    copiers = copiers_for(cores)
    assert (copiers.count - 1, len(of_copiers())) == (threads, threads)
    copiers.carry_out([lambda: None] * 4)
    copiers.close()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_everything_is_copied_once(copiers: Copiers, count: int) -> None:
    done: list[int] = []
    copiers.carry_out([lambda number=number: done.append(number) for number in range(count)])  # type: ignore[misc]
    assert sorted(done) == list(range(count))


def test_threads_copy_at_the_same_time_and_let_others_go_first(copiers: Copiers) -> None:
    together = threading.Barrier(3)
    niceness: set[int] = set()

    def copy() -> None:
        together.wait(_TIMEOUT_S)
        niceness.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    copiers.carry_out([copy] * 3)
    assert niceness == {own, max(10, own)}


@pytest.mark.parametrize("fails_here", [True, False])
def test_after_an_error_nothing_is_under_way(copiers: Copiers, fails_here: bool) -> None:
    here = threading.current_thread()
    together = threading.Barrier(3)
    ended: list[int] = []

    def copy() -> None:
        together.wait(_TIMEOUT_S)
        if (threading.current_thread() is here) is fails_here:
            raise MemoryError
        threading.Event().wait(0.05)
        ended.append(0)

    with pytest.raises(MemoryError):
        copiers.carry_out([copy] * 3)
    assert len(ended) == (2 if fails_here else 1)


def test_a_thread_that_cannot_begin_is_an_error_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a pass: others copy its rows already, into slots that would be given out again meanwhile."""
    begin = threading.Thread.start
    begun: list[threading.Thread] = []

    def begin_one(thread: threading.Thread) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", begin_one)
    with pytest.raises(RuntimeError):
        Copiers(3)
    assert not of_copiers()


def test_where_nothing_can_be_handed_over_nothing_is_under_way(
    copiers: Copiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = copiers._threads.submit
    handed: list[int] = []
    under_way = threading.Event()
    done: list[int] = []

    def submit_one(*work: object) -> object:
        if handed:
            assert under_way.wait(_TIMEOUT_S)
            raise MemoryError
        handed.append(0)
        return submit(*work)  # type: ignore[arg-type]

    def copy() -> None:
        under_way.set()
        threading.Event().wait(0.05)
        done.append(0)

    monkeypatch.setattr(copiers._threads, "submit", submit_one)
    with pytest.raises(MemoryError):
        copiers.carry_out([copy] * 8)
    assert len(done) >= 1
    ended = len(done)
    copiers.close()
    assert len(done) == ended


# -- with the assembler --------------------------------------------------------------------------


def test_a_long_prompt_takes_the_place_of_its_own_beginning() -> None:
    """Whole chunks that wait for the copies of others are sealed where no slot is free."""
    path = path_with(3, slots=5, rows=1024)
    tokens = list(range(10 * CHUNK_TOKENS))
    path.begin("a", [])
    path.forward([("a", 0, tokens)])
    path.finish()
    assert path.counters["capture.chunks_dropped_host_full"] == 0
    assert path.counters["host.chunks_sealed"] == 10
    assert sum(path.sealed(tokens)) == 5


@pytest.fixture
def path() -> Iterator[SavePath]:
    made = path_with(3, slots=16, rows=1024)
    yield made
    made.finish()


def wrap_copies(path: SavePath, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> list[int]:
    """``before(first row)`` is called before each copy. Returns the first rows of those that have ended."""
    copy = path.assembler._requests._rows.copy
    ended: list[int] = []

    def wrapped(taken: object, slot: int, first: int, *rest: int) -> None:
        before(first)
        copy(taken, slot, first, *rest)  # type: ignore[arg-type]
        ended.append(first)

    monkeypatch.setattr(path.assembler._requests._rows, "copy", wrapped)
    return ended


@pytest.mark.parametrize(("fails", "sealed"), [(3, 0), (9, 8)])
def test_an_error_in_any_thread_costs_the_chunks_that_are_copied_together(
    path: SavePath, monkeypatch: pytest.MonkeyPatch, fails: int, sealed: int
) -> None:
    def fail(first: int) -> None:
        if first == fails * CHUNK_TOKENS:
            raise MemoryError

    tokens = list(range(640))
    with monkeypatch.context() as patch:
        wrap_copies(path, patch, fail)
        path.begin("a", [])
        path.forward([("a", 0, tokens)])
        path.settle()
    assert path.counters["capture.errors"] == 1
    assert path.tiers.host.counts() == (16 - sealed, sealed, 0)
    path.begin("b", [])
    path.forward([("b", 0, tokens)])
    path.finish()
    assert path.sealed(tokens) == [True] * 10


def test_copies_that_wait_are_never_made_after_an_error(
    path: SavePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their slots are soon those of others, and so are the rows."""
    host = path.tiers.host
    slots = iter([host.reserve(), host.reserve()])
    copied = wrap_copies(path, monkeypatch, lambda _first: None)
    with monkeypatch.context() as patch:
        patch.setattr(host, "reserve", lambda _behind: next(slots))
        path.begin("a", [])
        path.forward([("a", 0, list(range(512)))])
        path.settle()
    assert path.counters["capture.errors"] == 1
    assert host.counts() == (16, 0, 0)
    path.begin("b", [])
    path.forward([("b", 0, [7] * CHUNK_TOKENS)])
    path.finish()
    assert copied == [0]


def test_slots_that_wait_to_be_sealed_come_back_after_an_error(
    path: SavePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = path.tiers.seal
    sealed: list[int] = []

    def fail_at_third(slot: int, info: object) -> None:
        if len(sealed) == 2:
            raise MemoryError
        sealed.append(slot)
        seal(slot, info)  # type: ignore[arg-type]

    monkeypatch.setattr(path.tiers, "seal", fail_at_third)
    path.begin("a", [])
    path.forward([("a", 0, list(range(512)))])
    path.finish()
    # The slot that was being sealed is the tier's, whatever became of it.
    assert path.tiers.host.counts() == (13, 2, 0)


def test_nothing_is_sealed_and_no_row_used_again_before_all_copies_have_ended(
    path: SavePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_is_held, may_go_on = threading.Event(), threading.Event()
    only_one = threading.Lock()

    def hold_the_first_of_another_thread(_first: int) -> None:
        if threading.current_thread() is path.assembler._thread:
            assert one_is_held.wait(_TIMEOUT_S)
        elif only_one.acquire(blocking=False):
            one_is_held.set()
            assert may_go_on.wait(_TIMEOUT_S)

    ended = wrap_copies(path, monkeypatch, hold_the_first_of_another_thread)
    tokens = list(range(512))
    path.begin("a", [])
    path.forward([("a", 0, tokens)])
    closing = threading.Thread(target=path.finish)
    closing.start()
    wait_until(lambda: len(ended) == 7)
    threading.Event().wait(0.05)  # now the assembler would go on
    assert path.sealed(tokens) == [False] * 8
    assert path.ring.reserve(513) is None
    may_go_on.set()
    closing.join(_TIMEOUT_S)
    assert path.sealed(tokens) == [True] * 8
    assert path.ring.reserve(1024) is not None
    assert not of_copiers()
