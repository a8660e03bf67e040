"""The host tier: a fixed number of slots, each the state of one chunk.

Life of a slot::

    free -- reserve() --> open -- seal() --> dirty -- mark_clean() --> clean -- (evicted by reserve()) --> open
                            |\\-- publish() --------------------------^
                            \\--- release() --> free

*Dirty* chunks still have to be written to disk; *clean* ones need not: they are there, or could not be written, or
there is no disk tier.
Only clean, unpinned chunks are evicted, least recently used first, and of a prefix its tail before its head, without
which it is of no use. Every method is short, takes the one lock and never does I/O, so the serving thread may call any
of them.

Memory is layer-major: a layer's rows of neighbouring slots are neighbours, so a prefix in slots that follow each other
is restored from where it is. Therefore the lowest free slot is taken first, and several are freed at a time.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import StateLayout
from sglang_hcache.core.observer import Observer
from sglang_hcache.tier.chunk import ChunkInfo

_MOST_EVICTED_AT_ONCE = 16
_SHARE_EVICTED_AT_ONCE = 1 / 64
"""Of all slots, at most."""


@dataclass(slots=True)
class _Entry:
    slot: int
    pins: int = 0
    is_reused: bool = False


class SlotCounts(NamedTuple):
    """Slots of the host tier; the rest is open."""

    free: int
    clean: int
    dirty: int


class HostTier:
    """Slots of host memory, addressed by chunk key.

    Args:
        memory: uint8, 1-D, ``layout.chunk_bytes`` for each slot; owned by the tier from now on.
        layout: what a slot holds.
        keep_dirty: True if a disk tier exists, so that a sealed chunk must be written before it may go.
    """

    def __init__(
        self, memory: npt.NDArray[np.uint8], layout: StateLayout, observer: Observer, *, keep_dirty: bool
    ) -> None:
        if memory.ndim != 1 or memory.size % layout.chunk_bytes:
            raise ValueError(
                f"memory of shape {memory.shape} does not hold chunks of {layout.chunk_bytes} bytes"
            )
        self.memory = memory
        self.layout = layout
        self.num_slots = memory.size // layout.chunk_bytes
        self._observer = observer
        self._keep_dirty = keep_dirty
        self._layers: list[npt.NDArray[np.uint8]] = [
            self.layers(layer, 1)[0] for layer in range(layout.num_layers)
        ]
        self._evicted_at_once = max(
            1, min(_MOST_EVICTED_AT_ONCE, int(self.num_slots * _SHARE_EVICTED_AT_ONCE))
        )
        self._lock = threading.Lock()
        self._free = list(range(self.num_slots))  # a heap
        self._entries: dict[ChunkKey, _Entry] = {}
        self._orphans: dict[int, _Entry] = {}  # by slot: dropped while pinned, freed by the last unpin
        self._clean: OrderedDict[ChunkKey, None] = OrderedDict()
        self._dirty: OrderedDict[ChunkKey, ChunkInfo] = OrderedDict()
        self.generation = 0
        """How often everything was forgotten."""

    # -- filling ---------------------------------------------------------------------------------

    def reserve(self) -> int | None:
        """A slot to fill, or None when all are open, dirty or pinned. The caller seals or releases it."""
        with self._lock:
            if not self._free:
                self._evict()
            return heapq.heappop(self._free) if self._free else None

    def _evict(self) -> None:
        unpinned = (key for key in self._clean if not self._entries[key].pins)
        for key in list(itertools.islice(unpinned, self._evicted_at_once)):
            del self._clean[key]
            heapq.heappush(self._free, self._entries.pop(key).slot)
            self._observer.count("host.chunks_evicted")

    def release(self, slot: int) -> None:
        """Give an open slot back unused."""
        with self._lock:
            heapq.heappush(self._free, slot)

    def seal(self, slot: int, info: ChunkInfo, *, on_disk: bool) -> bool:
        """Publish an open slot as the chunk ``info``; False (and the slot is freed) if the chunk is here already."""
        with self._lock:
            if not self._enter(slot, info.key):
                return False
            if self._keep_dirty and not on_disk:
                self._dirty[info.key] = info
            else:
                self._clean[info.key] = None
            return True

    def publish(self, slot: int, key: ChunkKey, generation: int) -> bool:
        """Publish an open slot as the chunk ``key``, which is on disk; False (and the slot is freed) if it may not.

        Args:
            generation: that its bytes belong to: what came before everything was forgotten stays forgotten.
        """
        with self._lock:
            if generation != self.generation:
                heapq.heappush(self._free, slot)
                return False
            if not self._enter(slot, key):
                return False
            self._clean[key] = None
            return True

    def _enter(self, slot: int, key: ChunkKey) -> bool:
        """Name an open slot, or free it if the chunk is here already."""
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(slot)
            return True
        heapq.heappush(self._free, slot)
        entry.is_reused = True
        self._touch(key)
        return False

    # -- finding and reading ---------------------------------------------------------------------

    def __contains__(self, key: ChunkKey) -> bool:
        with self._lock:
            return key in self._entries

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """A request begins with the chunks ``keys``: those that are here are used again."""
        with self._lock:
            for key in reversed(keys):  # the tail goes before the head
                entry = self._entries.get(key)
                if entry is not None:
                    entry.is_reused = True
                    self._touch(key)

    def settle(self, keys: Sequence[ChunkKey]) -> None:
        """A request that had the chunks ``keys`` is over: their tail goes before their head. Not one more use."""
        with self._lock:
            for key in reversed(keys):
                if key in self._entries:
                    self._touch(key)

    def is_reused(self, key: ChunkKey) -> bool:
        """Whether a request has used the chunk since the one that made it."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and entry.is_reused

    def pin(self, key: ChunkKey) -> int | None:
        """Slot of a chunk, kept in place until :meth:`unpin`; None if it is not here.

        No use: who reads a prefix pins its head first, and its head would be evicted first.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.pins += 1
            return entry.slot

    def unpin(self, key: ChunkKey, slot: int) -> None:
        """Undo one :meth:`pin` that returned ``slot``."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.slot != slot:
                entry = self._orphans[slot]
            entry.pins -= 1
            if not entry.pins and self._orphans.pop(slot, None) is not None:
                heapq.heappush(self._free, slot)

    def read_layer(self, slots: Sequence[int], layer: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy one layer of pinned ``slots`` into ``out``, uint8 of shape (len(slots), chunk bytes of the layer)."""
        np.take(self._layers[layer], slots, axis=0, out=out, mode="clip")

    def layer_of(self, first: int, layer: int, count: int = 1) -> npt.NDArray[np.uint8]:
        """One layer of ``count`` slots from ``first`` on, a view: uint8, 1-D."""
        rows: npt.NDArray[np.uint8] = self._layers[layer][first : first + count].reshape(-1)
        return rows

    def layers(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """``count`` layers of equal rows from ``first`` on, a view: uint8, (layers, slots, chunk bytes of a layer)."""
        size = self.layout.chunk_layer_bytes[first]
        begin = self.num_slots * self.layout.layer_offset(first)
        return self.memory[begin : begin + self.num_slots * count * size].reshape(count, self.num_slots, size)

    # -- demotion --------------------------------------------------------------------------------

    def dirty_info(self, key: ChunkKey) -> ChunkInfo | None:
        """Identity of a chunk that still has to be written, else None."""
        with self._lock:
            return self._dirty.get(key)

    def oldest_dirty(self, count: int) -> list[ChunkInfo]:
        """Up to ``count`` chunks that still have to be written, least recently used first."""
        with self._lock:
            return list(itertools.islice(self._dirty.values(), count))

    def mark_clean(self, key: ChunkKey, slot: int) -> None:
        """The chunk in ``slot``, still pinned, is on disk now, or never will be: it may be evicted.

        Nothing happens to one of that name that came after everything was forgotten.
        """
        with self._lock:
            if key in self._dirty and self._entries[key].slot == slot:
                del self._dirty[key]
                self._clean[key] = None

    def forget_all(self) -> None:
        """Drop every sealed chunk; pinned slots are freed when their last reader is done."""
        with self._lock:
            for entry in self._entries.values():
                if entry.pins:
                    self._orphans[entry.slot] = entry
                else:
                    heapq.heappush(self._free, entry.slot)
            self._entries.clear()
            self._clean.clear()
            self._dirty.clear()
            self.generation += 1

    def _touch(self, key: ChunkKey) -> None:
        (self._dirty if key in self._dirty else self._clean).move_to_end(key)

    # -- numbers ---------------------------------------------------------------------------------

    def counts(self) -> SlotCounts:
        """How many slots are used for what."""
        with self._lock:
            return SlotCounts(len(self._free), len(self._clean), len(self._dirty))
