"""Finding runs by their headers (docs/store-format.md, "Start").

Reads one header a part and no payload, so the time depends on the number of runs; everything is verified when it is
read. Buffered I/O on purpose: this must work whatever O_DIRECT does.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.store.format.geometry import BLOCK, mask_of
from sglang_hcache.store.format.place import RunPlace
from sglang_hcache.store.format.record import MAGIC, ExtentHeader, parse_header
from sglang_hcache.store.io.engine import OpenFile
from sglang_hcache.store.io.workers import DeadlineCaller, WorkerPool
from sglang_hcache.store.volumes.health import GONE_ERRNOS, OWN_ERRNOS
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)

_SCAN_THREADS = 8
_SAY_S = 10.0
_WINDOW_BYTES = 2**20
"""Read at once while looking for the next header after damage."""
_NO_FILE_ERRNOS = frozenset({errno.ENOENT, errno.ELOOP, errno.EISDIR})
"""There is no file, or none of ours."""
_NEAR_BYTES = 2**16
"""Parts that are smaller are read in windows, several headers at once."""


Found = list[tuple[RunPlace, int]]
"""Runs, and in which directories, as bits, something is missing."""


def scan_segments(numbers: Sequence[int], volumes: Sequence[Volume]) -> tuple[Found, dict[int, int]]:
    """What the headers of these segments say. Tells now and then how far it is.

    A directory that hangs or is gone is taken out, and no more is read there. Several segments at a time: what takes
    long is waiting for the device.

    Returns:
        Runs, in the order of ``numbers`` and of their files, each with the directories, as bits, that can be read and
        lack its first header. What lies in the others is believed. And segment -> directories, as bits, whose file
        could not be read, or not all of it.

    Raises:
        OSError: the system gives no thread, no file or no memory.
    """
    pool = WorkerPool("hcache-scan", _SCAN_THREADS)
    scans = [Future[tuple[Found, int]]() for _ in numbers]
    try:
        for number, scan in zip(numbers, scans, strict=True):
            pool.submit(partial(_fulfil, scan, number, volumes))
        while True:
            done, left = wait(scans, _SAY_S, FIRST_EXCEPTION)
            for scan in done:
                scan.result()
            if not left:
                found = [scan.result() for scan in scans]
                unread = {number: mask for number, (_, mask) in zip(numbers, found, strict=True) if mask}
                return [item for items, _ in found for item in items], unread
            logger.info("hcache: %d of %d segments are read", len(done), len(scans))
    finally:
        for scan in scans:
            scan.cancel()
        pool.close(0.0)


def _fulfil(scan: Future[tuple[Found, int]], number: int, volumes: Sequence[Volume]) -> None:
    if not scan.set_running_or_notify_cancel():
        return
    try:
        scan.set_result(_scan(number, volumes))
    except BaseException as error:
        scan.set_exception(error)


def _scan(number: int, volumes: Sequence[Volume]) -> tuple[Found, int]:
    """The runs of a segment, and where, as bits, its file could not be read."""
    there: dict[RunPlace, int] = defaultdict(int)
    read = unread = 0
    for volume in volumes:
        if not volume.health.readable:
            continue
        places, is_all = _places_in(volume, number, len(volumes))
        read |= is_all << volume.stripe
        unread |= (not is_all) << volume.stripe
        for place, begins_part in places:
            there[place] |= begins_part << volume.stripe
    items = [(place, _parts_of(place) & read & ~mask) for place, mask in there.items()]
    return sorted(items, key=lambda item: item[0].age), unread


def _parts_of(place: RunPlace) -> int:
    """Directories, as bits, in which a run has a layer."""
    return mask_of(stripe for stripe, size in enumerate(place.shape.part_bytes) if size)


def _places_in(volume: Volume, number: int, num_stripes: int) -> tuple[list[tuple[RunPlace, bool]], bool]:
    """What the headers in the file of a segment in one directory say.

    Returns:
        Runs, and whether it is a first header that says so; and whether no read has failed.
    """
    health = volume.health
    caller = DeadlineCaller("hcache-scan", health.hangs, health.returned)

    def read() -> tuple[list[tuple[RunPlace, bool]], bool]:
        file = _File(volume.directory.open_to_read(number, False), caller.goes_on)
        return [*_scan_file(file, (number, volume.stripe, num_stripes))], file.is_sound

    try:
        return caller.call(read, volume.patience_s)
    except OSError as error:
        if error.errno in OWN_ERRNOS:
            raise  # it says nothing of the file, which would be deleted as one without runs
        if error.errno in GONE_ERRNOS:
            health.failed(error, writing=False)
        return [], error.errno in _NO_FILE_ERRNOS
    finally:
        caller.close(0.0)


class _File:
    """A segment's file, which ends where it cannot be read; after each call it says that it goes on.

    Raises:
        OSError: the device is gone, or this process lacks something.
    """

    def __init__(self, file: OpenFile, go_on: Callable[[], None]) -> None:
        self._file = file
        self._go_on = go_on
        self.is_sound = True
        """No read has failed."""
        self._window, self._window_at = b"", 0
        self.size = os.fstat(file.fd).st_size

    def read(self, size: int, offset: int) -> bytes:
        try:
            data = os.pread(self._file.fd, size, offset)
        except OSError as error:
            if error.errno in OWN_ERRNOS | GONE_ERRNOS:
                raise
            self.is_sound, self.size = False, 0  # what was found before counts
            data = b""
        self._go_on()
        return data

    def block(self, offset: int, step: int) -> bytes:
        """The block at ``offset``, which may be short at the end; ``step``: how far from here the next one may be."""
        inside = offset - self._window_at
        if not 0 <= inside <= len(self._window) - BLOCK:
            size = _WINDOW_BYTES // 4 if step < _NEAR_BYTES else BLOCK
            self._window, self._window_at, inside = self.read(size, offset), offset, 0
        return self._window[inside : inside + BLOCK]

    def next_data(self, offset: int) -> int:
        """Where the hole ends that ``offset`` may lie in; the size if nothing follows."""
        try:
            return os.lseek(self._file.fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # which says that there is no data behind here
                raise
            return self.size


def _scan_file(file: _File, here: tuple[int, int, int]) -> Iterator[tuple[RunPlace, bool]]:
    at = last = 0
    go_on = BLOCK
    while at + BLOCK <= file.size:
        header = _header_at(file.block(at, at - last), here, at)
        end = 0 if header is None else header.place.end(here[1])
        if header is not None and end <= file.size:
            yield header.place, header.begins_part
            # Other headers may be what a failed write left: the end that they tell must not hide what is before it.
            go_on = (end if header.begins_part else at) + BLOCK
            last, at = at, end
        else:
            last, at = at, _next_candidate(file, go_on)
            go_on = at + BLOCK


def _header_at(block: bytes, here: tuple[int, int, int], at: int) -> ExtentHeader | None:
    """The header in ``block``, if it belongs there: at ``at`` in segment, stripe of so many directories ``here``."""
    try:
        header = parse_header(block)
    except CorruptExtentError:
        return None
    place = header.place
    said = (place.segment, header.stripe, place.shape.num_stripes, place.extent_offset(header.layer))
    return header if said == (*here, at) else None


def _next_candidate(file: _File, at: int) -> int:
    """The next block from ``at`` on that begins like a header, or the end. Skips holes."""
    size = BLOCK  # behind what was erased it is mostly the first one
    while at < file.size:
        at = file.next_data(at) // BLOCK * BLOCK
        window = file.read(size, at)
        size = _WINDOW_BYTES
        for offset in range(0, len(window), BLOCK):
            if window.startswith(MAGIC, offset):
                return at + offset
        at += max(len(window), BLOCK)
    return file.size
