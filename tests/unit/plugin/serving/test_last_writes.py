"""How long a server that ends goes on writing, and what its log says of it."""

from __future__ import annotations

import logging

import pytest

from sglang_hcache.core.config import HCacheConfig
from tests.unit.plugin.serving.test_weights_in_use import Served


def test_what_the_limit_left_unwritten_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bridge, limits = Served(config=HCacheConfig(shutdown_flush_s=2.5)).bridge, []

    def flush(limit_s: float) -> bool:
        limits.append(limit_s)
        bridge.counters.count("demote.chunks_written", 3)
        return False

    bridge.counters.count("demote.chunks_written", 40)
    monkeypatch.setattr(bridge.tiers, "flush", flush)
    with caplog.at_level(logging.INFO):
        bridge.close()
    assert limits == [2.5]
    assert caplog.messages[-2:] == [
        "hcache: not all chunks were written to disk within 2.5 s",
        "hcache: stopping; 3 chunks that existed only in host memory are on disk now",
    ]
