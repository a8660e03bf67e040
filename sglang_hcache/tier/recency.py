"""Which of the chunks that may be evicted were not used for longest."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from operator import itemgetter

from sglang_hcache.core.keys import ChunkKey


class Recency:
    """Chunks in the order of their last uses, by numbers that grow with each use.

    One that is written to disk may be evicted from then on, but was used before: were it taken for the newest, whatever
    is used once would stay longer than what is used again and need not be written. As chunks are written nearly in the
    order of their last uses, those make a second queue, and nothing has to be sorted.
    """

    def __init__(self) -> None:
        self._used: OrderedDict[ChunkKey, int] = OrderedDict()
        self._written: OrderedDict[ChunkKey, int] = OrderedDict()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._used or key in self._written

    def __len__(self) -> int:
        return len(self._used) + len(self._written)

    def add(self, key: ChunkKey, use: int) -> None:
        """It was used now, also if it is here already."""
        self._written.pop(key, None)
        self._used[key] = use
        self._used.move_to_end(key)

    def add_written(self, key: ChunkKey, last_use: int) -> None:
        """It may be evicted from now on."""
        self._written[key] = last_use

    def discard(self, key: ChunkKey) -> bool:
        """Whether it was here."""
        return any(queue.pop(key, None) is not None for queue in (self._used, self._written))

    def oldest(self) -> Iterator[ChunkKey]:
        """All, the least recently used first. Nothing may be added or discarded meanwhile."""
        for key, _ in heapq.merge(self._used.items(), self._written.items(), key=itemgetter(1)):
            yield key

    def clear(self) -> None:
        self._used.clear()
        self._written.clear()
