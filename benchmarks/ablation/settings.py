"""What ``ablations.py`` measures. Quick to import: wrong options are told at once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sglang_hcache.core.layout import CHUNK_TOKENS


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


IN_A_ROW = 6
"""Prefills of a turn that are measured until all of them are saved: what saving defers is part of the time there."""
OFF = "off"
"""The variant in which nothing is saved."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    layers: int
    """Of the random model."""
    tiers: tuple[str, ...]
    """``host``, ``disk`` or ``disk:<bytes a second>``."""
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int
    prompt: int
    """Tokens before decoding begins, at least."""
    prefill: int
    """Tokens of the prompt whose prefill is measured, one pass."""
    rounds: int
    measure_s: float
    ways: tuple[Way, ...] = tuple(Way)
    kv_layers: int | None = None
    """Layers that come back as K and V; None: as many as are predicted to be fastest."""

    @property
    def loads(self) -> list[tuple[str, int]]:
        """What saving is measured under, and its size."""
        prefills = [("prefill", self.prefill), ("prefills", self.prefill)]
        return [*prefills, *(("decode", batch) for batch in self.batches)]

    @property
    def room(self) -> int:
        """Most tokens in the KV pool: the requests of all variants are in it together, prefills in a row by variant."""
        together = (1 + len(self.ways)) * max(self.prefill, max(self.batches) * self._per_request)
        return max(together, IN_A_ROW * self.prefill)

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        return max(*self.lengths, self.prefill, self._per_request)

    @property
    def _per_request(self) -> int:
        """Most tokens of one that decodes."""
        return self.prompt + self.steps + CHUNK_TOKENS


FULL = Sizes(24, ("host", "disk", "disk:500MB"), (1024, 4096, 16384), (1, 4, 16), 128, 256, 2048, 7, 1.0)
QUICK = Sizes(6, ("host", "disk:500MB"), (512, 1024), (1, 4), 64, 64, 256, 3, 0.2)
