"""Finding runs by their headers, for when the index is lost (docs/store-format.md, "Rebuilding").

Reads a header a part, looks at the beginning of every other one and at no payload, so the time depends on the
number of extents; everything is verified when it is read. Buffered I/O on purpose: this must work whatever
O_DIRECT does.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.store.format.geometry import BLOCK, ShapeTable, extent_bytes
from sglang_hcache.store.format.record import MAGIC, PEEK_BYTES, ExtentHeader, parse_header, peek_extent
from sglang_hcache.store.format.rows import RunPlace
from sglang_hcache.store.io.engine import OpenFile
from sglang_hcache.store.io.workers import WorkerPool
from sglang_hcache.store.volumes.health import GONE_ERRNOS
from sglang_hcache.store.volumes.volume import Volume

_SCAN_THREADS = 8
_WINDOW_BYTES = 2**20
"""Read at once while looking for the next header after damage."""
_LOOK_S = 0.05
"""So often threads are looked after."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one directory holds of a run."""

    first: ExtentHeader
    extents: tuple[tuple[int, int, int], ...]
    """Layer, chunk bytes and offset inside the part, of each extent in order."""


def scan_segments(numbers: Sequence[int], volumes: Sequence[Volume], shapes: ShapeTable) -> list[RunPlace]:
    """The complete runs of segments, in the order of ``numbers`` and of their files.

    Reads several segments at a time: what takes long is waiting for the device. A directory that hangs or is gone is
    taken out, and no more is read there. Files that cannot be read hold no runs.

    Raises:
        OSError: the system gives no thread.
    """
    todo = deque(numbers)
    done: _Done = queue.SimpleQueue()
    found: dict[int, list[RunPlace]] = {}
    scanners = [_Scanner(todo, done, volumes, shapes) for _ in range(min(_SCAN_THREADS, len(todo)))]
    while len(found) < len(numbers):
        with suppress(queue.Empty):
            number, places = done.get(timeout=_LOOK_S)
            if isinstance(places, Exception):
                todo.clear()
                raise places
            found[number] = places
        for index, scanner in enumerate(scanners):
            if scanner.is_given_up():
                todo.append(scanner.number)
                scanners[index] = _Scanner(todo, done, volumes, shapes)
    return [place for number in numbers for place in found[number]]


_Done = queue.SimpleQueue[tuple[int, list[RunPlace] | Exception]]


class _Scanner:
    """Scans one segment after the other on a thread of its own, which a device that hangs may keep."""

    def __init__(self, todo: deque[int], done: _Done, volumes: Sequence[Volume], shapes: ShapeTable) -> None:
        self.number = -1
        """What it scans."""
        self._todo = todo
        self._done = done
        self._volumes = volumes
        self._shapes = shapes
        self._lock = threading.Lock()
        self._where: Volume | None = None
        self._since = 0.0
        self._late = False
        pool = WorkerPool("hcache-scan", 1)
        pool.submit(self._run)
        pool.close(0.0)  # it ends behind this job

    def is_given_up(self) -> bool:
        """Whether one of its calls takes longer than it may. Then its directory is taken out, and it stops."""
        with self._lock:
            volume = self._where
            if volume is None or time.monotonic() - self._since < volume.patience_s:
                return False
            self._late = True
            volume.health.hangs()
        reason = f"no answer within {volume.patience_s:g} s"
        volume.health.failed(TimeoutError(errno.ETIMEDOUT, reason), writing=False)
        return True

    def _run(self) -> None:
        while True:
            try:
                self.number = self._todo.popleft()
            except IndexError:
                return
            places: list[RunPlace] | Exception
            try:
                places = self._scan()
            except Exception as error:  # our bug, or no memory: for the caller, who waits
                places = error
            if self._late:
                return  # others do it
            self._done.put((self.number, places))

    def _scan(self) -> list[RunPlace]:
        parts: dict[bytes, dict[int, Part]] = {}
        for volume in self._volumes:
            if self._late or not volume.health.readable:
                continue
            with self._lock:
                self._where, self._since = volume, time.monotonic()
            try:
                self._read(volume, parts)
            except OSError as error:
                if error.errno in GONE_ERRNOS:
                    volume.health.failed(error, writing=False)
            finally:
                with self._lock:
                    self._where = None
                if self._late:
                    volume.health.returned()
        runs = (_join(found, self._shapes) for found in parts.values())
        return sorted((run for run in runs if run is not None), key=lambda run: max(run.offsets))

    def _read(self, volume: Volume, parts: dict[bytes, dict[int, Part]]) -> None:
        file = _File(volume.directory.open_to_read(self.number, False), self._go_on)
        for part in _scan_file(file, self.number, volume.stripe, self._shapes.num_stripes):
            parts.setdefault(part.first.run_id, {})[volume.stripe] = part

    def _go_on(self) -> None:
        """A call has ended. Raises OSError if it was given up."""
        self._since = time.monotonic()
        if self._late:
            raise OSError(errno.ECANCELED, "given up")


class _File:
    """A segment's file; after each call it says that it goes on. Raises OSError."""

    def __init__(self, file: OpenFile, go_on: Callable[[], None]) -> None:
        self._file = file
        self._go_on = go_on
        self.size = os.fstat(file.fd).st_size

    def read(self, size: int, offset: int) -> bytes:
        data = os.pread(self._file.fd, size, offset)
        self._go_on()
        return data

    def next_data(self, offset: int) -> int:
        """Where the hole ends that ``offset`` may lie in; the size if nothing follows."""
        try:
            return os.lseek(self._file.fd, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: no data behind here
            return self.size


def _scan_file(file: _File, number: int, stripe: int, num_stripes: int) -> Iterator[Part]:
    at = 0
    while at + BLOCK <= file.size:
        block = file.read(BLOCK, at)
        first = _parsed(block)
        in_place = first is not None and (
            (first.segment, first.stripe, first.num_stripes, first.part_offset, first.extent_offset)
            == (number, stripe, num_stripes, at, 0)
        )
        if first is None or not in_place or first.part_bytes < first.extent_bytes:
            at = _next_candidate(file, at + BLOCK)
            continue
        part = _walk_part(file, first, block)
        if part:
            yield part
            at += first.part_bytes
        else:
            at += first.extent_bytes


def _walk_part(file: _File, first: ExtentHeader, block: bytes) -> Part | None:
    """The part that ``first`` begins, which was read from ``block``; None if an extent is missing or out of place."""
    extents = [(first.layer, first.chunk_bytes, 0)]
    at = first.extent_bytes
    while at < first.part_bytes:
        found = peek_extent(file.read(PEEK_BYTES, first.part_offset + at), block)
        if found is None or found[2] != at:
            return None
        extents.append(found)
        at += extent_bytes(first.num_chunks, found[1])
    return Part(first, tuple(extents)) if at == first.part_bytes else None


def _parsed(block: bytes) -> ExtentHeader | None:
    try:
        return parse_header(block)
    except CorruptExtentError:
        return None


def _next_candidate(file: _File, at: int) -> int:
    """The next block from ``at`` on that begins like a header, or the end. Skips holes."""
    while at < file.size:
        at = file.next_data(at) // BLOCK * BLOCK
        window = file.read(_WINDOW_BYTES, at)
        for offset in range(0, len(window), BLOCK):
            if window.startswith(MAGIC, offset):
                return at + offset
        at += max(len(window), BLOCK)
    return file.size


def _join(parts: dict[int, Part], shapes: ShapeTable) -> RunPlace | None:
    """A run from its parts; None unless every layer is there and where it belongs."""
    first = next(iter(parts.values())).first
    layers = {
        layer: (stripe, offset, chunk_bytes)
        for stripe, part in parts.items()
        for layer, chunk_bytes, offset in part.extents
    }
    if len(layers) != first.num_layers or sorted(layers) != list(range(len(layers))):
        return None
    sizes = tuple(layers[layer][2] for layer in range(first.num_layers))
    shape = shapes.get(first.num_chunks, sizes, first.members, first.rotation)
    for stripe, part in parts.items():
        if not _same_run(part.first, first) or part.first.part_bytes != shape.part_bytes[stripe]:
            return None
    for layer, (stripe, offset, _) in layers.items():
        if (stripe, offset) != (shape.stripe(layer), shape.layer_offsets[layer]):
            return None
    return RunPlace(
        run_id=first.run_id,
        namespace_id=first.namespace_id,
        keys=first.keys,
        first_chunk=first.first_chunk,
        shape=shape,
        segment=first.segment,
        offsets=tuple(
            parts[stripe].first.part_offset if stripe in parts else 0 for stripe in range(shapes.num_stripes)
        ),
    )


def _same_run(header: ExtentHeader, other: ExtentHeader) -> bool:
    return all(
        getattr(header, name) == getattr(other, name)
        for name in ("keys", "namespace_id", "first_chunk", "num_layers", "members", "rotation")
    )
