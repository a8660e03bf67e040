"""What the restore coordinator knows of a waiting request and of its restore."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

import torch

from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.restore.gate import Prediction
from sglang_hcache.restore.job import RestoreJob
from sglang_hcache.sglang_plugin.protocols import Node, Prompt

MOST_ATTEMPTS = 2
"""Restores of one request: the second one if its prefix was evicted before admission."""


class Phase(Enum):
    RESOLVED = "resolved"
    PENDING = "pending"
    RUNNING = "running"
    PINNED = "pinned"


@dataclass(slots=True)
class Restore:
    """A job, what it holds on the device, and for whom: None once nobody wants it."""

    job: RestoreJob
    prefix: torch.Tensor
    node: Node
    ticket: Ticket | None
    prediction: Prediction | None
    """What the gate said of it; None without a gate."""

    @property
    def start(self) -> int:
        return self.job.first_position

    @property
    def end(self) -> int:
        return self.start + self.job.num_tokens


@dataclass(slots=True)
class Ticket:
    prompt: Prompt
    keys: list[ChunkKey]
    phase: Phase = Phase.RESOLVED
    restore: Restore | None = None
    pinned_node: Node | None = None
    since: float = field(default_factory=time.monotonic)
    attempts: int = 0
    seen_evictions: int = 0

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since = time.monotonic()

    def give_up(self) -> None:
        """The request is recomputed, whatever the tiers have."""
        self.attempts = MOST_ATTEMPTS
        self.enter(Phase.RESOLVED)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.since


@dataclass(frozen=True, slots=True)
class RestoredTokens:
    """How many tokens of an admitted request came from each tier."""

    host: int
    disk: int
