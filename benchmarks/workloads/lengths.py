"""Random token ids and lengths for generated workloads. Equal seeds give equal workloads."""

from __future__ import annotations

import numpy as np


def draw_lengths(dice: np.random.Generator, mean: float, spread: float, count: int) -> np.ndarray:
    """``count`` lengths in tokens from a log-normal distribution, int64 of shape (count,), at least 1 each.

    Args:
        mean: of these very lengths, but for rounding: a few of them with a long tail would be far from it by chance.
        spread: standard deviation of the logarithm; 0 gives ``mean`` every time.
    """
    lengths = dice.lognormal(0.0, spread, count)
    if count:
        lengths *= mean / lengths.mean()
    return np.maximum(np.rint(lengths), 1).astype(np.int64)


def draw_tokens(dice: np.random.Generator, vocabulary: np.ndarray, count: int) -> tuple[int, ...]:
    """``count`` ids of ``vocabulary``."""
    return tuple(dice.choice(vocabulary, count).tolist())
