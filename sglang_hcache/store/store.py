"""The disk store as the tier above sees it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sglang_hcache.core.errors import (
    CorruptExtentError,
    StoreError,
    StoreFullError,
    StoreIOError,
    TierMissError,
)
from sglang_hcache.core.observer import Observer
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import DirectoryStats, Run, StoreConfig, StoreStats
from sglang_hcache.store.directory import StoreDirectory
from sglang_hcache.store.engine import IOEngine
from sglang_hcache.store.geometry import ShapeTable
from sglang_hcache.store.index import Index, RunRow
from sglang_hcache.store.layout import open_directories
from sglang_hcache.store.lease import ReadLease
from sglang_hcache.store.memory import ByteArray, check_bytes
from sglang_hcache.store.posix import PosixEngine
from sglang_hcache.store.reader import LayerReader, SliceFailure
from sglang_hcache.store.record import RUN_ID_BYTES
from sglang_hcache.store.recovery import Recovered, recover
from sglang_hcache.store.segments import RunPlace, StoredRun
from sglang_hcache.store.space import Reservation, Space, storage_error
from sglang_hcache.store.writer import RunWriter

_log = logging.getLogger(__name__)

_RECENCY_BATCH = 64
_CLOSE_S = 3.0
_FAILURES_ALLOWED = 2
"""A run is forgotten at this many EIO: else one bad sector would delay every restore of it."""


class DiskStore:
    """Runs of chunks on disk, by chunk key. All methods may be called from any thread.

    ``contains``, ``match``, ``lease`` and ``ReadLease.close`` do no I/O (the last one closes files, and
    deletes those that were cleared meanwhile); everything else may block for as long as the devices do.
    """

    def __init__(
        self,
        config: StoreConfig,
        observer: Observer,
        directories: Sequence[StoreDirectory],
        engine: IOEngine,
        shapes: ShapeTable,
        recovered: Recovered,
    ) -> None:
        self._config = config
        self._observer = observer
        self._directories = directories
        self._engine = engine
        self._shapes = shapes
        self._index: Index = recovered.index
        self._catalog: Catalog = recovered.catalog
        self._space = Space(config, directories, self._catalog, self._index, observer)
        direct = [directory.direct for directory in directories]
        self._reader = LayerReader(engine, direct)
        self._writer = RunWriter(engine, direct)
        self._state_lock = threading.Lock()
        self._busy = threading.Condition(self._state_lock)
        self._operations = 0
        self._closed = False
        self._rotation = 0
        self._space.adopt(recovered.segments, recovered.leftovers, recovered.next_number)

    @classmethod
    def open(cls, config: StoreConfig, observer: Observer, engine: IOEngine | None = None) -> DiskStore:
        """Open the store in ``config.dirs``, creating or recovering it.

        ``engine`` replaces the one that ``config.io_engine`` names; the store closes it.

        Raises:
            StoreLockedError: another process uses a directory.
            StoreFormatError: a directory is not private, not ours, or of another store or format.
            StoreIOError: the devices fail.
        """
        directories, store_id = open_directories(config.dirs)
        engine = engine or PosixEngine(config.read_threads)
        try:
            shapes = ShapeTable(len(directories))
            recovered = recover(config, directories, store_id, shapes, observer)
            return cls(config, observer, directories, engine, shapes, recovered)
        except BaseException as error:
            engine.close()
            for directory in directories:
                directory.release()
            if isinstance(error, OSError):
                raise StoreIOError(f"cannot open the store: {error}") from error
            raise

    def contains(self, key: bytes) -> bool:
        """Whether ``key`` can be read."""
        return self._catalog.contains(key)

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading ``keys`` that can be read."""
        return self._catalog.match(keys)

    def write_run(self, run: Run, payload: Callable[[int], Sequence[ByteArray]]) -> None:
        """Write ``run`` durably and make its chunks readable.

        ``payload(layer)`` is called once a layer, in order, and returns one contiguous 1-D uint8 array of
        ``chunk_layer_bytes[layer]`` bytes a chunk, unchanged until this returns. Arrays aligned to 4096 and
        of a multiple of 4096 bytes are written without a copy. Keys already stored move to the new run.

        Raises:
            StoreFullError: neither cap nor floor leave room and nothing can be evicted, or ENOSPC.
            StoreIOError: a device failed. After any error nothing of the run is readable.
            ValueError: ``payload`` returned arrays of a wrong shape.
        """
        with self._operation(), self._counted_failure():
            shape = self._shapes.get(len(run.keys), run.chunk_layer_bytes, self._next_rotation())
            reservation = self._space.reserve(shape)
            try:
                self._write(run, payload, reservation)
            except BaseException as error:
                self._space.abandon(reservation, seal=isinstance(error, StoreError))
                raise
            finally:
                self._space.unpin([reservation.segment])
        self._observer.count("store.chunks_written", len(run.keys))
        self._observer.count("store.bytes_written", shape.payload_bytes)

    def lease(self, keys: Sequence[bytes]) -> ReadLease:
        """Pin the chunks ``keys`` until the lease is closed, and count as a use of them.

        Raises:
            TierMissError: a key is missing, or layer sizes differ between the runs that hold them.
            ValueError: no keys.
        """
        if not keys:
            raise ValueError("a lease needs at least one key")
        if self._closed:
            raise TierMissError("the store is closed")
        slices = self._catalog.pin(keys)
        return ReadLease(keys, slices, self._release)

    def read_layer(self, lease: ReadLease, layer: int, out: ByteArray) -> None:
        """Read one layer of a lease's chunks into ``out`` and verify every byte.

        ``out`` is 1-D uint8 of ``len(lease.keys) * lease.chunk_layer_bytes[layer]`` bytes: the chunks in the
        order of the keys. Without a copy if its memory is aligned to 4096 (``aligned_empty``) and a chunk is
        a multiple of 4096 bytes. After an error its contents mean nothing.

        Raises:
            CorruptExtentError: not the bytes that were written; the run is forgotten.
            StoreIOError: a device failed; the run is forgotten at the second EIO or when its file is gone.
            ValueError: a wrong ``layer`` or ``out``, or the lease is closed.
        """
        if not 0 <= layer < len(lease.chunk_layer_bytes):
            raise ValueError(f"layer {layer} of {len(lease.chunk_layer_bytes)}")
        check_bytes(out, len(lease.keys) * lease.chunk_layer_bytes[layer], "out")
        with self._operation(), lease.reading():
            failures = self._reader.read(lease.slices, layer, out)
            for failure in failures:
                self._judge(failure)
        if failures:
            raise failures[0].error
        self._observer.count("store.bytes_read", out.size)
        if lease.first_read():
            self._observer.count("store.chunks_read", len(lease.keys))

    def stats(self) -> StoreStats:
        """Sizes as they are now; asks the file systems, so not for the serving thread."""
        directories = []
        for directory in self._directories:
            try:
                physical, free = directory.physical_bytes(), directory.free_bytes()
            except OSError:
                physical, free = 0, -1
            directories.append(DirectoryStats(directory.path, physical, free, directory.direct))
        counts = self._catalog.counts()
        return StoreStats(
            chunks=counts.chunks,
            runs=counts.runs,
            segments=counts.segments,
            physical_bytes=sum(item.physical_bytes for item in directories),
            reserved_bytes=self._space.reserved_bytes(),
            cap_bytes=self._config.size_bytes,
            directories=tuple(directories),
        )

    def clear(self) -> None:
        """Forget everything at once; files under a lease are deleted when it closes."""
        with self._operation():
            self._space.clear()

    def close(self) -> None:
        """Wait a moment for running reads and writes, save recency, release the directories. Idempotent.

        Leases still open can be closed afterwards but not read.
        """
        with self._busy:
            if self._closed:
                return
            self._closed = True
            drained = self._busy.wait_for(lambda: self._operations == 0, timeout=_CLOSE_S)
        if not drained:
            # I/O that hangs: everything acknowledged is durable already, and the locks end with the process.
            _log.warning("reads or writes did not end within %g s; the store is left as it is", _CLOSE_S)
            return
        self._space.close()
        try:
            while recency := self._catalog.take_recency(_RECENCY_BATCH):
                self._index.save_recency(recency)
        except StoreError as error:
            self._observer.count("store.io_errors")
            _log.warning("recency is not saved: %s", error)
        self._index.close()
        self._engine.close()
        for directory in self._directories:
            directory.release()

    def _write(
        self, run: Run, payload: Callable[[int], Sequence[ByteArray]], reservation: Reservation
    ) -> None:
        segment, shape = reservation.segment, reservation.shape
        run_id = os.urandom(RUN_ID_BYTES)
        place = RunPlace(
            run_id, run.namespace_id, run.keys, run.first_chunk, shape, segment.number, reservation.offsets
        )
        try:
            self._writer.write(segment, place, payload)
        except OSError as error:
            raise storage_error(error, "cannot open a segment file") from error
        row = RunRow(
            run_id, segment.number, run.namespace_id, run.first_chunk, shape.rotation, run.keys,
            run.chunk_layer_bytes, reservation.offsets,
        )  # fmt: skip
        recency = self._catalog.take_recency(_RECENCY_BATCH)
        try:
            number = self._index.insert(row, recency)
        except StoreFullError:
            if not self._space.evict_one():
                raise
            number = self._index.insert(row, recency)
        if not self._catalog.add_run(StoredRun(place, segment, number)):
            self._forget_row(number)  # clear() came in between: the run is gone like all others.

    def _judge(self, failure: SliceFailure) -> None:
        """Decide whether a run that could not be read stays, and count."""
        run = failure.item.run
        if isinstance(failure.error, CorruptExtentError):
            self._observer.count("store.corrupt_extents")
        else:
            self._observer.count("store.io_errors")
            run.failures += failure.error_number == errno.EIO
            if run.failures < _FAILURES_ALLOWED and failure.error_number != errno.ENOENT:
                return
        if self._catalog.drop_run(run):
            _log.warning("a stored run is forgotten: %s", failure.error)
            self._forget_row(run.row)

    def _forget_row(self, row: int) -> None:
        try:
            self._index.delete_runs([row])
        except StoreError as error:
            self._observer.count("store.io_errors")
            _log.warning("could not remove a run from the index: %s", error)

    def _release(self, lease: ReadLease) -> None:
        self._space.unpin([item.run.segment for item in lease.slices])

    def _next_rotation(self) -> int:
        with self._state_lock:
            self._rotation = (self._rotation + 1) % len(self._directories)
            return self._rotation

    @contextmanager
    def _counted_failure(self) -> Iterator[None]:
        try:
            yield
        except StoreFullError:
            self._observer.count("store.writes_refused")
            raise
        except StoreIOError:
            self._observer.count("store.io_errors")
            raise

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Something ``close`` waits for."""
        with self._state_lock:
            if self._closed:
                raise StoreIOError("the store is closed")
            self._operations += 1
        try:
            yield
        finally:
            with self._busy:
                self._operations -= 1
                self._busy.notify_all()
