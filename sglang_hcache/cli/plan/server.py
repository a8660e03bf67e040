"""What a server does by a profile's numbers, for ``hcache plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.planner import Split
from sglang_hcache.plan.profile import Profile
from sglang_hcache.plan.stored import PLANNED_TOKENS, best_stored, planned_tier
from sglang_hcache.restore.decision import Decision
from sglang_hcache.restore.gate import RestoreGate

_BLOCK_TOKENS = 4096
"""Most tokens that the server reads at a time, where its host memory is not very small."""
LONGEST = 2**20
"""Tokens: the longest history that is looked at for whether restoring pays."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server with ``--hcache-method auto``, idle, that has learned nothing yet and has an empty disk tier."""

    profile: Profile
    tier: str
    """The tier that the stored mix is best for."""
    stored: tuple[Method, ...]
    """What each layer stores."""

    @classmethod
    def of(cls, profile: Profile) -> ServerPlan:
        """What the server would store by ``profile``."""
        return cls(profile, planned_tier(profile), best_stored(profile))

    @property
    def split(self) -> Split:
        return Split.of(self.stored)

    def restore(self, tier: str, num_tokens: int) -> Decision:
        """How ``num_tokens`` tokens that are all in ``tier`` would come back."""
        return self._gate().decide({tier: num_tokens}, 0)

    def pays_from(self, tier: str) -> int | None:
        """As :meth:`RestoreGate.pays_from`, of up to :data:`LONGEST` tokens."""
        return self._gate().pays_from(tier, LONGEST)

    def _gate(self) -> RestoreGate:
        return RestoreGate(self.profile, self.stored, _BLOCK_TOKENS)

    def data(self) -> dict[str, Any]:
        """For programs: what is stored, and for which case it is best."""
        return {
            "stored": {"hidden": self.split.hidden, "kv": self.split.kv},
            "planned_tokens": PLANNED_TOKENS,
            "planned_tier": self.tier,
        }


def decision_data(decision: Decision) -> Mapping[str, Any]:
    """For programs. Times in milliseconds."""
    return {
        "restores": decision.pays(),
        "recomputed_layers": decision.num_recompute,
        "restore_ms": 1e3 * decision.restore_s,
        "recompute_ms": 1e3 * decision.recompute_s,
    }
