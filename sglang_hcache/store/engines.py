"""The engine of a store, and how fast it reads: both are tried on the store's own disk, for a moment at start."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.io.choice import choose_engine
from sglang_hcache.store.io.engine import IOEngine
from sglang_hcache.store.io.rate import probe_bytes, read_rates
from sglang_hcache.store.volumes.volume import Volume, volume_stats

_log = logging.getLogger(__name__)


def engine_of(config: StoreConfig, volumes: Sequence[Volume]) -> IOEngine:
    """The engine of the configuration."""
    well_first = _well_first(volumes)
    return choose_engine(
        config.io_engine,
        [volume.path for volume in well_first],
        [volume.directory.direct for volume in well_first],
        config.io_threads,
        _spare_bytes(config, well_first),
    )


def read_rate(config: StoreConfig, volumes: Sequence[Volume], engine: IOEngine) -> float | None:
    """Bytes a second that ``engine`` reads from the first directory that is well; None if it cannot be tried."""
    well_first = _well_first(volumes)
    volume, size = well_first[0], probe_bytes(_spare_bytes(config, well_first))
    if not size or not volume.health.writable or not config.measure_reads:
        return None
    try:
        return volume.probe(lambda: read_rates([engine], volume.path, volume.directory.direct, size))[0]
    except OSError as error:
        _log.warning("hcache: could not measure reads from %s: %s", volume.path, error)
        return None


def _well_first(volumes: Sequence[Volume]) -> list[Volume]:
    return sorted(volumes, key=lambda volume: not volume.health.writable)


def _spare_bytes(config: StoreConfig, volumes: Sequence[Volume]) -> int:
    """What may be written for a moment to the first of ``volumes``, below cap and above floor."""
    stats = [volume_stats(volume) for volume in volumes]
    below_cap = config.size_bytes - sum(item.physical_bytes for item in stats)
    return max(0, min(below_cap, stats[0].free_bytes - config.free_floor_bytes))
