"""Which requests get a restore, when it starts, and what happens to its slots.

A request's ticket::

    RESOLVED -- a tier continues what the device has --> PENDING
    PENDING --- slots were found, the job is queued ---> RUNNING
    PENDING --- its chunks are gone -------------------> RESOLVED
    PENDING --- would not pay, no slots behind others -> RESOLVED for good
    RUNNING --- certain, put into the tree ------------> PINNED
    RUNNING --- stopped for a running request's room --> PENDING once, then RESOLVED for good
    RUNNING --- failed, late, and read a disk ---------> PENDING once, for what is before that; then RESOLVED for good
    RUNNING --- failed, late otherwise ----------------> RESOLVED for good
    any, but PINNED: the tier is switched off ---------> RESOLVED for good
    any: the model's weights change -------------------> RESOLVED for good
    PINNED ---- too old, or the queue stands still ----> RESOLVED
    RESOLVED or PINNED: admitted, and the ticket ends

When the tree has evicted something, a RESOLVED ticket is looked up again, unless it is so for good.

* RESOLVED: no restore to wait for; the request may be admitted, if it does no earlier one wrong (``line.py``).
* PENDING: chunks below its device prefix are in a tier; it waits for slots, or for another request's restore of
  the same chunks.
* RUNNING: a job writes its slots; its device prefix is locked. An abort ends the ticket at once, the job later.
* PINNED: restored and inserted; locked until the request is admitted. A GPU on which no request runs
  need only have been asked for all of it: passes wait there for what is left, so the scheduler prepares and launches
  the request's pass meanwhile. While requests run, a job is inserted when it is over, for their passes would wait too.

Ownership of slots: those before the job's first position belong to the tree and are locked; the job's own belong to
it until they are inserted into the tree or freed. Inserted, they are locked until the job is over, so that nobody else
gets what the device still writes to. Everything runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.restore.engine import RestoreEngine
from sglang_hcache.sglang_plugin.seam.protocols import Device, Prompt
from sglang_hcache.sglang_plugin.serving.outcomes import Outcomes
from sglang_hcache.sglang_plugin.serving.restore_maker import RestoreMaker
from sglang_hcache.sglang_plugin.serving.running import Running
from sglang_hcache.sglang_plugin.serving.starting import Starter
from sglang_hcache.sglang_plugin.serving.tickets import Admission, Phase, Restore, Ticket
from sglang_hcache.sglang_plugin.serving.waiting import Patience, Waiting

logger = logging.getLogger(__name__)

_PIN_LIMIT_S = 10.0
_STALLED_TICKS = 3  # scheduler rounds without progress after which pins are given back
_HOLD_S = 0.25  # time in which nobody takes the room that pins leave, so that the head of the queue gets it
_SLOW_S = 10.0  # who waits longer for its restore is named in the log
_STOP_S = 30.0  # jobs that are stopped end far sooner, and the alternatives are worse than to wait


class RestoreCoordinator:
    """The scheduler's side of restoring.

    Args:
        maker: makes the restores.
        outcomes: is told of their ends.
        engine: runs their jobs, and tells ``running`` when one is over.
    """

    def __init__(
        self,
        device: Device,
        observer: Observer,
        maker: RestoreMaker,
        outcomes: Outcomes,
        engine: RestoreEngine,
        running: Running,
    ) -> None:
        self._tree = device.tree
        self._gpu = device.gpu
        self._ranks = device.ranks
        self._maker = maker
        self._outcomes = outcomes
        self.scheduler = device.scheduler
        self._observer = observer
        self._patience = Patience(device.ranks.now)
        self.waiting = Waiting(device.tree, device.scheduler, observer, self._patience.now)
        self.running = running
        self._starter = Starter(
            device, observer, maker, outcomes, engine, running, self.waiting, _PIN_LIMIT_S / 2
        )
        self._stalled = 0
        self._has_place = False
        """Whether a request might have been admitted in the last round."""
        self._may_tell = Throttle()

    # -- called by the scheduler -----------------------------------------------------------------

    def queue(self, prompt: Prompt, keys: list[ChunkKey]) -> None:
        """A request enters the waiting queue; ``keys`` name the whole chunks of ``prompt.tokens``."""
        self.newcomer()
        self.drop(prompt.rid)
        if not keys:
            return
        self._ranks.sync()
        ticket = Ticket(prompt, keys, self._ranks.now, self._observer)
        self.waiting.add(ticket)
        self._starter.look_up(ticket)
        is_hit = ticket.phase is Phase.PENDING
        if not ticket.following:
            ticket.note("queued with %d whole chunks, not looked for", len(keys))
            return
        self._maker.looked_up(is_hit=is_hit)
        ticket.note("queued with %d whole chunks, a %s", len(keys), "hit" if is_hit else "miss")

    def newcomer(self) -> None:
        """A request, which may have no ticket, enters the queue."""
        self._starter.newcomer()

    def may_be_admitted(self, rid: str) -> bool:
        """False while the request should wait for its restore, or for that of an earlier one that it would harm."""
        ticket = self.waiting.get(rid)
        if self._starter.line.is_to_wait(rid, ticket):
            return False
        if ticket is None:
            return True
        if self._ranks.size == 1 and ticket.is_outdated(self._tree.evictions):
            self._starter.look_up(ticket)  # evicted since the tick, in which several ranks do it together
        return ticket.phase in (Phase.RESOLVED, Phase.PINNED)

    def admitted(self, rid: str, prefix_tokens: int) -> Admission:
        """The request runs, with ``prefix_tokens`` from the device: end its ticket, say what was restored for it."""
        ticket = self.waiting.take(rid)
        self._stalled = 0
        self._starter.look_again()
        if ticket is None:
            return Admission()
        host, disk = ticket.restore.tokens_within(prefix_tokens) if ticket.restore is not None else (0, 0)
        ticket.note("admitted with %d cached tokens", prefix_tokens)
        self._tell_if_slow(ticket)
        self._let_go(ticket, is_used=host + disk > 0)
        ticket.enter(Phase.RESOLVED)  # if it was another request's, of the same ID, nobody waits for its room
        return Admission(host, disk, ticket.life)

    def drop(self, rid: str) -> None:
        """The request was aborted or left the queue otherwise."""
        ticket = self.waiting.take(rid)
        if ticket is not None:
            ticket.note("left the queue")
            logger.debug("hcache: request %r: %s", rid, ticket.life)
            self._let_go(ticket)
            ticket.enter(Phase.RESOLVED)  # it waits no longer
            self._tell_if_slow(ticket)

    def _let_go(self, ticket: Ticket, *, is_used: bool = False) -> None:
        """Its request runs, or has no use for its restore any more."""
        self.waiting.let_go(ticket)
        if ticket.restore is not None:
            self._outcomes.served(ticket.restore, is_used=is_used)
            ticket.restore = None

    def _tell_if_slow(self, ticket: Ticket) -> None:
        if ticket.held_s > _SLOW_S and self._may_tell():
            logger.info(
                "hcache: request %r waited %.1f s for a restore: %s",
                ticket.prompt.rid,
                ticket.held_s,
                ticket.life,
            )

    def invalidate(self) -> None:
        """The model's weights are about to change: end every restore, and start none for those who wait.

        Returns when no job reads weights any more, or after half a minute: nothing comes of what it reads then.
        """
        for ticket in self.waiting:
            self._let_go(ticket)
            ticket.keys = []
            ticket.enter(Phase.RESOLVED)
        self._await_end(list(self.running))

    def stop(self) -> None:
        """The tier is switched off: recompute who waits for a restore; pins stay. A tick settles the stopped jobs."""
        for ticket in self.waiting:
            ticket.is_given_up = True
            if ticket.phase in (Phase.PENDING, Phase.RUNNING):
                self._let_go(ticket)
                ticket.note("not restored: the tier is switched off")
                ticket.enter(Phase.RESOLVED)
        self.scheduler.look_again()

    def give_back(self) -> bool:
        """A running request needs room: let the device evict what is pinned, else stop the newest restore.

        Returns:
            False if there was nothing, or if the restore does not end: its slots are free later.
        """
        if self.waiting.give_back_pins():
            self._await_end([restore for restore in self.running if restore.is_in_tree])
            return True
        restore = self.running.newest()
        if restore is None:
            return False
        ticket = restore.ticket
        if ticket is not None:  # else it is being stopped already
            self._let_go(ticket)
            self._observer.count("restore.stopped_for_room")
            ticket.note("the restore is stopped: a running request needs its room")
            if ticket.is_final:
                ticket.enter(Phase.RESOLVED)
            else:
                ticket.enter(Phase.PENDING)
        return self._await_end([restore])

    def pause(self) -> None:
        """A moment of a round of SGLang's without a tick, because it was told to pause: restores go on, all but their
        recomputed layers. It is no fault of theirs, and none of their time.
        """
        began = time.monotonic()
        going_on = [restore for restore in self.running if not restore.is_over]
        self.running.wait(self.scheduler.doze)
        for restore in going_on:
            restore.pause(began)

    def tick(self) -> None:
        """Once a scheduler round, before requests are admitted: the only place where slots are allocated."""
        self._patience.turn(is_full=bool(self.waiting) and self.scheduler.places() <= 0)
        if not self.waiting and not self.running:
            return
        device = {"evictions": self._tree.evictions, "room": self._tree.room()}
        self._ranks.sync(waiting=len(self.waiting), restoring=self.running.tokens, **device)
        self._maker.give_up_late(self.running)
        self.reap()
        self._relieve()
        self._start_pending()
        self._maker.advance(self.running)

    def go_on(self) -> None:
        """Settle, and start what waited for that: else those behind it would be admitted before it."""
        self.reap()
        self._start_pending()

    def _start_pending(self) -> None:
        """Start restores, also for whose prefix was evicted: when SGLang asks it is too late, and those behind it get
        its place. Not while nobody is admitted: evictions go on, and a request has few attempts.
        """
        looks = self.scheduler.looks_at_queue()
        had_place, self._has_place = self._has_place, looks and self.scheduler.places() > 0
        evictions, are_several = self._tree.evictions, self._ranks.size > 1
        # One rank looks up when SGLang asks as well, so it need not in each round.
        is_due = self._starter.is_due or (self._has_place and not had_place)
        if looks and (are_several or is_due):
            self._starter.look_up(*self.waiting.outdated(evictions))
        self._starter.start_pending()
        # What started may have evicted what others have, and what did not may let SGLang look after all.
        is_new = self._tree.evictions != evictions or not looks
        if are_several and is_new and self.scheduler.looks_at_queue():
            self._starter.look_up(*self.waiting.outdated(self._tree.evictions))

    # -- finishing -------------------------------------------------------------------------------

    def reap(self) -> None:
        """Settle the jobs that are over, or certain: into the tree, or back to the free slots."""
        if self._gpu is not None and not self.scheduler.is_running():
            for restore in self.running.take_certain():
                assert restore.ticket is not None
                freed = self._insert(restore.ticket, restore)
                if restore.job.written is not None and not restore.job.is_over:
                    # Whoever gets slots that were freed must not write to them before the restore has.
                    written = restore.job.written.as_a_whole() if freed else restore.job.written
                    self._gpu.stage.passes.come_after(written)
        for restore in self.running.take_ended():
            self._outcomes.over(restore)
            if not restore.is_in_tree:
                self._settle(restore)
            elif not restore.is_certain:
                raise RuntimeError(
                    f"hcache: a restore failed on the device, which requests may have read: {restore.job.error!r}"
                )
            self._tree.unlock(restore.node)

    def _settle(self, restore: Restore) -> None:
        """One that is over: what it brought is the tree's, or nobody's."""
        ticket = restore.ticket
        if ticket is not None and restore.is_certain:
            self._insert(ticket, restore)
            return
        self._look_again()
        self._tree.free(restore.job.slots)
        if ticket is not None:
            ticket.note("restore ends without a result: %s", restore.why_incomplete)
            ticket.restore = None
            ticket.fall_back()

    def _await_end(self, restores: Sequence[Restore]) -> bool:
        """Wait until none of ``restores`` runs; False if they take too long."""
        self._ranks.sync()
        deadline = self._ranks.now() + _STOP_S
        while (
            left := any(restore in self.running for restore in restores)
        ) and self._ranks.now() <= deadline:
            self.running.wait()
            self.reap()
            self._ranks.sync()
        return not left

    def _insert(self, ticket: Ticket, restore: Restore) -> int:
        """Into the tree, where it is locked for as long as the device writes to it; how many slots are left over."""
        self._stalled = 0
        self._look_again()
        tokens = ticket.prompt.tokens[: restore.end]
        slots = restore.slots
        existing, node = self._tree.insert_tokens(tokens, ticket.prompt.tenant, slots)
        # [0, start) is the tree's own; [start, existing) was computed by somebody else meanwhile.
        left_over = slots[restore.start : existing]
        self._tree.free(left_over)
        self.waiting.pin(ticket, node)
        self._tree.lock(node)
        self._tree.unlock(restore.node)
        restore.node = node
        if restore.job.is_over:
            ticket.note("restored in %.3f s", restore.seconds)
        else:
            ticket.note("the device is asked for the rest of its restore")
        return len(left_over)

    def _look_again(self) -> None:
        """There may be room now, for restores and for requests."""
        self._starter.look_again()
        self.scheduler.look_again()

    # -- keeping the queue alive -----------------------------------------------------------------

    def _relieve(self) -> None:
        """Give pins back that are old, or that keep the queue from moving."""
        waiting_for_nothing = not self.running.tokens and not self.scheduler.is_running()
        self._stalled = self._stalled + 1 if waiting_for_nothing else 0
        patience_s = 0.0 if self._stalled >= _STALLED_TICKS else _PIN_LIMIT_S
        if self.waiting.give_back_pins(older_than_s=patience_s):
            self._starter.hold(_HOLD_S)
            self.scheduler.look_again()
