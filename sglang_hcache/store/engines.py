"""The engine of a store: what the configuration names, tried on the store's own disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sglang_hcache.core.errors import StoreError
from sglang_hcache.core.observer import Observer
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.io.choice import choose_engine
from sglang_hcache.store.io.engine import IOEngine
from sglang_hcache.store.volumes.volume import Volume


def engine_of(config: StoreConfig, volumes: Sequence[Volume], observer: Observer) -> IOEngine:
    """The engine of the configuration."""
    well_first = sorted(volumes, key=lambda volume: not volume.health.writable)
    return choose_engine(
        config.io_engine,
        [volume.path for volume in well_first],
        [volume.directory.direct for volume in well_first],
        lambda: _spare_bytes(config, well_first),
        lambda: observer.count("io.errors"),
    )


def _spare_bytes(config: StoreConfig, volumes: Sequence[Volume]) -> int:
    """What may be written for a moment to the first of ``volumes``, below cap and above floor."""
    first = volumes[0]
    try:
        total = first.call(first.directory.total_bytes, "cannot ask for its size")
        above_floor = first.free_bytes() - config.floor_of(total)
    except StoreError:
        return 0
    below_cap = config.size_bytes
    for volume in volumes:
        with contextlib.suppress(StoreError):
            below_cap -= volume.allocated_bytes()
    return max(0, min(below_cap, above_floor))
