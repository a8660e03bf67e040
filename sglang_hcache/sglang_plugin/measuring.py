"""What recomputing and restoring cost on this machine with this model: measured once, before serving."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch

from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.plan.curves import CostCurve, fit_curve
from sglang_hcache.restore.gate import MeasuredCosts
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.sglang_plugin.model import ServedModel
from sglang_hcache.sglang_plugin.protocols import ForwardModel
from sglang_hcache.tier.tiered import DISK, HOST, TieredStore

logger = logging.getLogger(__name__)

_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FEWEST_LENGTHS = 3
_ROUNDS = 3
_BUDGET_S = 2.0
"""For each of the things measured: no longer length is tried once this is spent."""

_DISK_LATENCY_S = 2e-4
"""Of one read of a layer, beside its bytes: handed over, begun, verified."""


def measure(
    model: ServedModel,
    restorer: LayerRestorer,
    tiers: TieredStore,
    forward: ForwardModel,
    longest: int,
) -> MeasuredCosts:
    """Time forward passes, layers and reads of a few lengths, and fit curves.

    Args:
        longest: most tokens that a pass may have, and that the KV pool may lend twice.

    Raises:
        ValueError: the pool is too small to measure anything.
    """
    lengths = [length for length in _LENGTHS if length <= longest]
    costs = MeasuredCosts(
        read=_reads(tiers, lengths),
        restore=_fit(lengths, lambda length: _restore_one(model, restorer, forward, length)),
        recompute=_fit(lengths, lambda length: _recompute_one(model, forward, length), quadratic=True),
    )
    logger.info(
        "hcache: 1,024 tokens: recomputing %.1f ms; restoring reads %s and computes %.1f ms",
        1e3 * costs.recompute.seconds(1024),
        ", ".join(
            f"{1e3 * restorer.layout.num_layers * curve.seconds(1024):.1f} ms from {tier}"
            for tier, curve in costs.read.items()
        ),
        1e3 * restorer.layout.num_layers * costs.restore.seconds(1024),
    )
    return costs


def _recompute_one(model: ServedModel, forward: ForwardModel, length: int) -> float:
    vocabulary = int(model.module.config.vocab_size)  # type: ignore[union-attr, arg-type]
    tokens = random.Random(length).choices(range(vocabulary), k=length)
    began = time.monotonic()
    slots = forward.forward(tokens)
    seconds = time.monotonic() - began
    forward.release(slots)
    return seconds


@torch.inference_mode()
def _restore_one(model: ServedModel, restorer: LayerRestorer, forward: ForwardModel, length: int) -> float:
    row_bytes = restorer.layout.row_bytes[0]
    rows = torch.zeros(length, row_bytes // model.dtype.itemsize, dtype=model.dtype)
    slots = forward.allocate(length)
    began = time.monotonic()
    restorer.restore(0, rows, torch.arange(length), slots[:length])
    seconds = time.monotonic() - began
    forward.release(slots)
    return seconds


def _reads(tiers: TieredStore, lengths: list[int]) -> dict[str, CostCurve]:
    """Reading one layer, by tier; the disk only if its store could measure it."""
    size = tiers.layout.chunk_layer_bytes[0]
    most = min(lengths[-1] // CHUNK_TOKENS, tiers.host.num_slots)
    out = np.empty((max(most, 1), size), np.uint8)

    def read_host(length: int) -> float:
        slots = list(range(min(length // CHUNK_TOKENS, most)))
        began = time.monotonic()
        tiers.host.read_layer(slots, 0, out[: len(slots)])
        return (time.monotonic() - began) * (length // CHUNK_TOKENS) / len(slots)

    curves = {HOST: _fit(lengths, read_host)}
    rate = tiers.disk.read_bytes_per_s if tiers.disk is not None else None
    if rate:
        row_bytes = tiers.layout.row_bytes[0]
        curves[DISK] = CostCurve(fixed_s=_DISK_LATENCY_S, per_token_s=row_bytes / rate)
    return curves


def _fit(lengths: Iterable[int], time_of: Callable[[int], float], *, quadratic: bool = False) -> CostCurve:
    """The curve through the best times of a few lengths, as many as the budget allows."""
    measured: dict[int, float] = {}
    began = time.monotonic()
    for length in lengths:
        if len(measured) >= _FEWEST_LENGTHS and time.monotonic() - began > _BUDGET_S:
            break
        measured[length] = max(min(time_of(length) for _ in range(_ROUNDS)), 1e-9)
    return fit_curve(list(measured), list(measured.values()), quadratic=quadratic)
