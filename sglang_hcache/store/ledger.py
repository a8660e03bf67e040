"""The index in its place: on a directory that is well, moved to another one when that fails."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from sglang_hcache.core.errors import StoreError, StoreFormatError, StoreIOError
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.format.names import INDEX_NAME, INDEX_TMP_NAME
from sglang_hcache.store.format.rows import Recency
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.index import Index, batches
from sglang_hcache.store.index_files import remove_index
from sglang_hcache.store.segments import StoredRun
from sglang_hcache.store.volumes.opening import publish
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FAILURES_ALLOWED = 3
"""So many failures in a row mean the database, however well its directory is."""


class Ledger:
    """Writes the index under its directory's deadline. The catalog in memory has all it holds, so it can move.

    Safe from several threads. ``identity`` and ``outgrow`` do no I/O; the other methods may, and raise ``StoreError``.

    Args:
        index: the index in directory ``identity.index_stripe``; None if it could not be opened or created.
        meta: its named values.
    """

    def __init__(
        self,
        index: Index | None,
        volumes: Sequence[Volume],
        identity: StoreIdentity,
        catalog: Catalog,
        config: StoreConfig,
        meta: Mapping[str, str],
    ) -> None:
        self._index = index
        self._volumes = volumes
        self._identity = identity
        self._catalog = catalog
        self._config = config
        self._meta = {**meta}
        self._lost = index is None
        self._failures = 0
        """In a row."""
        self._lacks_quarantine = False
        """Chunks are quarantined of which the index does not say so."""
        self._out_since: float | None = None
        """When its directory was found to be out, by the monotonic clock."""
        self._published = identity
        """What a directory has taken down last: another one than ``_identity`` until one takes that."""
        self._is_settled = threading.Event()
        """The index is not being written anew."""
        self._is_settled.set()
        self._lock = threading.RLock()
        """Held by changes, so that a move sees all of them or none."""
        self._abandoned: list[tuple[int, Index]] = []
        """Indexes on directories that hang or are gone: closed when those are back."""

    @property
    def identity(self) -> StoreIdentity:
        """What the directories agree on."""
        return self._identity

    def commit(self, run: StoredRun, recency: Mapping[int, Recency]) -> bool:
        """Put a run, whose data is durable, into the index and the catalog; False if its segment is gone.

        Waits a moment for an index that is being written anew.
        """
        self._is_settled.wait(self._config.io_timeout_s)
        with self._lock:
            self._call(lambda index: index.insert({run.number: run.place}, recency))
            return self._catalog.add_run(run)

    def quarantine(self, run: int, chunks: Mapping[int, str]) -> None:
        """As :meth:`Index.quarantine`. This and the methods below do what ``Index`` does, where it is.

        If this fails, :meth:`move_if_needed` does it later. If deleting fails, rows are left that no file bears out:
        the next start drops them.
        """
        try:
            self._call(lambda index: index.quarantine(run, chunks))
        except StoreError:
            self._lacks_quarantine = True
            raise

    def delete_runs(self, rows: Iterable[int]) -> None:
        self._call(lambda index: index.delete_runs(rows))

    def delete_segment(self, segment: int, rows: Sequence[int]) -> None:
        self._call(lambda index: index.delete_segment(segment, rows))

    def delete_recency(self, segments: Iterable[int]) -> None:
        self._call(lambda index: index.delete_recency(segments))

    def save_recency(self, recency: Mapping[int, Recency]) -> None:
        self._call(lambda index: index.save_recency(recency))

    def save_meta(self, values: Mapping[str, str]) -> None:
        """If that fails, they are in the index that is written anew."""
        self._meta.update(values)
        self._call(lambda index: index.save_meta(values))

    def move_if_needed(self) -> None:
        """If the index failed, or its directory did for long: write the index anew where writing works."""
        if self._published != self._identity:
            with self._lock:
                if self._published != self._identity:  # nobody has meanwhile
                    self._publish()
        home = self._volumes[self._identity.index_stripe]
        if self._stays(home) and not self._lost:  # in this order: another thread may find it lost meanwhile
            return
        well = [volume for volume in (home, *self._volumes) if volume.health.writable]
        if not well:
            return
        self._is_settled.clear()
        try:
            self._move(home, well[0])
        finally:
            self._is_settled.set()
        logger.info("hcache: the index is in %s now", well[0].path)

    def _move(self, home: Volume, to: Volume) -> None:
        with self._lock:
            self._lost = True
            if self._index is not None:
                self._abandoned.append((home.stripe, self._index))
                self._index = None
            self._close_abandoned(to)
        index = self._written_at(to)  # without the lock: other calls fail meanwhile, and need not wait
        with self._lock:
            self._index, self._lost, self._failures = index, False, 0
            if to is not home:
                self._identity = self._identity.next(index_stripe=to.stripe)
                self._publish()
                self._remove_from(home)

    def _stays(self, home: Volume) -> bool:
        """Whether the index is used where it is, or waited for: its directory is out, and may be back with it."""
        if not home.health.readable:
            now = time.monotonic()
            self._out_since = self._out_since or now
            may_be_back = not home.health.is_missing
            return may_be_back and now - self._out_since < self._config.index_patience_s
        self._out_since = None
        if home.health.writable and self._lacks_quarantine:
            self._lacks_quarantine = False
            for run in self._catalog.runs():
                if run.quarantined:
                    self.quarantine(run.number, dict(run.quarantined))
        return home.health.writable

    def welcome(self, volume: Volume) -> None:
        """``volume`` is back: remove the index it had, if that is elsewhere by now."""
        with self._lock:
            self._close_abandoned(volume)
            is_home = volume.stripe == self._identity.index_stripe
            if is_home and self._index is not None and not volume.probe(self._index.is_in_place):
                # A new directory, with the index in the one that was deleted, or another disk.
                self._lost = True
        if not is_home:
            volume.probe(lambda: remove_index(volume.path / INDEX_NAME))

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
                self._publish()
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
            if self._index is None:
                return
            try:
                self._volumes[self._identity.index_stripe].probe(self._index.close)
            except OSError as error:
                logger.warning("hcache: the index is left open: %s", error)

    def _call(self, function: Callable[[Index], T]) -> T:
        with self._lock:
            index = self._index
            if self._lost or index is None:
                raise StoreIOError("the index is being written anew")
            home = self._volumes[self._identity.index_stripe]
            try:
                result = home.call(lambda: function(index), "the index", writing=True)
            except StoreFormatError as error:
                self._lost = True
                raise StoreIOError(f"{error}; it is written anew") from error
            except StoreIOError:
                # One that is out or full says nothing of the database.
                self._failures += home.health.readable and not home.health.is_full
                self._lost |= self._failures >= _FAILURES_ALLOWED
                raise
            self._failures = 0
            return result

    def _publish(self) -> None:
        publish(self._volumes, self._identity)
        self._published = self._identity

    def _close_abandoned(self, volume: Volume) -> None:
        for stripe, index in list(self._abandoned):
            if stripe == volume.stripe:
                volume.probe(index.close)
                self._abandoned.remove((stripe, index))

    def _remove_from(self, home: Volume) -> None:
        """Two indexes would take more than is kept for one. Where this fails, :meth:`welcome` does it later."""
        if not home.health.readable:
            return
        try:
            self._close_abandoned(home)
            home.probe(lambda: remove_index(home.path / INDEX_NAME))
        except OSError as error:
            logger.warning("hcache: an index that does not count stays in %s for now: %s", home.path, error)

    def _written_at(self, volume: Volume) -> Index:
        """A new index there; one that lies there stays until it is complete, where there is room for both."""
        path, limit = volume.path / INDEX_NAME, self._config.index_file_bytes

        def put(function: Callable[[], T]) -> T:
            return volume.call(function, "cannot write the index", writing=True)

        def create() -> Index:
            if path.exists() and path.stat().st_size > limit // 2:
                remove_index(path)
            return Index.create(path.with_name(INDEX_TMP_NAME), self._identity.store_id, limit)

        index = put(create)
        try:
            dropped = self._fill(index, put)
            put(lambda: index.delete_runs(dropped))
            return put(lambda: index.moved_to(path, limit))
        except StoreError:
            with contextlib.suppress(OSError):
                volume.probe(index.discard)
            raise

    def _fill(self, index: Index, put: Callable[[Callable[[], None]], None]) -> list[int]:
        """All that there is, each piece by ``put``; returns rows of what has gone meanwhile. Raises StoreError."""
        filled = self._catalog.runs()
        for runs in batches(filled):
            put(partial(index.insert, {run.number: run.place for run in runs}, {}))
            for run in runs:
                if run.quarantined:
                    put(partial(index.quarantine, run.number, dict(run.quarantined)))
        segments = {item.number: Recency(item.last_used, item.score) for item in self._catalog.segments()}
        put(lambda: index.save_recency(segments))
        put(lambda: index.save_meta(self._meta))
        put(index.mark_complete)
        return [run.number for run in filled if run.dropped]
