"""What a server says it has written at its end."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.sglang_plugin.serving.last_writes import LastWrites
from sglang_hcache.tier.host import SlotCounts


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

    last = LastWrites(Tiers(SlotCounts(8, 0, 0)), Interrupted())  # type: ignore[arg-type]
    caplog.set_level(logging.INFO)
    last.begin()
    last.finish(10.0)
    assert (
        "stopping: wrote 14 chunks to disk since the signal; 0 were not written and are lost" in caplog.text
    )
    assert "exist only in host memory" not in caplog.text


class Tiers:
    """With a disk that takes nothing."""

    def __init__(self, counts: SlotCounts, *, has_disk: bool = True) -> None:
        self.disk = object() if has_disk else None
        self.host = SimpleNamespace(counts=lambda: counts)
        self.layout = SimpleNamespace(chunk_bytes=1_700_000)

    def write_from_now_on(self) -> None:
        pass

    def flush(self, _limit_s: float) -> bool:
        return False


def test_what_is_lost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    counters.count("demote.chunks_dropped_budget", 1000)
    tiers = Tiers(SlotCounts(0, 7, 1234))
    last = LastWrites(tiers, counters)  # type: ignore[arg-type]
    caplog.set_level(logging.INFO)
    last.begin()
    counters.count("demote.chunks_written", 2000)
    counters.count("demote.chunks_dropped_budget", 5)
    last.finish(10.0)
    begin, end = (record.message for record in caplog.records)
    assert begin == (
        "hcache: stopping: 1,234 chunks (2.1 GB) exist only in host memory; writing them to disk for at most 10 s"
    )
    assert (
        end
        == "hcache: stopping: wrote 2,000 chunks to disk since the signal; 1,239 were not written and are lost"
    )


def test_without_a_disk_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    last = LastWrites(Tiers(SlotCounts(8, 1234, 0), has_disk=False), Counters())  # type: ignore[arg-type]
    caplog.set_level(logging.INFO)
    last.finish(10.0)
    assert caplog.messages == [
        "hcache: stopping: no disk tier: what is in host memory (1,234 chunks) is not kept"
    ]
