"""What a server with ``--hcache-method auto`` stores by a profile."""

from __future__ import annotations

from dataclasses import replace

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.costs import LayerCosts
from sglang_hcache.plan.planner import plan_stored
from sglang_hcache.plan.profile import Profile

PLANNED_TOKENS = 4096
"""Length of the restores that the stored mix is best for: long enough that fixed costs do not decide."""

_CAUTION = 1.5
"""More contention than was measured is assumed by this factor: what is stored stays, requests that run want the cores,
too, and of plans that are about equally fast the one that computes less is safer."""


def planned_tier(profile: Profile) -> str:
    """The tier that the stored mix is best for: the slowest one."""
    return "disk" if "disk" in profile.tiers else next(iter(profile.tiers))


def planned_costs(profile: Profile, tier: str | None = None) -> LayerCosts:
    """Costs of the restore that the stored mix is best for.

    Args:
        tier: where its tokens are; None: :func:`planned_tier`.
    """
    costs = profile.costs({tier or planned_tier(profile): PLANNED_TOKENS})
    return replace(costs, contention=min(1.0, _CAUTION * costs.contention))


def best_stored(profile: Profile) -> tuple[Method, ...]:
    """What each layer stores, where nothing is on disk yet."""
    return plan_stored(planned_costs(profile), profile.model.num_layers)
