"""Which of some documents each of many requests is about."""

from __future__ import annotations

import numpy as np


def zipf_order(items: int, requests: int, *, alpha: float, seed: int) -> list[int]:
    """``requests`` draws from ``range(items)`` where rank k has weight ``k ** -alpha``; ranks are shuffled."""
    random = np.random.default_rng(seed)
    weights = np.arange(1, items + 1, dtype=np.float64) ** -alpha
    ranks = random.permutation(items)
    drawn = random.choice(items, size=requests, p=weights / weights.sum())
    return [int(ranks[rank]) for rank in drawn]
