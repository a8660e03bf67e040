"""What is stored, in memory: key -> run -> segment, pins and recency. No I/O happens here."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import TierMissError
from sglang_hcache.store.segments import Segment, StoredRun


@dataclass(frozen=True, slots=True)
class RunSlice:
    """Chunks ``[start, stop)`` of a run, which serve the keys from ``first_key`` on."""

    run: StoredRun
    start: int
    stop: int
    first_key: int

    @property
    def num_chunks(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class CatalogCounts:
    chunks: int
    runs: int
    segments: int


@dataclass(frozen=True, slots=True)
class Retired:
    """What :meth:`Catalog.retire` took out."""

    rows: list[int]
    """Rows of its runs in the index."""
    chunks: int
    """Chunks that became misses."""
    pinned: bool
    """Readers or writers still use the files; :meth:`Catalog.unpin` hands the segment out at the end."""


class Catalog:
    """The in-memory maps. Every method is safe from any thread and returns without waiting for I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[bytes, tuple[StoredRun, int]] = {}
        self._segments: dict[int, Segment] = {}
        self._stale: set[Segment] = set()
        self._clock = 0

    def contains(self, key: bytes) -> bool:
        return key in self._chunks

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading ``keys`` present."""
        for index, key in enumerate(keys):
            if key not in self._chunks:
                return index
        return len(keys)

    def pin(self, keys: Sequence[bytes]) -> list[RunSlice]:
        """Find ``keys``, pin their segments (once a slice) and make them the most recent.

        Raises:
            TierMissError: a key is missing, or the runs differ in the bytes of their layers. Pins nothing.
        """
        slices: list[RunSlice] = []
        with self._lock:
            for number, key in enumerate(keys):
                found = self._chunks.get(key)
                if found is None:
                    raise TierMissError(f"chunk {number} of {len(keys)} is not on disk any more")
                run, index = found
                last = slices[-1] if slices else None
                if last is not None and last.run is run and last.stop == index:
                    slices[-1] = RunSlice(run, last.start, index + 1, last.first_key)
                else:
                    slices.append(RunSlice(run, index, index + 1, number))
            if len({item.run.place.shape.chunk_layer_bytes for item in slices}) > 1:
                raise TierMissError("the chunks have layers of different sizes")
            for item in slices:
                item.run.segment.pins += 1
                self._touch(item.run.segment)
        return slices

    def pin_segment(self, segment: Segment) -> None:
        """Keep ``segment``'s files for a writer."""
        with self._lock:
            segment.pins += 1
            self._touch(segment)

    def unpin(self, segments: Iterable[Segment]) -> tuple[list[int], list[Segment]]:
        """Give back one pin of each. Returns descriptors to close and retired segments to remove."""
        fds: list[int] = []
        doomed: list[Segment] = []
        with self._lock:
            for segment in segments:
                segment.pins -= 1
                assert segment.pins >= 0
                if segment.pins == 0:
                    fds += segment.take_fds()
                    if segment.retired:
                        doomed.append(segment)
        return fds, doomed

    def add_segment(self, segment: Segment) -> None:
        with self._lock:
            self._segments[segment.number] = segment
            self._clock = max(self._clock, segment.last_used)

    def add_run(self, run: StoredRun) -> bool:
        """Make a run readable; False if its segment was retired meanwhile."""
        with self._lock:
            if run.segment.retired:
                return False
            run.segment.runs.add(run)
            for index, key in enumerate(run.place.keys):
                self._chunks[key] = (run, index)
            return True

    def drop_run(self, run: StoredRun) -> bool:
        """Make a run a miss; False if it already was."""
        with self._lock:
            if run.dropped:
                return False
            self._forget(run)
            run.segment.runs.discard(run)
            return True

    def coldest(self) -> Segment | None:
        """The least recently used segment that is sealed and free of pins."""
        with self._lock:
            return min(self._evictable(), key=lambda segment: segment.last_used, default=None)

    def evictable(self) -> list[Segment]:
        """All segments that are sealed and free of pins."""
        with self._lock:
            return self._evictable()

    def retire(self, segment: Segment, only_unpinned: bool) -> Retired | None:
        """Take a segment and its runs out of the maps; None if it is out already or must not be pinned."""
        with self._lock:
            if segment.retired or (only_unpinned and segment.pins):
                return None
            segment.retired = True
            del self._segments[segment.number]
            self._stale.discard(segment)
            runs = sorted(segment.runs, key=lambda run: run.row)
            before = len(self._chunks)
            for run in runs:
                self._forget(run)
            segment.runs.clear()
            return Retired([run.row for run in runs], before - len(self._chunks), segment.pins > 0)

    def take_recency(self, limit: int) -> dict[int, int]:
        """Segments used since the last call, at most ``limit`` of them: number -> logical time."""
        with self._lock:
            taken = [self._stale.pop() for _ in range(min(limit, len(self._stale)))]
            return {segment.number: segment.last_used for segment in taken}

    def segments(self) -> list[Segment]:
        """By number."""
        with self._lock:
            return [self._segments[number] for number in sorted(self._segments)]

    def counts(self) -> CatalogCounts:
        with self._lock:
            runs = sum(len(segment.runs) for segment in self._segments.values())
            return CatalogCounts(len(self._chunks), runs, len(self._segments))

    def _evictable(self) -> list[Segment]:
        return [segment for segment in self._segments.values() if segment.sealed and not segment.pins]

    def _touch(self, segment: Segment) -> None:
        self._clock += 1
        segment.last_used = self._clock
        if not segment.retired:
            self._stale.add(segment)

    def _forget(self, run: StoredRun) -> None:
        run.dropped = True
        for index, key in enumerate(run.place.keys):
            if self._chunks.get(key) == (run, index):
                del self._chunks[key]
