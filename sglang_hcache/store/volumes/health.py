"""Is a directory well? A circuit breaker with back-off, one for each directory."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from sglang_hcache.core.observer import Observer

logger = logging.getLogger(__name__)

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
READ_ONLY_ERRNOS = FULL_ERRNOS | {errno.EROFS}
"""Writing does not work, reading does."""

GONE_ERRNOS = frozenset(
    {errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN}
)
"""One is enough: the device hangs or is not there."""

OWN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""This process lacks files, memory or threads: no device is the better for being left alone."""

_FAILURES_ALLOWED = 3
"""So many failures in a row mean the device; fewer may be one bad sector."""

_LONGEST_RETRY_S = 60.0


class Condition(StrEnum):
    """What a directory is used for. Values are shown to users and kept in the state."""

    HEALTHY = "healthy"
    READ_ONLY = "read-only"
    """Its chunks are served, nothing is written to it: full, or mounted read-only."""
    OUT = "out"
    """Its chunks are misses."""


class Health:
    """Condition of one directory. Safe from any thread.

    ::

        HEALTHY --ENOSPC, EROFS, 3 failed writes in a row--> READ_ONLY
        HEALTHY, READ_ONLY --3 failed reads in a row, a hang, gone--> OUT
        READ_ONLY, OUT --recover(), by the keeper, which probed it when is_due()--> HEALTHY
        READ_ONLY, OUT --mark_read_only(), likewise--> READ_ONLY

    Args:
        retry_s: seconds until the first attempt to take it in again; doubles each time, up to a minute.
    """

    def __init__(self, path: Path, observer: Observer, retry_s: float) -> None:
        self._path = path
        self._observer = observer
        self._first_retry_s = retry_s
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change of condition, on the thread that caused it."""
        self._lock = threading.Lock()
        self._failed_reads = 0
        self._failed_writes = 0
        self._hanging = 0
        self._retry_s = retry_s
        self._retry_at = 0.0
        self._recovered_at = -_LONGEST_RETRY_S
        self.condition = Condition.HEALTHY
        self.reason = ""
        """Why it is not healthy."""
        self.is_full = False
        """It takes no writes for want of room."""
        self.freed_in_vain = 0
        """Bytes of files that were deleted while it was full, since data was last written."""
        self.has_worked = True
        """False from the start on, if it was out then, until it is used."""
        self.corrupt_extents = self.io_errors = 0
        """Since the store was created: see ``DirectoryStats``."""

    @property
    def readable(self) -> bool:
        return self.condition is not Condition.OUT

    @property
    def writable(self) -> bool:
        return self.condition is Condition.HEALTHY

    @property
    def can_delete(self) -> bool:
        """Whether deleting files frees room: also where the disk is full."""
        return self.condition is Condition.HEALTHY or self.is_full

    def succeeded(self, *, writing: bool) -> None:
        """Data was read, or written durably. Other calls say nothing: a device may list files and read none."""
        if writing:
            self._failed_writes = self.freed_in_vain = 0
        else:
            self._failed_reads = 0

    def note_deleted(self, size: int) -> None:
        """A file of ``size`` bytes was deleted, of which a disk that is full should have room now."""
        if self.is_full:
            self.freed_in_vain += size

    def note_corrupt(self) -> None:
        """Other bytes were read than were written, which takes no directory out: the chunks are quarantined."""
        with self._lock:
            self.corrupt_extents += 1
        self._observer.count("store.corrupt_extents")

    def failed(self, error: OSError, *, writing: bool) -> None:
        """An operation failed. What this process lacks says nothing of the device, and is only counted.

        What is known to take no writes is not counted again with each of them.
        """
        if error.errno in READ_ONLY_ERRNOS and self.condition is Condition.READ_ONLY:
            return
        self._observer.count("store.io_errors")
        if error.errno in OWN_ERRNOS:
            return
        reason = error.strerror or str(error)
        with self._lock:
            self.io_errors += 1
            if writing:
                self._failed_writes += 1
            else:
                self._failed_reads += 1
        if error.errno in GONE_ERRNOS or self._failed_reads >= _FAILURES_ALLOWED:
            self.take_out(reason)
        elif error.errno in READ_ONLY_ERRNOS or self._failed_writes >= _FAILURES_ALLOWED:
            self._trip(Condition.READ_ONLY, reason, is_full=error.errno in FULL_ERRNOS)

    def take_out(self, reason: str) -> None:
        """Serve nothing from it until it has recovered."""
        if self.condition is not Condition.OUT:
            self._trip(Condition.OUT, reason)

    def hangs(self) -> None:
        """An operation was given up but has not ended."""
        with self._lock:
            self._hanging += 1

    def returned(self) -> None:
        """An operation that was given up has ended."""
        with self._lock:
            self._hanging -= 1

    def is_due(self) -> bool:
        """Whether it is time to probe it."""
        if self.condition is Condition.HEALTHY or self._hanging:
            return False
        return time.monotonic() >= self._retry_at

    def still_sick(self, reason: str) -> None:
        """A probe failed."""
        with self._lock:
            if reason != self.reason:
                logger.warning("hcache: %s is still %s: %s", self._path, self.condition, reason)
            self.reason = reason
            self._back_off()

    def mark_read_only(self, error: OSError, seen: Condition) -> None:
        """A probe found that all but writing works: its chunks are served. On a full disk, deleting them makes room.

        Args:
            seen: its condition when it was probed; what another thread found meanwhile counts.
        """
        reason, is_full = error.strerror or str(error), error.errno in FULL_ERRNOS
        with self._lock:
            if self.condition is not seen:
                return
            is_news = (seen, self.is_full) != (Condition.READ_ONLY, is_full)
            self.condition, self.reason, self.is_full = Condition.READ_ONLY, reason, is_full
            self.has_worked = True
            self._failed_reads = 0
            self._recovered_at = time.monotonic()  # failing again soon is going on, not beginning
            self._back_off()
        if is_news:
            logger.warning("hcache: %s is %s (%s): its chunks are served", self._path, self.condition, reason)
            self.on_change()

    def recover(self, seen: Condition) -> None:
        """A probe went well: use it again, unless something began to hang meanwhile.

        Args:
            seen: as :meth:`mark_read_only`.
        """
        with self._lock:
            if self.condition is not seen or self._hanging:
                return
            logger.info("hcache: %s is used again", self._path)
            self.condition = Condition.HEALTHY
            self.reason = ""
            self.is_full = False
            self.has_worked = True
            self._failed_reads = self._failed_writes = 0
            self._recovered_at = time.monotonic()
        self._observer.count("store.directory_recoveries")
        self.on_change()

    def _trip(self, condition: Condition, reason: str, *, is_full: bool = False) -> None:
        with self._lock:
            if self.condition in (condition, Condition.OUT):
                return
            if time.monotonic() - self._recovered_at >= _LONGEST_RETRY_S:
                self._retry_s = self._first_retry_s  # it had been well for long
            self.condition, self.reason, self.is_full = condition, reason, is_full
            self._back_off()
        what = "its chunks are misses" if condition is Condition.OUT else "nothing is written to it"
        logger.warning(
            "hcache: %s is %s (%s): %s until it is well again", self._path, condition, reason, what
        )
        self._observer.count("store.directory_trips")
        self.on_change()

    def _back_off(self) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
