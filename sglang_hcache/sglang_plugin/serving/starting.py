"""Which restore starts next, and whom SGLang must not admit meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from sglang_hcache.core.errors import StoreError, TierMissError
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.core.observer import Observer
from sglang_hcache.restore.engine import RestoreEngine
from sglang_hcache.sglang_plugin.seam.protocols import Device, DeviceMatch
from sglang_hcache.sglang_plugin.serving.line import Ahead, Line
from sglang_hcache.sglang_plugin.serving.outcomes import Outcomes
from sglang_hcache.sglang_plugin.serving.restore_maker import RestoreMaker
from sglang_hcache.sglang_plugin.serving.running import Running
from sglang_hcache.sglang_plugin.serving.tickets import Phase, Ticket
from sglang_hcache.sglang_plugin.serving.waiting import Waiting

_LOOK_AGAIN_S = 0.02  # whether there is room now: the scheduler's rounds come faster than room does
_REFUSED_LIMIT_S = 120.0
"""A request that finds no room for so long behind others, or while nothing runs, is recomputed: a policy may always put
others before it."""


class _Attempt(Enum):
    """How an attempt to start a restore went."""

    GO_ON = "it runs, is not needed, waits for another request's restore, or is looked up anew"
    NO_ROOM = "it waits for slots, and so do those behind it"
    TOO_EARLY = "it would lie idle for long, and so would those of the requests behind it"


class Starter:
    """Starts restores in the order in which SGLang admits requests. Everything runs on the scheduler's thread.

    Args:
        most_idle_s: for so long at most a restored prefix should wait until its request can run.
    """

    def __init__(
        self,
        device: Device,
        observer: Observer,
        maker: RestoreMaker,
        outcomes: Outcomes,
        engine: RestoreEngine,
        running: Running,
        waiting: Waiting,
        most_idle_s: float,
    ) -> None:
        self._tree = device.tree
        self._scheduler = device.scheduler
        self._now = device.ranks.now
        self._observer = observer
        self._maker = maker
        self._outcomes = outcomes
        self._engine = engine
        self._running = running
        self._waiting = waiting
        self._most_idle_s = most_idle_s
        self.line = Line(device, running, waiting, maker.may_overtake)
        self._holding_until = 0.0
        self._next_look = 0.0
        self._has_newcomer = False
        self._refused: Ticket | None = None
        """The first one whose restore found no room when that was last tried."""

    # -- what others tell ------------------------------------------------------------------------

    def look_again(self) -> None:
        """There may be room now."""
        self._next_look = 0.0

    def newcomer(self) -> None:
        """Another request is in the queue: it must not take the place of one that waits for its restore."""
        self._has_newcomer = True

    def hold(self, seconds: float) -> None:
        """Leave the room that there is now to the head of the queue for so long."""
        self._holding_until = self._now() + seconds
        self._refused = None
        self.line.look(None)

    @property
    def is_due(self) -> bool:
        """Whether restores may start in this round."""
        return self._now() >= max(self._holding_until, self._next_look)

    # -- deciding --------------------------------------------------------------------------------

    def look_up(self, *tickets: Ticket) -> None:
        """PENDING those for whom a tier continues the device's prefix, RESOLVED the others."""
        for ticket in tickets:
            ticket.seen_evictions = self._tree.evictions
            ticket.on_device = self._tree.match_length(ticket.prompt.tokens, ticket.prompt.tenant)
        found = self._maker.find([ticket.following for ticket in tickets])
        for ticket, is_hit in zip(tickets, found, strict=True):
            if not is_hit:
                self._maker.missed(ticket, ticket.following)
            phase = Phase.PENDING if is_hit else Phase.RESOLVED
            if phase is not ticket.phase:
                self.look_again()
                ticket.enter(phase)

    def start_pending(self) -> None:
        """Once a round: start restores until one finds no room, or would come too early.

        The ones behind it must not take the room that it waits for. None may take what requests before it need.
        """
        has_newcomer, self._has_newcomer = self._has_newcomer, False
        is_due = self.is_due
        if (is_due or has_newcomer) and self._waiting.num_restoring:
            self._scheduler.order_queue()
        if not is_due:
            if has_newcomer:
                self.line.look(self._refused)
            return
        self._next_look = self._now() + _LOOK_AGAIN_S
        self.line.look_for_room()
        ahead = Ahead(self._maker.prefill_s, self._scheduler.prefilling())
        self._refused = None
        is_full, is_first = self.line.room < CHUNK_TOKENS, True
        for request, ticket in self._waiting.until_last_pending():
            if ticket is not None and ticket.phase is Phase.PENDING:
                attempt = _Attempt.NO_ROOM if is_full else self._start(ticket, ahead)
                if ticket.phase is Phase.RESOLVED:
                    self._scheduler.look_again()  # which may have passed it over, and found no room for others
                if attempt is not _Attempt.GO_ON:
                    self._refused = ticket if attempt is _Attempt.NO_ROOM else None
                    break
            is_first = False
            if not is_full:  # else nothing more starts: what the others need does not matter
                ahead.add(request, ticket)
                is_full = self.line.room < ahead.tokens + CHUNK_TOKENS
        self.line.look(self._refused)
        if self._refused is not None:
            self._be_patient(self._refused, is_first=is_first)

    def _be_patient(self, refused: Ticket, *, is_first: bool) -> None:
        """It found no room: it waits for that, but not behind others for ever, nor if nothing will make room."""
        now = self._waiting.clock()
        if refused.refused_since is None:
            if is_first and self._scheduler.is_running():
                return  # there is none for its prefill either, which needs more, before one that runs has ended
            refused.refused_since = now
        if now - refused.refused_since >= _REFUSED_LIMIT_S:
            self._observer.count("restore.no_slots")
            refused.note("no room for a restore")
            refused.give_up()
            self.look_again()
            self._scheduler.look_again()

    def _start(self, ticket: Ticket, ahead: Ahead) -> _Attempt:
        """Start the ticket's restore, or decide against it."""
        # Many may wait for the same restore, or for room, in each round: nothing is looked up for them.
        awaited = ticket.awaits
        if awaited is not None and awaited in self._running and not awaited.is_in_tree:
            return _Attempt.GO_ON
        if not self._may_have_room(ticket, ahead):
            return _Attempt.NO_ROOM
        match = self._tree.match_tokens(ticket.prompt.tokens, ticket.prompt.tenant)
        missing = ticket.keys[len(match) // CHUNK_TOKENS : ticket.most_chunks]
        (found,) = self._maker.find([missing])
        keys = missing[:found]
        # First: who waits may find everything on the device afterwards, for the other request has computed the rest.
        self._maker.missed(ticket, missing[found : found + 1])
        if self._awaits_another(ticket, len(match), missing, ahead):
            return _Attempt.GO_ON
        ticket.on_device = len(match)
        if not keys:
            ticket.enter(Phase.RESOLVED)
            return _Attempt.GO_ON
        return self._begin(ticket, match, keys, ahead)

    def _may_have_room(self, ticket: Ticket, ahead: Ahead) -> bool:
        """Whether it is worth a look what it needs: not if that was too much a moment ago, and there is still no room.

        If only our share is full, and not the pool, it is looked at now and then: recomputing may be faster.
        """
        needed = ticket.lately_refused
        if needed is None:
            return self.line.room >= CHUNK_TOKENS + ahead.tokens
        return self.line.has_room(needed, ahead.tokens) or bool(self._in_its_way(ticket, needed, ahead))

    def _in_its_way(self, ticket: Ticket, count: int, ahead: Ahead) -> list[Ticket]:
        """Requests behind this one whose pins keep our share of the pool from it, the last ones first: SGLang would
        admit them before it. None if it would lack room without them.
        """
        lacking = self.line.lacking_share(count)
        if self.line.room < count + ahead.tokens:
            return []
        found = []
        for other in self._waiting.pinned_behind(ticket) if lacking else ():
            found.append(other)
            assert other.restore is not None
            lacking -= other.restore.job.num_tokens
            if lacking <= 0:
                return found
        return []

    def _awaits_another(
        self, ticket: Ticket, on_device: int, missing: Sequence[ChunkKey], ahead: Ahead
    ) -> bool:
        """Whether another restore, which brings the first of ``missing``, is worth waiting for."""
        ticket.awaits, ticket.awaited = None, 0
        shared = CHUNK_TOKENS * self._running.leading(missing)
        if not shared:
            return False
        restore = self._running.first_with(missing[0])
        left_s = self._running.left_s(restore) - ahead.seconds
        if not self._maker.is_worth_awaiting(shared, on_device, left_s):
            return False
        ticket.awaits, ticket.awaited = restore, on_device + shared
        return True

    def _begin(self, ticket: Ticket, match: DeviceMatch, keys: Sequence[ChunkKey], ahead: Ahead) -> _Attempt:
        """Restore ``keys`` behind ``match`` for a ticket, if that pays now."""
        count = CHUNK_TOKENS * len(keys)
        backlog_s = self._running.backlog_s
        # If it cannot be admitted now, the restores that run may be over by the time it can.
        is_next = self._scheduler.looks_at_queue() and self.line.room >= count + ahead.tokens
        behind_s = backlog_s if is_next else 0.0
        verdict = self._maker.decide(keys, len(match), behind_s - ahead.seconds)
        ticket.head = len(match) // CHUNK_TOKENS + verdict.head if verdict.head else 0
        if verdict.leaves_rest:
            left = CHUNK_TOKENS * (len(keys) - verdict.head)
            ticket.note(
                "the last %d tokens are not restored, for some are on disk: %s", left, verdict.decision
            )
            return self._begin_head(ticket, match, keys[: verdict.head], ahead)
        if not verdict.starts:
            self._observer.count("restore.declined_slower")
            ticket.note("not restored: %s, behind %.3f s of others", verdict.decision, behind_s)
            ticket.give_up()
            return _Attempt.GO_ON
        if verdict.idle_s > self._most_idle_s:
            return _Attempt.TOO_EARLY
        if not verdict.is_try:
            self._tree.lock(match.node)  # first, as in take: what is locked is no room
            self._waiting.give_back(self._in_its_way(ticket, count, ahead))
            self._tree.unlock(match.node)
        slots = self.line.take(match, count, ahead.tokens)
        if slots is None and verdict.is_try:  # nobody waits for room for that
            return self._begin_head(ticket, match, keys[: verdict.head], ahead)
        if slots is None:
            ticket.refuse(count)
            return _Attempt.NO_ROOM
        try:
            restore = self._maker.prepare(ticket, match, keys, slots, verdict.decision, backlog_s)
        except (TierMissError, StoreError):
            self._tree.free(slots)
            self._tree.unlock(match.node)
            return _Attempt.GO_ON  # gone since the look-up: it is looked up anew in the next round
        if ticket.restore is not None:  # what it brought is gone
            self._outcomes.served(ticket.restore, is_used=False)
        ticket.restore = restore
        self._running.add(restore)
        ticket.attempts += 1
        decision = verdict.decision or "as stored"
        ticket.note("restore of %d tokens behind %d starts: %s", count, len(match), decision)
        ticket.enter(Phase.RUNNING)
        self._engine.submit(restore.job)
        return _Attempt.GO_ON

    def _begin_head(
        self, ticket: Ticket, match: DeviceMatch, keys: Sequence[ChunkKey], ahead: Ahead
    ) -> _Attempt:
        """Restore only ``keys``, which are in host memory, or nothing if there are none."""
        ticket.fall_back()
        return self._begin(ticket, match, keys, ahead) if keys else _Attempt.GO_ON
