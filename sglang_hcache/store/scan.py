"""Finding runs by their headers, for when the index is lost (docs/store-format.md, "Rebuilding").

Reads one header a part and no payload, so the time depends on the number of runs; everything is verified when it is
read. Buffered I/O on purpose: this must work whatever O_DIRECT does.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.store.format.geometry import BLOCK, mask_of
from sglang_hcache.store.format.record import MAGIC, parse_header
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


def scan_segments(numbers: Sequence[int], volumes: Sequence[Volume]) -> list[RunPlace]:
    """The runs of these segments, in the order of ``numbers`` and of their files. Says now and then how far it is.

    A run counts if each of its directories that can be read has its first header: what lies in the others is believed.
    A directory that hangs or is gone is taken out, and no more is read there. Files that cannot be read hold no runs.
    Several segments at a time: what takes long is waiting for the device.

    Raises:
        OSError: the system gives no thread, no file or no memory.
    """
    pool = WorkerPool("hcache-scan", _SCAN_THREADS)
    scans = [Future[list[RunPlace]]() for _ in numbers]
    try:
        for number, scan in zip(numbers, scans, strict=True):
            pool.submit(partial(_fulfil, scan, number, volumes))
        while True:
            done, left = wait(scans, _SAY_S, FIRST_EXCEPTION)
            for scan in done:
                scan.result()
            if not left:
                return [place for scan in scans for place in scan.result()]
            logger.info("hcache: %d of %d segments are read", len(done), len(scans))
    finally:
        for scan in scans:
            scan.cancel()
        pool.close(0.0)


def _fulfil(scan: Future[list[RunPlace]], number: int, volumes: Sequence[Volume]) -> None:
    if not scan.set_running_or_notify_cancel():
        return
    try:
        scan.set_result(_scan(number, volumes))
    except BaseException as error:
        scan.set_exception(error)


def _scan(number: int, volumes: Sequence[Volume]) -> list[RunPlace]:
    there: dict[RunPlace, int] = defaultdict(int)
    read = 0
    for volume in volumes:
        found = _places_in(volume, number, len(volumes)) if volume.health.readable else None
        if found is not None:
            read |= 1 << volume.stripe
            for place in found:
                there[place] |= 1 << volume.stripe
    complete = [place for place, mask in there.items() if mask == _parts_of(place) & read]
    return sorted(complete, key=lambda place: sum(place.offsets))  # it grows with each run


def _parts_of(place: RunPlace) -> int:
    """Directories, as bits, in which a run has a layer."""
    return mask_of(stripe for stripe, size in enumerate(place.shape.part_bytes) if size)


def _places_in(volume: Volume, number: int, num_stripes: int) -> list[RunPlace] | None:
    """Runs of which a segment's file there has the first header; None: it is out."""
    health = volume.health
    caller = DeadlineCaller("hcache-scan", health.hangs, health.returned)
    found: list[RunPlace] = []

    def read() -> None:
        file = _File(volume.directory.open_to_read(number, False), caller.goes_on)
        found.extend(_scan_file(file, (number, volume.stripe, num_stripes)))

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
    """A segment's file; after each call it says that it goes on. What cannot be read counts as zeros.

    Raises:
        OSError: the device is gone, or this process lacks something.
    """

    def __init__(self, file: OpenFile, go_on: Callable[[], None]) -> None:
        self._file = file
        self._go_on = go_on
        self._careful_until = 0
        self.size = os.fstat(file.fd).st_size

    def read(self, size: int, offset: int) -> bytes:
        """From ``offset`` on; a block only where the device has failed nearby."""
        if offset < self._careful_until:
            size = BLOCK
        try:
            data = os.pread(self._file.fd, size, offset)
        except OSError as error:
            if error.errno in OWN_ERRNOS | GONE_ERRNOS:
                raise
            if size == BLOCK:
                return bytes(BLOCK)
            self._careful_until = offset + size
            return self.read(BLOCK, offset)
        self._go_on()
        return data

    def next_data(self, offset: int) -> int:
        """Where the hole ends that ``offset`` may lie in; the size if nothing follows."""
        try:
            return os.lseek(self._file.fd, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: no data behind here
            return self.size


def _scan_file(file: _File, here: tuple[int, int, int]) -> Iterator[RunPlace]:
    at = last = 0
    while at + BLOCK <= file.size:
        place = _place_at(file.read(BLOCK, at), here, at)
        if place is not None and place.ends[here[1]] <= file.size:
            yield place
            last, at = at, place.ends[here[1]]
        else:  # also within the last part: a header that is wrong in its sizes must not hide those behind it
            last = at = _next_candidate(file, last + BLOCK)


def _place_at(block: bytes, here: tuple[int, int, int], at: int) -> RunPlace | None:
    """The run whose part begins with ``block``, at ``at`` in segment, stripe of so many directories ``here``."""
    try:
        header = parse_header(block)
    except CorruptExtentError:
        return None
    place = header.place
    said = (place.segment, header.stripe, place.shape.num_stripes, place.extent_offset(header.layer))
    return place if header.begins_part and said == (*here, at) else None


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
