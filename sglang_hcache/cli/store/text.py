"""Texts of ``hcache store``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TypeVar

_T = TypeVar("_T")


def first_of(items: Iterable[_T], limit: int) -> Iterable[_T]:
    """At most ``limit`` of ``items``; all if it is 0."""
    return itertools.islice(items, limit or None)


def num_directories(number: int) -> str:
    """``"1 directory"``, ``"2 directories"``."""
    return "1 directory" if number == 1 else f"{number} directories"


def iso_time(at: float | None) -> str | None:
    """For programs: a time in UTC. ``at``: seconds since the epoch."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def ago(at: float | None) -> str:
    """For people: how long ago ``at`` was, seconds since the epoch."""
    if at is None:
        return "?"
    seconds = max(0.0, time.time() - at)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
