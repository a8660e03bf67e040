"""Before serving: is what a restore writes into the KV pool what the model itself wrote there?"""

from __future__ import annotations

import random
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
    tolerance: float


def run(model: ServedModel, restorer: LayerRestorer, pool: KVPool, forward: ForwardModel) -> SelfCheckResult:
    """Run a short prompt, restore it from what would be stored into other slots, and compare both in the KV pool.

    Raises:
        SelfCheckError: the difference is over the tolerance, or not a number.
    """
    vocabulary = model.module.config.vocab_size  # type: ignore[union-attr]
    tokens = random.Random(0).choices(range(int(vocabulary)), k=_TOKENS)
    hidden: dict[int, torch.Tensor] = {}
    handles = model.watch(lambda layer, rows: hidden.__setitem__(layer, rows[:_TOKENS].clone()))
    try:
        slots = forward.forward(tokens)
    finally:
        for handle in handles:
            handle.remove()
    others = forward.allocate(_TOKENS)
    try:
        errors = [
            _error(restorer, pool, layer, _stored(model, pool, layer, hidden, slots), slots, others[:_TOKENS])
            for layer in sorted(hidden)
        ]
    finally:
        forward.release(slots)
        forward.release(others)
    layer = max(range(len(errors)), key=errors.__getitem__)
    result = SelfCheckResult(errors[layer], layer, tolerance(model.dtype))
    if len(errors) != len(model.attention) or not result.error <= result.tolerance:
        raise SelfCheckError(
            f"--hierarchical-cache hcache refuses to serve {model.architecture}: K or V restored with the method "
            f"{model.method} differ from the model's own by {result.error:.3g} of the largest value in layer {layer} "
            f"(allowed: {result.tolerance:.3g}). Serve without --hierarchical-cache and report this line."
        )
    return result


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference that rounding explains."""
    return _FLOAT32_TOLERANCE if dtype is torch.float32 else _ULPS * torch.finfo(dtype).eps


def _stored(
    model: ServedModel, pool: KVPool, layer: int, hidden: dict[int, torch.Tensor], slots: torch.Tensor
) -> torch.Tensor:
    """The rows that capture would store of ``layer``."""
    if model.layout.methods[layer] is Method.HIDDEN:
        return hidden[layer]
    return torch.cat([part.flatten(1) for part in pool.read(layer, slots)], dim=1)


@torch.inference_mode()
def _error(
    restorer: LayerRestorer,
    pool: KVPool,
    layer: int,
    rows: torch.Tensor,
    slots: torch.Tensor,
    others: torch.Tensor,
) -> float:
    nothing = torch.full_like(pool.read(layer, others)[0], torch.nan)
    pool.write(layer, others, nothing, nothing)
    restorer.restore(layer, rows, torch.arange(len(slots), device=rows.device), others)
    worst = 0.0
    for mine, true in zip(pool.read(layer, others), pool.read(layer, slots), strict=True):
        scale = true.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        error = float((mine.float() - true.float()).abs().max() / scale)
        worst = error if error != error else max(worst, error)  # a NaN must not be swallowed by max()
    return worst
