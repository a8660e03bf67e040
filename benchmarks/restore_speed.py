"""How fast a history is restored: every method, by length, tier and the tier's bandwidth, in one run.

recompute, kv, hidden, hybrid and auto take turns; it prints medians and ratios within the run: Figures 11 and 12 of
HCache. The floors are what the two resources need alone: I/O (the same extents read into like buffers) and
computation (bare matrix products on contiguous inputs). ideal restores nothing: it is the time of the next 64 tokens
when the history is on the device, which comes on top of every other method's time.

\b
    python benchmarks/restore_speed.py --quick
    python benchmarks/restore_speed.py --out results
    python benchmarks/restore_speed.py --layers 16 --hidden 1024 --heads 16 --dir /mnt/nvme0 --out results-1024
    python benchmarks/restore_speed.py --tiers disk:100MB,disk:300MB,disk:1GB --lengths 4096

Run it on an otherwise idle machine. Exit status: 0, 2 with a reason, 130 or 143.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from common.command import ENDED_EARLY, carry_out, errors_told, new_app
from common.gathered import Gathered
from common.options import AsJson, Dtype, Folder, Out, Quick, parse_whole_numbers, prepare_out
from restoring import report
from restoring.counted_disk import disk_facts
from restoring.runtime import restart_with_cpu_runtime
from restoring.settings import Settings, parse_tiers, positions_for
from sglang_hcache.core.layout import CHUNK_TOKENS

LENGTHS, QUICK_LENGTHS = "1024,4096,16384", "256,1024"
TIERS = "host,disk,disk:1GB,disk:250MB"

app = new_app()


@app.command(help=__doc__, epilog=ENDED_EARLY)
@errors_told("restore_speed")
def main(
    layers: Annotated[
        int | None, typer.Option(min=2, help="Layers of the random model. Default: 24; quick 8.")
    ] = None,
    hidden: Annotated[int, typer.Option(min=32, help="Its hidden size.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads. Default: as many as heads.")] = None,
    dtype: Dtype = "bfloat16",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the histories, multiples of 64. Default: 1024,4096,16384; quick 256,1024."
        ),
    ] = None,
    tiers: Annotated[
        str,
        typer.Option(
            help="Measured at every length: host, disk, or a disk with a limit of bytes per second, such as "
            "disk:500MB."
        ),
    ] = TIERS,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Measurements of each variant. Default: 7; quick 3.")
    ] = None,
    folder: Folder = None,
    out: Out = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    histories = parse_whole_numbers(
        "--lengths", lengths or (QUICK_LENGTHS if quick else LENGTHS), low=CHUNK_TOKENS, multiple=CHUNK_TOKENS
    )
    all_tiers = parse_tiers("--tiers", tiers)
    from sglang_hcache.cli.tiny_model.model import TinyModel

    model = TinyModel(
        layers=layers or (8 if quick else 24),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        dtype=dtype,
        max_position=positions_for(max(histories)),
    )
    rounds = rounds or (3 if quick else 7)
    settings = Settings(model, histories, all_tiers, rounds, 0.3 if quick else 2.0)
    prepare_out(out)
    restart_with_cpu_runtime()
    carry_out(
        "restore_speed",
        partial(run, settings),
        report,
        folder=folder,
        out=out,
        as_json=as_json,
    )


def run(settings: Settings, folder: Path, found: Gathered) -> None:
    """Measure everything."""
    disk = disk_facts(folder, settings.tiers)
    from restoring.speed import measure  # takes seconds

    header = report.header_of("restore_speed", settings.model, settings.rounds)
    found.header = header | disk | {"settings": asdict(settings)}
    measure(settings, folder, found)


if __name__ == "__main__":
    app()
