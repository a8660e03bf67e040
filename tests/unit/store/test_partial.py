"""A start without one of the directories: what lies in it is believed until it is back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    match_keys,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import is_healthy, kill, sick, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (32768,) * 3
"""Four chunks of it fill more than half of a segment of 512 KiB: one run a segment."""
MIB = 2**20


def config_of(base: Path, num_dirs: int = 2, size: int = 16 * MIB) -> StoreConfig:
    return small_config(base, num_dirs, size=size, segment=MIB // 2)


def fill(store: DiskStore, first: int, runs: int) -> list[tuple[bytes, ...]]:
    written = [make_keys(first + 4 * number, 4) for number in range(runs)]
    for keys in written:
        write_keys(store, keys, LAYERS)
    return written


def served(store: DiskStore, written: Iterable[tuple[bytes, ...]]) -> int:
    """How many runs are there; reads and verifies them."""
    there = [keys for keys in written if match_keys(store, keys) == len(keys)]
    for keys in there:
        read_keys(store, keys)
    return len(there)


def assert_each_run_once(store: DiskStore) -> None:
    runs = Inside(store).runs()
    assert len({run.place.run_id for run in runs}) == len(runs)


def all_there(store: DiskStore) -> bool:
    return all(volume.health.writable for volume in Inside(store).volumes)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of directories that cannot be opened now."""
    names: set[str] = set()
    sick(names, monkeypatch)
    return names


def stored(config: StoreConfig, open_store: OpenStore, runs: int = 6) -> list[tuple[bytes, ...]]:
    store = open_store(config)
    written = fill(store, 0, runs)
    store.close()
    return written


def test_when_the_directory_is_back_everything_is_served_again(
    tmp_path: Path, open_store: OpenStore, counters: Counters, absent: set[str]
) -> None:
    config = config_of(tmp_path)
    old = stored(config, open_store)
    absent.add("disk0")
    store = open_store(config)
    assert served(store, old) == 0
    new = fill(store, 1000, 3)
    absent.clear()
    wait_until(lambda: all_there(store))
    assert served(store, [*old, *new]) == 9
    newer = fill(store, 2000, 3)
    assert counters["store.runs_lost"] == 0
    kill(store)
    assert served(open_store(config), [*old, *new, *newer]) == 12
    assert counters["store.runs_lost"] == 0


@pytest.mark.usefixtures("no_keeper")
def test_a_file_with_the_number_of_a_segment_that_has_none_there_goes_at_the_start(
    tmp_path: Path, open_store: OpenStore, absent: set[str]
) -> None:
    config = config_of(tmp_path)
    stored(config, open_store, runs=0)
    absent.add("disk0")
    written = stored(config, open_store, runs=2)
    absent.clear()
    for path in config.dirs[1].glob("*.seg"):
        shutil.copy(path, config.dirs[0])
    store = open_store(config)
    assert not [*config.dirs[0].glob("*.seg")]
    assert served(store, written) == 2


def test_what_was_written_anew_meanwhile_outlasts_the_old_copy(
    tmp_path: Path, open_store: OpenStore, absent: set[str]
) -> None:
    config = config_of(tmp_path, 3)
    old = stored(config, open_store, runs=2)
    absent.add("disk0")
    store = open_store(config)
    for keys in old:
        write_keys(store, keys, LAYERS)
    absent.clear()
    wait_until(lambda: all_there(store))
    catalog = Inside(store).catalog
    wait_until(lambda: len(Inside(store).runs()) == 4)  # both copies of each
    oldest = min(catalog.segments(), key=lambda segment: segment.number)
    assert oldest.score == catalog._floor
    catalog.retire(oldest)
    assert served(store, old) == 2
    store.close()
    assert served(open_store(config), old) == 2


@pytest.mark.parametrize("end", [DiskStore.close, kill])
def test_it_may_be_back_only_at_a_later_start(
    tmp_path: Path,
    open_store: OpenStore,
    counters: Counters,
    absent: set[str],
    end: Callable[[DiskStore], None],
) -> None:
    """What lies in it alone is served then; no other segment gets the same number meanwhile."""
    config = config_of(tmp_path)
    old = stored(config, open_store)
    absent.add("disk1")
    store = open_store(config)
    alone = fill(store, 500, 4)
    store.close()
    absent.symmetric_difference_update({"disk0", "disk1"})
    new: list[tuple[bytes, ...]] = []
    for turn in range(2):
        store = open_store(config)
        assert served(store, [*old, *alone]) == 0
        assert_each_run_once(store)
        new += fill(store, 1000 * (turn + 1), 6)
        assert served(store, new) == len(new)
        end(store)
    absent.clear()
    store = open_store(config)
    assert served(store, [*old, *alone, *new]) == 6 + 4 + 12
    assert len({run.segment.number for run in Inside(store).runs()}) == 6 + 4 + 12
    assert_each_run_once(store)
    assert counters["store.runs_lost"] == 0


def test_directories_that_come_back_one_by_one(
    tmp_path: Path, open_store: OpenStore, absent: set[str]
) -> None:
    config = config_of(tmp_path, 3)
    old = stored(config, open_store)
    absent |= {"disk0", "disk1"}
    store = open_store(config)
    assert Inside(store).reserved_bytes >= 3 * physical_bytes(config.dirs[2:]) // 2, "what is out counts"
    absent.remove("disk1")
    wait_until(lambda: Inside(store).volumes[1].health.writable)
    assert served(store, old) == 0
    absent.clear()
    wait_until(lambda: all_there(store))
    assert served(store, old) == len(old)


def test_what_is_out_counts_and_gives_way_to_what_is_written(
    tmp_path: Path, open_store: OpenStore, counters: Counters, absent: set[str]
) -> None:
    config = config_of(tmp_path, size=12 * MIB)
    old = stored(config, open_store, runs=10)
    absent.add("disk0")
    store = open_store(config)
    waiting = len(list(config.dirs[1].glob("*.seg")))
    assert waiting == 10
    new = fill(store, 1000, 30)
    assert physical_bytes(config.dirs[1:]) <= config.size_bytes
    assert counters["store.segments_evicted"] >= 10
    assert served(store, new[-3:]) == 3
    absent.clear()
    wait_until(lambda: all_there(store))
    wait_until(lambda: physical_bytes(config.dirs) <= config.size_bytes)
    assert served(store, old) == 0, "half of each was evicted"
    assert served(store, new[-3:]) == 3
    known = {f"segment-{segment.number:08d}.seg" for segment in Inside(store).catalog.segments()}
    assert {path.name for path in config.dirs[0].glob("*.seg")} <= known


def test_what_is_cleared_meanwhile_does_not_come_back(
    tmp_path: Path, open_store: OpenStore, absent: set[str]
) -> None:
    config = config_of(tmp_path)
    old = stored(config, open_store)
    absent.add("disk0")
    store = open_store(config)
    store.clear()
    absent.clear()
    wait_until(lambda: all_there(store))
    assert served(store, old) == 0
    wait_until(lambda: not any(list(path.glob("*.seg")) for path in config.dirs))


def test_a_disk_that_was_replaced_is_not_waited_for(
    tmp_path: Path, open_store: OpenStore, absent: set[str]
) -> None:
    config = config_of(tmp_path)
    old = stored(config, open_store)
    absent.add("disk0")
    open_store(config).close()
    absent.clear()
    shutil.rmtree(config.dirs[0])
    store = open_store(config)
    wait_until(lambda: is_healthy(store))
    assert served(store, old) == 0
    assert not any(list(path.glob("*.seg")) for path in config.dirs)


def test_what_comes_back_is_no_fault(tmp_path: Path, open_store: OpenStore, absent: set[str]) -> None:
    config = config_of(tmp_path)
    stored(config, open_store)
    absent.add("disk0")
    open_store(config).close()
    with StoreView.open(config.dirs) as view:
        assert not [item for item in check(view) if "of no run" in item.what]
    absent.clear()
    open_store(config).close()
    with StoreView.open(config.dirs) as view:
        assert not [item for item in check(view) if "of no run" in item.what]
