"""A directory is back: what of its files is still of use."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang_hcache.core.observer import Observer
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.removal import Remover
from sglang_hcache.store.saved import SavedState
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.volumes.volume import MEASURE_S, Volume

logger = logging.getLogger(__name__)


class Reconciler:
    """Compares directories with what is known. Not thread-safe: ``Space`` holds its lock."""

    def __init__(
        self,
        volumes: Sequence[Volume],
        catalog: Catalog,
        saved: SavedState,
        remover: Remover,
        observer: Observer,
    ) -> None:
        self._volumes = volumes
        self._catalog = catalog
        self._saved = saved
        self._remover = remover
        self._observer = observer

    def compare(self, volume: Volume) -> int:
        """Segments that lost their file in ``volume`` or were cleared go; files of no segment are the remover's.

        A segment that nobody has seen stays, unread, until its room is needed: the next start finds its runs.

        Returns:
            The highest number of a segment there.

        Raises:
            StoreError, OSError: it fails again.
        """
        files = volume.attempt(volume.directory.segment_files, MEASURE_S)
        first = self._saved.identity.first_segment
        segments = self._catalog.segments()
        lost = {segment for segment in segments if segment.number < first}
        for segment in segments:
            if volume.stripe in segment.members:
                segment.forget_files()
                file = files.get(segment.number)
                if file is None or file.size < segment.used[volume.stripe]:
                    lost.add(segment)
        self._remover.announce(segment.number for segment in lost)  # at once: each time a state is written
        for segment in segments:
            if segment in lost:
                self._observer.count("store.runs_lost", len(segment.runs))
                self._remover.retire(segment, only_unpinned=False)
            elif volume.stripe in segment.members:
                segment.note(volume.stripe, files[segment.number])
                if segment.is_unread:
                    segment.used[volume.stripe] = files[segment.number].size
        left = self._catalog.segments()
        known = [*left, *self._remover.leftovers]
        expected = {item.number for item in known if item.left >> volume.stripe & 1}
        unseen = {number for number in files.keys() - {item.number for item in known} if number >= first}
        # A start that can read it may need this file, too.
        unread = {item.number: item for item in left if item.is_unread}
        found = {number: self._unread(number, files[number].size) for number in sorted(unseen)}
        self._catalog.add_unread(found.values())
        unread |= found
        for number in sorted(files.keys() - expected):
            if number in unread:
                unread[number].join(volume.stripe, files[number])
            else:
                self._remover.remember_stray(volume.stripe, number, files[number])
        if unseen:
            logger.warning(
                "hcache: %d segments in %s were not there at the start: the next start serves what only they hold",
                len(unseen),
                volume.path,
            )
        return max([first - 1, *files])

    def _unread(self, number: int, file_bytes: int) -> Segment:
        segment = Segment(number, self._volumes, (), file_bytes)
        segment.is_unread = True
        if known := self._saved.unseen.get(number):
            segment.score, segment.unread_runs = known.score, known.runs
        return segment
