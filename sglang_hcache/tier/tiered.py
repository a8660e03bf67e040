"""Both tiers behind one interface: the only thing ``capture`` and ``restore`` talk to.

A background thread, the demoter, moves chunks from the host to the disk tier: those whose device copy is
gone (:meth:`TieredStore.demote`), all of them as they are sealed (``write_through``), and the least recently
used ones when host slots run short. The serving thread only ever touches memory, whatever the disk does.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.errors import StoreError, StoreFullError, TierMissError
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import StateLayout
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.store import DiskStore, ReadLease, Run, StoreStats
from sglang_hcache.tier.chunk import ChunkInfo, form_runs
from sglang_hcache.tier.host import HostTier

logger = logging.getLogger(__name__)

_SPARE_FRACTION = 8  # the demoter keeps one in so many host slots free or clean
_DEMOTER_TICK_S = 0.5
_RESERVE_S = 0.5
_CLOSE_S = 3.0
_MOST_REQUESTS = 4096  # each holds the tokens of an evicted prefix

HOST, DISK = "host", "disk"


class ChunkSource(Protocol):
    """Computes the keys of chunks to demote; called on the demoter's thread."""

    def __call__(self) -> Iterable[ChunkKey]: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """Chunks [first, first + count) of a lease, all in one tier."""

    first: int
    count: int
    held: tuple[int, ...] | ReadLease
    """Host slots, or a lease of the disk tier."""


@dataclass(slots=True)
class ChunkLease:
    """Consecutive chunks of one prefix, held in their tiers until closed. Close it from any thread."""

    keys: tuple[ChunkKey, ...]
    sources: tuple[str, ...]
    """``HOST`` or ``DISK`` for each key."""
    _parts: tuple[_Part, ...]
    _holds: ExitStack

    def close(self) -> None:
        """Let the chunks go. Idempotent."""
        self._holds.close()

    def __enter__(self) -> ChunkLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TieredStore:
    """Host tier over an optional disk tier.

    Args:
        host: the host tier.
        disk: the disk tier, or None to run without one.
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
    ) -> None:
        self.host = host
        self.disk = disk
        self.layout: StateLayout = host.layout
        self._observer = observer
        self._write_through = write_policy is WritePolicy.WRITE_THROUGH
        self._may_warn = Throttle()
        self._run_chunks = run_chunks
        self._spare_slots = max(1, host.num_slots // _SPARE_FRACTION)
        lock = threading.Lock()
        self._wake = threading.Condition(lock)  # the demoter has work
        self._freed = threading.Condition(lock)  # the demoter has made slots clean
        self._requests: deque[ChunkSource] = deque()
        self._demoter_keeps_up = True
        self._busy = False
        self._clearing = False
        self._stopping = False
        self._disk_stats = disk.stats() if disk is not None else None
        self._demoter = threading.Thread(target=self._demote_forever, name="hcache-demoter", daemon=True)
        if disk is not None:
            self._demoter.start()

    # -- saving ----------------------------------------------------------------------------------

    def reserve(self) -> int | None:
        """A host slot to fill, or None. Waits a moment for the demoter, so not for the serving thread.

        The caller passes it to :meth:`seal` or gives it back to ``host.release``.
        """
        slot = self.host.reserve()
        if slot is not None or self.disk is None or not self._demoter_keeps_up:
            return slot
        deadline = time.monotonic() + _RESERVE_S
        with self._freed:
            while slot is None and (left := deadline - time.monotonic()) > 0:
                self._wake.notify()
                self._freed.wait(left)
                slot = self.host.reserve()
            # A disk that hangs must not hold up every chunk; its next completed run ends this.
            self._demoter_keeps_up = slot is not None
        return slot

    def seal(self, slot: int, info: ChunkInfo) -> None:
        """Publish the filled host ``slot`` as ``info``. Never waits for I/O."""
        if not self.host.seal(slot, info, on_disk=self._is_on_disk(info.key)):
            self._observer.count("host.duplicate_chunks")
            return
        self._observer.count("host.chunks_sealed")
        if self._write_through:
            self.demote(lambda: (info.key,))
        elif self._is_short_of_slots():
            self._notify()

    def demote(self, keys: ChunkSource) -> None:
        """The chunks named by ``keys()`` left the device: write those that exist only in host memory."""
        if self.disk is None:
            return
        with self._wake:
            if len(self._requests) == _MOST_REQUESTS:
                # The disk does not keep up. Those chunks stay dirty, and go when slots run short.
                self._observer.count("demote.requests_dropped")
                return
            self._requests.append(keys)
            self._wake.notify()

    def demote_all(self) -> None:
        """Write every chunk that exists only in host memory."""
        self.demote(lambda: [info.key for info in self.host.oldest_dirty(self.host.num_slots)])

    # -- finding and reading ---------------------------------------------------------------------

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.host or self._is_on_disk(key)

    def _is_on_disk(self, key: ChunkKey) -> bool:
        return self.disk is not None and not self._clearing and self.disk.contains(key)

    def match(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading ``keys`` are in some tier. Memory only."""
        for count, key in enumerate(keys):
            if key not in self:
                return count
        return len(keys)

    def lease(self, keys: Sequence[ChunkKey]) -> ChunkLease:
        """Hold ``keys`` where they are.

        Raises:
            TierMissError: one of them is gone; nothing is held then.
        """
        with ExitStack() as holds:
            slots = [self._pin(key, holds) for key in keys]
            parts = []
            for first, stop in _groups([slot is None for slot in slots]):
                held: tuple[int, ...] | ReadLease = tuple(s for s in slots[first:stop] if s is not None)
                if not held:
                    held = holds.enter_context(self._visible_disk(keys[first]).lease(tuple(keys[first:stop])))
                parts.append(_Part(first, stop - first, held))
            sources = tuple(DISK if slot is None else HOST for slot in slots)
            return ChunkLease(tuple(keys), sources, tuple(parts), holds.pop_all())

    def _pin(self, key: ChunkKey, holds: ExitStack) -> int | None:
        slot = self.host.pin(key)
        if slot is not None:
            holds.callback(self.host.unpin, key, slot)
        return slot

    def _visible_disk(self, key: ChunkKey) -> DiskStore:
        if self.disk is None or self._clearing:
            raise TierMissError(f"chunk {key.hex()[:16]} is in no tier any more")
        return self.disk

    def read_layer(self, lease: ChunkLease, layer: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill ``out`` (uint8, 1-D, ``len(lease.keys)`` chunks of the layer) with one layer of all leased chunks.

        Raises:
            StoreError: the disk failed or its bytes are wrong.
        """
        size = self.layout.chunk_layer_bytes[layer]
        for part in lease._parts:
            target = out[part.first * size : (part.first + part.count) * size]
            if isinstance(part.held, tuple):
                self.host.read_layer(part.held, layer, target.reshape(part.count, size))
            else:
                assert self.disk is not None
                self.disk.read_layer(part.held, layer, target)

    # -- the demoter -----------------------------------------------------------------------------

    @property
    def is_saving(self) -> bool:
        """Whether the demoter has work."""
        with self._wake:
            return self._busy or self._clearing or bool(self._requests)

    @property
    def disk_stats(self) -> StoreStats | None:
        """The disk tier's numbers as the demoter saw them last, at most a moment ago; None without a disk tier."""
        return self._disk_stats

    def flush(self, timeout_s: float) -> bool:
        """Write all chunks that exist only in host memory; False if time ran out first."""
        if self.disk is None:
            return True
        self.demote_all()
        deadline = time.monotonic() + timeout_s
        while self.is_saving:
            if time.monotonic() > deadline or not self._demoter.is_alive():
                return False
            time.sleep(0.005)
        return True

    def clear(self) -> None:
        """Empty both tiers. The disk's chunks are misses at once; the demoter removes their files."""
        with self._wake:
            self._requests.clear()
            self._clearing = self.disk is not None
            self._wake.notify()
        self.host.forget_all()

    def close(self) -> None:
        """Stop the demoter after the run it writes and close the disk tier. Idempotent; bounded if the disk hangs."""
        with self._wake:
            self._stopping = True
            self._requests.clear()
            self._wake.notify()
        if self._demoter.is_alive():
            self._demoter.join(_CLOSE_S)
        if self.disk is not None:
            self.disk.close()

    def _is_short_of_slots(self) -> bool:
        free, clean, dirty = self.host.counts()
        return bool(dirty) and free + clean < self._spare_slots

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _clear_disk(self) -> None:
        assert self.disk is not None
        self.disk.clear()
        with self._wake:
            self._clearing = False

    def _demote_forever(self) -> None:
        assert self.disk is not None
        while True:
            with self._wake:
                self._busy = False
                while not (self._requests or self._stopping or self._clearing or self._is_short_of_slots()):
                    self._wake.wait(_DEMOTER_TICK_S)
                if self._stopping:
                    return
                self._busy = True
                requests = [self._requests.popleft() for _ in range(len(self._requests))]
            try:
                if self._clearing:
                    self._clear_disk()
                self._demote_once(requests)
                self._disk_stats = self.disk.stats()
            except Exception:
                # The demoter must outlive anything: what could not be written stays in host memory or is dropped.
                logger.exception("hcache: demotion failed")
                self._observer.count("demote.errors")
                time.sleep(_DEMOTER_TICK_S)

    def _demote_once(self, requests: Sequence[Callable[[], Iterable[ChunkKey]]]) -> None:
        chunks = {
            info.key: info
            for request in requests
            for key in request()
            if (info := self.host.dirty_info(key)) is not None
        }
        if self._is_short_of_slots():
            oldest = self.host.oldest_dirty(max(self._spare_slots, self._run_chunks))
            chunks.update((info.key, info) for info in oldest)
        for run in form_runs(chunks.values(), self._run_chunks):
            if self._stopping or self._clearing:
                return
            self._write_run(run)

    def _write_run(self, run: Sequence[ChunkInfo]) -> None:
        """Write one run; a chunk that cannot be written is given up, so that its slot can be used again."""
        assert self.disk is not None
        pinned = [(info, slot) for info in run if (slot := self.host.pin(info.key)) is not None]
        try:
            fresh = [(info, slot) for info, slot in pinned if not self.disk.contains(info.key)]
            for piece in _consecutive(fresh):
                if self._clearing:
                    return
                infos, slots = zip(*piece, strict=True)
                self._write_piece(infos, slots)
        except StoreFullError:
            self._observer.count("demote.chunks_dropped_full", len(pinned))
        except StoreError as error:
            if self._may_warn():
                logger.warning(
                    "hcache: %d chunks could not be demoted, now and perhaps more: %s", len(pinned), error
                )
            self._observer.count("demote.chunks_dropped_error", len(pinned))
        finally:
            for info, slot in pinned:
                self.host.unpin(info.key, slot)
                self.host.mark_clean(info.key)
            with self._freed:
                self._demoter_keeps_up = True
                self._freed.notify_all()

    def _write_piece(self, infos: Sequence[ChunkInfo], slots: Sequence[int]) -> None:
        assert self.disk is not None
        run = Run(
            namespace_id=infos[0].namespace_id,
            keys=tuple(info.key for info in infos),
            first_chunk=infos[0].index,
            chunk_layer_bytes=self.layout.chunk_layer_bytes,
        )
        self.disk.write_run(run, lambda layer: [self.host.layer_of(slot, layer) for slot in slots])
        self._observer.count("demote.chunks_written", len(infos))


def _groups(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Half-open intervals of equal neighbours."""
    cuts = [index for index in range(1, len(flags)) if flags[index] != flags[index - 1]]
    bounds = [0, *cuts, len(flags)] if flags else [0]
    return list(itertools.pairwise(bounds))


def _consecutive(chunks: Sequence[tuple[ChunkInfo, int]]) -> list[list[tuple[ChunkInfo, int]]]:
    """Split where a chunk in the middle is on disk already."""
    pieces: list[list[tuple[ChunkInfo, int]]] = []
    for item in chunks:
        if pieces and pieces[-1][-1][0].key == item[0].parent:
            pieces[-1].append(item)
        else:
            pieces.append([item])
    return pieces
