"""How fast a history comes back: every method, over its length, the tier and the tier's bandwidth, in one run.

recompute, kv, hidden, hybrid and auto take turns; medians are printed, and ratios of the same run: Figures 11 and 12 of
HCache. The floors are what the two resources need alone: I/O (the same extents read into the same buffers) and
computation (bare matrix products on contiguous inputs). ideal restores nothing: it is the time of the next 64 tokens
when the history is on the device, which every other method has to add to its own.

\b
    python benchmarks/restore_speed.py --quick
    python benchmarks/restore_speed.py --out results
    python benchmarks/restore_speed.py --layers 16 --hidden 1024 --heads 16 --dir /mnt/nvme0 --out results-1024
    python benchmarks/restore_speed.py --tiers disk --lengths 4096 --bandwidths none

Run it while nothing else uses the machine. Exit status: 0, or 2 with a reason.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from sglang_hcache.cli.cpu_runtime import has_gpu
from sglang_hcache.cli.serve import prepare_launch
from sglang_hcache.core.errors import HCacheError
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, PlanKind
from sglang_hcache.core.units import parse_size

if TYPE_CHECKING:  # those take seconds: wrong options are told at once
    from restoring.rig import Rig, Variant
    from sglang_hcache.cli.tiny_model import TinyModel
    from sglang_hcache.plan.profile import Profile

PIECE = 2048
"""Tokens of a prefill pass."""
LENGTHS, QUICK_LENGTHS = "1024,4096,16384", "1024,2048"


@dataclass
class Row:
    """One variant at one length: medians in seconds."""

    tier: str
    length: int
    variant: str
    seconds: float
    predicted_s: float | None = None
    io_s: float | None = None
    compute_s: float | None = None
    num_recompute: int = 0
    stored: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def efficiency(self) -> float | None:
        """The slower resource alone over the whole."""
        if self.io_s is None or self.compute_s is None:
            return None
        return max(self.io_s, self.compute_s) / self.seconds


@dataclass(frozen=True)
class Sweep:
    """Bandwidths of one length."""

    tiers: tuple[str, ...] = ()
    """Throttled disks."""
    length: int = CHUNK_TOKENS

    @classmethod
    def of(cls, bandwidths: str | None, length: int | None, *, quick: bool, by_default: bool) -> Sweep:
        """
        Raises:
            typer.BadParameter: no bandwidths or no length.
        """
        if bandwidths is None:
            bandwidths = ("250MB,1GB" if quick else "250MB,500MB,1GB,2GB") if by_default else "none"
        if bandwidths == "none":
            return cls()
        tiers = tiers_of(",".join(f"disk:{part.strip()}" for part in bandwidths.split(",")))
        (tokens,) = numbers(str(length or (2048 if quick else 4096)), CHUNK_TOKENS, CHUNK_TOKENS)
        return cls(tiers, tokens)


@dataclass(frozen=True)
class Settings:
    model: TinyModel
    lengths: tuple[int, ...]
    tiers: tuple[str, ...]
    rounds: int
    folder: Path
    sweep: Sweep
    measure_s: float = 2.0
    """For each thing that is measured before a tier, for the plans of ``auto``."""

    def lengths_of(self, tier: str) -> tuple[int, ...]:
        """Lengths that are measured from ``tier``."""
        of_sweep = (self.sweep.length,) if tier in self.sweep.tiers else ()
        return tuple(dict.fromkeys((*(self.lengths if tier in self.tiers else ()), *of_sweep)))

    @property
    def all_tiers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.tiers, *self.sweep.tiers)))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def numbers(text: str, least: int, multiple: int = 1) -> tuple[int, ...]:
    """``1024,4096`` as numbers.

    Raises:
        typer.BadParameter: one is not a number, below ``least``, or not a multiple.
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 1024,4096") from None
    for number in found:
        if number < least or number % multiple:
            of = f", a multiple of {multiple}" if multiple > 1 else ""
            raise typer.BadParameter(f"{number} is not allowed; at least {least}{of}")
    return found


def tiers_of(text: str) -> tuple[str, ...]:
    """``host,disk:500MB`` as tiers.

    Raises:
        typer.BadParameter: one is no tier.
    """
    found = tuple(part.strip() for part in text.split(","))
    for tier in found:
        name, colon, limit = tier.partition(":")
        try:
            if name not in ("host", "disk") or (colon and (name != "disk" or parse_size(limit) <= 0)):
                raise ValueError("it must be host, disk or disk:<bytes a second>")
        except ValueError as error:
            raise typer.BadParameter(f"{tier!r} is no tier: {error}") from None
    return found


@app.command(help=__doc__)
def main(
    layers: Annotated[int, typer.Option(min=2, help="Layers of the random model.")] = 24,
    hidden: Annotated[int, typer.Option(min=32, help="Its hidden size.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="KV heads; as many as heads if not given.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the histories, multiples of 64. Default: 1024,4096,16384; quick 1024,2048."
        ),
    ] = None,
    tiers: Annotated[
        str,
        typer.Option(
            help="Measured at every length: host, disk, or a disk that is read no faster than so many bytes a "
            "second, such as disk:500MB."
        ),
    ] = "host,disk",
    bandwidths: Annotated[
        str | None,
        typer.Option(
            help="Bytes a second that the disk is throttled to, at the one length of --bandwidth-length; none: "
            "no such measurement. Default: none with --tiers or --lengths, else 250MB,500MB,1GB,2GB; quick 250MB,1GB."
        ),
    ] = None,
    bandwidth_length: Annotated[
        int | None, typer.Option(min=CHUNK_TOKENS, help="Default: 4096; quick 2048.")
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
            help="Where the disk tier is made, and removed. Default: a new folder here.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write restore_speed.json, .csv and .png there.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter, under two minutes on two cores.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")] = False,
) -> None:
    sweep = Sweep.of(
        bandwidths, bandwidth_length, quick=quick, by_default=tiers == "host,disk" and not lengths
    )
    histories = numbers(lengths or (QUICK_LENGTHS if quick else LENGTHS), CHUNK_TOKENS, CHUNK_TOKENS)
    all_tiers = tiers_of(tiers)
    from sglang_hcache.cli.tiny_model import TinyModel

    model = TinyModel(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, dtype="bfloat16", max_position=40_000
    )
    rounds = rounds or (5 if quick else 7)
    settings = Settings(model, histories, all_tiers, rounds, Path(), sweep, 0.3 if quick else 2.0)
    _with_cpu_runtime()
    with tempfile.TemporaryDirectory(dir=folder or Path.cwd(), prefix="restore-speed-") as scratch:
        rows, costs = measure(replace(settings, folder=Path(scratch)), Console(stderr=True))
    from restoring.report import data_of, print_tables, write_all

    data = data_of(settings, rows, costs)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        console = Console()
        print_tables(rows, costs, console if console.is_terminal else Console(width=130))
    if out is not None:
        write_all(out, data, rows)


def _with_cpu_runtime() -> None:
    """Start this program again with what SGLang needs on a machine without a GPU."""
    if has_gpu() or os.environ.get("SGLANG_USE_CPU_ENGINE"):
        return
    _, environment = prepare_launch([])
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def measure(settings: Settings, console: Console) -> tuple[list[Row], dict[str, Any]]:
    """Medians of every variant at every length and tier, and the profile that ``auto`` used."""
    from restoring.rig import Rig
    from sglang_hcache.cli.tiny_model import write_tiny_model

    model = settings.folder / "model"
    write_tiny_model(model, settings.model)
    rows: list[Row] = []
    costs: dict[str, Any] = {}
    with Progress(console=console, transient=True) as progress:
        loading = progress.add_task("loading the model, computing a prompt", total=None)
        rig = Rig.load(model, max(*settings.lengths, settings.sweep.length), PIECE)
        progress.remove_task(loading)
        for length in settings.lengths:  # warms up
            rig.recompute(length)
        for tier in settings.all_tiers:
            task = progress.add_task(tier, total=settings.rounds * len(settings.lengths_of(tier)))
            rows += _measure_tier(settings, rig, tier, partial(progress.advance, task), costs)
    return rows, costs


def _measure_tier(settings: Settings, rig: Rig, tier: str, step: Any, costs: dict[str, Any]) -> list[Row]:
    from restoring.rig import Variant, gate_of
    from sglang_hcache.core.observer import Counters
    from sglang_hcache.sglang_plugin.measuring import Bench
    from sglang_hcache.sglang_plugin.planning import describe
    from sglang_hcache.store import DiskStore, StoreConfig

    disk, store = None, settings.folder / "disk"
    name, _, limit = tier.partition(":")
    if name == "disk":
        config = StoreConfig(
            dirs=(store,), size_bytes=16 * 2**30, free_floor_bytes=0, segment_bytes=2**28,
            read_limit_bytes_per_s=parse_size(limit) if limit else None,
        )  # fmt: skip
        disk = DiskStore.open(config, Counters())
    bench = Bench(
        rig.model, rig.restorer, rig.device.forward, disk, PIECE, settings.measure_s, 16, "benchmark"
    )
    profile = bench.measure()
    costs[tier] = asdict(profile)
    variants = {}
    for kind in (PlanKind.KV, PlanKind.HIDDEN, PlanKind.HYBRID, PlanKind.AUTO):
        stored = _stored(profile, name, kind)
        gate = gate_of(profile, stored, kind)
        longest = max(settings.lengths_of(tier))
        variants[kind.value] = Variant(
            rig, stored, disk, gate, may_decline=kind is PlanKind.AUTO, longest=longest
        )
    rows = []
    for length in settings.lengths_of(tier):
        rows += _measure_length(settings, rig, tier, length, variants, step)
    for row in rows:
        if row.variant in variants:
            row.stored = describe(variants[row.variant].stored)
    for variant in variants.values():
        variant.close()
    if disk is not None:
        disk.close()
        shutil.rmtree(store)
    return rows


def _stored(profile: Profile, tier: str, kind: PlanKind) -> tuple[Method, ...]:
    from sglang_hcache.plan.planner import plan_stored
    from sglang_hcache.plan.stored import PLANNED_TOKENS

    return plan_stored(profile.costs({tier: PLANNED_TOKENS}), profile.model.num_layers, kind)


def _measure_length(
    settings: Settings, rig: Rig, tier: str, length: int, variants: dict[str, Variant], step: Any
) -> list[Row]:
    rows = {name: Row(tier, length, name, 0.0) for name in ("recompute", *variants, "ideal")}
    floors: dict[str, list[float]] = {name: [] for name in variants}
    computes: list[float] = []
    for variant in variants.values():
        variant.restore(length, check=True)
    rig.question(length)
    for _ in range(settings.rounds):
        rows["recompute"].times.append(rig.recompute(length))
        computes.append(bare_products(rig, length))
        for name, variant in variants.items():
            floors[name].append(variant.read_alone(length))
            seconds, decision = variant.restore(length)
            rows[name].times.append(seconds)
            if decision is not None:
                rows[name].predicted_s, rows[name].num_recompute = decision.restore_s, decision.num_recompute
        rows["ideal"].times.append(rig.question(length))
        step()
    for name, row in rows.items():
        row.seconds = statistics.median(row.times)
        if name in variants and not row.num_recompute:
            share = variants[name].stored.count(Method.HIDDEN) / rig.num_layers
            row.io_s, row.compute_s = statistics.median(floors[name]), share * statistics.median(computes)
    return list(rows.values())


def bare_products(rig: Rig, length: int) -> float:
    """Seconds of the matrix products of all layers that make K and V, on contiguous inputs, and nothing else."""
    import torch

    seconds = 0.0
    with torch.inference_mode():
        for layer in range(rig.num_layers):
            weight = rig.kv_weight(layer)
            rows = rig.hidden[layer][:length]
            began = time.monotonic()
            torch.nn.functional.linear(rows, weight)
            seconds += time.monotonic() - began
    return seconds


if __name__ == "__main__":
    try:
        app()
    except HCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
