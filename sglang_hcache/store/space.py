"""Room on disk: which segment a run goes to, the cap, the free-space floor, eviction."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence

from sglang_hcache.core.errors import StoreError, StoreFullError, StoreLockedError, StoreTimeoutError
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.census import UNSEEN_SEGMENTS
from sglang_hcache.store.config import FILE_SLACK_BYTES, Run, StoreConfig
from sglang_hcache.store.format.geometry import RunShape, ShapeTable, mask_of, members_of
from sglang_hcache.store.format.record import RUN_ID_BYTES
from sglang_hcache.store.format.rows import RunPlace
from sglang_hcache.store.free_space import FreeSpace, Shortage
from sglang_hcache.store.ledger import Ledger
from sglang_hcache.store.removal import Remover
from sglang_hcache.store.retention import Retention
from sglang_hcache.store.returning import Returns
from sglang_hcache.store.segments import Segment, StoredRun
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)

_EVICTIONS_IN_VAIN = 3
"""Segments whose files could not be deleted, before nothing more is evicted in that directory."""
_FLOOR_WARNING_S = 600.0


class Space:
    """Hands out room in segments and takes segments away.

    Its lock is held during file operations and index commits; it is never taken while the catalog's lock
    is held, and nothing on the serving thread waits for it.
    """

    def __init__(
        self,
        config: StoreConfig,
        volumes: Sequence[Volume],
        catalog: Catalog,
        ledger: Ledger,
        shapes: ShapeTable,
        observer: Observer,
    ) -> None:
        self._config = config
        self._volumes = volumes
        self._catalog = catalog
        self._ledger = ledger
        self._shapes = shapes
        self._free_space = FreeSpace(config, volumes, catalog)
        self._remover = Remover(volumes, catalog, ledger, self._free_space, observer)
        self._retention = Retention(config.max_age_s, volumes, catalog, self._remover)
        self._returns = Returns(config, volumes, catalog, ledger, shapes, self._remover, observer)
        self._lock = threading.Lock()
        self._active: Segment | None = None
        self._next_number = 0
        self._rotation = 0
        self._closed = False
        self._time_to_warn = Throttle(_FLOOR_WARNING_S)

    def adopt(self, segments: Iterable[Segment], leftovers: Iterable[Segment], next_number: int) -> None:
        """Take over what was found at start: segments in use, and files nobody needs."""
        with self._lock:
            self._next_number = next_number
            self._take_over(segments)
            self._catalog.set_floor()
            self._retention.enforce()
            self._shed(leftovers)

    def reserve(self, run: Run) -> StoredRun:
        """Room for ``run``, in a new segment if need be. Its segment is pinned until :meth:`Catalog.unpin`.

        Raises:
            StoreFullError: no room can be made.
            StoreIOError: the segment's files cannot be created, or no directory takes writes.
        """
        with self._lock:
            segment = self._active
            if segment is None or not all(
                self._volumes[stripe].health.writable for stripe in segment.members
            ):
                segment = self._renew(run)
            shape = self._shape(run, segment.members)
            if not segment.fits(shape):
                segment = self._renew(run)
                shape = self._shape(run, segment.members)
            self._rotation += 1
            self._catalog.pin_segment(segment)
            place = RunPlace(
                run_id=os.urandom(RUN_ID_BYTES),
                namespace_id=run.namespace_id,
                keys=run.keys,
                first_chunk=run.first_chunk,
                shape=shape,
                segment=segment.number,
                offsets=tuple(segment.used),
            )
            segment.take(place)
            return StoredRun(place, segment, self._catalog.take_run_number())

    def abandon(self, run: StoredRun, error: BaseException) -> None:
        """Give back the room of a run whose writing ended with ``error``; the caller still unpins.

        If its files gave the error, the next run goes to new ones. What is in flight keeps its room, for it may be
        written yet.
        """
        segment = run.segment
        is_in_flight = isinstance(error, StoreTimeoutError) or not isinstance(error, Exception)
        is_of_files = isinstance(error, StoreError) and not isinstance(error, StoreLockedError)
        with self._lock:
            if not is_in_flight:
                segment.give_back(run.place)
            if is_of_files and segment is self._active:
                self._seal_active()
            if not segment.runs and (segment is not self._active or not any(segment.used)):
                self._active = None if segment is self._active else self._active
                self._remover.retire(segment, only_unpinned=False)
            if isinstance(error, StoreFullError):
                self._evict_where_full(segment.members)

    def evict_one(self) -> bool:
        """Remove the least dear segment; False if none can go."""
        with self._lock:
            return self._remover.evict_coldest()

    def tend(self) -> None:
        """In the background: delete what could not be deleted, and what is too old; keep the floor; make room."""
        with self._lock:
            if self._closed:
                return
            self._remover.retry()
            if self._active is not None and self._retention.is_filled(self._active):
                self._seal_active()
            self._retention.enforce()
            # Also where that is not enough: whoever filled the disk is helped by what the tier gives back.
            everywhere = range(len(self._volumes))
            if (shortages := self._free_space.shortages(0, everywhere)) and self._time_to_warn():
                _warn_about_floor(shortages, self._volumes, self._config.free_floor_bytes)
            self._keep_floor(0, everywhere)
            members = self._next_members()
            if members:
                self._make_room(self._config.file_bytes, members)

    def reconcile(self, volume: Volume) -> None:
        """A directory is back: segments that lost their file there or were cleared go, and files of no segment.

        Raises:
            StoreError, OSError: it fails again.
        """
        with self._lock:
            self._next_number = max(self._next_number, self._returns.compare(volume))
            if self._active is not None and self._active.retired:
                self._active = None

    def rejoin(self) -> None:
        """Serve what could not be put together before, if the directories are there now. Raises StoreError."""
        with self._lock:
            segments, leftovers = self._returns.rejoin()
            self._take_over(segments)
            self._shed(leftovers)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove the segments that hold ``keys``, with all else in them, unless they are in use."""
        with self._lock:
            for segment in self._catalog.holding(keys):
                if segment is self._active:
                    self._seal_active()
                self._remover.retire(segment, only_unpinned=True)

    def clear(self) -> None:
        """Remove every segment, those in use as soon as they are unpinned."""
        with self._lock:
            if not all(volume.health.readable for volume in self._volumes):
                self._next_number += UNSEEN_SEGMENTS
            self._active = None
            # First, for it is one short write: who is killed meanwhile starts empty too.
            self._ledger.void_before(self._next_number)
            for segment in self._catalog.segments():
                self._remover.retire(segment, only_unpinned=False)

    def reserved_bytes(self) -> int:
        """What counts against the cap, the index's part included."""
        with self._lock:
            return self._used_bytes() + self._config.index_reserve_bytes

    def close(self) -> None:
        """Trim the active segment. Files of segments still pinned are left for the next start to remove."""
        with self._lock:
            self._seal_active()
            self._closed = True

    # -- new segments ----------------------------------------------------------------------------

    def _shape(self, run: Run, members: tuple[int, ...]) -> RunShape:
        return self._shapes.get(len(run.keys), run.chunk_layer_bytes, members, self._rotation % len(members))

    def _renew(self, run: Run) -> Segment:
        """Seal the active segment and begin another, in every directory that takes writes and has room."""
        self._seal_active()
        members = self._next_members()
        if not any(self._volumes[stripe].health.writable for stripe in members):
            raise self._free_space.why_none()
        largest = max(self._shapes.get(len(run.keys), run.chunk_layer_bytes, members, 0).part_bytes)
        file_bytes = max(self._config.file_bytes, largest)
        lacking = self._make_room(file_bytes, members)
        if lacking:
            raise StoreFullError(lacking)
        segment = Segment(self._next_number, self._volumes, members, file_bytes)
        self._next_number += 1
        try:
            segment.create()
        except StoreError as error:
            if segment.accounted_bytes:
                segment.retired = True
                self._remover.leftovers.add(segment)
            if isinstance(error, StoreFullError):
                self._evict_where_full(members)
            raise
        self._catalog.add_segment(segment)
        self._active = segment
        return segment

    def _next_members(self) -> tuple[int, ...]:
        """Directories for the next segment: those with room, after evicting the coldest where none has any.

        Not those where room could be made as well: else all would hold no more than the one with the least room.
        Those that take no writes only if no other could: they may again when they have room.
        """
        while True:
            usable = self._free_space.usable(self._config.file_bytes)
            possible = {stripe for stripe in usable.by_eviction if self._volumes[stripe].health.writable}
            possible = possible or {*usable.by_eviction}
            members = tuple(stripe for stripe in usable.now if stripe in possible)
            if members or not possible or not possible.isdisjoint(usable.soon):
                return members
            if not self._evict_to_gain(mask_of(possible)):
                return ()

    def _make_room(self, file_bytes: int, members: Sequence[int]) -> str:
        """Evict until a segment in ``members`` fits cap and floor; says why it does not fit, if so."""
        need = file_bytes + FILE_SLACK_BYTES
        over = self._used_bytes() + need * len(members) - self._config.segments_budget_bytes
        if over > sum(self._free_space.freeable().values()):
            return (
                f"the disk tier is full: {format_bytes(self._config.size_bytes)} (--hcache-disk-size), and "
                "nothing can be evicted now"
            )
        while self._used_bytes() + need * len(members) > self._config.segments_budget_bytes:
            if not self._evict_to_gain():
                return "nothing can be evicted now"
        if not self._keep_floor(need, members):
            return f"the floor of {format_bytes(self._config.free_floor_bytes)} (--hcache-disk-free-floor)"
        return ""

    def _keep_floor(self, need: int, members: Iterable[int]) -> bool:
        """Evict where less than the floor and ``need`` for each of ``members`` is free; False if that is not enough.

        No more than one look found missing: some file systems show what was deleted seconds later.
        """
        while shortages := self._free_space.shortages(need, members):
            made_up = [self._evict_to_free(item) for item in shortages if item.missing > 0]
            if not made_up or not all(made_up):
                return False
        return True

    def _evict_where_full(self, members: Iterable[int]) -> None:
        """A device is full though its file system shows room (a quota, no inodes left): one segment there goes.

        How often that happens is bounded by how often the directory is tried again.
        """
        full = [stripe for stripe in members if self._volumes[stripe].health.is_full]
        if full:
            self._evict_to_gain(mask_of(full))

    def _evict_to_free(self, shortage: Shortage) -> bool:
        """Evict until so much was deleted since the look; False if that is not possible."""
        while self._free_space.deleted_in(shortage.mask) < shortage.missing:
            if not self._evict_to_gain(shortage.mask):
                return False
        return True

    def _evict_to_gain(self, within: int = -1) -> bool:
        """Evict until something is gained ``within`` directories; False if nothing is.

        A device that fails must not cost the whole cache: what is gained on another one does not count, and nothing
        more goes where files stay.
        """
        within &= ~self._remover.stuck(_EVICTIONS_IN_VAIN)
        for _ in range(_EVICTIONS_IN_VAIN):
            before = self._free_space.deleted_in(within)
            if not self._remover.evict_coldest(within):
                return False
            if self._free_space.deleted_in(within) > before:
                return True
        return False

    # -- what was found --------------------------------------------------------------------------

    def _take_over(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            self._trim(segment)
            self._catalog.add_segment(segment)

    def _shed(self, leftovers: Iterable[Segment]) -> None:
        """Delete files that nobody needs, then what the cap has no room for."""
        for segment in leftovers:
            segment.measure()
            self._remover.remove(segment)
        while self._used_bytes() > self._config.segments_budget_bytes and self._evict_to_gain():
            pass

    def _seal_active(self) -> None:
        segment, self._active = self._active, None
        if segment is not None:
            segment.sealed = True
            self._trim(segment)

    def _trim(self, segment: Segment) -> None:
        try:
            segment.trim()
        except StoreError as error:
            logger.warning("hcache: could not trim segment %d: %s", segment.number, error)

    def _used_bytes(self) -> int:
        """Sum over segments in use and files that could not be removed."""
        in_use = sum(segment.accounted_bytes for segment in self._catalog.segments())
        return in_use + self._remover.leftover_bytes


def _warn_about_floor(shortages: Sequence[Shortage], volumes: Sequence[Volume], floor_bytes: int) -> None:
    logger.warning(
        "hcache: less than %s (--hcache-disk-free-floor) is free on the disk of %s: what the tier holds there "
        "is given up, and nothing new is stored there until more is free",
        format_bytes(floor_bytes),
        ", ".join(str(volumes[stripe].path) for item in shortages for stripe in members_of(item.mask)),
    )
