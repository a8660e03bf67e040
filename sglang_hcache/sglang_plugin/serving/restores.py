"""Which requests get a restore, when it starts, and what happens to its slots.

A request's ticket::

    RESOLVED -- a tier continues what the device has --> PENDING
    PENDING --- slots were found, the job is queued ---> RUNNING
    PENDING --- its chunks are gone, the disk rests ---> RESOLVED
    PENDING --- no slots, would not pay ---------------> RESOLVED for good
    RUNNING --- done, put into the tree ---------------> PINNED
    RUNNING --- stopped for a running request's room --> PENDING once, then RESOLVED for good
    RUNNING --- failed, late --------------------------> RESOLVED for good
    any, but PINNED: the tier is switched off ---------> RESOLVED for good
    PINNED ---- too old, or the queue stands still ----> RESOLVED
    RESOLVED or PINNED: admitted, and the ticket ends

When the tree has evicted something, or the disk's rest is over, a RESOLVED ticket is looked up again, unless it is so
for good.

* RESOLVED: nothing to wait for; the request may be admitted.
* PENDING: chunks below its device prefix are in a tier; it waits for slots, or for another request's restore of
  the same chunks.
* RUNNING: a job writes its slots; its device prefix is locked. An abort ends the ticket at once, the job later.
* PINNED: restored and inserted; locked until the request is admitted.

Ownership of slots: those before the job's first position belong to the tree and are locked; the job's own belong to
it until they are inserted into the tree or freed. Everything runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import StoreError, TierMissError
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.core.observer import Observer
from sglang_hcache.restore.engine import RestoreEngine
from sglang_hcache.sglang_plugin.seam.protocols import Device, Prompt
from sglang_hcache.sglang_plugin.serving.launcher import Launcher
from sglang_hcache.sglang_plugin.serving.line import Ahead, Line
from sglang_hcache.sglang_plugin.serving.room import Room
from sglang_hcache.sglang_plugin.serving.running import DiskRest, Running
from sglang_hcache.sglang_plugin.serving.tickets import Admission, Phase, Restore, Ticket
from sglang_hcache.sglang_plugin.serving.waiting import Waiting

logger = logging.getLogger(__name__)

_PIN_LIMIT_S = 10.0
_STALLED_TICKS = 3  # scheduler rounds without progress after which pins are given back
_HOLD_S = 0.25  # time in which nobody takes the room that pins leave, so that the head of the queue gets it
_INVALIDATE_S = 30.0  # jobs that are stopped end far sooner
_STOP_S = 1.0  # for a restore to end whose slots a running request needs
_LOOK_AGAIN_S = 0.02  # whether there is room now: the scheduler's rounds come faster than room does


class RestoreCoordinator:
    """The scheduler's side of restoring.

    Args:
        launcher: makes the restores.
        engine: runs their jobs, and tells ``running`` when one is over.
    """

    def __init__(
        self,
        device: Device,
        config: HCacheConfig,
        observer: Observer,
        launcher: Launcher,
        engine: RestoreEngine,
        running: Running,
    ) -> None:
        self._tree = device.tree
        self._ranks = device.ranks
        self._launcher = launcher
        self.scheduler = device.scheduler
        self._observer = observer
        self._engine = engine
        self.waiting = Waiting(device.tree, device.scheduler, observer, device.ranks.now)
        self.running = running
        self._room = Room(device.tree, device.scheduler, running, self.waiting, config.max_inflight_fraction)
        self._stalled = 0
        self._rest = DiskRest(device.ranks.now)
        self._holding_until = 0.0
        self._line = Line(device.ranks.now)
        self._look_again = 0.0

    # -- called by the scheduler -----------------------------------------------------------------

    def queue(self, prompt: Prompt, keys: list[ChunkKey]) -> None:
        """A request enters the waiting queue; ``keys`` name the whole chunks of ``prompt.tokens``."""
        self.drop(prompt.rid)
        if not keys:
            return
        self._ranks.meet()
        ticket = Ticket(prompt, keys, self._ranks.now, self._observer)
        self.waiting.add(ticket)
        self._look_up(ticket)
        is_hit = ticket.phase is Phase.PENDING
        if not is_hit and (ticket.is_unasked or not ticket.following):
            ticket.note("queued with %d whole chunks, not looked for", len(keys))
            return
        self._observer.count("lookup.requests")
        self._observer.count("lookup.hits" if is_hit else "lookup.misses")
        ticket.note("queued with %d whole chunks, a %s", len(keys), "hit" if is_hit else "miss")

    def may_be_admitted(self, rid: str) -> bool:
        """False while the request should wait for its restore."""
        ticket = self.waiting.get(rid)
        if ticket is None:
            return True
        if self._is_held_back(ticket):
            return False
        if self._ranks.size == 1 and ticket.is_outdated(self._tree.evictions, is_resting=self._rest.is_on):
            self._look_up(ticket)  # several ranks do it together, in tick
        return ticket.phase in (Phase.RESOLVED, Phase.PINNED)

    def admitted(self, rid: str, prefix_tokens: int) -> Admission:
        """The request runs, with ``prefix_tokens`` from the device: end its ticket, say what was restored for it."""
        ticket = self.waiting.take(rid)
        self._stalled, self._look_again = 0, 0.0
        if ticket is None:
            return Admission()
        host, disk = ticket.restore.tokens_within(prefix_tokens) if ticket.restore is not None else (0, 0)
        ticket.note("admitted with %d cached tokens", prefix_tokens)
        self.waiting.let_go(ticket)
        return Admission(host, disk, ticket.life)

    def drop(self, rid: str) -> None:
        """The request was aborted or left the queue otherwise."""
        ticket = self.waiting.take(rid)
        if ticket is not None:
            ticket.note("left the queue")
            logger.debug("hcache: request %s: %s", rid, ticket.life)
            self.waiting.let_go(ticket)
            ticket.enter(Phase.RESOLVED)  # it waits no longer

    def invalidate(self) -> None:
        """The model's weights are about to change: end every restore, and start none for those who wait.

        Returns when no job reads weights any more.
        """
        for ticket in self.waiting:
            self.waiting.let_go(ticket)
            ticket.keys = []
            ticket.restore = None
            ticket.enter(Phase.RESOLVED)
        self._await_end(list(self.running), _INVALIDATE_S)

    def stop(self) -> None:
        """The tier is switched off: recompute who waits for a restore; pins stay. A tick settles the stopped jobs."""
        for ticket in self.waiting:
            ticket.is_given_up = True
            if ticket.phase in (Phase.PENDING, Phase.RUNNING):
                self.waiting.let_go(ticket)
                ticket.note("not restored: the tier is switched off")
                ticket.restore = None
                ticket.enter(Phase.RESOLVED)
        self._line.clear()
        self.scheduler.look_again()

    def give_back(self) -> bool:
        """A running request needs room: let the device evict what is pinned, else stop the newest restore.

        Returns:
            False if there was nothing.
        """
        if self.waiting.give_back_pins():
            return True
        restore = self.running.newest()
        if restore is None:
            return False
        ticket = restore.ticket
        if ticket is not None:  # else it is being stopped already
            self.waiting.let_go(ticket)
            self._observer.count("restore.stopped_for_room")
            ticket.note("the restore is stopped: a running request needs its room")
            ticket.restore = None
            if ticket.is_final:
                ticket.enter(Phase.RESOLVED)
            else:
                ticket.enter(Phase.PENDING)
        return self._await_end([restore], _STOP_S)

    def tick(self) -> None:
        """Once a scheduler round, before requests are admitted: the only place where slots are allocated."""
        if not self.waiting and not self.running:
            return
        device = {"evictions": self._tree.evictions, "room": self._tree.room()}
        self._ranks.meet(waiting=len(self.waiting), restoring=self.running.tokens, **device)
        self.reap()
        for rid in self.waiting.gone():
            self.drop(rid)
        self._relieve()
        self._start_pending()
        self._launcher.advance(self.running)
        if self._ranks.size > 1:  # last: a restore that starts may evict what others have
            self._look_up(*self.waiting.outdated(self._tree.evictions, is_resting=self._rest.is_on))

    # -- deciding --------------------------------------------------------------------------------

    def _look_up(self, *tickets: Ticket) -> None:
        """PENDING those for whom a tier continues the device's prefix, RESOLVED the others."""
        is_resting = self._rest.is_on
        for ticket in tickets:
            ticket.seen_evictions, ticket.is_unasked = self._tree.evictions, is_resting
            ticket.on_device = len(self._tree.match_tokens(ticket.prompt.tokens, ticket.prompt.tenant))
        found = self._launcher.find([ticket.following for ticket in tickets], in_memory=is_resting)
        for ticket, is_hit in zip(tickets, found, strict=True):
            phase = Phase.PENDING if is_hit else Phase.RESOLVED
            if phase is not ticket.phase:
                self._look_again = 0.0
                ticket.enter(phase)

    def _start_pending(self) -> None:
        """Start restores in the order in which SGLang admits requests, until one finds no room.

        Those behind it must not take what it waits for, nor any of them what the requests before it need.
        """
        now = self._ranks.now()
        if now < self._holding_until or now < self._look_again:
            return
        self._look_again = now + _LOOK_AGAIN_S
        self._room.look()
        ahead, before, refused = Ahead(self._launcher.prefill_s), set[str](), None
        is_full = not self._room.is_left(CHUNK_TOKENS)
        for request, ticket in self.waiting.until_last_pending():
            is_pending = ticket is not None and ticket.phase is Phase.PENDING
            if ticket is not None and is_pending and (is_full or not self._start(ticket, ahead)):
                refused = ticket
                break
            before.add(request.rid)
            if not is_full:  # else nothing more starts: what the others need does not matter
                ahead.add(request, ticket)
                is_full = not self._room.is_left(ahead.tokens + CHUNK_TOKENS)
        if self._line.stand(refused, before) and refused is not None:
            self._observer.count("restore.no_slots")
            refused.note("no room for a restore")
            refused.give_up()
            self._look_again = 0.0

    def _is_held_back(self, ticket: Ticket) -> bool:
        """Whether the room that an earlier one waits for would never grow if this one took it, as SGLang does.

        Not while restores or pins are in the way, which go by themselves.
        """
        return self._line.is_behind(ticket) and self.scheduler.is_running() and not self._room.held_tokens

    def _start(self, ticket: Ticket, ahead: Ahead) -> bool:
        """Start the ticket's restore, or settle it without; False if it must wait for slots."""
        is_resting = self._rest.is_on
        if is_resting and not any(self._launcher.find([ticket.following], in_memory=True)):
            ticket.is_unasked = True
            ticket.enter(Phase.RESOLVED)
            return True
        if ticket.awaits is not None and self.running.restores(ticket.awaits):
            return True  # many may wait for the same, in each round: nothing is looked up for them
        if not self._room.has(ticket.least_room, ahead.tokens):
            return False  # before anything is looked up, for the same reason
        match = self._tree.match_tokens(ticket.prompt.tokens, ticket.prompt.tenant)
        missing = ticket.keys[len(match) // CHUNK_TOKENS :]
        if shared := self.running.leading(missing):
            ticket.awaits, ticket.awaited = missing[0], len(match) + CHUNK_TOKENS * shared
            return True  # somebody restores them already; look again when that is over
        ticket.awaits, ticket.awaited = None, 0
        (found,) = self._launcher.find([missing], in_memory=is_resting)
        keys = missing[:found]
        ticket.on_device = len(match)
        if not keys:
            ticket.is_unasked = is_resting
            ticket.enter(Phase.RESOLVED)
            return True
        count = CHUNK_TOKENS * len(keys)  # without room for it now, those before it may be over when there is
        backlog_s = self.running.backlog_s if self._room.has(count, ahead.tokens) else 0.0
        decision, pays = self._launcher.decide(keys, len(match), backlog_s - ahead.seconds)
        if not pays:
            self._launcher.declined()
            self._observer.count("restore.declined_slower")
            ticket.note("not restored: %s, behind %.3f s of others", decision, backlog_s)
            ticket.give_up()
            return True
        slots = self._room.take(match, count, ahead.tokens)
        if slots is None:
            ticket.refuse(count)
            return False
        try:
            restore = self._launcher.prepare(ticket, match, keys, slots, decision, backlog_s)
        except (TierMissError, StoreError):
            self._tree.free(slots)
            self._tree.unlock(match.node)
            return True  # gone since the look-up: decided anew at the next round
        ticket.restore = restore
        self.running.add(restore)
        ticket.attempts += 1
        ticket.note("restore of %d tokens behind %d starts: %s", count, len(match), decision or "as stored")
        ticket.enter(Phase.RUNNING)
        self._engine.submit(restore.job)
        return True

    # -- finishing -------------------------------------------------------------------------------

    def reap(self) -> None:
        """Settle the jobs that are over: into the tree, or back to the free slots."""
        for restore in self.running.take_ended():
            self._look_again = 0.0
            self.scheduler.look_again()
            if self._launcher.settle(restore):
                self._observer.count("restore.rests")
                self._rest.begin(restore.slowest_s)
            self._launcher.learn(restore)
            ticket = restore.ticket
            if ticket is not None and restore.is_complete:
                self._insert(ticket, restore)
                continue
            self._tree.free(restore.job.slots)
            self._tree.unlock(restore.node)
            if ticket is not None:
                ticket.note("restore ends without a result: %s", restore.why_incomplete)
                ticket.restore = None
                ticket.give_up()

    def _await_end(self, restores: Sequence[Restore], limit_s: float) -> bool:
        """Wait until none of ``restores`` runs; False if they take longer."""
        self._ranks.meet()
        deadline = self._ranks.now() + limit_s
        while (
            left := any(restore in self.running for restore in restores)
        ) and self._ranks.now() <= deadline:
            self.running.wait()
            self.reap()
            self._ranks.meet()
        return not left

    def _insert(self, ticket: Ticket, restore: Restore) -> None:
        self._stalled = 0
        tokens = ticket.prompt.tokens[: restore.end]
        slots = torch.cat([restore.prefix, restore.job.slots])
        existing, node = self._tree.insert_tokens(tokens, ticket.prompt.tenant, slots)
        # [0, start) is the tree's own; [start, existing) was computed by somebody else meanwhile.
        self._tree.free(slots[restore.start : existing])
        self.waiting.pin(ticket, node)
        self._tree.unlock(restore.node)
        ticket.note("restored in %.3f s", restore.seconds)

    # -- keeping the queue alive -----------------------------------------------------------------

    def _relieve(self) -> None:
        """Give pins back that are old, or that keep the queue from moving."""
        waiting_for_nothing = not self.running.tokens and not self.scheduler.is_running()
        self._stalled = self._stalled + 1 if waiting_for_nothing else 0
        patience_s = 0.0 if self._stalled >= _STALLED_TICKS else _PIN_LIMIT_S
        if self.waiting.give_back_pins(older_than_s=patience_s):
            self._holding_until = self._ranks.now() + _HOLD_S
            self._line.clear()
            self.scheduler.look_again()
