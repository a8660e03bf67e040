"""Who is first, when several are measured one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def in_turn(names: Iterable[T], number: int) -> list[T]:
    """All ``names`` in a circle; who is first changes with ``number``."""
    found = list(names)
    first = number % len(found)
    return found[first:] + found[:first]
