"""Restores whose layers are shared out between two methods, and restores whose tokens are.

[HCache §4.1.2, Figure 13]: with the same bytes to read and the same products to compute, either some *layers* come back
as K and V and the others as hidden states, or some *tokens* do, in every layer. By tokens each layer takes two reads in
place of one, and products with a number of rows that fits no kernel's tiles. By tokens is for this comparison only: no
server stores like that.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ablation.settings import Sizes
from ablation.splits import (
    BLOCK_TOKENS,
    TokenSplit,
    block_lengths,
    choose_split,
    closed_forms,
    host_reads,
    predicted_by_tokens,
    token_splits,
)
from common.turns import in_turn
from restoring.counted_disk import CountingEngine, open_disk
from restoring.rig import NAMESPACE, Rig, Variant, filled_tiers, gate_of, salted
from restoring.settings import split_tier
from sglang_hcache.core.keys import chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, PlanKind, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.plan.costs import LayerCosts
from sglang_hcache.plan.planner import Split, make_plan
from sglang_hcache.plan.profile import Profile
from sglang_hcache.restore.engine import RestoreEngine
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.pipeline import NUM_BUFFERS, LayerPipeline, Read, Step, layers_of_steps
from sglang_hcache.restore.rows import StoredRows
from sglang_hcache.sglang_plugin.seam.budget import MOST_BLOCK_CHUNKS
from sglang_hcache.store import DiskStore
from sglang_hcache.store.io.engine import IOKind
from sglang_hcache.tier.tiered import ChunkLease, Pieces

LAYERS, TOKENS, ROUNDED = "layers", "tokens", "tokens, rounded"
"""How a restore is shared out: by layers; by tokens, as exactly as tokens go; by tokens, in whole chunks."""


class _BothForms:
    """Tiers of hidden states and of K and V as one, with two steps a layer: 2·layer and 2·layer + 1."""

    def __init__(self, rig: Rig, disk: DiskStore | None) -> None:
        keys = chunk_keys(NAMESPACE.root_key(), rig.tokens)
        self.tiers, self.keys = [], []
        layouts = []
        for method in (Method.HIDDEN, Method.KV):
            layout = rig.model.layout((method,) * rig.num_layers)
            rows = [rig.stored_rows(layer, method) for layer in range(rig.num_layers)]
            self.keys.append(salted(keys))
            self.tiers.append(filled_tiers(layout, self.keys[-1], rows, disk))
            layouts.append(layout)
        self.layout = StateLayout(
            (Method.HIDDEN, Method.KV) * rig.num_layers,
            tuple(layouts[step % 2].row_bytes[step // 2] for step in range(2 * rig.num_layers)),
        )

    def lease(self, part: int, first: int, stop: int) -> ChunkLease:
        return self.tiers[part].lease(self.keys[part][first:stop])

    def read_layers(self, lease: ChunkLease, into: Mapping[int, Any]) -> None:
        """Of one form: what is in ``lease``."""
        form = next(iter(into)) % 2
        self.tiers[form].read_layers(lease, {step // 2: out for step, out in into.items()})

    def rows_in_place(self, lease: ChunkLease, step: int) -> tuple[Any, Pieces]:
        return self.tiers[step % 2].rows_in_place(lease, step // 2)


class _TokenPipeline(LayerPipeline):
    """The server's pipeline, with two steps a layer: its hidden states, then its K and V."""

    def __init__(self, tiers: Any, restorer: LayerRestorer) -> None:
        # Two of these buffers hold what one of the server's holds.
        super().__init__(tiers, restorer, MOST_BLOCK_CHUNKS, num_buffers=2 * NUM_BUFFERS)
        self.splits: list[TokenSplit] = []

    def steps(self, job: RestoreJob) -> Iterator[Step]:
        block_start = 0
        for number, split in enumerate(self.splits):
            blocks = job.blocks[2 * number : 2 * number + 2]
            most_bytes = min(self.most_bytes(block) for block in blocks if block.keys)
            of_forms = [
                self.layer_bytes(block, range(form, self.layout.num_layers, 2)).values()
                for form, block in enumerate(blocks)
            ]
            layer_bytes = dict(enumerate(map(sum, zip(*of_forms, strict=True))))
            begins = number == 0 and math.isfinite(most_bytes)  # it is read
            for layers in layers_of_steps(layer_bytes, most_bytes, begins=begins):
                for part, begin in enumerate((0, split.hidden)):
                    if blocks[part].keys:
                        steps = tuple(2 * layer + part for layer in layers)
                        sizes = self.layer_bytes(blocks[part], steps)
                        yield Step(blocks[part], block_start + begin, steps, sum(sizes.values()))
            block_start += split.total

    def rows(self, read: Read, layer: int) -> StoredRows:
        """Of the chunk that both forms have, each form's rows."""
        chunks = super().rows(read, layer)
        split = self.splits[read.step.first_token // BLOCK_TOKENS]
        first, begin, end = 0, 0, split.hidden
        if layer % 2:
            first, begin, end = split.first_kv_chunk * CHUNK_TOKENS, split.hidden, split.total
        return StoredRows.of(layer // 2, chunks.method, chunks.rows[begin - first : end - first])


class TokenWise:
    """Restores of the rig's prompt whose tokens are shared out."""

    def __init__(self, rig: Rig, disk: DiskStore | None) -> None:
        self._rig = rig
        self._over = threading.Event()
        self._both = both = _BothForms(rig, disk)
        self._pipeline = _TokenPipeline(both, rig.restorer)
        self._engine = RestoreEngine(self._pipeline, Counters(), self._over.set)

    def restore(self, splits: list[TokenSplit], *, check: bool = False) -> tuple[float, float]:
        """Seconds, and the largest error of what came back, 0 unless ``check``."""
        length = sum(split.total for split in splits)
        slots = self._rig.view.allocate(length)
        began = time.monotonic()
        self._pipeline.splits = splits
        blocks = []
        for number, split in enumerate(splits):
            first, count = number * MOST_BLOCK_CHUNKS, split.total // CHUNK_TOKENS
            blocks.append(self._both.lease(0, first, first + split.hidden_chunks))
            blocks.append(self._both.lease(1, first + split.first_kv_chunk, first + count))
        job = RestoreJob(tuple(blocks), 0, slots, 60.0, tuple(range(2 * self._rig.num_layers)))
        self._over.clear()
        self._engine.submit(job)
        self._over.wait()
        seconds = time.monotonic() - began
        assert job.state is RestoreState.DONE, job.error
        error = self._rig.check(slots) if check else 0.0
        self._rig.view.free(slots)
        return seconds, error

    def close(self) -> None:
        self._engine.close()


@dataclass
class PartitionRow:
    """One way to share out one length; medians in seconds."""

    tier: str
    length: int
    partition: str
    hidden: int
    """Layers or tokens of each block that come back from hidden states."""
    kv: int
    seconds: float = 0.0
    predicted_s: float = 0.0
    closed_form: int | None = None
    """What [HCache §4.1.2] gives for ``hidden``; None where it wants none as K and V, or does not hold."""
    products_s: float = 0.0
    """The bare matrix products alone, on contiguous inputs."""
    gemm_rows: tuple[int, ...] = ()
    """Rows of the products, each number once."""
    gemms: int = 0
    reads: int = 0
    """Read operations of the disk, or times that one layer's chunks are taken from host memory."""
    read_bytes: int = 0
    error: float = 0.0
    """Largest difference of a restored value from what the model computed, relative to the largest value."""
    times: list[float] = field(default_factory=list)
    ratio: float = 1.0
    """Time over that of ``layers`` in the same round: the median, and the range over rounds."""
    ratio_min: float = 1.0
    ratio_max: float = 1.0


def measure_partition(
    sizes: Sizes,
    rig: Rig,
    folder: Path,
    step: Callable[[], None],
    on_rows: Callable[[str, int, Sequence[PartitionRow]], None],
) -> None:
    """Every tier and length by layers, by tokens, and by tokens in whole chunks.

    Args:
        folder: for the disk tiers.
        step: called after each round.
        on_rows: gets the rows of each tier and length as soon as it is over.
    """
    for number, tier in enumerate(sizes.tiers):
        name, limit = split_tier(tier)
        disk, counting = (None, None)
        with ExitStack() as stack:
            if name == "disk":
                disk, counting = open_disk(folder / f"partition-{number}", IOKind.READ, limit)
                stack.callback(disk.close)
            profile = rig.profile(disk, sizes.measure_s)
            costs = costs_by_length(profile, name)
            split = _split(sizes.kv_layers, rig, costs)
            methods = split.methods()
            gate = gate_of(profile, methods, PlanKind.HIDDEN, rig.device.largest_pass)
            by_layers = stack.enter_context(closing(Variant(rig, methods, disk, gate, may_decline=False)))
            by_tokens = stack.enter_context(closing(TokenWise(rig, disk)))
            for length in sizes.lengths:
                case = _Case(rig, tier, length, split, costs, by_layers, by_tokens, counting)
                on_rows(tier, length, case.measure(sizes.rounds, step))


def costs_by_length(profile: Profile, tier: str) -> Callable[[int], LayerCosts]:
    """Costs of one layer by number of tokens, all of them in ``tier``."""
    return lambda num_tokens: profile.costs({tier: num_tokens})


def _split(kv_layers: int | None, rig: Rig, costs: Callable[[int], LayerCosts]) -> Split:
    if kv_layers is not None:
        return Split(0, rig.num_layers - kv_layers, kv_layers)
    return choose_split(costs(BLOCK_TOKENS), rig.num_layers)


@dataclass
class _Case:
    """One tier and length."""

    rig: Rig
    tier: str
    length: int
    split: Split
    costs: Callable[[int], LayerCosts]
    by_layers: Variant
    by_tokens: TokenWise
    counting: CountingEngine | None

    def measure(self, rounds: int, step: Callable[[], None]) -> list[PartitionRow]:
        rows = {name: self._row(name) for name in (LAYERS, TOKENS, ROUNDED)}
        for name, row in rows.items():  # warms up
            self._count(row, lambda name=name: self._restore(name, check=True))
        products: dict[str, list[float]] = {name: [] for name in rows}
        for number in range(rounds):
            for name in in_turn(rows, number):
                products[name].append(self._products(name))
                rows[name].times.append(self._restore(name)[0])
            step()
        for name, row in rows.items():
            ratios = [mine / other for mine, other in zip(row.times, rows[LAYERS].times, strict=True)]
            row.seconds, row.products_s = statistics.median(row.times), statistics.median(products[name])
            row.ratio, row.ratio_min, row.ratio_max = statistics.median(ratios), min(ratios), max(ratios)
        return list(rows.values())

    def _splits(self, name: str) -> list[TokenSplit]:
        return token_splits(self.length, self.split, rounded=name == ROUNDED)

    def _row(self, name: str) -> PartitionRow:
        blocks = block_lengths(self.length)
        by_layers, by_tokens = closed_forms(self.costs(blocks[0]), self.rig.num_layers, blocks[0])
        if name == LAYERS:
            row = PartitionRow(self.tier, self.length, name, self.split.hidden, self.split.kv)
            row.predicted_s = sum(
                make_plan(self.split.methods(), self.costs(block)).total_s for block in blocks
            )
            row.gemms, row.gemm_rows = self.split.hidden * len(blocks), tuple(dict.fromkeys(blocks))
            row.closed_form = by_layers
            return row
        splits = self._splits(name)
        kv = splits[0].total - splits[0].hidden
        row = PartitionRow(self.tier, self.length, name, splits[0].hidden, kv)
        row.predicted_s = predicted_by_tokens(self.costs, splits, self.rig.num_layers)
        row.gemms = self.rig.num_layers * len(blocks)
        row.gemm_rows = tuple(dict.fromkeys(split.hidden for split in splits))
        row.closed_form = by_tokens
        return row

    def _restore(self, name: str, *, check: bool = False) -> tuple[float, float]:
        if name == LAYERS:
            return self.by_layers.restore(self.length, check=check)[0], self.by_layers.error
        return self.by_tokens.restore(self._splits(name), check=check)

    def _count(self, row: PartitionRow, restore: Callable[[], tuple[float, float]]) -> None:
        """Errors, reads and bytes of one restore."""
        if self.counting is not None:
            self.counting.take()
        row.error = restore()[1]
        if self.counting is not None:
            row.reads, row.read_bytes = self.counting.take()
            return
        row.reads, row.read_bytes = host_reads(
            self.rig.model.row_bytes,
            self.rig.num_layers,
            self.split,
            (None if row.partition == LAYERS else self._splits(row.partition)),
            self.length,
        )

    def _products(self, name: str) -> float:
        """Seconds of the products that make K and V, on contiguous inputs."""
        if name == LAYERS:
            blocks = block_lengths(self.length)
            layers = range(self.split.kv, self.rig.num_layers)
        else:
            blocks, layers = [split.hidden for split in self._splits(name)], range(self.rig.num_layers)
        return self.rig.bare_products(layers, blocks)
