"""What restoring and recomputing cost on this machine with this model: a profile, measured before serving."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np
import torch

from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.errors import StoreError
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.plan.curves import CostCurve, fit_curve
from sglang_hcache.plan.profile import ComputeCurves, Profile, ProfileSource, TierCurves
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.pipeline import NUM_BUFFERS
from sglang_hcache.sglang_plugin.model import ServedModel
from sglang_hcache.sglang_plugin.protocols import ForwardModel
from sglang_hcache.store import DiskStore, Run
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import DISK, HOST, TieredStore

logger = logging.getLogger(__name__)

_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FEWEST_LENGTHS = 3
_FEWEST_ROUNDS = 3
_MOST_ROUNDS = 15

_READ_LAYERS = 6
"""Layers of what is read for a measurement; several are read at once, as in a restore."""
_MOST_SCRATCH_BYTES = 64 * 2**20
_SCRATCH_SHARE = 32
"""One so-many-th of the disk tier may be filled for it. The bytes stay until eviction, which takes them first."""
_PACKAGES = ("sglang-hcache", "sglang", "torch")


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, and for how long.

    Args:
        longest: most tokens that a pass may have, and that the KV pool may lend.
        budget_s: seconds for each thing that is measured.
        disk: the disk tier, which takes a few chunks that nobody asks for; None: there is none.
        run_chunks: chunks that are written together.
        machine: the profile's :attr:`Profile.machine`.
    """

    model: ServedModel
    restorer: LayerRestorer
    forward: ForwardModel
    disk: DiskStore | None
    longest: int
    budget_s: float
    run_chunks: int
    machine: str

    @property
    def is_possible(self) -> bool:
        """Whether passes are long enough to measure anything."""
        return len(self._lengths) >= _FEWEST_LENGTHS

    @property
    def _lengths(self) -> list[int]:
        return [length for length in _LENGTHS if length <= self.longest]

    def measure(self) -> Profile:
        """Time forward passes, layers and reads of a few lengths, and fit curves."""
        began = time.monotonic()
        layers, lengths = self.model.shape.num_layers, self._lengths
        recompute = self._fit(lengths, self._recompute_one, quadratic=True)
        kv = self._fit(lengths, lambda length: self._restore_one(Method.KV, length))
        hidden = self._fit(lengths, lambda length: self._restore_one(Method.HIDDEN, length))
        profile = Profile(
            source=ProfileSource.MEASURED,
            model=self.model.shape,
            machine=self.machine,
            tiers=self._tiers(),
            compute=ComputeCurves(
                hidden=_at_least(hidden, kv), kv=kv, recompute=_scaled(recompute, 1 / layers)
            ),
            versions=installed_versions(),
            token_range=(lengths[0], lengths[-1]),
        )
        logger.info("hcache: measured this machine in %.1f s", time.monotonic() - began)
        return profile

    # -- computing -------------------------------------------------------------------------------

    def _recompute_one(self, length: int) -> float:
        tokens = random.Random(length).choices(range(self.model.vocabulary), k=length)
        began = time.monotonic()
        slots = self.forward.forward(tokens)
        seconds = time.monotonic() - began
        self.forward.release(slots)
        return seconds

    @torch.inference_mode()
    def _restore_one(self, method: Method, length: int) -> float:
        width = self.model.row_bytes(method) // self.model.dtype.itemsize
        rows = torch.zeros(length, width, dtype=self.model.dtype)
        slots = self.forward.allocate(length)
        began = time.monotonic()
        self.restorer.restore(0, method, rows, torch.arange(length), slots[:length])
        seconds = time.monotonic() - began
        self.forward.release(slots)
        return seconds

    # -- reading ---------------------------------------------------------------------------------

    def _tiers(self) -> dict[str, TierCurves]:
        """Reading one layer, by tier; a tier that cannot be tried is missing."""
        curves = {HOST: self._tier_curves(self._host_tiers)}
        if self.disk is not None:
            try:
                curves[DISK] = self._tier_curves(self._disk_tiers)
            except StoreError as error:
                logger.warning("hcache: reads from the disk tier could not be measured: %s", error)
        return curves

    def _tier_curves(self, filled: Callable[[StateLayout, int], TieredStore]) -> TierCurves:
        hidden, kv = (self._read_curve(filled, method) for method in (Method.HIDDEN, Method.KV))
        shape = self.model.shape
        # Fewer bytes never take longer: where two measurements say so, it is noise.
        if shape.hidden_row_bytes >= shape.kv_row_bytes:
            return TierCurves(hidden=_at_least(hidden, kv), kv=kv)
        return TierCurves(hidden=hidden, kv=_at_least(kv, hidden))

    def _read_curve(self, filled: Callable[[StateLayout, int], TieredStore], method: Method) -> CostCurve:
        row_bytes = self.model.row_bytes(method)
        layout = StateLayout((method,) * _READ_LAYERS, (row_bytes,) * _READ_LAYERS)
        most = max(_FEWEST_LENGTHS, self._scratch_bytes() // layout.chunk_bytes)
        count = min(most, self.longest // CHUNK_TOKENS)
        tiers = filled(layout, count)
        lengths = [length for length in _LENGTHS if length <= count * CHUNK_TOKENS]
        lengths = lengths if len(lengths) > 1 else [CHUNK_TOKENS * each for each in range(1, count + 1)]
        buffers = [np.empty(count * layout.chunk_layer_bytes[0], np.uint8) for _ in range(_READ_LAYERS)]
        with ThreadPoolExecutor(NUM_BUFFERS) as readers:
            return self._fit(lengths, lambda length: _read(tiers, readers, buffers, length))

    def _scratch_bytes(self) -> int:
        if self.disk is None:
            return _MOST_SCRATCH_BYTES
        return min(_MOST_SCRATCH_BYTES, self.disk.last_stats.cap_bytes // _SCRATCH_SHARE)

    def _host_tiers(self, layout: StateLayout, count: int) -> TieredStore:
        tiers = _empty_tiers(layout, count, None)
        for index in range(count):
            slot = tiers.reserve()
            assert slot is not None
            tiers.host.arena[slot] = 1  # touched, or the first read would bring the pages in
            tiers.seal(slot, ChunkInfo(_key(layout, index), bytes(32), index, bytes(16)))
        return tiers

    def _disk_tiers(self, layout: StateLayout, count: int) -> TieredStore:
        assert self.disk is not None
        size = layout.chunk_layer_bytes[0]
        for first in range(0, count, self.run_chunks):
            keys = tuple(_key(layout, index) for index in range(first, min(first + self.run_chunks, count)))
            rows = np.random.default_rng(first).integers(0, 256, (len(keys), size), dtype=np.uint8)
            run = Run(bytes(16), keys, first, layout.chunk_layer_bytes)
            self.disk.write_run(run, lambda _layer, rows=rows: list(rows), reused=False)
        return _empty_tiers(layout, 1, self.disk)

    # -- fitting ---------------------------------------------------------------------------------

    def _fit(
        self, lengths: Iterable[int], time_of: Callable[[int], float], *, quadratic: bool = False
    ) -> CostCurve:
        """The curve through the times of a few lengths, as many as the budget allows."""
        lengths = list(lengths)
        measured: dict[int, float] = {}
        ends = time.monotonic() + self.budget_s
        for left, length in zip(range(len(lengths), 0, -1), lengths, strict=True):
            if len(measured) >= _FEWEST_LENGTHS and time.monotonic() > ends:
                break
            share_ends = time.monotonic() + max(0.0, ends - time.monotonic()) / left
            time_of(length)  # the first time brings weights and buffers into the caches
            times: list[float] = []
            while len(times) < _FEWEST_ROUNDS or (
                len(times) < _MOST_ROUNDS and time.monotonic() < share_ends
            ):
                times.append(time_of(length))
            # The lower quartile: what something else on the machine took must not count as a cost.
            measured[length] = max(sorted(times)[len(times) // 4], 1e-9)
        return fit_curve(list(measured), list(measured.values()), quadratic=quadratic)


def installed_versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {name: version(name) for name in _PACKAGES}


def machine_name(device: str, backend: str, directories: Sequence[os.PathLike[str]]) -> str:
    """Names what the numbers of a profile belong to: processor, attention backend, directories of the disk tier."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        model = os.uname().machine
    cores = len(os.sched_getaffinity(0))
    where = ", ".join(sorted(os.fspath(path) for path in directories)) or "no disk tier"
    return f"{model}, {cores} cores, {device}, {backend}; {where}"


def _read(
    tiers: TieredStore, readers: ThreadPoolExecutor, buffers: Sequence[np.ndarray], length: int
) -> float:
    """Seconds of one layer of ``length`` tokens, when several are read one after the other."""
    count = length // CHUNK_TOKENS
    layout = tiers.layout
    size = count * layout.chunk_layer_bytes[0]
    with tiers.lease([_key(layout, index) for index in range(count)]) as lease:
        began = time.monotonic()
        reads = [
            readers.submit(tiers.read_layer, lease, layer, buffer[:size])
            for layer, buffer in enumerate(buffers)
        ]
        for read in reads:
            read.result()
        return (time.monotonic() - began) / len(buffers)


def _empty_tiers(layout: StateLayout, slots: int, disk: DiskStore | None) -> TieredStore:
    arena = np.zeros((slots, layout.chunk_bytes), np.uint8)
    host = HostTier(arena, layout, Counters(), keep_dirty=False)
    return TieredStore(host, disk, Counters(), write_policy=WritePolicy.WRITE_BACK, run_chunks=1)


def _key(layout: StateLayout, index: int) -> bytes:
    """Of no real chunk: those are digests."""
    return b"profile" + layout.methods[0].encode().ljust(9) + index.to_bytes(16, "little")


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
