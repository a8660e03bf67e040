"""How sure a median is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import comb


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95 % confidence interval: order statistics, so nothing is assumed of the values.

    Of n values, as many lie below the true median as heads fall in n tosses of a coin. With fewer than six values the
    interval is their whole range, and its confidence is less.
    """
    ordered, count = sorted(values), len(values)
    beyond, outside = (
        0,
        1,
    )  # values left out at each end, and in how many of 2**n cases the median lies in them
    while 2 * outside <= 0.05 * 2**count and beyond < (count - 1) // 2:
        beyond += 1
        outside += comb(count, beyond)
    cut = max(0, beyond - 1)
    return statistics.median(ordered), ordered[cut], ordered[count - 1 - cut]
