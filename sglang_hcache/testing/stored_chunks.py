"""Chunks whose bytes follow from their key, so that any process can check them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sglang_hcache.core.config import IOEngineName
from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.store import DiskStore, Run, StoreConfig, aligned_empty
from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.format.record import ExtentHeader, parse_header
from sglang_hcache.store.io.memory import ByteArray

NAMESPACE_ID = b"namespace-for-16"


def small_config(
    base: Path, num_dirs: int = 1, *, size: int = 16 * 2**20, segment: int = 2**18, floor: int = 0
) -> StoreConfig:
    """A store of a few MiB in ``base/disk0``, ``base/disk1``, ...; sizes in bytes."""
    return StoreConfig(
        dirs=tuple(base / f"disk{index}" for index in range(num_dirs)),
        size_bytes=size,
        free_floor_bytes=floor,
        segment_bytes=segment,
        io_engine=IOEngineName.POSIX,
        io_timeout_s=15.0,
        retry_s=0.05,
    )


def make_key(number: int) -> bytes:
    """A chunk key, 32 bytes."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def make_keys(first: int, count: int) -> tuple[bytes, ...]:
    return tuple(make_key(number) for number in range(first, first + count))


def chunk_payload(key: bytes, layer: int, size: int) -> ByteArray:
    """The ``size`` bytes of one layer of the chunk ``key``, in aligned memory."""
    array = aligned_empty(size)
    array[:] = np.frombuffer(hashlib.shake_128(key + layer.to_bytes(4, "little")).digest(size), np.uint8)
    return array


def make_run(keys: Sequence[bytes], chunk_layer_bytes: Sequence[int], first_chunk: int = 0) -> Run:
    return Run(NAMESPACE_ID, tuple(keys), first_chunk, tuple(chunk_layer_bytes))


def payload_of(run: Run) -> Callable[[int], list[ByteArray]]:
    """What ``DiskStore.write_run`` asks for."""
    return lambda layer: [chunk_payload(key, layer, run.chunk_layer_bytes[layer]) for key in run.keys]


def write_keys(
    store: DiskStore, keys: Sequence[bytes], chunk_layer_bytes: Sequence[int], first_chunk: int = 0
) -> None:
    """Write ``keys`` as one run."""
    run = make_run(keys, chunk_layer_bytes, first_chunk)
    store.write_run(run, payload_of(run))


def read_keys(store: DiskStore, keys: Sequence[bytes], skew: int = 0) -> None:
    """Read all layers of ``keys``, one by one and all at once, and compare; raises what the store raises.

    ``skew``: bytes by which the destination misses alignment.

    Raises:
        AssertionError: other bytes came back.
    """
    with store.lease(keys) as lease:
        sizes = lease.chunk_layer_bytes
        for layers in [*([layer] for layer in range(len(sizes))), range(len(sizes))]:
            into = {layer: aligned_empty(len(keys) * sizes[layer] + skew)[skew:] for layer in layers}
            for out in into.values():
                out[:] = 0xEE
            store.read_layers(lease, into)
            for layer, out in into.items():
                expected = np.concatenate([chunk_payload(key, layer, sizes[layer]) for key in keys])
                if not np.array_equal(out, expected):
                    raise AssertionError(f"layer {layer} came back different")


def match_keys(store: DiskStore, keys: Sequence[bytes]) -> int:
    """How many leading ``keys`` can be read."""
    return next((count for count, key in enumerate(keys) if not store.contains(key)), len(keys))


def find_extents(directory: Path) -> list[tuple[Path, int, ExtentHeader]]:
    """File, offset and header of every extent in ``directory``, by looking at every block."""
    found = []
    for path in sorted(directory.glob("segment-*.seg")):
        data = path.read_bytes()
        for offset in range(0, len(data), BLOCK):
            try:
                found.append((path, offset, parse_header(data[offset : offset + BLOCK])))
            except CorruptExtentError:
                continue
    return found


def physical_bytes(directories: Sequence[Path]) -> int:
    """Allocated bytes of the directories and all in them, as ``du`` counts; what vanishes meanwhile counts not."""
    total = 0
    for directory in directories:
        for folder, _, files in os.walk(directory):  # passes over what vanishes, which rglob does not
            for entry in [folder, *(os.path.join(folder, name) for name in files)]:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(entry).st_blocks * 512
    return total
