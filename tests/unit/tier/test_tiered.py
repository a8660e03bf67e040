"""Host and disk tier together, with real files."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.errors import StoreError, StoreFullError, StoreIOError, TierMissError
from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, Run, StoreConfig, StoreStats
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.stored_chunks import match_keys
from sglang_hcache.tier import demoter
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import DISK, HOST, Pieces, TieredStore

LAYOUT = StateLayout((Method.HIDDEN,) * 3, (64,) * 3)


def key(name: int) -> bytes:
    return name.to_bytes(32, "little")


def open_tiers(
    folder: Path,
    slots: int = 8,
    policy: WritePolicy = WritePolicy.WRITE_BACK,
    write_budget: int | None = None,
    max_age_s: float | None = None,
    layout: StateLayout = LAYOUT,
    segment_bytes: int = 4 * 2**20,
) -> TieredStore:
    counters = Counters()
    config = StoreConfig(
        dirs=(folder,),
        size_bytes=64 * 2**20,
        free_floor_bytes=0,
        segment_bytes=segment_bytes,
        io_engine="posix",
        write_budget_bytes=write_budget,
        max_age_s=max_age_s,
    )
    store = DiskStore.open(config, counters)
    host = HostTier(np.zeros(slots * layout.chunk_bytes, np.uint8), layout, counters, keep_dirty=True)
    return TieredStore(host, store, counters, write_policy=policy, run_chunks=4)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[TieredStore]:
    opened = open_tiers(tmp_path / "store")
    yield opened
    opened.close()


def put(tiers: TieredStore, name: int, *, wait: bool = False) -> None:
    slot = tiers.reserve() if wait else tiers.host.reserve()
    assert slot is not None
    for layer in range(tiers.layout.num_layers):
        tiers.host.layer_of(slot, layer)[:] = (name * 10 + layer) % 256
    tiers.seal(slot, ChunkInfo(key(name), key(name - 1), name - 1, bytes(16)))


def read(tiers: TieredStore, names: list[int]) -> tuple[str, ...]:
    """Check the bytes of ``names``; returns where they came from."""
    with tiers.lease([key(name) for name in names]) as lease:
        for layer in range(LAYOUT.num_layers):
            size = LAYOUT.chunk_layer_bytes[layer]
            out = np.zeros(len(names) * size, np.uint8)
            tiers.read_layers(lease, {layer: out})
            for index, name in enumerate(names):
                assert (out[index * size : (index + 1) * size] == (name * 10 + layer) % 256).all()
        return lease.sources


def test_demoted_chunks_are_read_from_disk_once_the_host_forgot_them(tiers: TieredStore) -> None:
    for name in range(1, 7):
        put(tiers, name)
    tiers.demote(lambda: [key(name) for name in range(1, 5)])
    wait_until_saved(tiers)
    assert tiers.host.counts() == (2, 4, 2)
    assert read(tiers, list(range(1, 7))) == (HOST,) * 6
    for name in range(7, 11):
        put(tiers, name)
    # The head of what was written stays longest.
    assert [key(name) in tiers.host for name in range(1, 7)] == [True, True, False, False, True, True]
    assert read(tiers, [1, 2, 3, 4, 5]) == (HOST, HOST, DISK, DISK, HOST)
    assert tiers.match([key(name) for name in (1, 2, 3, 99, 4)]) == 3


def test_of_a_prefix_that_was_demoted_the_head_is_kept_longest(tmp_path: Path) -> None:
    """On disk and, among what is in host memory only, there: without its head a tail is never found."""
    count = 100
    layout = StateLayout((Method.HIDDEN,) * 3, (256,) * 3)
    tiers = open_tiers(tmp_path / "store", slots=2 * count, layout=layout, segment_bytes=2**20)
    keys = [key(name) for name in range(1, count + 1)]
    for name in range(1, count + 1):
        put(tiers, name)
    tiers.demote(lambda: keys)
    wait_until_saved(tiers)
    assert not tiers.host.counts().dirty
    assert tiers.disk is not None
    evicted = 0
    while tiers.disk.evict_one():
        on_disk = [tiers.disk.contains(key) for key in keys]
        assert on_disk == sorted(on_disk, reverse=True), "what is left is found"
        evicted += 1
    assert evicted > 3
    for gone in range(2 * count):
        slot = tiers.host.reserve()
        assert slot is not None
        tiers.host.seal(slot, ChunkInfo(key(1000 + gone), key(999 + gone), gone, bytes(16)), on_disk=True)
        in_memory = [key in tiers.host for key in keys]
        assert in_memory == sorted(in_memory, reverse=True)
    tiers.close()


@pytest.mark.parametrize(
    ("num_chunks", "budget_runs"), [(32, 6.0), (32, 8.6), (32, 9.0), (9, 1.3), (9, 0.8), (10, 2.2)]
)
def test_a_write_budget_is_not_spent_on_a_tail_without_its_head(
    tmp_path: Path, num_chunks: int, budget_runs: float
) -> None:
    """Also where the last run, which is shorter than the others, would fit."""
    keys = [key(name) for name in range(1, num_chunks + 1)]
    few = open_tiers(tmp_path / "few")
    for name in range(1, 5):
        put(few, name)
    few.demote(lambda: keys)
    wait_until_saved(few)
    assert few.disk is not None
    of_four = few.disk.stats().written_today_bytes
    few.close()
    tiers = open_tiers(tmp_path / "store", slots=40, write_budget=int(budget_runs * of_four))
    for name in range(1, num_chunks + 1):
        put(tiers, name)
    tiers.demote(lambda: keys)
    wait_until_saved(tiers)
    assert tiers.disk is not None
    on_disk = [tiers.disk.contains(key) for key in keys]
    assert 0.5 * budget_runs * 4 <= sum(on_disk) < num_chunks
    assert on_disk == sorted(on_disk, reverse=True)
    tiers.close()


def test_of_all_that_has_to_be_written_at_once_the_head_comes_first(tmp_path: Path) -> None:
    """A stop has little time."""
    tiers = open_tiers(tmp_path / "store", slots=40)
    written: list[int] = []
    assert tiers.disk is not None
    write_run = tiers.disk.write_run

    def recorded(run: Run, *rest: Any) -> Any:
        written.append(int.from_bytes(run.keys[0], "little"))
        return write_run(run, *rest)

    for name in (*range(1, 13), *range(101, 113)):
        put(tiers, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers.disk, "write_run", recorded)
        tiers.write_from_now_on()
        tiers.flush(10.0)
    assert written == [101, 105, 109, 1, 5, 9]
    tiers.close()


def test_write_through_writes_what_is_sealed(tmp_path: Path) -> None:
    tiers = open_tiers(tmp_path / "store", policy=WritePolicy.WRITE_THROUGH)
    for name in range(1, 5):
        put(tiers, name)
    wait_until_saved(tiers)
    assert tiers.host.counts() == (4, 4, 0)
    tiers.close()
    reopened = open_tiers(tmp_path / "store")
    assert read(reopened, [1, 2, 3, 4]) == (DISK,) * 4
    reopened.close()


def test_what_finds_no_memory_to_be_written_with_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demoter, "_REST_S", 0.2)
    tiers = open_tiers(tmp_path / "store", policy=WritePolicy.WRITE_THROUGH)
    refused = []

    def refuse(*arguments: object) -> None:
        refused.append(arguments)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("sglang_hcache.store.io.memory.mmap.mmap", refuse)
        put(tiers, 1)
        wait_for(lambda: refused and tiers._demoter._resting_until)  # type: ignore[union-attr]
    wait_for(lambda: key(1) in tiers.host and not tiers.host.counts().dirty)
    assert tiers.disk is not None
    assert tiers.disk.contains(key(1))
    tiers.close()


def test_write_through_writes_what_could_not_be_written_when_the_disk_is_well_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demoter, "_REST_S", 0.2)
    tiers = open_tiers(tmp_path / "store", policy=WritePolicy.WRITE_THROUGH)
    assert tiers.disk is not None
    with monkeypatch.context() as patch:
        patch.setattr(tiers.disk, "write_run", failing())
        put(tiers, 1)
        wait_for(lambda: tiers._observer["demote.runs_failed"])  # type: ignore[index]
        put(tiers, 2)
    assert not tiers.disk.contains(key(1))
    wait_for(lambda: tiers.disk.contains(key(1)) and tiers.disk.contains(key(2)))  # type: ignore[union-attr]
    wait_until_saved(tiers)
    assert tiers.host.counts() == (6, 2, 0)
    tiers.close()


def test_a_flush_tries_again_what_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demoter, "_REST_S", 0.2)
    tiers = open_tiers(tmp_path / "store")
    assert tiers.disk is not None
    put(tiers, 1)
    with monkeypatch.context() as patch:
        patch.setattr(tiers.disk, "write_run", failing())
        assert not tiers.flush(0.5)
        threading.Timer(0.3, patch.undo).start()
        assert tiers.flush(60)
    assert tiers.disk.contains(key(1))
    tiers.close()


def test_write_through_rests_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demoter, "_REST_S", 600.0)
    tiers = open_tiers(tmp_path / "store", policy=WritePolicy.WRITE_THROUGH)
    monkeypatch.setattr(tiers.disk, "write_run", failing())
    put(tiers, 1)
    wait_for(lambda: tiers._observer["demote.runs_failed"])  # type: ignore[index]
    wait_until_saved(tiers)
    assert tiers._observer["demote.runs_failed"] == 1  # type: ignore[index]
    takes_writes = tiers._demoter.takes_writes  # type: ignore[union-attr]
    assert not takes_writes, "what is used again is not made dirty for it, either"
    tiers.close()


def test_the_demoter_outlives_any_error(tiers: TieredStore) -> None:
    def broken() -> list[bytes]:
        raise ValueError("nobody foresaw this")

    tiers.demote(broken)
    wait_for(lambda: tiers._observer["demote.errors"])  # type: ignore[index]
    put(tiers, 1)
    assert tiers.flush(60)
    assert tiers.disk is not None
    assert tiers.disk.contains(key(1))


def test_what_an_error_that_nobody_foresaw_kept_from_the_disk_is_counted(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers.disk, "write_run", failing(ValueError("nobody foresaw this")))
    put(tiers, 1)
    put(tiers, 2)
    tiers.demote_all()
    wait_for(lambda: tiers._observer["demote.errors"])  # type: ignore[index]
    assert tiers.host.counts() == (6, 2, 0)
    assert tiers._observer["demote.chunks_dropped_error"] == 2  # type: ignore[index]


def test_what_a_request_begins_with_is_used_on_disk_too(tiers: TieredStore) -> None:
    put(tiers, 1)
    assert tiers.flush(60)
    assert tiers.disk is not None
    (segment,) = tiers.disk._catalog.segments()
    before = segment.score
    tiers.touch([key(1)])
    assert segment.score > before
    assert tiers.host.counts().dirty == 0, "it need not be written again"


def test_a_full_host_tier_spills_to_disk_by_itself(tmp_path: Path) -> None:
    tiers = open_tiers(tmp_path / "store", slots=16)
    for name in range(1, 101):
        wait_for(lambda: tiers.host.counts()[0] + tiers.host.counts()[1] > 0)
        put(tiers, name)
    wait_until_saved(tiers)
    assert tiers.flush(60)
    for first in range(1, 101, 10):
        read(tiers, list(range(first, first + 10)))
    tiers.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a slot does so however long the disk takes: others may use it."""
    monkeypatch.setattr(demoter, "_WAIT_FOR_SLOT_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_burst_of_chunks_waits_for_the_demoter_instead_of_being_lost(tmp_path: Path) -> None:
    tiers = open_tiers(tmp_path / "store", slots=4)
    for name in range(1, 41):
        put(tiers, name, wait=True)
    assert tiers.flush(60)
    read(tiers, list(range(1, 41)))
    tiers.close()


@pytest.mark.usefixtures("patient")
def test_slots_that_restores_hold_are_no_spare_ones(tmp_path: Path) -> None:
    """Else chunks were dropped as long as a restore runs, although others could be written to make room."""
    tiers = open_tiers(tmp_path / "store", slots=16)
    for name in range(1, 17):
        put(tiers, name)
    wait_until_saved(tiers)
    assert tiers.host.counts() == (0, 4, 12), "a run more than needed"
    clean = [key(name) for name in range(1, 17) if tiers.host.dirty_info(key(name)) is None]
    with tiers.lease(clean):
        wait_until_saved(tiers)
        assert tiers.host.counts(pinned=False) == (0, 4, 8)
        for name in range(17, 25):
            put(tiers, name, wait=True)
        assert all(key in tiers.host for key in clean)
    with tiers.lease([key(name) for name in range(1, 25)]):
        wait_until_saved(tiers)  # whatever is written, no slot can be used again
        assert tiers.host.reserve() is None
        assert tiers.host.counts().dirty, "what is only written because it can be"
    tiers.close()


def test_a_disk_that_hangs_does_not_hold_up_every_chunk(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiers.disk is not None
    go = threading.Event()
    tiers.disk.write_run = lambda *_: go.wait(60)  # type: ignore[method-assign, assignment]
    for name in range(1, 9):
        put(tiers, name)
    monkeypatch.setattr(demoter, "_WAIT_FOR_SLOT_S", 0.1)
    assert tiers.reserve() is None
    monkeypatch.setattr(demoter, "_WAIT_FOR_SLOT_S", 120.0)
    assert tiers.reserve() is None, "the first told: this one does not wait"
    go.set()


def test_who_waits_for_a_slot_that_nobody_can_make_free_sleeps(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(8):
        assert tiers.reserve() is not None  # open: neither to be written nor evicted
    looked, reserve = [], tiers.host.reserve
    monkeypatch.setattr(tiers.host, "reserve", lambda *behind: looked.append(behind) or reserve(*behind))
    assert tiers.reserve() is None
    assert len(looked) < 10


def test_a_chunk_is_not_written_twice(tiers: TieredStore) -> None:
    for _ in range(3):
        for name in range(1, 5):
            put(tiers, name)
        tiers.demote_all()
        wait_until_saved(tiers)
    assert tiers.disk is not None
    assert tiers.disk.stats().chunks == 4
    assert tiers._observer["demote.chunks_written"] == 4  # type: ignore[index]


def test_when_the_write_budget_runs_short_only_what_was_used_again_is_written(tmp_path: Path) -> None:
    extent = 4096 + LAYOUT.chunk_layer_bytes[0]  # of one chunk; a run of two has one header for both
    run_of_two = 3 * (extent + LAYOUT.chunk_layer_bytes[0])
    tiers = open_tiers(tmp_path / "store", write_budget=2 * run_of_two + run_of_two // 2)
    assert tiers.disk is not None
    for first in (1, 11, 21):
        put(tiers, first)
        put(tiers, first + 1)
    tiers.demote(lambda: [key(1), key(2)])
    wait_until_saved(tiers)
    tiers.touch([key(11), key(12), key(13)])
    tiers.demote(lambda: [key(11), key(12), key(21), key(22)])
    wait_until_saved(tiers)
    on_disk = [name for name in (1, 2, 11, 12, 21, 22) if tiers.disk.contains(key(name))]
    assert on_disk == [1, 2, 11, 12]
    assert tiers._observer["demote.chunks_dropped_budget"] == 2  # type: ignore[index]
    assert tiers.disk.stats().written_today_bytes == 2 * run_of_two
    assert tiers.host.counts()[2] == 0, "what is not written holds no slot for ever"
    tiers.close()


def test_what_the_write_budget_forbids_is_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is room for one chunk, but not for those of the next three that were used again."""
    tiers = open_tiers(tmp_path / "store", write_budget=40_000)
    assert tiers.disk is not None
    put(tiers, 1)
    tiers.demote_all()
    wait_until_saved(tiers)
    for name in (2, 3, 4):
        put(tiers, name)
    tiers.touch([key(1), key(2), key(3)])
    tiers.demote_all()
    wait_until_saved(tiers)
    assert [name for name in range(1, 5) if tiers.disk.contains(key(name))] == [1]
    assert tiers._observer["demote.chunks_dropped_budget"] == 3  # type: ignore[index]
    [line] = [record.message for record in caplog.records if "write budget" in record.message]
    assert line.startswith("hcache: 3 chunks are not written to disk (more may follow)")
    assert line.endswith("(--hcache-disk-write-budget)")
    tiers.close()


def test_of_one_prefix_the_part_that_was_used_again_is_written(tmp_path: Path) -> None:
    tiers = open_tiers(tmp_path / "store", write_budget=40_000)
    assert tiers.disk is not None
    for name in range(1, 5):
        put(tiers, name)
    tiers.touch([key(1), key(2)])
    tiers.demote_all()
    wait_until_saved(tiers)
    assert tiers.match([key(name) for name in range(1, 5)]) == 4
    assert match_keys(tiers.disk, [key(name) for name in range(1, 5)]) == 2
    tiers.close()


def test_what_the_write_budget_forbade_is_written_once_it_is_used_again(tmp_path: Path) -> None:
    tiers = open_tiers(tmp_path / "store", write_budget=90_000, policy=WritePolicy.WRITE_THROUGH)
    assert tiers.disk is not None
    for name in (1, 11, 21):
        put(tiers, name)
        wait_until_saved(tiers)
    assert [name for name in (1, 11, 21) if tiers.disk.contains(key(name))] == [1, 11]
    tiers.touch([key(21)])
    wait_until_saved(tiers)
    assert tiers.disk.contains(key(21))
    tiers.close()


@pytest.mark.parametrize("max_age_s", [None, 3600.0])
def test_what_the_disk_lost_is_written_again_when_it_is_used(tmp_path: Path, max_age_s: float | None) -> None:
    """Not with a maximum age: a chunk that was deleted for its age would be back with the next use."""
    tiers = open_tiers(tmp_path / "store", max_age_s=max_age_s)
    assert tiers.disk is not None
    put(tiers, 1)
    put(tiers, 2)
    tiers.demote_all()
    wait_until_saved(tiers)
    tiers.disk.discard_new()
    assert not tiers.disk.contains(key(1))
    tiers.demote_all()
    wait_until_saved(tiers)
    assert not tiers.disk.contains(key(1)), "nobody has asked for it"
    tiers.touch([key(1)])
    tiers.demote_all()
    wait_until_saved(tiers)
    assert tiers.disk.contains(key(1)) == (max_age_s is None)
    assert not tiers.disk.contains(key(2))
    tiers.close()


def test_a_chunk_that_is_saved_again_while_it_is_on_disk_does_not_outlive_its_age(tmp_path: Path) -> None:
    tiers = open_tiers(tmp_path / "store", slots=2, max_age_s=3600.0)
    assert tiers.disk is not None
    put(tiers, 1)
    tiers.demote_all()
    wait_until_saved(tiers)
    for name in (2, 3):  # it leaves host memory
        put(tiers, name)
        tiers.demote_all()
        wait_until_saved(tiers)
    put(tiers, 1)
    assert key(1) in tiers.host
    tiers.disk.discard_new()  # for its age
    tiers.touch([key(1)])
    tiers.demote_all()
    wait_until_saved(tiers)
    assert not tiers.disk.contains(key(1))
    tiers.close()


def test_a_chunk_for_which_there_is_no_budget_is_refused_once(tmp_path: Path) -> None:
    tiers = open_tiers(tmp_path / "store", write_budget=40_000)
    for name in (1, 11):
        put(tiers, name)
        tiers.touch([key(name)])
        tiers.demote_all()
        wait_until_saved(tiers)
    dropped = tiers._observer["demote.chunks_dropped_budget"]  # type: ignore[index]
    assert dropped == 1
    for _ in range(3):
        tiers.touch([key(11)])
        tiers.demote_all()
        wait_until_saved(tiers)
    assert tiers._observer["demote.chunks_dropped_budget"] == dropped  # type: ignore[index]
    tiers.close()


def held_up(tiers: TieredStore) -> threading.Event:
    """The demoter does nothing until this is set."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> list[bytes]:
        begun.set()
        go_on.wait(60)
        return []

    tiers.demote(wait)
    assert begun.wait(60)
    return go_on


def test_what_waits_for_a_slow_disk_is_bounded_in_tokens(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demoter, "_MOST_WAITING_TOKENS", 100)
    go_on = held_up(tiers)
    put(tiers, 1)
    for _ in range(3):
        tiers.demote(lambda: [key(1)], 40)
    assert tiers._observer["demote.requests_dropped"] == 1  # type: ignore[index]
    assert tiers._demoter is not None
    assert len(tiers._demoter._requests) == 2
    go_on.set()
    wait_until_saved(tiers)
    assert tiers.disk is not None
    assert tiers.disk.contains(key(1))
    tiers.demote(list, 90)
    assert tiers._observer["demote.requests_dropped"] == 1, "those before wait no more"  # type: ignore[index]


def test_what_is_written_at_the_end_does_not_depend_on_what_waits(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demoter, "_MOST_REQUESTS", 2)
    go_on = held_up(tiers)
    put(tiers, 1)
    for _ in range(3):
        tiers.demote(list, 1)
    threading.Timer(0.1, go_on.set).start()
    assert tiers.flush(60)
    assert tiers.disk is not None
    assert tiers.disk.contains(key(1))


def test_what_a_failing_disk_did_not_take_is_written_when_it_is_well(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in range(1, 5):
        put(tiers, name)
    assert tiers.disk is not None
    with monkeypatch.context() as patch:
        patch.setattr(tiers.disk, "write_run", failing())
        tiers.demote_all()
        wait_until_saved(tiers)
        assert tiers.host.counts() == (4, 0, 4)
    assert not tiers.disk.contains(key(1))
    tiers.demote_all()
    wait_until_saved(tiers)
    assert match_keys(tiers.disk, [key(name) for name in range(1, 5)]) == 4
    assert tiers.host.counts() == (4, 4, 0)
    assert tiers._observer["demote.chunks_dropped_error"] == 0  # type: ignore[index]


def test_a_disk_without_room_for_a_segment_is_told(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StoreDirectory, "free_bytes", lambda self: 2**20)
    for name in (1, 2):
        put(tiers, name)
    tiers.demote_all()
    wait_until_saved(tiers)
    assert tiers.host.counts() == (6, 0, 2)
    assert "no room on disk for 2 chunks" in caplog.text
    assert "a new segment of 4.2 MB would leave" in caplog.text
    assert "(--hcache-disk-free-floor)" in caplog.text


def test_what_finds_no_room_is_written_when_others_give_some_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demoter, "_REST_S", 0.2)
    tiers = open_tiers(tmp_path / "store", policy=WritePolicy.WRITE_THROUGH)
    assert tiers.disk is not None
    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "free_bytes", lambda _: 2**20)
        for name in (1, 2):
            put(tiers, name)
        wait_for(lambda: tiers._observer["store.writes_refused"] >= 3)  # type: ignore[index]
        assert tiers.disk.stats().chunks == 0
    wait_until_saved(tiers)
    assert tiers.flush(60)
    assert match_keys(tiers.disk, [key(1), key(2)]) == 2
    assert tiers._observer["demote.chunks_dropped_full"] == 0  # type: ignore[index]
    tiers.close()


def test_what_is_on_disk_all_the_same_is_not_counted_as_dropped(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk in the middle is on disk, so the others are written one by one, and the last one finds no room."""
    put(tiers, 2)
    assert tiers.flush(10.0)
    tiers.host.forget_all()
    monkeypatch.setattr(TieredStore, "_is_on_disk", lambda *_: False)  # it comes while nobody knows that
    write_run, runs = tiers.disk.write_run, []  # type: ignore[union-attr]

    def fill_up(run: Run, payload: Any) -> None:
        runs.append(run.keys)
        if len(runs) > 1:
            raise StoreFullError("full")
        write_run(run, payload)

    monkeypatch.setattr(tiers.disk, "write_run", fill_up)
    for _ in range(5):
        tiers.host.reserve()
    for name in (1, 2, 3):  # the last slots
        put(tiers, name)
    wait_for(lambda: tiers.host.counts() == (0, 3, 0))
    assert runs == [(key(1),), (key(3),)]
    assert tiers._observer["demote.chunks_dropped_full"] == 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("error", "counter"),
    [
        (StoreIOError("the disk fails"), "demote.chunks_dropped_error"),
        (StoreFullError("full"), "demote.chunks_dropped_full"),
    ],
)
def test_but_it_is_given_up_where_slots_run_short(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch, error: StoreError, counter: str
) -> None:
    assert tiers.disk is not None
    monkeypatch.setattr(tiers.disk, "write_run", failing(error))
    for name in range(1, 9):
        put(tiers, name)
    tiers.demote_all()
    wait_until_saved(tiers)
    assert tiers.host.counts()[1] >= 1
    assert tiers._observer[counter] == tiers.host.counts()[1]  # type: ignore[index]
    put(tiers, 11, wait=True)


@pytest.mark.parametrize("error", [StoreIOError("the disk fails"), StoreFullError("full")])
def test_a_disk_that_takes_nothing_is_asked_for_few_chunks_whenever_a_slot_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    """Not for an eighth of host memory each time."""
    monkeypatch.setattr(demoter, "_REST_S", 60.0)
    tiers = open_tiers(tmp_path / "store", slots=400)
    refused: list[object] = []
    monkeypatch.setattr(tiers.disk, "write_run", failing(error, refused))
    for number in range(1, 361):
        put(tiers, 2 * number)  # each chunk is a run
    wait_until_saved(tiers)
    for number in range(361, 371):
        refused.clear()
        put(tiers, 2 * number)
        wait_until_saved(tiers)
        assert 0 < len(refused) <= 4
    tiers.close()


def test_a_disk_without_room_is_asked_once_and_a_flush_gives_up_when_it_would_be_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs does not have room either, and a stop must not take all of its time for that."""
    monkeypatch.setattr(demoter, "_REST_S", 60.0)
    tiers = open_tiers(tmp_path / "store", slots=400, policy=WritePolicy.WRITE_THROUGH)
    refused: list[object] = []
    monkeypatch.setattr(tiers.disk, "write_run", failing(StoreFullError("full"), refused))
    for number in range(1, 101):
        put(tiers, 2 * number)  # each chunk is a run
    wait_for(lambda: bool(refused))
    wait_until_saved(tiers)
    assert len(refused) == 1
    slept: list[float] = []
    monkeypatch.setattr(
        demoter.time, "sleep", lambda seconds, sleep=time.sleep: (slept.append(seconds), sleep(0.001))
    )
    assert not tiers.flush(4.0)  # less than a rest
    assert max(slept, default=0.0) < 0.1
    assert tiers.host.counts().dirty == 100
    monkeypatch.undo()
    tiers.close()


def failing(error: Exception | None = None, asked: list[object] | None = None) -> Callable[..., None]:
    """Args: asked: receives what it is called with."""

    def fail(*arguments: object) -> None:
        if asked is not None:
            asked.append(arguments)
        raise error or StoreIOError("the disk fails")

    return fail


def test_a_missing_chunk_holds_nothing(tiers: TieredStore) -> None:
    put(tiers, 1)
    with pytest.raises(TierMissError):
        tiers.lease([key(1), key(2)])
    slot = tiers.host.pin(key(1))
    assert slot is not None
    tiers.host.mark_clean(key(1), slot)
    tiers.host.unpin(key(1), slot)
    for name in range(11, 19):
        put(tiers, name)
    assert key(1) not in tiers.host  # it was evictable: the failed lease left no pin


def test_clear_empties_both(tiers: TieredStore) -> None:
    for name in range(1, 5):
        put(tiers, name)
    tiers.demote_all()
    wait_until_saved(tiers)
    tiers.clear()
    assert tiers.match([key(1)]) == 0
    put(tiers, 1)
    assert read(tiers, [1]) == (HOST,)


def test_a_clear_says_when_it_is_for_good(tiers: TieredStore) -> None:
    put(tiers, 1)
    assert tiers.flush(60)
    tiers.clear()
    wait_for(lambda: not tiers.is_clearing)
    assert tiers.disk is not None
    assert not tiers.disk.contains(key(1))
    go_on = held_up(tiers)
    tiers.clear()
    tiers.clear()
    assert tiers.is_clearing
    go_on.set()
    wait_for(lambda: not tiers.is_clearing)
    without = TieredStore(tiers.host, None, Counters(), write_policy=WritePolicy.WRITE_BACK, run_chunks=1)
    without.clear()
    assert not without.is_clearing, "without a disk nothing can come back"
    left_out = StoreStats.not_opened(tiers.disk._config, "no reason")
    without = TieredStore(
        tiers.host, None, Counters(), write_policy=WritePolicy.WRITE_BACK, run_chunks=1, left_out=left_out
    )
    assert not without.is_clearing
    without.clear()
    assert without.is_clearing, "at the next start it would be there"


def test_a_clear_that_fails_is_tried_again_before_it_says_anything(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    put(tiers, 1)
    assert tiers.flush(60)
    put(tiers, 2)
    assert tiers.disk is not None
    clear, tried = tiers.disk.clear, list[str]()

    def fail() -> None:
        tried.append("in vain")
        raise StoreIOError("no directory takes the note")

    monkeypatch.setattr(tiers.disk, "clear", fail)
    tiers.clear()
    wait_for(lambda: len(tried) == 2)
    assert tiers.is_clearing
    assert tiers.disk.contains(key(1))
    assert key(1) not in tiers, "a miss all the same"
    with pytest.raises(TierMissError):
        tiers.lease([key(1)])
    for name in range(11, 19):  # more than there are slots: what is new is saved all the same
        put(tiers, name)
    assert tiers.flush(60)
    monkeypatch.setattr(tiers.disk, "clear", clear)
    wait_for(lambda: not tiers.is_clearing)
    assert not any(tiers.disk.contains(key(name)) for name in (1, *range(11, 19)))
    assert caplog.text.count("the clear is tried again until it is durable: no directory takes the note") == 1
    assert "the clear is durable now" in caplog.text


def test_a_flush_writes_what_comes_meanwhile(tiers: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiers.disk is not None
    write_run = tiers.disk.write_run

    def more_comes(*run: Any) -> None:
        write_run(*run)
        if key(11) not in tiers.host:
            put(tiers, 11)

    monkeypatch.setattr(tiers.disk, "write_run", more_comes)
    put(tiers, 1)
    assert tiers.flush(60)
    assert tiers.disk.contains(key(11))


def test_nothing_is_begun_once_it_has_to_stop(tiers: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiers.disk is not None
    assert tiers._demoter is not None
    demoter, write_run = tiers._demoter, tiers.disk.write_run

    def told_to_stop(*run: Any) -> None:
        demoter._stopping = True
        write_run(*run)

    monkeypatch.setattr(tiers.disk, "write_run", told_to_stop)
    put(tiers, 1)
    put(tiers, 11)
    tiers.demote_all()
    demoter._thread.join(60)
    assert tiers.disk.stats().chunks == 1


def test_what_is_given_up_stays_in_memory_and_is_not_written(tiers: TieredStore) -> None:
    for name in range(1, 5):
        put(tiers, name)
    go_on = held_up(tiers)
    tiers.demote_all()
    tiers.give_up_dirty()
    put(tiers, 5)
    go_on.set()
    assert tiers.flush(60)
    assert read(tiers, [1, 2, 3, 4, 5]) == (HOST,) * 5
    assert tiers._observer["demote.chunks_written"] == 1  # type: ignore[index]
    assert tiers._observer["host.chunks_outdated"] == 4  # type: ignore[index]
    for name in range(6, 11):
        put(tiers, name)
    assert [key(name) in tiers.host for name in range(1, 6)] == [False, False, True, True, True]


def test_runs_that_were_asked_for_are_not_written_once_they_are_given_up(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiers.disk is not None
    put(tiers, 1)
    put(tiers, 11)
    write_run = tiers.disk.write_run

    def give_up_after_the_first(*run: Any) -> None:
        write_run(*run)
        tiers.give_up_dirty()

    monkeypatch.setattr(tiers.disk, "write_run", give_up_after_the_first)
    assert tiers.flush(60)
    assert tiers.disk.stats().chunks == 1


def test_from_the_word_on_everything_is_written(tiers: TieredStore) -> None:
    put(tiers, 1)
    wait_until_saved(tiers)
    assert tiers.host.counts().dirty == 1
    tiers.write_from_now_on()
    wait_for(lambda: tiers.host.counts().dirty == 0)
    put(tiers, 2)
    wait_for(lambda: tiers.host.counts().dirty == 0)
    assert tiers.disk is not None
    assert match_keys(tiers.disk, [key(1), key(2)]) == 2


def test_nothing_is_written_behind_a_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the demoter clears the disk, and goes on, before the serving thread does its next step."""
    tiers = open_tiers(tmp_path / "store", policy=WritePolicy.WRITE_THROUGH)
    assert tiers._demoter is not None
    tiers._demoter._resting_until = time.monotonic() + 60  # nothing is written yet
    for name in range(1, 5):
        put(tiers, name)
    clear_disk = tiers._demoter.clear_disk

    def clear_and_go_on() -> None:
        clear_disk()
        wait_until_saved(tiers)
        tiers._demoter._resting_until = 0.0
        wait_until_saved(tiers)

    monkeypatch.setattr(tiers._demoter, "clear_disk", clear_and_go_on)
    tiers.clear()
    assert not any(key(name) in tiers for name in range(1, 5))
    tiers.close()


def test_what_was_cleared_is_gone_also_if_the_server_stops_at_once(tmp_path: Path) -> None:
    tiers = open_tiers(tmp_path / "store")
    put(tiers, 1)
    assert tiers.flush(60)
    assert tiers._demoter is not None
    with tiers._demoter._changed:  # the demoter cannot begin
        tiers._demoter._clear_at, tiers._demoter._stopping = 0.0, True
    tiers.close()
    reopened = open_tiers(tmp_path / "store")
    assert reopened.match([key(1)]) == 0
    reopened.close()


def wait_until_saved(tiers: TieredStore) -> None:
    wait_for(lambda: not tiers.is_saving)


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_what_is_in_host_memory_is_used_where_it_is(tiers: TieredStore) -> None:
    for name in (1, 2, 5, 3, 4, 6):  # in slots that follow each other
        put(tiers, name)

    def pieces(*names: int) -> Pieces:
        with tiers.lease([key(name) for name in names]) as lease:
            assert lease.is_in_place
            return tiers.rows_in_place(lease, 0)[1]

    assert pieces(1) == ((0, 1),)
    assert pieces(1, 2) == ((0, 2),)
    assert pieces(1, 2, 3, 4, 5, 6) == ((0, 2), (3, 2), (2, 1), (5, 1))
    assert pieces(6, 5, 4) == ((5, 1), (2, 1), (4, 1))
    tiers.demote_all()
    wait_until_saved(tiers)
    for name in range(7, 11):
        put(tiers, name)
    on_disk = next(name for name in range(1, 7) if key(name) not in tiers.host)
    with tiers.lease([key(10), key(on_disk)]) as lease:
        assert not lease.is_in_place


@pytest.mark.usefixtures("patient")
def test_what_left_the_last_tier_for_want_of_room_is_known(tmp_path: Path) -> None:
    tiers = open_tiers(tmp_path / "store", policy=WritePolicy.WRITE_THROUGH)
    assert tiers.disk is not None
    for name in range(1, 21):
        put(tiers, name, wait=True)
    wait_until_saved(tiers)
    assert key(1) not in tiers.host
    assert not tiers.was_evicted(key(1)), "it is on disk"
    on_disk = [name for name in range(1, 21) if tiers.disk.contains(key(name))]
    tiers.disk._space._seal_active()
    assert tiers.disk._space.evict_one()
    gone = [name for name in on_disk if key(name) not in tiers]
    assert gone
    assert all(tiers.was_evicted(key(name)) for name in gone)
    assert not tiers.was_evicted(key(99))
    tiers.close()


def test_without_a_disk_host_memory_is_the_last_tier() -> None:
    host = HostTier(np.zeros(4 * LAYOUT.chunk_bytes, np.uint8), LAYOUT, Counters(), keep_dirty=False)
    tiers = TieredStore(host, None, Counters(), write_policy=WritePolicy.WRITE_BACK, run_chunks=1)
    for name in range(1, 7):
        put(tiers, name)
    was_evicted = [tiers.was_evicted(key(name)) for name in range(1, 8)]
    assert was_evicted == [key(name) not in host for name in range(1, 7)] + [False]
    assert sum(was_evicted) == 2
    tiers.clear()
    assert not tiers.was_evicted(key(6)), "what is cleared has not gone for want of room"
