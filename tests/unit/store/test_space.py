"""The cap, the floor, what is evicted and what is not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_hcache.core.errors import ConfigError, StoreFullError, StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, aligned_empty
from sglang_hcache.store.io.engine import IOKind
from sglang_hcache.store.io.memory import ByteArray
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.segments import Segment, StoredRun
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.io_faults import FaultEngine, always, without_sync
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    make_key,
    make_keys,
    make_run,
    match_keys,
    payload_of,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import state_of, wait_until

OpenStore = Callable[..., DiskStore]

MIB = 2**20
LAYERS = (32768,) * 3
"""Six chunks of it fill more than half of a segment of 1 MiB: one run a segment."""


def fill(store: DiskStore, first: int, runs: int) -> list[tuple[bytes, ...]]:
    written = [make_keys(first + 6 * number, 6) for number in range(runs)]
    for keys in written:
        write_keys(store, keys, LAYERS)
    return written


def fill_while(store: DiskStore, condition: Callable[[], object], first: int = 1) -> int:
    """Write runs that nobody asks for, from the ``first`` on, while ``condition`` holds; number of the next."""
    for number in range(first, first + 1000):
        if not condition():
            return number
        fill(store, 1000 * number, 1)
    raise AssertionError("1,000 runs changed nothing")


def steep_config(base: Path) -> StoreConfig:
    """A token costs twice as much already behind 64 others."""
    return replace(small_config(base, size=9 * MIB, segment=MIB), cost_doubling_tokens=64)


@pytest.mark.parametrize("num_dirs", [1, 3])
def test_the_cap_is_never_exceeded(
    tmp_path: Path, open_store: OpenStore, counters: Counters, num_dirs: int
) -> None:
    config = small_config(tmp_path, num_dirs, size=10 * MIB, segment=MIB)
    store = open_store(config)
    rng = np.random.default_rng(1)
    highest = 0
    for turn in range(60):
        count = int(rng.integers(1, 12))
        write_keys(store, make_keys(100 * turn, count), tuple(int(n) for n in rng.integers(1, 30_000, 3)))
        measured = physical_bytes(config.dirs)
        Inside(store).write_down()
        stats = store.stats()
        assert abs(stats.used_bytes - measured) <= 2 * MIB, "only the keeper may have come in between"
        assert max(measured, Inside(store).reserved_bytes) <= stats.cap_bytes == 10 * MIB
        highest = max(highest, measured)
    assert counters["store.segments_evicted"] > 3
    assert highest > 4 * MIB, "the test should come close to what segments may fill"
    store.close()
    assert physical_bytes(config.dirs) <= 10 * MIB


@pytest.mark.usefixtures("no_keeper")
def test_the_least_recently_used_segment_goes_first(
    tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    store = open_store(small_config(tmp_path, size=8 * MIB, segment=MIB))
    a, b, c = fill(store, 0, 3)
    read_keys(store, c)
    store.touch(a)
    store.touch(b[:1])
    fill_while(store, lambda: counters["store.segments_evicted"] == 0, first=3)
    assert (match_keys(store, a), match_keys(store, b), match_keys(store, c)) == (6, 6, 0)
    assert counters["store.chunks_evicted"] == 6
    fill(store, 100_000, 1)
    assert (match_keys(store, a), match_keys(store, b)) == (6, 6), "what was never looked up goes first"


@pytest.mark.usefixtures("no_keeper")
def test_reading_a_prefix_piece_by_piece_leaves_its_tail_the_first_to_go(
    tmp_path: Path, open_store: OpenStore
) -> None:
    store = open_store(small_config(tmp_path, size=8 * MIB, segment=MIB))
    pieces = fill(store, 0, 3)
    store.touch([key for keys in pieces for key in keys])
    for keys in pieces:
        read_keys(store, keys)
    fill(store, 1000, 1)  # else the last one is still being filled
    assert store.evict_one()
    assert [match_keys(store, keys) for keys in pieces] == [6, 6, 0]


@pytest.mark.usefixtures("no_keeper")
def test_recency_survives_a_restart(tmp_path: Path, open_store: OpenStore, counters: Counters) -> None:
    config = small_config(tmp_path, size=8 * MIB, segment=MIB)
    store = open_store(config)
    a, b = fill(store, 0, 2)
    store.touch(a)
    store.close()
    store = open_store(config)
    fill_while(store, lambda: counters["store.segments_evicted"] == 0, first=2)
    assert (match_keys(store, a), match_keys(store, b)) == (6, 0)


def test_a_lease_protects_its_segments(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path, size=8 * MIB, segment=MIB))
    (held,) = fill(store, 0, 1)
    lease = store.lease(held)
    fill(store, 1000, 20)
    assert match_keys(store, held) == 6
    store.read_layers(lease, {0: aligned_empty(6 * LAYERS[0])})
    lease.close()
    lease.close()
    fill(store, 5000, 20)
    assert match_keys(store, held) == 0


def test_what_is_discarded_under_a_lease_goes_when_that_ends(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    (old,) = fill(store, 0, 1)
    store.close()
    store = open_store(config)
    (new,) = fill(store, 1000, 1)
    lease = store.lease(new)
    store.discard_new()
    assert (match_keys(store, old), match_keys(store, new)) == (6, 0)
    store.read_layers(lease, {0: aligned_empty(6 * LAYERS[0])})
    lease.close()
    wait_until(lambda: not Inside(store).leftovers)
    assert len([*config.dirs[0].glob("*.seg")]) == 1


@pytest.mark.usefixtures("no_keeper")
def test_evicting_an_old_run_leaves_the_newer_one_of_the_same_keys(
    tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    store = open_store(small_config(tmp_path, size=8 * MIB, segment=MIB))
    fill(store, 0, 1)
    (keys,) = fill(store, 0, 1)
    fill_while(store, lambda: counters["store.segments_evicted"] == 0)
    assert counters["store.chunks_evicted"] == 0
    read_keys(store, keys)


@pytest.mark.usefixtures("no_keeper")
def test_when_everything_is_leased_a_write_is_refused_and_works_later(
    tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    store = open_store(small_config(tmp_path, size=8 * MIB, segment=MIB))
    leases = []

    def fill_and_hold() -> None:
        for number in range(50):
            (keys,) = fill(store, 1000 * number, 1)
            leases.append(store.lease(keys))

    with pytest.raises(StoreFullError, match="--hcache-disk-size"):
        fill_and_hold()
    assert counters["store.writes_refused"] == 1
    assert counters["store.segments_evicted"] == 0
    for lease in leases:
        store.read_layers(lease, {2: aligned_empty(6 * LAYERS[2])})
        lease.close()
    fill(store, 90_000, 1)
    assert counters["store.segments_evicted"] == 1


@pytest.mark.usefixtures("no_keeper")
def test_the_free_floor_forbids_growth_and_a_write_evicts_nothing_in_vain(
    tmp_path: Path, open_store: OpenStore, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(small_config(tmp_path, 2, size=16 * MIB, segment=MIB, floor=100 * MIB))
    free = 200 * MIB
    monkeypatch.setattr(StoreDirectory, "free_bytes", lambda self: free)
    written = fill(store, 0, 3)
    free = 90 * MIB
    with pytest.raises(StoreFullError, match="--hcache-disk-free-floor"):
        fill(store, 1000, 1)
    assert counters["store.segments_evicted"] == 0
    assert all(match_keys(store, keys) == 6 for keys in written)


@pytest.mark.usefixtures("no_keeper")
def test_below_the_floor_everything_goes_that_can_even_if_it_is_not_enough(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(tmp_path, size=16 * MIB, segment=MIB, floor=100 * MIB)
    store = open_store(config)
    others = 0
    monkeypatch.setattr(
        StoreDirectory, "free_bytes", lambda self: 120 * MIB - others - physical_bytes(config.dirs)
    )
    written = fill(store, 0, 8)
    others = 15 * MIB
    Inside(store).space.tend()
    there = [keys for keys in written if match_keys(store, keys)]
    assert 3 <= len(there) <= 6, "no more goes than is needed"
    assert "less than 104.9 MB (--hcache-disk-free-floor) is free" in caplog.text
    assert str(config.dirs[0]) in caplog.text
    lease = store.lease(there[0])
    others = 60 * MIB
    Inside(store).space.tend()
    left = [keys for keys in written if match_keys(store, keys)]
    assert left == [there[0], there[-1]], "what is read, and the segment that is being filled"
    lease.close()
    Inside(store).space.tend()
    assert match_keys(store, there[0]) == 0
    with pytest.raises(StoreFullError, match="--hcache-disk-free-floor"):
        fill(store, 1000, 1)
    others = 0
    (keys,) = fill(store, 2000, 1)
    read_keys(store, keys)


@pytest.mark.usefixtures("no_keeper")
def test_only_what_lies_on_a_disk_below_the_floor_goes(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2, size=24 * MIB, segment=MIB, floor=100 * MIB)
    plenty, little = 200 * MIB, 90 * MIB
    free = [plenty, plenty]
    monkeypatch.setattr(StoreDirectory, "device", lambda self: config.dirs.index(self.path))
    monkeypatch.setattr(StoreDirectory, "free_bytes", lambda self: free[config.dirs.index(self.path)])
    store = open_store(config)
    on_both = fill(store, 0, 3)
    free[1] = 0
    on_first = fill(store, 1000, 3)
    free[:] = 0, plenty
    on_second = fill(store, 2000, 3)
    free[:] = little, plenty
    Inside(store).space.tend()
    assert [match_keys(store, keys) for keys in (*on_both, *on_first, *on_second)] == [0] * 6 + [6] * 3


class Disks:
    """Two disks below the directories of a store, each with so much room for segments above the floor."""

    def __init__(self, config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = [2**40, 2**40]
        self._dirs = config.dirs
        self._floor = config.free_floor_bytes
        monkeypatch.setattr(StoreDirectory, "device", lambda directory: self._dirs.index(directory.path))
        monkeypatch.setattr(StoreDirectory, "free_bytes", lambda directory: self._free_bytes(directory.path))

    def _free_bytes(self, path: Path) -> int:
        return self._floor + self.room[self._dirs.index(path)] - self.segment_bytes(path)

    def segment_bytes(self, path: Path) -> int:
        return sum(file.stat().st_blocks * 512 for file in path.glob("segment-*.seg"))


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("keeper", [False, True])
@pytest.mark.parametrize("segment", [MIB, MIB // 8])  # with room for a run in each directory, or not
@pytest.mark.parametrize("room_of_second", [0, 0.5, 1, 2, 3, 5])
def test_a_disk_with_little_room_does_not_make_the_tier_as_small(
    tmp_path: Path,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    room_of_second: float,
    segment: int,
    keeper: bool,
) -> None:
    config = small_config(tmp_path, 2, size=24 * MIB, segment=segment, floor=100 * MIB)
    disks = Disks(config, monkeypatch)
    disks.room[1] = int(room_of_second * 600 * 2**10)
    store = open_store(config)
    written = []
    for number in range(60):
        written += fill(store, 1000 * number, 1)
        if keeper:
            Inside(store).space.tend()
        assert disks.segment_bytes(config.dirs[1]) <= disks.room[1]
    kept = [keys for keys in written if match_keys(store, keys) == 6]
    assert kept == written[-len(kept) :], "the oldest go first"
    assert 6 * sum(LAYERS) * len(kept) > config.segments_budget_bytes // 2
    for keys in kept:
        read_keys(store, keys)


@pytest.mark.usefixtures("no_keeper")
def test_a_run_that_the_cap_never_holds_costs_no_other(
    tmp_path: Path, open_store: OpenStore, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2, size=8 * MIB, segment=MIB, floor=100 * MIB)
    disks = Disks(config, monkeypatch)
    store = open_store(config)
    written = fill(store, 0, 4)
    disks.room = [disks.segment_bytes(path) + MIB for path in config.dirs]
    with pytest.raises(StoreFullError, match="--hcache-disk-size"):
        write_keys(store, make_keys(5000, 30), (2**18, 2**18))
    assert [match_keys(store, keys) for keys in written] == [6] * 4
    assert counters["store.segments_evicted"] == 0
    assert [item.reason for item in store.stats().directories] == ["", ""]


def test_near_the_floor_old_segments_make_room(
    tmp_path: Path, open_store: OpenStore, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2, size=16 * MIB, segment=MIB, floor=100 * MIB)
    store = open_store(config)
    before = physical_bytes(config.dirs)
    monkeypatch.setattr(
        StoreDirectory, "free_bytes", lambda self: 103 * MIB - (physical_bytes(config.dirs) - before)
    )
    for number in range(10):
        fill(store, 1000 * number, 1)
        assert physical_bytes(config.dirs) - before <= 3 * MIB
    assert counters["store.segments_evicted"] > 5
    assert match_keys(store, make_keys(9000, 6)) == 6


def test_a_segment_that_cannot_be_deleted_is_skipped_counted_and_tried_again(
    tmp_path: Path, open_store: OpenStore, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, size=8 * MIB, segment=MIB)
    store = open_store(config)
    (stuck,) = fill(store, 0, 1)
    victim = config.dirs[0] / "segment-00000000.seg"
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == victim:
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    for number in range(1, 20):
        fill(store, 1000 * number, 1)
        assert physical_bytes(config.dirs) <= Inside(store).reserved_bytes <= 8 * MIB
        segments = config.dirs[0].glob("segment-*")
        assert sum(path.stat().st_blocks * 512 for path in segments) <= config.segments_budget_bytes
    assert counters["store.unlink_failures"] >= 1
    assert counters["store.segments_evicted"] > 5
    assert victim.exists()
    assert match_keys(store, stuck) == 0
    monkeypatch.undo()
    wait_until(lambda: not victim.exists())


@pytest.mark.usefixtures("no_keeper")
def test_a_directory_that_is_out_is_not_asked_to_delete_and_no_such_failure_is_counted(
    tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    config = small_config(tmp_path, 2, segment=MIB)
    store = open_store(config)
    fill(store, 0, 5)
    volume = Inside(store).volumes[1]
    volume.health.take_out("the test says so")
    store.clear()
    Inside(store).space.tend()
    assert counters["store.unlink_failures"] == 0
    assert [len(list(path.glob("*.seg"))) for path in config.dirs] == [0, 5]
    volume.health.recover(volume.health.condition)
    Inside(store).space.tend()
    assert not list(config.dirs[1].glob("*.seg"))


@pytest.mark.usefixtures("no_keeper")
def test_what_lies_in_a_directory_that_is_out_is_not_evicted_for_room(
    tmp_path: Path, open_store: OpenStore
) -> None:
    store = open_store(small_config(tmp_path, 3, size=24 * MIB, segment=3 * MIB))
    _, first, second = (volume.health for volume in Inside(store).volumes)
    first.failed(OSError(errno.EROFS, "Read-only file system"), writing=True)
    kept = fill(store, 0, 4)
    first.recover(first.condition)
    second.take_out("the test says so")
    for number in range(1, 20):
        fill(store, 1000 * number, 1)
    second.recover(second.condition)
    assert [match_keys(store, keys) for keys in kept] == [6] * 4


def test_a_smaller_cap_is_obeyed_at_the_next_start(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path, size=16 * MIB, segment=MIB))
    written = fill(store, 0, 12)
    store.close()
    small = small_config(tmp_path, size=8 * MIB, segment=MIB)
    store = open_store(small)
    assert physical_bytes(small.dirs) <= 8 * MIB
    assert match_keys(store, written[-1]) == 6
    assert match_keys(store, written[0]) == 0
    read_keys(store, written[-1])


def test_the_tail_of_a_sealed_segment_is_given_back(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path, size=16 * MIB, segment=4 * MIB)
    store = open_store(config)
    write_keys(store, (make_key(1),), (4096,))
    assert (config.dirs[0] / "segment-00000000.seg").stat().st_size == 4 * MIB
    store.close()
    assert (config.dirs[0] / "segment-00000000.seg").stat().st_size == 8192


def test_a_directory_that_does_not_cut_keeps_no_other_from_it(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 3, segment=3 * MIB)
    store = open_store(config)
    write_keys(store, (make_key(1),), (4096,) * 3)
    paths = [folder / "segment-00000000.seg" for folder in config.dirs]
    real = StoreDirectory.trim_segment

    def refuse(self: StoreDirectory, segment: int, size: int) -> None:
        if self.path == config.dirs[0]:
            raise OSError(errno.EROFS, "Read-only file system")
        real(self, segment, size)

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "trim_segment", refuse)
        patch.setattr(StoreDirectory, "probe", lambda self: refuse(self, 9, 0))
        write_keys(store, make_keys(10, 64), (8192,) * 3)
        write_keys(store, make_keys(100, 64), (8192,) * 3)
        assert [path.stat().st_size for path in paths] == [MIB, *[8192 + 4096 + 64 * 8192] * 2]
    store.close()
    open_store(config)
    assert len({path.stat().st_size for path in paths}) == 1


@pytest.mark.usefixtures("no_keeper")
def test_room_of_a_failed_run_is_used_again_unless_it_may_be_written_or_lies_before_another(
    tmp_path: Path, open_store: OpenStore
) -> None:
    store = open_store(small_config(tmp_path, segment=MIB))
    write_keys(store, make_keys(0, 2), (4096, 8192))
    space = Inside(store).space

    def reserve() -> StoredRun:
        return space.reserve(make_run(make_keys(10, 2), (4096, 8192)))

    first = reserve()
    space.abandon(first, ValueError())
    second, third = reserve(), reserve()
    assert second.place.offsets == first.place.offsets
    assert third.place.offsets == second.place.ends
    space.abandon(second, ValueError())
    fourth = reserve()
    assert fourth.place.offsets == third.place.ends
    space.abandon(fourth, KeyboardInterrupt())
    fifth = reserve()
    assert fifth.place.offsets == fourth.place.ends
    space.abandon(fifth, StoreIOError("its files are sick"))
    assert reserve().place.segment > fifth.place.segment
    read_keys(store, make_keys(0, 2))


@pytest.mark.parametrize("error", [StoreIOError("its files are sick"), ValueError()])
def test_a_write_that_fails_does_not_cost_the_other_one_in_a_new_segment(
    tmp_path: Path, open_store: OpenStore, error: Exception
) -> None:
    config = small_config(tmp_path, 2, segment=MIB)
    store = open_store(config)
    other, layers = make_run(make_keys(0, 2), (4096, 8192)), (4096, 8192)

    def payload(layer: int) -> list[ByteArray]:
        """Meanwhile another write begins and fails."""
        if layer == 0:
            with pytest.raises(type(error)):
                store.write_run(make_run(make_keys(10, 2), layers), fail)
        return payload_of(other)(layer)

    def fail(layer: int) -> list[ByteArray]:
        raise error

    store.write_run(other, payload)
    read_keys(store, other.keys)
    with pytest.raises(type(error)):
        store.write_run(make_run(make_keys(20, 2), layers), fail)
    store.clear()
    with pytest.raises(type(error)):  # alone in its segment
        store.write_run(make_run(make_keys(20, 2), layers), fail)
    wait_until(lambda: not any(list(path.glob("*.seg")) for path in config.dirs))


@pytest.mark.usefixtures("no_keeper")
def test_a_run_that_is_written_while_all_is_cleared_is_gone(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path)
    store, run = open_store(config), make_run(make_keys(0, 2), (4096,))

    def payload(layer: int) -> list[ByteArray]:
        store.clear()
        return payload_of(run)(layer)

    store.write_run(run, payload)
    Inside(store).write_down()
    assert match_keys(store, run.keys) == 0
    assert not state_of(config.dirs[0]).segments
    store.close()
    assert match_keys(open_store(config), run.keys) == 0


@pytest.mark.usefixtures("no_keeper")
def test_the_state_does_not_grow_without_bound(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path, size=64 * MIB)
    store = open_store(config, without_sync())
    payload = [aligned_empty(1) for _ in range(64)]
    for turn in range(100):
        store.write_run(make_run(make_keys(64 * turn, 64), (1,)), lambda _: payload)
        run = Inside(store).run_of(make_keys(64 * turn, 1)[0])
        Inside(store).catalog.quarantine(run, dict.fromkeys(range(64), 200 * "x"))
    for number in range(5000):
        store.namespaces.put(str(number), {"model": 200 * "x"})
    store.close()
    assert 100_000 < (config.dirs[0] / "state.json").stat().st_size < 2 * MIB / 3
    (newest,) = [*state_of(config.dirs[0]).quarantined][:1]
    assert newest == Inside(store).runs()[-1].place.run_id


@pytest.mark.usefixtures("no_keeper")
def test_a_large_state_is_written_less_often(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    keys = make_keys(0, 4)
    write_keys(store, keys, LAYERS)
    for number in range(1000):
        store.namespaces.put(str(number), {"model": 500 * "x"})
    Inside(store).write_down()
    serial = state_of(config.dirs[0]).serial
    for _ in range(10):
        store.touch(keys)
        Inside(store).write_down()
    assert state_of(config.dirs[0]).serial == serial
    store.close()
    assert state_of(config.dirs[0]).segments == Inside(store).catalog.segment_states()


@pytest.mark.usefixtures("no_keeper")
def test_a_state_is_written_only_if_something_changed(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, make_keys(0, 4), LAYERS)
    Inside(store).write_down()
    with store.lease(make_keys(0, 4)):
        for _ in range(3):
            Inside(store).saved._next_at = 0.0
            Inside(store).write_down()
    assert state_of(config.dirs[0]).serial == 1


def test_clear_drops_everything_but_what_is_leased(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path, 2, segment=MIB)
    store = open_store(config)
    written = fill(store, 0, 3)
    lease = store.lease(written[0])
    store.clear()
    assert all(match_keys(store, keys) == 0 for keys in written)
    assert store.stats().chunks == store.stats().runs == store.stats().segments == 0
    for layer, size in enumerate(LAYERS):
        store.read_layers(lease, {layer: aligned_empty(6 * size)})
    assert len(list(config.dirs[0].glob("segment-*"))) == 1
    lease.close()
    wait_until(lambda: not list(config.dirs[0].glob("segment-*")))
    (again,) = fill(store, 0, 1)
    read_keys(store, again)
    store.close()
    store = open_store(config)
    assert store.stats().chunks == 6
    read_keys(store, again)


def test_a_cap_too_small_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--hcache-disk-size: 5\.2 MB is too small"):
        small_config(tmp_path, size=5 * MIB, segment=MIB)


def test_a_run_larger_than_the_store_is_refused_without_evicting(
    tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    store = open_store(small_config(tmp_path, size=8 * MIB, segment=MIB))
    (kept,) = fill(store, 0, 1)
    with pytest.raises(StoreFullError):
        write_keys(store, make_keys(50, 10), (MIB,))
    assert counters["store.segments_evicted"] == 0
    read_keys(store, kept)


def test_a_segment_that_cannot_be_created_leaves_nothing(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    real = StoreDirectory.create_segment

    def refuse(self: StoreDirectory, segment: int, size: int) -> None:
        if self.path == config.dirs[1]:
            raise OSError(30, "Read-only file system")
        real(self, segment, size)

    monkeypatch.setattr(StoreDirectory, "create_segment", refuse)
    with pytest.raises(StoreIOError, match="Read-only"):
        write_keys(store, make_keys(0, 1), (4096,))
    assert not list(config.dirs[0].glob("segment-*"))
    write_keys(store, make_keys(0, 1), (4096,))
    read_keys(store, make_keys(0, 1))
    assert list(config.dirs[0].glob("segment-*")), "the other directory goes on alone"
    monkeypatch.undo()


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_a_limit_that_the_file_system_does_not_show_is_kept_by_evicting(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, counters: Counters, number: int
) -> None:
    """A quota, or a file system without inodes: four files, though there is room for more."""
    store = open_store(small_config(tmp_path, segment=MIB))
    real = StoreDirectory.create_segment

    def limited(self: StoreDirectory, segment: int, size: int) -> None:
        if len(self.segment_sizes()) >= 4:
            raise OSError(number, "limit")
        real(self, segment, size)

    monkeypatch.setattr(StoreDirectory, "create_segment", limited)
    (first, *others) = fill(store, 0, 4)
    for turn in range(1, 4):
        with pytest.raises(StoreFullError):
            fill(store, 1000 * turn, 1)
        assert counters["store.segments_evicted"] == turn
        wait_until(lambda: store.stats().directories[0].condition == "healthy")
        (new,) = fill(store, 1000 * turn, 1)
        read_keys(store, new)
    assert match_keys(store, first) == match_keys(store, others[1]) == 0
    read_keys(store, others[2])


def test_a_device_that_is_full_when_written_to_gets_room_by_evicting(
    tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    engine = FaultEngine(PosixEngine(1, 1), lambda op, number: None)
    store = open_store(small_config(tmp_path, segment=MIB), engine)
    fill(store, 0, 3)
    engine.decide = always(IOKind.WRITE, errno.EDQUOT)
    with pytest.raises(StoreFullError):
        fill(store, 1000, 1)
    assert counters["store.segments_evicted"] == 1


def test_a_file_system_without_preallocation(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_hcache.store.volumes.directory.preallocate", os.ftruncate)
    config = small_config(tmp_path, size=8 * MIB, segment=MIB)
    store = open_store(config)
    for number in range(12):
        fill(store, 1000 * number, 1)
        assert physical_bytes(config.dirs) <= Inside(store).reserved_bytes <= 8 * MIB
    read_keys(store, make_keys(11_000, 6))


@pytest.mark.usefixtures("no_keeper")
def test_of_equally_recent_prefixes_the_one_that_is_cheap_to_recompute_goes_first(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """The long prefix was used before the short one, yet it stays; and its head stays as long as its tail."""
    store = open_store(steep_config(tmp_path))
    head, tail, short = make_keys(0, 6), make_keys(6, 6), make_keys(50, 6)
    for keys, first_chunk in ((head, 0), (tail, 6), (short, 0)):
        write_keys(store, keys, LAYERS, first_chunk)
    store.touch((*head, *tail))
    store.touch(short)
    number = fill_while(store, lambda: match_keys(store, short))
    assert match_keys(store, (*head, *tail)) == 12
    number = fill_while(store, lambda: match_keys(store, (*head, *tail)) == 12, number)
    assert match_keys(store, head) == 6, "of a prefix the tail goes first"
    assert number < 40, "what is not used any more ages, however dear it was"


@pytest.mark.usefixtures("no_keeper")
def test_of_a_prefix_that_was_never_looked_up_the_tail_goes_first(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """As the tier writes it, tail first."""
    store = open_store(steep_config(tmp_path))
    head, tail = make_keys(0, 6), make_keys(6, 6)
    for keys, first_chunk in ((tail, 6), (head, 0)):
        write_keys(store, keys, LAYERS, first_chunk)
    fill_while(store, lambda: match_keys(store, (*head, *tail)) == 12)
    assert match_keys(store, head) == 6


@pytest.mark.usefixtures("no_keeper")
def test_what_was_dear_ages(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(steep_config(tmp_path))
    keys = make_keys(10, 6)
    write_keys(store, keys, LAYERS, first_chunk=10)
    store.touch(make_keys(0, 16))
    for number in range(1, 100):
        fill(store, 1000 * number, 1)
        if not store.contains(keys[0]):
            return
    raise AssertionError("a segment that nobody uses must not stay for ever")


def test_room_for_the_next_segment_is_made_before_it_is_needed(
    tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    config = small_config(tmp_path, size=8 * MIB, segment=MIB)
    store = open_store(config)
    for number in range(30):
        fill(store, 1000 * number, 1)
        wait_until(lambda: Inside(store).reserved_bytes + config.file_bytes + 2**14 <= 8 * MIB)
    assert counters["store.segments_evicted"] > 10


@pytest.mark.usefixtures("no_keeper")
def test_with_room_left_a_round_does_not_ask_segments_what_they_would_free(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a second, of thousands in a large store, beside a scheduler that wants the interpreter."""
    store = open_store(small_config(tmp_path, size=64 * MIB, segment=MIB))
    fill(store, 0, 8)
    looks: list[int] = []
    ask = Segment.freeable_bytes.fget  # type: ignore[attr-defined]
    asked = property(lambda segment: looks.append(segment.number) or ask(segment))
    monkeypatch.setattr(Segment, "freeable_bytes", asked)
    Inside(store).keeper.round()
    assert not looks


@pytest.mark.usefixtures("no_keeper")
def test_a_touch_counts_as_a_use(tmp_path: Path, open_store: OpenStore, counters: Counters) -> None:
    store = open_store(small_config(tmp_path, size=8 * MIB, segment=MIB))
    a, b = fill(store, 0, 2)
    store.touch((*a, *make_keys(7000, 3)))
    fill_while(store, lambda: counters["store.segments_evicted"] == 0, first=2)
    assert (match_keys(store, a), match_keys(store, b)) == (6, 0)


@pytest.mark.usefixtures("no_keeper")
def test_when_no_file_can_be_deleted_writes_are_refused_and_most_chunks_stay(
    tmp_path: Path, open_store: OpenStore, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, size=16 * MIB, segment=MIB)
    store = open_store(config)
    written = fill(store, 0, 18)

    def refuse(self: StoreDirectory, segment: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(StoreDirectory, "unlink_segment", refuse)
    refused = 0
    for number in range(6):
        try:
            written += fill(store, 1000 + 6 * number, 1)
        except StoreFullError:
            refused += 1
    assert refused
    assert physical_bytes(config.dirs) <= 16 * MIB
    readable = [keys for keys in written if match_keys(store, keys) == 6]
    assert 3 <= len(readable) < len(written)
    for keys in readable:
        read_keys(store, keys)
