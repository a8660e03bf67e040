"""The disk store's rows of store_io.py: runs written one after another, layers read by several threads."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.format.geometry import RunShape
from sglang_hcache.store.io.engine import IOEngine
from sglang_hcache.store.io.memory import ByteArray
from sglang_hcache.testing.stored_chunks import make_keys, make_run
from storage.loads import Sample, SharedMemory, Stopwatch

READERS = 4
IO_THREADS = 8
"""What the store's configuration has by default."""

MakeEngine = Callable[[int, int], IOEngine]


@dataclass(frozen=True)
class StoreLoad:
    """Runs that fill segments from beginning to end."""

    num_segments: int
    runs_per_segment: int = 10
    num_chunks: int = 16
    num_layers: int = 24
    chunk_bytes: int = 64 * 2**10
    """Of one layer."""

    @property
    def num_runs(self) -> int:
        return self.num_segments * self.runs_per_segment

    @property
    def layer_bytes(self) -> int:
        """Of one run."""
        return self.num_chunks * self.chunk_bytes

    @property
    def run_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def segment_bytes(self) -> int:
        """Headers included."""
        shape = RunShape(self.num_chunks, self.chunk_layer_bytes, 1, (0,), 0)
        return self.runs_per_segment * shape.part_bytes[0]

    @property
    def chunk_layer_bytes(self) -> tuple[int, ...]:
        return (self.chunk_bytes,) * self.num_layers

    def keys(self, run: int) -> tuple[bytes, ...]:
        """The chunks of one run."""
        return make_keys(run * self.num_chunks, self.num_chunks)

    def config(self, directory: Path) -> StoreConfig:
        """A store with more room than needed."""
        return StoreConfig(
            dirs=(directory,),
            size_bytes=2 * (self.num_segments + 2) * self.segment_bytes + 2**27,
            free_floor_bytes=0,
            segment_bytes=self.segment_bytes,
            io_timeout_s=60.0,
        )

    def full_segments(self, directory: Path) -> list[Path]:
        """The files, without one that was begun and is not full."""
        return sorted(directory.glob("segment-*.seg"))[: self.num_segments]


@contextmanager
def opened(load: StoreLoad, directory: Path, engine: IOEngine) -> Iterator[DiskStore]:
    """The store in ``directory``, new or as it was."""
    store = DiskStore.open(load.config(directory), Counters(), engine)
    try:
        yield store
    finally:
        store.close()


def write_runs(load: StoreLoad, num_runs: int, store: DiskStore, memory: SharedMemory) -> list[float]:
    """Write runs from ``memory``; the seconds that each took."""

    def payload(layer: int) -> list[ByteArray]:
        data = memory.slot(layer, load.layer_bytes)
        return [data[at : at + load.chunk_bytes] for at in range(0, load.layer_bytes, load.chunk_bytes)]

    spent = []
    for number in range(num_runs):
        run = make_run(load.keys(number), load.chunk_layer_bytes)
        begun = time.perf_counter()
        store.write_run(run, payload)
        spent.append(time.perf_counter() - begun)
    return spent


def measure_write(load: StoreLoad, directory: Path, make: MakeEngine, memory: SharedMemory) -> Sample:
    """A new store, filled and removed; its opening and closing do not count."""
    try:
        with opened(load, directory, make(1, IO_THREADS)) as store:
            write_runs(load, 1, store, memory)  # pays for scratch memory and for the first segment
            watch = Stopwatch()
            spent = write_runs(load, load.num_runs, store, memory)
            return watch.sample(load.num_runs * load.run_bytes, spent)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure_read(load: StoreLoad, directory: Path, make: MakeEngine, memory: SharedMemory) -> Sample:
    """All layers of all runs, by ``READERS`` threads with a layer of ``memory`` each, digests verified."""
    spent: list[float] = []
    failures: list[BaseException] = []
    with opened(load, directory, make(1, IO_THREADS)) as store, ExitStack() as stack:
        leases = [stack.enter_context(store.lease(load.keys(number))) for number in range(load.num_runs)]
        # Handed out one by one, so that no reader is left with a whole run at the end.
        todo = ((lease, layer) for lease in leases for layer in range(load.num_layers))
        is_over = threading.Event()
        take = threading.Lock()
        start = threading.Barrier(READERS + 1)

        def read(out: ByteArray) -> None:
            try:
                start.wait()
                while not is_over.is_set():
                    with take:
                        lease, layer = next(todo)
                    begun = time.perf_counter()
                    store.read_layers(lease, {layer: out})
                    spent.append(time.perf_counter() - begun)
            except (StopIteration, threading.BrokenBarrierError):
                pass
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=read, args=(memory.slot(index, load.layer_bytes),))
            for index in range(READERS)
        ]
        store.read_layers(leases[0], {0: memory.slot(0, load.layer_bytes)})  # starts the engine's threads
        try:
            for thread in threads:
                thread.start()
            start.wait()
            watch = Stopwatch()
            for thread in threads:
                thread.join()
        finally:  # also where the run is ended early: no reader outlives the store
            start.abort()
            is_over.set()
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join()
        if failures:
            raise failures[0]
        return watch.sample(load.num_runs * load.run_bytes, spent)
