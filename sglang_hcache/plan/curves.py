"""Seconds as a polynomial of tokens, and fitting one to measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from sglang_hcache.plan.costs import check_range

MAX_S = 10**6
"""Seconds of a coefficient at most: nobody waits so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """``fixed + per_token * N + per_token_squared * ((start + N)**2 - start**2)`` seconds for N tokens.

    The last term is attention's: N tokens from position ``start`` on look at each other and at those before. It is 0
    for reading and for projecting. No coefficient is negative, so a curve can be trusted outside the
    lengths it was measured at, at least not to promise negative times.

    Raises:
        ValueError: a coefficient is negative, above :data:`MAX_S` or not a number, or R² is over 1.
    """

    fixed_s: float = 0.0
    per_token_s: float
    per_token_squared_s: float = 0.0
    r_squared: float | None = None
    """Share of the measurements' variance that the curve explains; None: not measured."""

    def __post_init__(self) -> None:
        for name in ("fixed_s", "per_token_s", "per_token_squared_s"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_S:
                raise ValueError(f"{name} must be a number of seconds from 0 to {MAX_S:,}, got {value!r}")
        r_squared = self.r_squared
        if r_squared is not None and not r_squared <= 1:
            raise ValueError(f"r_squared must be a number up to 1, or null, got {r_squared!r}")

    def seconds(self, num_tokens: int, start: int = 0) -> float:
        """Seconds for ``num_tokens`` tokens from position ``start`` on.

        Raises:
            ValueError: ``num_tokens`` below 1 or ``start`` below 0.
        """
        check_range(num_tokens, start)
        squares = (start + num_tokens) ** 2 - start**2
        return self.fixed_s + self.per_token_s * num_tokens + self.per_token_squared_s * squares


def fit_curve(
    num_tokens: Sequence[int],
    seconds: Sequence[float],
    *,
    starts: Sequence[int] | None = None,
    quadratic: bool = False,
) -> CostCurve:
    """The curve with the least squared error, relative to each measurement, and no negative coefficient.

    Relative, so that a millisecond counts more at 64 tokens than at 64K. With three coefficients every subset can be
    tried: the best fit without negative ones is the least squares fit of the subset that stays positive.

    Args:
        num_tokens: lengths measured.
        seconds: what each took, above 0.
        starts: the position at which each begins; None: all at 0.
        quadratic: also fit the squared term (recomputing); reading and projecting have none.

    Raises:
        ValueError: lists of different lengths, fewer than two lengths (three if quadratic), or a value that is
            not positive.
    """
    n = np.asarray(num_tokens, dtype=np.float64)
    y = np.asarray(seconds, dtype=np.float64)
    begin = np.zeros_like(n) if starts is None else np.asarray(starts, dtype=np.float64)
    num_terms = 3 if quadratic else 2
    if not n.shape == y.shape == begin.shape or n.ndim != 1 or len(set(num_tokens)) < num_terms:
        raise ValueError(f"needs one time for each of at least {num_terms} different lengths")
    if not (np.isfinite(y).all() and (y > 0).all() and (n >= 1).all()):
        raise ValueError("lengths and times must be positive")
    squares = (begin + n) ** 2 - begin**2
    terms = np.stack([np.ones_like(n), n, squares][:num_terms], axis=1) / y[:, None]
    best, best_error = np.zeros(num_terms), math.inf
    for size in range(1, num_terms + 1):
        for chosen in combinations(range(num_terms), size):
            columns = list(chosen)
            # Columns differ by many powers of ten (1, N, N²): scale them, or small coefficients drown.
            scale = np.linalg.norm(terms[:, columns], axis=0)
            solution = np.linalg.lstsq(terms[:, columns] / scale, np.ones_like(y), rcond=None)[0] / scale
            error = float(np.sum((terms[:, columns] @ solution - 1) ** 2))
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_terms), error
                best[columns] = solution
    return CostCurve(
        fixed_s=float(best[0]),
        per_token_s=float(best[1]),
        per_token_squared_s=float(best[2]) if quadratic else 0.0,
        r_squared=_r_squared(y, (terms @ best) * y),
    )


def _r_squared(y: np.ndarray, predicted: np.ndarray) -> float | None:
    variance = float(np.sum((y - y.mean()) ** 2))
    return 1.0 - float(np.sum((y - predicted) ** 2)) / variance if variance > 0 else None
