"""Segment files on one side, runs on the other: what belongs together, and what is lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import StoreError
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import SCRATCH_NAMESPACE
from sglang_hcache.store.format.geometry import BLOCK, mask_of, members_of
from sglang_hcache.store.format.place import RunPlace
from sglang_hcache.store.format.state import SegmentState, State
from sglang_hcache.store.scan import Found, scan_segments
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

    @property
    def is_all(self) -> bool:
        """No directory is out."""
        return None not in self.found

    def may_be_out(self, number: int) -> bool:
        """Whether a segment of which no file is seen may have them in a directory that is out."""
        return not self.is_all and not self.of(number)

    def numbers(self) -> list[int]:
        return sorted({number for found in self.found if found is not None for number in found})

    def longest(self, number: int) -> int:
        """Bytes of the largest file of a segment, of those that can be seen."""
        return max((file.size for file in self.of(number).values()), default=0)

    def written_s(self, number: int) -> float:
        """When a segment was written to last, seconds since 1970; -inf: no file of it can be asked."""
        return max((file.written_s for file in self.of(number).values()), default=-math.inf)

    def uncleared(self) -> list[int]:
        """Numbers of segments that may hold runs."""
        return [number for number in self.numbers() if number >= self.first_segment]

    def read(self, volumes: Sequence[Volume]) -> Contents:
        """What their headers say. Raises OSError."""
        scanned, unread = scan_segments(self.uncleared(), volumes)
        found = [
            files if volume.health.readable else None
            for files, volume in zip(self.found, volumes, strict=True)
        ]
        seen = Files(self.first_segment, found)
        runs = [
            (place, missing | seen._outside(place))
            for place, missing in scanned
            if place.namespace_id != SCRATCH_NAMESPACE  # a server was killed while it measured this disk
        ]
        return Contents(seen, runs, unread)

    def _outside(self, place: RunPlace) -> int:
        """Where, as bits, a part is not on the block grid inside its file, as far as files can be seen."""
        outside = 0
        for stripe, found in enumerate(self.found):
            file = None if found is None else found.get(place.segment)
            is_inside = found is None or (file is not None and place.end(stripe) <= file.size)
            if place.shape.part_bytes[stripe] and (place.offsets[stripe] % BLOCK or not is_inside):
                outside |= 1 << stripe
        return outside


@dataclass(frozen=True, slots=True)
class Contents:
    """What was read of segment files."""

    files: Files
    """Without those of directories that went out meanwhile."""
    found: Found
    """Runs of which anything is there, by age, and where, as bits, something is missing."""
    unread: Mapping[int, int]
    """Segment -> directories, as bits, whose file could not be read, or not all of it: nobody knows what is there."""

    @property
    def runs(self) -> list[RunPlace]:
        """Those that are whole, by age."""
        return [place for place, missing in self.found if not missing]


def segments_of(
    contents: Contents, state: State, volumes: Sequence[Volume], catalog: Catalog, file_bytes: int
) -> dict[int, Segment]:
    """Segments by number, in order of use, as far as files bear runs out.

    The runs are put into the catalog, which has no segments yet.

    Segments that could not be read are left as they are, until their room is needed: a later start may read them.

    Args:
        file_bytes: room in each file of a segment that is created now.
    """
    segments: dict[int, Segment] = {}
    files = contents.files

    def known(number: int) -> SegmentState:
        return state.segments.get(number, SegmentState())

    def begin(number: int, members: tuple[int, ...]) -> Segment:
        # One file that cannot be seen was made as long as the others, and is cut when they are.
        segment = segments[number] = Segment(number, volumes, members, files.longest(number))
        segment.found = files.of(number)
        segment.score = known(number).score
        return segment

    for place in contents.runs:
        segment = segments.get(place.segment) or begin(place.segment, place.shape.members)
        if segment.members == place.shape.members:
            segment.take(place)
            run = StoredRun(place, segment)
            if marks := state.quarantined.get(place.run_id):
                run.quarantined = {chunk: why for chunk, why in marks.items() if chunk < len(place.keys)}
            catalog.adopt_run(run)
    for number in contents.unread:
        found = files.of(number)
        if number in segments or found:
            segment = segments.get(number) or begin(number, (*found,))
            segment.is_unread = True
            segment.unread_runs = max(0, known(number).runs - len(segment.runs))
            for stripe in members_of(segment.mask & mask_of(found)):
                segment.used[stripe] = max(segment.used[stripe], found[stripe].size)
    # The last one may have been in use when the process ended: what cannot be seen of it counts in full.
    if segments:
        last = segments[max(segments)]
        last.file_bytes = max(last.file_bytes, file_bytes)
    uses = {number: place for place, number in enumerate(state.segments)}
    return dict(sorted(segments.items(), key=lambda item: uses.get(item[0], -1)))


def is_served(state: State, place: RunPlace) -> bool:
    """Whether a run counts among those of its segment in ``state``: not all of its chunks are in quarantine."""
    return len(state.quarantined.get(place.run_id, {})) < len(place.keys)


def lost_runs(state: State, contents: Contents) -> dict[int, int]:
    """How many runs that ``state`` knows are not whole; by segment.

    None of a segment that was about to be evicted or erased, that could not be read, or of which the files may be in a
    directory that is out.
    """
    files = contents.files
    whole = Counter(place.segment for place in contents.runs if is_served(state, place))
    lost = {
        number: known.runs - whole[number]
        for number, known in state.segments.items()
        if number >= files.first_segment
        and number not in state.going
        and number not in contents.unread
        and not files.may_be_out(number)
    }
    return {number: count for number, count in sorted(lost.items()) if count > 0}


def _files(volume: Volume) -> dict[int, SegmentFile] | None:
    if not volume.health.readable:
        return None
    try:
        return volume.segment_files()
    except StoreError as error:
        volume.health.take_out(str(error))
        return None
