"""How long chunks stay on disk at most: segments go as a whole once they are too old, used or not.

A segment's age is that of its files: nothing is written to it for longer than a part of the time that it may stay, so
its first chunk is hardly older than its last one. The files' own times survive restarts and a lost state; between
starts the segments in memory have them. A time in the future, left by a clock that was set back, is set to the present
one, once that is to be believed: else what was written then would never be too old.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

from sglang_hcache.core.errors import StoreError
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.removal import Remover
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.steadiness import Steadiness
from sglang_hcache.store.volumes.volume import Volume

_FILLING = 1 / 10
"""Share of the age for which one segment is filled."""
_KEPT = 7 / 8
"""Share of it for which its last chunk stays: then the first one goes in time, also if a look comes somewhat late."""


class Retention:
    """Not thread-safe: ``Space`` holds its lock.

    Args:
        max_age_s: chunks are deleted that long after they were written, or up to an eighth of it earlier; None: never.
    """

    def __init__(
        self, max_age_s: float | None, volumes: Sequence[Volume], catalog: Catalog, remover: Remover
    ) -> None:
        self._max_age_s = max_age_s
        self._volumes = volumes
        self._catalog = catalog
        self._remover = remover
        self._is_steady = Steadiness()

    def is_filled(self, segment: Segment) -> bool:
        """Whether nothing more may be written to ``segment``, which this process began."""
        if self._max_age_s is None:
            return False
        now = time.time()
        was_set_back = now < segment.written_s
        return was_set_back or now - segment.begun_s > self._max_age_s * _FILLING

    def enforce(self) -> None:
        """Delete what is too old, all but what is being filled. What is being read goes when that ends."""
        if self._max_age_s is None:
            return
        now = time.time()
        is_steady = self._is_steady(now)
        sealed = [segment for segment in self._catalog.segments() if segment.sealed]
        latest = now - self._max_age_s * _KEPT
        old = [segment for segment in sealed if -math.inf < segment.written_s < latest]
        self._remover.announce([segment.number for segment in old])
        for segment in old:
            self._remover.expire(segment)
        for segment in sealed:
            if segment.written_s > now and is_steady:
                self._bring_back(segment, now)

    def _bring_back(self, segment: Segment, now: float) -> None:
        """Count its age from ``now``, also after a restart. A directory that takes no writes is listed once it does."""
        with contextlib.suppress(StoreError):  # the next look tries again
            for stripe in segment.members:
                if self._volumes[stripe].health.can_delete:
                    self._volumes[stripe].limit_segment_time(segment.number, now)
            segment.written_s = now
