"""The write budget: a rolling day, by the hour, whatever the clock does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hcache.core.errors import StoreFullError, StoreIOError, WriteBudgetError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.store.allowance import WriteAllowance
from sglang_hcache.store.io.engine import IOKind
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.io_faults import FaultEngine, always
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    make_run,
    payload_of,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import kill, save

OpenStore = Callable[..., DiskStore]
MIB = 2**20
HOUR = 3600.0
NOW = 500_000 * HOUR


def spend(allowance: WriteAllowance, size: int, now_s: float) -> None:
    with allowance.spending(size, now_s=now_s):
        pass


def test_the_last_fifth_is_for_chunks_that_were_used_again() -> None:
    allowance = WriteAllowance(1000)
    spend(allowance, 700, NOW)
    assert allowance.allows(100, now_s=NOW, reused=False)
    assert not allowance.allows(101, now_s=NOW, reused=False)
    with pytest.raises(WriteBudgetError, match="--hcache-disk-write-budget"):
        spend(allowance, 301, NOW)
    assert allowance.written(NOW) == 700, "what was refused is not counted"
    spend(allowance, 300, NOW)


def test_a_day_later_everything_may_be_written_again() -> None:
    allowance = WriteAllowance(1000)
    spend(allowance, 400, NOW)
    spend(allowance, 600, NOW + 12 * HOUR)
    with pytest.raises(WriteBudgetError):
        spend(allowance, 1, NOW + 23 * HOUR)
    assert allowance.written(NOW + 25 * HOUR) == 600
    assert allowance.written(NOW + 37 * HOUR) == 0


def test_without_a_budget_bytes_are_only_counted() -> None:
    allowance = WriteAllowance(None)
    spend(allowance, 10**15, NOW)
    assert allowance.written(NOW) == 10**15


def test_a_clock_set_back_by_some_hours_does_not_give_bytes_away() -> None:
    allowance = WriteAllowance(1000)
    spend(allowance, 900, NOW)
    assert allowance.written(NOW - 24 * HOUR) == 900
    with pytest.raises(WriteBudgetError):
        spend(allowance, 200, NOW - 24 * HOUR)
    spend(allowance, 200, NOW - 25 * HOUR)


def test_a_clock_that_is_ahead_for_a_moment_does_not_give_bytes_away() -> None:
    allowance = WriteAllowance(1000)
    spend(allowance, 800, NOW)
    assert allowance.written(NOW + 1000 * HOUR) == 0
    spend(allowance, 100, NOW + 1000 * HOUR)
    assert allowance.written(NOW + HOUR) == 800
    with pytest.raises(WriteBudgetError):
        spend(allowance, 300, NOW + HOUR)


@pytest.mark.parametrize("step", [1, -1])
def test_hours_that_are_far_off_are_forgotten(step: int) -> None:
    allowance = WriteAllowance(None)
    for number in range(500):
        spend(allowance, 1, NOW + step * number * HOUR)
    assert len(allowance.hours()) == 100
    assert allowance.written(NOW + step * 499 * HOUR) == 25


def test_what_was_not_written_after_all_is_given_back() -> None:
    allowance = WriteAllowance(1000)
    spend(allowance, 600, NOW)
    with pytest.raises(StoreFullError), allowance.spending(400, now_s=NOW + HOUR):
        raise StoreFullError
    with pytest.raises(StoreFullError), allowance.spending(300, now_s=NOW):
        raise StoreFullError
    assert allowance.written(NOW + HOUR) == 600
    spend(allowance, 400, NOW + 2 * HOUR)
    assert allowance.written(NOW + 25 * HOUR) == 400


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100)), max_size=40),
    st.integers(0, 5000),
)
def test_no_24_hours_exceed_the_budget(steps: list[tuple[int, int]], budget: int) -> None:
    allowance = WriteAllowance(budget)
    spent: list[tuple[float, int]] = []
    now = NOW
    for hours, size in steps:
        now += hours / 10 * HOUR
        with suppress(WriteBudgetError):
            spend(allowance, size, now)
            spent.append((now, size))
        if len(spent) % 3 == 0:
            allowance = WriteAllowance.resumed(budget, allowance.hours())
    for start, _ in spent:
        assert sum(size for at, size in spent if start <= at < start + 24 * HOUR) <= budget


@pytest.mark.parametrize("found", [None, "", "x", [], {"a": 1}, {"1": "x"}, {"1": None}])
def test_a_damaged_note_counts_as_nothing_written(found: object) -> None:
    assert WriteAllowance.resumed(10, found).written(NOW) == 0


def made_segments(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the segments that are made from now on."""
    made: list[int] = []
    create = StoreDirectory.create_segment

    def note(self: StoreDirectory, segment: int, size: int) -> None:
        made.append(segment)
        create(self, segment, size)

    monkeypatch.setattr(StoreDirectory, "create_segment", note)
    return made


@pytest.mark.usefixtures("no_keeper")
def test_a_budget_that_is_used_up_costs_no_room(
    tmp_path: Path, counters: Counters, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No segment is made or evicted for what is refused, and the next run goes where it would have gone."""
    layers = (32768,) * 3
    config = replace(small_config(tmp_path, size=8 * MIB, segment=MIB), write_budget_bytes=20 * MIB)
    store = open_store(config)
    made = made_segments(monkeypatch)
    number = 0
    with suppress(WriteBudgetError):
        while True:  # one run a segment
            write_keys(store, make_keys(6 * number, 6), layers)
            number += 1
    evicted = counters["store.segments_evicted"]
    assert len(made) == number
    assert evicted > 5, "the store is full"
    for _ in range(5):
        with pytest.raises(WriteBudgetError):
            write_keys(store, make_keys(9000, 6), layers)
    assert len(made) == number
    assert counters["store.segments_evicted"] == evicted
    read_keys(store, make_keys(6 * number - 6, 6))
    write_keys(store, make_keys(9100, 1), (4096,))
    assert len(made) == number, "the segment that was being filled still is"


@pytest.mark.usefixtures("no_keeper")
def test_a_run_without_room_is_not_counted(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(replace(small_config(tmp_path), write_budget_bytes=20 * MIB))
    too_large, run = make_run(make_keys(0, 13), (MIB,)), make_run(make_keys(0, 8), (MIB,))
    with pytest.raises(StoreFullError, match="--hcache-disk-size"):
        store.write_run(too_large, payload_of(too_large))
    assert store.stats().written_today_bytes == 0
    store.write_run(run, payload_of(run))
    assert store.stats().written_today_bytes > 8 * MIB


@pytest.mark.usefixtures("no_keeper")
def test_what_reached_the_drive_counts_though_it_is_not_served(tmp_path: Path, open_store: OpenStore) -> None:
    """A drive that fails when it is to make durable what it took, again and again, must not wear out by it."""
    engine = FaultEngine(PosixEngine(2, 2), always(IOKind.SYNC))
    store = open_store(replace(small_config(tmp_path), write_budget_bytes=100_000), engine)
    with pytest.raises(StoreIOError):
        write_keys(store, make_keys(0, 1), (4096,) * 8)
    assert store.stats().written_today_bytes == 65_536
    with pytest.raises(WriteBudgetError):
        write_keys(store, make_keys(0, 1), (4096,) * 8)


def test_the_store_keeps_the_budget_over_a_restart(tmp_path: Path, counters: Counters) -> None:
    config = replace(small_config(tmp_path), write_budget_bytes=60_000)
    layers = (4096,) * 4
    for turn in range(2):
        store = DiskStore.open(config, counters)
        written = 0
        for number in range(10):
            run = make_run(make_keys(100 * turn + number, 1), layers)
            try:
                store.write_run(run, payload_of(run))
                written += 1
            except StoreFullError:
                break
        assert written == (1 if turn == 0 else 0)
        again = make_run(make_keys(1000 + turn, 1), layers)
        if turn == 0:
            assert not store.admits(1, layers, reused=False)
            with pytest.raises(WriteBudgetError):
                store.write_run(again, payload_of(again))
        stats = store.stats()
        assert stats.written_today_bytes == 32_768 <= config.write_budget_bytes
        read_keys(store, make_keys(0, 1))
        assert stats.segments == 1, "a refused run leaves no segment behind"
        store.close()


@pytest.mark.usefixtures("no_keeper")
def test_what_was_written_since_the_last_state_counts_after_a_kill(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """Restarts in a loop do not exceed the budget, however little time each has; a known run counts once."""
    config = replace(small_config(tmp_path, 2), write_budget_bytes=10 * MIB)
    layers, written = (4096,) * 4, 0
    for turn in range(6):
        store = open_store(config)
        assert store.stats().written_today_bytes == written
        for number in range(3):
            write_keys(store, make_keys(100 * turn + number, 1), layers)
            if (turn, number) in ((0, 0), (1, 2), (3, 1)):
                save(store)
        written = store.stats().written_today_bytes
        assert written == 3 * (turn + 1) * 32_768
        if turn == 4:
            inside = Inside(store)
            inside.catalog.quarantine(inside.run_of(make_keys(400, 1)[0]), {0: "bad"})
            save(store)
        kill(store)
    for folder in config.dirs:
        (folder / "state.json").unlink()
    assert open_store(config).stats().written_today_bytes == written, "by the times of the files"


@pytest.mark.usefixtures("no_keeper")
def test_an_eviction_hides_nothing_that_was_written_before_a_kill(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """It writes a state for itself, which knows no more of what was written than the one before."""
    config = replace(small_config(tmp_path), write_budget_bytes=10**9)
    store = open_store(config)
    for number in range(8):
        write_keys(store, make_keys(10 * number, 4), (8192, 4096, 8192))
    save(store)
    for number in range(8, 14):
        write_keys(store, make_keys(10 * number, 4), (8192, 4096, 8192))
    written = store.stats().written_today_bytes
    assert store.evict_one()
    kill(store)
    assert open_store(config).stats().written_today_bytes >= written
