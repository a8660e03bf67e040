"""Layers of a shape with random weights, and what they should leave in the KV pool, by torch's operations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gpu.shapes import Shape
from sglang_hcache.device.key_steps import KeyNorm, KeySteps, Rotation

MOST_ULPS = 4
"""K may differ so many units in the last place of its largest value: products rounded in another order."""
WRONG = 1e9
"""Units in the last place, where there is no counting: JSON has no infinity."""
Pools = tuple[torch.Tensor, torch.Tensor]


@dataclass
class RandomLayers:
    """Some layers of a shape: an ``UnfinishedProjector`` without a model."""

    shape: Shape
    weights: list[torch.Tensor]
    """Each (2 * width, hidden_size)."""
    steps: KeySteps

    @classmethod
    def of(
        cls, shape: Shape, count: int, positions: int, dtype: torch.dtype, device: torch.device
    ) -> RandomLayers:
        draw = torch.Generator(device).manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=draw, device=device)

        weights = [
            (random(2 * shape.width, shape.hidden_size) / shape.hidden_size**0.5).to(dtype)
            for _ in range(count)
        ]
        norm = KeyNorm((random(shape.head_dim) / 4 + 1).to(dtype), 1e-6, False) if shape.norms_heads else None
        rotation = None
        if shape.rotates:
            steps = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
            angles = torch.outer(torch.arange(positions, device=device).float(), 10000.0**-steps)
            rotation = Rotation(torch.cat([angles.cos(), angles.sin()], dim=-1), True, rounds_products=False)
        return cls(shape, weights, KeySteps(norm, rotation))

    def key_steps(self, layer: int, dtype: torch.dtype, *, with_norm: bool) -> KeySteps:
        assert with_norm
        return self.steps

    def project_unrotated(
        self, layer: int, hidden: torch.Tensor, out: torch.Tensor | None = None, *, leave_norm: bool = False
    ) -> Pools:
        both = torch.mm(hidden, self.weights[layer].t(), out=out)
        key, value = both.chunk(2, dim=-1)
        return key, value

    def project(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> Pools:
        """The whole, by torch's operations."""
        key, value = self.project_unrotated(layer, hidden)
        shape = (-1, self.shape.kv_heads, self.shape.head_dim)
        return finished(key.reshape(shape), self.steps, positions), value.reshape(shape)


def finished(key: torch.Tensor, steps: KeySteps, positions: torch.Tensor) -> torch.Tensor:
    """K (n, heads, head_dim) as SGLang's CUDA kernels leave it: float32 inside of a step, rounded behind it."""
    dtype = key.dtype
    if steps.norm is not None:
        rows = key.float()
        rows = rows * torch.rsqrt(rows.pow(2).mean(dim=-1, keepdim=True) + steps.norm.epsilon)
        key = (rows * steps.norm.weight).to(dtype)
    if steps.rotation is None:
        return key
    cosines, sines = steps.rotation.table[positions].unsqueeze(1).chunk(2, dim=-1)
    rows = key.float()
    if steps.rotation.pairs_halves:
        low, high = rows.chunk(2, dim=-1)
        return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1).to(dtype)
    low, high = rows[..., ::2], rows[..., 1::2]
    return torch.stack((low * cosines - high * sines, high * cosines + low * sines), -1).flatten(-2).to(dtype)


def error_ulps(mine: torch.Tensor, true: torch.Tensor) -> float:
    """Largest difference in units in the last place of the largest value; ``WRONG`` if one is not a number."""
    difference = (mine.float() - true.float()).abs().max() / true.float().abs().max()
    ulps = float(difference / torch.finfo(true.dtype).eps)
    return min(ulps, WRONG) if ulps == ulps else WRONG


def damaged(steps: KeySteps) -> dict[str, KeySteps]:
    """Wrong in one thing each."""
    found = {}
    if steps.norm is not None:
        found["no norm"] = replace(steps, norm=None)
    if steps.rotation is not None:
        found["no rotation"] = replace(steps, rotation=None)
        found["another style"] = replace(steps, rotation=replace(steps.rotation, pairs_halves=False))
        shifted = replace(steps.rotation, table=steps.rotation.table.roll(1, 0))
        found["next position"] = replace(steps, rotation=shifted)
    return found
