"""Mean and percentiles of a list of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STATISTICS = ("mean", "p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds; all None where nothing was measured."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Latency:
        if not times_s:
            return cls(None, None, None, None)
        p50, p95, p99 = (float(value) for value in np.percentile(times_s, (50, 95, 99)))
        return cls(float(np.mean(times_s)), p50, p95, p99)

    def fields(self, what: str) -> dict[str, float | None]:
        """``{"<what>_mean_s": ...}`` and so on, for a row of the results."""
        return {f"{what}_{name}_s": getattr(self, name) for name in STATISTICS}
