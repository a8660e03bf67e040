"""What restoring and recomputing cost on this machine with this model: a profile, measured before serving."""

from __future__ import annotations

import logging
import random
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from types import MappingProxyType

import torch

from sglang_hcache.core.errors import StoreError, TierMissError
from sglang_hcache.core.layout import CHUNK_TOKENS, Method
from sglang_hcache.plan.curves import CostCurve, fit_curve
from sglang_hcache.plan.profile import ComputeCurves, Profile, ProfileSource, TierCurves
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.pipeline import most_together
from sglang_hcache.restore.rows import StoredRows
from sglang_hcache.restore.stage import DeviceStage
from sglang_hcache.sglang_plugin.seam.model import ServedModel
from sglang_hcache.sglang_plugin.seam.protocols import Device
from sglang_hcache.sglang_plugin.setup.scratch import NUM_LAYERS, ScratchReads, take_slots
from sglang_hcache.sglang_plugin.setup.timing import (
    Piece,
    Timing,
    is_more_wanted,
    range_of,
    undisturbed,
)
from sglang_hcache.store import DiskStore
from sglang_hcache.tier.tiered import DISK, HOST

logger = logging.getLogger(__name__)

_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SHORT_LENGTHS = (16, 32, _LENGTHS[0])
"""Tokens of passes, where it is clear that restoring is much faster."""
_CLEAR = 10.0
"""Recomputing that takes so many times as long as restoring need not be predicted more exactly than short passes do,
up to 1.7 times too long: no decision depends on it, and what prompts take is learnt from them."""
_FEWEST_LENGTHS = 3
_PIECE_SHARE = 1 / 4
"""The share of the longest pass that is measured behind a prefix."""
_MOST_BUDGETS = 7.0
"""A pass that would take so many times what is allowed for all of them is left out: who computes slowly shall not wait
for minutes at every start."""
_COMPANY_TOKENS = 1024
"""Read and restored at once, at most: in many short rounds, for the machine does something else now and then."""

_MOST_SCRATCH_BYTES = 64 * 2**20
_SCRATCH_SHARE = 1 / 32
"""The share of the disk tier that may be filled for it, for as long as it takes."""
_PACKAGES = ("sglang-hcache", "sglang", "torch")
_REVISION = 3
"""How it is measured: raised when the same machine would get other numbers, between two releases as well."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, and for how long.

    Args:
        longest: most tokens that a pass may have, and that the KV pool may lend.
        budget_s: seconds for each thing that is measured.
        disk: the disk tier, which takes a few chunks that nobody asks for; None: there is none.
        machine: the profile's :attr:`Profile.machine`.
        hidden: whether hidden states may be stored: what they cost is not measured otherwise, and taken to be no less
            than what K and V do.
        is_exact: whether passes are measured as exactly as the budget allows, also where nothing depends on it now.
    """

    model: ServedModel
    restorer: LayerRestorer
    device: Device
    disk: DiskStore | None
    longest: int
    budget_s: float
    machine: str
    hidden: bool
    is_exact: bool

    @property
    def is_possible(self) -> bool:
        """Whether passes are long enough to measure anything."""
        return len(self._lengths) >= _FEWEST_LENGTHS

    @property
    def _is_gpu(self) -> bool:
        return self.restorer.stage is not None

    @property
    def _busiest(self) -> Method:
        """What may be stored whose restores compute most."""
        return Method.HIDDEN if self.hidden else Method.KV

    @property
    def _timing(self) -> Timing:
        return Timing(self.budget_s, loads_kernels=self._is_gpu)

    @property
    def _lengths(self) -> list[int]:
        return [length for length in _LENGTHS if length <= self.longest]

    def measure(self) -> Profile:
        """Time forward passes, layers and reads of a few lengths, and fit curves."""
        began = time.monotonic()
        layers, lengths = self.model.shape.num_layers, self._lengths
        logger.info("hcache: measuring what restoring and recomputing cost on this machine")
        kv = self._fit(lengths, lambda length: self._restore_one(Method.KV, length))
        projected = None
        if self.hidden:
            projected = self._fit(lengths, lambda length: self._restore_one(Method.HIDDEN, length))
        with ExitStack() as scratch:
            if self.disk is not None:
                scratch.enter_context(self.disk.measuring())
            tiers = self._tiers(scratch)
        passes = self._pass_times(partial(_restore_s, tiers.values(), kv, projected, layers))
        recompute = _pass_curve(passes)
        # Where it is not measured it is never worth it: as slow as running all layers.
        hidden = projected or CostCurve(fixed_s=recompute.fixed_s, per_token_s=recompute.per_token_s)
        profile = Profile(
            source=ProfileSource.MEASURED,
            model=self.model.shape,
            machine=self.machine,
            tiers=tiers,
            compute=ComputeCurves(
                hidden=_at_least(hidden, kv), kv=kv, recompute=_scaled(recompute, 1 / layers)
            ),
            versions=installed_versions(),
            token_range=range_of(passes),
        )
        if self._is_gpu:
            torch.accelerator.empty_cache()  # SGLang's passes, on another stream, could not use it
        logger.info("hcache: measured this machine in %.1f s", time.monotonic() - began)
        return profile

    # -- computing -------------------------------------------------------------------------------

    def _pass_times(self, restore_s: Callable[[int], float]) -> Mapping[Piece, float]:
        """Seconds of prompts, and of a piece behind a prefix: attention to what is before it makes it slow.

        Args:
            restore_s: what restoring so many tokens takes.
        """
        if self._is_gpu:
            # It takes as long for a short one as launching its kernels, which says nothing of what a token costs.
            return self._times(self._lengths[-_FEWEST_LENGTHS:])
        shortest = self._lengths[0]
        if self.is_exact:
            # Twice, for something else may run.
            shortest_s = min(self._recompute_one(shortest, 0) for _ in range(2))
        else:
            times = self._times(_SHORT_LENGTHS)
            if self._is_clear(_pass_curve(times), restore_s):
                return times
            shortest_s = times[shortest, 0]
        most = _MOST_BUDGETS * self.budget_s / shortest_s * shortest
        num_quick = sum(length <= most for length in self._lengths)
        lengths = self._lengths[: max(_FEWEST_LENGTHS, num_quick)]
        return self._times(lengths, {(shortest, 0): shortest_s})

    def _is_clear(self, recompute: CostCurve, restore_s: Callable[[int], float]) -> bool:
        """Whether restoring is much faster, of a chunk and of the longest pass."""
        places = CHUNK_TOKENS, self._lengths[-1]
        is_clear = all(recompute.seconds(count) > _CLEAR * restore_s(count) for count in places)
        return self.model.ranks.from_first(is_clear)

    def _times(
        self, lengths: Sequence[int], known: Mapping[Piece, float] = MappingProxyType({})
    ) -> Mapping[Piece, float]:
        """Seconds of passes of ``lengths``, as far as the budget goes, and of one behind a prefix."""
        pieces = [(length, 0) for length in lengths]
        behind = (max(CHUNK_TOKENS, int(lengths[-1] * _PIECE_SHARE)), self._lengths[-1])
        if sum(behind) <= self.model.context_length:
            pieces.insert(0, behind)  # first: not what a short budget leaves out
        fewest = len(pieces) - len(lengths) + _FEWEST_LENGTHS
        return self._timing.times(pieces, self._recompute_one, fewest, self._common_clock, known)

    def _recompute_one(self, length: int, start: int) -> float:
        tokens = array("q", random.Random(length).choices(range(self.model.vocabulary), k=start + length))
        slots = take_slots(self.device.tree, len(tokens))
        seconds = self.device.forward.extend(tokens, slots[: len(tokens)], start, self.model.shape.num_layers)
        self.device.tree.free(slots)
        return self.model.ranks.from_first(seconds)

    def _common_clock(self) -> float:
        """Seconds, the same on all ranks: they compute together, so they stop together."""
        self.model.ranks.sync()
        return self.model.ranks.now()

    @torch.inference_mode()
    def _restore_one(self, method: Method, length: int, num_layers: int = NUM_LAYERS) -> float:
        width = self.model.row_bytes(method) // self.model.row_dtype.itemsize
        slots, positions = take_slots(self.device.tree, length), self.restorer.positions(0, length)
        rows = torch.ones(length, width, dtype=self.model.row_dtype, device=positions.device)
        self.restorer.after(self.restorer.fence())
        began = time.monotonic()
        # As a restore does it: several at once.
        layers = [layer % self.model.shape.num_layers for layer in range(num_layers)]
        stored = [StoredRows.of(layer, method, rows) for layer in layers]
        for part in self.restorer.start(stored, positions, slots[:length]):
            part.result()
        seconds = (time.monotonic() - began) / num_layers
        self.device.tree.free(slots)
        return seconds

    # -- reading ---------------------------------------------------------------------------------

    def _tiers(self, holds: ExitStack) -> dict[str, TierCurves]:
        """What reading costs, by tier; a disk that does not take the chunks, or does not give them back, is missing."""
        found = {HOST: self._host_curves(holds)}
        if self.disk is not None:
            try:
                reads = self._scratch_in(self.disk, holds)
                curves = self._tier_curves(
                    lambda method: self._with_bus(method, self._read_curve(reads[method]))
                )
                contention = self._contention(reads[self._busiest], curves.hidden)
                found[DISK] = replace(curves, contention=contention)
            except (StoreError, TierMissError) as error:
                logger.warning(
                    "hcache: reads from the disk tier could not be measured: %s. Until a restore from it says "
                    "more, it is taken to be as fast as host memory", error,
                )  # fmt: skip
        return found

    def _scratch_in(self, disk: DiskStore | None, holds: ExitStack) -> dict[Method, ScratchReads]:
        most_bytes = _MOST_SCRATCH_BYTES
        if disk is not None:
            most_bytes = min(most_bytes, int(disk.stats().cap_bytes * _SCRATCH_SHARE))
        together = most_together(self.model.shape.num_layers)
        found = {}
        for method in (Method.HIDDEN, Method.KV) if self.hidden else (Method.KV,):
            row_bytes = self.model.row_bytes(method)
            most = most_bytes // (NUM_LAYERS * CHUNK_TOKENS * row_bytes)
            count = min(max(_FEWEST_LENGTHS, most), self.longest // CHUNK_TOKENS)
            found[method] = ScratchReads(method, row_bytes, count, disk, together)
            holds.callback(found[method].close)
        return found

    def _host_curves(self, holds: ExitStack) -> TierCurves:
        """Costs of host memory: a GPU copies prefixes from where they lie. A CPU works with them there, which takes no
        longer than reading them.
        """
        if self.restorer.stage is not None:
            return self._tier_curves(partial(self._bus_curve, self.restorer.stage))
        reads = self._scratch_in(None, holds)
        return self._tier_curves(lambda method: self._read_curve(reads[method]))

    def _tier_curves(self, curve_of: Callable[[Method], CostCurve]) -> TierCurves:
        kv = curve_of(Method.KV)
        if not self.hidden:
            return TierCurves(hidden=kv, kv=kv)
        hidden, shape = curve_of(Method.HIDDEN), self.model.shape
        # Fewer bytes never take longer: where two measurements say so, it is noise.
        if shape.hidden_row_bytes >= shape.kv_row_bytes:
            return TierCurves(hidden=_at_least(hidden, kv), kv=kv)
        if self._is_gpu:  # but K and V of several layers are copied at once
            return TierCurves(
                hidden=hidden, kv=replace(kv, per_token_s=max(kv.per_token_s, hidden.per_token_s))
            )
        return TierCurves(hidden=hidden, kv=_at_least(kv, hidden))

    def _read_curve(self, reads: ScratchReads) -> CostCurve:
        lengths = [length for length in _LENGTHS if length <= reads.longest]
        if len(lengths) < _FEWEST_LENGTHS:
            lengths = list(range(CHUNK_TOKENS, reads.longest + 1, CHUNK_TOKENS))
        return self._fit(lengths, reads.time)

    def _with_bus(self, method: Method, read: CostCurve) -> CostCurve:
        """Reading one layer while the one before is copied to a GPU: the slower of both."""
        stage = self.restorer.stage
        return read if stage is None else _at_least(read, self._bus_curve(stage, method))

    def _bus_curve(self, stage: DeviceStage, method: Method) -> CostCurve:
        """Copying one layer's rows to the device, with those of others as a restore has them at once."""
        row_bytes = self.model.row_bytes(method)
        width, at_once = row_bytes // self.model.row_dtype.itemsize, stage.rows_at_once(row_bytes)
        # More is cut to such pieces.
        lengths = [length for length in self._lengths if length <= at_once]
        rows = stage.host_rows(lengths[-1], width, self.model.row_dtype)
        together = most_together(self.model.shape.num_layers)
        num_steps = -(-NUM_LAYERS // together)

        def copy(length: int) -> float:
            step = [StoredRows.of(layer, method, rows[:length]) for layer in range(together)]
            began = time.monotonic()
            for _ in range(num_steps):
                mark = stage.bring(step)
            mark.wait()
            return (time.monotonic() - began) / (num_steps * together)

        return self._fit(lengths, copy)

    def _contention(self, reads: ScratchReads, read_curve: CostCurve) -> float:
        """Which share of reading and restoring, of about as much each as in a restore, does not go on side by side."""
        method = self._busiest
        length = min(reads.longest, self._lengths[-1], _COMPANY_TOKENS)
        # Read four times at least: fewer from a slow disk.
        while length > CHUNK_TOKENS and NUM_LAYERS * read_curve.seconds(length) > self._timing.long_s:
            length -= CHUNK_TOKENS
        layer_s = self._restore_one(method, length, 1)
        num_layers = min(NUM_LAYERS, max(1, int(self._timing.long_s / layer_s)))
        read, restore = partial(reads.time, length), partial(self._restore_one, method, length, num_layers)
        _seconds(read)  # the first time, as everywhere here, does not count
        ratio = _seconds(read) / _seconds(restore)
        num_reads, num_restores = max(1, round(1 / ratio)), max(1, round(ratio))
        rounds: list[tuple[float, float, float]] = []
        ends = time.monotonic() + self.budget_s
        with ThreadPoolExecutor(1, thread_name_prefix="hcache-company") as beside:

            def both() -> None:
                reading = beside.submit(_seconds, read, num_reads)
                _seconds(restore, num_restores)
                reading.result()

            while is_more_wanted(len(rounds), 1, ends - time.monotonic()):
                rounds.append((_seconds(read, num_reads), _seconds(restore, num_restores), _seconds(both)))
        read_s, restore_s, both_s = (undisturbed(times) for times in zip(*rounds, strict=True))
        return min(max((both_s - max(read_s, restore_s)) / min(read_s, restore_s), 0.0), 1.0)

    # -- fitting ---------------------------------------------------------------------------------

    def _fit(self, lengths: Iterable[int], time_of: Callable[[int], float]) -> CostCurve:
        """The line through the times of a few lengths, as many as the budget allows."""
        pieces = [(length, 0) for length in lengths]
        measured = self._timing.times(pieces, lambda length, _: time_of(length), _FEWEST_LENGTHS)
        return fit_curve([length for length, _ in measured], list(measured.values()))


def installed_versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {name: version(name) for name in _PACKAGES} | {"measuring": str(_REVISION)}


def _seconds(work: Callable[[], object], times: int = 1) -> float:
    """Seconds of doing ``work`` so many times."""
    began = time.monotonic()
    for _ in range(times):
        work()
    return time.monotonic() - began


def _restore_s(
    tiers: Iterable[TierCurves], kv: CostCurve, hidden: CostCurve | None, num_layers: int, count: int
) -> float:
    """Seconds of restoring ``count`` tokens the better way from the worst tier, one layer and step after the other."""

    def layer_s(tier: TierCurves) -> float:
        kv_s = tier.kv.seconds(count) + kv.seconds(count)
        return kv_s if hidden is None else min(kv_s, tier.hidden.seconds(count) + hidden.seconds(count))

    return num_layers * max(map(layer_s, tiers))


def _pass_curve(times: Mapping[Piece, float]) -> CostCurve:
    lengths, starts = zip(*times, strict=True)
    return fit_curve(lengths, list(times.values()), starts=starts, quadratic=True)


def _scaled(curve: CostCurve, factor: float) -> CostCurve:
    return replace(
        curve,
        fixed_s=factor * curve.fixed_s,
        per_token_s=factor * curve.per_token_s,
        per_token_squared_s=factor * curve.per_token_squared_s,
    )


def _at_least(curve: CostCurve, other: CostCurve) -> CostCurve:
    """``curve``, in no coefficient below ``other``: who does more does not take less time."""
    return replace(
        curve,
        fixed_s=max(curve.fixed_s, other.fixed_s),
        per_token_s=max(curve.per_token_s, other.per_token_s),
    )
