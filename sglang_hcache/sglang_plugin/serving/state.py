"""What both tiers hold, as ``/server_info`` and the gauges show it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sglang_hcache.tier.tiered import TieredStore


def tier_state(tiers: TieredStore) -> dict[str, Any]:
    """Sizes and health, from memory. From any thread."""
    free, clean, dirty = tiers.host.counts()
    disk = tiers.disk_stats
    return {
        "host": {
            "slots": tiers.host.num_slots,
            "free": free,
            "clean": clean,
            "dirty": dirty,
            "chunk_bytes": tiers.layout.chunk_bytes,
        },
        "disk": None
        if disk is None
        else {
            "chunks": disk.chunks,
            "bytes": disk.used_bytes,
            "cap_bytes": disk.cap_bytes,
            "written_today_bytes": disk.written_today_bytes,
            "write_budget_bytes": disk.write_budget_bytes,
            "quarantined": disk.quarantined,
            "clearing_pending": tiers.is_clearing,
            "engine": disk.engine,
            "directories": [
                {**asdict(item), "path": str(item.path), "takes_writes": item.takes_writes}
                for item in disk.directories
            ],
        },
    }


def why_nothing_is_saved(is_on: bool, captures: bool, is_stale: bool) -> str | None:
    """One of ``core.metrics.NOTHING_SAVED``, or None: what is computed is saved.

    Args:
        is_on: the tier is not switched off.
        captures: it has a method that stores anything.
        is_stale: KV of earlier weights is on the device.
    """
    if not is_on:
        return "switched_off"
    if not captures:
        return "method"
    return "old_weights" if is_stale else None
