"""How fast a history comes back: every variant, length and tier in turns."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common.gathered import Gathered
from common.statistics import median_with_interval
from common.terminal import new_progress, while_doing
from common.turns import in_turn
from restoring.counted_disk import check_room, disk_config, posix_engine
from restoring.report import RATIOS
from restoring.rig import Rig, Variant, gate_of
from restoring.settings import PIECE, Settings, split_tier
from sglang_hcache.cli.tiny_model.write import write_tiny_model
from sglang_hcache.core.layout import Method, PlanKind
from sglang_hcache.core.observer import Counters
from sglang_hcache.plan.planner import plan_stored
from sglang_hcache.plan.profile import Profile
from sglang_hcache.plan.stored import planned_costs
from sglang_hcache.restore.decision import Decision
from sglang_hcache.sglang_plugin.setup.planning import describe
from sglang_hcache.store import DiskStore


@dataclass
class Row:
    """One variant at one length: medians in seconds."""

    tier: str
    length: int
    variant: str
    seconds: float
    predicted_s: float | None = None
    """Of what was done."""
    io_s: float | None = None
    compute_s: float | None = None
    num_recompute: int = 0
    """First layers that were recomputed: all of them where nothing was restored."""
    stored: str = ""
    times: list[float] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    """Within the rounds: ``x_kv`` and ``x_recompute``, how many times as fast; ``over_floor``, the time over that of
    the slower resource alone. Each with its 95 % interval, ``_low`` and ``_high``."""

    @property
    def efficiency(self) -> float | None:
        """The slower resource alone over the whole."""
        if self.io_s is None or self.compute_s is None:
            return None
        return max(self.io_s, self.compute_s) / self.seconds

    def tell(self, decision: Decision, num_layers: int, *, is_restored: bool) -> None:
        """What was done in one of its rounds. A rare try between others that were declined says nothing of the row."""
        if not is_restored:
            self.predicted_s, self.num_recompute = decision.recompute_s, num_layers
        elif self.num_recompute < num_layers:
            self.predicted_s, self.num_recompute = decision.restore_s, decision.num_recompute

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        ratios = dict.fromkeys(RATIOS) | fields.pop("ratios")
        return fields | {
            "tokens_per_s": self.length / self.seconds,
            "efficiency": self.efficiency,
            **ratios,
        }


def measure(settings: Settings, folder: Path, found: Gathered) -> None:
    """Medians of every variant at every length and tier, and the profile that ``auto`` used.

    Args:
        folder: for the model and the disk tiers.
    """
    found.header["profiles"] = {}
    for tier in settings.tiers:
        found.expect(_name(tier, length) for length in settings.lengths)
    model = folder / "model"
    write_tiny_model(model, settings.model)
    with new_progress() as progress:
        with while_doing(progress, "loading the model, computing a prompt"):
            longest = max(settings.lengths)
            # SGLang's own choice for float32 would be float16.
            rig = Rig.load(model, longest, PIECE, "--dtype", settings.model.dtype)
        for length in settings.lengths:  # warms up
            rig.recompute(length)
        for tier in settings.tiers:
            task = progress.add_task(tier, total=settings.rounds * len(settings.lengths))
            step = partial(progress.advance, task)
            _measure_tier(settings, rig, tier, folder / "disk", step, found)


def _name(tier: str, length: int) -> str:
    """Of what is measured, in messages."""
    return f"{tier}, {length:,} tokens"


def _measure_tier(
    settings: Settings, rig: Rig, tier: str, store: Path, step: Callable[[], None], found: Gathered
) -> None:
    disk = None
    name, limit = split_tier(tier)
    with ExitStack() as closing:
        if name == "disk":
            shape = rig.model.shape
            # Of each kind, and none stores more than K and V or hidden states of all layers.
            row_bytes = max(shape.kv_row_bytes, shape.hidden_row_bytes)
            num_bytes = 4 * max(settings.lengths) * shape.num_layers * row_bytes
            check_room(store.parent, num_bytes)
            closing.callback(shutil.rmtree, store, ignore_errors=True)
            # What is not slowed down is read as a server would.
            engine = None if limit is None else posix_engine(limit)
            disk = DiskStore.open(disk_config(store, num_bytes), Counters(), engine)
            closing.callback(disk.close)
            found.header.setdefault("io_engines", {})[tier] = disk.stats().engine
        profile = rig.profile(disk, settings.measure_s)
        found.header["profiles"][tier] = asdict(profile)
        variants = {}
        for kind in (PlanKind.KV, PlanKind.HIDDEN, PlanKind.HYBRID, PlanKind.AUTO):
            stored = _stored(profile, name, kind)
            gate = gate_of(profile, stored, kind, rig.device.largest_pass)
            longest = max(settings.lengths)
            variants[kind.value] = Variant(
                rig, stored, disk, gate, may_decline=kind is PlanKind.AUTO, longest=longest
            )
            closing.callback(variants[kind.value].close)
        for length in settings.lengths:
            rows = _measure_length(settings, rig, tier, length, variants, step)
            found.add(_name(tier, length), [row.as_json() for row in rows])


def _stored(profile: Profile, tier: str, kind: PlanKind) -> tuple[Method, ...]:
    return plan_stored(planned_costs(profile, tier), profile.model.num_layers, kind)


def _measure_length(
    settings: Settings,
    rig: Rig,
    tier: str,
    length: int,
    variants: dict[str, Variant],
    step: Callable[[], None],
) -> list[Row]:
    rows = {name: Row(tier, length, name, 0.0) for name in ("recompute", *variants, "ideal")}
    rows["recompute"].num_recompute = rig.num_layers
    for variant in variants.values():
        variant.restore(length, check=True)
        variant.read_alone(length)
    rig.bare_products(range(1), [length])
    rig.question(length)

    def restore(name: str) -> float:
        seconds, decision, is_restored = variants[name].restore(length)
        rows[name].tell(decision, rig.num_layers, is_restored=is_restored)
        return seconds

    turns: dict[str, Callable[[], float]] = {
        "recompute": partial(rig.recompute, length),
        **{name: partial(restore, name) for name in variants},
        "ideal": partial(rig.question, length),
        # Turns of their own: right behind its floor a restore would find its bytes in the processor's cache.
        **{f"floor of {name}": partial(variant.read_alone, length) for name, variant in variants.items()},
        "products": partial(rig.bare_products, range(rig.num_layers), [length]),
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(settings.rounds):
        for name in in_turn(turns, number):
            times[name].append(turns[name]())
        step()
    for name, row in rows.items():
        row.times, row.seconds = times[name], statistics.median(times[name])
        if name in variants:
            row.stored = describe(variants[name].stored)
        if name in variants and not row.num_recompute:
            share = variants[name].stored.count(Method.HIDDEN) / rig.num_layers
            reads, products = times[f"floor of {name}"], [share * each for each in times["products"]]
            row.io_s, row.compute_s = statistics.median(reads), statistics.median(products)
            row.ratios |= _spread("over_floor", row.times, list(map(max, reads, products)))
        for baseline in ("kv", "recompute"):
            row.ratios |= _spread(f"x_{baseline}", times[baseline], row.times)
    return list(rows.values())


def _spread(name: str, times: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The median of the rounds' ratios as ``name``, and the ends of its 95 % interval."""
    ratios = [one / other for one, other in zip(times, others, strict=True)]
    return dict(zip((name, f"{name}_low", f"{name}_high"), median_with_interval(ratios), strict=True))
