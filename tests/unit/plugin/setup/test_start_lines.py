"""What the log says of the tiers at start."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.sglang_plugin.seam.budget import HostBudget
from sglang_hcache.sglang_plugin.setup.start_lines import log_tiers


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "with 3 chunks in it, no write budget; write_back"),
        ({"disk_write_budget": "4TB"}, "with 3 chunks in it, 4.0 TB written a day at most; write_back"),
    ],
)
def test_the_write_budget_of_a_disk_tier(
    settings: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    tiers: Any = SimpleNamespace(
        disk=object(),
        disk_stats=SimpleNamespace(cap_bytes=10**12, chunks=3),
        host=SimpleNamespace(num_slots=9),
        may_have_disk=True,
    )
    with caplog.at_level(logging.INFO):
        log_tiers(HCacheConfig.from_settings(settings), tiers, HostBudget.least(), 64)
    assert said in caplog.text


@pytest.mark.parametrize("has_disk", [True, False])
@pytest.mark.parametrize(("pool_tokens", "is_told"), [(6 * 64, False), (6 * 64 + 1, True)])
def test_a_host_tier_that_is_small_beside_the_pool(
    pool_tokens: int, is_told: bool, has_disk: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It has a place before a disk tier, and next to none without one."""
    tiers: Any = SimpleNamespace(
        disk=None, disk_stats=None, host=SimpleNamespace(num_slots=9), may_have_disk=has_disk,
        layout=SimpleNamespace(row_bytes=(600_000, 400_000)),
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        log_tiers(HCacheConfig(), tiers, HostBudget.least(), pool_tokens, num_ranks=2)
    # Staging of 64 tokens and room for 2 * 385, of 1 MB each, and an eighth for restores: on each of two ranks.
    found = [record for record in caplog.records if "set --hcache-host-size to 1.9 GB, or" in record.message]
    assert [record.levelno for record in found] == ([logging.INFO if has_disk else logging.WARNING] * is_told)
