"""Finding runs by their headers, for when the index is lost (docs/store-format.md, "Rebuilding").

Reads a header a part, looks at the beginning of every other one and at no payload, so the time depends on the
number of extents; everything is verified when it is read. Buffered I/O on purpose: this must work whatever
O_DIRECT does.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.store.format.geometry import BLOCK, ShapeTable, extent_bytes
from sglang_hcache.store.format.record import MAGIC, PEEK_BYTES, ExtentHeader, parse_header, peek_extent
from sglang_hcache.store.format.rows import RunPlace
from sglang_hcache.store.io.engine import OpenFile
from sglang_hcache.store.io.workers import DeadlineCaller, WorkerPool
from sglang_hcache.store.volumes.health import GONE_ERRNOS, OWN_ERRNOS
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)

_SCAN_THREADS = 8
_SAY_S = 10.0
_WINDOW_BYTES = 2**20
"""Read at once while looking for the next header after damage."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one directory holds of a run."""

    first: ExtentHeader
    extents: tuple[tuple[int, int, int], ...]
    """Layer, chunk bytes and offset inside the part, of each extent in order."""


class Scan:
    """Looks for the complete runs of segments, on daemon threads of its own, from now on.

    Several segments at a time: what takes long is waiting for the device. A directory that hangs or is gone is taken
    out, and no more is read there. Files that cannot be read hold no runs.

    Raises:
        OSError: the system gives no thread.
    """

    def __init__(self, numbers: Sequence[int], volumes: Sequence[Volume], shapes: ShapeTable) -> None:
        self.found: dict[int, list[RunPlace]] = {}
        """By segment, in the order of their files."""
        self.seen_whole: set[int] = set()
        """Segments of which every directory was there."""
        self._volumes = volumes
        self._shapes = shapes
        self._total = self._left = len(numbers)
        self.error: OSError | None = None
        """The system gave no thread, no file or no memory: not all was read."""
        self._stopping = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._may_say = Throttle(_SAY_S)
        self._may_say()  # not at once
        pool = WorkerPool("hcache-scan", _SCAN_THREADS)
        for number in numbers:
            pool.submit(partial(self._scan, number))
        pool.close(0.0)
        if not numbers:
            self._over.set()

    def is_over(self, timeout_s: float) -> bool:
        """Whether it ends within ``timeout_s`` seconds; logs now and then how far it is."""
        is_over = self._over.wait(timeout_s)
        if not is_over and self._may_say():
            logger.info("hcache: %d of %d segments are read", self._total - self._left, self._total)
        return is_over

    def stop(self) -> None:
        """Begin no further segment."""
        self._stopping = True

    def _scan(self, number: int) -> None:
        try:
            if not self._stopping:
                self.found[number], is_whole = _scan(number, self._volumes, self._shapes)
                if is_whole:
                    self.seen_whole.add(number)
        except OSError as error:
            self.error, self._stopping = error, True
        finally:
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._over.set()


def scan_segments(numbers: Sequence[int], volumes: Sequence[Volume], shapes: ShapeTable) -> list[RunPlace]:
    """As :class:`Scan`, once it is over; in the order of ``numbers``. Raises OSError."""
    scan = Scan(numbers, volumes, shapes)
    while not scan.is_over(_SAY_S):
        pass
    if scan.error is not None:
        raise scan.error
    return [place for number in numbers for place in scan.found[number]]


def _scan(number: int, volumes: Sequence[Volume], shapes: ShapeTable) -> tuple[list[RunPlace], bool]:
    """The runs of a segment, and whether every directory was there."""
    parts: dict[bytes, dict[int, Part]] = {}
    is_whole = True
    for volume in volumes:
        found = _parts_in(volume, number, shapes.num_stripes) if volume.health.readable else None
        is_whole &= found is not None
        for part in found or ():
            parts.setdefault(part.first.run_id, {})[volume.stripe] = part
    runs = (_join(found, shapes) for found in parts.values())
    places = sorted((run for run in runs if run is not None), key=lambda run: max(run.offsets))
    return places, is_whole


def _parts_in(volume: Volume, number: int, num_stripes: int) -> list[Part] | None:
    """What a segment's file in one directory holds, up to where it cannot be read; None if the directory is out."""
    health = volume.health
    caller = DeadlineCaller("hcache-scan", health.hangs, health.returned)
    found: list[Part] = []

    def read() -> None:
        file = _File(volume.directory.open_to_read(number, False), caller.goes_on)
        parts = _scan_file(file, number, volume.stripe, num_stripes)
        while (part := next(parts, None)) is not None:
            found.append(part)

    try:
        caller.call(read, volume.patience_s)
    except OSError as error:
        if error.errno in OWN_ERRNOS:
            raise  # it says nothing of the file, which would be deleted as one without runs
        if error.errno in GONE_ERRNOS:
            health.failed(error, writing=False)
            return None
    finally:
        caller.close(0.0)
    return found


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
