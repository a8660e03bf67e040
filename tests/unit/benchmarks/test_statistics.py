"""The confidence interval of a median, against the tables of order statistics and against chance."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("count", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (9, 2, 8), (20, 6, 15), (50, 18, 33)]
)
def test_ranks_are_those_of_the_binomial_table(
    bench: Callable[[str], Any], count: int, low: int, high: int
) -> None:
    values = [float(number) for number in range(count, 0, -1)]
    assert bench("common.statistics").median_with_interval(values) == (statistics.median(values), low, high)


def test_the_true_median_lies_inside_in_95_of_100_samples(bench: Callable[[str], Any]) -> None:
    median_with_interval = bench("common.statistics").median_with_interval
    numbers = random.Random(0)
    inside = 0
    for _ in range(2000):
        _, low, high = median_with_interval([numbers.expovariate(1) for _ in range(21)])
        inside += low <= 0.6931 <= high
    assert 0.95 <= inside / 2000 < 0.99  # exactly 97.3 %: the ranks are whole numbers
