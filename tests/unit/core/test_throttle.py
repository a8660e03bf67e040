from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hcache.core import throttle as throttle_module
from sglang_hcache.core.throttle import Throttle


def test_once_in_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(throttle_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    throttle = Throttle(60.0)
    assert [throttle() for _ in range(3)] == [True, False, False]
    clock.now += 59.0
    assert not throttle()
    clock.now += 1.0
    assert [throttle() for _ in range(2)] == [True, False]


def test_each_throttle_counts_for_itself() -> None:
    assert Throttle(60.0)()
    assert Throttle(60.0)()
