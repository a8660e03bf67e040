"""How much of the disk's speed arrives: fio, the I/O engines and the disk store, in one run on the same files.

Variants take turns, and each rate is compared with fio's in the same round, at the same block size and depth, to and
from the same pages of memory. Floors, set before anything was measured: 90 % of fio for reads, 80 % for writes.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

import sglang_hcache
from common.header import commit, utc_now
from sglang_hcache.core.errors import HCacheError
from sglang_hcache.core.units import format_bytes, parse_size
from sglang_hcache.store.io.engine import IOEngine
from sglang_hcache.store.io.nixl import NixlEngine, nixl_problem
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.reader import PIECE_BYTES
from storage.disk_store import IO_THREADS, READERS, StoreLoad, measure_read, measure_write, opened, write_runs
from storage.loads import (
    BenchmarkError,
    Fio,
    Load,
    Neighbours,
    Sample,
    SharedMemory,
    make_file,
    open_direct,
    run_engine,
)
from storage.report import FLOORS, Report, Row, table_of, write_csv, write_json, write_png

KIB = 2**10
NO_FIO = "fio: not installed (apt install fio)"
MAKERS: dict[str, Callable[[int, int], IOEngine]] = {"posix": PosixEngine, "nixl": NixlEngine}
PATTERNS = ("read", "randread", "write")
MAX_OTHERS_PERCENT = 20.0
"""Of one core: a round during which other processes used more is measured again."""
QUIET_S = 0.2
"""Without them before a round."""


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
    quiet_s: float
    """Spent at most, all together, on waiting for others and on rounds that they disturbed."""

    @property
    def num_loads(self) -> int:
        return len(PATTERNS) * len(self.blocks) * len(self.depths) + (2 if self.store else 0)


@dataclass
class Variant:
    """One way to do a load. Each of its samples goes to all ``rows``."""

    rows: list[Row]
    measure: Callable[[], Sample]


def _watched(variant: Variant) -> Sample:
    neighbours = Neighbours()
    sample = variant.measure()
    return replace(sample, others_percent=neighbours.percent())


class Bench:
    """Measures in ``folder`` and collects in ``report``."""

    def __init__(self, folder: Path, plan: Plan, report: Report) -> None:
        self._folder = folder
        self._plan = plan
        self._report = report
        self._fio: Fio | None = None
        self._quiet_s = plan.quiet_s
        self._makers = {
            name: make for name, make in MAKERS.items() if name != "nixl" or nixl_problem() is None
        }

    def run(self, progress: Progress) -> None:
        """
        Raises:
            BenchmarkError, HCacheError, OSError: it cannot be measured here.
        """
        task = progress.add_task("writing the file", total=self._plan.num_loads)
        data = self._folder / "data"
        make_file(data, self._plan.file_bytes)
        self._fio = Fio.find(data)
        self._report.header["fio"] = self._fio and f"{self._fio.version} {self._fio.io_engine}"
        loads = [self._engine_loads(data)]
        if self._plan.store is not None:
            loads += [self._store_writes(self._plan.store), self._store_reads(self._plan.store)]
        for group in loads:
            for title, variants in group:
                progress.update(task, description=title)
                self._take_turns(variants)
                progress.advance(task)

    def _take_turns(self, variants: Sequence[Variant]) -> None:
        for number in range(self._plan.rounds):
            first = number % len(variants)
            in_turn = [*variants[first:], *variants[:first]]
            samples = self._undisturbed(in_turn)
            for variant, sample in zip(in_turn, samples, strict=True):
                for row in variant.rows:
                    row.samples.append(sample)

    def _undisturbed(self, variants: Sequence[Variant]) -> list[Sample]:
        """One round, again and again while others use the CPUs and there is time to wait for them."""
        while True:
            self._wait_for_quiet()
            begun = time.monotonic()
            samples = [_watched(variant) for variant in variants]
            if max(sample.others_percent for sample in samples) <= MAX_OTHERS_PERCENT:
                return samples
            self._quiet_s -= time.monotonic() - begun
            if self._quiet_s <= 0:
                self._report.header["disturbed_rounds"] += 1
                return samples

    def _wait_for_quiet(self) -> None:
        while self._quiet_s > 0:
            neighbours = Neighbours()
            time.sleep(QUIET_S)
            if neighbours.percent() <= MAX_OTHERS_PERCENT:
                return
            self._quiet_s -= QUIET_S

    def _rows(self, what: str, pattern: str, variant: str, loads: Sequence[tuple[int, int]]) -> list[Row]:
        rows = [Row(what, pattern, variant, block, depth) for block, depth in loads]
        self._report.rows += rows
        return rows

    def _fio_variant(
        self, what: str, load: Load, files: Sequence[Path], memory: SharedMemory, options: Sequence[str]
    ) -> list[Variant]:
        """None, and a row that says why, if there is no fio."""
        rows = self._rows(what, load.pattern, "fio", [(load.block_bytes, load.depth)])
        if self._fio is None:
            rows[0].note = NO_FIO
            return []
        return [Variant(rows, partial(self._fio.run, load, files, memory, options))]

    def _engine_loads(self, data: Path) -> Iterator[tuple[str, list[Variant]]]:
        file = open_direct(data)
        memory = SharedMemory(8 * 2**20)
        engine: IOEngine = PosixEngine(1, 8)
        rate = run_engine(engine, Load("read", 2**20, 8, self._plan.file_bytes // 2), file, memory).mb_per_s
        engine.close(1.0)
        memory.close()
        for pattern in PATTERNS:
            for block in self._plan.blocks:
                for depth in self._plan.depths:
                    total = max(int(rate * 1e6 * self._plan.seconds), 8 * block * depth)
                    load = Load(pattern, block, depth, min(total, self._plan.file_bytes))
                    memory = SharedMemory(block * depth)
                    # The file is there in full: no allocation while fio writes.
                    options = ["--overwrite=1", "--fallocate=none"]
                    variants = self._fio_variant("engine", load, [data], memory, options)
                    engines = [make(1, depth) for make in self._makers.values()]
                    for engine in engines:
                        rows = self._rows("engine", pattern, engine.name, [(block, depth)])
                        variants.append(Variant(rows, partial(run_engine, engine, load, file, memory)))
                    yield f"{pattern} {block // KIB} KiB, depth {depth}", variants
                    for engine in engines:
                        engine.close(1.0)
                    memory.close()
        data.unlink()

    def _store_writes(self, store: StoreLoad) -> Iterator[tuple[str, list[Variant]]]:
        memory = SharedMemory(IO_THREADS * store.layer_bytes)
        at = (store.layer_bytes, IO_THREADS)
        load = Load("write", *at, store.num_runs * store.run_bytes)
        # As the store does it: into a new file whose room is allocated, synced after every run.
        options = [
            *(f"--size={load.total_bytes}", "--fallocate=posix", "--unlink=1"),
            f"--fdatasync={store.num_layers}",
        ]
        variants = self._fio_variant("store", load, [self._folder / "fio"], memory, options)
        for name, make in self._makers.items():
            rows = self._rows("store", "write", f"DiskStore, {name}", [at])
            measure = partial(measure_write, store, self._folder / "new", make, memory)
            variants.append(Variant(rows, measure))
        yield f"the store writes {store.num_runs} runs", variants
        memory.close()

    def _store_reads(self, store: StoreLoad) -> Iterator[tuple[str, list[Variant]]]:
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
            variants += self._fio_variant("store", load, files, memory, options)
        for name, make in self._makers.items():
            rows = self._rows("store", "read", f"DiskStore, {name}", loads)
            variants.append(Variant(rows, partial(measure_read, store, directory, make, memory)))
        yield f"the store reads {store.num_runs} runs", variants
        memory.close()


def make_plan(
    *,
    quick: bool,
    size: int | None,
    blocks: Sequence[int],
    depths: Sequence[int],
    rounds: int | None,
    with_store: bool,
    quiet_s: float,
) -> Plan:
    """The defaults of a full or a quick run, with what was asked for instead."""
    file_bytes = size or (256 * 2**20 if quick else 2**30)
    return Plan(
        blocks=tuple(blocks)
        or tuple(KIB * n for n in ((64, 512, 1024) if quick else (64, 256, 512, 1024, 2048))),
        depths=tuple(depths) or ((4, 16) if quick else (1, 4, 8, 16, 32)),
        rounds=rounds or (3 if quick else 5),
        seconds=0.1 if quick else 0.3,
        file_bytes=file_bytes,
        store=StoreLoad(max(file_bytes // StoreLoad(1).segment_bytes, 1)) if with_store else None,
        quiet_s=quiet_s,
    )


def make_header(folder: Path, plan: Plan) -> dict[str, Any]:
    """What one must know to believe the numbers. No names of machines or users."""
    found = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    mounts = sorted((line[1], line[2]) for line in found if folder.is_relative_to(line[1]))
    problem = nixl_problem()
    return {
        "benchmark": "store_io",
        "date": utc_now(),
        "commit": commit(),
        "hcache": sglang_hcache.__version__,
        "nixl": problem or metadata.version("nixl"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "file_system": mounts[-1][1] if mounts else None,
        "plan": asdict(plan),
        "disturbed_rounds": 0,
    }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


HELP = f"""{__doc__}

\b
    python benchmarks/store_io.py --dir /mnt/nvme0 --quick
    python benchmarks/store_io.py --dir /mnt/nvme0 --size 8GB --out results
    python benchmarks/store_io.py --block 512KiB --depth 8 --rounds 15 --no-store

Run it while nothing else uses the disk or the CPUs: threads of Python suffer from neighbours more than fio does.
"""


@app.command(help=HELP)
def main(
    directory: Annotated[
        Path,
        typer.Option(
            "--dir",
            exists=True,
            file_okay=False,
            help="Where to measure: a folder on the disk in question. Left as it was.",
        ),
    ] = Path(),
    size: Annotated[
        str | None,
        typer.Option(
            help="Size of the file that is read and written, such as 4GB. Default: 1GiB, quick 256MiB."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes, depths and rounds: under two minutes.")
    ] = False,
    block: Annotated[
        list[str] | None,
        typer.Option(help="Block size, such as 512KiB; may be repeated. Default: 64KiB to 2MiB."),
    ] = None,
    depth: Annotated[
        list[int] | None, typer.Option(help="Operations at once; may be repeated. Default: 1 to 32.", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Measurements of each; the median counts. Default: 5, quick 3.", min=1)
    ] = None,
    quiet: Annotated[
        float,
        typer.Option(
            help="Seconds to wait at most, all together, while other processes use the CPUs.", min=0
        ),
    ] = 30.0,
    store: Annotated[bool, typer.Option(help="Measure the disk store as well.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder for store_io.json, store_io.csv and store_io.png.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write the medians as CSV.")] = None,
    png_path: Annotated[
        Path | None, typer.Option("--png", help="Draw the engines' share of fio's rate.")
    ] = None,
) -> None:
    plan = make_plan(
        quick=quick,
        size=None if size is None else _size(size),
        blocks=[_size(text) for text in block or []],
        depths=depth or [],
        rounds=rounds,
        with_store=store,
        quiet_s=quiet,
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    with tempfile.TemporaryDirectory(prefix="store-io-", dir=directory) as folder:
        report = Report(make_header(Path(folder).resolve(), plan))
        with Progress(console=console, transient=True) as progress:
            try:
                Bench(Path(folder), plan, report).run(progress)
            except (BenchmarkError, HCacheError, OSError) as error:
                progress.stop()
                print(f"store_io: error: {error}", file=sys.stderr)
                raise typer.Exit(2) from None
    show(console, report)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    for path, name, write in (
        (json_path, "store_io.json", write_json),
        (csv_path, "store_io.csv", write_csv),
        (png_path, "store_io.png", write_png),
    ):
        for target in (path, out and out / name):
            if target is not None:
                write(report, target)


def show(console: Console, report: Report) -> None:
    """The tables, and in one line whether the floors are reached."""
    header = report.header
    console.print(
        f"{header['cpus']} CPUs, Linux {header['kernel']}, {header['file_system']}; fio: {header['fio'] or NO_FIO}; "
        f"NIXL: {header['nixl']}; {header['plan']['rounds']} rounds, file of "
        f"{format_bytes(header['plan']['file_bytes'])}; red: below the floor",
        highlight=False,
    )
    for what, title in (("engine", "I/O engines"), ("store", "Disk store, digests verified")):
        if any(row.what == what for row in report.rows):
            console.print(table_of(report, what, title))
    compared = [row for row in report.rows if report.ratio(row) is not None]
    missed = len(report.below_floor())
    floors = ", ".join(f"{pattern} {100 * floor:.0f} %" for pattern, floor in FLOORS.items())
    if disturbed := header["disturbed_rounds"]:
        console.print(f"Other processes used the CPUs during {disturbed} rounds: do not trust the ratios.")
    console.print(f"{len(compared) - missed} of {len(compared)} rows reach their floor ({floors} of fio).")


if __name__ == "__main__":
    app()
