"""Room on disk: which segment a run goes to, the cap, the free-space floor, eviction."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import StoreError, StoreFullError, StoreIOError
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import FILE_SLACK_BYTES, StoreConfig
from sglang_hcache.store.directory import StoreDirectory
from sglang_hcache.store.geometry import RunShape
from sglang_hcache.store.index import Index
from sglang_hcache.store.segments import Segment

_log = logging.getLogger(__name__)

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


def storage_error(error: OSError, doing: str) -> StoreError:
    """``error`` as one of ours: full when the device is full, else an I/O error."""
    kind = StoreFullError if error.errno in FULL_ERRNOS else StoreIOError
    return kind(f"{doing}: {error}")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for one run. Its segment is pinned until :meth:`Space.unpin`."""

    segment: Segment
    offsets: tuple[int, ...]
    """Start of the run's part in each file, bytes."""
    shape: RunShape

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.offsets, self.shape.part_bytes, strict=True))


class Space:
    """Hands out room in segments and takes segments away.

    Its lock is held during file operations and index commits; it is never taken while the catalog's lock
    is held, and nothing on the serving thread waits for it.
    """

    def __init__(
        self,
        config: StoreConfig,
        directories: Sequence[StoreDirectory],
        catalog: Catalog,
        index: Index,
        observer: Observer,
    ) -> None:
        self._config = config
        self._directories = directories
        self._catalog = catalog
        self._index = index
        self._observer = observer
        self._lock = threading.Lock()
        self._active: Segment | None = None
        self._leftovers: dict[int, Segment] = {}
        """Retired segments whose files are not gone yet."""
        self._next_number = 0
        self._closed = False

    def adopt(self, segments: Iterable[Segment], leftovers: Iterable[Segment], next_number: int) -> None:
        """Take over what was found at start: segments in use, and files nobody needs."""
        with self._lock:
            self._next_number = next_number
            for segment in segments:
                segment.sealed = True
                self._trim(segment)
                self._catalog.add_segment(segment)
            for segment in leftovers:
                segment.retired = True
                self._remove(segment)
            while self._used_bytes() > self._config.segments_budget_bytes and self._evict_coldest():
                pass

    def reserve(self, shape: RunShape) -> Reservation:
        """Room for a run, in a new segment if need be.

        Raises:
            StoreFullError: no room can be made.
            StoreIOError: the segment's files cannot be created.
        """
        with self._lock:
            segment = self._active
            if segment is None or not segment.fits(shape):
                self._seal_active()
                segment = self._new_segment(shape)
            self._catalog.pin_segment(segment)
            offsets = tuple(segment.used)
            reservation = Reservation(segment, offsets, shape)
            segment.used = list(reservation.ends)
            return reservation

    def abandon(self, reservation: Reservation, seal: bool) -> None:
        """Give back the room of a run that was not written; the caller still unpins.

        With ``seal`` the next run goes to new files: these gave an error.
        """
        segment = reservation.segment
        with self._lock:
            if tuple(segment.used) == reservation.ends:
                segment.used = list(reservation.offsets)
            if not any(segment.used) and segment is self._active:
                self._active = None
                self._retire(segment, only_unpinned=False)
            elif seal and segment is self._active:
                self._seal_active()

    def evict_one(self) -> bool:
        """Remove the coldest segment; False if none can go."""
        with self._lock:
            return self._evict_coldest()

    def clear(self) -> None:
        """Remove every segment, those in use as soon as they are unpinned."""
        with self._lock:
            self._active = None
            for segment in self._catalog.segments():
                self._retire(segment, only_unpinned=False)

    def unpin(self, segments: Iterable[Segment]) -> None:
        """Give back one pin of each, and remove what waited for it."""
        fds, doomed = self._catalog.unpin(segments)
        for fd in fds:
            with contextlib.suppress(
                OSError
            ):  # a failing close (NFS) still closes; nothing was written through it
                os.close(fd)
        if doomed:
            with self._lock:
                if not self._closed:
                    for segment in doomed:
                        self._remove(segment)

    def reserved_bytes(self) -> int:
        """What counts against the cap, the index's part included."""
        with self._lock:
            return self._used_bytes() + self._config.index_reserve_bytes

    def close(self) -> None:
        """Trim the active segment. Files of segments still pinned are left for the next start to remove."""
        with self._lock:
            self._seal_active()
            self._closed = True

    def _new_segment(self, shape: RunShape) -> Segment:
        file_bytes = max(self._config.file_bytes, *shape.part_bytes)
        self._make_room(file_bytes)
        segment = Segment(self._next_number, self._directories, file_bytes)
        self._next_number += 1
        try:
            segment.create()
        except OSError as error:
            if segment.accounted_bytes:
                segment.retired = True
                self._leftovers[segment.number] = segment
            raise storage_error(error, "cannot create a segment file") from error
        self._catalog.add_segment(segment)
        self._active = segment
        return segment

    def _make_room(self, file_bytes: int) -> None:
        """Evict until a segment of ``file_bytes`` a directory fits cap and floor, or nothing if it cannot."""
        self._retry_leftovers()
        lacking = self._lacking(file_bytes, [])
        if lacking and not self._lacking(file_bytes, self._catalog.evictable()):
            while lacking and self._evict_coldest():
                lacking = self._lacking(file_bytes, [])
        if lacking:
            raise StoreFullError(lacking)

    def _lacking(self, file_bytes: int, without: Sequence[Segment]) -> str:
        """Why a new segment does not fit even if the segments of ``without`` were gone; empty if it does."""
        need = file_bytes + FILE_SLACK_BYTES
        gone = sum(segment.accounted_bytes for segment in without)
        after = self._used_bytes() - gone + need * len(self._directories)
        if after > self._config.segments_budget_bytes:
            return (
                f"the disk tier is full: {format_bytes(self._config.size_bytes)} (--hcache-disk-size), and "
                "nothing can be evicted now"
            )
        try:
            free: dict[int, int] = {}
            left: dict[int, int] = defaultdict(int)
            for directory in self._directories:
                device = directory.device()
                free[device] = directory.free_bytes()
                left[device] -= need
                left[device] += sum(segment.allocated_bytes(directory.stripe) for segment in without)
        except OSError as error:
            raise StoreIOError(f"cannot ask for free space: {error}") from error
        for device, available in free.items():
            if available + left[device] < self._config.free_floor_bytes:
                return (
                    f"{format_bytes(available)} free is too little for a new segment above the floor of "
                    f"{format_bytes(self._config.free_floor_bytes)} (--hcache-disk-free-floor)"
                )
        return ""

    def _evict_coldest(self) -> bool:
        while (segment := self._catalog.coldest()) is not None:
            chunks = self._retire(segment, only_unpinned=True)
            if chunks is not None:
                self._observer.count("store.segments_evicted")
                self._observer.count("store.chunks_evicted", chunks)
                return True
        return False

    def _retire(self, segment: Segment, only_unpinned: bool) -> int | None:
        """Out of the maps, out of the index, then the files. Returns chunks that became misses."""
        retired = self._catalog.retire(segment, only_unpinned)
        if retired is None:
            return None
        self._leftovers[segment.number] = segment
        try:
            self._index.delete_segment(segment.number, retired.rows)
        except StoreError as error:
            # Going on is safe, for rows without files are dropped at the next start; stopping would mean
            # that a full disk, which fails the index too, could never be emptied.
            self._observer.count("store.io_errors")
            _log.warning("could not remove segment %d from the index: %s", segment.number, error)
        if not retired.pinned:
            self._remove(segment)
        return retired.chunks

    def _remove(self, segment: Segment) -> None:
        """Unlink a retired segment; what stays is remembered and counted."""
        self._leftovers[segment.number] = segment
        error = segment.unlink()
        if error is None:
            del self._leftovers[segment.number]
            return
        self._observer.count("store.unlink_failures")
        _log.warning("could not delete segment %d, will try again: %s", segment.number, error)

    def _retry_leftovers(self) -> None:
        for segment in list(self._leftovers.values()):
            if not segment.pins and segment.unlink() is None:
                del self._leftovers[segment.number]

    def _seal_active(self) -> None:
        segment, self._active = self._active, None
        if segment is not None:
            segment.sealed = True
            self._trim(segment)

    def _trim(self, segment: Segment) -> None:
        try:
            segment.trim()
        except OSError as error:
            segment.measure()
            self._observer.count("store.io_errors")
            _log.warning("could not trim segment %d: %s", segment.number, error)

    def _used_bytes(self) -> int:
        """Sum over segments in use and files that could not be removed."""
        in_use = sum(segment.accounted_bytes for segment in self._catalog.segments())
        return in_use + sum(segment.accounted_bytes for segment in self._leftovers.values())
