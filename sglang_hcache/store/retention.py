"""How long chunks stay on disk at most: segments go as a whole once they are too old, used or not.

A segment's age is that of its files: nothing is written to it for longer than a part of the time that it may stay, so
its first chunk is hardly older than its last one. The files' own times survive restarts and a lost index. A time in the
future, left by a clock that was set back, is set to the present one: else what was written then would never be too old.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

from sglang_hcache.core.errors import StoreError
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.format.geometry import mask_of
from sglang_hcache.store.removal import Remover
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.volumes.volume import Volume

_FILLING = 1 / 10
"""Share of the age for which one segment is filled."""
_LOOKS = 64
"""So often in the time of the age files are asked for theirs. Both together are less than an eighth of it."""
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0


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
        self._next_look_s = 0.0

    def is_filled(self, segment: Segment) -> bool:
        """Whether nothing more may be written to ``segment``, which this process began."""
        if self._max_age_s is None:
            return False
        age_s = max(time.monotonic() - segment.begun_s, time.time() - segment.begun_at)
        return age_s > self._max_age_s * _FILLING

    def enforce(self) -> None:
        """Delete what is too old, all but what is being filled. What is being read goes when that ends."""
        if self._max_age_s is None or time.monotonic() < self._next_look_s:
            return
        wait_s = min(max(self._max_age_s / _LOOKS, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
        self._next_look_s = time.monotonic() + wait_s
        now = time.time()
        oldest = now - self._max_age_s * (1 - _FILLING) + wait_s
        for segment in self._catalog.segments():
            if not segment.sealed:
                continue
            written = self._written(segment)
            if 0 < written < oldest:
                self._remover.expire(segment)
            elif written > now:
                self._bring_back(segment, now)

    def _written(self, segment: Segment) -> float:
        """As :func:`written_s`. A file is asked once, unless it may still be written to."""
        unasked = [
            stripe
            for stripe in segment.members
            if not segment.asked >> stripe & 1 and self._volumes[stripe].health.readable
        ]
        times = _times(segment.number, unasked, self._volumes)
        written = max([segment.written_s, *times.values()])
        if not segment.pins:
            segment.written_s = written
            segment.asked |= mask_of(times)
        return written

    def _bring_back(self, segment: Segment, now: float) -> None:
        segment.written_s, segment.asked = 0.0, 0
        for stripe in segment.members:
            with contextlib.suppress(StoreError):  # the next look tries again
                self._volumes[stripe].limit_segment_time(segment.number, now)


def written_s(number: int, members: Iterable[int], volumes: Sequence[Volume]) -> float:
    """When segment ``number`` was written to last, seconds since 1970; 0 if none of its files can be asked."""
    return max(_times(number, members, volumes).values(), default=0.0)


def _times(number: int, stripes: Iterable[int], volumes: Sequence[Volume]) -> dict[int, float]:
    """The same of each file that can be asked, by directory; 0 of one that is gone."""
    times: dict[int, float] = {}
    for stripe in stripes:
        with contextlib.suppress(StoreError):  # the directory is out
            times[stripe] = volumes[stripe].segment_time(number)
    return times
