"""The work that store_io.py measures: the same bytes through fio, an I/O engine or the disk store."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hcache.core.errors import HCacheError
from sglang_hcache.store.io.engine import Batch, IOEngine, IOKind, IOOp, IOResult, OpenFile
from sglang_hcache.store.io.memory import ByteArray

FIO_ENGINES = ("io_uring", "libaio")
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    mb_per_s: float
    """Millions of bytes a second."""
    p50_ms: float
    """Of one operation, from when it is started to when it has ended."""
    p99_ms: float
    cpu_percent: float
    """Of one core, user and system."""


@dataclass(frozen=True)
class Load:
    """What is transferred: ``total_bytes`` in operations of ``block_bytes``, ``depth`` of them at once."""

    pattern: str
    """``read``, ``randread`` or ``write``, as fio has it."""
    block_bytes: int
    depth: int
    total_bytes: int

    @property
    def num_ops(self) -> int:
        return max(self.total_bytes // self.block_bytes, 1)


class BenchmarkError(HCacheError):
    """The benchmark cannot run here; says why."""


class SharedMemory:
    """Memory that fio uses too.

    A device that takes 4 KiB pages one by one is faster where they happen to lie side by side; by a factor of two
    in some virtual machines. So both sides must have the very same pages.
    """

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("store-io")
        os.ftruncate(self._fd, size + 2 * mmap.PAGESIZE)  # fio asks for a page more than it uses
        self.array: ByteArray = np.frombuffer(mmap.mmap(self._fd, size), dtype=np.uint8)
        self.array[:] = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def slot(self, number: int, size: int) -> ByteArray:
        """The ``number``-th piece of ``size`` bytes, counted round and round."""
        begin = number % (self.array.size // size) * size
        return self.array[begin : begin + size]

    def close(self) -> None:
        """The mapping lives as long as ``array`` is used."""
        os.close(self._fd)


def open_direct(path: Path, flags: int = os.O_RDWR) -> OpenFile:
    """
    Raises:
        BenchmarkError: the file system has no O_DIRECT.
    """
    try:
        return OpenFile(os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600), direct=True)
    except OSError as error:
        raise BenchmarkError(f"{path.parent}: cannot open a file with O_DIRECT: {error}") from error


def make_file(path: Path, size: int) -> None:
    """A file of random bytes, really on disk."""
    memory = SharedMemory(2**20)
    file = open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    for offset in range(0, size, 2**20):
        os.pwrite(file.fd, memory.array.data, offset)
    os.fsync(file.fd)
    memory.close()


def wait_for(batch: Batch) -> None:
    """
    Raises:
        OSError: an operation failed or came short.
    """
    for op, result in zip(batch.ops, batch.wait(PATIENCE_S), strict=True):
        if result.error is not None:
            raise result.error
        if result.done_bytes != op.size:
            raise OSError(f"only {result.done_bytes} of {op.size} bytes were transferred")


class TimedBatch(Batch):
    """Remembers when each operation was begun and ended."""

    def __init__(self, ops: Sequence[IOOp]) -> None:
        super().__init__(ops)
        self.begun_s = [0.0] * len(ops)
        self.ended_s = [0.0] * len(ops)

    def begin(self, index: int) -> bool:
        self.begun_s[index] = time.perf_counter()
        return super().begin(index)

    def end(self, index: int, result: IOResult) -> None:
        self.ended_s[index] = time.perf_counter()
        super().end(index, result)


class Stopwatch:
    """Wall and processor time of this process."""

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._wall_s = time.perf_counter()

    def sample(self, num_bytes: int, latencies_s: Iterable[float]) -> Sample:
        """What happened since."""
        wall_s = time.perf_counter() - self._wall_s
        cpu_s = time.process_time() - self._cpu_s
        p50, p99 = np.percentile(np.fromiter(latencies_s, np.float64), (50, 99)) * 1e3
        return Sample(num_bytes / wall_s / 1e6, float(p50), float(p99), 100 * cpu_s / wall_s)


def run_engine(engine: IOEngine, load: Load, file: OpenFile, memory: SharedMemory) -> Sample:
    """``engine`` was made for ``load.depth`` operations at once."""
    file_blocks = os.fstat(file.fd).st_size // load.block_bytes
    order = np.arange(load.num_ops) % file_blocks
    if load.pattern == "randread":
        order = np.random.default_rng(1).permutation(file_blocks)[order]
    kind = IOKind.WRITE if load.pattern == "write" else IOKind.READ
    batch = TimedBatch(
        [
            IOOp(kind, 0, file, block * load.block_bytes, (memory.slot(number, load.block_bytes),))
            for number, block in enumerate(order.tolist())
        ]
    )
    watch = Stopwatch()
    engine.submit(batch, range(len(batch.ops)))
    wait_for(batch)
    spent = (ended - begun for begun, ended in zip(batch.begun_s, batch.ended_s, strict=True))
    return watch.sample(load.num_ops * load.block_bytes, spent)


@dataclass(frozen=True)
class Fio:
    """The fio command and the engine of it that works here."""

    version: str
    io_engine: str

    @classmethod
    def find(cls, file: Path) -> Fio | None:
        """None if fio is not installed. Tries to read ``file``.

        Raises:
            BenchmarkError: it is installed and does not work.
        """
        if shutil.which("fio") is None:
            return None
        version = subprocess.run(
            ["fio", "--version"], capture_output=True, text=True, check=True
        ).stdout.strip()
        problem = ""
        for io_engine in FIO_ENGINES:
            fio = cls(version, io_engine)
            try:
                fio.run(Load("read", 4096, 1, 4096), [file], None)
            except BenchmarkError as error:
                problem = str(error)
            else:
                return fio
        raise BenchmarkError(problem)

    def run(
        self, load: Load, files: Sequence[Path], memory: SharedMemory | None, options: Sequence[str] = ()
    ) -> Sample:
        """
        Raises:
            BenchmarkError: fio failed.
        """
        command = [
            *("fio", "--name=store-io", "--output-format=json", "--direct=1", "--invalidate=0"),
            "--thread",  # one process: where it is killed, nothing of it stays behind
            *(f"--ioengine={self.io_engine}", f"--rw={load.pattern}", f"--bs={load.block_bytes}"),
            *(f"--iodepth={load.depth}", f"--io_size={load.num_ops * load.block_bytes}"),
            *("--filename=" + ":".join(map(str, files)), "--file_service_type=sequential"),
            *("--lat_percentiles=1", "--clat_percentiles=0", "--percentile_list=50:99"),
            *([] if memory is None else [f"--mem=mmapshared:{memory.path}"]),
            *options,
        ]
        process = subprocess.run(command, capture_output=True, text=True)
        begin = process.stdout.find("{")
        if process.returncode != 0 or begin < 0:
            raise BenchmarkError(f"fio failed: {(process.stderr or process.stdout).strip()[-300:]}")
        job = json.loads(process.stdout[begin:])["jobs"][0]
        side = job["write" if load.pattern == "write" else "read"]
        return _fio_sample(job, side)


def _fio_sample(job: dict[str, Any], side: dict[str, Any]) -> Sample:
    percentiles = side["lat_ns"]["percentile"]
    return Sample(
        side["bw_bytes"] / 1e6,
        percentiles["50.000000"] / 1e6,
        percentiles["99.000000"] / 1e6,
        job["usr_cpu"] + job["sys_cpu"],
    )
