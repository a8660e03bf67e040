"""What exists only in host memory is written to disk before the process ends."""

from __future__ import annotations

import logging

from sglang_hcache.core.observer import Counters
from sglang_hcache.core.units import format_bytes
from sglang_hcache.tier.tiered import TieredStore

logger = logging.getLogger(__name__)

_WRITTEN = "demote.chunks_written"
_GIVEN_UP = ("demote.chunks_dropped_budget", "demote.chunks_dropped_error", "demote.chunks_dropped_full")


class LastWrites:
    """One server's, from the first word of its end on."""

    def __init__(self, tiers: TieredStore, counters: Counters) -> None:
        self._tiers = tiers
        self._counters = counters
        self._before: tuple[int, int] | None = None

    def begin(self) -> None:
        """The server will end, but requests run still. Idempotent; for a signal's handler, so it takes no lock.

        Another signal may come in the middle of it, and all be written before this call goes on.
        """
        before = self._written_and_given_up()
        if self._before is None:
            self._before = before
        self._tiers.write_from_now_on()

    def finish(self, limit_s: float) -> None:
        """Write the rest, within ``limit_s``, and say how much it was in all, and how much is lost."""
        self.begin()
        counts, chunk_bytes = self._tiers.host.counts(), self._tiers.layout.chunk_bytes
        if self._tiers.disk is None:
            if held := counts.clean + counts.dirty:
                logger.info(
                    "hcache: stopping: no disk tier: what is in host memory (%s chunks) is not kept",
                    f"{held:,}",
                )
            return
        if counts.dirty:
            logger.info(
                "hcache: stopping: %s chunks (%s) exist only in host memory; writing them to disk for at most %.2g s",
                f"{counts.dirty:,}", format_bytes(counts.dirty * chunk_bytes), limit_s,
            )  # fmt: skip
        self._tiers.flush(limit_s)
        before, now = self._before or (0, 0), self._written_and_given_up()
        lost = self._tiers.host.counts().dirty + now[1] - before[1]
        logger.log(
            logging.WARNING if lost else logging.INFO,
            "hcache: stopping: wrote %s chunks to disk since the signal; %s were not written and are lost",
            f"{now[0] - before[0]:,}", f"{lost:,}",
        )  # fmt: skip

    def _written_and_given_up(self) -> tuple[int, int]:
        return self._counters[_WRITTEN], sum(self._counters[event] for event in _GIVEN_UP)
