"""The disk tier when the server starts, or later where it could not be opened then."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from sglang_hcache.core.config import DiskAtStart, HCacheConfig, IOEngineName
from sglang_hcache.core.errors import StoreError
from sglang_hcache.core.layout import Method, PlanKind
from sglang_hcache.core.observer import Counters
from sglang_hcache.plan.shapes import ModelShape
from sglang_hcache.sglang_plugin.seam.budget import store_config
from sglang_hcache.sglang_plugin.seam.ranks import Ranks
from sglang_hcache.sglang_plugin.setup.planning import describe, mix_on
from sglang_hcache.store import DiskStore, StoreStats

logger = logging.getLogger(__name__)


def open_disk(
    config: HCacheConfig, hidden_size: int, counters: Counters, ranks: Ranks
) -> tuple[DiskStore | None, StoreStats | None]:
    """The disk tier, or what to tell of the one that this server does without."""
    settings = store_config(config, hidden_size)
    if settings is None or config.method is PlanKind.RECOMPUTE:
        return None, None
    disk, why_not = None, None
    try:
        disk = DiskStore.open(settings, counters)
    except StoreError as error:
        is_to_be_measured = config.save_profile is not None
        if config.disk_at_start is DiskAtStart.REQUIRED or is_to_be_measured:
            raise
        why_not = str(error)
    (all_are_open,) = ranks.minimum(disk is not None)
    if all_are_open:
        return disk, None
    if disk is not None:
        disk.close()
    why_not = why_not or "that of another rank cannot be opened"
    logger.warning(
        "hcache: the disk tier cannot be opened; this server runs without it, and tries again until it is open "
        "(--hcache-disk-at-start optional): %s", why_not,
    )  # fmt: skip
    return None, StoreStats.not_opened(settings, why_not)


def open_late(
    config: HCacheConfig, shape: ModelShape, counters: Counters, stored: Sequence[Method]
) -> DiskStore:
    """The disk tier, later than at start. Raises StoreError."""
    settings = store_config(config, shape.hidden_size)
    assert settings is not None
    if settings.io_engine == IOEngineName.AUTO:
        # To compare engines would take the interpreter from those that decode now, and again with each try.
        settings = replace(settings, io_engine=IOEngineName.POSIX)
    disk = DiskStore.open(settings, counters)
    on_disk = mix_on(disk, shape)
    if config.method is PlanKind.AUTO and on_disk not in (None, tuple(stored)):
        logger.warning(
            "hcache: what is on disk is stored by another mix (%s), chosen when the disk was there: it serves again at "
            "the next start", describe(on_disk or ()),
        )  # fmt: skip
    return disk
