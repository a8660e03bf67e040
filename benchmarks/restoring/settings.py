"""What ``restore_speed.py`` measures. Quick to import: wrong options are told at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.core.units import parse_size

if TYPE_CHECKING:  # imports torch
    from sglang_hcache.cli.tiny_model.model import TinyModel

PIECE = 2048
"""Tokens of a prefill pass."""
_LEAST_POSITIONS = 40_000


def positions_for(longest: int) -> int:
    """Positions of a model that computes ``longest`` tokens at most. No fewer than what usual lengths get: profiles are
    measured behind other tokens as well.
    """
    return max(_LEAST_POSITIONS, longest + CHUNK_TOKENS)


def split_tier(tier: str) -> tuple[str, int | None]:
    """The name of a tier such as ``disk:500MB``, and how many bytes a second are read from it at most.

    Raises:
        ValueError: that is no size.
    """
    name, colon, limit = tier.partition(":")
    return name, parse_size(limit) if colon else None


def parse_tiers(flag: str, text: str) -> tuple[str, ...]:
    """``host,disk:500MB`` as tiers, each once.

    Raises:
        ConfigError: one is no tier.
    """
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for tier in found:
        try:
            name, limit = split_tier(tier)
            if name not in ("host", "disk") or (limit is not None and (name != "disk" or limit <= 0)):
                raise ValueError("it must be host, disk or disk:<bytes a second>")
        except ValueError as error:
            raise ConfigError(f"{flag}: {tier!r} is no tier: {error}") from None
    return found


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    model: TinyModel
    lengths: tuple[int, ...]
    tiers: tuple[str, ...]
    rounds: int
    measure_s: float = 2.0
    """For each thing that is measured before a tier, for the plans of ``auto``."""
