"""What is in a store, seen without its lock: beside a running server or without one. Nothing is written."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_hcache.core.errors import StoreError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store.allowance import WriteAllowance
from sglang_hcache.store.census import Contents, Files, lost_runs
from sglang_hcache.store.config import DirectoryStats, floor_of
from sglang_hcache.store.format.place import RunPlace
from sglang_hcache.store.format.state import State
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.notes import Notes
from sglang_hcache.store.start import read_state
from sglang_hcache.store.tally import Tally, told_in
from sglang_hcache.store.volumes.health import Condition
from sglang_hcache.store.volumes.lock import LockHolder
from sglang_hcache.store.volumes.looking import SeenDirectory, Sight, look_at
from sglang_hcache.store.volumes.mounts import is_read_only
from sglang_hcache.store.volumes.volume import Volume


@dataclass(frozen=True, slots=True)
class DirectoryInfo(DirectoryStats):
    """One directory of the store. Its condition is what the server says if one runs, else as it looks now."""

    physical_bytes: int = 0
    """Allocated blocks of all files in it, as ``du`` counts; 0 if it cannot be asked."""
    free_bytes: int = -1
    """Free space of its file system for this user; -1 if it cannot be asked."""
    stripe: int = 0
    segments: int = 0
    """Segment files in it."""
    floor_bytes: int = 0
    """What a server leaves free on its file system."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run and what is known of it."""

    number: int
    """Grows with age."""
    place: RunPlace
    quarantined: Mapping[int, str]
    """Chunk of the run -> why it is not served."""
    is_available: bool
    """Whether all its directories are there: else its chunks are misses."""

    @property
    def disk_bytes(self) -> int:
        """Headers and padding included."""
        return self.place.shape.disk_bytes


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """All runs of one namespace: of one model with its weights and settings, and one tenant."""

    namespace_id: bytes
    chunks: int
    """Distinct, without the quarantined."""
    runs: int
    disk_bytes: int
    written_at: float | None
    """When its newest segment was written to last, seconds since the epoch; None if no file can be asked."""
    oldest_at: float | None
    """Likewise of its oldest segment."""
    owner: Mapping[str, str]
    """What the server that used it last has noted: ``model``, ``weights``, ``tenant``, ``adapter``, as far as known."""


class StoreView:
    """A store as it was at the moment of :meth:`open`. Close it, or use it as a context manager."""

    def __init__(
        self,
        sight: Sight,
        contents: Contents,
        state: State,
        state_problems: Sequence[str],
        lock_holder: LockHolder | None,
    ) -> None:
        self.sight = sight
        self.identity: StoreIdentity = sight.identity
        self.volumes = sight.volumes
        self.files = contents.files
        self.state = state
        self.state_problems = state_problems
        """What is wrong with copies of it."""
        self.places = contents.runs
        """Of the runs that are complete in the directories that can be read, by age."""
        self.unread = contents.unread
        """Segment -> directories, as bits, whose file could not be read, or not all of it."""
        self.lost = lost_runs(state, contents)
        """How many runs a segment has lost."""
        self.torn = {
            place: missing for place, missing in contents.found if missing and place.segment in self.lost
        }
        """Runs in such segments of which something is left, and in which directories, as bits, nothing is."""
        self.lock_holder = lock_holder
        """Process that uses the store; None if none does."""

    @classmethod
    def open(cls, dirs: Sequence[Path]) -> StoreView:
        """Look at the store in ``dirs``: all of its directories, in any order.

        Directories that are missing or sick are reported (:meth:`directories`), not fatal.

        Raises:
            StoreFormatError: no store, not one store, not all of its directories, or one of another format.
        """
        sight = look_at(dirs)
        holder = _lock_holder(sight)
        try:
            before, _ = read_state(sight.volumes, sight.identity.store_id)
            contents = Files.listed(sight.identity.first_segment, sight.volumes).read(sight.volumes)
            files = replace(contents.files, first_segment=sight.first_segment())
            contents = replace(contents, files=files)
            after, problems = read_state(sight.volumes, sight.identity.store_id)
            return cls(sight, contents, _meanwhile(before, after), [*problems.values()], holder)
        except BaseException:
            sight.close()
            raise

    def close(self) -> None:
        self.sight.close()

    def __enter__(self) -> StoreView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def directory_of(self, reason: str) -> Path | None:
        """Where the file is that the reason of a quarantine begins with; None of one that names none."""
        return next((path for path in self.paths if reason.startswith(f"{path}/")), None)

    # -- the store -------------------------------------------------------------------------------

    @property
    def paths(self) -> tuple[Path, ...]:
        """The directories, by stripe."""
        return tuple(volume.path for volume in self.volumes)

    def directories(self) -> list[DirectoryInfo]:
        """Every directory, by stripe; asks the file systems."""
        told = told_in(self.state.meta)
        found = []
        for item in self.sight.seen:
            volume = item.volume
            try:
                physical, free = volume.allocated_bytes(), volume.free_bytes()
                segments = len(volume.segment_sizes())
                floor = self._floor_of(volume)
            except StoreError as error:
                volume.health.take_out(str(error))
                physical, free, segments, floor = 0, -1, 0, 0
            condition, reason = str(volume.health.condition), volume.health.reason
            said, why, corrupt, errors = told.get(volume.stripe, (str(Condition.HEALTHY), "", 0, 0))
            if volume.health.readable:
                # What the last server thought is long over.
                condition, reason = (said, why) if self.lock_holder else (str(Condition.HEALTHY), "")
                if condition == Condition.HEALTHY:  # also where a server could not write down what it thinks
                    condition, why_now = _condition_of(item.directory)
                    reason = why_now or reason
            stats = (volume.path, condition, reason, corrupt, errors)
            found.append(DirectoryInfo(*stats, physical, free, volume.stripe, segments, floor))
        return found

    def _floor_of(self, volume: Volume) -> int:
        """Raises StoreError."""
        total = volume.call(volume.directory.total_bytes, "cannot ask for its size")
        return floor_of(total, self.identity.free_floor_bytes, self.identity.free_floor_percent)

    def segment_sizes(self) -> dict[int, dict[int, int]]:
        """Bytes of segment files as they are now, by directory and segment, as far as directories answer."""
        found = {}
        for volume in self.volumes:
            with contextlib.suppress(StoreError):
                found[volume.stripe] = volume.segment_sizes()
        return found

    def totals(self) -> dict[str, int] | None:
        """Counts since the store was created, by event; None if they are not known."""
        if "totals" not in self.state.meta:
            return None
        tally = Tally(Counters())
        tally.resume(self.state.meta["totals"])
        return tally.totals()

    def written_today_bytes(self) -> int | None:
        """Bytes written in the last 24 hours; None if that is not known."""
        if "written" not in self.state.meta:
            return None
        return WriteAllowance.resumed(None, self.state.meta["written"]).written(time.time())

    # -- what is in it ---------------------------------------------------------------------------

    def runs(self) -> list[RunInfo]:
        """All runs, oldest first."""
        return self._described(self.places, 1)

    def torn_runs(self) -> list[RunInfo]:
        """Those of :attr:`torn`."""
        return self._described(self.torn, len(self.places) + 1)

    def _described(self, places: Iterable[RunPlace], first: int) -> list[RunInfo]:
        out = {volume.stripe for volume in self.volumes if not volume.health.readable}
        found = []
        for number, place in enumerate(places, first):
            marks = self.state.quarantined.get(place.run_id, {})
            quarantined = {chunk: why for chunk, why in marks.items() if chunk < len(place.keys)}
            found.append(RunInfo(number, place, quarantined, out.isdisjoint(place.shape.members)))
        return found

    def chunks(self) -> int:
        """Distinct chunks that are not quarantined, those of directories that are out included."""
        return _count_chunks(self.runs())

    def namespaces(self) -> list[NamespaceInfo]:
        """Largest first."""
        groups: dict[bytes, list[RunInfo]] = {}
        for run in self.runs():
            groups.setdefault(run.place.namespace_id, []).append(run)
        notes = Notes(self.state.meta.get("namespaces"))
        found = []
        for namespace_id, runs in groups.items():
            segments = {run.place.segment: run.place for run in runs}
            found.append(
                NamespaceInfo(
                    namespace_id=namespace_id,
                    chunks=_count_chunks(runs),
                    runs=len(runs),
                    disk_bytes=sum(run.disk_bytes for run in runs),
                    written_at=self.written_at(segments[max(segments)]),
                    oldest_at=self.written_at(segments[min(segments)]),
                    owner=notes.get(namespace_id.hex()),
                )
            )
        return sorted(found, key=lambda item: item.disk_bytes, reverse=True)

    def written_at(self, place: RunPlace) -> float | None:
        """When the files of a run's segment were written to last, seconds since the epoch: not before the run."""
        written_s = self.files.written_s(place.segment)
        return written_s if written_s > -math.inf else None


def _meanwhile(before: State, after: State) -> State:
    """What is known of files that were looked at between two states of a running server."""
    both = before.segments.keys() & after.segments.keys()
    segments = {
        number: replace(
            after.segments[number], runs=min(before.segments[number].runs, after.segments[number].runs)
        )
        for number in both
    }
    return replace(after, segments=segments, going=before.going | after.going)


def _count_chunks(runs: Sequence[RunInfo]) -> int:
    return len(
        {key for run in runs for index, key in enumerate(run.place.keys) if index not in run.quarantined}
    )


def _lock_holder(sight: Sight) -> LockHolder | None:
    for item in sight.seen:
        if not item.exists:
            continue
        try:
            holder = item.volume.attempt(item.directory.lock.holder)
        except OSError:
            continue
        if holder is not None:
            return holder
    return None


def _condition_of(directory: SeenDirectory) -> tuple[str, str]:
    """Condition of one that answers, and its reason, or why no server would start with it."""
    with contextlib.suppress(OSError):
        if is_read_only(directory.path):
            return str(Condition.READ_ONLY), "its file system is read-only"
        return str(Condition.HEALTHY), directory.refusal()
    return str(Condition.HEALTHY), ""
