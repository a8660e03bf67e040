"""Directories that were each used without the other, that came back without files, or while some could not be read."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, small_config, write_keys
from tests.unit.store.conftest import fail, is_healthy, kill, preads, save, sick, state_of, wait_until
from tests.unit.store.test_unread import RUNS, SIZES, found, found_at_a_start, only_in_second, write_without


def opened_without_second(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> DiskStore:
    """Its second directory is back at once."""
    with monkeypatch.context() as patch:
        sick({config.dirs[1].name}, patch)
        return DiskStore.open(config, Counters())


def test_what_one_directory_let_go_alone_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, counters = small_config(tmp_path, 2), Counters()
    write_without(config, None, RUNS, monkeypatch)
    with monkeypatch.context() as patch:
        sick({"disk1"}, patch)
        store = DiskStore.open(replace(config, retry_s=50.0), Counters())
        assert store.evict_one()
        store.close()
    for _ in range(4):
        write_without(config, 0, [make_keys(5000, 1)], monkeypatch)
    first, second = (state_of(path) for path in config.dirs)
    assert first.serial < second.serial
    assert second.segments.keys() - first.segments.keys()
    with StoreView.open(config.dirs) as view:
        assert not [item.what for item in check(view) if item.is_error]
    DiskStore.open(config, counters).close()
    assert counters["store.runs_lost"] == 0


def test_what_was_about_to_go_in_a_directory_that_is_out_is_written_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be there, or not: nobody can see."""
    config = only_in_second(tmp_path, monkeypatch)
    store = DiskStore.open(config, Counters())
    for number in range(5, 45):
        write_keys(store, make_keys(1000 * number, 4), SIZES)
    save(store)
    written = store.stats().written_today_bytes
    going = state_of(config.dirs[0]).going
    assert going <= {item.number for item in Inside(store).catalog.segments()}
    kill(store)
    with monkeypatch.context() as patch:
        sick({"disk1"}, patch)
        store = DiskStore.open(config, Counters())
        assert going <= state_of(config.dirs[0]).going
    wait_until(lambda: is_healthy(store))
    scores = [item.score for item in Inside(store).catalog.segments() if item.number in going]
    assert len(scores) == len(going) > 0
    assert all(scores)
    store.close()
    store = DiskStore.open(config, Counters())
    assert store.stats().written_today_bytes == written
    store.close()


def test_files_of_segments_that_could_not_be_read_in_another_directory_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    write_without(config, None, RUNS, monkeypatch)
    before = {path: path.stat().st_size for path in tmp_path.glob("disk*/*.seg")}
    with preads(lambda *_: fail()):
        store = opened_without_second(config, monkeypatch)
        for _ in range(2):  # the second time they are known
            wait_until(lambda: is_healthy(store))
            Inside(store).space.tend()
            assert Inside(store).reserved_bytes - config.reserve_bytes > sum(before.values())
            Inside(store).volumes[1].health.take_out("the test says so")
        wait_until(lambda: is_healthy(store))
        assert not Inside(store).leftovers
        store.close()
    assert {path: path.stat().st_size for path in before} == before
    assert found_at_a_start(config) == len(RUNS)


def test_so_does_the_rest_of_a_file_whose_other_half_could_be_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2, segment=2**22, size=2**25)
    write_without(config, None, RUNS, monkeypatch)
    (path,) = config.dirs[1].glob("*.seg")
    size, bad_from = path.stat().st_size, path.stat().st_size // 2
    with preads(lambda _, read: fail() if read.stop > bad_from else None):
        store = opened_without_second(config, monkeypatch)
        wait_until(lambda: is_healthy(store))
        assert found(store) < len(RUNS)
        store.close()
    assert path.stat().st_size == size
    assert found_at_a_start(config) == len(RUNS)


def test_what_one_directory_could_not_be_read_of_is_believed_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many reads fail."""
    config = small_config(tmp_path, 2, segment=2**22, size=2**25)
    write_without(config, None, RUNS, monkeypatch)
    (path,) = config.dirs[1].glob("*.seg")
    bad_from = path.stat().st_size // len(RUNS)
    with preads(lambda file, read: fail() if file == path and read.stop > bad_from else None):
        assert found_at_a_start(config) == len(RUNS)


def test_they_go_together_when_room_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, 2)
    write_without(config, None, RUNS, monkeypatch)
    with preads(lambda *_: fail()):
        store = opened_without_second(config, monkeypatch)
        wait_until(lambda: is_healthy(store))
    while store.evict_one():
        assert not Inside(store).leftovers
    assert not [*tmp_path.glob("disk*/*.seg")]
    assert Inside(store).reserved_bytes == config.reserve_bytes
    store.close()


def test_a_file_of_a_store_of_fewer_directories_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, other = small_config(tmp_path / "two", 2), small_config(tmp_path / "one")
    write_without(config, None, RUNS[:2], monkeypatch)
    write_without(other, None, RUNS[2:], monkeypatch)
    for path in other.dirs[0].glob("*.seg"):
        shutil.copy(path, config.dirs[0] / path.name)
    store = DiskStore.open(config, Counters())
    assert found(store) == 0, "its file of the same number has replaced ours"
    store.close()


@pytest.mark.usefixtures("no_keeper")
def test_few_evictions_need_a_state_of_their_own(tmp_path: Path) -> None:
    """The last one says which segments may have gone meanwhile."""
    config, counters = small_config(tmp_path), Counters()
    store = DiskStore.open(config, counters)
    for number in range(40):
        write_keys(store, make_keys(10 * number, 4), SIZES)
    assert 16 < store.stats().segments < 32, "one of them is named"
    save(store)
    save(store)  # it names as many as the one before suggests
    before = state_of(config.dirs[0])
    assert store.evict_one()
    assert state_of(config.dirs[0]) == before
    with StoreView.open(config.dirs) as view:
        assert not view.lost
    for _ in range(3):
        assert store.evict_one()
    assert state_of(config.dirs[0]).serial == before.serial + 2, "each names another one as well"
    kill(store)
    DiskStore.open(config, counters).close()
    assert counters["store.runs_lost"] == 0


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("kind", ["deleted", "cut"])
def test_files_that_a_directory_has_lost_cost_one_state(tmp_path: Path, kind: str) -> None:
    config = small_config(tmp_path, 2)
    store = DiskStore.open(config, Counters())
    for keys in RUNS:
        write_keys(store, keys, SIZES)
    save(store)
    lost = sorted(config.dirs[1].glob("*.seg"))[:3]
    for path in lost:
        if kind == "deleted":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size - 4096)
    serial = state_of(config.dirs[0]).serial
    Inside(store).space.reconcile(Inside(store).volumes[1])
    assert not [path for path in lost if (config.dirs[0] / path.name).exists()]
    assert state_of(config.dirs[0]).serial == serial + 1
    store.close()


def test_files_that_lie_only_in_a_directory_that_is_back_stay_if_they_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = only_in_second(tmp_path, monkeypatch)
    with preads(lambda *_: fail()):
        store = opened_without_second(config, monkeypatch)
        wait_until(lambda: bool(Inside(store).catalog.segments()))
        Inside(store).space.tend()
        store.close()
    assert found_at_a_start(config) == len(RUNS)
