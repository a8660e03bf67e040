"""Profiles of which a test chooses the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.plan.profile import ComputeCurves, Profile, ProfileSource, TierCurves
from sglang_hcache.plan.shapes import ModelShape


def per_token(seconds: float, fixed: float = 0.0) -> CostCurve:
    return CostCurve(per_token_s=seconds, fixed_s=fixed)


def reads(hidden: float, kv: float, fixed: float = 0.0, contention: float = 0.0) -> TierCurves:
    """Seconds a token, and of each read."""
    return TierCurves(hidden=per_token(hidden, fixed), kv=per_token(kv, fixed), contention=contention)


def made_profile(
    model: ModelShape,
    tiers: Mapping[str, TierCurves],
    *,
    project: float | CostCurve,
    run: float | CostCurve,
    write: float | CostCurve = 0.0,
    machine: str = "made up",
    **more: Any,
) -> Profile:
    """One layer's costs: projecting, running all of it, and writing K and V, as curves or in seconds a token."""
    hidden, recompute, kv = (
        cost if isinstance(cost, CostCurve) else per_token(cost) for cost in (project, run, write)
    )
    return Profile(
        source=ProfileSource.MEASURED,
        model=model,
        machine=machine,
        tiers=tiers,
        compute=ComputeCurves(hidden=hidden, kv=kv, recompute=recompute),
        **more,
    )
