"""How fast a history comes back: every method, from host memory and disk, against the floors, in one run.

Variants take turns; what is printed are medians and ratios of the same run. The floors are what the two resources need
alone: I/O (the same extents read into the same buffers) and computation (bare matrix products on contiguous inputs).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from sglang_hcache.cli.cpu_runtime import has_gpu
from sglang_hcache.cli.serve import prepare_launch
from sglang_hcache.cli.tiny_model import TinyModel, write_tiny_model
from sglang_hcache.core.errors import HCacheError
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, PlanKind
from sglang_hcache.core.units import parse_size

if TYPE_CHECKING:
    from restore_rig import Rig, Variant

    from sglang_hcache.plan.profile import Profile

PIECE = 2048
"""Tokens of a prefill pass."""
HERE = Path(__file__).parent


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
class Settings:
    model: TinyModel
    lengths: tuple[int, ...]
    tiers: tuple[str, ...]
    rounds: int
    folder: Path


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    layers: Annotated[int, typer.Option(help="Layers of the random model.")] = 24,
    hidden: Annotated[int, typer.Option(help="Its hidden size.")] = 512,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; as many as heads if not given.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the histories.")] = "1024,4096,16384",
    tiers: Annotated[
        str,
        typer.Option(
            help="host, disk, or a disk that is read no faster than so many bytes a second, such as disk:500MB."
        ),
    ] = "host,disk",
    rounds: Annotated[int, typer.Option(help="Times that each variant is measured.")] = 7,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where the disk tier is made, and removed. Default: a new folder here."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write restore_speed.json, .csv and .png there.")] = None,
    quick: Annotated[
        bool, typer.Option(help="Under two minutes: 1,024 and 4,096 tokens, five rounds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")] = False,
) -> None:
    """Compare recompute, kv, hidden, hybrid, auto and the floors."""
    _with_cpu_runtime()
    with tempfile.TemporaryDirectory(dir=folder or Path.cwd(), prefix="restore-speed-") as scratch:
        settings = Settings(
            TinyModel(
                layers=layers,
                hidden=hidden,
                heads=heads,
                kv_heads=kv_heads,
                dtype="bfloat16",
                max_position=40_000,
            ),
            tuple(
                int(part) // CHUNK_TOKENS * CHUNK_TOKENS
                for part in ("1024,4096" if quick else lengths).split(",")
            ),
            tuple(tiers.split(",")),
            5 if quick else rounds,
            Path(scratch),
        )
        rows, costs = measure(settings, Console(stderr=True, quiet=as_json))
    from restore_report import data_of, print_tables, write_all

    data = data_of(settings, rows, costs)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        print_tables(rows, costs, Console())
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
    from restore_rig import Rig

    model = settings.folder / "model"
    write_tiny_model(model, settings.model)
    rows: list[Row] = []
    costs: dict[str, Any] = {}
    with Progress(console=console, transient=True) as progress:
        loading = progress.add_task("loading the model, computing a prompt", total=None)
        rig = Rig.load(model, max(settings.lengths), PIECE)
        progress.remove_task(loading)
        for length in settings.lengths:  # warms up
            rig.recompute(length)
        for tier in settings.tiers:
            task = progress.add_task(tier, total=settings.rounds * len(settings.lengths))
            rows += _measure_tier(settings, rig, tier, partial(progress.advance, task), costs)
    return rows, costs


def _measure_tier(settings: Settings, rig: Rig, tier: str, step: Any, costs: dict[str, Any]) -> list[Row]:
    from restore_rig import Variant, gate_of

    from sglang_hcache.core.observer import Counters
    from sglang_hcache.sglang_plugin.measuring import Bench
    from sglang_hcache.sglang_plugin.planning import describe
    from sglang_hcache.store import DiskStore, StoreConfig

    disk = None
    name, _, limit = tier.partition(":")
    if name == "disk":
        config = StoreConfig(
            dirs=(settings.folder / "disk",), size_bytes=16 * 2**30, free_floor_bytes=0, segment_bytes=2**28,
            read_limit_bytes_per_s=parse_size(limit) if limit else None,
        )  # fmt: skip
        disk = DiskStore.open(config, Counters())
    profile = Bench(rig.model, rig.restorer, rig.device.forward, disk, PIECE, 2.0, 16, "benchmark").measure()
    costs[tier] = asdict(profile)
    variants = {}
    for kind in (PlanKind.KV, PlanKind.HIDDEN, PlanKind.HYBRID, PlanKind.AUTO):
        stored = _stored(profile, name, kind)
        gate = gate_of(profile, stored, kind)
        variants[kind.value] = Variant(rig, stored, disk, gate, may_decline=kind is PlanKind.AUTO)
    rows = []
    for length in settings.lengths:
        rows += _measure_length(settings, rig, tier, length, variants, step)
    for row in rows:
        if row.variant in variants:
            row.stored = describe(variants[row.variant].stored)
    for variant in variants.values():
        variant.close()
    if disk is not None:
        disk.close()
    return rows


def _stored(profile: Profile, tier: str, kind: PlanKind) -> tuple[Method, ...]:
    from sglang_hcache.plan.planner import plan_stored
    from sglang_hcache.plan.stored import PLANNED_TOKENS

    return plan_stored(profile.costs({tier: PLANNED_TOKENS}), profile.model.num_layers, kind)


def _measure_length(
    settings: Settings, rig: Rig, tier: str, length: int, variants: dict[str, Variant], step: Any
) -> list[Row]:
    rows = {name: Row(tier, length, name, 0.0) for name in ("recompute", *variants)}
    floors: dict[str, list[float]] = {name: [] for name in variants}
    computes: list[float] = []
    for variant in variants.values():
        variant.restore(length, check=True)
    for _ in range(settings.rounds):
        rows["recompute"].times.append(rig.recompute(length))
        computes.append(bare_products(rig, length))
        for name, variant in variants.items():
            floors[name].append(variant.read_alone(length))
            seconds, decision = variant.restore(length)
            rows[name].times.append(seconds)
            if decision is not None:
                rows[name].predicted_s, rows[name].num_recompute = decision.restore_s, decision.num_recompute
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
        for layer, module in enumerate(rig.model.attention):
            weight = module.qkv_proj.weight[module.q_size :]  # type: ignore[index]
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
