"""What a server with ``--hcache-method auto`` stores by a profile."""

from __future__ import annotations

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.costs import LayerCosts
from sglang_hcache.plan.planner import plan_stored
from sglang_hcache.plan.profile import Profile

PLANNED_TOKENS = 4096
"""Length of the restores that the stored mix is best for: long enough that fixed costs do not decide."""


def planned_tier(profile: Profile) -> str:
    """The tier that the stored mix is best for: the slowest one."""
    return "disk" if "disk" in profile.tiers else next(iter(profile.tiers))


def planned_costs(profile: Profile) -> LayerCosts:
    """Costs of the restore that the stored mix is best for."""
    return profile.costs({planned_tier(profile): PLANNED_TOKENS})


def best_stored(profile: Profile) -> tuple[Method, ...]:
    """What each layer stores, where nothing is on disk yet."""
    return plan_stored(planned_costs(profile), profile.model.num_layers)
