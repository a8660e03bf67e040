"""Bursts of requests, reduced to rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from serving.comparison import Measured, rows_of


def rows_of_bursts(
    count: int, methods: Sequence[str], bursts: Mapping[str, Sequence[Measured]], notes: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One row for each method: as those of other comparisons, with its rounds.

    Args:
        bursts: the rounds of each method that was measured, as many of each; requests of a round are the same.
        notes: method -> why it was not measured.
    """
    rows = rows_of({"at_once": count}, methods, bursts, notes)
    for row in rows:
        own = [_as_json(burst) for burst in bursts.get(row["method"], ())]
        row["last_s"] = statistics.median(burst["last_s"] for burst in own) if own else None
        row["rounds"] = own
    return rows


def _as_json(burst: Measured) -> dict[str, Any]:
    return {
        "ttft_mean_s": burst.ttft_mean_s,
        "last_s": burst.busy_s,
        "restored_requests": sum(answer.sources.restored > 0 for answer in burst.answers),
    }
