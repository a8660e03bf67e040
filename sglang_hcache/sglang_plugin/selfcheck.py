"""Before serving: do projected hidden states equal the K and V that the model itself wrote?"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from sglang_hcache.core.errors import SelfCheckError
from sglang_hcache.device.projector import Projector
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


def run(model: ServedModel, projector: Projector, forward: ForwardModel) -> SelfCheckResult:
    """Run a short prompt, project its hidden states and compare with the KV pool.

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
    try:
        errors = [_error(projector, forward, layer, hidden[layer], slots) for layer in sorted(hidden)]
    finally:
        forward.release(slots)
    layer = max(range(len(errors)), key=errors.__getitem__)
    result = SelfCheckResult(errors[layer], layer, tolerance(model.dtype))
    if len(errors) != len(model.attention) or not result.error <= result.tolerance:
        raise SelfCheckError(
            f"--hierarchical-cache hcache refuses to serve {model.architecture}: K or V projected from hidden states "
            f"differ from the model's own by {result.error:.3g} of the largest value in layer {layer} (allowed: "
            f"{result.tolerance:.3g}). Serve without --hierarchical-cache, and report the model and this line."
        )
    return result


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference that rounding explains."""
    return _FLOAT32_TOLERANCE if dtype is torch.float32 else _ULPS * torch.finfo(dtype).eps


@torch.inference_mode()
def _error(
    projector: Projector, forward: ForwardModel, layer: int, hidden: torch.Tensor, slots: torch.Tensor
) -> float:
    positions = torch.arange(len(slots), device=hidden.device)
    projected = projector.project(layer, hidden, positions)
    worst = 0.0
    for mine, true in zip(projected, forward.read(layer, slots), strict=True):
        scale = true.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        error = float((mine.float() - true.float()).abs().max() / scale)
        worst = error if error != error else max(worst, error)  # a NaN must not be swallowed by max()
    return worst
