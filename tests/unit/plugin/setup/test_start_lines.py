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
    )
    with caplog.at_level(logging.INFO):
        log_tiers(HCacheConfig.from_settings(settings), tiers, HostBudget.least())
    assert said in caplog.text
