from __future__ import annotations

import time

from sglang_hcache.core.throttle import Throttle


def test_once_in_an_interval() -> None:
    throttle = Throttle(0.05)
    assert [throttle() for _ in range(3)] == [True, False, False]
    time.sleep(0.06)
    assert [throttle() for _ in range(2)] == [True, False]


def test_each_throttle_counts_for_itself() -> None:
    assert Throttle(60.0)()
    assert Throttle(60.0)()
