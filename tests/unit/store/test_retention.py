"""How long chunks stay at most: by the times of their files, whatever happens in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, aligned_empty, retention
from sglang_hcache.store import segments as segments_module
from sglang_hcache.store import space as space_module
from sglang_hcache.store.inspect.maintenance import collect
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.volumes.volume import Volume
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import is_healthy, kill, sick, state_of, wait_until

OpenStore = Callable[..., DiskStore]

DAY = 86_400.0
LAYERS = (4096,) * 3
OLD, NEW = make_keys(1, 4), make_keys(100, 4)


def config_of(base: Path, max_age_s: float | None = 30 * DAY, num_dirs: int = 2) -> StoreConfig:
    return replace(small_config(base, num_dirs), max_age_s=max_age_s)


def segment_files(config: StoreConfig) -> list[Path]:
    return sorted(path for folder in config.dirs for path in folder.glob("segment-*.seg"))


def grow_old(config: StoreConfig, days: float, files: list[Path] | None = None) -> None:
    """As if nothing had been written to the files for so long."""
    for path in segment_files(config) if files is None else files:
        written = path.stat().st_mtime - days * DAY
        os.utime(path, (written, written))


class Clock:
    """In place of ``time`` in the modules that ask for it: the clock on the wall, as it is told to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        for module in (retention, segments_module, space_module):
            monkeypatch.setattr(module, "time", self)

    def time(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def store(tmp_path: Path, open_store: OpenStore) -> DiskStore:
    found = open_store(config_of(tmp_path))
    write_keys(found, OLD, LAYERS)
    return found


@pytest.mark.parametrize(("days", "is_kept"), [(26, True), (27, False), (400, False)])
def test_what_is_too_old_is_gone_before_a_server_serves_it(
    tmp_path: Path, open_store: OpenStore, store: DiskStore, counters: Counters, days: float, is_kept: bool
) -> None:
    store.close()
    config = config_of(tmp_path)
    grow_old(config, days)
    again = open_store(config)
    assert match_keys(again, OLD) == (4 if is_kept else 0)
    assert bool(segment_files(config)) is is_kept
    assert (counters["store.segments_expired"], counters["store.chunks_expired"]) == (
        (0, 0) if is_kept else (1, 4)
    )


def test_without_a_limit_nothing_goes(tmp_path: Path, open_store: OpenStore, store: DiskStore) -> None:
    store.close()
    config = config_of(tmp_path, None)
    grow_old(config, 5000)
    assert match_keys(open_store(config), OLD) == 4


def test_chunks_of_a_server_that_runs(
    tmp_path: Path, store: DiskStore, clock: Clock, counters: Counters
) -> None:
    """Nothing is written to a segment for long, and each goes in time."""
    clock.ahead_s = 4 * DAY  # over a tenth of the age: the next chunks go to another segment
    Inside(store).keeper.wake()
    wait_until(lambda: Inside(store).active is None)
    write_keys(store, NEW, LAYERS)
    assert len(segment_files(config_of(tmp_path))) == 4
    clock.ahead_s = 28 * DAY
    Inside(store).keeper.wake()
    wait_until(lambda: not store.contains(OLD[0]))
    assert match_keys(store, NEW) == 4
    clock.ahead_s = 32 * DAY
    Inside(store).keeper.wake()
    wait_until(lambda: not store.contains(NEW[0]))
    wait_until(lambda: not segment_files(config_of(tmp_path)))
    wait_until(lambda: counters["store.chunks_expired"] == 8)  # counted when the files are gone


@pytest.mark.usefixtures("no_keeper")
def test_looks_ask_no_file(store: DiskStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold up writes: not each of them by as many calls as there are files."""
    space = Inside(store).space
    clock.ahead_s = 4 * DAY
    space.tend()
    with monkeypatch.context() as patch:
        patch.delattr(Volume, "attempt")
        for day in range(4, 20):
            clock.ahead_s = day * DAY
            retention.enforce(space._config.max_age_s, Inside(store).catalog, space._remover)
    clock.ahead_s = 27 * DAY
    space.tend()
    assert match_keys(store, OLD) == 0


def test_a_use_does_not_make_it_younger(tmp_path: Path, store: DiskStore, clock: Clock) -> None:
    for day in range(1, 27):
        clock.ahead_s = day * DAY
        store.touch(OLD)
        read_keys(store, OLD)
    clock.ahead_s = 28 * DAY
    Inside(store).keeper.wake()
    wait_until(lambda: not store.contains(OLD[0]))


def test_what_is_being_read_goes_when_that_ends(tmp_path: Path, store: DiskStore, clock: Clock) -> None:
    with store.lease(OLD) as lease:
        clock.ahead_s = 40 * DAY
        Inside(store).keeper.wake()
        wait_until(lambda: not store.contains(OLD[0]))
        store.read_layers(lease, {0: aligned_empty(4 * LAYERS[0])})
        assert segment_files(config_of(tmp_path))
    wait_until(lambda: not segment_files(config_of(tmp_path)))


def test_a_killed_server_s_chunks_are_as_old_as_they_were(
    tmp_path: Path, open_store: OpenStore, store: DiskStore
) -> None:
    """The next start cuts its last segment, which makes that no younger."""
    kill(store)
    config = config_of(tmp_path)
    sizes = [path.stat().st_size for path in segment_files(config)]
    grow_old(config, 20)
    again = open_store(config)
    assert match_keys(again, OLD) == 4
    assert [path.stat().st_size for path in segment_files(config)] < sizes, "cut"
    again.close()
    grow_old(config, 8)
    assert match_keys(open_store(config), OLD) == 0


def test_a_time_of_0_is_old(tmp_path: Path, open_store: OpenStore, store: DiskStore) -> None:
    """As a copy has it that set no times."""
    store.close()
    config = config_of(tmp_path)
    for path in segment_files(config):
        os.utime(path, (0, 0))
    assert match_keys(open_store(config), OLD) == 0
    assert not segment_files(config)


@pytest.mark.usefixtures("no_keeper")
def test_what_no_file_tells_the_age_of_stays(tmp_path: Path, open_store: OpenStore, store: DiskStore) -> None:
    """As where all directories that it is in are out."""
    store.close()
    again = open_store(config_of(tmp_path))
    [segment] = Inside(again).catalog.segments()
    segment.written_s = Segment(0, (), (), 0).written_s
    Inside(again).space.tend()
    assert match_keys(again, OLD) == 4


def test_one_directory_is_out(
    tmp_path: Path, open_store: OpenStore, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's files say how old it is; what cannot be deleted yet is, once it can be."""
    store.close()
    config = config_of(tmp_path)
    grow_old(config, 40)
    sick({"disk1"}, monkeypatch)
    again = open_store(config)
    assert not list(config.dirs[0].glob("segment-*"))
    assert len(segment_files(config)) == 1
    monkeypatch.undo()
    wait_until(lambda: not segment_files(config))
    assert match_keys(again, OLD) == 0


def test_a_time_in_the_future_is_no_way_to_stay(
    tmp_path: Path, open_store: OpenStore, store: DiskStore
) -> None:
    """The clock was ahead when it was written, and was set right: a little is no matter."""
    store.close()
    config = config_of(tmp_path)
    grow_old(config, -3, segment_files(config)[1:])
    again = open_store(config)
    assert match_keys(again, OLD) == 4
    again.close()
    grow_old(config, -100, segment_files(config)[1:])
    assert match_keys(open_store(config), OLD) == 0


def test_who_only_looks_changes_no_time(tmp_path: Path, store: DiskStore) -> None:
    store.close()
    config = config_of(tmp_path)
    grow_old(config, -100)
    before = [path.stat().st_mtime for path in segment_files(config)]
    with StoreView.open(config.dirs) as view:
        assert view.namespaces()[0].written_at == max(before)
    assert [path.stat().st_mtime for path in segment_files(config)] == before


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("days", [1, 50])
def test_a_segment_is_filled_no_longer_when_the_clock_was_set_back(
    store: DiskStore, clock: Clock, days: float
) -> None:
    clock.ahead_s = -days * DAY
    write_keys(store, NEW, LAYERS)  # before a look notices it
    Inside(store).space.tend()
    assert Inside(store).active is None


def test_a_segment_is_filled_no_longer_after_a_sleep(store: DiskStore, clock: Clock) -> None:
    clock.ahead_s = 4 * DAY  # only the clock on the wall went on, which is the only one there is here
    Inside(store).keeper.wake()
    wait_until(lambda: Inside(store).active is None)


def test_by_hand_without_a_server(tmp_path: Path, store: DiskStore) -> None:
    store.close()
    config = config_of(tmp_path, None)
    grow_old(config, 10)
    assert collect(config.dirs, max_age_s=20 * DAY).after.chunks == 4
    change = collect(config.dirs, max_age_s=10 * DAY)
    assert (change.before.chunks, change.after.chunks) == (4, 0)
    assert change.counts["store.chunks_expired"] == 4


def test_a_directory_that_is_back_may_have_the_newer_file(
    tmp_path: Path,
    open_store: OpenStore,
    store: DiskStore,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.close()
    config = config_of(tmp_path)
    first, second = segment_files(config)
    grow_old(config, 20, [first])
    grow_old(config, 10, [second])
    with monkeypatch.context() as patch:
        sick({"disk1"}, patch)
        again = open_store(config)
        [segment] = Inside(again).catalog.segments()
        assert segment.written_s == first.stat().st_mtime
    wait_until(lambda: is_healthy(again))
    clock.ahead_s = 16 * DAY
    Inside(again).space.tend()
    assert match_keys(again, OLD) == 4
    clock.ahead_s += DAY
    Inside(again).space.tend()
    assert match_keys(again, OLD) == 0


@pytest.mark.usefixtures("no_keeper")
def test_many_segments_that_are_too_old_cost_one_state(tmp_path: Path, open_store: OpenStore) -> None:
    config = config_of(tmp_path)
    store = open_store(config)
    for number in range(8):
        write_keys(store, make_keys(10 * number, 4), (32768,) * 4)
    assert store.stats().segments >= 4
    store.close()
    before = state_of(config.dirs[0]).serial
    grow_old(config, 40)
    open_store(config)
    assert not segment_files(config)
    assert state_of(config.dirs[0]).serial == before + 1
