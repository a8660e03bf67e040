"""Bursts of requests, reduced to rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.statistics import median_with_interval
from serving.comparison import BASELINES, Measured, rows_of
from serving.token_client import TokenAnswer


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that were sent at the same moment, and all answered."""

    answers: Sequence[TokenAnswer]
    """In the order of the prompts."""
    last_s: float
    """Until the last answer was there."""

    @property
    def ttft_mean_s(self) -> float:
        return statistics.fmean(answer.ttft_s for answer in self.answers)

    def as_json(self) -> dict[str, Any]:
        return {
            "ttft_mean_s": self.ttft_mean_s,
            "last_s": self.last_s,
            "restored_requests": sum(answer.sources.restored > 0 for answer in self.answers),
        }


def rows_of_bursts(
    count: int, methods: Sequence[str], bursts: Mapping[str, Sequence[Burst]], notes: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One row for each method: as those of other comparisons, with its rounds and their ratios.

    Args:
        bursts: the rounds of each method that was measured, as many of each; requests of a round are the same.
        notes: method -> why it was not measured.
    """
    measured = {
        method: Measured(
            [answer for burst in of_method for answer in burst.answers],
            sum(burst.last_s for burst in of_method),
        )
        for method, of_method in bursts.items()
    }
    return [
        row | _over_rounds(bursts.get(row["method"], ()), bursts)
        for row in rows_of({"at_once": count}, methods, measured, notes)
    ]


def _over_rounds(own: Sequence[Burst], bursts: Mapping[str, Sequence[Burst]]) -> dict[str, Any]:
    """``round_speedup_over_*``: the median of the rounds' ratios of mean TTFT, with its 95 % interval."""
    fields: dict[str, Any] = {"last_s": statistics.median(burst.last_s for burst in own) if own else None}
    for baseline in BASELINES:
        pairs = zip(bursts.get(baseline, ()), own, strict=False)
        ratios = [other.ttft_mean_s / burst.ttft_mean_s for other, burst in pairs]
        values = median_with_interval(ratios) if ratios else (None, None, None)
        names = ("", "_low", "_high")
        fields |= {
            f"round_speedup_over_{baseline}{name}": value for name, value in zip(names, values, strict=True)
        }
    return fields | {"rounds": [burst.as_json() for burst in own]}
