"""Segments: one preallocated file in each directory, filled together from the front."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hcache.store.config import FILE_SLACK_BYTES
from sglang_hcache.store.directory import StoreDirectory
from sglang_hcache.store.geometry import RunShape
from sglang_hcache.store.record import ExtentHeader


@dataclass(frozen=True, slots=True)
class RunPlace:
    """What is needed to find and check a run's bytes."""

    run_id: bytes
    namespace_id: bytes
    keys: tuple[bytes, ...]
    first_chunk: int
    shape: RunShape
    segment: int
    offsets: tuple[int, ...]
    """Where the run's part begins in each directory's file, bytes."""

    def header(self, layer: int, digests: tuple[int, ...] = ()) -> ExtentHeader:
        """The header that belongs in front of ``layer``."""
        stripe = self.shape.stripe(layer)
        return ExtentHeader(
            namespace_id=self.namespace_id,
            run_id=self.run_id,
            layer=layer,
            num_layers=len(self.shape.chunk_layer_bytes),
            first_chunk=self.first_chunk,
            chunk_bytes=self.shape.chunk_layer_bytes[layer],
            stripe=stripe,
            num_stripes=self.shape.num_stripes,
            rotation=self.shape.rotation,
            segment=self.segment,
            part_offset=self.offsets[stripe],
            part_bytes=self.shape.part_bytes[stripe],
            extent_offset=self.shape.layer_offsets[layer],
            keys=self.keys,
            digests=digests,
        )

    def extent_offset(self, layer: int) -> int:
        """Byte at which the header of ``layer`` lies in its file."""
        return self.offsets[self.shape.stripe(layer)] + self.shape.layer_offsets[layer]


class StoredRun:
    """A run in the index. Identity matters: one object per row."""

    __slots__ = ("dropped", "failures", "place", "row", "segment")

    def __init__(self, place: RunPlace, segment: Segment, row: int) -> None:
        self.place = place
        self.segment = segment
        self.row = row
        """Number of its row in the index."""
        self.dropped = False
        self.failures = 0
        """Reads that ended in EIO."""


class Segment:
    """The files of one segment and what the store knows about them.

    ``pins``, ``runs``, ``last_used`` and ``retired`` belong to the catalog and its lock; sizes belong to
    ``Space`` and its lock. File descriptors are opened on demand while pinned.
    """

    def __init__(self, number: int, directories: Sequence[StoreDirectory], file_bytes: int) -> None:
        self.number = number
        self.directories = directories
        self.file_bytes = file_bytes
        """Room in each file."""
        self.used = [0] * len(directories)
        """Bytes handed out in each file: the next run goes here."""
        self.sealed = False
        self.accounted_bytes = 0
        """What it counts against the cap."""
        self.pins = 0
        self.runs: set[StoredRun] = set()
        self.last_used = 0
        self.retired = False
        """Out of the index; its files go when the last pin does."""
        self._fd_lock = threading.Lock()
        self._fds: dict[int, int] = {}

    def create(self) -> None:
        """Create and preallocate the files, durably.

        Raises:
            OSError: nothing is left behind that could be removed.
        """
        try:
            for directory in self.directories:
                fd = directory.open_segment(self.number, create=True)
                try:
                    os.fchmod(fd, 0o600)
                    _preallocate(fd, self.file_bytes)
                finally:
                    os.close(fd)
                directory.sync()
        except OSError:
            self.unlink()
            raise
        self.measure()

    def fits(self, shape: RunShape) -> bool:
        """Whether a run of ``shape`` still has room in every file."""
        return all(
            used + part <= self.file_bytes for used, part in zip(self.used, shape.part_bytes, strict=True)
        )

    def trim(self) -> None:
        """Cut every file behind what is used. Raises OSError."""
        for directory, used in zip(self.directories, self.used, strict=True):
            path = directory.segment_path(self.number)
            if path.stat().st_size > used:
                os.truncate(path, used)
        self.measure()

    def measure(self) -> None:
        """Bring ``accounted_bytes`` up to date with the files."""
        self.accounted_bytes = 0
        for directory in self.directories:
            try:
                found = directory.segment_path(self.number).stat()
            except FileNotFoundError:
                continue
            except OSError:
                self.accounted_bytes += self.file_bytes + FILE_SLACK_BYTES
                continue
            self.accounted_bytes += max(found.st_size, found.st_blocks * 512) + FILE_SLACK_BYTES

    def allocated_bytes(self, stripe: int) -> int:
        """What deleting one file would free; 0 if it cannot be known."""
        try:
            return self.directories[stripe].segment_path(self.number).stat().st_blocks * 512
        except OSError:
            return 0

    def unlink(self) -> OSError | None:
        """Remove the files; returns the last failure. Files that stay are still accounted for."""
        failure: OSError | None = None
        for directory in self.directories:
            try:
                directory.segment_path(self.number).unlink(missing_ok=True)
            except OSError as error:
                failure = error
        self.measure()
        return failure

    def fd(self, stripe: int) -> int:
        """Descriptor of the file in directory ``stripe``; the caller holds a pin. Raises OSError."""
        with self._fd_lock:
            if stripe not in self._fds:
                self._fds[stripe] = self.directories[stripe].open_segment(self.number)
            return self._fds[stripe]

    def take_fds(self) -> list[int]:
        """Hand over the open descriptors for closing; only while nothing pins the segment."""
        with self._fd_lock:
            fds, self._fds = list(self._fds.values()), {}
            return fds


def _preallocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)
