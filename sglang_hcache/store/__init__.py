"""Bytes on disk: runs of chunks in segment files, an index, and nothing about what the bytes mean.

The format is docs/store-format.md. ``DiskStore`` is the way in; everything else is a part of it.
"""

from sglang_hcache.store.config import DirectoryStats, Run, StoreConfig, StoreStats
from sglang_hcache.store.lease import ReadLease
from sglang_hcache.store.memory import aligned_empty
from sglang_hcache.store.store import DiskStore

__all__ = [
    "DirectoryStats",
    "DiskStore",
    "ReadLease",
    "Run",
    "StoreConfig",
    "StoreStats",
    "aligned_empty",
]
