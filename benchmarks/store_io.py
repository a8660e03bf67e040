"""How much of the disk's speed is used: fio, the I/O engines and the disk store, in one run on the same files.

Variants take turns, and each rate is compared with fio's in the same round, at the same block size and depth, to and
from the same pages of memory. Goals, set before anything was measured: at least 90 % of fio for reads, 80 % for writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from common.command import ENDED_EARLY, carry_out, errors_told, new_app
from common.gathered import Gathered
from common.header import file_system_of, make_header
from common.options import AsJson, Out, Quick, prepare_out
from common.terminal import new_progress
from sglang_hcache.cli.options import parsed
from sglang_hcache.core.units import parse_size
from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.io.nixl import nixl_problem
from storage import report
from storage.bench import KIB, Bench, Plan
from storage.disk_store import StoreLoad
from storage.report import FLOORS


def make_plan(
    *,
    quick: bool,
    size: int | None,
    blocks: Sequence[int],
    depths: Sequence[int],
    rounds: int | None,
    with_store: bool,
) -> Plan:
    """The defaults of a full or a quick run, with what was asked for instead."""
    file_bytes = size or (256 * 2**20 if quick else 2**30)
    return Plan(
        blocks=tuple(dict.fromkeys(blocks))
        or tuple(KIB * n for n in ((64, 512, 1024) if quick else (64, 256, 512, 1024, 2048))),
        depths=tuple(dict.fromkeys(depths)) or ((4, 16) if quick else (1, 4, 8, 16, 32)),
        rounds=rounds or (3 if quick else 5),
        seconds=0.1 if quick else 0.3,
        file_bytes=file_bytes,
        store=StoreLoad(max(file_bytes // StoreLoad(1).segment_bytes, 1)) if with_store else None,
    )


def parse_block(text: str) -> int:
    """Bytes of a block.

    Raises:
        ValueError: it is none that can be read and written past the page cache.
    """
    block = parse_size(text)
    if not block or block % BLOCK:
        raise ValueError(f"{text!r} is not allowed; it must be a multiple of {BLOCK:,} bytes, and not 0")
    return block


def header_of(folder: Path, plan: Plan) -> dict[str, Any]:
    """What one must know to believe the numbers."""
    return {
        **make_header("store_io"),
        "nixl": nixl_problem() or metadata.version("nixl"),
        "file_system": file_system_of(folder),
        "plan": asdict(plan),
        "floors": FLOORS,
    }


def run(plan: Plan, folder: Path, found: Gathered) -> None:
    """Measure everything.

    Raises:
        HCacheError, OSError: it cannot be measured here.
    """
    found.header = header_of(folder, plan)
    with new_progress() as progress:
        Bench(folder, plan, found).run(progress)


app = new_app()


HELP = f"""{__doc__}

\b
    python benchmarks/store_io.py --dir /mnt/nvme0 --quick
    python benchmarks/store_io.py --dir /mnt/nvme0 --size 8GB --out results
    python benchmarks/store_io.py --block 512KiB --depth 8 --rounds 15 --no-store

Run it while nothing else uses the disk or the CPUs: other load slows Python threads more than fio.
"""


@app.command(help=HELP, epilog=ENDED_EARLY)
@errors_told("store_io")
def main(
    directory: Annotated[
        Path,
        typer.Option(
            "--dir",
            exists=True,
            file_okay=False,
            help="Where to measure: a folder on the disk to test. It is left as it was.",
        ),
    ] = Path(),
    size: Annotated[
        str | None,
        typer.Option(
            help="Size of the file that is read and written, such as 4GB. Default: 1GiB, quick 256MiB."
        ),
    ] = None,
    quick: Quick = False,
    block: Annotated[
        list[str] | None,
        typer.Option(
            help="Block size, a multiple of 4,096 bytes such as 512KiB; may be repeated. Default: 64KiB to 2MiB."
        ),
    ] = None,
    depth: Annotated[
        list[int] | None,
        typer.Option(help="Concurrent operations; may be repeated. Default: 1 to 32.", min=1),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Measurements of each; the median counts. Default: 5, quick 3.", min=1)
    ] = None,
    store: Annotated[bool, typer.Option(help="Measure the disk store as well.")] = True,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    plan = make_plan(
        quick=quick,
        size=None if size is None else parsed("--size", parse_size, size),
        blocks=[parsed("--block", parse_block, text) for text in block or []],
        depths=depth or [],
        rounds=rounds,
        with_store=store,
    )
    prepare_out(out)
    carry_out(
        "store_io",
        partial(run, plan),
        report,
        folder=directory,
        out=out,
        as_json=as_json,
    )


if __name__ == "__main__":
    app()
