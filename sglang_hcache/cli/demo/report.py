"""What a run of the demo measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_hcache.cli.server.pair import LOGPROB_TOLERANCE, PairedAnswer, Summary, Timings


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn of one conversation; both count from 1."""

    conversation: int
    turn: int
    answer: PairedAnswer

    @property
    def is_returning(self) -> bool:
        """Whether the conversation has a history that a tier can hold."""
        return self.turn > 1

    def as_json(self) -> dict[str, Any]:
        sources = self.answer.tier.sources
        return {
            "conversation": self.conversation,
            "turn": self.turn,
            "prompt_tokens": sources.prompt,
            "device_tokens": sources.device,
            "host_tokens": sources.host,
            "disk_tokens": sources.disk,
            "recomputed_tokens": sources.recomputed,
            "ttft_s": self.answer.tier.ttft_s,
            "ttft_without_tier_s": self.answer.reference.ttft_s,
            "device_tokens_without_tier": self.answer.reference.sources.device,
            "speedup": self.answer.speedup,
            "largest_logprob_difference": _or_null(self.answer.difference.logprob),
            "equal": self.answer.is_equal,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The whole run."""

    turns: tuple[TurnResult, ...]
    pool_tokens: int
    disk_bytes: int
    """What the disk tier counts against its cap."""
    disk_chunks: int
    tier_folder: Path
    kept: bool
    """Whether it stays."""
    wall_s: float

    @property
    def summary(self) -> Summary:
        return Summary.of([turn.answer for turn in self.turns])

    @property
    def first(self) -> Timings | None:
        """First turns: nothing to restore."""
        return Timings.of([turn.answer for turn in self.turns if not turn.is_returning])

    @property
    def returning(self) -> Timings | None:
        return Timings.of([turn.answer for turn in self.turns if turn.is_returning])

    @property
    def failure(self) -> str | None:
        """Why this run does not show what it should, in one line; None if it does."""
        summary = self.summary
        if summary.unequal:
            return (
                f"{summary.unequal} of {summary.requests} answers differ from the recomputed ones "
                f"(largest difference of logprobs {summary.largest_difference:.2g}, allowed {LOGPROB_TOLERANCE:g})"
            )
        if not summary.restored_requests:
            return "no turn was restored from the tier"
        return None

    def as_json(self) -> dict[str, Any]:
        return {
            "turns": [turn.as_json() for turn in self.turns],
            "summary": {
                **asdict(self.summary),
                "largest_difference": _or_null(self.summary.largest_difference),
            },
            "first_turns": asdict(self.first) if self.first else None,
            "returning_turns": asdict(self.returning) if self.returning else None,
            "logprob_tolerance": LOGPROB_TOLERANCE,
            "pool_tokens": self.pool_tokens,
            "disk_bytes": self.disk_bytes,
            "disk_chunks": self.disk_chunks,
            "tier_folder": str(self.tier_folder),
            "kept": self.kept,
            "wall_s": self.wall_s,
            "failure": self.failure,
        }


def _or_null(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
