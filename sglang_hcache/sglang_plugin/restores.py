"""Which requests get a restore, when it starts, and what happens to its slots.

A request's ticket::

    RESOLVED <--> PENDING --> RUNNING --> PINNED --> (admitted: the ticket ends)
        ^------------------------'          |
        '-----------------------------------'

RESOLVED becomes PENDING again if the device evicts what the request was to find there.

* RESOLVED: nothing to wait for; the request may be admitted.
* PENDING: chunks below its device prefix are in a tier; it waits for slots, or for another request's restore of
  the same chunks.
* RUNNING: a job writes its slots; its device prefix is locked.
* PINNED: restored and inserted; locked until the request is admitted.

Ownership of slots: [0, job.start) belongs to the tree and is locked; [job.start, job.end) belongs to the job
until :meth:`RestoreCoordinator._finish` inserts it into the tree or frees it. Everything runs on the scheduler's
thread, except :meth:`RestoreCoordinator.on_over`.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from enum import Enum

import torch

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import RestoreTimeoutError, StoreError, TierMissError
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.core.observer import Observer
from sglang_hcache.restore.engine import RestoreEngine
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.sglang_plugin.protocols import DeviceTree, Node, Prompt, SchedulerView
from sglang_hcache.tier.tiered import HOST, TieredStore

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 2  # restores of one request: the second one if its prefix was evicted before admission
_PENDING_LIMIT_S = 30.0  # a request that finds no slots for so long is recomputed
_PIN_LIMIT_S = 10.0
_PRUNE_EVERY_S = 1.0
_REST_AFTER_TIMEOUT_S = 30.0  # a tier that was too late once would let everyone wait for the deadline
_STALLED_TICKS = 3  # scheduler rounds without progress after which pins are given back
_WAIT_S = 0.005


class Phase(Enum):
    RESOLVED = "resolved"
    PENDING = "pending"
    RUNNING = "running"
    PINNED = "pinned"


@dataclass(slots=True)
class _Restore:
    """A job and what it holds on the device."""

    job: RestoreJob
    prefix: torch.Tensor
    node: Node
    keys: tuple[ChunkKey, ...]

    @property
    def start(self) -> int:
        return self.job.first_position

    @property
    def end(self) -> int:
        return self.start + self.job.num_tokens


@dataclass(slots=True)
class _Ticket:
    prompt: Prompt
    keys: list[ChunkKey]
    phase: Phase = Phase.RESOLVED
    restore: _Restore | None = None
    pinned_node: Node | None = None
    since: float = field(default_factory=time.monotonic)
    attempts: int = 0
    seen_evictions: int = 0

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since = time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.since


@dataclass(frozen=True, slots=True)
class RestoredTokens:
    """How many tokens of an admitted request came from each tier."""

    host: int
    disk: int


class RestoreCoordinator:
    """The scheduler's side of restoring."""

    def __init__(
        self,
        tree: DeviceTree,
        tiers: TieredStore,
        scheduler: SchedulerView,
        config: HCacheConfig,
        observer: Observer,
    ) -> None:
        self._tree = tree
        self._tiers = tiers
        self.scheduler = scheduler
        self._config = config
        self._observer = observer
        self._engine: RestoreEngine | None = None
        self._tickets: dict[str, _Ticket] = {}
        self._abandoned: list[_Restore] = []
        self._in_flight: set[ChunkKey] = set()
        self._stalled = 0
        self._last_prune = time.monotonic()
        self._resting_until = 0.0
        self._over = threading.Event()

    def attach_engine(self, engine: RestoreEngine) -> None:
        """Set the engine whose jobs report to :meth:`on_over`."""
        self._engine = engine

    def on_over(self, _job: RestoreJob) -> None:
        """A job is over (engine's thread)."""
        self._over.set()

    # -- called by the scheduler -----------------------------------------------------------------

    def queue(self, prompt: Prompt, keys: list[ChunkKey]) -> None:
        """A request enters the waiting queue; ``keys`` name the whole chunks of ``prompt.tokens``."""
        self.drop(prompt.rid)
        if not keys:
            return
        ticket = self._tickets[prompt.rid] = _Ticket(prompt, keys)
        self._observer.count("lookup.requests")
        self._resolve(ticket)
        self._observer.count("lookup.hits" if ticket.phase is Phase.PENDING else "lookup.misses")

    def may_be_admitted(self, rid: str) -> bool:
        """False while the request should wait for its restore."""
        ticket = self._tickets.get(rid)
        if ticket is None:
            return True
        if ticket.phase is Phase.RESOLVED and ticket.seen_evictions != self._tree.evictions:
            self._resolve(ticket)
        return ticket.phase in (Phase.RESOLVED, Phase.PINNED)

    def admitted(self, rid: str, prefix_tokens: int) -> RestoredTokens:
        """The request runs, with ``prefix_tokens`` from the device: end its ticket, say what was restored for it."""
        ticket = self._tickets.pop(rid, None)
        self._stalled = 0
        restored = RestoredTokens(0, 0)
        if ticket is None:
            return restored
        if ticket.restore is not None and ticket.restore.job.state is RestoreState.DONE:
            used = max(0, min(prefix_tokens, ticket.restore.end) - ticket.restore.start) // CHUNK_TOKENS
            sources = ticket.restore.job.lease.sources[:used]
            host = sum(source == HOST for source in sources)
            restored = RestoredTokens(host * CHUNK_TOKENS, (used - host) * CHUNK_TOKENS)
        self._let_go(ticket)
        return restored

    def drop(self, rid: str) -> None:
        """The request was aborted or left the queue otherwise."""
        ticket = self._tickets.pop(rid, None)
        if ticket is not None:
            self._let_go(ticket)

    def invalidate(self) -> None:
        """The model's weights are about to change: end every restore, and start none for those who wait.

        Returns when no job reads weights any more.
        """
        for ticket in self._tickets.values():
            self._let_go(ticket)
            ticket.keys = []
            ticket.restore = None
            ticket.enter(Phase.RESOLVED)
        while not self.is_idle:
            self._over.wait(_WAIT_S)
            self._finish_jobs()

    def tick(self) -> None:
        """Once a scheduler round, before requests are admitted: the only place where slots are allocated."""
        self._over.clear()
        self._finish_jobs()
        self._prune()
        self._relieve()
        self._start_pending()

    def wait_for_job(self) -> None:
        """Wait a moment for a job to be over."""
        self._over.wait(_WAIT_S)

    # -- numbers ---------------------------------------------------------------------------------

    @property
    def in_flight_tokens(self) -> int:
        """Slots that belong to jobs, neither free nor in the tree."""
        running = [ticket.restore for ticket in self._tickets.values() if ticket.phase is Phase.RUNNING]
        return sum(restore.job.num_tokens for restore in (*running, *self._abandoned) if restore is not None)

    @property
    def is_idle(self) -> bool:
        """No job holds slots."""
        return self.in_flight_tokens == 0

    def phases(self) -> dict[str, int]:
        """Number of tickets in each phase."""
        counts = {phase.value: 0 for phase in Phase}
        for ticket in self._tickets.values():
            counts[ticket.phase.value] += 1
        return counts

    # -- deciding --------------------------------------------------------------------------------

    def _resolve(self, ticket: _Ticket) -> None:
        """PENDING if a tier continues the device's prefix, else RESOLVED."""
        ticket.seen_evictions = self._tree.evictions
        on_device = len(self._tree.match_tokens(ticket.prompt.tokens, ticket.prompt.tenant)) // CHUNK_TOKENS
        wanted = ticket.attempts < _MOST_ATTEMPTS and on_device < len(ticket.keys)
        is_hit = wanted and time.monotonic() >= self._resting_until and ticket.keys[on_device] in self._tiers
        phase = Phase.PENDING if is_hit else Phase.RESOLVED
        if phase is not ticket.phase:
            ticket.enter(phase)

    def _start_pending(self) -> None:
        for ticket in list(self._tickets.values()):
            if ticket.phase is Phase.PENDING and not self._start(ticket):
                if ticket.age_s < _PENDING_LIMIT_S:
                    return  # first come, first served: later requests must not take the slots it waits for
                self._observer.count("restore.no_slots")
                ticket.attempts = _MOST_ATTEMPTS
                ticket.enter(Phase.RESOLVED)

    def _start(self, ticket: _Ticket) -> bool:
        """Start the ticket's restore, or settle it without; False if it must wait for slots."""
        match = self._tree.match_tokens(ticket.prompt.tokens, ticket.prompt.tenant)
        missing = ticket.keys[len(match) // CHUNK_TOKENS :]
        if missing and missing[0] in self._in_flight:
            return True  # somebody restores them already; look again when that is over
        keys = missing[: self._tiers.match(missing)]
        if not keys:
            ticket.enter(Phase.RESOLVED)
            return True
        count = CHUNK_TOKENS * len(keys)
        if not self._has_room(count):
            return False
        self._tree.lock(match.node)
        try:
            lease = self._tiers.lease(keys)
        except (TierMissError, StoreError):
            self._tree.unlock(match.node)
            return True  # gone since the look-up: decided anew at the next round
        slots = self._tree.allocate(count)
        if slots is None:
            lease.close()
            self._tree.unlock(match.node)
            return False
        job = RestoreJob(lease, len(match), slots, self._config.restore_deadline_s)
        ticket.restore = _Restore(job, match.slots, match.node, tuple(keys))
        ticket.attempts += 1
        ticket.enter(Phase.RUNNING)
        self._in_flight.update(keys)
        assert self._engine is not None
        self._engine.submit(job)
        return True

    def _has_room(self, count: int) -> bool:
        """Whether ``count`` slots may be taken: within our share, and not those that running requests will need."""
        pinned = [t.restore for t in self._tickets.values() if t.phase is Phase.PINNED]
        held = self.in_flight_tokens + sum(r.job.num_tokens for r in pinned if r is not None)
        if held and held + count > self._config.max_inflight_fraction * self._tree.capacity():
            return False
        return self._tree.room() - count >= self.scheduler.reserved_tokens()

    # -- finishing -------------------------------------------------------------------------------

    def _finish_jobs(self) -> None:
        for ticket in self._tickets.values():
            if ticket.phase is Phase.RUNNING and ticket.restore is not None and ticket.restore.job.is_over:
                self._finish(ticket, ticket.restore)
        still_running = []
        for restore in self._abandoned:
            if restore.job.is_over:
                self._take_back(restore)
            else:
                still_running.append(restore)
        self._abandoned = still_running

    def _finish(self, ticket: _Ticket, restore: _Restore) -> None:
        if restore.job.state is not RestoreState.DONE:
            if isinstance(restore.job.error, RestoreTimeoutError):
                self._observer.count("restore.rests")
                self._resting_until = time.monotonic() + _REST_AFTER_TIMEOUT_S
            self._take_back(restore)
            ticket.restore = None
            ticket.attempts = _MOST_ATTEMPTS
            ticket.enter(Phase.RESOLVED)
            return
        self._stalled = 0
        self._in_flight.difference_update(restore.keys)
        tokens = ticket.prompt.tokens[: restore.end]
        slots = torch.cat([restore.prefix, restore.job.slots])
        existing, node = self._tree.insert_tokens(tokens, ticket.prompt.tenant, slots)
        # [0, start) is the tree's own; [start, existing) was computed by somebody else meanwhile.
        self._tree.free(slots[restore.start : max(existing, restore.start)])
        self._tree.lock(node)
        self._tree.unlock(restore.node)
        ticket.pinned_node = node
        ticket.enter(Phase.PINNED)

    def _take_back(self, restore: _Restore) -> None:
        """Free what a failed or unwanted restore holds. Its job is over."""
        self._in_flight.difference_update(restore.keys)
        self._tree.free(restore.job.slots)
        self._tree.unlock(restore.node)

    def _let_go(self, ticket: _Ticket) -> None:
        """The ticket ends."""
        if ticket.phase is Phase.RUNNING and ticket.restore is not None:
            ticket.restore.job.cancel()
            self._abandoned.append(ticket.restore)
        elif ticket.phase is Phase.PINNED:
            self._unpin(ticket)

    def _unpin(self, ticket: _Ticket) -> None:
        assert ticket.pinned_node is not None
        self._tree.unlock(ticket.pinned_node)
        ticket.pinned_node = None
        ticket.seen_evictions = self._tree.evictions
        ticket.enter(Phase.RESOLVED)

    # -- keeping the queue alive -----------------------------------------------------------------

    def _relieve(self) -> None:
        """Give pins back that are old, or that keep the queue from moving."""
        waiting_for_nothing = self.is_idle and not self.scheduler.is_running()
        self._stalled = self._stalled + 1 if waiting_for_nothing else 0
        give_all = self._stalled >= _STALLED_TICKS
        for ticket in self._tickets.values():
            if ticket.phase is Phase.PINNED and (give_all or ticket.age_s > _PIN_LIMIT_S):
                self._observer.count("restore.pins_given_back")
                self._unpin(ticket)

    def _prune(self) -> None:
        """Drop tickets whose request left the queue without telling us."""
        now = time.monotonic()
        if now - self._last_prune < _PRUNE_EVERY_S:
            return
        self._last_prune = now
        waiting = set(self.scheduler.waiting_ids())
        for rid in [rid for rid in self._tickets if rid not in waiting]:
            self._observer.count("restore.tickets_pruned")
            self.drop(rid)
