"""The disk store as the tier above sees it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from sglang_hcache.core.errors import (
    StoreError,
    StoreFullError,
    StoreIOError,
    StoreTimeoutError,
    TierMissError,
    WriteBudgetError,
)
from sglang_hcache.core.observer import Observer
from sglang_hcache.store.allowance import WriteAllowance
from sglang_hcache.store.config import Run, StoreConfig, StoreStats
from sglang_hcache.store.engines import engine_of
from sglang_hcache.store.erasure import Erased
from sglang_hcache.store.format.geometry import extent_bytes, mask_of
from sglang_hcache.store.io.engine import IOEngine
from sglang_hcache.store.io.memory import ByteArray, check_bytes
from sglang_hcache.store.judge import Judge
from sglang_hcache.store.keeper import Keeper
from sglang_hcache.store.lease import ReadLease
from sglang_hcache.store.notes import Notes
from sglang_hcache.store.operations import Operations
from sglang_hcache.store.reader import LayerReader
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.space import Space
from sglang_hcache.store.start import Start, begin
from sglang_hcache.store.tally import Tally, stats_of, told_by, told_in
from sglang_hcache.store.volumes.files import drop_cached
from sglang_hcache.store.volumes.opening import open_volumes
from sglang_hcache.store.volumes.transfers import Transfers
from sglang_hcache.store.volumes.volume import Volume
from sglang_hcache.store.writer import RunWriter

logger = logging.getLogger(__name__)

_CLOSE_S = 3.0
_ROUND_S = 1.0


class DiskStore:
    """Runs of chunks on disk, by chunk key. All methods may be called from any thread.

    ``contains``, ``touch``, ``lease``, ``ReadLease.close``, ``admits`` and ``stats`` do no I/O;
    everything else may take as long as ``io_timeout_s`` for each directory that hangs.
    """

    def __init__(
        self,
        config: StoreConfig,
        volumes: Sequence[Volume],
        engine: IOEngine,
        tally: Tally,
        start: Start,
    ) -> None:
        self._config = config
        self._volumes = volumes
        self._engine = engine
        self._tally = tally
        self._saved = start.saved
        self._catalog = start.catalog
        meta = start.meta
        tally.resume(meta.get("totals"))
        for stripe, (_, _, corrupt_extents, io_errors) in told_in(meta).items():
            if stripe < len(volumes):
                volumes[stripe].health.corrupt_extents += corrupt_extents
                volumes[stripe].health.io_errors += io_errors
        self._allowance = WriteAllowance.resumed(config.write_budget_bytes, meta.get("written"))
        self._allowance.add(start.unsaved_bytes)
        self._space = Space(config, volumes, self._catalog, self._saved, tally)
        transfers = Transfers(engine, volumes, config.io_timeout_s)
        self._reader = LayerReader(transfers)
        self._writer = RunWriter(transfers)
        self._judge = Judge(volumes, self._catalog, tally)
        self._operations = Operations()
        self._health_lock = threading.Lock()
        # By its hex id, whose each namespace is.
        self.namespaces = Notes(meta.get("namespaces"))
        self.measuring = tally.measuring
        self.has_max_age = config.max_age_s is not None
        self._saving = threading.Lock()
        self._keeper = Keeper(
            volumes, self._saved, self._space, tally, self._write_down, min(_ROUND_S, config.retry_s)
        )
        for volume in volumes:
            volume.health.on_change = self._on_health
        self._on_health()
        self._space.adopt(start.segments, start.files, start.next_number)
        self._used_bytes = self._space.used_bytes()
        self._keeper.start()

    @classmethod
    def open(cls, config: StoreConfig, observer: Observer, engine: IOEngine | None = None) -> DiskStore:
        """Open the store in ``config.dirs``, creating or recovering it.

        ``engine`` replaces the one that ``config.io_engine`` names; the store closes it.

        Raises:
            StoreLockedError: another process uses a directory.
            StoreFormatError: a directory is not private, not ours, or of another store or format.
            StoreIOError: the devices fail.
            ConfigError: the engine cannot be used here.
        """
        tally = Tally(observer)
        volumes: Sequence[Volume] = ()
        try:
            volumes, identity = open_volumes(config, tally)
            engine = engine or engine_of(config, volumes, tally)
            return cls(config, volumes, engine, tally, begin(config, volumes, identity, tally))
        except BaseException as error:
            if engine is not None:
                engine.close(_CLOSE_S)
            for volume in volumes:
                volume.close(_CLOSE_S)
            if isinstance(error, OSError):
                raise StoreIOError(f"cannot open the store: {error}") from error
            raise

    # -- finding ---------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Whether ``key`` can be read."""
        return self._catalog.contains(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of those of ``keys``, the chunks of a prefix from its start, that are here."""
        self._catalog.touch(keys)

    def on_evicted(self, tell: Callable[[bytes], object]) -> None:
        """Call ``tell`` for each chunk that goes for want of room from now on; from any thread. It must not block."""
        self._space.on_evicted(tell)

    # -- writing ---------------------------------------------------------------------------------

    def admits(self, num_chunks: int, chunk_layer_bytes: Sequence[int], *, reused: bool) -> bool:
        """Whether the write budget lets a run of so many chunks pass that were (not) used again."""
        size = _run_bytes(num_chunks, chunk_layer_bytes)
        return self._allowance.allows(size, reused=reused, now_s=time.time())

    def write_run(self, run: Run, payload: Callable[[int], Sequence[ByteArray]]) -> None:
        """Write ``run`` durably and make its chunks readable.

        ``payload(layer)`` is called once a layer, in order, and returns one contiguous 1-D uint8 array of
        ``chunk_layer_bytes[layer]`` bytes a chunk, unchanged until this returns. Arrays aligned to 4096 and
        of a multiple of 4096 bytes are written without a copy. Keys already stored move to the new run.

        Raises:
            WriteBudgetError: the whole write budget is used up; :meth:`admits` keeps some for what is used again.
            StoreFullError: neither cap nor floor leave room and nothing can be evicted, or ENOSPC.
            StoreIOError: a device failed. After any error nothing of the run is readable.
            ValueError: ``payload`` returned arrays of a wrong shape.
        """
        with self._operations.one(), _refusals_counted(self._tally):
            size = _run_bytes(len(run.keys), run.chunk_layer_bytes)
            spending = self._allowance.spending(size, now_s=time.time())
            with contextlib.nullcontext() if self._tally.is_measuring else spending:
                stored = self._space.reserve(run)  # after what is spent is counted, for it costs others
            try:
                self._writer.write(stored, payload)
                self._catalog.add_run(stored)
            except BaseException as error:
                self._space.abandon(stored, error)
                raise
            self._unpin([stored.segment])
        self._tally.count("store.chunks_written", len(run.keys))
        self._tally.count("store.bytes_written", stored.place.shape.payload_bytes)

    # -- reading ---------------------------------------------------------------------------------

    def lease(self, keys: Sequence[bytes]) -> ReadLease:
        """Pin the chunks ``keys`` until the lease is closed. No use of them: see :meth:`touch`.

        Raises:
            TierMissError: a key is missing, or layer sizes differ between the runs that hold them.
            ValueError: no keys.
        """
        if not keys:
            raise ValueError("a lease needs at least one key")
        if self._operations.is_closed:
            raise TierMissError("the store is closed")
        return ReadLease(keys, self._catalog.pin(keys), self._release)

    def read_layers(self, lease: ReadLease, into: Mapping[int, ByteArray]) -> None:
        """Read some layers of a lease's chunks, all at once, and verify every byte.

        Args:
            into: layer -> memory, 1-D uint8 of ``len(lease.keys) * lease.chunk_layer_bytes[layer]`` bytes: the chunks
                in the order of the keys. Without a copy if it is aligned to 4096 (``aligned_empty``) and a chunk is
                a multiple of 4096 bytes. After an error its contents mean nothing.

        Raises:
            CorruptExtentError: not the bytes that were written; those chunks are not served again.
            StoreTimeoutError: a device hangs and may still write to the memory: do not use it again.
            StoreIOError: a device failed; until the next start those chunks are misses.
            TierMissError: the lease is closed.
            ValueError: a wrong layer or memory.
        """
        for layer, out in into.items():
            if not 0 <= layer < len(lease.chunk_layer_bytes):
                raise ValueError(f"layer {layer} of {len(lease.chunk_layer_bytes)}")
            check_bytes(out, len(lease.keys) * lease.chunk_layer_bytes[layer], f"memory of layer {layer}")
        with self._operations.one(), lease.reading():
            failures = self._reader.read(lease.slices, into)
            self._judge.judge(failures)
        if failures:
            late = (item.error for item in failures if isinstance(item.error, StoreTimeoutError))
            raise next(late, failures[0].error)
        self._tally.count("store.bytes_read", sum(out.size for out in into.values()))
        if len(lease.chunk_layer_bytes) - 1 in into:  # the first ones may be recomputed instead
            self._tally.count("store.chunks_read", len(lease.keys))

    def drop_cached(self, keys: Sequence[bytes]) -> None:
        """Have ``keys`` read from the device next, not from the page cache. Raises as reading does."""
        with self._operations.one(), self.lease(keys) as lease:
            for segment in {item.run.segment for item in lease.slices}:
                for volume in (self._volumes[stripe] for stripe in segment.members):
                    if not volume.directory.direct:
                        drop = partial(drop_cached, segment.file(volume.stripe))
                        volume.call(drop, "cannot drop a segment file from the page cache")

    def _release(self, lease: ReadLease) -> None:
        self._unpin([item.run.segment for item in lease.slices])

    def _unpin(self, segments: Sequence[Segment]) -> None:
        if self._catalog.unpin(segments):
            self._keeper.wake()

    # -- upkeep ----------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """From memory."""
        return StoreStats(
            **asdict(self._catalog.counts()),
            used_bytes=self._used_bytes,
            cap_bytes=self._config.size_bytes,
            written_today_bytes=self._allowance.written(time.time()),
            write_budget_bytes=self._config.write_budget_bytes,
            engine=self._engine.name,
            totals=self._tally.totals(),
            directories=stats_of(self._volumes),
        )

    def allocated_bytes(self) -> int:
        """What the files in all directories take, as ``du`` counts; asks for each. Raises StoreError."""
        return sum(volume.allocated_bytes() for volume in self._volumes)

    def evict_one(self) -> bool:
        """Remove the segment with the lowest score; False if none can go, or files cannot be deleted."""
        with self._operations.one():
            return self._space.evict_one()

    def delete_leftovers(self) -> None:
        """Delete all files of no use now, and not in the background."""
        with self._operations.one():
            self._space.delete_leftovers()

    def leftover_files(self) -> list[Path]:
        """Files of no use that could not be deleted."""
        with self._operations.one():
            return self._space.leftover_files()

    def discard_new(self) -> None:
        """Remove all that was written since the store was opened, what cannot be read of it included."""
        with self._operations.one():
            self._space.discard_new()

    def clear(self) -> None:
        """Forget everything at once; files under a lease are deleted when it closes.

        What is in directories that are out is deleted when they are back, also after a restart.

        Raises:
            StoreError: no directory took the note of it, so all would be back after a restart. Do it again.
        """
        with self._operations.one():
            self._space.clear()

    def erase(self, namespace_ids: Collection[bytes]) -> Erased:
        """As :func:`erasure.erase`, with the notes of whose they are. Nobody may read or write meanwhile."""
        with self._operations.one():
            erased = self._space.erase(namespace_ids)
            self.namespaces.drop({namespace_id.hex() for namespace_id in namespace_ids})
            with self._saving:
                self._saved.save_everywhere(self._meta())
            return erased

    def close(self) -> None:
        """Wait a moment for running reads and writes, save recency, release the directories. Idempotent.

        Leases still open can be closed afterwards but not read. What hangs is waited for in the background.
        """
        if self._operations.close() and not self._end(_CLOSE_S):
            # Everything acknowledged is durable already, and the locks end with the process at the latest.
            logger.warning(
                "hcache: reads or writes did not end within %g s; the store is closed when they have",
                _CLOSE_S,
            )
            threading.Thread(target=self._end, name="hcache-closing", daemon=True).start()

    def _end(self, timeout_s: float | None = None) -> bool:
        """Close it when nothing runs any more; False if that takes longer."""
        drained = self._operations.drain(timeout_s)
        if not (self._keeper.close(timeout_s) and drained):
            return False
        try:
            self._space.close()
            self._write_down(last=True)
        except StoreError as error:
            logger.warning("hcache: what was used last is not saved: %s", error)
        finally:  # whatever went wrong: who opens it again must not find it locked
            self._engine.close(_CLOSE_S)
            for volume in self._volumes:
                volume.close(_CLOSE_S)
        return True

    def _on_health(self) -> None:
        with self._health_lock:  # of two changes at once, the later look must be the later entry
            out = [volume.stripe for volume in self._volumes if not volume.health.readable]
            self._catalog.set_out(mask_of(out))
        self._keeper.wake()

    def _meta(self) -> dict[str, Any]:
        """What is kept beside segments."""
        return {
            "totals": self._tally.snapshot(),
            "written": self._allowance.hours(),
            "directories": told_by(self._volumes),
            "namespaces": self.namespaces.all(),
        }

    def _write_down(self, *, last: bool = False) -> None:
        self._used_bytes = self._space.used_bytes()
        if self._tally.is_measuring and not last:
            return  # no start takes what is measured for runs that were lost
        # On a disk that is full it is tried, and no failure.
        is_needed = last or any(volume.health.writable for volume in self._volumes)
        # What one thread has dropped, another one must not write after it.
        with contextlib.nullcontext() if is_needed else contextlib.suppress(StoreError), self._saving:
            self._saved.save(self._meta(), last=last)


@contextlib.contextmanager
def _refusals_counted(tally: Tally) -> Iterator[None]:
    try:
        yield
    except WriteBudgetError:  # no fault of the disk: who asked counts the chunks
        raise
    except StoreFullError:
        tally.count("store.writes_refused")
        raise


def _run_bytes(num_chunks: int, chunk_layer_bytes: Sequence[int]) -> int:
    """What a run takes in all directories together."""
    return sum(extent_bytes(num_chunks, chunk_bytes) for chunk_bytes in chunk_layer_bytes)
