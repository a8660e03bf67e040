"""What is read from a disk to measure it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import Method
from sglang_hcache.core.observer import Counters
from sglang_hcache.sglang_plugin.setup.scratch import ScratchReads, take_slots
from sglang_hcache.store import DiskStore
from sglang_hcache.store.volumes import directory
from sglang_hcache.store.volumes.mounts import mount_of
from sglang_hcache.testing.stored_chunks import small_config


def cached_pages(folder: Path) -> int:
    """Of all segments, in the page cache."""
    count = 0
    for path in folder.rglob("segment-*.seg"):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            data = np.frombuffer(view, np.uint8)
            found = np.zeros(-(-data.size // mmap.PAGESIZE), np.uint8)
            addresses = ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(found.ctypes.data)
            assert ctypes.CDLL(None).mincore(addresses[0], ctypes.c_size_t(data.size), addresses[1]) == 0
            count += int((found & 1).sum())
            del data
    return count


def test_slots_are_taken_in_whole_chunks() -> None:
    tree: Any = SimpleNamespace(
        allocate=lambda count: torch.arange(count) if count <= 128 else None, capacity=lambda: 150
    )
    assert [len(take_slots(tree, count)) for count in (1, 64, 65)] == [64, 64, 128]
    with pytest.raises(
        ConfigError, match="150 tokens is too small for the checks at start, which need 192 more"
    ):
        take_slots(tree, 129)


def test_what_the_page_cache_holds_is_not_taken_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mount_of(tmp_path)
    if mount is None or mount.kind in ("tmpfs", "ramfs"):
        pytest.skip("this file system is the page cache")
    left: list[int] = []
    drop = DiskStore.drop_cached

    def dropped(store: DiskStore, keys: Sequence[bytes]) -> None:
        drop(store, keys)
        left.append(cached_pages(tmp_path))

    monkeypatch.setattr(DiskStore, "drop_cached", dropped)
    monkeypatch.setattr(directory, "takes_direct_writes", lambda _: False)
    disk = DiskStore.open(small_config(tmp_path, 2), Counters())
    try:
        reads = ScratchReads(Method.KV, 128, 4, disk, 3)
        assert cached_pages(tmp_path) > 0, "what was written"
        for length in (256, 64):
            assert reads.time(length) > 0
            assert cached_pages(tmp_path) > 0, "what was read"
        reads.close()
    finally:
        disk.close()
    assert left == [0, 0]
