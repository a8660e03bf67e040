"""How often what is measured before serving is repeated, and what counts of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

Piece = tuple[int, int]
"""Tokens of a pass, and the position of the first of them."""

_LONG_SHARE = 1 / 2
"""The share of the budget above which something is done once: what disturbs it is short, and so is what the first time
costs."""
_FEWEST_ROUNDS = 3
_MOST_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Timing:
    """Times pieces of several lengths within a budget.

    Args:
        budget_s: seconds for all of them.
        loads_kernels: whether the first time may take much longer than others, so never counts.
    """

    budget_s: float
    loads_kernels: bool

    @property
    def long_s(self) -> float:
        """What takes longer is done once."""
        return _LONG_SHARE * self.budget_s

    def times(
        self,
        pieces: Sequence[Piece],
        time_of: Callable[[int, int], float],
        fewest: int,
        clock: Callable[[], float] = time.monotonic,
        known: Mapping[Piece, float] = MappingProxyType({}),
    ) -> dict[Piece, float]:
        """Times of pieces, in order, until the budget is spent, but ``fewest`` at least."""
        measured = dict(known)
        ends = clock() + self.budget_s
        missing = [piece for piece in pieces if piece not in known]
        for left, piece in zip(range(len(missing), 0, -1), missing, strict=True):
            began = clock()
            if len(measured) >= fewest and began > ends:
                break
            share_ends = began + max(0.0, ends - began) / left
            first_s = time_of(*piece)  # brings weights and buffers into the caches
            took_s = clock() - began
            # What is over the share of the budget by now is done once more, and the shorter time counts.
            is_late, is_long = began + took_s > share_ends, took_s > self.long_s
            times = [first_s] if is_late and not self.loads_kernels else []
            fewest_rounds = 1 if is_long else 2 if is_late else _FEWEST_ROUNDS
            while is_more_wanted(len(times), fewest_rounds, share_ends - clock()):
                times.append(time_of(*piece))
            measured[piece] = undisturbed(times)
        return _never_falling(measured)


def is_more_wanted(num_rounds: int, fewest: int, left_s: float) -> bool:
    """Whether another round is due, ``fewest`` of which are done in any case."""
    return num_rounds < fewest or (num_rounds < _MOST_ROUNDS and left_s > 0)


def undisturbed(times: Sequence[float]) -> float:
    """The lower quartile: what something else on the machine took must not count as a cost."""
    return max(sorted(times)[len(times) // 4], 1e-9)


def range_of(passes: Iterable[Piece]) -> tuple[int, int]:
    """The shortest and the longest that had nothing before it."""
    lengths = [length for length, start in passes if not start]
    return min(lengths), max(lengths)


def _never_falling(measured: Mapping[Piece, float]) -> dict[Piece, float]:
    """Times of pieces, none above that of a piece no shorter and no earlier.

    A pause during short pieces would make of all their time a cost that does not depend on length: restores would
    never seem to pay, and no later observation would tell.
    """
    return {
        piece: min(
            seconds for other, seconds in measured.items() if other[0] >= piece[0] and other[1] >= piece[1]
        )
        for piece in measured
    }
