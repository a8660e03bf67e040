"""What each part of the method is worth: partition by layers, saving in two stages, schedules.

\b
partition   restores that share out layers between hidden states and K and V, against restores that share out tokens
            [HCache §4.1.2, Figure 13]
saving      rows that are snapshotted and written in the background, against rows that are written while the model
            computes, and against saving nothing [HCache §4.2.2, Figure 14]
schedules   which layer comes back how, and what a token takes in storage [HCache Table 3], and the same here

Variants take turns in every round; ratios are of the same round. Run it while nothing else uses the machine.

\b
    python benchmarks/ablations.py --quick
    python benchmarks/ablations.py partition --tiers disk:500MB --lengths 4096 --out results
    python benchmarks/ablations.py saving --batches 1,4,16 --steps 128 --out results
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from restore_speed import PIECE, Settings, Sweep, _with_cpu_runtime, numbers, tiers_of
from sglang_hcache.core.errors import HCacheError
from sglang_hcache.core.layout import CHUNK_TOKENS

if TYPE_CHECKING:  # those take seconds: wrong options are told at once
    from restoring.rig import Rig
    from sglang_hcache.cli.tiny_model import TinyModel
    from sglang_hcache.plan.profile import Profile
    from sglang_hcache.store import DiskStore


class Section(StrEnum):
    PARTITION = "partition"
    SAVING = "saving"
    SCHEDULES = "schedules"
    ALL = "all"


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    tiers: tuple[str, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int
    prompt: int
    prefill: int
    rounds: int
    measure_s: float


FULL = Sizes(("host", "disk", "disk:500MB"), (1024, 4096, 16384), (1, 4, 16), 128, 256, 2048, 7, 1.0)
QUICK = Sizes(("host", "disk:500MB"), (1024, 2048), (1, 8), 32, 64, 1024, 5, 0.2)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=__doc__)
def main(
    section: Annotated[Section, typer.Argument(help="What to measure.")] = Section.ALL,
    layers: Annotated[int, typer.Option(min=2, help="Layers of the random model.")] = 24,
    hidden: Annotated[int, typer.Option(min=32, help="Its hidden size.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads; all of them have K and V.")] = 8,
    tiers: Annotated[
        str | None,
        typer.Option(
            help="partition: host, disk, or a disk that is read no faster, such as disk:500MB. Default: "
            f"{','.join(FULL.tiers)}; quick {','.join(QUICK.tiers)}."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="partition: tokens, multiples of 64. Default: 1024,4096,16384; quick 1024,2048."),
    ] = None,
    kv_layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="partition: layers that come back as K and V. Default: as many as are fastest."
        ),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="saving: requests that decode together. Default: 1,4,16; quick 1,8.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="saving: tokens that each decodes in a round. Default: 128; quick 32."),
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(min=64, help="saving: tokens of the prompt to prefill. Default: 2048; quick 1024."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Times that each variant is measured. Default: 7; quick 5.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            exists=True,
            file_okay=False,
            help="Where files are written, and removed. Default: a new folder here.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write ablations.json, and a CSV file and a picture for each section, there."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, under two minutes on two cores.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")] = False,
) -> None:
    base = QUICK if quick else FULL
    sizes = Sizes(
        tiers_of(tiers) if tiers else base.tiers,
        numbers(lengths, 2 * CHUNK_TOKENS, CHUNK_TOKENS) if lengths else base.lengths,
        numbers(batches, 1) if batches else base.batches,
        steps or base.steps,
        base.prompt,
        prefill or base.prefill,
        rounds or base.rounds,
        base.measure_s,
    )
    if kv_layers is not None and kv_layers >= layers:
        raise typer.BadParameter(f"--kv-layers {kv_layers} leaves none of {layers} layers for hidden states")
    from sglang_hcache.cli.tiny_model import TinyModel

    model = TinyModel(layers=layers, hidden=hidden, heads=heads, dtype="bfloat16", max_position=40_000)
    _with_cpu_runtime()
    with tempfile.TemporaryDirectory(dir=folder or Path.cwd(), prefix="ablations-") as scratch:
        console = Console(stderr=True)
        data = Run(section, model, sizes, kv_layers, Path(scratch)).measure(console)
    from ablation.report import print_tables, write_all

    if as_json:
        print(json.dumps(data, indent=2))
    else:
        console = Console()
        print_tables(data, console if console.is_terminal else Console(width=150))
    if out is not None:
        write_all(out, json.loads(json.dumps(data)))


@dataclass
class Run:
    """One run of the benchmark."""

    section: Section
    model: TinyModel
    sizes: Sizes
    kv_layers: int | None
    folder: Path

    def measure(self, console: Console) -> dict[str, Any]:
        """Header and rows of what was asked for."""
        from ablation.report import flat
        from restoring.report import data_of

        sizes = self.sizes
        settings = Settings(self.model, sizes.lengths, sizes.tiers, sizes.rounds, self.folder, Sweep())
        data = {**data_of(settings, (), {}), "benchmark": "ablations"}
        del data["rows"], data["profiles"]
        with Progress(console=console, transient=True) as progress:
            for section, rows in self._sections(progress):
                data[section] = [flat(section, row) for row in rows]
        return data

    def _wants(self, section: Section) -> bool:
        return self.section in (section, Section.ALL)

    def _sections(self, progress: Progress) -> Any:
        task = progress.add_task("loading the model, computing a prompt", total=None)
        rig = self._load()
        progress.remove_task(task)
        if self._wants(Section.PARTITION):
            yield "partition", self._partition(rig, progress)
        if self._wants(Section.SAVING):
            yield "saving", self._saving(rig, progress)
        if self._wants(Section.SCHEDULES):
            yield "schedules", self._schedules(rig, progress)

    def _load(self) -> Rig:
        from restoring.rig import Rig
        from sglang_hcache.cli.tiny_model import write_tiny_model

        folder = self.folder / "model"
        write_tiny_model(folder, self.model)
        longest = [PIECE]
        if self._wants(Section.PARTITION):
            longest += self.sizes.lengths
        if self._wants(Section.SAVING):
            per_request = self.sizes.prompt + self.sizes.steps + CHUNK_TOKENS
            longest += [self.sizes.prefill, max(self.sizes.batches) * per_request]
        return Rig.load(folder, max(longest), PIECE)

    def _profile(self, rig: Rig, disk: DiskStore | None) -> Profile:
        from sglang_hcache.sglang_plugin.measuring import Bench

        bench = Bench(
            rig.model, rig.restorer, rig.device.forward, disk, PIECE, self.sizes.measure_s, 16, "benchmark"
        )
        return bench.measure()

    def _partition(self, rig: Rig, progress: Progress) -> Any:
        from ablation.partition import PartitionSettings, measure_partition

        sizes = self.sizes
        settings = PartitionSettings(sizes.tiers, sizes.lengths, self.kv_layers, sizes.rounds, self.folder)
        task = progress.add_task("partition", total=len(sizes.tiers) * len(sizes.lengths) * sizes.rounds)
        return measure_partition(settings, rig, partial(self._profile, rig), partial(progress.advance, task))

    def _saving(self, rig: Rig, progress: Progress) -> Any:
        from ablation.saving import SavingSettings, measure_saving

        sizes = self.sizes
        settings = SavingSettings(
            sizes.batches, sizes.prompt, sizes.steps, sizes.prefill, sizes.rounds, self.folder
        )
        task = progress.add_task("saving", total=(1 + len(sizes.batches)) * (1 + sizes.rounds))
        return measure_saving(settings, rig, partial(progress.advance, task))

    def _schedules(self, rig: Rig, progress: Progress) -> Any:
        from ablation.schedules import measured_row, paper_rows
        from restoring.counted_disk import open_disk
        from sglang_hcache.store.io.engine import IOKind

        task = progress.add_task("schedules: measuring this machine", total=None)
        disk, _ = open_disk(self.folder / "schedules", IOKind.READ)
        profile = self._profile(rig, disk)
        disk.close()
        progress.remove_task(task)
        return [*paper_rows(), *(measured_row(profile, tier) for tier in profile.tiers)]


if __name__ == "__main__":
    try:
        app()
    except (HCacheError, OSError) as error:
        print(f"ablations: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
