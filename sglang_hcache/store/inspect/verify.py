"""Reading every byte of a store and checking it, beside a running server or without one."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sglang_hcache.core.errors import StoreTimeoutError
from sglang_hcache.store.catalog import RunSlice
from sglang_hcache.store.format.geometry import extent_bytes
from sglang_hcache.store.inspect.view import RunInfo, StoreView
from sglang_hcache.store.io.memory import ScratchPool
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.reader import LayerReader
from sglang_hcache.store.segments import Segment, StoredRun
from sglang_hcache.store.volumes.transfers import Transfers

_PATIENCE_S = 10.0
"""A device that does nothing for so long hangs."""

_READERS_A_DIRECTORY = 2
"""Runs in work at once: one is read while another is checked. Each takes the memory of one layer of a run."""

_IO_THREADS = 4
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Damage:
    """Chunks of one layer of a run that are not what was written, or cannot be read."""

    keys: tuple[bytes, ...]
    """Keys of the damaged chunks; all of the run where its header is damaged or nothing could be read."""
    run: RunInfo
    layer: int
    directory: Path
    reason: str


class Verification:
    """One pass over a store. Its results are complete when :meth:`steps` has ended."""

    def __init__(self, view: StoreView) -> None:
        self._view = view
        runs = [*view.runs(), *view.torn_runs()]
        self._runs = sorted(
            (run for run in runs if run.is_available),
            key=lambda run: (run.place.segment, max(run.place.offsets)),
        )
        self.total_bytes = sum(run.disk_bytes for run in self._runs)
        """What there is to read, headers and padding included."""
        self.unavailable_runs = len(runs) - len(self._runs)
        """Runs that are not checked because one of their directories is out, or went out meanwhile."""
        self.lost_runs = max(0, sum(view.lost.values()) - len(view.torn))
        """Runs that a server knew and of which nothing is left that names them."""
        self.damages: list[Damage] = []
        """What is damaged and not in quarantine yet. What a running server evicted meanwhile is no damage."""

        for item in view.sight.seen:
            if item.volume.health.readable:
                with contextlib.suppress(OSError):
                    item.volume.attempt(item.directory.probe_reading)
        self._sizes = view.segment_sizes()
        self._engine = PosixEngine(len(view.volumes), _IO_THREADS)
        self._reader = LayerReader(Transfers(self._engine, view.volumes, _PATIENCE_S))
        self._memory = ScratchPool()

    def steps(self) -> Iterator[int]:
        """Do the work; yields how many bytes of ``total_bytes`` each step has read. Call it once."""
        threads = _READERS_A_DIRECTORY * len(self._view.volumes)
        pending: deque[tuple[RunInfo, Future[list[Damage] | None]]] = deque()
        suspects: list[Damage] = []

        def take_first() -> int:
            run, outcome = pending.popleft()
            damages = outcome.result()
            if damages is None:
                self.unavailable_runs += 1
            else:
                suspects.extend(damages)
            return run.disk_bytes

        with ThreadPoolExecutor(threads, thread_name_prefix="hcache-verify") as pool:
            for run in self._runs:
                pending.append((run, pool.submit(self._check, run)))
                if len(pending) > 2 * threads:
                    yield take_first()
            while pending:
                yield take_first()
        self._engine.close(_CLOSE_S)
        self.damages = self._still_there(suspects)

    def _check(self, run: RunInfo) -> list[Damage] | None:
        """Read and check all layers of a run; None if one of its directories is out by now."""
        place = run.place
        segment = Segment(place.segment, self._view.volumes, place.shape.members, 0)
        item = RunSlice(StoredRun(place, segment), 0, len(place.keys), 0)
        damages = []
        for layer, chunk_bytes in enumerate(place.shape.chunk_layer_bytes):
            stripe = place.shape.stripe(layer)
            end = place.extent_offset(layer) + extent_bytes(len(place.keys), chunk_bytes)
            size = self._sizes.get(stripe, {}).get(place.segment, 0)
            if end > size:  # before anything is read into memory for it
                reason = f"the file has {size} bytes, this ends at {end}" if size else "the file is missing"
                damages += self._damage(run, layer, (), reason)
                continue
            out = self._memory.take(len(place.keys) * chunk_bytes)
            for failure in self._reader.read([item], {layer: out}):
                if isinstance(failure.error, StoreTimeoutError):
                    self._memory.discard()
                if not self._view.volumes[stripe].health.readable:
                    return None
                damages += self._damage(run, layer, failure.bad_chunks, str(failure.error))
        return damages

    def _damage(self, run: RunInfo, layer: int, chunks: Sequence[int], reason: str) -> list[Damage]:
        """Nothing if every one of ``chunks`` (none: all of the run) is in quarantine already."""
        place = run.place
        wanted = chunks or range(len(place.keys))
        keys = tuple(place.keys[index] for index in wanted if index not in run.quarantined)
        directory = self._view.paths[place.shape.stripe(layer)]
        return [Damage(keys, run, layer, directory, reason)] if keys else []

    def _still_there(self, suspects: list[Damage]) -> list[Damage]:
        """Those of ``suspects`` whose run was not evicted while it was read."""
        if not suspects or self._view.lock_holder is None:
            return suspects
        with StoreView.open(self._view.paths) as now:
            current = {place.run_id for place in (*now.places, *now.torn)}
        return [damage for damage in suspects if damage.run.place.run_id in current]
