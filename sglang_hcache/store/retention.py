"""How long chunks stay on disk at most: segments go as a whole once they are too old, used or not.

A segment's age is that of its files: nothing is written to it for longer than a part of the time that it may stay, so
its first chunk is hardly older than its last one. The files' own times survive restarts and a lost state; between
starts the segments in memory have them. What is from the future, left by a clock that was set back, goes as well:
nobody knows how old it is.
"""

from __future__ import annotations

import math
import time

from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.removal import Remover
from sglang_hcache.store.segments import Segment

_FILLING = 1 / 10
"""Share of the age for which one segment is filled."""
_KEPT = 7 / 8
"""Share of it for which its last chunk stays: then the first one goes in time, also if a look comes somewhat late."""


def is_filled(segment: Segment, max_age_s: float | None) -> bool:
    """Whether nothing more may be written to ``segment``, which this process began."""
    if max_age_s is None:
        return False
    now = time.time()
    was_set_back = now < segment.written_s
    return was_set_back or now - segment.begun_s > max_age_s * _FILLING


def enforce(max_age_s: float | None, catalog: Catalog, remover: Remover) -> None:
    """Delete chunks that long after they were written, or up to an eighth of it earlier; None: never.

    All but what is being filled. What is being read goes when that ends. ``Space`` holds its lock.
    """
    if max_age_s is None:
        return
    now = time.time()
    begin, end = now - max_age_s * _KEPT, now + max_age_s * (1 - _KEPT)
    old = [
        segment
        for segment in catalog.segments()
        if segment.sealed and segment.written_s > -math.inf and not begin <= segment.written_s <= end
    ]
    remover.announce([segment.number for segment in old])
    for segment in old:
        remover.expire(segment)
