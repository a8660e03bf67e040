"""First rows of chunks, for requests that begin inside of one.

The device's prefix ends at any token, a chunk begins at a multiple of 64. The rows between were computed by an earlier
request: they are in the chunk that it fills now, has filled, or left unfinished when it ended.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.tier.host import HostTier

_MOST_BEHIND_A_PARENT = 64
_MOST_FILLED = 8192  # under 10 MB of tokens
_SHARE_UNFINISHED = 1 / 8


@dataclass(slots=True, eq=False)
class ChunkInMaking:
    """A chunk that a request fills, and what becomes of it.

    Args:
        parent: key of the chunk before it, or the root.
        tokens: so far.
        slot: of the host tier, open, with a row for each token; None: no rows were copied, or it has a key.
        key: once it is whole.
        last_use: when its request ended, or another one asked for it, as :attr:`.HostTier.uses` counts.
    """

    parent: ChunkKey
    tokens: array[int] = field(default_factory=lambda: array("q"))
    slot: int | None = None
    key: ChunkKey | None = None
    last_use: int = 0


class Beginnings:
    """Chunks in making, filled and unfinished, by their parents: the newest 64 behind each.

    A filled chunk is the host tier's. An unfinished one keeps its open slot, until it was not used for longer than a
    whole chunk that had to go: it is of use only as long as its tokens are on the device. At most an eighth of all
    slots are kept. :meth:`covers` may be called by any thread, the rest by one.

    Args:
        host: the tier that slots are of.
    """

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._most_filled = min(_MOST_FILLED, host.num_slots)
        self._most_unfinished = int(host.num_slots * _SHARE_UNFINISHED)
        self._lock = threading.Lock()
        self._by_parent: dict[ChunkKey, list[ChunkInMaking]] = {}
        self._filled: OrderedDict[ChunkInMaking, None] = OrderedDict()
        self._unfinished: OrderedDict[ChunkInMaking, None] = OrderedDict()
        self._held: ChunkInMaking | None = None

    # -- finding ---------------------------------------------------------------------------------

    def covers(self, parent: ChunkKey, tokens: array[int]) -> bool:
        """Whether the rows of ``tokens``, the first behind ``parent``, are at hand."""
        with self._lock:
            return self._find(parent, tokens) is not None

    @contextmanager
    def rows_of(self, parent: ChunkKey, tokens: array[int]) -> Iterator[int | None]:
        """A slot that begins with the rows of ``tokens``, and stays as it is meanwhile; None: they are gone."""
        with self._lock:
            chunk = self._find(parent, tokens)
        if chunk is None or chunk.key is None:
            self._held = chunk
            try:
                yield None if chunk is None else chunk.slot
            finally:
                self._held = None
            return
        slot = self._host.pin(chunk.key)
        try:
            yield slot
        finally:
            if slot is not None:
                self._host.unpin(chunk.key, slot)

    def adopt(self, parent: ChunkKey, tokens: array[int], *, if_longer: bool = False) -> int | None:
        """The slot of an unfinished chunk that has the rows of ``tokens``: the caller's from now on.

        Args:
            if_longer: also one that has more rows, which are lost.
        """
        with self._lock:
            chunk = self._find(parent, tokens)
            if chunk is None or chunk not in self._unfinished:
                return None
            if len(chunk.tokens) > len(tokens) and not if_longer:
                return None
            slot, chunk.slot = chunk.slot, None
            self._forget(chunk)
            return slot

    def _find(self, parent: ChunkKey, tokens: array[int]) -> ChunkInMaking | None:
        for chunk in reversed(self._by_parent.get(parent, ())):
            is_here = chunk.slot is not None if chunk.key is None else chunk.key in self._host
            if is_here and chunk.tokens[: len(tokens)] == tokens:
                chunk.last_use = self._host.uses
                for kept in (self._filled, self._unfinished):
                    if chunk in kept:
                        kept.move_to_end(chunk)
                return chunk
        return None

    # -- the life of a chunk ---------------------------------------------------------------------

    def add(self, chunk: ChunkInMaking) -> None:
        """A request fills ``chunk`` from now on."""
        with self._lock:
            self._append(chunk)

    def mark_filled(self, chunk: ChunkInMaking, key: ChunkKey) -> None:
        """``chunk`` is whole, and its slot, if it has one, the host tier's."""
        with self._lock:
            chunk.key, chunk.slot = key, None
            self._keep(chunk, self._filled, self._most_filled)

    def take_over(self, chunk: ChunkInMaking) -> None:
        """The request of ``chunk``, unfinished, is over; its slot, if it has one, is taken over."""
        with self._lock:
            if chunk.slot is None:
                self._forget(chunk)
            else:
                chunk.last_use = self._host.uses
                self._keep(chunk, self._unfinished, self._most_unfinished)

    def drop(self, chunk: ChunkInMaking) -> None:
        """Rows of ``chunk`` are missing; its slot, if it has one, is given back."""
        with self._lock:
            self._forget(chunk)
            self._give_back(chunk)

    def give_old_back(self) -> None:
        """Free the slots of unfinished chunks that are older than the whole one that went last."""
        with self._lock:
            while self._unfinished:
                chunk = next(iter(self._unfinished))
                if chunk.last_use >= self._host.gone_use:
                    return
                self._forget(chunk)

    def give_one_back(self) -> None:
        """Free the slot of one unfinished chunk, if there is one, but not of one whose rows are held."""
        with self._lock:
            chunk = next((chunk for chunk in self._unfinished if chunk is not self._held), None)
            if chunk is not None:
                self._forget(chunk)

    def clear(self) -> None:
        """Forget all, and free the slots of unfinished chunks. Chunks in making go on."""
        with self._lock:
            for chunk in [*self._filled, *self._unfinished]:
                self._forget(chunk)

    def _append(self, chunk: ChunkInMaking) -> None:
        siblings = self._by_parent.setdefault(chunk.parent, [])
        siblings.append(chunk)
        if len(siblings) > _MOST_BEHIND_A_PARENT:
            self._forget(siblings[0])

    def _keep(self, chunk: ChunkInMaking, kept: OrderedDict[ChunkInMaking, None], most: int) -> None:
        """Nobody fills ``chunk`` any more. Others like that which have nothing that it does not have go."""
        for other in list(self._by_parent.get(chunk.parent, ())):
            is_kept = other in self._filled or other in self._unfinished
            if other is chunk or (is_kept and chunk.tokens[: len(other.tokens)] == other.tokens):
                self._forget(other)
        self._append(chunk)
        kept[chunk] = None
        if len(kept) > most:
            self._forget(next(iter(kept)))

    def _forget(self, chunk: ChunkInMaking) -> None:
        siblings = self._by_parent.get(chunk.parent, [])
        if chunk in siblings:
            siblings.remove(chunk)
            if not siblings:
                del self._by_parent[chunk.parent]
        self._filled.pop(chunk, None)
        if chunk in self._unfinished:
            del self._unfinished[chunk]
            self._give_back(chunk)

    def _give_back(self, chunk: ChunkInMaking) -> None:
        if chunk.slot is not None:
            self._host.release(chunk.slot)
            chunk.slot = None
