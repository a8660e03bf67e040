"""Names of chunks that are gone, so that a miss can say whether a larger tier would have had the chunk."""

from __future__ import annotations

import numpy as np

from sglang_hcache.core.keys import ChunkKey

_PLACES = 2**19
"""Power of two. Names of 8 bytes: 4 MiB, which the system gives as they are filled. 34 million tokens."""


class Ghosts:
    """Remembers about the last half million chunks that were evicted; older ones are overwritten by chance.

    Each name has one place, so both methods take well under a microsecond and, under the interpreter's lock, no other.
    """

    def __init__(self, places: int = _PLACES) -> None:
        self._last = places - 1
        self._names = np.zeros(places, np.uint64).data

    def add(self, key: ChunkKey) -> None:
        """The chunk ``key`` was evicted. From any thread."""
        name = int.from_bytes(key[:8], "little")
        self._names[name & self._last] = name

    def __contains__(self, key: ChunkKey) -> bool:
        """From any thread. Wrong for one in 10^13 chunks that were never there."""
        name = int.from_bytes(key[:8], "little")
        return self._names[name & self._last] == name
