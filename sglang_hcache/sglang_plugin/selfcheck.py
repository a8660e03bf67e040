"""Before serving: is what a restore writes into the KV pool what the model itself wrote there?"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_hcache.core.errors import SelfCheckError
from sglang_hcache.core.layout import Method
from sglang_hcache.device.projector import KVPool
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.sglang_plugin.model import ServedModel
from sglang_hcache.sglang_plugin.protocols import ForwardModel

_TOKENS = 96
_ULPS = 8  # rounding that a different shape of the same matrix product may cause
_FLOAT32_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """Largest difference of K or V in any layer, relative to the layer's largest value, and what is allowed."""

    error: float
    layer: int
    method: Method
    tolerance: float


def run(
    model: ServedModel,
    restorer: LayerRestorer,
    pool: KVPool,
    forward: ForwardModel,
    methods: Sequence[Method],
) -> SelfCheckResult:
    """Run a short prompt, restore it by each of ``methods`` into other slots, and compare both in the KV pool.

    Raises:
        SelfCheckError: the difference is over the tolerance, or not a number.
    """
    layers = range(len(model.attention))
    tokens = random.Random(0).choices(range(model.vocabulary), k=_TOKENS)
    hidden: dict[int, torch.Tensor] = {}
    handles = model.watch(layers, lambda layer, rows: hidden.__setitem__(layer, rows[:_TOKENS].clone()))
    try:
        slots = forward.forward(tokens)
    finally:
        for handle in handles:
            handle.remove()
    others = forward.allocate(_TOKENS)
    try:
        errors = {
            (method, layer): _error(restorer, pool, layer, method, rows, slots, others[:_TOKENS])
            for method in methods
            for layer, rows in _stored(pool, method, layers, hidden, slots)
        }
    finally:
        forward.release(slots)
        forward.release(others)
    method, layer = max(errors, key=lambda place: _as_rank(errors[place]))
    result = SelfCheckResult(errors[method, layer], layer, method, tolerance(model.dtype))
    if len(errors) != len(methods) * len(layers) or not result.error <= result.tolerance:
        raise SelfCheckError(
            f"--hierarchical-cache hcache refuses to serve {model.architecture}: K or V restored with the method "
            f"{method} differ from the model's own by {result.error:.3g} of the largest value in layer {layer} "
            f"(allowed: {result.tolerance:.3g}). Serve without --hierarchical-cache and report this line."
        )
    return result


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference that rounding explains."""
    return _FLOAT32_TOLERANCE if dtype is torch.float32 else _ULPS * torch.finfo(dtype).eps


def _as_rank(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _stored(
    pool: KVPool,
    method: Method,
    layers: Iterable[int],
    hidden: Mapping[int, torch.Tensor],
    slots: torch.Tensor,
) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows that capture would store of each layer; none where the model did not show its hidden states."""
    for layer in layers:
        if method is Method.KV:
            yield layer, torch.cat([part.flatten(1) for part in pool.read(layer, slots)], dim=1)
        elif layer in hidden:
            yield layer, hidden[layer]


@torch.inference_mode()
def _error(
    restorer: LayerRestorer,
    pool: KVPool,
    layer: int,
    method: Method,
    rows: torch.Tensor,
    slots: torch.Tensor,
    others: torch.Tensor,
) -> float:
    nothing = torch.full_like(pool.read(layer, others)[0], torch.nan)
    pool.write(layer, others, nothing, nothing)
    restorer.restore(layer, method, rows, torch.arange(len(slots), device=rows.device), others)
    worst = 0.0
    for mine, true in zip(pool.read(layer, others), pool.read(layer, slots), strict=True):
        scale = true.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        error = float((mine.float() - true.float()).abs().max() / scale)
        worst = error if error != error else max(worst, error)  # a NaN must not be swallowed by max()
    return worst
