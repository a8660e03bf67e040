"""Segment files on one side, runs on the other: what belongs together, and which files are nobody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import StoreError
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.format.rows import Recency, RunPlace
from sglang_hcache.store.scan import scan_segments
from sglang_hcache.store.segments import Segment, StoredRun
from sglang_hcache.store.volumes.files import SegmentFile
from sglang_hcache.store.volumes.volume import Volume


@dataclass(frozen=True, slots=True)
class Files:
    """Segment files by stripe and number; None for a directory that is out."""

    first_segment: int
    """Lower numbers were cleared."""
    found: Sequence[dict[int, SegmentFile] | None]

    @classmethod
    def listed(cls, first_segment: int, volumes: Sequence[Volume]) -> Files:
        """As they are now; a directory that cannot be listed is taken out."""
        return cls(first_segment, [_files(volume) for volume in volumes])

    def of(self, number: int) -> dict[int, SegmentFile]:
        """Those of one segment that can be seen, by directory."""
        return {
            stripe: found[number]
            for stripe, found in enumerate(self.found)
            if found is not None and number in found
        }

    def numbers(self) -> list[int]:
        return sorted({number for found in self.found if found is not None for number in found})

    def longest(self, number: int) -> int:
        """Bytes of the largest file of a segment, of those that can be seen."""
        return max((file.size for file in self.of(number).values()), default=0)

    def uncleared(self) -> list[int]:
        """Numbers of segments that may hold runs."""
        return [number for number in self.numbers() if number >= self.first_segment]

    def runs(self, volumes: Sequence[Volume]) -> list[RunPlace]:
        """Those that segments hold, by their headers, by age. Raises OSError."""
        return [place for place in scan_segments(self.uncleared(), volumes) if self.hold(place)]

    def hold(self, place: RunPlace) -> bool:
        """Whether every part lies on the block grid inside its file, as far as files can be seen."""
        if place.segment < self.first_segment:
            return False
        for found, offset, size in zip(self.found, place.offsets, place.shape.part_bytes, strict=True):
            if not size:
                continue
            file = None if found is None else found.get(place.segment)
            inside = found is None or (file is not None and offset + size <= file.size)
            if offset % BLOCK or not inside:
                return False
        return True


class Census:
    """Makes segments of runs, as far as files bear them out, and puts their runs into the catalog.

    Args:
        file_bytes: room in each file of a segment that is created now.
    """

    def __init__(self, files: Files, volumes: Sequence[Volume], catalog: Catalog, file_bytes: int) -> None:
        self._files = files
        self._volumes = volumes
        self._catalog = catalog
        self._file_bytes = file_bytes
        self.segments: dict[int, Segment] = {}
        """By number. The catalog does not have them yet: ``Space`` adds them."""

    def admit(self, number: int, place: RunPlace, recency: Recency, quarantined: Mapping[int, str]) -> bool:
        """Whether files hold the run at ``place``, which is in the catalog then. The rest is what the index says."""
        if not self._files.hold(place):
            return False
        segment = self.segments.get(place.segment)
        if segment is None:
            # One that cannot be seen was made as long as the others, and is cut when they are.
            file_bytes = self._files.longest(place.segment)
            segment = Segment(place.segment, self._volumes, place.shape.members, file_bytes)
            segment.found = self._files.of(place.segment)
            segment.last_used, segment.score = recency.last_used, recency.score
            self.segments[place.segment] = segment
        elif segment.members != place.shape.members:
            return False
        segment.take(place)
        run = StoredRun(place, segment, number)
        run.quarantined = {chunk: why for chunk, why in quarantined.items() if chunk < len(place.keys)}
        self._catalog.adopt_run(run)
        return True

    def expect_uncut(self) -> None:
        """The last segment may have been in use when the process ended: what cannot be seen of it counts in full."""
        if self.segments:
            last = self.segments[max(self.segments)]
            last.file_bytes = max(last.file_bytes, self._file_bytes)

    def leftovers(self) -> list[Segment]:
        """Files of no run, as segments to be deleted."""
        found = []
        for number in self._files.numbers():
            members = self.segments[number].members if number in self.segments else ()
            strays = {
                stripe: file for stripe, file in self._files.of(number).items() if stripe not in members
            }
            if strays:
                segment = Segment(number, self._volumes, tuple(sorted(strays)), self._file_bytes)
                for stripe, file in strays.items():
                    segment.note(stripe, file)
                found.append(segment)
        return found


def _files(volume: Volume) -> dict[int, SegmentFile] | None:
    if not volume.health.readable:
        return None
    try:
        return volume.segment_files()
    except StoreError as error:
        volume.health.take_out(str(error))
        return None
