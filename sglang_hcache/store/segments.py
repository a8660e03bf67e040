"""Segments: one preallocated file in each of some directories, filled together from the front."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from sglang_hcache.core.errors import StoreError
from sglang_hcache.store.config import FILE_SLACK_BYTES
from sglang_hcache.store.format.geometry import BLOCK, RunShape, mask_of, members_of
from sglang_hcache.store.format.place import RunPlace
from sglang_hcache.store.io.engine import OpenFile
from sglang_hcache.store.volumes.files import SegmentFile
from sglang_hcache.store.volumes.volume import Volume

# Of a million runs: no object for each.
_NONE: Mapping[int, str] = MappingProxyType({})

_ALLOCATED_PER_S = 200e6
"""Bytes that a nearly full file system finds for a file at least: it may have to look for them in many places."""
_ERASE_S = 600.0
"""To overwrite a file of some gigabytes, where the file system can make no holes."""


class StoredRun:
    """A run that is stored, or being written. Identity matters: one object for each."""

    __slots__ = ("dropped", "place", "quarantined", "segment")

    def __init__(self, place: RunPlace, segment: Segment) -> None:
        self.place = place
        self.segment = segment
        self.dropped = False
        """Its chunks are misses, or other runs hold them: it is gone, or a read of it has failed."""
        self.quarantined = _NONE
        """Chunks that are not served any more, and why."""


class Segment:
    """The files of one segment and what the store knows about them.

    ``pins``, ``runs``, ``score`` and ``retired`` belong to the catalog and its lock; sizes
    belong to ``Space`` and its lock. Files are opened on demand while pinned.
    """

    def __init__(
        self, number: int, volumes: Sequence[Volume], members: tuple[int, ...], file_bytes: int
    ) -> None:
        self.number = number
        self.members = members
        """Directories that have a file of it, ascending."""
        self.mask = mask_of(members)
        self.file_bytes = file_bytes
        """Room in each file."""
        self.used = [0] * len(volumes)
        """Bytes handed out in each directory's file: the next run goes here."""
        self.sealed = True
        """Takes no more runs: all but the one that is being filled."""
        self.begun_s = 0.0
        """When this process began it, seconds since 1970; 0: an earlier one did."""
        self.written_s = -math.inf
        """When it was written to last, seconds since 1970: by this process, or as its files say; -inf: unknown."""
        self.found: dict[int, SegmentFile] = {}
        """Its files as a listing found them, by directory, until :meth:`tidy`."""
        self.accounted = dict.fromkeys(members, 0)
        """What it counts against the cap in each directory, bytes."""
        self.pins = 0
        self.runs: set[StoredRun] = set()
        self.is_unread = False
        """A read of it failed at the start: nobody knows what else is in it."""
        self.unread_runs = 0
        """So many more it has that were not found at the start: a read failed, or its directory was out."""
        self.score = 0.0
        """The segment with the lowest one is evicted first."""
        self.retired = False
        """Out of the catalog; its files go when the last pin does."""
        self._deleted = 0
        self._volumes = volumes
        self._file_lock = threading.Lock()
        self._files: dict[tuple[int, bool], OpenFile] = {}
        """By directory, and whether for writing."""

    @property
    def accounted_bytes(self) -> int:
        """What it counts against the cap."""
        return sum(self.accounted.values())

    @property
    def left(self) -> int:
        """Directories, as bits, in which a file of it may be: not those where it was deleted."""
        return self.mask & ~self._deleted

    def paths_left(self) -> list[Path]:
        """Of the files in these directories."""
        return [self._volumes[stripe].directory.segment_path(self.number) for stripe in members_of(self.left)]

    @property
    def freeable_bytes(self) -> dict[int, int]:
        """What deleting it would free in each directory where files can be deleted."""
        return {
            stripe: size for stripe, size in self.accounted.items() if self._volumes[stripe].health.can_delete
        }

    def tidy(self) -> None:
        """Note what :attr:`found` says, and cut what is longer than what is used. Raises the last StoreError."""
        found, self.found = self.found, {}
        uncut = []
        for stripe in self.members:
            if stripe not in found:
                self.measure([stripe])  # its directory is out
            else:
                self.note(stripe, found[stripe])
                uncut += [stripe] if found[stripe].size > self.used[stripe] else []
        self.trim(uncut)

    def create(self) -> None:
        """Create and preallocate the files, durably.

        Raises:
            StoreError: nothing is left behind that could be removed; the rest is accounted for, and so is what a
                call that hangs may still create.
        """
        self.accounted = dict.fromkeys(self.members, self.file_bytes + FILE_SLACK_BYTES)
        self.begun_s = time.time()
        self.sealed = False
        try:
            for stripe in self.members:
                volume = self._volumes[stripe]
                create = partial(volume.directory.create_segment, self.number, self.file_bytes)
                patience_s = volume.patience_s + self.file_bytes / _ALLOCATED_PER_S
                volume.call(create, "cannot create a segment file", writing=True, patience_s=patience_s)
        except StoreError:
            self.unlink()
            raise
        self.measure()

    def fits(self, shape: RunShape) -> bool:
        """Whether a run of ``shape``, of the same members, still has room in every file."""
        return all(
            used + part <= self.file_bytes for used, part in zip(self.used, shape.part_bytes, strict=True)
        )

    def take(self, place: RunPlace) -> None:
        """The run at ``place`` is part of it."""
        for stripe in place.shape.members:
            if place.shape.part_bytes[stripe]:
                self.used[stripe] = max(self.used[stripe], place.end(stripe))

    def give_back(self, place: RunPlace) -> None:
        """The room at ``place`` is free again, if nothing lies behind it."""
        ends = [(stripe, end) for stripe, end in enumerate(place.ends) if end]
        if all(self.used[stripe] == end for stripe, end in ends):
            for stripe, _ in ends:
                self.used[stripe] = place.offsets[stripe]

    def trim(self, stripes: Iterable[int] | None = None) -> None:
        """Cut the files in these directories, or all, behind what is used. Raises the last StoreError at the end."""
        failure: StoreError | None = None
        stripes = self.members if stripes is None else stripes
        for stripe in stripes:
            volume = self._volumes[stripe]
            trim = partial(volume.directory.trim_segment, self.number, self.used[stripe])
            try:
                volume.call(trim, "cannot trim a segment file", writing=True)
            except StoreError as error:
                failure = error
        self.measure(stripes)
        if failure is not None:
            raise failure

    def keep_only(self, places: Sequence[RunPlace], going: Sequence[RunPlace]) -> None:
        """Erase all else in its files, what could not be read included; they may be trimmed then. Raises StoreError.

        Last the headers by which the runs ``going`` are found: while any of their bytes are left, they have a name.
        """
        self.unread_runs = 0  # also if it fails halfway: some may be gone then
        kept = {
            stripe: [(place.offsets[stripe], place.ends[stripe]) for place in places if place.ends[stripe]]
            for stripe in self.members
        }
        for stripe in self.members if going else ():
            named = [
                (place.offsets[stripe], place.offsets[stripe] + BLOCK)
                for place in going
                if place.ends[stripe]
            ]
            self._keep_only(stripe, kept[stripe] + named)
        for stripe in self.members:
            self._keep_only(stripe, kept[stripe])
        self.used = [max(ends) for ends in zip(*(place.ends for place in places), strict=True)]
        self.is_unread = False

    def _keep_only(self, stripe: int, kept: Sequence[tuple[int, int]]) -> None:
        volume = self._volumes[stripe]
        keep = partial(volume.directory.keep_of_segment, self.number, kept)
        volume.call(keep, "cannot erase parts of a segment file", writing=True, patience_s=_ERASE_S)

    def measure(self, stripes: Iterable[int] | None = None) -> None:
        """Bring ``accounted`` up to date with these files, or all; what cannot be asked counts as before or in full."""
        for stripe in self.members if stripes is None else stripes:
            volume = self._volumes[stripe]
            measure = partial(volume.directory.segment_bytes, self.number)
            try:
                size = volume.call(measure, "cannot measure a segment file", blame=False)
            except StoreError:
                full = max(self.file_bytes, self.used[stripe]) + FILE_SLACK_BYTES
                self.accounted[stripe] = self.accounted[stripe] or full
            else:
                self.accounted[stripe] = size + FILE_SLACK_BYTES if size else 0

    def unlink(self) -> dict[int, StoreError]:
        """Remove the files that are left, but for those in directories that are out; returns failures by directory.

        Files that stay are still accounted for.
        """
        failures: dict[int, StoreError] = {}
        for stripe in members_of(self.left):
            volume = self._volumes[stripe]
            if not volume.health.readable:
                continue
            unlink = partial(volume.directory.unlink_segment, self.number)
            try:
                # Without blame: it may be the file that cannot be deleted (``chattr +i``).
                volume.call(unlink, "cannot delete a segment file", writing=True, blame=False)
                self.accounted[stripe] = 0
                self._deleted |= 1 << stripe
            except StoreError as error:
                failures[stripe] = error
        return failures

    def note(self, stripe: int, file: SegmentFile) -> None:
        """What a listing says of its file in one directory."""
        self.accounted[stripe] = file.taken_bytes + FILE_SLACK_BYTES
        self.written_s = max(self.written_s, file.written_s)

    def join(self, stripe: int, file: SegmentFile) -> None:
        """One more file of it was found, in another directory, and it is unread."""
        self.members = tuple(sorted((*self.members, stripe)))
        self.mask = mask_of(self.members)
        self.used[stripe] = file.size
        self.note(stripe, file)

    def file(self, stripe: int, *, writing: bool = False) -> OpenFile:
        """The open file in directory ``stripe``; the caller holds a pin. Raises StoreError."""
        name = (stripe, writing)
        with self._file_lock:
            if name not in self._files:
                self._files[name] = self._open(self._volumes[stripe], writing)
            return self._files[name]

    def _open(self, volume: Volume, writing: bool) -> OpenFile:
        directory = volume.directory
        if writing:
            to_write = partial(directory.open_to_write, self.number)
            return volume.call(to_write, "cannot open a segment file to write", writing=True)
        # For reading only: one that takes no writes (``chattr +i``) is served.
        to_read = partial(directory.open_to_read, self.number, directory.direct)
        return volume.call(to_read, "cannot open a segment file")

    def forget_files(self) -> None:
        """Let the open files go: nothing pins the segment, or its directory came back as another one.

        Never waits: they are closed on their directories' threads, for closing may hang as well.
        """
        with self._file_lock:
            files, self._files = self._files, {}
        for name in list(files):
            self._volumes[name[0]].let_go(files, name)
