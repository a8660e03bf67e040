"""How long chunks stay at most: by the times of their files, whatever happens in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, aligned_empty
from sglang_hcache.store import retention as retention_module
from sglang_hcache.store.inspect.maintenance import collect
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import kill, sick, wait_until

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
    """In place of ``time`` in the module: wall clock and the time between looks go on as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        self.set_back_s = 0.0
        monkeypatch.setattr(retention_module, "time", self)

    def time(self) -> float:
        return time.time() + self.ahead_s - self.set_back_s

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


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
    grow_old(config_of(tmp_path), -4, segment_files(config_of(tmp_path))[1::2])
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


def test_files_are_asked_for_their_time_once(
    tmp_path: Path, store: DiskStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks hold up writes: not each of them by as many calls as there are files."""
    asked: list[int] = []
    real = StoreDirectory.segment_time

    def ask(self: StoreDirectory, segment: int) -> float:
        asked.append(segment)
        return real(self, segment)

    monkeypatch.setattr(StoreDirectory, "segment_time", ask)
    for day in range(4, 20):
        clock.ahead_s = day * DAY
        Inside(store).space.tend()
    assert asked == [0, 0]
    clock.set_back_s = 40 * DAY  # the files' time lies in the future now
    clock.ahead_s += DAY
    Inside(store).space.tend()
    assert max(path.stat().st_mtime for path in segment_files(config_of(tmp_path))) < time.time()
    clock.ahead_s += 31 * DAY
    wait_until(lambda: Inside(store).space.tend() or not store.contains(OLD[0]))


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
    tmp_path: Path, open_store: OpenStore, store: DiskStore, clock: Clock
) -> None:
    """The clock was a hundred days ahead when it was written, and was set right."""
    store.close()
    config = config_of(tmp_path)
    grow_old(config, -100, segment_files(config)[1:])
    again = open_store(config)
    assert match_keys(again, OLD) == 4
    assert all(abs(path.stat().st_mtime - time.time()) < 60 for path in segment_files(config))
    clock.ahead_s = 28 * DAY
    Inside(again).keeper.wake()
    wait_until(lambda: not again.contains(OLD[0]))


def test_who_only_looks_changes_no_time(tmp_path: Path, store: DiskStore) -> None:
    store.close()
    config = config_of(tmp_path)
    grow_old(config, -100)
    before = [path.stat().st_mtime for path in segment_files(config)]
    with StoreView.open(config.dirs) as view:
        assert view.namespaces()[0].written_at == max(before)
    assert [path.stat().st_mtime for path in segment_files(config)] == before


def test_a_segment_is_filled_no_longer_though_the_clock_is_set_back(store: DiskStore, clock: Clock) -> None:
    clock.set_back_s = 50 * DAY
    clock.ahead_s = 4 * DAY  # over a tenth of the age
    Inside(store).keeper.wake()
    wait_until(lambda: Inside(store).active is None)


def test_a_segment_is_filled_no_longer_after_a_sleep(store: DiskStore, clock: Clock) -> None:
    clock.set_back_s = -4 * DAY  # only the clock on the wall went on
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


@pytest.mark.usefixtures("no_keeper")
def test_files_are_asked_once_though_a_directory_is_out(
    store: DiskStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    ask = StoreDirectory.segment_time

    def segment_time(directory: StoreDirectory, segment: int) -> float:
        asked.append((directory.path.name, segment))
        return ask(directory, segment)

    monkeypatch.setattr(StoreDirectory, "segment_time", segment_time)
    inside = Inside(store)
    [segment] = inside.catalog.segments()
    segment.sealed = True
    inside.volumes[1].health.take_out("gone for days")
    for _ in range(3):
        clock.ahead_s += 3600
        inside.space._retention.enforce()
    assert len(asked) == 1
    inside.volumes[1].health.recover(inside.volumes[1].health.condition)
    for _ in range(3):
        clock.ahead_s += 3600
        inside.space._retention.enforce()
    assert len(asked) == 2, "its file may be the newer one"
