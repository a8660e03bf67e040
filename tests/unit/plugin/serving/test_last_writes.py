"""What a server says it has written at its end."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.sglang_plugin.serving.last_writes import LastWrites


def test_a_second_signal_in_the_middle_of_the_first_one_changes_no_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Python runs a handler between any two steps of another one; ``killpg`` and our own signal come together."""

    class Interrupted(Counters):
        signals = 1

        def __getitem__(self, event: str) -> int:
            if self.signals:
                self.signals -= 1
                last.begin()
                self.count(event, 14)  # the demoter, told by that call, is quick
            return super().__getitem__(event)

    tiers = SimpleNamespace(write_from_now_on=lambda: None, flush=lambda _limit_s: True)
    last = LastWrites(tiers, Interrupted(), 10.0)  # type: ignore[arg-type]
    caplog.set_level(logging.INFO)
    last.begin()
    last.finish()
    assert "stopping; 14 chunks" in caplog.text
