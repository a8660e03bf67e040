"""What is restored from the disk twice comes to host memory, whole or not at all."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.core.observer import Counters
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.promotion import Promoter
from sglang_hcache.tier.tiered import DISK, HOST, ChunkLease, TieredStore
from tests.unit.tier.test_tiered import LAYOUT, key, open_tiers, put, read, wait_until_saved

SIZE = LAYOUT.chunk_layer_bytes[0]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[TieredStore]:
    """Chunks 1 to 6 on disk, nothing of them in 8 slots of host memory."""
    opened = open_tiers(tmp_path / "store")
    for name in range(1, 7):
        put(opened, name)
    opened.demote_all()
    wait_until_saved(opened)
    opened.host.forget_all()
    opened.host.memory[:] = 0xEE
    yield opened
    opened.close()


def lease(tiers: TieredStore, names: Sequence[int]) -> ChunkLease:
    return tiers.lease([key(name) for name in names], promote=True)


def restore(tiers: TieredStore, names: Sequence[int], layers: Sequence[int] = (0, 1, 2)) -> tuple[str, ...]:
    """Read as a restore does, and check the bytes; returns where the chunks came from."""
    with lease(tiers, names) as held:
        for layer in layers:
            rows = np.zeros(len(names) * SIZE, np.uint8)
            tiers.read_layers(held, {layer: rows})
            assert np.array_equal(rows, np.repeat([name * 10 + layer for name in names], SIZE))
        return held.sources


def promoted(tiers: TieredStore) -> int:
    counters = tiers._observer
    assert isinstance(counters, Counters)
    return counters["host.chunks_promoted"]


def test_the_second_restore_brings_chunks_to_host_memory(tiers: TieredStore) -> None:
    assert restore(tiers, [1, 2, 3]) == (DISK,) * 3
    assert tiers.host.counts() == (8, 0, 0)
    assert restore(tiers, [1, 2, 3, 4]) == (DISK,) * 4
    assert tiers.host.counts() == (5, 3, 0)
    assert promoted(tiers) == 3
    assert restore(tiers, [1, 2, 3, 4]) == (HOST, HOST, HOST, DISK)
    assert read(tiers, [1, 2, 3, 4]) == (HOST,) * 4  # also checks their bytes
    assert promoted(tiers) == 4
    assert tiers.flush(60)  # they are on disk: nothing is to be written


def test_a_lease_tells_how_long_it_was_copied(tiers: TieredStore) -> None:
    told = []
    for names in ([1, 2], [1, 2, 3], [1, 2]):  # the third time from host memory
        held = lease(tiers, names)
        tiers.read_layers(held, {layer: np.zeros(len(names) * SIZE, np.uint8) for layer in range(3)})
        held.close()
        told.append(held.copied_s > 0)
    assert told == [False, True, False]


def test_measuring_promotes_nothing(tiers: TieredStore) -> None:
    for _ in range(3):
        assert read(tiers, [1, 2]) == (DISK, DISK)
    restore(tiers, [1, 2])
    assert tiers.host.counts() == (8, 0, 0)


def test_a_chunk_that_was_not_read_whole_is_not_promoted(tiers: TieredStore) -> None:
    restore(tiers, [1, 2])
    restore(tiers, [1, 2], layers=(0, 2))  # and then it was stopped
    assert tiers.host.counts() == (8, 0, 0)
    assert restore(tiers, [1, 2]) == (DISK, DISK)


def test_nor_is_one_that_is_damaged(tiers: TieredStore, tmp_path: Path) -> None:
    restore(tiers, [1, 2])
    (segment,) = (tmp_path / "store").rglob("*.seg")
    data = bytearray(segment.read_bytes())
    value = np.full(SIZE, 12, np.uint8).tobytes()  # chunk 1, layer 2
    at = data.index(value)
    data[at] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptExtentError):
        restore(tiers, [1, 2])
    assert tiers.host.counts() == (8, 0, 0)


def test_what_has_to_be_written_first_is_not_displaced(tiers: TieredStore) -> None:
    restore(tiers, [1, 2, 3])
    slots = [tiers.host.reserve() for _ in range(6)]  # two are left
    assert restore(tiers, [1, 2, 3]) == (DISK,) * 3
    assert restore(tiers, [1, 2, 3]) == (HOST, HOST, DISK)
    for slot in slots:
        assert slot is not None
        tiers.host.release(slot)


def test_what_was_cleared_meanwhile_does_not_come_back(tiers: TieredStore) -> None:
    restore(tiers, [1, 2])
    with lease(tiers, [1, 2]) as held:
        for layer in range(3):
            if layer == 2:
                tiers.clear()
            tiers.read_layers(held, {layer: np.zeros(2 * SIZE, np.uint8)})
    assert tiers.match([key(1)]) == 0
    assert tiers.host.counts() == (8, 0, 0)


def test_two_restores_of_the_same_chunk_promote_it_once(tiers: TieredStore) -> None:
    restore(tiers, [1, 2])
    with lease(tiers, [1, 2]) as one, lease(tiers, [1, 2]) as other:
        for held in (one, other):
            tiers.read_layers(held, {layer: np.zeros(2 * SIZE, np.uint8) for layer in range(3)})
    assert tiers.host.counts() == (6, 2, 0)
    assert promoted(tiers) == 2
    assert read(tiers, [1, 2]) == (HOST, HOST)


def test_the_tail_is_forgotten_before_the_head() -> None:
    host = HostTier(np.zeros(4 * LAYOUT.chunk_bytes, np.uint8), LAYOUT, Counters(), keep_dirty=True)
    promoter = Promoter(host, Counters())
    names = [key(name) for name in range(6)]
    assert promoter.begin(names) is None
    again = promoter.begin(names)
    assert again is not None
    assert list(again._wanted.values()) == names[:4]


def test_slots_that_are_written_to_are_nobody_elses(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore(tiers, [1, 2])
    begun, may_go_on = threading.Event(), threading.Event()
    layer_of = tiers.host.layer_of

    def slow(slot: int, layer: int) -> npt.NDArray[np.uint8]:
        begun.set()
        assert may_go_on.wait(60)
        return layer_of(slot, layer)

    monkeypatch.setattr(tiers.host, "layer_of", slow)
    held = lease(tiers, [1, 2])
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(tiers.read_layers, held, {0: np.zeros(2 * SIZE, np.uint8)})
        assert begun.wait(60)
        held.close()
        assert tiers.host.counts()[0] == 6
        may_go_on.set()
        reading.result()
    assert tiers.host.counts() == (8, 0, 0)


def test_many_threads_and_leases_that_end_at_any_moment(tiers: TieredStore) -> None:
    """No slot is lost or written to after it was given back, and what is in host memory is right."""
    dice = random.Random(0)
    with ThreadPoolExecutor(6) as threads:
        for _ in range(300):
            names = list(range(1, dice.randint(2, 7)))
            held = lease(tiers, names)
            reads = [
                threads.submit(tiers.read_layers, held, {layer: np.zeros(len(names) * SIZE, np.uint8)})
                for layer in range(dice.randint(1, 3))
            ]
            if dice.random() < 0.5:
                for future in reads:
                    future.result()
            held.close()  # others go on
            if dice.random() < 0.3:
                tiers.host.forget_all()
            put(tiers, 7)
            assert read(tiers, [7]) == (HOST,)
    read(tiers, list(range(1, 7)))
    free, clean, dirty = tiers.host.counts()
    assert free + clean + dirty == 8
    assert promoted(tiers) > 100
