"""What is stored, in memory: key -> run -> segment, pins and recency. No I/O happens here."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import TierMissError
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.store.config import SCRATCH_NAMESPACE
from sglang_hcache.store.format.state import SegmentState
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
    """Distinct keys, those of directories that are out included."""
    runs: int
    """Those that are set aside included."""
    segments: int
    quarantined: int
    layouts: tuple[tuple[int, ...], ...]
    """Bytes of each layer of a chunk: all that there were since the start, that of the newest run first."""


class Catalog:
    """The in-memory maps. Every method is safe from any thread and returns without waiting for I/O.

    Eviction order is GreedyDual (Young 1994; docs/store-format.md, "Eviction"): a use sets a segment's score to
    ``floor + cost``, where ``floor`` is the score of the last one evicted. Equal costs make it plain LRU.

    Args:
        cost_doubling_tokens: the length at which a token costs twice as much to recompute as at the start.
    """

    def __init__(self, cost_doubling_tokens: int) -> None:
        self._doubling = cost_doubling_tokens
        self._lock = threading.Lock()
        # Of a million chunks: no object for each of them but its key, which the run holds as well.
        self._chunks: dict[bytes, StoredRun] = {}
        self._segments: dict[int, Segment] = {}
        """By number, in order of their last use."""
        self._layouts: dict[tuple[int, ...], int] = {}
        """Bytes of each layer of a chunk -> the newest segment with such runs."""
        self._floor = 0.0
        self._out_mask = 0
        self._marked: dict[StoredRun, None] = {}
        """Runs with chunks in quarantine."""
        self._quarantined = 0

    # -- finding ---------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        found = self._chunks.get(key)
        return found is not None and not found.segment.mask & self._out_mask

    def pin(self, keys: Sequence[bytes]) -> list[RunSlice]:
        """Find ``keys`` and pin their segments, once a slice.

        This counts as no use: :meth:`touch` does, and knows the order of a whole prefix. A reader pins its head first.

        Raises:
            TierMissError: a key is missing, or the runs differ in the bytes of their layers. Pins nothing.
        """
        slices: list[RunSlice] = []
        with self._lock:
            for number, key in enumerate(keys):
                if not self.contains(key):
                    raise TierMissError(f"chunk {number} of {len(keys)} is not on disk any more")
                run = self._chunks[key]
                last = slices[-1] if slices else None
                if (
                    last is not None
                    and last.run is run
                    and run.place.keys[last.stop : last.stop + 1] == (key,)
                ):
                    slices[-1] = RunSlice(run, last.start, last.stop + 1, last.first_key)
                else:
                    index = run.place.keys.index(key)
                    slices.append(RunSlice(run, index, index + 1, number))
            if len({item.run.place.shape.chunk_layer_bytes for item in slices}) > 1:
                raise TierMissError("the chunks have layers of different sizes")
            for item in slices:
                item.run.segment.pins += 1
        return slices

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of those of ``keys``, the chunks of one prefix from its start, that are here."""
        with self._lock:
            found = [self._chunks[key].segment for key in keys if key in self._chunks]
            self._use(list(dict.fromkeys(found)), depth=len(keys))

    # -- changing --------------------------------------------------------------------------------

    def pin_segment(self, segment: Segment) -> None:
        """Keep ``segment``'s files for a writer."""
        with self._lock:
            segment.pins += 1

    def unpin(self, segments: Iterable[Segment]) -> bool:
        """Give back one pin of each; True if a retired segment may go now."""
        may_go = False
        with self._lock:
            for segment in segments:
                segment.pins -= 1
                assert segment.pins >= 0
                if segment.pins == 0:
                    segment.forget_files()
                    may_go |= segment.retired
        return may_go

    def set_out(self, mask: int) -> None:
        """Runs with a part in these directories (as bits) are misses until further notice."""
        self._out_mask = mask

    def add_segment(self, segment: Segment) -> None:
        with self._lock:
            self._segments[segment.number] = segment

    def add_unread(self, segments: Iterable[Segment]) -> None:
        """Segments of a directory that is back, as used before all others."""
        with self._lock:
            self._segments = {**{segment.number: segment for segment in segments}, **self._segments}

    def set_floor(self) -> None:
        """At start: no segment's score is below the floor.

        The last ones may lack a score, for it is saved some time after the first run: they count as used last, once.
        """
        with self._lock:
            known = [segment for segment in self._segments.values() if segment.score]
            self._floor = min((segment.score for segment in known), default=0.0)
            last = max((segment.number for segment in known), default=-1)
            for number in sorted(self._segments):
                if number > last:
                    self._use([self._segments[number]], depth=0)

    def add_run(self, run: StoredRun) -> bool:
        """Make a run readable; False if its segment was retired meanwhile. Counts as a use of the least cost.

        How long the prefix becomes is known when it is looked up. By its own end a tail would outlast its head.
        """
        with self._lock:
            if run.segment.retired:
                run.dropped = True
                return False
            self._admit(run)
            self._use([run.segment], depth=0)
            return True

    def adopt_run(self, run: StoredRun) -> None:
        """Make a run readable that was found at start; not a use."""
        with self._lock:
            self._admit(run)

    def drop_run(self, run: StoredRun) -> None:
        """Forget a run, if its segment has it."""
        with self._lock:
            if run in run.segment.runs:
                self._forget(run)

    def set_aside(self, run: StoredRun) -> bool:
        """Make a run a miss until the next start finds it again; False if it is one already."""
        with self._lock:
            if run.dropped:
                return False
            self._forget_chunks(run)
            return True

    def drop_file(self, segment: Segment, stripe: int) -> int:
        """Forget all runs that have a part in the file of ``segment`` in directory ``stripe``; says how many."""
        with self._lock:
            gone = [run for run in segment.runs if run.place.shape.part_bytes[stripe]]
            for run in gone:
                self._forget(run)
            return len(gone)

    def quarantine(self, run: StoredRun, chunks: Mapping[int, str]) -> dict[int, str]:
        """Stop serving some chunks of a run; returns those that were served until now."""
        with self._lock:
            if run.dropped:
                return {}
            fresh = {index: why for index, why in chunks.items() if index not in run.quarantined}
            run.quarantined = {**run.quarantined, **fresh}
            self._marked[run] = None
            self._quarantined += len(fresh)
            for index in fresh:
                self._forget_chunk(run, index)
            return fresh

    def retire(self, segment: Segment) -> list[bytes] | None:
        """Take a segment out of the maps; returns chunks that become misses, None if it is out already."""
        with self._lock:
            return None if segment.retired else self._retire(segment)

    # -- eviction --------------------------------------------------------------------------------

    def retire_coldest(self, within: int) -> tuple[Segment, list[bytes]] | None:
        """As :meth:`retire`, the segment with the lowest score that is sealed and free of pins; None: there is none.

        The score becomes the floor.

        Args:
            within: it has a file in one of these directories, as bits.
        """
        with self._lock:
            found = (segment for segment in self._evictable() if segment.mask & within)
            coldest = min(found, key=_worth, default=None)
            if coldest is None:
                return None
            self._floor = max(self._floor, coldest.score)
            return coldest, self._retire(coldest)

    def evictable(self) -> list[Segment]:
        """All segments that are sealed and free of pins."""
        with self._lock:
            return self._evictable()

    # -- looking around --------------------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """By number."""
        with self._lock:
            return [self._segments[number] for number in sorted(self._segments)]

    def segment_states(self) -> dict[int, SegmentState]:
        """Of each segment, in order of use."""
        with self._lock:
            lost = Counter(run.segment for run in self._marked if len(run.quarantined) == len(run.place.keys))
            return {
                number: SegmentState(item.score, len(item.runs) + item.unread_runs - lost[item])
                for number, item in self._segments.items()
            }

    def quarantined(self, most: int) -> dict[bytes, dict[int, str]]:
        """Run id -> chunk of the run -> why it is not served; the newest, of so many chunks at most."""
        found: dict[bytes, dict[int, str]] = {}
        with self._lock:
            for run in sorted(
                self._marked, key=lambda run: (run.segment.number, run.place.age), reverse=True
            ):
                most -= len(run.quarantined)
                if most < 0:
                    break
                found[run.place.run_id] = dict(run.quarantined)
        return found

    def coldest(self, one_in: int) -> list[int]:
        """The segments that are evicted first, in use or not: so small a share of all."""
        with self._lock:
            found = heapq.nsmallest(len(self._segments) // one_in, self._segments.values(), key=_worth)
            return [segment.number for segment in found]

    def counts(self) -> CatalogCounts:
        with self._lock:
            runs = sum(len(segment.runs) for segment in self._segments.values())
            layouts = tuple(sorted(self._layouts, key=self._layouts.__getitem__, reverse=True))
            return CatalogCounts(len(self._chunks), runs, len(self._segments), self._quarantined, layouts)

    def _evictable(self) -> list[Segment]:
        return [segment for segment in self._segments.values() if segment.sealed and not segment.pins]

    def _retire(self, segment: Segment) -> list[bytes]:
        segment.retired = True
        del self._segments[segment.number]
        runs = sorted(segment.runs, key=lambda run: run.place.age)
        chunks = [key for run in runs for key in run.place.keys if self._chunks.get(key) is run]
        for run in runs:
            self._forget(run)
        return chunks

    def _use(self, segments: Sequence[Segment], depth: int) -> None:
        # Every chunk of a prefix is worth the whole of it, for without its head the tail is of no use; the
        # head, used last, is the last to go.
        cost = 1 + depth * CHUNK_TOKENS / (2 * self._doubling)
        for segment in reversed(segments):
            self._segments[segment.number] = self._segments.pop(segment.number)
            segment.score = max(segment.score, self._floor + cost)

    def _admit(self, run: StoredRun) -> None:
        run.segment.runs.add(run)
        if run.place.namespace_id != SCRATCH_NAMESPACE:
            sizes = run.place.shape.chunk_layer_bytes
            self._layouts[sizes] = max(run.place.segment, self._layouts.get(sizes, 0))
        for index, key in enumerate(run.place.keys):
            other = self._chunks.get(key)
            # By segments, whose numbers grow with age: of two runs at once the first may be ready last.
            is_newest = other is None or run.place.segment >= other.place.segment
            if index not in run.quarantined and is_newest:
                self._chunks[key] = run
        if run.quarantined:
            self._marked[run] = None
        self._quarantined += len(run.quarantined)

    def _forget(self, run: StoredRun) -> None:
        run.segment.runs.discard(run)
        self._marked.pop(run, None)
        self._quarantined -= len(run.quarantined)
        self._forget_chunks(run)

    def _forget_chunks(self, run: StoredRun) -> None:
        run.dropped = True
        for index in range(len(run.place.keys)):
            self._forget_chunk(run, index)

    def _forget_chunk(self, run: StoredRun, index: int) -> None:
        key = run.place.keys[index]
        if self._chunks.get(key) is run:
            del self._chunks[key]


def _worth(segment: Segment) -> tuple[bool, float]:
    """Where it is least, the segment is evicted first; of equal ones the first in order of use.

    What nobody can read before the next start goes before all that is served.
    """
    return bool(segment.runs) or not segment.is_unread, segment.score
