"""The index as the running store sees it: written to while it can be, given up for good when it cannot."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from sglang_hcache.core.errors import StoreError, StoreFormatError, StoreIOError
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.format.names import INDEX_NAME
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.index import LOAD_S, Index, batches
from sglang_hcache.store.index_files import remove_index
from sglang_hcache.store.segments import StoredRun
from sglang_hcache.store.volumes.opening import publish
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)

_FAILURES_ALLOWED = 3
"""So many failures of a kind in a row mean the database, however well its directory is."""
_COMMIT, _UPKEEP = "commit", "upkeep"
"""Counted apart: an index may take deletions and no new rows."""


class Ledger:
    """Writes the index under its directory's deadline, until it is given up: from then on nothing is written down.

    It is given up if it is damaged, or if its directory is gone or takes no writes for long. Until then nothing more is
    stored. Afterwards no start reads it: the next one finds all runs by their headers.

    Safe from several threads. ``identity``, ``takes_upkeep``, ``outdate`` and ``outgrow`` do no I/O; the other methods
    may, and raise ``StoreError``.

    Args:
        index: the index in directory ``identity.index_stripe``; None if it could not be opened or created.
        is_good: the index is known to be good; where there is none, it is opened once its directory takes writes.
    """

    def __init__(
        self,
        index: Index | None,
        volumes: Sequence[Volume],
        identity: StoreIdentity,
        catalog: Catalog,
        config: StoreConfig,
        *,
        is_good: bool,
    ) -> None:
        self._index = index
        self._home = volumes[identity.index_stripe]
        self._volumes = volumes
        self._identity = identity
        self._catalog = catalog
        self._config = config
        self.is_given_up = False
        """No start reads the index: calls for it do nothing."""
        self._is_bad = not is_good
        """It is to be given up, however well its directory is."""
        self._failures = Counter[str]()
        """In a row, by kind."""
        self._outdated: set[StoredRun] = set()
        """Runs of which the index does not say yet what is quarantined, or that they are gone."""
        self._away_since: float | None = None
        """When its directory was found to take no writes, by the monotonic clock."""
        self._published = identity
        """What a directory has taken down last: another one than ``_identity`` until one takes that."""
        self._lock = threading.RLock()

    @property
    def identity(self) -> StoreIdentity:
        """What the directories agree on."""
        return self._identity

    @property
    def takes_upkeep(self) -> bool:
        """Whether what is saved now and then should find no obstacle: its directory takes writes, or it is given up."""
        return self.is_given_up or self._home.health.writable

    def index_bytes(self) -> int:
        """What the index takes on disk; 0 if that cannot be asked."""
        try:
            return self._volumes[self._identity.index_stripe].index_bytes()
        except StoreError:  # it is elsewhere in a moment
            return 0

    def check_takes_runs(self) -> None:
        """Before a run is written.

        Raises:
            StoreIOError: it could be written, but not committed.
        """
        is_waited_for = self._is_bad or self._index is None or not self._home.health.writable
        if not self.is_given_up and is_waited_for and any(item.health.writable for item in self._volumes):
            health = self._home.health
            why = health.reason or "it is opened or given up in a moment"
            raise StoreIOError(f"the index cannot be written: {self._home.path} is {health.condition}: {why}")

    def commit(self, run: StoredRun) -> None:
        """Put a run, whose data is durable, into the index and the catalog, unless its segment is gone."""
        with self._lock:
            self._call(lambda index: index.insert({run.number: run.place}), kind=_COMMIT)
            if not self._catalog.add_run(run):  # clear() came in between
                self.outdate(run)

    def outdate(self, run: StoredRun) -> None:
        """Chunks of ``run`` were quarantined, or it is gone: :meth:`save_runs` writes it down. Never waits."""
        self._outdated.add(run)

    def save_runs(self) -> None:
        """Write down what is quarantined and what is gone of the runs that :meth:`outdate` named."""
        while self._outdated:
            run = self._outdated.pop()
            try:
                self._save_run(run)
            except BaseException:
                self._outdated.add(run)
                raise

    def _save_run(self, run: StoredRun) -> None:
        with self._lock:  # if it goes meanwhile, its rows are deleted after this
            if run.dropped:
                self.delete_runs([run.number])
            else:
                self._call(lambda index: index.quarantine(run.number, dict(run.quarantined)))

    def save_recency(self) -> None:
        """Write down which segments were used since that was saved."""
        with self._catalog.unsaved_recency() as recency:
            for batch in batches(recency.items()):  # a deadline for each
                self._call(partial(Index.save_recency, recency=dict(batch)))

    def delete_runs(self, rows: Iterable[int]) -> None:
        """As :meth:`Index.delete_runs`. This and the methods below do what ``Index`` does.

        If deleting fails, rows are left that no file bears out: the next start drops them.
        """
        self._call(lambda index: index.delete_runs(rows))

    def delete_namespaces(self, namespace_ids: Collection[bytes]) -> None:
        self._call(lambda index: index.delete_namespaces(namespace_ids, self._home.goes_on), LOAD_S)

    def delete_segment(self, segment: int, rows: Sequence[int]) -> None:
        self._call(lambda index: index.delete_segment(segment, rows))

    def delete_recency(self, segments: Iterable[int]) -> None:
        self._call(lambda index: index.delete_recency(segments))

    def save_meta(self, values: Mapping[str, str]) -> None:
        self._call(lambda index: index.save_meta(values))

    def empty_log(self) -> None:
        """Also raises if the index was given up and may still be there, with all its rows."""
        self._call(lambda index: index.empty_log())
        if self.is_given_up and not self._home.health.writable:
            raise StoreIOError(
                f"an index that is not used any more may still be in {self._home.path}, which is "
                f"{self._home.health.condition}: {self._home.health.reason}"
            )

    def settle(self) -> None:
        """Publish what no directory has taken yet; give the index up if it failed, or its directory did for long."""
        with self._lock:
            if self._published != self._identity:
                self._publish(self._identity)
            if self.is_given_up or (not self._is_bad and self._stays()):
                return
            to = next((item for item in (self._home, *self._volumes) if item.health.writable), None)
            if to is not None:
                self._give_up(to)

    def _stays(self) -> bool:
        """Whether the directory of the index takes writes, or is waited for."""
        health, now = self._home.health, time.monotonic()
        if not health.writable:
            self._away_since = self._away_since or now
            return not health.is_missing and now - self._away_since < self._config.index_patience_s
        self._away_since = None
        if self._index is None:
            self._open()
        return True

    def _open(self) -> None:
        """It was read while its directory took no writes, and can be written to now. Raises StoreError."""
        path, store_id, limit = (
            self._home.path / INDEX_NAME,
            self._identity.store_id,
            self._config.index_file_bytes,
        )
        opening = partial(Index.open, path, store_id, limit, self._home.goes_on)
        try:
            self._index = self._home.call(opening, "cannot open the index", writing=True, patience_s=LOAD_S)
        except StoreFormatError:
            self._is_bad = True
            raise

    def _give_up(self, to: Volume) -> None:
        """No start reads it from now on: the one that counts would be in ``to``, where none is. Raises StoreError."""
        self._is_bad = True
        to.call(partial(self._remove_from, to), "cannot remove the index", writing=True)
        self._publish(self._identity.next(index_stripe=to.stripe))
        self.is_given_up = True
        if self._home is not to and self._home.health.can_delete:
            with contextlib.suppress(StoreError):  # it counts against the cap
                self._home.call(
                    partial(self._remove_from, self._home), "cannot remove the index", blame=False
                )
        logger.warning(
            "hcache: the index in %s cannot be used any more; the next start finds what is stored by its headers",
            self._home.path,
        )

    def _remove_from(self, volume: Volume) -> None:
        """On the thread of ``volume``: no index is there any more. Raises OSError."""
        if volume is self._home and self._index is not None:
            self._index.close()
            self._index = None
        remove_index(volume.path / INDEX_NAME)

    def welcome(self, volume: Volume) -> None:
        """``volume`` is back: remove the index it has, unless it is ours. Raises OSError."""
        with self._lock:
            if volume is not self._home or self.is_given_up:
                volume.attempt(partial(self._remove_from, volume))
            elif self._index is not None and not volume.attempt(self._index.is_in_place):
                # A new directory, with the index in the one that was deleted, or another disk.
                self._is_bad = True

    def outgrow(self, other: StoreIdentity) -> None:
        """Let ours count from now on, and no segment that ``other`` cleared, in a directory that was not with us.

        A clearing counts whatever its epoch: ours may have grown by other things since.
        """
        with self._lock:
            ours = self._identity
            is_newer = other.epoch >= ours.epoch and other != ours
            if is_newer or other.first_segment > ours.first_segment:
                first_segment = max(ours.first_segment, other.first_segment)
                epoch = max(ours.epoch, other.epoch)
                self._identity = replace(ours, epoch=epoch).next(first_segment=first_segment)

    def void_before(self, segment: int) -> None:
        """From now on segments below this number count as cleared, whatever becomes of their files and rows.

        Raises:
            StoreError: no directory takes the note of it now, so they would be back after a restart.
        """
        with self._lock:
            self._identity = self._identity.next(first_segment=segment)
            try:
                self._publish(self._identity)
            except StoreError as error:
                healths = [(item.path, item.health) for item in self._volumes]
                sick = "; ".join(f"{path} is {health.condition}: {health.reason}" for path, health in healths)
                raise StoreIOError(
                    "no directory takes the note that all was cleared: after a restart the chunks on disk would be "
                    f"back. See to one of them ({sick}): {error}"
                ) from error

    def close(self) -> None:
        """Close the index, unless its directory hangs; also where that is out, for an open one is locked."""
        with self._lock:
            if self._index is not None:
                try:
                    self._home.attempt(self._index.close)
                except OSError as error:
                    logger.warning("hcache: the index is left open: %s", error)

    def _call(
        self, function: Callable[[Index], None], patience_s: float | None = None, *, kind: str = _UPKEEP
    ) -> None:
        with self._lock:
            if self.is_given_up:
                return
            index, home = self._index, self._home
            if self._is_bad:
                raise StoreIOError("the index cannot be used, and is given up in a moment")
            if index is None:
                raise StoreIOError("the index is not open: its directory took no writes at start")
            try:
                home.call(lambda: function(index), "the index", writing=True, patience_s=patience_s)
            except StoreFormatError as error:
                self._is_bad = True
                raise StoreIOError(f"{error}; it is given up") from error
            except StoreIOError:
                # One that takes no writes says nothing of the database.
                self._failures[kind] += home.health.writable
                self._is_bad |= self._failures[kind] >= _FAILURES_ALLOWED
                raise
            self._failures[kind] = 0

    def _publish(self, identity: StoreIdentity) -> None:
        publish(self._volumes, identity)
        self._identity = self._published = identity
