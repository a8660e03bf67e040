"""What ``ablations.py`` measures. Quick to import: wrong options are told at once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Section(StrEnum):
    PARTITION = "partition"
    SAVING = "saving"
    SCHEDULES = "schedules"
    ALL = "all"


class Way(StrEnum):
    """How what is computed is saved."""

    TWO_STAGE = "two-stage"
    """As the server does."""
    CACHED = "cached"
    """Written directly, into the page cache."""
    DIRECT = "direct"
    """Written directly, to the device."""


OFF = "off"
"""The variant in which nothing is saved."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    layers: int
    """Of the random model."""
    tiers: tuple[str, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int
    prompt: int
    prefill: int
    rounds: int
    measure_s: float
    ways: tuple[Way, ...] = tuple(Way)


FULL = Sizes(24, ("host", "disk", "disk:500MB"), (1024, 4096, 16384), (1, 4, 16), 128, 256, 2048, 7, 1.0)
QUICK = Sizes(6, ("host", "disk:500MB"), (512, 1024), (1, 4), 64, 64, 256, 3, 0.2)
