"""Segment files on one side, runs on the other: what belongs together, and which files are nobody's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import StoreError
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.format.rows import Recency, RunPlace
from sglang_hcache.store.segments import Segment, StoredRun
from sglang_hcache.store.volumes.files import SegmentFile
from sglang_hcache.store.volumes.volume import Volume

UNSEEN_SEGMENTS = 2**20
"""More than directories hold that are out and of whose files nothing is known."""


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

    def without(self, numbers: Collection[int]) -> Files:
        """Those of other segments."""
        others = [
            None if found is None else {item: found[item] for item in found if item not in numbers}
            for found in self.found
        ]
        return Files(self.first_segment, others)

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

    def strays(self, *, is_partial: bool) -> tuple[list[Segment], list[Segment]]:
        """Files of no segment: those to keep and those to delete.

        While runs are missing (``is_partial``), every file may be of one, unless its segment was cleared or is
        known and lies elsewhere.
        """
        kept: list[Segment] = []
        useless: list[Segment] = []
        for number in self._files.numbers():
            members = self.segments[number].members if number in self.segments else ()
            stray = Segment(number, self._volumes, (), self._file_bytes)
            for stripe, file in self._files.of(number).items():
                if stripe not in members:
                    stray.extend(stripe, file)
            if stray.members:
                is_kept = is_partial and not members and number >= self._files.first_segment
                (kept if is_kept else useless).append(stray)
        return kept, useless


def _files(volume: Volume) -> dict[int, SegmentFile] | None:
    if not volume.health.readable:
        return None
    try:
        return volume.segment_files()
    except StoreError as error:
        volume.health.take_out(str(error))
        return None
