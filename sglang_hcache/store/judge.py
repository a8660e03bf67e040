"""Deciding what of a run that could not be read is served again."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.reader import SliceFailure
from sglang_hcache.store.segments import StoredRun
from sglang_hcache.store.volumes.health import GONE_ERRNOS, OWN_ERRNOS
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)

_FAILURES_ALLOWED = 2
"""Chunks are quarantined at this many errors: else one bad sector would delay every restore of them."""
_HANGS_ALLOWED = 3
"""And at this many if the last one is a hang. Mostly the whole device hangs. But a drive may try a bad sector for
longer than anybody waits, and each time its whole directory would be out."""

_FORGOTTEN_S = 3600.0
"""An error this long ago does not count: a bad sector fails again, a controller that was reset hits any run."""

_OF_NO_RUN = OWN_ERRNOS | (GONE_ERRNOS - {errno.ETIMEDOUT}) | {errno.ENOENT, errno.ECANCELED}
"""Errors that say nothing of a run's bytes. A bad sector may show as any other: EIO, ENODATA, EILSEQ, EUCLEAN, ..."""


def _is_of_run(failure: SliceFailure) -> bool:
    """Whether the run's own bytes may be why. Not if opening its file took too long: it may wait for another call."""
    number = failure.error_number
    is_behind = failure.opening and number == errno.ETIMEDOUT
    return number is not None and number not in _OF_NO_RUN and not is_behind


class Judge:
    """Quarantines damaged chunks and forgets runs whose files are gone. Safe from several threads, and does no I/O."""

    def __init__(self, volumes: Sequence[Volume], catalog: Catalog, observer: Observer) -> None:
        self._volumes = volumes
        self._catalog = catalog
        self._observer = observer
        self._lock = threading.Lock()
        self._may_warn = Throttle()
        self._unlogged = 0
        """Runs with damaged chunks of which the log has no line yet."""

    def judge(self, failures: Sequence[SliceFailure], began: float) -> None:
        """What one call could not read. What the device's health explains is left to that.

        Args:
            began: when it did, by the monotonic clock.
        """
        for failure in failures:
            item, run = failure.item, failure.item.run
            if isinstance(failure.error, CorruptExtentError):
                self._volumes[failure.stripe].health.note_corrupt()
                self._quarantine(failure, failure.bad_chunks or range(len(run.place.keys)))
            elif failure.error_number == errno.ENOENT:  # in a directory that is there
                gone = self._catalog.drop_file(run.segment, failure.stripe)
                if gone:
                    logger.warning("hcache: stored runs are forgotten (%d): %s", gone, failure.error)
            elif _is_of_run(failure):
                is_hang = failure.error_number == errno.ETIMEDOUT
                if self._count_failure(run, began) >= (_HANGS_ALLOWED if is_hang else _FAILURES_ALLOWED):
                    self._quarantine(failure, range(item.start, item.stop))

    def _count_failure(self, run: StoredRun, began: float) -> int:
        """Failures of ``run``, with this one. However many layers failed, and reads that ran together, count as one."""
        with self._lock:
            if began > run.failed_at:
                is_long_ago = began - run.failed_at > _FORGOTTEN_S
                run.failures = 1 if is_long_ago else run.failures + 1
                run.failed_at = time.monotonic()
            return run.failures

    def _quarantine(self, failure: SliceFailure, chunks: Iterable[int]) -> None:
        run = failure.item.run
        path = self._volumes[failure.stripe].directory.segment_path(run.segment.number)
        fresh = self._catalog.quarantine(run, dict.fromkeys(chunks, f"{path}: {failure.error}"))
        if not fresh:
            return
        self._observer.count("store.chunks_quarantined", len(fresh))
        self._say(run, fresh)

    def _say(self, run: StoredRun, quarantined: Mapping[int, str]) -> None:
        with self._lock:
            self._unlogged += 1
            if not self._may_warn():
                return
            others, self._unlogged = self._unlogged - 1, 0
        number, why = next(iter(quarantined.items()))
        more = f" and {len(quarantined) - 1} more" if len(quarantined) > 1 else ""
        left_out = f", and so are chunks of {others} other runs since the last such line" if others else ""
        logger.warning(
            "hcache: chunk %s%s: damaged and not served again (%s)%s; see hcache store ls --quarantined",
            run.place.keys[number].hex()[:16], more, why, left_out,
        )  # fmt: skip
