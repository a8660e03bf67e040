"""Sizes of a store that exists: a command that opens it with smaller ones would evict what a server keeps there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.core.paths import rank_dir
from sglang_hcache.core.units import exact_size
from sglang_hcache.store.volumes.looking import close_all, look_at, look_at_each


def sizes_of_store(dirs: Sequence[Path]) -> dict[str, Any]:
    """``disk_size``, ``disk_free_floor`` and ``segment_size`` that the store in ``dirs`` was last opened with.

    Empty where there is none, or one that a server refuses.
    """
    try:
        num_ranks = _ranks_in(dirs)
        sight = look_at([rank_dir(path, 0, num_ranks) for path in dirs])
    except StoreFormatError:
        return {}
    sight.close()
    identity = sight.identity
    percent = identity.free_floor_percent
    return {
        "disk_size": num_ranks * identity.size_bytes,
        "disk_free_floor": f"{percent:f}%" if percent else exact_size(identity.free_floor_bytes),
        "segment_size": num_ranks * identity.segment_bytes,
    }


def _ranks_in(dirs: Sequence[Path]) -> int:
    """How many ranks have stores in ``dirs``: those that are well tell. Raises StoreFormatError."""
    seen = look_at_each(dirs)
    close_all(seen)
    return next((item.num_ranks for item in seen if item.num_ranks is not None), 1)


def with_sizes_of_store(settings: Mapping[str, Any], dirs: Sequence[Path]) -> dict[str, Any]:
    """``settings``, and where they name no size that of the store in ``dirs``."""
    kept = sizes_of_store(dirs)
    if "disk_size" in settings:
        kept.pop("segment_size", None)  # it may be too large for another cap
    return {**kept, **settings}
