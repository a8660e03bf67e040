"""Deciding what of a run that could not be read is served again."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.reader import SliceFailure
from sglang_hcache.store.segments import StoredRun
from sglang_hcache.store.volumes.health import GONE_ERRNOS, OWN_ERRNOS
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)

_OF_NO_RUN = OWN_ERRNOS | (GONE_ERRNOS - {errno.ETIMEDOUT}) | {errno.ENOENT, errno.ECANCELED}
"""Errors that say nothing of a run's bytes. A bad sector may show as any other: EIO, ENODATA, EILSEQ, EUCLEAN, ..."""


def _is_of_run(failure: SliceFailure) -> bool:
    """Whether the run's own bytes may be why. Not if opening its file took too long: it may wait for another call."""
    number = failure.error_number
    is_behind = failure.opening and number == errno.ETIMEDOUT
    return number is not None and number not in _OF_NO_RUN and not is_behind


class Judge:
    """Quarantines damaged chunks, sets aside runs that could not be read, and forgets those whose files are gone.

    Safe from several threads, and does no I/O.
    """

    def __init__(self, volumes: Sequence[Volume], catalog: Catalog, observer: Observer) -> None:
        self._volumes = volumes
        self._catalog = catalog
        self._observer = observer
        self._lock = threading.Lock()
        self._may_tell = Throttle()
        self._may_warn = Throttle()  # of its own: a read that failed must not hide damage
        self._unlogged = 0
        """Runs with damaged chunks of which the log has no line yet."""

    def judge(self, failures: Sequence[SliceFailure]) -> None:
        """What one call could not read.

        Of a device that is gone nothing follows for the run. One that fails and is taken out for it costs each run
        that was being read meanwhile: nobody knows which had a bad sector.
        """
        for failure in failures:
            run = failure.item.run
            if isinstance(failure.error, CorruptExtentError):
                self._volumes[failure.stripe].health.note_corrupt()
                self._quarantine(failure, failure.bad_chunks or range(len(run.place.keys)))
            elif failure.error_number == errno.ENOENT:  # in a directory that is there
                gone = self._catalog.drop_file(run.segment, failure.stripe)
                if gone:
                    self._observer.count("store.runs_lost", gone)
                    logger.warning("hcache: stored runs are forgotten (%d): %s", gone, failure.error)
            # Read again, a bad sector would delay each restore of it, or take its directory out each time.
            elif _is_of_run(failure) and self._catalog.set_aside(run) and self._may_tell():
                logger.warning(
                    "hcache: a stored run is a miss until the next start: %s: %s",
                    self._file(failure),
                    failure.error,
                )

    def _quarantine(self, failure: SliceFailure, chunks: Iterable[int]) -> None:
        run = failure.item.run
        fresh = self._catalog.quarantine(
            run, dict.fromkeys(chunks, f"{self._file(failure)}: {failure.error}")
        )
        if not fresh:
            return
        self._observer.count("store.chunks_quarantined", len(fresh))
        self._say(run, fresh)

    def _file(self, failure: SliceFailure) -> Path:
        return self._volumes[failure.stripe].directory.segment_path(failure.item.run.segment.number)

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
