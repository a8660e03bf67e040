"""How a prefix comes back, and whether it does: what is predicted to be faster, restoring or recomputing.

Predictions come from a profile and follow what restores and prefills really take.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sglang_hcache.core.layout import CHUNK_TOKENS, Method
from sglang_hcache.plan.costs import LayerCosts
from sglang_hcache.plan.planner import RestoreTimes, fastest_restore
from sglang_hcache.plan.profile import Profile
from sglang_hcache.plan.timeline import spread_order
from sglang_hcache.restore.decision import COMPUTE, FIRST, OVERHEAD_S, Decision
from sglang_hcache.restore.drift import WEIGHT, Drift, Tries, bounded
from sglang_hcache.tier.tiered import DISK

_SHORT_S = 0.004
"""What a restore took says something of how fast tier and device are, and something of the delay that every restore
has. A restore whose work takes this long, as predicted or in waiting for a slow disk, says as much of the one as of the
other, a shorter one more of the delay: a few milliseconds of waiting must not make tier or device look slow."""


@dataclass(frozen=True, slots=True)
class Load:
    """Factors by which computations slow down under load."""

    computing: float
    """For everything but projections, and for their fixed part: on a GPU that part is the CPU's work."""
    projecting: float


IDLE = Load(1.0, 1.0)
LOADED = Load(2.0, 2.0)
"""While requests run: the device does both in turns."""

_RECOMPUTING_GAINS = 1.1
"""Layers are recomputed only if that makes the restore more than this many times as fast: other requests wait for the
device meanwhile, predictions are off by as much, and on a CPU the other layers' projections get less of the cores."""

_FORGOTTEN = 0.05
"""How much of an observation it is that no layer was recomputed for fear of what that takes."""

_PREFILL = "prefill"
"""First layers are a pass, too, but beside reads and products: by what they are slower is a factor of its own, or
whole prefills would look as slow, and restores as if they paid."""


class RestoreGate:
    """Decides, and learns from what came of it. Used on one thread.

    A tier that was not measured is taken to be as fast as one that was, until a first restore from it says more.

    Args:
        profile: costs of one layer.
        stored: what each layer stores.
        block_tokens: most tokens that are read at a time.
        may_recompute: whether the first layers may be recomputed.
        pass_tokens: most tokens of a pass; infinite where prompts are not cut, or nobody says.
    """

    def __init__(
        self,
        profile: Profile,
        stored: Sequence[Method],
        block_tokens: int,
        *,
        may_recompute: bool = True,
        pass_tokens: float = math.inf,
    ) -> None:
        self.profile = profile
        self._stored = tuple(stored)
        self._block_tokens = block_tokens
        self._pass_tokens = pass_tokens
        # Not all of them: that is no restore, but what happens without one.
        self._max_recompute = len(stored) - 1 if may_recompute else 0
        self._drift = Drift([*profile.tiers, COMPUTE, FIRST, _PREFILL])
        self._tries = Tries()
        self._mixed_tries = set[str]()
        """Tiers whose next one may recompute layers. One may be lost because it does, or because it does not."""
        self._delay_s = 0.0
        self._unknown: set[str] = set()

    def decide(
        self,
        tokens: Mapping[str, int],
        start: int,
        load: Load = IDLE,
        *,
        is_try: bool = False,
        without_s: float = math.inf,
    ) -> Decision:
        """The fastest restore of ``tokens`` (tier -> count, multiples of 64) from position ``start`` on.

        Args:
            is_try: as if all were at least as fast as when it was measured. After a lost one the next try recomputes
                layers if that one could not, or the other way round.
            without_s: what doing without it takes, if that is less than computing all.

        Raises:
            ValueError: there are none.
        """
        parts = {tier: count for tier, count in tokens.items() if count}
        for tier in parts.keys() - self.profile.tiers.keys():
            self._assume(tier)
        count = sum(parts.values())
        factors = self._factors(is_try=is_try)
        costs = self._costs(parts, start, factors)
        loaded = self._loaded(costs, factors, load)
        recompute_s = min(self.prefill_s(count, start), without_s)
        tier = DISK if DISK in parts else next(iter(parts))
        unknown = self._unknown & parts.keys()
        slowest = self._slowest(parts, factors)
        most = self._most_for_try(tier, parts, start, recompute_s) if is_try else self._max_recompute
        times = self._fastest(self._stored, loaded, count, most)
        projected = self._stored[times.num_recompute :]
        others = self._fastest(projected, loaded, count, 0) if times.num_recompute else times
        order = spread_order((Method.RECOMPUTE,) * times.num_recompute + projected, costs)
        work_s = {
            FIRST: times.num_recompute * costs.compute_recompute_s,
            COMPUTE: projected.count(Method.HIDDEN) * costs.compute_hidden_s
            + projected.count(Method.KV) * costs.compute_kv_s,
        }
        return Decision(
            num_recompute=times.num_recompute,
            work_s=times.total_s,
            delay_s=self._delay_s,
            recompute_s=recompute_s,
            first_layers_s=work_s[FIRST],
            others_s=others.total_s,
            io_s=times.io_s,
            tier=tier,
            bottleneck=slowest
            if unknown or times.io_s >= times.compute_s
            else max(work_s, key=work_s.__getitem__),
            others_bottleneck=slowest if unknown or others.io_s >= others.compute_s else COMPUTE,
            layers=tuple(layer for layer in order if layer >= times.num_recompute),
            avoids_first_layers=not times.num_recompute
            and self._would_recompute(loaded, factors, count, most),
            drift=factors,
            is_try=is_try,
        )

    def prefill_s(self, num_tokens: int, start: int) -> float:
        """What it takes to compute ``num_tokens`` tokens from position ``start`` on.

        Each pass that they fill costs what a pass costs. The rest of them costs only what it adds to a pass that runs
        anyway.
        """
        passes = num_tokens // self._pass_tokens
        return self._pass_s(num_tokens, start) + (passes - 1) * len(self._stored) * self._fixed_s

    def pays_from(self, tier: str, longest: int) -> int | None:
        """From how many tokens in ``tier`` on histories are restored, on an idle server; None: none of up to
        ``longest`` is.

        Fixed costs count less the longer a history is, so there is one such length. Only where the mix changes, at
        the start of another block or for a gain of 10 %, a few lengths beyond it may be recomputed again.
        """
        chunks = range(1, longest // CHUNK_TOKENS + 1)
        place = bisect_left(
            chunks, True, key=lambda count: self.decide({tier: CHUNK_TOKENS * count}, 0).pays()
        )
        return CHUNK_TOKENS * chunks[place] if place < len(chunks) else None

    def is_due(self, decision: Decision) -> bool:
        """Whether to try a restore that would not pay: else nothing would correct estimates that are too high. Asked
        once for each that is not started otherwise, or of which only a part is.
        """
        return not decision.pays() and self._tries.is_due(decision.tier)

    def begins(self, decision: Decision) -> None:
        """It starts."""
        if decision.is_try:
            self._tries.begun(decision.tier)

    def restored(
        self,
        decision: Decision,
        seconds: float,
        first_layers_s: float | None = None,
        *,
        others_s: float | None = None,
        waited_s: float = 0.0,
        is_complete: bool = True,
    ) -> None:
        """A restore of which ``decision`` was made took ``seconds``, from the first read to the last layer.

        Args:
            first_layers_s: what recomputing its first layers took; None: there were none, or it was stopped before.
            others_s: what the other layers took; None: all of ``seconds``, or they were stopped.
            waited_s: part of that in which they waited for reads.
            is_complete: False: it was stopped then, and would have taken longer.
        """
        is_won = is_complete and seconds + OVERHEAD_S < decision.recompute_s
        self._tries.ended(decision.tier, was_tried=decision.is_try, is_won=is_won)
        if decision.is_try and not is_won:
            change = self._mixed_tries.discard if decision.num_recompute else self._mixed_tries.add
            change(decision.tier)
        if first_layers_s is not None:
            self._drift.learn(FIRST, decision.drift[FIRST] * first_layers_s / decision.first_layers_s)
        elif decision.avoids_first_layers:
            # That they were slow once is less and less certain, and nothing else would show that they are not.
            self._drift.learn(FIRST, 1.0, _FORGOTTEN)
        elif decision.num_recompute and (others_s is not None or decision.bottleneck == FIRST):
            # What was stopped are the first layers: they would have taken longer.
            seen = decision.drift[FIRST] * seconds / decision.job_s
            self._drift.learn(FIRST, max(seen, self._drift.factors[FIRST]))
            if others_s is None:
                return
        self._learn_others(
            decision,
            seconds if others_s is None else others_s,
            most_s=max(decision.job_s, first_layers_s or 0.0),
            waited_s=waited_s,
            is_complete=is_complete or others_s is not None,
        )

    def _learn_others(
        self, decision: Decision, seconds: float, most_s: float, waited_s: float, *, is_complete: bool
    ) -> None:
        """The layers that were not recomputed took ``seconds``.

        Args:
            most_s: for so long the first layers may have held them up. If they took less than that and more than they
                take alone, that is no surprise.
        """
        name, work_s = decision.others_bottleneck, decision.others_s
        least_s = work_s + decision.delay_s
        if 0 < decision.io_s < waited_s and waited_s > seconds / 2:
            # A disk has become slow. Blamed on the work, or on memory, restores from memory would stop as well.
            if name == COMPUTE:
                least_s = most_s = decision.io_s
            name = decision.tier
            work_s = max(work_s, waited_s)
        predicted_s = min(max(seconds, least_s), most_s)
        surprise = seconds / predicted_s
        seen = decision.drift[name] * surprise
        if not is_complete and seen <= self._drift.factors[name]:
            return  # that they would have taken longer was known
        if name in self._unknown:
            self._unknown.remove(name)
            self._drift.factors[name] *= max(1.0, seconds / decision.io_s)
            return
        of_speed = work_s / (work_s + _SHORT_S)
        self._drift.learn(name, seen, of_speed)
        of_delay_s = (1 - of_speed) * (bounded(surprise) - 1) * predicted_s
        delay_s = max(0.0, decision.delay_s + of_delay_s)
        self._delay_s += WEIGHT * (1 - of_speed) * (delay_s - self._delay_s)

    def prefilled(self, num_tokens: int, start: int, seconds: float) -> None:
        """The model computed ``num_tokens`` tokens from position ``start`` on in ``seconds``.

        Of fewer than were measured nothing is learnt: what those take is not what a token costs.
        """
        measured = self.profile.token_range
        if measured is not None and num_tokens < measured[0]:
            return
        surprise = seconds / self._pass_s(num_tokens, start)
        self._drift.learn(_PREFILL, self._drift.factors[_PREFILL] * surprise)

    def _pass_s(self, num_tokens: int, start: int) -> float:
        layer_s = self.profile.compute.recompute.seconds(num_tokens, start)
        return len(self._stored) * self._drift.factors[_PREFILL] * layer_s

    @property
    def _fixed_s(self) -> float:
        """Fixed seconds per layer of each pass."""
        return self._drift.factors[_PREFILL] * self.profile.compute.recompute.fixed_s

    def _assume(self, tier: str) -> None:
        tiers = self.profile.tiers
        self.profile = replace(self.profile, tiers={**tiers, tier: next(iter(tiers.values()))})
        self._drift.factors[tier] = 1.0
        self._unknown.add(tier)

    def _slowest(self, parts: Mapping[str, int], factors: Mapping[str, float]) -> str:
        """The tier whose reads take longest, of those that were not measured if there are some."""
        tiers = self.profile.tiers
        return max(
            self._unknown & parts.keys() or parts,
            key=lambda tier: factors[tier] * tiers[tier].kv.seconds(parts[tier]),
        )

    def _fastest(
        self, stored: Sequence[Method], costs: LayerCosts, count: int, max_recompute: int
    ) -> RestoreTimes:
        return fastest_restore(
            stored,
            costs,
            num_blocks=-(-count // self._block_tokens),
            max_recompute=max_recompute,
            least_gain=_RECOMPUTING_GAINS,
        )

    def _would_recompute(
        self, costs: LayerCosts, factors: Mapping[str, float], count: int, max_recompute: int
    ) -> bool:
        """Whether layers would be recomputed if that took no longer than whole passes."""
        if factors[FIRST] <= 1:
            return False
        costs = replace(costs, compute_recompute_s=costs.compute_recompute_s / factors[FIRST])
        return self._fastest(self._stored, costs, count, max_recompute).num_recompute > 0

    def _most_for_try(self, tier: str, parts: Mapping[str, int], start: int, recompute_s: float) -> int:
        """How many first layers a try may recompute: a pass through them cannot be stopped."""
        if tier not in self._mixed_tries:
            return 0
        layer_s = self._costs(parts, start, self._drift.factors).compute_recompute_s
        return min(self._max_recompute, int(recompute_s / layer_s))

    def _factors(self, *, is_try: bool) -> dict[str, float]:
        """By which the costs are multiplied: for a try those of restores count as at most what was measured."""
        factors = dict(self._drift.factors)
        if is_try:
            factors |= {name: min(1.0, factor) for name, factor in factors.items() if name != _PREFILL}
        return factors

    def _loaded(self, costs: LayerCosts, factors: Mapping[str, float], load: Load) -> LayerCosts:
        fixed_s = factors[COMPUTE] * self.profile.compute.hidden.fixed_s
        projecting_s = load.computing * fixed_s + load.projecting * (costs.compute_hidden_s - fixed_s)
        return replace(costs.scaled(compute=load.computing), compute_hidden_s=projecting_s)

    def _costs(self, parts: Mapping[str, int], start: int, factors: Mapping[str, float]) -> LayerCosts:
        costs = self.profile.costs(parts, start, factors)
        more_passes = (sum(parts.values()) - 1) // self._pass_tokens
        pass_s = factors[_PREFILL] * costs.compute_recompute_s + more_passes * self._fixed_s
        return replace(
            costs,
            compute_hidden_s=factors[COMPUTE] * costs.compute_hidden_s,
            compute_kv_s=factors[COMPUTE] * costs.compute_kv_s,
            compute_recompute_s=factors[FIRST] * pass_s,
        )
