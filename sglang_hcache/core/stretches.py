"""Neighbouring numbers, such as layers or slots, that can be copied together."""

from __future__ import annotations

from collections.abc import Iterable


def stretches(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and count of each stretch of numbers that follow each other, in the order given."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
