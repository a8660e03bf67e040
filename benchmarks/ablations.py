"""What each part of the method is worth: partition by layers, saving in two stages, schedules.

\b
partition   restores that divide layers between hidden states and K and V, compared with restores that divide tokens
            [HCache §4.1.2, Figure 13]
saving      rows that are snapshotted and written in the background, compared with rows that are written while the
            model computes, and with saving nothing [HCache §4.2.2, Figure 14]
schedules   each layer's method and the storage per token, from the paper [HCache Table 3] and for this machine

Variants take turns in every round; ratios are within the same round. Run it on an otherwise idle machine.

\b
    python benchmarks/ablations.py --quick
    python benchmarks/ablations.py partition --tiers disk:500MB --lengths 4096 --out results
    python benchmarks/ablations.py saving --batches 1,4,16 --steps 128 --out results
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ablation import report
from ablation.settings import FULL, QUICK, Section, Sizes, Way
from common.command import ENDED_EARLY, carry_out, errors_told, new_app
from common.gathered import Gathered
from common.options import AsJson, Dtype, Folder, Out, Quick, parse_whole_numbers, prepare_out
from restoring.counted_disk import disk_facts
from restoring.report import header_of
from restoring.runtime import restart_with_cpu_runtime
from restoring.settings import parse_tiers, positions_for
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS

if TYPE_CHECKING:  # imports torch
    from sglang_hcache.cli.tiny_model.model import TinyModel

app = new_app()


@app.command(help=__doc__, epilog=ENDED_EARLY)
@errors_told("ablations")
def main(
    section: Annotated[Section, typer.Argument(help="What to measure.")] = Section.ALL,
    layers: Annotated[
        int | None, typer.Option(min=2, help="Layers of the random model. Default: 24, quick 6.")
    ] = None,
    hidden: Annotated[int, typer.Option(min=32, help="Its hidden size.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads; each has its own K and V.")] = 8,
    dtype: Dtype = "bfloat16",
    tiers: Annotated[
        str | None,
        typer.Option(
            help="partition: host, disk, or a disk with a limit per second, such as disk:500MB. Default: "
            f"{','.join(FULL.tiers)}; quick {','.join(QUICK.tiers)}."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="partition: tokens, multiples of 64. Default: 1024,4096,16384; quick 512,1024."),
    ] = None,
    kv_layers: Annotated[
        int | None,
        typer.Option(min=1, help="partition: layers restored from K and V. Default: the fastest number."),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(help="saving: numbers of requests that decode together. Default: 1,4,16; quick 1,4."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="saving: tokens that each request decodes per round, best a multiple of 64. Default: 128; quick 64.",
        ),
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(min=64, help="saving: tokens of the prompt to prefill. Default: 2048; quick 256."),
    ] = None,
    ways: Annotated[
        list[Way] | None,
        typer.Option("--way", help="saving: one way to save; may be repeated. Default: all."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Measurements of each variant. Default: 7; quick 3.")
    ] = None,
    folder: Folder = None,
    out: Out = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    base = QUICK if quick else FULL
    sizes = Sizes(
        layers or base.layers,
        parse_tiers("--tiers", tiers) if tiers else base.tiers,
        parse_whole_numbers("--lengths", lengths, low=2 * CHUNK_TOKENS, multiple=CHUNK_TOKENS)
        if lengths
        else base.lengths,
        parse_whole_numbers("--batches", batches, low=1) if batches else base.batches,
        steps or base.steps,
        base.prompt,
        prefill or base.prefill,
        rounds or base.rounds,
        base.measure_s,
        tuple(dict.fromkeys(ways)) if ways else base.ways,
        kv_layers,
    )
    if kv_layers is not None and kv_layers >= sizes.layers:
        raise ConfigError(f"--kv-layers: {kv_layers} leaves none of {sizes.layers} layers for hidden states")
    from sglang_hcache.cli.tiny_model.model import TinyModel

    model = TinyModel(
        layers=sizes.layers,
        hidden=hidden,
        heads=heads,
        dtype=dtype,
        max_position=positions_for(sizes.longest),
    )
    prepare_out(out)
    restart_with_cpu_runtime()
    carry_out(
        "ablations",
        partial(run, section, model, sizes),
        report,
        folder=folder,
        out=out,
        as_json=as_json,
    )


def run(section: Section, model: TinyModel, sizes: Sizes, folder: Path, found: Gathered) -> None:
    """Measure what was asked for."""
    disk = disk_facts(folder, sizes.tiers if section in (Section.PARTITION, Section.ALL) else ())
    from ablation.run import Run  # takes seconds

    found.header = header_of("ablations", model, sizes.rounds) | disk | {"settings": asdict(sizes)}
    Run(section, model, sizes, folder, found).measure()


if __name__ == "__main__":
    app()
