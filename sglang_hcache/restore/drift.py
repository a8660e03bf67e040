"""How far the costs of a profile are from what is observed, and when to look again at what is no longer tried."""

from __future__ import annotations

import math
from collections.abc import Iterable

WEIGHT = 0.2
"""Weight of the latest observation in a running estimate: drift is followed, one outlier is not."""

_MOST_SURPRISE = 2.0
"""An observation counts as at most this many times what was known, and as at least the inverse of it, unless the one
before was as far away on the same side: a disk that became 40 times slower would otherwise cost a restore for each 15 %
of it."""

_FIRST_TRY = 32
_LONGEST_WAIT = 512
"""Of so many restores that would not pay, one is tried."""

_LEAST_SEEN = 1e-6
"""So that a clock that stood still says nothing infinite."""


class Drift:
    """A factor for the cost of each tier and each kind of work, by which it is slower than in the profile."""

    def __init__(self, names: Iterable[str]) -> None:
        self.factors = dict.fromkeys(names, 1.0)
        self._last: dict[str, float] = {}

    def learn(self, name: str, seen: float, share: float = 1.0) -> None:
        """Move the factor towards ``seen``, the one that would have predicted this observation exactly.

        Restores that were predicted with the same factor all lead towards it: they do not multiply each other's
        corrections.

        Args:
            share: how much of the observation, 0 to 1, is about this cost.
        """
        known, seen = self.factors[name], max(seen, _LEAST_SEEN)
        counted = known * bounded(seen / known)
        self.factors[name] = known * (counted / known) ** (WEIGHT * share)
        if share <= 0.5:
            return
        last = self._last.get(name, known)
        if counted != seen and known * bounded(last / known) == counted:
            self.factors[name] = min(last, seen, key=lambda factor: abs(math.log(factor / known)))
        self._last[name] = seen


class Tries:
    """When a restore is tried that would not pay by what is known: else nothing would ever correct that.

    One in 32 of those from a tier, while none is restored from there. Each that was lost doubles that number; after one
    that was won the next is tried at once.
    """

    def __init__(self) -> None:
        self._wait: dict[str, int] = {}
        self._refused: dict[str, int] = {}

    def is_due(self, tier: str) -> bool:
        """A restore from ``tier`` would not pay: whether to try it nevertheless."""
        self._refused[tier] = self._refused.get(tier, 0) + 1
        return self._refused[tier] >= self._wait.get(tier, _FIRST_TRY)

    def begun(self, tier: str) -> None:
        """One is tried. The next one waits for its end, or for as many as the first did."""
        self._refused[tier] = 0
        self._wait[tier] = max(self._wait.get(tier, 0), _FIRST_TRY)

    def ended(self, tier: str, *, was_tried: bool, is_won: bool) -> None:
        """A restore was observed, which ``was_tried`` or was to pay."""
        self._refused[tier] = 0
        if was_tried:
            self._wait[tier] = 0 if is_won else min(2 * self._wait.get(tier, _FIRST_TRY), _LONGEST_WAIT)


def bounded(surprise: float) -> float:
    """``surprise``, as far as it counts."""
    return min(max(surprise, 1 / _MOST_SURPRISE), _MOST_SURPRISE)
