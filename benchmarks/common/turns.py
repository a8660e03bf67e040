"""Who is first, when several are measured one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def in_turn(names: Iterable[T], number: int) -> list[T]:
    """All ``names`` in another order for each ``number``: a Williams design (1949).

    In as many rounds as there are names (twice as many for an odd number of them) each has every place, and follows
    every other one, equally often. In a circle each would always follow the same one, and what that leaves behind.
    """
    found = list(names)
    count = len(found)
    # 0, -1, 1, -2, 2, ...: each step, forwards or backwards, is another one.
    steps = [(place + 1) // 2 * (-1 if place % 2 else 1) for place in range(count)]
    if count % 2 and number // count % 2:
        steps.reverse()
    return [found[(number + step) % count] for step in steps]
