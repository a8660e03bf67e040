"""A directory that was out at the start is back: what only it holds is unread until the next start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import NAMESPACE_ID, make_keys, match_keys, small_config, write_keys
from tests.unit.store.conftest import conditions, is_healthy, save, sick, state_of, wait_until
from tests.unit.store.test_health import keep_out
from tests.unit.store.test_unread import RUNS, SIZES, found, found_at_a_start, only_in_second, write_without

LATER = make_keys(5000, 4)
DAY_BYTES = 10**9


def opened_without(
    number: int, config: StoreConfig, monkeypatch: pytest.MonkeyPatch, *, writes: bool = False
) -> DiskStore:
    """That directory is back when this returns; ``writes``: LATER is stored before, in the other one."""
    names = {config.dirs[number].name}
    with monkeypatch.context() as patch:
        sick(names, patch)
        store = DiskStore.open(config, Counters())
        if writes:
            write_keys(store, LATER, SIZES)
    wait_until(lambda: is_healthy(store))
    return store


def in_files(config: StoreConfig, number: int) -> int:
    return sum(path.stat().st_size for path in config.dirs[number].glob("*.seg"))


def test_it_counts_against_the_cap_and_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = only_in_second(tmp_path, monkeypatch)
    files = len([*config.dirs[1].glob("*.seg")])
    store = opened_without(1, config, monkeypatch, writes=True)
    assert found(store) == 0
    assert Inside(store).space.used_bytes() >= in_files(config, 0) + in_files(config, 1)
    for _ in range(files):
        assert match_keys(store, LATER) == len(LATER)
        assert store.evict_one()
    assert in_files(config, 1) == 0
    assert match_keys(store, LATER) == len(LATER)
    assert Inside(store).space.used_bytes() <= 2 * in_files(config, 0)
    store.close()


@pytest.mark.parametrize("is_used", [False, True])
def test_what_is_above_the_cap_goes_there_and_not_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_used: bool
) -> None:
    """However often it was used: until the next start nobody can."""
    config = small_config(tmp_path, 2, size=6 * 2**20)
    cap_bytes = config.segments_budget_bytes
    write_without(config, None, [], monkeypatch)
    runs = [make_keys(10 * index, 4) for index in range(80)]
    write_without(config, 0, runs, monkeypatch)
    if is_used:
        store = DiskStore.open(config, Counters())
        for keys in runs:
            store.touch(keys)
        store.close()
    with monkeypatch.context() as patch:
        sick({"disk1"}, patch)
        store = DiskStore.open(config, Counters())
        for index in range(80):
            write_keys(store, make_keys(10_000 + 10 * index, 4), SIZES)
        served = store.stats().chunks
    assert Inside(store).space.used_bytes() + in_files(config, 1) > cap_bytes
    wait_until(lambda: is_healthy(store))
    wait_until(lambda: Inside(store).space.used_bytes() <= cap_bytes)
    assert in_files(config, 1) == 0
    # Room for the next segment is for files in both directories now.
    assert store.stats().chunks >= 0.8 * served > 0
    store.close()


@pytest.mark.parametrize("namespace_id", [NAMESPACE_ID, bytes(16)])
def test_who_erases_a_namespace_erases_it_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace_id: bytes
) -> None:
    """Nobody knows whose it is."""
    config = only_in_second(tmp_path, monkeypatch)
    store = opened_without(1, config, monkeypatch)
    store.erase([namespace_id])
    assert in_files(config, 1) == 0
    store.close()
    assert found_at_a_start(config) == 0


@pytest.mark.parametrize("is_back", [True, False])
def test_what_is_cleared_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    config = only_in_second(tmp_path, monkeypatch)
    if is_back:
        store = opened_without(1, config, monkeypatch)
        store.clear()
    else:
        with monkeypatch.context() as patch:
            sick({"disk1"}, patch)
            store = DiskStore.open(config, Counters())
            store.clear()
        wait_until(lambda: is_healthy(store))
    write_keys(store, LATER, SIZES)
    wait_until(lambda: not Inside(store).leftovers)
    assert [segment.number for segment in Inside(store).catalog.segments() if segment.is_unread] == []
    store.close()
    assert found_at_a_start(config) == 0


def test_both_out_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds runs of its own, and some are striped over both, which are served at once."""
    config = small_config(tmp_path, 2)
    striped = [make_keys(10_000 + 10 * index, 4) for index in range(3)]
    write_without(config, None, striped, monkeypatch)
    write_without(config, 0, RUNS, monkeypatch)
    write_without(config, 1, [LATER], monkeypatch)

    def all_striped(store: DiskStore) -> bool:
        return all(match_keys(store, keys) == 4 for keys in striped)

    store = opened_without(1, config, monkeypatch)
    assert (found(store), match_keys(store, LATER), all_striped(store)) == (0, 4, True)
    store.close()
    store = opened_without(0, config, monkeypatch)
    assert (found(store), match_keys(store, LATER), all_striped(store)) == (len(RUNS), 0, True)
    for _ in range(2):  # a second time it is known
        Inside(store).volumes[0].health.take_out("the test says so")
        assert not all_striped(store)
        wait_until(lambda: is_healthy(store))
        assert Inside(store).space.used_bytes() >= in_files(config, 0) + in_files(config, 1)
    store.close()
    store = DiskStore.open(config, Counters())
    assert (found(store), match_keys(store, LATER), all_striped(store)) == (len(RUNS), 4, True)
    store.close()


def test_new_segments_get_other_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if those of the files that are back are higher."""
    config = only_in_second(tmp_path, monkeypatch)
    for path in config.dirs[1].glob("*.seg"):
        number = int(path.stem.partition("-")[2])
        path.rename(path.with_name(f"segment-{number + 2**30:08d}.seg"))
    before = {path.name for path in config.dirs[1].glob("*.seg")}
    store = opened_without(1, config, monkeypatch, writes=True)
    more = [make_keys(6000 + 10 * index, 4) for index in range(8)]
    for keys in more:
        write_keys(store, keys, SIZES)
    assert {path.name for path in config.dirs[1].glob("*.seg")} >= before
    assert not {path.name for path in config.dirs[0].glob("*.seg")} & before
    assert all(match_keys(store, keys) == 4 for keys in more)
    store.close()


def without_runs_in_first(config: StoreConfig, counters: Counters) -> None:
    """All lie in the others, and what is known of them is written down in each."""
    store = DiskStore.open(config, counters)
    keep_out(Inside(store).volumes[0])
    for keys in RUNS:
        write_keys(store, keys, SIZES)
    store.touch(RUNS[0])
    Inside(store).retry_now()
    wait_until(lambda: is_healthy(store))
    store.close()


@pytest.mark.parametrize("writes", [False, True])
def test_its_runs_are_neither_lost_nor_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    config, counters = replace(small_config(tmp_path, 2), write_budget_bytes=DAY_BYTES), Counters()
    without_runs_in_first(config, counters)
    before = state_of(config.dirs[0]).segments
    store = opened_without(1, config, monkeypatch, writes=writes)
    written = store.stats().written_today_bytes
    save(store)
    assert before.items() <= state_of(config.dirs[0]).segments.items(), "what was used last is known"
    store.close()
    store = DiskStore.open(config, counters)
    assert found(store) == len(RUNS)
    assert store.stats().written_today_bytes == written > 0
    assert counters["store.runs_lost"] == 0
    store.close()


@pytest.mark.parametrize("comes_back_late", [False, True])
def test_what_is_known_of_them_outlasts_whoever_has_not_seen_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back_late: bool
) -> None:
    config, counters = replace(small_config(tmp_path, 2), write_budget_bytes=DAY_BYTES), Counters()
    without_runs_in_first(config, counters)
    before = state_of(config.dirs[0]).segments
    for _ in range(2):
        write_without(config, 1, [], monkeypatch)
        assert state_of(config.dirs[0]).segments == before
    if comes_back_late:
        opened_without(1, config, monkeypatch).close()
    store = DiskStore.open(config, counters)
    assert found(store) == len(RUNS)
    assert store.stats().written_today_bytes == sum(
        run.place.shape.disk_bytes for run in Inside(store).runs()
    )
    assert counters["store.runs_lost"] == 0
    store.close()
    assert state_of(config.dirs[0]).segments == before


def test_what_is_evicted_before_all_directories_are_back_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, counters = small_config(tmp_path, 3), Counters()
    without_runs_in_first(config, counters)
    assert in_files(config, 1) > 0 < in_files(config, 2)
    names = {"disk1", "disk2"}
    with monkeypatch.context() as patch:
        sick(names, patch)
        store = DiskStore.open(config, counters)
        names.remove("disk1")
        wait_until(lambda: conditions(store)[1] == "healthy")
        while store.evict_one():
            pass
        assert not in_files(config, 1)
    wait_until(lambda: is_healthy(store))
    store.close()
    store = DiskStore.open(config, counters)
    assert (store.stats().chunks, counters["store.runs_lost"]) == (0, 0)
    store.close()


def test_a_file_that_goes_with_its_directory_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = only_in_second(tmp_path, monkeypatch)
    store = opened_without(1, config, monkeypatch)
    assert f"in {config.dirs[1]} were not there at the start" in caplog.text
    for path in config.dirs[1].glob("*.seg"):
        path.unlink()
    Inside(store).volumes[1].health.take_out("the test says so")
    wait_until(lambda: is_healthy(store))
    assert not Inside(store).catalog.segments()
    assert store.stats().totals.get("runs_lost", 0) == 0
    store.close()
