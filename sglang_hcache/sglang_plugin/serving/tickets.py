"""What the restore coordinator knows of a waiting request and of its restore."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch

from sglang_hcache.core.errors import RestoreTimeoutError
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.core.observer import Observer
from sglang_hcache.restore.decision import Decision
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.sglang_plugin.seam.protocols import Node, Prompt
from sglang_hcache.tier.tiered import HOST

_MOST_ATTEMPTS = 2
"""Restores of one request: the second one if its prefix was evicted before admission, or the first one stopped or
lost (:meth:`Ticket.fall_back`)."""

_REFUSED_S = 0.5
"""For so long a restore is taken to need as much room as before: others may have computed a part of it since."""


class Phase(Enum):
    RESOLVED = "resolved"
    PENDING = "pending"
    RUNNING = "running"
    PINNED = "pinned"


@dataclass(slots=True, eq=False)
class Restore:
    """A job, what it holds on the device, and for whom: None once nobody wants it."""

    job: RestoreJob
    prefix: torch.Tensor
    node: Node
    """Down to which the tree is locked for it: the end of ``prefix``; of its own slots, once those are the tree's."""
    ticket: Ticket | None
    decision: Decision | None
    """Why it was started; None if nobody predicted anything."""
    depends_on_pace: bool = False
    """Whether it takes longer, or less, when its share of the device changes."""
    is_disturbed: bool = False
    """Whether that has happened: what it took was not predicted, for a reason that is known."""
    missing_elsewhere: bool = False
    """Whether another rank has not brought its part."""
    failed_elsewhere: bool = False
    """Whether it should have: nobody had given the restore up."""
    num_computed: int = 0
    """Tokens whose first layers, which the job does not bring, were computed on the scheduler's thread."""
    computed_s: float = 0.0
    """Spent on that."""
    last_computed: float = 0.0
    """When that was, by ``time.monotonic``."""
    ran_out_of_time: bool = False
    """While its first layers were computed."""
    is_in_tree: bool = False
    """Whether its slots are the tree's already, though the device may still write to them."""
    paused_s: float = 0.0
    """For which nothing of it was computed on the scheduler's thread, for SGLang was told to pause."""
    stopped: float = 0.0
    """When it was given up before its first layers were all computed, by ``time.monotonic``."""
    slowest_s: float = 0.0
    """What the slowest rank took, once that is known (:meth:`Outcomes.over`)."""
    taken_s: float | None = None
    """For how long a request waited for it alone; known then, too."""
    is_used: bool | None = None
    """Whether its request ran with what it brought, once that is known."""

    @property
    def start(self) -> int:
        return self.job.first_position

    @property
    def end(self) -> int:
        return self.start + self.job.num_tokens

    @property
    def slots(self) -> torch.Tensor:
        """(end,) int64, one a token from the prompt's beginning."""
        return torch.cat([self.prefix, self.job.slots])

    @property
    def num_recompute(self) -> int:
        """First layers that the job does not bring [HCache §4.1]."""
        return 0 if self.decision is None else self.decision.num_recompute

    @property
    def is_computed(self) -> bool:
        """Whether none of those is left to be computed."""
        return not self.num_recompute or self.num_computed == self.job.num_tokens

    @property
    def is_recomputing(self) -> bool:
        """Whether some are, and will be, on the scheduler's thread."""
        return not self.is_computed and not self.stopped

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Those of so many more tokens; it took ``seconds``."""
        self.num_computed += num_tokens
        self.computed_s += seconds
        self.last_computed = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether nothing writes to its slots any more."""
        return self.job.is_over and not self.is_recomputing

    @property
    def is_certain(self) -> bool:
        """Whether every layer is in the slots, or will be behind :attr:`RestoreJob.written`."""
        return self.job.is_certain and self.is_computed and not self.missing_elsewhere

    @property
    def outcome(self) -> str:
        """How it ended for all ranks together, once it is over: ``restore.`` and this counts it."""
        if self.is_certain:
            return "done"
        is_try = self.decision is not None and self.decision.is_try
        # If no job has failed, its layers could not be recomputed.
        if self.job.state is not RestoreState.FAILED:
            if self.failed_elsewhere:
                return "try_late" if is_try else "failed_on_another_rank"
            if self.ticket is None:
                return "cancelled"
        if not self._has_timed_out:
            return "failed"
        return "try_late" if is_try else "late"

    @property
    def _has_timed_out(self) -> bool:
        return self.ran_out_of_time or isinstance(self.job.error, RestoreTimeoutError)

    @property
    def why_incomplete(self) -> str:
        """For the debug log, while somebody wants it."""
        if self.job.error is not None:
            return repr(self.job.error)
        return (
            "it failed on another rank" if self.failed_elsewhere else "its first layers were not recomputed"
        )

    @property
    def seconds(self) -> float:
        """How long it took, from the first read to the last layer."""
        computed = self.job.ran_s(self.last_computed) if self.num_computed else 0.0
        return max(self.job.seconds, computed - self.paused_s, self.slowest_s)

    @property
    def ended(self) -> float:
        """When it was over, by ``time.monotonic``; infinite where its job was stopped before it began."""
        return max(self.job.ended, self.last_computed, self.stopped)

    @property
    def is_late(self) -> bool:
        """Whether it ran out of time, and not for waiting for others. False where nobody predicted anything."""
        decision = self.decision
        if decision is None or not self._has_timed_out:
            return False
        return self.seconds > (decision.recompute_s / 2 if decision.is_try else decision.job_s)

    def tokens_within(self, prefix_tokens: int) -> tuple[int, int]:
        """How many of the prompt's first ``prefix_tokens`` came from host memory, and from disk."""
        used = max(0, min(prefix_tokens, self.end) - self.start) // CHUNK_TOKENS if self.is_certain else 0
        on_host = sum(source == HOST for source in self.job.sources[:used])
        return CHUNK_TOKENS * on_host, CHUNK_TOKENS * (used - on_host)

    def pause(self, since: float) -> None:
        """It has not gone on since then, through no fault of its own."""
        self.is_disturbed = True
        # What it waits for its fence is none of its time anyway.
        since = max(since, self.job.fenced_until)
        seconds = time.monotonic() - since
        self.paused_s += seconds
        self.job.deadline_s += seconds

    def abandon(self) -> None:
        """Stop as soon as possible."""
        self.job.cancel()
        if self.is_recomputing:
            self.stopped = time.monotonic()


@dataclass(slots=True)
class Life:
    """What happened to a request, each with the seconds since it was queued: a line of the debug log."""

    began: float = field(default_factory=time.monotonic)
    events: list[tuple[float, str, tuple[object, ...]]] = field(default_factory=list)

    def add(self, event: str, *values: object) -> None:
        """Note what happens now; ``values`` go into ``event`` as in a log, when somebody reads it."""
        self.events.append((time.monotonic() - self.began, event, values))

    def __str__(self) -> str:
        return "; ".join(f"+{at:.3f} {event % values}" for at, event, values in self.events)


@dataclass(slots=True, eq=False)
class Ticket:
    prompt: Prompt
    keys: list[ChunkKey]
    clock: Callable[[], float]
    observer: Observer
    """Told how long it waited in each phase."""
    life: Life = field(default_factory=Life)
    phase: Phase = Phase.RESOLVED
    restore: Restore | None = None
    pinned_node: Node | None = None
    pinned_since: float = 0.0
    """By the clock of :class:`Waiting`."""
    entered: float = field(init=False)
    """When its phase began."""
    held_s: float = 0.0
    """For how long it has waited for a restore to start or to end."""
    attempts: int = 0
    is_given_up: bool = False
    on_device: int = 0
    """Leading tokens of the prompt that were on the device when that was last looked at."""
    seen_evictions: int = 0
    refused: tuple[float, int] = (0.0, 0)
    """When its restore last found no room, and for how many tokens."""
    held_back_since: float | None = None
    """When it was first not admitted for the sake of another one's restore (:class:`Line`), ..."""
    matched_at: float = 0.0
    """... and when it was last looked then what of it is on the device."""
    refused_since: float | None = None
    """When it was first the one that found no room, though it was not only running requests that it waited for."""
    has_missed: bool = False
    """Whether it was counted that a chunk of it is in no tier."""
    most_chunks: int = sys.maxsize
    """So many leading chunks of the prompt are restored at most: those behind them are computed."""
    head: int = 0
    """Leading chunks of the prompt before the first one that is on disk, if host memory had any of them when a restore
    was last decided; else 0."""
    awaits: Restore | None = None
    """Another request's restore, which was bringing what is missing when it was last looked up."""
    awaited: int = 0
    """Leading tokens of the prompt that have slots by that restore."""

    def __post_init__(self) -> None:
        self.entered = self.clock()

    def note(self, event: str, *values: object) -> None:
        """As :meth:`Life.add`."""
        self.life.add(event, *values)

    def enter(self, phase: Phase) -> None:
        if self.phase not in (phase, Phase.RESOLVED):
            self.observer.observe(f"wait.{self.phase.value}_seconds", self.in_phase_s)
        if self.phase in (Phase.PENDING, Phase.RUNNING):
            self.held_s += self.in_phase_s
        self.phase = phase
        self.entered = self.clock()

    def give_up(self) -> None:
        """The request is recomputed, whatever the tiers have."""
        self.is_given_up = True
        self.enter(Phase.RESOLVED)

    def fall_back(self) -> None:
        """A restore that reads a disk brings nothing, or too late: what host memory has before that is restored alone.
        If there is none, the request is recomputed.
        """
        if self.head and not self.is_final:
            self.most_chunks = self.head
            if self.phase is not Phase.PENDING:
                self.enter(Phase.PENDING)
        else:
            self.give_up()

    @property
    def is_final(self) -> bool:
        """Whether no restore is begun for it any more, whatever the tiers have."""
        return self.is_given_up or self.attempts >= _MOST_ATTEMPTS

    def is_outdated(self, evictions: int) -> bool:
        """Whether to ask the tiers again, though it waits for nothing: the device has evicted something since."""
        return self.phase is Phase.RESOLVED and not self.is_final and self.seen_evictions != evictions

    def refuse(self, count: int) -> None:
        """There is no room for ``count`` tokens."""
        self.refused = self.clock(), count

    @property
    def following(self) -> list[ChunkKey]:
        """The chunk behind those that the device has; none if it has all that may be restored."""
        first = self.on_device // CHUNK_TOKENS
        return self.keys[first : min(first + 1, self.most_chunks)]

    @property
    def lately_refused(self) -> int | None:
        """For how many tokens there was no room a moment ago."""
        refused, count = self.refused
        return count if self.clock() - refused < _REFUSED_S else None

    @property
    def restored(self) -> int:
        """Leading tokens of the prompt that have slots by its restore, or by that of another request."""
        if self.phase is Phase.PENDING:
            return self.awaited
        return self.restore.end if self.restore is not None and self.phase is not Phase.RESOLVED else 0

    @property
    def uncomputed(self) -> int:
        """Tokens of the prompt that the device does not have, as far as was looked."""
        return len(self.prompt.tokens) - max(self.on_device, self.restored)

    @property
    def in_phase_s(self) -> float:
        """Seconds since its phase began."""
        return self.clock() - self.entered


@dataclass(frozen=True, slots=True)
class Admission:
    """What an admitted request got: how many tokens from each tier, and its life so far."""

    host: int = 0
    disk: int = 0
    life: Life = field(default_factory=Life)
