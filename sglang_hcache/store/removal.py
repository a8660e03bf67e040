"""Taking segments away: out of the maps, then their files."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import FILE_SLACK_BYTES
from sglang_hcache.store.format.geometry import mask_of
from sglang_hcache.store.free_space import FreeSpace
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.volumes.files import SegmentFile
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)

_FAILURES_ALLOWED = 3
"""Files in a row that could not be deleted, before nothing more is evicted in that directory for a while: ..."""
_PAUSE_S = 600.0
"""... for each segment that is tried its chunks are lost, whether or not its file can be deleted."""

_RETRY_S = 0.5
"""Time for what is left at each attempt: after an outage it may be thousands of files, and others wait meanwhile."""


class Remover:
    """What cannot be deleted is remembered, counted and tried again. Not thread-safe: ``Space`` holds its lock."""

    def __init__(
        self,
        volumes: Sequence[Volume],
        catalog: Catalog,
        free_space: FreeSpace,
        observer: Observer,
        announce: Callable[[Iterable[int]], None],
    ) -> None:
        self._volumes = volumes
        self._catalog = catalog
        self._free_space = free_space
        self._observer = observer
        self.announce = announce
        """Told of segments before files of them are deleted (:meth:`SavedState.announce`)."""
        self._may_warn = Throttle()
        self.on_evicted: Callable[[bytes], object] = lambda key: None
        """Told of each chunk that goes for want of room."""
        self.leftovers: dict[Segment, None] = {}
        """Retired segments whose files are not gone yet; those that could not be deleted last come last."""
        self._undeletable: dict[Segment, set[int]] = {}
        """In which directories a file of theirs could not be deleted. One that is out is not asked."""
        self._failed_at: defaultdict[int, list[float]] = defaultdict(list)
        """By directory: when files could not be deleted since one could, each once, by the monotonic clock."""

    @property
    def leftover_bytes(self) -> int:
        """What they count against the cap."""
        return sum(segment.accounted_bytes for segment in self.leftovers)

    def stopped(self) -> int:
        """Directories, as bits, in which nothing is evicted now: the last few files there could not be deleted."""
        now = time.monotonic()
        return mask_of(
            stripe
            for stripe, times in self._failed_at.items()
            if len(times) >= _FAILURES_ALLOWED and now < times[-1] + _PAUSE_S
        )

    def evict_coldest(self, within: int = -1) -> bool:
        """The segment with the lowest score goes, of those with a file ``within`` directories; False if none can."""
        found = self._catalog.retire_coldest(within)
        if found is None:
            return False
        segment, chunks = found
        self._let_go(segment)
        self._observer.count("store.segments_evicted")
        self._observer.count("store.chunks_evicted", len(chunks))
        for key in chunks:
            self.on_evicted(key)
        return True

    def expire(self, segment: Segment) -> None:
        """A segment that may not stay goes, its files with the last pin."""
        chunks = self.retire(segment)
        if chunks is not None:
            self._observer.count("store.segments_expired")
            self._observer.count("store.chunks_expired", len(chunks))

    def retire(self, segment: Segment) -> list[bytes] | None:
        """A segment in use goes, its files with the last pin; returns the same as :meth:`Catalog.retire`."""
        chunks = self._catalog.retire(segment)
        if chunks is not None:
            self._let_go(segment)
        return chunks

    def _let_go(self, segment: Segment) -> None:
        self.leftovers[segment] = None
        if not segment.pins:
            self._unlink(segment)

    def remember(self, segment: Segment) -> None:
        """Files that are of no use, and were never in use here, go at the next :meth:`retry`, and count until then."""
        segment.retired = True
        self.leftovers[segment] = None

    def remember_stray(self, stripe: int, number: int, file: SegmentFile) -> None:
        """As :meth:`remember`, a file of no segment in one directory. It may have the number of one elsewhere."""
        stray = Segment(number, self._volumes, (stripe,), file.size)
        stray.note(stripe, file)
        self.remember(stray)

    def retry(self, limit_s: float | None = None) -> None:
        """Delete what could not be deleted before, and what is not pinned any more; the rest the next time.

        Args:
            limit_s: for so long, seconds; None: for a moment.
        """
        until = time.monotonic() + (_RETRY_S if limit_s is None else limit_s)
        for segment in self._deletable():
            self._unlink(segment)
            if time.monotonic() > until:
                return

    def finish_one(self, within: int) -> bool:
        """Delete the files of a retired segment ``within`` directories that was not tried yet; False if there is none.

        To be called before more is evicted there.
        """
        for segment in self._deletable(within):
            if segment not in self._undeletable:
                self._unlink(segment)
                return True
        return False

    def _deletable(self, within: int = -1) -> list[Segment]:
        """Leftovers with a file in one of these directories, as bits, of which it may be deleted now."""
        within &= mask_of(volume.stripe for volume in self._volumes if volume.health.can_delete)
        return [segment for segment in self.leftovers if segment.left & within and not segment.pins]

    def _unlink(self, segment: Segment) -> None:
        self.announce([segment.number])
        before = dict(segment.accounted)
        failures = segment.unlink()
        for stripe, size in before.items():
            if size and not segment.accounted[stripe]:
                self._free_space.note_deleted(stripe, size - FILE_SLACK_BYTES)
                self._volumes[stripe].health.note_deleted(size)
                self._failed_at.pop(stripe, None)
        self.leftovers.pop(segment)
        if segment.left:
            self.leftovers[segment] = None
        if not failures:
            self._undeletable.pop(segment, None)
            return
        self._observer.count("store.unlink_failures")
        self._note_failures(segment, failures)
        if self._may_warn():
            logger.warning("hcache: segment %d stays for now: %s", segment.number, failures[min(failures)])

    def _note_failures(self, segment: Segment, failures: Mapping[int, Exception]) -> None:
        """Files of it could not be deleted, by directory. After three in a row there, few more are tried."""
        known = self._undeletable.get(segment, set())
        self._undeletable[segment] = {*failures}
        for stripe in failures.keys() - known:
            times = self._failed_at[stripe]
            times.append(time.monotonic())
            if len(times) == _FAILURES_ALLOWED:
                logger.warning(
                    "hcache: eviction stopped in %s: %d files cannot be deleted (%s); until one can, another one is "
                    "tried every %.0f s", self._volumes[stripe].path, len(times), failures[stripe], _PAUSE_S,
                )  # fmt: skip
