"""The host tier: a fixed number of slots, each the state of one chunk.

Life of a slot::

    free -- reserve() --> open -- seal() --> dirty -- mark_clean() --> clean -- (evicted by reserve()) --> open
                            |\\               ^------ mark_dirty() ----'^
                            | \\-- publish() --------------------------/
                            \\--- release() --> free

*Dirty* chunks still have to be written to disk; *clean* ones need not: they are there, or could not be written, or
there is no disk tier. One that is not there after all is dirty again when it is used again, unless there is a maximum
age on disk. Only clean, unpinned chunks are evicted, least recently used first, and of a prefix its tail before its
head, without which it is of no use. Every method is short, takes the one lock and never does I/O, so the serving thread
may call any of them.

A prefix in slots that follow each other is restored from where it is (:class:`SlotMemory`): a chunk goes behind the one
before it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import StateLayout
from sglang_hcache.core.observer import Observer
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.slot_memory import SlotMemory

_MOST_EVICTED_AT_ONCE = 16
_SHARE_EVICTED_AT_ONCE = 1 / 64
"""Share of all slots that is evicted at once, at most: slots of a prefix's tail are taken in order only if they are
free together."""


@dataclass(slots=True)
class _Entry:
    slot: int
    info: ChunkInfo | None
    """What to write if it is not on disk; None: it stays clean."""
    pins: int = 0
    is_reused: bool = False
    last_use: int = 0
    """Counted in uses of all."""


class SlotCounts(NamedTuple):
    """Slots of the host tier; the rest is open."""

    free: int
    clean: int
    dirty: int


class HostTier(SlotMemory):
    """Slots of host memory, addressed by chunk key.

    Args:
        memory, layout: as :class:`SlotMemory`; owned by the tier from now on.
        keep_dirty: True if a disk tier exists, so that a sealed chunk must be written before it may go.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        layout: StateLayout,
        observer: Observer,
        *,
        keep_dirty: bool,
    ) -> None:
        super().__init__(memory, layout)
        self._observer = observer
        self.keep_dirty = keep_dirty
        self._lock = threading.Lock()
        # A stack: a prefix's head goes last, and what takes its slot next finds those of its tail behind it. A set
        # would look for the few that are free in as many places as there are slots.
        self._free = dict.fromkeys(reversed(range(self.num_slots)))
        share = int(self.num_slots * _SHARE_EVICTED_AT_ONCE)
        self._evicted_at_once = max(1, min(_MOST_EVICTED_AT_ONCE, share))
        self._entries: dict[ChunkKey, _Entry] = {}
        # Three queues of them, the least recently used first. The first two are clean: what is written may be evicted
        # from then on, but was used before. Were it taken for the newest, whatever is used once would stay longer than
        # what is used again and need not be written. As chunks are written nearly in the order of their last uses,
        # those make a queue, too, and nothing has to be sorted.
        self._used, self._written, self._dirty = (OrderedDict[ChunkKey, _Entry]() for _ in range(3))
        self._pinned = self._pinned_dirty = 0  # of those in _entries
        self._orphans: dict[int, _Entry] = {}  # by slot: dropped while pinned, freed by the last unpin
        self.uses = self.gone_use = 0
        """Uses of chunks so far; and how many there had been at the last one of the chunk that went last."""
        self.generation = 0
        """How often everything was forgotten."""
        self.on_evicted: Callable[[ChunkKey], object] = lambda key: None
        """Told of each chunk that leaves for want of slots, while the lock is held."""

    # -- filling ---------------------------------------------------------------------------------

    def reserve(self, behind: int | None = None) -> int | None:
        """A slot to fill, or None when all are open, dirty or pinned. The caller seals or releases it.

        Args:
            behind: the slot of the chunk before this one: the next one is the best.
        """
        with self._lock:
            if not self._free:
                self._evict()
            if behind is not None and behind + 1 in self._free:
                del self._free[behind + 1]
                return behind + 1
            return self._free.popitem()[0] if self._free else None

    def _evict(self) -> None:
        evictable = (item for item in self._oldest_clean() if not item[1].pins)
        for key, entry in list(itertools.islice(evictable, self._evicted_at_once)):
            self._leave_clean(key)
            del self._entries[key]
            self._free[entry.slot] = None
            self.gone_use = max(self.gone_use, entry.last_use)
            self._observer.count("host.chunks_evicted")
            self.on_evicted(key)

    def release(self, slot: int) -> None:
        """Give an open slot back unused."""
        with self._lock:
            self._free[slot] = None

    def seal(self, slot: int, info: ChunkInfo, *, on_disk: bool) -> bool:
        """Publish an open slot as the chunk ``info``; False (and the slot is freed) if the chunk is here already."""
        with self._lock:
            if not self._enter(slot, info.key, info):
                return False
            if self.keep_dirty and not on_disk:
                self._dirty[info.key] = self._entries[info.key]
            self._touch(info.key)
            return True

    def publish(self, slot: int, key: ChunkKey, generation: int) -> bool:
        """Publish an open slot as the chunk ``key``, which is on disk; False (and the slot is freed) if it may not.

        Args:
            generation: that its bytes belong to: what came before everything was forgotten stays forgotten.
        """
        with self._lock:
            if generation != self.generation:
                self._free[slot] = None
                return False
            if not self._enter(slot, key, None):
                return False
            self._touch(key)
            return True

    def _enter(self, slot: int, key: ChunkKey, info: ChunkInfo | None) -> bool:
        """Name an open slot, or free it if the chunk is here already."""
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(slot, info)
            return True
        self._free[slot] = None
        entry.is_reused = True
        self._touch(key)
        return False

    # -- finding and reading ---------------------------------------------------------------------

    def __contains__(self, key: ChunkKey) -> bool:
        with self._lock:
            return key in self._entries

    def touch(self, keys: Sequence[ChunkKey], *, is_reuse: bool = True) -> None:
        """A request has the chunks ``keys``: those that are here are used now, and their tail goes before their head.

        Args:
            is_reuse: it begins with them; False: it made them, or has begun with them before.
        """
        with self._lock:
            for key in reversed(keys):
                entry = self._entries.get(key)
                if entry is not None:
                    entry.is_reused |= is_reuse
                    self._touch(key)

    def is_reused(self, key: ChunkKey) -> bool:
        """Whether a request has used the chunk since the one that made it."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and entry.is_reused

    def slot_of(self, key: ChunkKey) -> int | None:
        """Slot of a chunk, which it may lose at any time; None if it is not here."""
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else entry.slot

    def pin(self, key: ChunkKey) -> int | None:
        """Slot of a chunk, kept in place until :meth:`unpin`; None if it is not here.

        This counts as no use: a reader pins a prefix from its head on, so the head would be evicted first.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if not entry.pins:
                self._pinned += 1
                self._pinned_dirty += key in self._dirty
            entry.pins += 1
            return entry.slot

    def unpin(self, key: ChunkKey, slot: int) -> None:
        """Undo one :meth:`pin` that returned ``slot``."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.slot != slot:
                entry = self._orphans[slot]
            entry.pins -= 1
            if entry.pins:
                return
            if self._orphans.pop(slot, None) is None:
                self._pinned -= 1
                self._pinned_dirty -= key in self._dirty
            else:
                self._free[slot] = None

    # -- demotion --------------------------------------------------------------------------------

    def dirty_info(self, key: ChunkKey) -> ChunkInfo | None:
        """Identity of a chunk that still has to be written, else None."""
        with self._lock:
            entry = self._dirty.get(key)
            return None if entry is None else entry.info

    def oldest_dirty(self, count: int, *, pinned: bool = True) -> list[ChunkInfo]:
        """Up to ``count`` chunks that still have to be written, least recently used first; ``pinned`` ones, too."""
        with self._lock:
            found = (entry.info for entry in self._dirty.values() if pinned or not entry.pins)
            return list(itertools.islice(filter(None, found), count))

    def mark_clean(self, key: ChunkKey, slot: int) -> None:
        """The chunk in ``slot``, still pinned, is on disk now, or could not be written: it may be evicted.

        Nothing happens to one of that name that came after everything was forgotten.
        """
        with self._lock:
            if key in self._dirty and self._entries[key].slot == slot:
                self._set_clean(key)

    def disk_opened(self, is_on_disk: Callable[[ChunkKey], bool]) -> None:
        """There is a disk tier from now on: what is here already has to be written, but for what is on it."""
        with self._lock:
            self.keep_dirty = True
            keys = [key for key, _ in self._oldest_clean()]
        stored = set(filter(is_on_disk, keys))  # which takes a while
        with self._lock:
            for key, entry in ((key, self._entries[key]) for key in keys if key in self._entries):
                if key not in stored:
                    self._set_dirty(key, entry)

    def mark_dirty(self, keys: Iterable[ChunkKey]) -> None:
        """Those of ``keys`` that are here are not on disk, whatever was thought: they have to be written."""
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    self._set_dirty(key, entry)

    def _set_dirty(self, key: ChunkKey, entry: _Entry) -> None:
        if entry.info is not None and key not in self._dirty:
            self._leave_clean(key)
            self._dirty[key] = entry
            self._pinned_dirty += entry.pins > 0

    def _set_clean(self, key: ChunkKey) -> None:
        self._written[key] = entry = self._dirty.pop(key)
        self._pinned_dirty -= entry.pins > 0

    def give_up_dirty(self) -> None:
        """No chunk that is here need be written to disk: they stay until their slots are wanted."""
        with self._lock:
            self._observer.count("host.chunks_outdated", len(self._dirty))
            for key in list(self._dirty):
                self._set_clean(key)
            for entry in self._entries.values():
                entry.info = None

    def forget_all(self) -> None:
        """Drop every sealed chunk; pinned slots are freed when their last reader is done."""
        with self._lock:
            for entry in reversed(self._entries.values()):
                if entry.pins:
                    self._orphans[entry.slot] = entry
                else:
                    self._free[entry.slot] = None
            for kept in (self._entries, self._used, self._written, self._dirty):
                kept.clear()
            self._pinned = self._pinned_dirty = 0
            self.generation += 1

    def _touch(self, key: ChunkKey) -> None:
        entry = self._entries[key]
        self.uses += 1
        entry.last_use = self.uses
        if key in self._dirty:
            self._dirty.move_to_end(key)
        else:
            self._written.pop(key, None)
            self._used[key] = entry
            self._used.move_to_end(key)

    def _leave_clean(self, key: ChunkKey) -> None:
        for queue in (self._used, self._written):
            queue.pop(key, None)

    def _oldest_clean(self) -> Iterator[tuple[ChunkKey, _Entry]]:
        """Least recently used first. Nothing may come or go meanwhile."""
        return heapq.merge(self._used.items(), self._written.items(), key=lambda item: item[1].last_use)

    # -- numbers ---------------------------------------------------------------------------------

    def counts(self, *, pinned: bool = True) -> SlotCounts:
        """How many slots are used for what.

        Args:
            pinned: also those that stay as they are, whoever wants a slot.
        """
        with self._lock:
            clean, dirty = len(self._used) + len(self._written), len(self._dirty)
            if not pinned:
                clean -= self._pinned - self._pinned_dirty
                dirty -= self._pinned_dirty
            return SlotCounts(len(self._free), clean, dirty)
