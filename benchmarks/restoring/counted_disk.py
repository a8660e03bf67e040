"""A disk store that counts what its device is asked to do."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Container, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.header import file_system_of
from restoring.limited_engine import LimitedEngine
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.observer import Counters
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.io.engine import Batch, IOEngine, IOKind
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.io.probing import takes_direct_writes

_STORE_BYTES, _SEGMENT_BYTES = 16 * 2**30, 2**28


class CountingEngine:
    """Passes operations on to ``inner`` and counts those of one ``kind``."""

    def __init__(self, inner: IOEngine, kind: IOKind) -> None:
        self.name = inner.name
        self._inner = inner
        self._kind = kind
        self._lock = threading.Lock()
        self._count = self._bytes = 0

    def submit(self, batch: Batch, indices: Iterable[int]) -> None:
        indices = list(indices)
        sizes = [batch.ops[index].size for index in indices if batch.ops[index].kind is self._kind]
        with self._lock:
            self._count += len(sizes)
            self._bytes += sum(sizes)
        self._inner.submit(batch, indices)

    def close(self, timeout_s: float) -> bool:
        return self._inner.close(timeout_s)

    def take(self) -> tuple[int, int]:
        """Operations and bytes since the last call."""
        with self._lock:
            found = self._count, self._bytes
            self._count = self._bytes = 0
            return found


def disk_facts(folder: Path, tiers: Container[str]) -> dict[str, Any]:
    """What a header says of the disk tiers in ``folder``.

    Raises:
        ConfigError: one of ``tiers`` is a disk as fast as it goes, and it would be memory that is measured.
    """
    file_system, direct = file_system_of(folder), takes_direct_writes(folder)
    if "disk" in tiers and not direct:
        raise ConfigError(
            f"--dir: the file system there ({file_system}) has no O_DIRECT, so that the tier disk would be read from "
            "the page cache; choose another folder, or --tiers with host and disks that have a limit, such as "
            "disk:500MB"
        )
    return {"file_system": file_system, "direct": direct}


def check_room(folder: Path, num_bytes: int) -> None:
    """For a store below ``folder`` that is to keep ``num_bytes`` of chunks.

    Raises:
        ConfigError: there is too little; chunks would push each other out.
    """
    room, needed = shutil.disk_usage(folder).free, num_bytes + 2 * _SEGMENT_BYTES
    if room < needed:
        raise ConfigError(
            f"--dir: {format_bytes(room)} of room is too little, this takes up to {format_bytes(needed)}; name a "
            "folder on another file system, or measure shorter histories"
        )


def disk_config(folder: Path, num_bytes: int = 0) -> StoreConfig:
    """Of a new store in ``folder`` that has room for ``num_bytes`` of chunks."""
    return StoreConfig(
        dirs=(folder,),
        size_bytes=max(_STORE_BYTES, num_bytes + 2 * _SEGMENT_BYTES),
        free_floor_bytes=0,
        segment_bytes=_SEGMENT_BYTES,
    )


def posix_engine(limit: int | None) -> IOEngine:
    """The engine of a store with one directory.

    Args:
        limit: bytes a second that are read at most; None: as fast as it goes.
    """
    engine = PosixEngine(1)
    return engine if limit is None else LimitedEngine(engine, limit)


def open_disk(folder: Path, kind: IOKind, limit: int | None = None) -> tuple[DiskStore, CountingEngine]:
    """A new store in ``folder`` whose operations of ``kind`` are counted; ``limit`` as in :func:`posix_engine`."""
    counting = CountingEngine(posix_engine(limit), kind)
    config = replace(disk_config(folder), io_timeout_s=60.0)
    return DiskStore.open(config, Counters(), counting), counting
