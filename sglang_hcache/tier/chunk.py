"""What the tiers know about a chunk besides its bytes, and the names of those that are gone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from sglang_hcache.core.keys import ChunkKey

_PLACES = 2**19
"""Power of two. Names of 8 bytes: 4 MiB, which the system gives as they are filled. 34 million tokens."""


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """Identity of a sealed chunk.

    Args:
        key: the chunk's name, 32 bytes.
        parent: key of the chunk before it in its prefix (the namespace's root key for the first).
        index: position in the prefix, in chunks.
        namespace_id: 16 bytes.
    """

    key: ChunkKey
    parent: ChunkKey
    index: int
    namespace_id: bytes


def form_runs(chunks: Iterable[ChunkInfo], max_chunks: int) -> Iterator[list[ChunkInfo]]:
    """Group ``chunks`` into runs: consecutive chunks of one prefix, at most ``max_chunks`` each.

    Every chunk is in exactly one run. Where prefixes branch, one branch continues its parent's run and the
    others begin runs of their own.
    """
    remaining = {chunk.key: chunk for chunk in chunks}
    children: dict[ChunkKey, list[ChunkInfo]] = {}
    for chunk in remaining.values():
        children.setdefault(chunk.parent, []).append(chunk)
    heads = [chunk for chunk in remaining.values() if chunk.parent not in remaining]
    while heads:
        run = [heads.pop()]
        while len(run) < max_chunks and (following := children.get(run[-1].key, [])):
            run.append(following[0])
            heads.extend(following[1:])
        if len(run) == max_chunks:
            heads.extend(children.get(run[-1].key, []))
        yield run


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
