"""Both tiers behind one interface.

Chunks are demoted by a background thread: those whose device copy is gone (:meth:`TieredStore.demote`), all of
them as they are sealed (``write_through``), and the least recently used ones when host slots run short. The
serving thread only ever touches memory, whatever the disk does.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.errors import TierMissError
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import StateLayout
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.stretches import stretches
from sglang_hcache.store import DiskStore, ReadLease, StoreStats
from sglang_hcache.tier.chunk import ChunkInfo, Ghosts
from sglang_hcache.tier.demoter import ChunkSource, Demoter
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.late_disk import LateDisk
from sglang_hcache.tier.promotion import Promoter, Promotion

logger = logging.getLogger(__name__)

HOST, DISK = "host", "disk"

Pieces: TypeAlias = tuple[tuple[int, int], ...]
"""Host slots [first, first + count), in order."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Chunks [first, first + count) of a lease, all in one tier."""

    first: int
    count: int
    held: tuple[int, ...] | ReadLease
    """Host slots, or a lease of the disk tier."""
    promotion: Promotion | None = None
    """Keeps what is read from the disk in host memory as well; None: that is not done."""


@dataclass(slots=True)
class ChunkLease:
    """Consecutive chunks of one prefix, held in their tiers until closed. Close it from any thread."""

    keys: tuple[ChunkKey, ...]
    sources: tuple[str, ...]
    """``HOST`` or ``DISK`` for each key."""
    _parts: tuple[_Part, ...]
    _holds: ExitStack
    _pieces: Pieces = ()
    """That hold all chunks; empty if one is on disk."""

    @property
    def is_in_place(self) -> bool:
        """Whether nothing need be read: all chunks are in host memory."""
        return bool(self._pieces)

    @property
    def copied_s(self) -> float:
        """Seconds, of all reading threads together, in which what was read was copied to host memory as well."""
        return sum(part.promotion.copied_s for part in self._parts if part.promotion is not None)

    def close(self) -> None:
        """Let the chunks go. Idempotent."""
        self._holds.close()

    def __enter__(self) -> ChunkLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TieredStore:
    """Host tier over an optional disk tier.

    Args:
        host: the host tier.
        disk: the disk tier, or None to run without one.
        left_out: of a disk tier that could not be opened, and that the server does without for now.
        open_late: tries to open that one again.
        run_chunks: most chunks of one disk run.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskStore | None,
        observer: Observer,
        *,
        write_policy: WritePolicy,
        run_chunks: int,
        left_out: StoreStats | None = None,
        open_late: Callable[[], DiskStore] | None = None,
    ) -> None:
        self.host = host
        self.disk = disk
        self._left_out = left_out
        self._clears_late = False
        """What the disk tier that is left out holds must not be back."""
        self.layout: StateLayout = host.layout
        self._observer = observer
        self._promoter = Promoter(host, observer)
        self._ghosts = Ghosts()
        host.on_evicted = self._left_host
        self._demoter: Demoter | None = None
        self._write_through = write_policy is WritePolicy.WRITE_THROUGH
        self._run_chunks = run_chunks
        self._attaching = threading.Lock()
        self._late = None if open_late is None else LateDisk(open_late, self._attach, self._still_left_out)
        if disk is not None:
            self._demoter = self._new_demoter(disk)

    def _new_demoter(self, disk: DiskStore) -> Demoter:
        disk.on_evicted(self._ghosts.add)
        return Demoter(self.host, disk, self._observer, self._run_chunks, lambda: self._write_through)

    def _attach(self, disk: DiskStore) -> None:
        """A disk tier that was left out is open now. On a thread of its own, while others use the tiers."""
        with self._attaching:
            demoter = self._new_demoter(disk)
            if self._clears_late:
                demoter.clear_disk()
            # In this order: who sees the disk asks whether it is cleared.
            self._demoter, self._clears_late, self.disk = demoter, False, disk
            self.host.disk_opened(self._is_on_disk)
        logger.info("hcache: the disk tier is open now, with %d chunks in it", disk.stats().chunks)

    def _still_left_out(self, why: str) -> None:
        with self._attaching:
            if self._left_out is not None:
                self._left_out = self._left_out.still_not_opened(why)

    @property
    def may_have_disk(self) -> bool:
        """Whether there is a disk tier, or will be."""
        return self.disk is not None or self._late is not None

    # -- saving ----------------------------------------------------------------------------------

    def reserve(self, behind: int | None = None) -> int | None:
        """A host slot to fill, or None. Waits a moment for the demoter, so not for the serving thread.

        The caller passes it to :meth:`seal` or gives it back to ``host.release``.

        Args:
            behind: the slot of the chunk before it.
        """
        slot = self.host.reserve(behind)
        if slot is not None or self._demoter is None:
            return slot
        return self._demoter.wait_for_slot()

    def seal(self, slot: int, info: ChunkInfo) -> None:
        """Publish the filled host ``slot`` as ``info``. Never waits for I/O."""
        if not self.host.seal(slot, info, on_disk=self._is_on_disk(info.key)):
            self._observer.count("host.duplicate_chunks")
            return
        self._observer.count("host.chunks_sealed")
        if self._demoter is not None:
            self._demoter.look()

    def demote(self, keys: ChunkSource, num_tokens: int = 0) -> None:
        """The chunks named by ``keys()`` left the device: write those that exist only in host memory.

        Args:
            num_tokens: that ``keys`` holds in memory.
        """
        if self._demoter is not None:
            self._demoter.request(keys, num_tokens)

    def demote_all(self) -> None:
        """Write every chunk that exists only in host memory."""
        self.demote(lambda: [info.key for info in self.host.oldest_dirty(self.host.num_slots)])

    def write_from_now_on(self) -> None:
        """As ``write_through`` does, also what is there already. Takes no lock: a signal's handler may call it."""
        self._write_through = True

    def give_up_dirty(self) -> None:
        """Write no chunk that exists only in host memory now. Those that are being written are."""
        self.host.give_up_dirty()

    # -- finding and reading ---------------------------------------------------------------------

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.host or self._is_on_disk(key)

    def _is_on_disk(self, key: ChunkKey) -> bool:
        return self.disk is not None and not self.is_clearing and self.disk.contains(key)

    def match(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading ``keys`` are in some tier. Looks into memory only."""
        for count, key in enumerate(keys):
            if key not in self:
                return count
        return len(keys)

    def on_host(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of ``keys``, all of them in some tier, would not be read from the disk. Memory only."""
        return [key in self.host for key in keys]

    def was_evicted(self, key: ChunkKey) -> bool:
        """Whether a chunk that is in no tier was in one, and left the last one for want of room. Memory only."""
        return key in self._ghosts

    def _left_host(self, key: ChunkKey) -> None:
        if not self._is_on_disk(key):
            self._ghosts.add(key)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """A request begins with the chunks ``keys``, wherever they are: they are worth keeping. Memory only."""
        self.host.touch(keys)
        if self.disk is None or self._demoter is None:
            return
        self.disk.touch(keys)
        # Written once, and lost with a disk, or refused when the write budget was short: now it is worth a write. But
        # what was deleted for its age must not come back.
        if self._demoter.takes_writes and not self.disk.has_max_age:
            self.host.mark_dirty([key for key in reversed(keys) if not self.disk.contains(key)])

    def lease(self, keys: Sequence[ChunkKey], *, promote: bool = False) -> ChunkLease:
        """Hold ``keys`` where they are.

        Args:
            promote: every layer of them will be read, once, for a request: what comes from the disk again and again
                may come to host memory on the way.

        Raises:
            TierMissError: one of them is gone; nothing is held then.
        """
        with ExitStack() as holds:
            slots = [self._pin(key, holds) for key in keys]
            parts = []
            for first, stop in _groups([slot is None for slot in slots]):
                on_host = tuple(slot for slot in slots[first:stop] if slot is not None)
                if on_host:
                    parts.append(_Part(first, stop - first, on_host))
                else:
                    parts.append(self._disk_part(first, tuple(keys[first:stop]), holds, promote))
            sources = tuple(DISK if slot is None else HOST for slot in slots)
            pieces = [] if None in slots else stretches(slot for slot in slots if slot is not None)
            return ChunkLease(tuple(keys), sources, tuple(parts), holds.pop_all(), tuple(pieces))

    def _disk_part(self, first: int, keys: tuple[ChunkKey, ...], holds: ExitStack, promote: bool) -> _Part:
        # First: what is cleared between the two must not come to host memory.
        promotion = self._promoter.begin(keys) if promote else None
        if promotion is not None:
            holds.callback(promotion.close)
        held = holds.enter_context(self._visible_disk(keys[0]).lease(keys))
        return _Part(first, len(keys), held, promotion)

    def _pin(self, key: ChunkKey, holds: ExitStack) -> int | None:
        slot = self.host.pin(key)
        if slot is not None:
            holds.callback(self.host.unpin, key, slot)
        return slot

    @property
    def is_clearing(self) -> bool:
        """Whether what was cleared on disk would be back after a restart now. It counts as gone already."""
        return self._clears_late or (self._demoter is not None and self._demoter.is_clearing)

    def _visible_disk(self, key: ChunkKey) -> DiskStore:
        if self.disk is None or self.is_clearing:
            raise TierMissError(f"chunk {key.hex()[:16]} is in no tier any more")
        return self.disk

    def read_layers(self, lease: ChunkLease, into: Mapping[int, npt.NDArray[np.uint8]]) -> None:
        """Read some layers of all leased chunks.

        Args:
            into: layer -> memory, uint8, 1-D, of ``len(lease.keys)`` chunks of the layer.

        Raises:
            StoreTimeoutError: the disk hangs and may still write to the memory: do not use it again.
            StoreError: the disk failed or its bytes are wrong.
        """
        for part in lease._parts:
            targets = {layer: self._part_of(out, part, layer) for layer, out in into.items()}
            if isinstance(part.held, tuple):
                for layer, target in targets.items():
                    self.host.read_layer(part.held, layer, target.reshape(part.count, -1))
            else:
                assert self.disk is not None
                self.disk.read_layers(part.held, targets)
                if part.promotion is not None:
                    part.promotion.take(targets, part.count)

    def _part_of(self, out: npt.NDArray[np.uint8], part: _Part, layer: int) -> npt.NDArray[np.uint8]:
        size = self.layout.chunk_layer_bytes[layer]
        return out[part.first * size : (part.first + part.count) * size]

    def rows_in_place(self, lease: ChunkLease, layer: int) -> tuple[npt.NDArray[np.uint8], Pieces]:
        """Where one layer of the chunks of a lease is that :attr:`~ChunkLease.is_in_place`.

        Returns:
            The layer in all host slots, (slots, bytes of a chunk's layer), a view; and the slots of the chunks. These
            do not change until the lease is closed.
        """
        return self.host.layer(layer), lease._pieces

    # -- upkeep ----------------------------------------------------------------------------------

    @property
    def is_saving(self) -> bool:
        """Whether the demoter has work."""
        return self._demoter is not None and self._demoter.is_busy

    @property
    def disk_stats(self) -> StoreStats | None:
        """The disk tier's numbers, or of one that is left out; None if nobody wants one."""
        return self._left_out if self.disk is None else self.disk.stats()

    def flush(self, timeout_s: float) -> bool:
        """Write all chunks that exist only in host memory, those that fail again after a rest; False if time ran out
        first.
        """
        deadline = time.monotonic() + timeout_s
        while self._demoter is not None:
            self.demote_all()
            if not self._demoter.wait_until_idle(deadline - time.monotonic()):
                return False
            if not self.host.counts().dirty:
                break
            if not self._demoter.rest(deadline):
                return False
        return True

    def clear(self) -> None:
        """Empty both tiers. The disk's chunks are misses at once; the demoter removes their files.

        Until nothing can be back after a restart, :attr:`is_clearing` is true.
        """
        self.host.forget_all()  # first: what is still there when the disk has been cleared may be written to it
        with self._attaching:
            if self._demoter is not None:
                self._demoter.clear_disk()
            else:
                self._clears_late = self._left_out is not None

    def close(self) -> None:
        """Stop the demoter after the run it writes and close the disk tier. Idempotent; bounded if the disk hangs."""
        if self._late is not None:
            self._late.close()
        if self._demoter is not None:
            self._demoter.close()
        if self.disk is not None:
            self.disk.close()


def _groups(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Half-open intervals of equal neighbours."""
    cuts = [index for index in range(1, len(flags)) if flags[index] != flags[index - 1]]
    bounds = [0, *cuts, len(flags)] if flags else [0]
    return list(itertools.pairwise(bounds))
