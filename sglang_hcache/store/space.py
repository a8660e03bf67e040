"""Room on disk: which segment a run goes to, and what becomes of segments."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from sglang_hcache.core.errors import (
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreTimeoutError,
)
from sglang_hcache.core.observer import Observer
from sglang_hcache.store import reconciler, retention
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.census import Files
from sglang_hcache.store.config import FILE_SLACK_BYTES, Run, StoreConfig
from sglang_hcache.store.erasure import Erased, erase
from sglang_hcache.store.eviction import Eviction
from sglang_hcache.store.format.geometry import RunShape, shape_of
from sglang_hcache.store.format.place import RUN_ID_BYTES, RunPlace
from sglang_hcache.store.free_space import FreeSpace
from sglang_hcache.store.removal import Remover
from sglang_hcache.store.saved import SavedState
from sglang_hcache.store.segments import Segment, StoredRun
from sglang_hcache.store.volumes.volume import Volume

_VOIDED_SEGMENTS = 2**34
"""Far more than starts without a directory add to its numbers: a clearing voids all that it may hold."""

logger = logging.getLogger(__name__)


class Space:
    """Hands out room in segments and takes segments away.

    Its lock is held during file operations; it is never taken while the catalog's lock
    is held, and nothing on the serving thread waits for it.
    """

    def __init__(
        self,
        config: StoreConfig,
        volumes: Sequence[Volume],
        catalog: Catalog,
        saved: SavedState,
        observer: Observer,
    ) -> None:
        self._config = config
        self._volumes = volumes
        self._catalog = catalog
        self._saved = saved
        free_space = FreeSpace(config, volumes, catalog)
        self._remover = Remover(volumes, catalog, free_space, observer, saved.announce)
        self._eviction = Eviction(config, volumes, catalog, self._remover, free_space)
        self._observer = observer
        self._lock = threading.Lock()
        self._active: Segment | None = None
        self._next_number = 0
        self._rotation = 0
        self._closed = False

    def adopt(self, segments: Mapping[int, Segment], files: Files, next_number: int) -> None:
        """Take over what was found at start: segments by number; of the files nobody needs those of no segment."""
        with self._lock:
            self._next_number = next_number
            for segment in segments.values():
                self._trimmed(segment, segment.tidy)
                self._catalog.add_segment(segment)
            self._catalog.set_floor()
            retention.enforce(self._config.max_age_s, self._catalog, self._remover)
            for number in files.numbers():
                members = segments[number].members if number in segments else ()
                for stripe, file in files.of(number).items():
                    if stripe not in members:
                        self._remover.remember_stray(stripe, number, file)
            self._remover.retry()  # of thousands, as a clearing that was killed leaves them, the rest goes later
            self._eviction.restore_cap()

    def reserve(self, run: Run) -> StoredRun:
        """Room for ``run``, in a new segment if need be. Its segment is pinned until :meth:`Catalog.unpin`.

        Raises:
            StoreFullError: no room can be made.
            StoreIOError: the segment's files cannot be created, or no directory takes writes.
        """
        with self._lock:
            segment = self._active
            if (
                segment is None
                or not all(self._volumes[stripe].health.writable for stripe in segment.members)
                or not segment.fits(self._shape(run, segment.members))
            ):
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
            segment.written_s = max(segment.written_s, time.time())  # never back: the clock may be set
            return StoredRun(place, segment)

    def abandon(self, run: StoredRun, error: BaseException) -> None:
        """Give back the room and the pin of a run whose writing ended with ``error``.

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
            is_used = segment.runs or segment.pins > 1  # another run is being written to it
            if not is_used and (segment is not self._active or not any(segment.used)):
                self._active = None if segment is self._active else self._active
                self._remover.retire(segment)
            if isinstance(error, StoreError):
                self._eviction.relieve(segment.members)
            if self._catalog.unpin([segment]):
                self._remover.retry()

    def on_evicted(self, tell: Callable[[bytes], object]) -> None:
        """Call ``tell`` for each chunk that is evicted from now on, while the lock is held."""
        self._remover.on_evicted = tell

    def evict_one(self) -> bool:
        """Remove the segment with the lowest score; False if none can go, or files cannot be deleted."""
        with self._lock:
            return self._remover.evict_coldest(~self._remover.stopped())

    def delete_leftovers(self) -> None:
        """Delete all files of no segment, however long that takes."""
        with self._lock:
            self._remover.retry(math.inf)

    def leftover_files(self) -> list[Path]:
        """Of retired segments: what could not be deleted, or is in use."""
        with self._lock:
            return [path for segment in self._remover.leftovers for path in segment.paths_left()]

    def relieve(self, stripes: Iterable[int]) -> None:
        """These directories are full: see :meth:`Eviction.relieve`."""
        with self._lock:
            self._eviction.relieve(stripes)

    def tend(self) -> None:
        """In the background: delete what could not be deleted, and what is too old; keep cap and floor; make room."""
        with self._lock:
            if self._closed:
                return
            self._remover.retry()
            if self._active is not None and retention.is_filled(self._active, self._config.max_age_s):
                self._seal_active()
            retention.enforce(self._config.max_age_s, self._catalog, self._remover)
            # Not before a directory that is back can be written to: else what the others hold goes instead.
            self._eviction.restore_cap()
            self._eviction.restore_floor()
            members = self._eviction.next_members(self._config.file_bytes)
            if members:
                self._eviction.make_room(self._config.file_bytes, members)

    def reconcile(self, volume: Volume) -> None:
        """A directory is back: segments that lost their file there or were cleared go.

        Raises:
            StoreError, OSError: it fails again.
        """
        with self._lock:
            first = self._saved.identity.first_segment
            if self._active is not None and self._active.number < first:
                self._seal_active()  # even if the rest fails: what is stored from now on must not count as cleared
            self._next_number = max(self._next_number, first)
            highest = reconciler.compare(
                volume, self._volumes, self._catalog, self._saved, self._remover, self._observer
            )
            self._next_number = max(self._next_number, highest + 1)
            if self._active is not None and self._active.retired:
                self._active = None

    def discard_new(self) -> None:
        """Remove the segments that were begun since the start, those in use as soon as they are unpinned."""
        with self._lock:
            if self._active is not None:
                self._seal_active()
            for segment in self._catalog.segments():
                if segment.begun_s:
                    self._remover.retire(segment)

    def clear(self) -> None:
        """Remove every segment, those in use as soon as they are unpinned.

        Raises:
            StoreError: they would be back after a restart now (:meth:`SavedState.void_before`).
        """
        with self._lock:
            self._active = None
            is_first_try = self._next_number != self._saved.identity.first_segment
            if is_first_try and not all(volume.health.readable for volume in self._volumes):
                self._next_number += _VOIDED_SEGMENTS
            try:
                # First, for it is one short write: who is killed meanwhile starts empty too.
                self._saved.void_before(self._next_number)
            finally:  # a full disk takes the note when files are gone
                for segment in self._catalog.segments():
                    self._remover.retire(segment)

    def erase(self, namespace_ids: Collection[bytes]) -> Erased:
        """As :func:`erasure.erase`."""
        with self._lock:
            self._seal_active()
            return erase(namespace_ids, self._volumes, self._catalog, self._remover)

    def used_bytes(self) -> int:
        """What segments count against the cap."""
        with self._lock:
            return self._eviction.used_bytes()

    def close(self) -> None:
        """Trim the active segment. Files of segments still pinned are left for the next start to remove."""
        with self._lock:
            self._seal_active()
            self._closed = True

    # -- new segments ----------------------------------------------------------------------------

    def _shape(self, run: Run, members: tuple[int, ...]) -> RunShape:
        rotation = self._rotation % len(members)
        return shape_of(len(run.keys), run.chunk_layer_bytes, len(self._volumes), members, rotation)

    def _renew(self, run: Run) -> Segment:
        """Seal the active segment and begin one that ``run`` fits, wherever writes are taken and there is room."""
        self._seal_active()
        members, file_bytes = self._members_for(run)
        lacking = self._eviction.make_room(file_bytes, members)
        if lacking:
            raise StoreFullError(lacking)
        segment = Segment(self._next_number, self._volumes, members, file_bytes)
        self._next_number += 1
        try:
            segment.create()
        except StoreError as error:
            if segment.accounted_bytes:
                self._remover.remember(segment)
            if isinstance(error, StoreFullError):
                self._eviction.relieve(members)
            raise
        self._catalog.add_segment(segment)
        self._active = segment
        return segment

    def _members_for(self, run: Run) -> tuple[tuple[int, ...], int]:
        """Directories that have room for a segment with ``run``, and the size of its files."""
        file_bytes = self._config.file_bytes
        while True:
            members = self._eviction.next_members(file_bytes)
            if not any(self._volumes[stripe].health.writable for stripe in members):
                raise self._eviction.why_no_members(file_bytes)
            needed = max(self._shape(run, members).part_bytes)
            # One that the cap never holds is refused by whoever looks at that.
            is_too_large = len(members) * (needed + FILE_SLACK_BYTES) > self._config.segments_budget_bytes
            if needed <= file_bytes or is_too_large:
                return members, max(self._config.file_bytes, needed)
            file_bytes = needed

    def _seal_active(self) -> None:
        segment, self._active = self._active, None
        if segment is not None:
            segment.sealed = True
            self._trimmed(segment, segment.trim)

    def _trimmed(self, segment: Segment, trim: Callable[[], None]) -> None:
        try:
            trim()
        except StoreError as error:
            logger.warning("hcache: could not trim segment %d: %s", segment.number, error)
