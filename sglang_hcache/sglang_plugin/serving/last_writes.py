"""What exists only in host memory is written to disk before the process ends."""

from __future__ import annotations

import logging

from sglang_hcache.core.observer import Counters
from sglang_hcache.tier.tiered import TieredStore

logger = logging.getLogger(__name__)

_WRITTEN = "demote.chunks_written"


class LastWrites:
    """Of one server, from the first word of its end on.

    Args:
        limit_s: for what is left when nothing runs any more.
    """

    def __init__(self, tiers: TieredStore, counters: Counters, limit_s: float) -> None:
        self._tiers = tiers
        self._counters = counters
        self._limit_s = limit_s
        self._before: int | None = None

    def begin(self) -> None:
        """The server will end, but requests run still. Idempotent; for a signal's handler, so it takes no lock.

        Another signal may come in the middle of it, and all be written before this call goes on.
        """
        before = self._counters[_WRITTEN]
        if self._before is None:
            self._before = before
        self._tiers.write_from_now_on()

    def finish(self) -> None:
        """Write the rest, within the limit, and say how much it was in all."""
        self.begin()
        if not self._tiers.flush(self._limit_s):
            logger.warning("hcache: not all chunks were written to disk within %g s", self._limit_s)
        written = self._counters[_WRITTEN] - (self._before or 0)
        logger.info("hcache: stopping; %d chunks that existed only in host memory are on disk now", written)
