"""What was written comes back: every geometry, alignment, slice and number of directories."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sglang_hcache.core.errors import StoreIOError, TierMissError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, aligned_empty
from sglang_hcache.store.census import Files
from sglang_hcache.store.format.geometry import BLOCK, extent_bytes
from sglang_hcache.store.io.engine import Batch, IOKind, IOOp
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.reader import PIECE_BYTES
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.looking import look_at
from sglang_hcache.testing.io_faults import FaultEngine
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    chunk_payload,
    find_extents,
    make_keys,
    make_run,
    match_keys,
    payload_of,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import wait_until

OpenStore = Callable[..., DiskStore]

LAYERS = {
    "aligned": (8192, 8192, 8192, 8192),
    "unaligned": (5000, 5000, 5000),
    "tiny": (1, 64, 4095, 4097),
    "mixed": (4096, 12288, 3000),
    "one": (65536,),
}


@pytest.fixture(params=["direct", "buffered"])
def io_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "buffered":
        monkeypatch.setattr(StoreDirectory, "probe", lambda self: None)
    return str(request.param)


@pytest.mark.parametrize("num_dirs", [1, 2, 3])
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys())
def test_chunks_come_back(
    tmp_path: Path, open_store: OpenStore, io_mode: str, layers: tuple[int, ...], num_dirs: int
) -> None:
    store = open_store(small_config(tmp_path, num_dirs))
    if io_mode == "buffered":
        assert not any(volume.directory.direct for volume in Inside(store).volumes)
    keys = make_keys(0, 7)
    write_keys(store, keys[:5], layers)
    write_keys(store, keys[5:], layers)
    assert match_keys(store, keys) == 7
    read_keys(store, keys)
    read_keys(store, keys, skew=1)
    for first in range(7):
        read_keys(store, keys[first : first + 1])
    read_keys(store, keys[2:6])


def test_keys_of_a_lease_may_come_in_any_order_and_twice(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 6)
    write_keys(store, keys, (5000, 8192))
    read_keys(store, [keys[4], keys[5], keys[0], keys[2], keys[1], keys[4]])


def test_a_full_run_of_64_chunks(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path, 2, segment=2**20))
    keys = make_keys(0, 64)
    write_keys(store, keys, (4096, 4100))
    read_keys(store, keys)
    read_keys(store, keys[63:])


def test_a_layer_larger_than_one_transfer(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path, segment=2**21))
    keys = make_keys(0, 5)
    write_keys(store, keys, (300_000,))
    read_keys(store, keys)
    read_keys(store, keys[1:4])
    write_keys(store, keys, (256 * 1024,))
    read_keys(store, keys)
    read_keys(store, keys[3:])


class WatchedEngine(PosixEngine):
    def __init__(self) -> None:
        super().__init__(1, 2)
        self.reads: list[tuple[int, int]] = []
        """Where each begins and ends."""

    def submit(self, batch: Batch, indices: Iterable[int]) -> None:
        ops = [op for op in batch.ops if op.kind is IOKind.READ]
        self.reads += [(op.offset, op.offset + op.size) for op in ops]
        super().submit(batch, indices)


@pytest.mark.parametrize("chunk_bytes", [300_000, 256 * 1024])
def test_what_is_wanted_is_read_once_in_pieces(
    tmp_path: Path, open_store: OpenStore, io_mode: str, chunk_bytes: int
) -> None:
    engine = WatchedEngine()
    store = open_store(small_config(tmp_path, segment=2**21), engine)
    keys = make_keys(0, 5)
    write_keys(store, keys, (chunk_bytes,))
    for wanted in (keys, keys[1:4], keys[3:]):
        engine.reads.clear()
        with store.lease(wanted) as lease:
            store.read_layers(lease, {0: aligned_empty(len(wanted) * chunk_bytes)})
        reads = sorted(engine.reads)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(reads))
        assert all(end - begin <= PIECE_BYTES + BLOCK for begin, end in reads)
        size = BLOCK + len(wanted) * chunk_bytes  # with the header
        assert 0 <= sum(end - begin for begin, end in reads) - size < 2 * BLOCK
        if io_mode == "buffered" or chunk_bytes % BLOCK == 0:
            assert sum(end - begin for begin, end in reads) == size


@pytest.mark.parametrize("num_dirs", [1, 2, 3])
def test_the_headers_by_which_a_run_is_found_come_last(
    tmp_path: Path, open_store: OpenStore, io_mode: str, num_dirs: int
) -> None:
    """Killed at any operation before the last of them, the run is not there; it is when all are."""
    config = small_config(tmp_path, num_dirs)
    engine = FaultEngine(PosixEngine(num_dirs, 1), lambda op, number: None)
    store = open_store(config, engine)
    done: list[IOKind] = []

    def found() -> int:
        sight = look_at(config.dirs)
        try:
            return len(Files.listed(0, sight.volumes).read(sight.volumes).runs)
        finally:
            sight.close()

    def look(op: IOOp, number: int) -> None:
        if op.kind is not IOKind.READ:
            assert found() == 0, done
            done.append(op.kind)

    engine.decide = look
    write_keys(store, make_keys(0, 3), LAYERS["unaligned"])
    assert found() == 1
    assert done[:3] == [IOKind.WRITE] * 3
    assert done[-num_dirs:] == [IOKind.WRITE] * num_dirs
    assert done[-2 * num_dirs : -num_dirs] == [IOKind.SYNC] * num_dirs


def test_a_run_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path, segment=2**18))
    small, large = make_keys(0, 1), make_keys(10, 10)
    write_keys(store, small, (4096,))
    write_keys(store, large, (100_000,))
    read_keys(store, small)
    read_keys(store, large)


def test_layers_are_spread_over_the_directories_and_runs_start_elsewhere(
    tmp_path: Path, open_store: OpenStore
) -> None:
    config = small_config(tmp_path, 3)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), (4096,) * 7)
    write_keys(store, make_keys(2, 2), (4096,) * 7)
    rotations = set()
    for stripe, directory in enumerate(config.dirs):
        headers = [header for _, _, header in find_extents(directory)]
        assert len(headers) >= 4
        for header in headers:
            assert header.stripe == stripe == (header.layer + header.place.shape.rotation) % 3
            rotations.add(header.place.shape.rotation)
    assert len(rotations) == 2


def test_extents_lie_where_their_headers_say(tmp_path: Path, open_store: OpenStore, io_mode: str) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    store._writer._scratch.take(2**20)[:] = 0xFF  # Used memory must not reach the padding.
    keys = make_keys(0, 3)
    store.write_run(run := make_run(keys, (5000, 4096, 100), first_chunk=7), payload_of(run))
    seen = set()
    for directory in config.dirs:
        for path, offset, header in find_extents(directory):
            assert path.name == f"segment-{header.place.segment:08d}.seg"
            assert offset == header.place.extent_offset(header.layer)
            assert header.place.first_chunk == 7
            assert header.place.keys == keys
            data = path.read_bytes()[
                offset + BLOCK : offset + extent_bytes(len(header.place.keys), header.chunk_bytes)
            ]
            expected = b"".join(chunk_payload(key, header.layer, header.chunk_bytes) for key in keys)
            assert data[: len(header.place.keys) * header.chunk_bytes] == expected
            assert not any(data[len(header.place.keys) * header.chunk_bytes :])
            seen.add(header.layer)
    assert seen == {0, 1, 2}


def test_a_key_written_twice_is_served_from_the_newer_run(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 4)
    write_keys(store, keys, (8192, 8192))
    write_keys(store, keys[2:], (8192, 8192))
    assert store.stats().chunks == 4
    read_keys(store, keys)
    store.close()
    store = open_store(small_config(tmp_path))
    assert store.stats().chunks == 4
    read_keys(store, keys)


def test_a_missing_key_is_a_miss_and_pins_nothing(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 3)
    write_keys(store, keys[:2], (4096,))
    assert match_keys(store, keys) == 2
    assert not store.contains(keys[2])
    with pytest.raises(TierMissError, match="chunk 2 of 3"):
        store.lease(keys)
    store.clear()
    assert not list((tmp_path / "disk0").glob("segment-*"))


def test_runs_with_other_layer_sizes_do_not_mix_in_a_lease(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 2)
    write_keys(store, keys[:1], (4096,))
    write_keys(store, keys[1:], (8192,))
    with pytest.raises(TierMissError, match="different sizes"):
        store.lease(keys)


def test_wrong_arguments(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 2)
    write_keys(store, keys, (4096,))
    with pytest.raises(ValueError, match="at least one key"):
        store.lease([])
    with store.lease(keys) as lease:
        with pytest.raises(ValueError, match="8192 bytes"):
            store.read_layers(lease, {0: aligned_empty(4096)})
        with pytest.raises(ValueError, match="uint8"):
            store.read_layers(lease, {0: np.zeros(8192, np.int8)})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="layer 1 of 1"):
            store.read_layers(lease, {1: aligned_empty(8192)})
    with pytest.raises(TierMissError, match="closed"):
        store.read_layers(lease, {0: aligned_empty(8192)})


def test_a_payload_of_wrong_shape_leaves_the_store_as_it_was(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path))
    run = make_run(make_keys(0, 2), (4096, 4096))
    with pytest.raises(ValueError, match="1 chunks"):
        store.write_run(run, lambda layer: [aligned_empty(4096)])
    with pytest.raises(ValueError, match="4096 bytes"):
        store.write_run(run, lambda layer: [aligned_empty(4096), aligned_empty(4097 - layer)])
    assert store.stats().segments == 0
    store.write_run(run, payload_of(run))
    read_keys(store, run.keys)


def test_counts_of_traffic(tmp_path: Path, open_store: OpenStore, counters: Counters) -> None:
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 3)
    write_keys(store, keys, (5000, 4096))
    read_keys(store, keys[1:])
    assert counters["store.chunks_written"] == 3
    assert counters["store.bytes_written"] == 3 * 9096
    assert counters["store.chunks_read"] == 2 * 2  # ``read_keys`` reads everything twice
    assert counters["store.bytes_read"] == 2 * 2 * 9096


def test_many_threads_write_and_read_at_once(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path, 2, size=64 * 2**20))
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for turn in range(12):
                keys = make_keys(1000 * worker + 4 * turn, 4)
                write_keys(store, keys, (4096, 5000, 8192))
                read_keys(store, make_keys(1000 * worker, 4 * turn + 4), skew=turn % 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.stats().chunks == 4 * 48


def test_closing_a_lease_during_a_read_waits_for_the_read(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 2)
    write_keys(store, keys, (4096,))
    lease = store.lease(keys)
    with lease.reading():
        closer = threading.Thread(target=lease.close)
        closer.start()
        closer.join()
        store.clear()
        assert list((tmp_path / "disk0").glob("segment-*"))
    wait_until(lambda: not list((tmp_path / "disk0").glob("segment-*")))
    lease.close()


def test_a_closed_store_says_so(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path))
    keys = make_keys(0, 1)
    write_keys(store, keys, (4096,))
    lease = store.lease(keys)
    store.close()
    store.close()
    with pytest.raises(StoreIOError, match="closed"):
        write_keys(store, keys, (4096,))
    with pytest.raises(StoreIOError, match="closed"):
        store.read_layers(lease, {0: aligned_empty(4096)})
    with pytest.raises(TierMissError, match="closed"):
        store.lease(keys)
    lease.close()


def test_what_is_read_and_written_to_measure_is_not_counted(
    tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    store = open_store(replace(small_config(tmp_path), write_budget_bytes=15_000))
    write_keys(store, make_keys(0, 2), (4096,))
    with store.measuring():  # a server that lives at its write budget has to be measured at a start, too
        write_keys(store, make_keys(10, 3), (4096,))
        read_keys(store, make_keys(10, 3))
    assert "bytes_read" not in store.stats().totals
    assert store.stats().written_today_bytes == 3 * 4096
    read_keys(store, make_keys(0, 2))
    totals = store.stats().totals
    assert (totals["chunks_written"], totals["chunks_read"]) == (2, 2 * 2)
    assert (counters["store.chunks_written"], counters["store.chunks_read"]) == (2, 2 * 2)
