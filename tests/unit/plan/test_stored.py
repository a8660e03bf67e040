"""How good the mix that is planned for 4,096 tokens is at other lengths (``docs/planner.md`` has the numbers)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.costs import Hardware
from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.plan.planner import Split, fastest_restore
from sglang_hcache.plan.profile import ComputeCurves, Profile, TierCurves, analytic_profile
from sglang_hcache.plan.shapes import NAMED_SHAPES
from sglang_hcache.plan.stored import best_stored

LENGTHS = (512, 2048, 8192, 32768)
BLOCK = 4096
SHAPE = NAMED_SHAPES["llama2-7b"]
"""Of a model with multi-head attention: with grouped queries K and V are the smaller and nothing is to be chosen."""

# TFLOP/s, seconds that each layer's computation takes besides
CPUS = ((0.15, 5e-4), (0.5, 5e-4), (2, 3e-4))
GPUS = ((40, 1e-4), (120, 1e-4), (250, 5e-5), (500, 5e-5))
# GB/s, seconds that each layer's read takes besides
SLOW = ((0.001, 8e-3), (0.016, 8e-3), (0.064, 8e-3), (0.15, 8e-3), (0.12, 2e-3), (0.5, 3e-4), (1.2, 1e-3))
FAST = ((2, 1e-4), (3.5, 1e-4), (7, 1e-4))
FASTEST = ((14, 1e-4), (26, 1e-4))


def profiles() -> Iterator[Profile]:
    for device, disk in product(GPUS, SLOW + FAST + FASTEST):
        yield made(device, disk, math.inf, 2.0, 0.0)
    for device, disk, contention in product(CPUS, SLOW + FAST, (0.0, 0.7)):
        yield made(device, disk, 4e9, 4.0, contention)


def made(
    device: tuple[float, float], disk: tuple[float, float], writes: float, attention: float, contention: float
) -> Profile:
    counted = analytic_profile(SHAPE, Hardware(flops=device[0] * 1e12, io_bytes_per_s=disk[0] * 1e9))
    compute, tier = counted.compute, counted.tiers["disk"]

    def with_writing(curve: CostCurve, fixed_s: float, squared: float = 1.0) -> CostCurve:
        return replace(
            curve,
            fixed_s=fixed_s,
            per_token_s=curve.per_token_s + SHAPE.kv_row_bytes / writes,
            per_token_squared_s=squared * curve.per_token_squared_s,
        )

    return replace(
        counted,
        compute=ComputeCurves(
            hidden=with_writing(compute.hidden, device[1]),
            kv=with_writing(compute.kv, device[1] / 3),
            recompute=with_writing(compute.recompute, 2 * device[1], attention),
        ),
        tiers={
            "disk": TierCurves(
                hidden=replace(tier.hidden, fixed_s=disk[1]),
                kv=replace(tier.kv, fixed_s=disk[1]),
                contention=contention,
            )
        },
    )


def seconds(profile: Profile, stored: Sequence[Method], num_tokens: int) -> float:
    """As the gate does it: restored in blocks, or recomputed."""
    costs, layers = profile.costs({"disk": num_tokens}), len(stored)
    blocks = -(-num_tokens // BLOCK)
    restore = fastest_restore(
        stored, costs, num_blocks=blocks, max_recompute=layers - 1, least_gain=1.1
    ).total_s
    return min(restore, layers * costs.compute_recompute_s)


def worst_loss(profile: Profile) -> float:
    """Over all lengths, by which share what ``auto`` stores comes back later than what is best for the length."""
    layers = SHAPE.num_layers
    mixes = [Split(0, layers - kv, kv).methods() for kv in range(layers + 1)]
    planned = best_stored(profile)
    return max(
        seconds(profile, planned, length) / min(seconds(profile, mix, length) for mix in mixes) - 1
        for length in LENGTHS
    )


def test_one_mix_does_for_all_lengths() -> None:
    losses = np.array([worst_loss(profile) for profile in profiles()])
    print(
        f"{len(losses)} profiles: median {np.median(losses):.1%}, 95 % below {np.quantile(losses, 0.95):.1%}, "
        f"at most {losses.max():.1%}, over 10 %: {np.count_nonzero(losses > 0.1)}"
    )
    assert losses.max() < 0.15
    assert np.quantile(losses, 0.95) < 0.1
