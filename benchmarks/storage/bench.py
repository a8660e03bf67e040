"""The loads of ``store_io.py``, every variant in turns, and repeated while others disturb them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import Progress

from common.gathered import Gathered
from common.turns import in_turn
from sglang_hcache.store.io.engine import IOEngine
from sglang_hcache.store.io.nixl import NixlEngine, nixl_problem
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.reader import PIECE_BYTES
from storage.disk_store import (
    IO_THREADS,
    READERS,
    StoreLoad,
    measure_read,
    measure_write,
    opened,
    write_runs,
)
from storage.loads import Fio, Load, Sample, SharedMemory, make_file, open_direct, run_engine
from storage.report import NO_FIO, Row, finished

KIB = 2**10
MAKERS: dict[str, Callable[[int, int], IOEngine]] = {"posix": PosixEngine, "nixl": NixlEngine}
PATTERNS = ("read", "randread", "write")
STORE_WRITES, STORE_READS = "the store writes", "the store reads"


@dataclass(frozen=True)
class Plan:
    """What to measure, and for how long."""

    blocks: tuple[int, ...]
    depths: tuple[int, ...]
    rounds: int
    seconds: float
    """About how long one measurement of an engine takes."""
    file_bytes: int
    store: StoreLoad | None
    """What the store writes and reads."""

    @property
    def num_loads(self) -> int:
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """Of all loads, in order."""
        names = [
            engine_load(pattern, block, depth)
            for pattern in PATTERNS
            for block in self.blocks
            for depth in self.depths
        ]
        return names + ([STORE_WRITES, STORE_READS] if self.store else [])


def engine_load(pattern: str, block: int, depth: int) -> str:
    """Its name."""
    return f"{pattern} {block / KIB:g} KiB, depth {depth}"


@dataclass
class Variant:
    """One way to do a load. Each of its samples goes to all ``rows``."""

    rows: list[Row]
    measure: Callable[[], Sample] | None
    """None: it cannot be measured, and its row says why."""


Loads = Generator[tuple[str, list[Variant]], None, None]
"""Names and variants; what they need is there until the next one is asked for, or the generator is closed."""


class Bench:
    """Measures in ``folder``; the rows of a load go to ``found`` when it is over."""

    def __init__(self, folder: Path, plan: Plan, found: Gathered) -> None:
        self._folder = folder
        self._plan = plan
        self._found = found
        self._fio: Fio | None = None
        self._makers = {
            name: make for name, make in MAKERS.items() if name != "nixl" or nixl_problem() is None
        }

    def run(self, progress: Progress) -> None:
        """
        Raises:
            HCacheError, OSError: it cannot be measured here.
        """
        self._found.expect(self._plan.names)
        task = progress.add_task("writing the file", total=self._plan.num_loads)
        data = self._folder / "data"
        make_file(data, self._plan.file_bytes)
        self._fio = Fio.find(data)
        self._found.header["fio"] = self._fio and f"{self._fio.version} {self._fio.io_engine}"
        loads = [self._engine_loads(data)]
        if self._plan.store is not None:
            loads += [self._store_writes(self._plan.store), self._store_reads(self._plan.store)]
        for group in loads:
            with closing(group):
                for name, variants in group:
                    progress.update(task, description=name)
                    self._take_turns([variant for variant in variants if variant.measure is not None])
                    self._found.add(name, finished([row for variant in variants for row in variant.rows]))
                    progress.advance(task)

    def _take_turns(self, variants: Sequence[Variant]) -> None:
        for number in range(self._plan.rounds):
            for variant in in_turn(variants, number):
                sample = variant.measure()
                for row in variant.rows:
                    row.samples.append(sample)

    def _fio_variant(
        self, what: str, load: Load, files: Sequence[Path], memory: SharedMemory, options: Sequence[str]
    ) -> Variant:
        row = Row(what, load.pattern, "fio", load.block_bytes, load.depth)
        if self._fio is None:
            row.note = NO_FIO
            return Variant([row], None)
        return Variant([row], partial(self._fio.run, load, files, memory, options))

    def _engine_loads(self, data: Path) -> Loads:
        file = open_direct(data)
        with closing(SharedMemory(8 * 2**20)) as memory, _closing_engine(PosixEngine(1)) as engine:
            all_of_it = Load("read", 2**20, 8, self._plan.file_bytes // 2)
            rate = run_engine(engine, all_of_it, file, memory).mb_per_s
        for pattern in PATTERNS:
            for block in self._plan.blocks:
                for depth in self._plan.depths:
                    total = max(int(rate * 1e6 * self._plan.seconds), 8 * block * depth)
                    load = Load(pattern, block, depth, min(total, self._plan.file_bytes))
                    # The file is there in full: no allocation while fio writes.
                    options = ["--overwrite=1", "--fallocate=none"]
                    with ExitStack() as stack:
                        memory = stack.enter_context(closing(SharedMemory(block * depth)))
                        variants = [self._fio_variant("engine", load, [data], memory, options)]
                        for make in self._makers.values():
                            engine = stack.enter_context(_closing_engine(make(1, depth)))
                            row = Row("engine", pattern, engine.name, block, depth)
                            variants.append(Variant([row], partial(run_engine, engine, load, file, memory)))
                        yield engine_load(pattern, block, depth), variants
        data.unlink()

    def _store_writes(self, store: StoreLoad) -> Loads:
        memory = SharedMemory(IO_THREADS * store.layer_bytes)
        at = (store.layer_bytes, IO_THREADS)
        load = Load("write", *at, store.num_runs * store.run_bytes)
        # As the store does it: into a new file whose room is allocated, synced after every run.
        options = [
            *(f"--size={load.total_bytes}", "--fallocate=posix", "--unlink=1"),
            f"--fdatasync={store.num_layers}",
        ]
        variants = [self._fio_variant("store", load, [self._folder / "fio"], memory, options)]
        for name, make in self._makers.items():
            row = Row("store", "write", f"DiskStore, {name}", *at)
            measure = partial(measure_write, store, self._folder / "new", make, memory)
            variants.append(Variant([row], measure))
        with closing(memory):
            yield STORE_WRITES, variants

    def _store_reads(self, store: StoreLoad) -> Loads:
        directory = self._folder / "store"
        memory = SharedMemory(READERS * store.layer_bytes)
        with opened(store, directory, PosixEngine(1, 1)) as disk_store:
            write_runs(store, store.num_runs, disk_store, memory)
        files = store.full_segments(directory)
        variants = []
        # Layers travel in pieces; a small one as a whole.
        pieces = [(min(PIECE_BYTES, store.layer_bytes), -(-store.layer_bytes // PIECE_BYTES) * READERS)]
        loads = list(dict.fromkeys([*pieces, (store.layer_bytes, READERS)]))
        for block, depth in loads:
            used = store.segment_bytes // block * block
            load = Load("read", block, depth, len(files) * used)
            options = [f"--filesize={used}", f"--size={load.total_bytes}"]
            variants.append(self._fio_variant("store", load, files, memory, options))
        for name, make in self._makers.items():
            rows = [Row("store", "read", f"DiskStore, {name}", *at) for at in loads]
            variants.append(Variant(rows, partial(measure_read, store, directory, make, memory)))
        with closing(memory):
            yield STORE_READS, variants


@contextmanager
def _closing_engine(engine: IOEngine) -> Iterator[IOEngine]:
    try:
        yield engine
    finally:
        engine.close(1.0)
