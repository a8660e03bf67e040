"""Whether a restore is started at all: only if it is predicted to end before recomputing would.

Predictions come from measurements at start (``MeasuredCosts``) and follow what restores really take.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.costs import LayerCosts
from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.plan.planner import make_plan

_log = logging.getLogger(__name__)

_OVERHEAD_S = 0.002
"""Between the scheduler's decision and the first read, and between the last layer and admission."""

_WEIGHT = 0.2
"""Of the latest restore in the running estimate: drift is followed, one outlier is not."""

_MOST_SURPRISE = 2.0
"""An observation counts as at most so many times, or one so-many-th, of what was predicted."""

_FORGET = 0.99
"""Each restore that is not started brings the estimate closer to the measurement again: else it never would."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Seconds as functions of tokens."""

    read: Mapping[str, CostCurve]
    """Tier -> reading one layer from it. A tier that could not be measured is missing."""
    restore: CostCurve
    """Making K and V of one layer and writing them into the pool, by the method in use."""
    recompute: CostCurve
    """The whole model over the tokens, with attention's squared term."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a restore and its alternative would take, seconds."""

    restore_s: float
    recompute_s: float
    slowest_tier: str
    """The tier whose reads decide."""


class RestoreGate:
    """Predicts, and learns from what came of it. Used on one thread."""

    def __init__(self, costs: MeasuredCosts, methods: Sequence[Method]) -> None:
        self.costs = costs
        self._methods = tuple(methods)
        self._drift = dict.fromkeys(costs.read, 1.0)

    def predict(self, tokens: Mapping[str, int], start: int) -> Prediction | None:
        """For ``tokens`` (tier -> count, multiples of 64) from position ``start`` on; None if a tier is unknown."""
        parts = {tier: count for tier, count in tokens.items() if count}
        if not parts or not parts.keys() <= self.costs.read.keys():
            return None
        reads = {tier: self.costs.read[tier].seconds(count) for tier, count in parts.items()}
        count = sum(parts.values())
        io_s, compute_s = sum(reads.values()), self.costs.restore.seconds(count)
        layer = LayerCosts(
            io_hidden_s=io_s,
            io_kv_s=io_s,
            compute_hidden_s=compute_s,
            compute_kv_s=compute_s,
            compute_recompute_s=0.0,
        )
        slowest = max(reads, key=reads.__getitem__)
        restore_s = make_plan(self._methods, layer).total_s * self._drift[slowest] + _OVERHEAD_S
        return Prediction(restore_s, self.costs.recompute.seconds(count, start), slowest)

    def pays(self, prediction: Prediction, backlog_s: float) -> bool:
        """Whether to start, if restores that take ``backlog_s`` more seconds come first."""
        pays = backlog_s + prediction.restore_s < prediction.recompute_s
        if not pays:
            tier = prediction.slowest_tier
            self._drift[tier] = 1 + (self._drift[tier] - 1) * _FORGET
        _log.debug(
            "hcache: restore %.1f ms behind %.1f ms, recompute %.1f ms: %s",
            1e3 * prediction.restore_s, 1e3 * backlog_s, 1e3 * prediction.recompute_s,
            "restore" if pays else "recompute",
        )  # fmt: skip
        return pays

    def observe(self, prediction: Prediction, seconds: float) -> None:
        """A restore of which ``prediction`` was made took ``seconds``."""
        surprise = min(max(seconds / prediction.restore_s, 1 / _MOST_SURPRISE), _MOST_SURPRISE)
        self._drift[prediction.slowest_tier] *= surprise**_WEIGHT
