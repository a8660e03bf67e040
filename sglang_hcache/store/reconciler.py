"""A directory is back: what of its files is still of use, and what is whole again with it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from sglang_hcache.core.errors import StoreIOError
from sglang_hcache.core.observer import Observer
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.census import Census, Files
from sglang_hcache.store.config import FILE_SLACK_BYTES, StoreConfig
from sglang_hcache.store.format.rows import Recency, RunPlace
from sglang_hcache.store.ledger import Ledger
from sglang_hcache.store.removal import Remover
from sglang_hcache.store.scan import Scan
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.volumes.files import SegmentFile
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)


class Reconciler:
    """Compares directories with what is known. Not thread-safe: ``Space`` holds its lock."""

    def __init__(
        self,
        config: StoreConfig,
        volumes: Sequence[Volume],
        catalog: Catalog,
        ledger: Ledger,
        remover: Remover,
        observer: Observer,
    ) -> None:
        self._config = config
        self._volumes = volumes
        self._catalog = catalog
        self._ledger = ledger
        self._remover = remover
        self._observer = observer
        self._scan: Scan | None = None
        self._read: dict[int, list[RunPlace]] = {}
        """Runs by segment, as they were read while all directories were there."""

    def compare(self, volume: Volume) -> int:
        """Segments that lost their file in ``volume`` or were cleared go, and files of no segment.

        Returns a number behind those of all segments.

        Raises:
            StoreError, OSError: it fails again.
        """
        files = volume.probe(volume.directory.segment_files)
        sizes = {number: file.size for number, file in files.items()}
        first = self._ledger.identity.first_segment
        for segment in self._catalog.segments():
            lost = segment.number < first
            if volume.stripe in segment.members:
                segment.forget_files()
                lost |= sizes.get(segment.number, -1) < segment.used[volume.stripe]
            if lost:
                self._observer.count("store.runs_lost", len(segment.runs))
                self._remover.retire(segment, only_unpinned=False)
            elif volume.stripe in segment.members and segment.sealed and not self._ledger.is_partial:
                self._trim(segment, volume, sizes[segment.number])
        known = [*self._catalog.segments(), *self._remover.leftovers]
        expected = {item.number for item in known if item.left >> volume.stripe & 1}
        loose = self._loose()
        elsewhere = {item.number for item in known} - loose.keys()
        for number in sorted(sizes.keys() - expected):
            if self._ledger.is_partial and number >= first and number not in elsewhere:
                self._keep(loose.get(number), volume, number, files[number])
            else:
                self._remover.remove_stray(volume, number, sizes[number])
        return max([first, *(number + 1 for number in sizes)])

    def begin_scan(self) -> Scan | None:
        """Where runs are missing and all directories are there: what reads the segments that they may be in.

        Raises:
            StoreError: a directory fails again.
        """
        if not self._ledger.is_partial or not all(volume.health.readable for volume in self._volumes):
            return None
        if self._scan is None:
            numbers = [number for number in self._loose_files().uncleared() if number not in self._read]
            try:
                self._scan = Scan(numbers, self._volumes, self._catalog.shapes)
            except OSError as error:
                raise StoreIOError(f"cannot read the segments: {error}") from error
        return self._scan

    def end_scan(self, scan: Scan) -> tuple[list[Segment], list[Segment]]:
        """The segments that could not be put together before, and files of none; nothing if some must be read again.

        What was whole when it was read is not.

        Raises:
            StoreError: a directory fails again.
        """
        self._scan = None
        self._read |= {number: scan.found[number] for number in scan.seen_whole}
        if scan.error is not None:
            raise StoreIOError(f"cannot read the segments: {scan.error}") from scan.error
        files = self._loose_files()
        if not self._read.keys() >= {*files.uncleared()}:
            return [], []
        for segment in self._loose().values():
            self._catalog.retire(segment, only_unpinned=False)
        census = Census(files, self._volumes, self._catalog, self._config.file_bytes)
        num_runs = 0
        for place in (place for number in files.uncleared() for place in self._read[number]):
            number = self._catalog.take_run_number()
            num_runs += census.admit(number, place, Recency(0, self._catalog.floor), {})
        self._read = {}
        self._ledger.mark_whole()
        self._observer.count("store.runs_recovered", num_runs)
        logger.info("hcache: all directories are there; %d runs are whole again", num_runs)
        _, useless = census.strays(is_partial=False)
        return list(census.segments.values()), useless

    def close(self) -> None:
        """Read no more."""
        if self._scan is not None:
            self._scan.stop()

    def _loose_files(self) -> Files:
        """What lies in the directories now but for segments whose runs are known. Raises StoreError."""
        known = {item.number for item in [*self._catalog.segments(), *self._remover.leftovers]}
        found = [volume.segment_files() for volume in self._volumes]
        return Files(self._ledger.identity.first_segment, found).without(known - self._loose().keys())

    def _keep(self, segment: Segment | None, volume: Volume, number: int, file: SegmentFile) -> None:
        """A file that may be of a run which is not whole yet. ``segment``: what is known of its number."""
        if segment is None:
            segment = Segment(number, self._volumes, (), self._config.file_bytes)
            self._catalog.add_segment(segment)
        segment.extend(volume.stripe, file)

    def _trim(self, segment: Segment, volume: Volume, size: int) -> None:
        """Cut a file of ``size`` bytes that could not be cut when its segment was sealed."""
        used, directory = segment.used[volume.stripe], volume.directory
        if size <= used:
            return
        try:
            volume.probe(partial(directory.trim_segment, segment.number, used))
            left = volume.probe(partial(directory.segment_bytes, segment.number))
        except TimeoutError:
            raise
        except OSError as error:
            logger.warning("hcache: could not trim segment %d in %s: %s", segment.number, volume.path, error)
        else:
            segment.accounted[volume.stripe] = left + FILE_SLACK_BYTES

    def _loose(self) -> dict[int, Segment]:
        """Segments of which no run is known."""
        return {segment.number: segment for segment in self._catalog.evictable() if not segment.runs}
