"""Bytes on disk: runs of chunks in segment files, found by their headers, and nothing about what the bytes mean.

The format is docs/store-format.md. ``DiskStore`` is the way in; everything else is a part of it (docs/design.md, "The
disk store", says where to start, which object knows what, and what becomes of a segment's files):

* ``format``: bytes as they lie on disk.
* ``io``: engines that move bytes, with threads that a hung device may keep.
* ``volumes``: directories, their health, calls and transfers with a deadline.
* here: the running store, from the catalog in memory to the keeper.
* ``inspect``: looking at a store and mending it.
"""

from sglang_hcache.store.config import Run, StoreConfig, StoreStats
from sglang_hcache.store.format.geometry import MAX_LAYERS
from sglang_hcache.store.io.memory import aligned_empty
from sglang_hcache.store.io.workers import workers
from sglang_hcache.store.lease import ReadLease
from sglang_hcache.store.store import DiskStore
from sglang_hcache.store.volumes.ahead import Preview, look_ahead

__all__ = [
    "MAX_LAYERS",
    "DiskStore",
    "Preview",
    "ReadLease",
    "Run",
    "StoreConfig",
    "StoreStats",
    "aligned_empty",
    "look_ahead",
    "workers",
]
