"""The order of the queue: what those before a request need, what restores may take, and who may not overtake them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import islice

import torch

from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.sglang_plugin.seam.protocols import Device, DeviceMatch, QueuedRequest
from sglang_hcache.sglang_plugin.serving.running import Running
from sglang_hcache.sglang_plugin.serving.tickets import Phase, Ticket
from sglang_hcache.sglang_plugin.serving.waiting import Waiting

_MOST_HELD = 0.5
"""Share of the pool that restores and pins may hold together; one restore may always run alone."""
_MOST_HELD_BACK_S = 30.0
_MATCH_EVERY_S = 0.5
_MOST_LOOKED_AT = 64  # for room: seldom are so many admitted before the next look


class Ahead:
    """The requests before one in the queue, and what they will need when they are admitted.

    What several of them begin with is counted once. What is on the device is counted too: if nobody has locked it, it
    needs room, and is worth more there than what would take its place. If running requests have, which would have to be
    asked for each request in each round, this is too much: the request may be held back for as long as a restore takes.

    Args:
        prefill_s: what computing so many tokens behind a prefix of so many takes, seconds.
        prefilling: of the prompt that is computed now, as :meth:`SchedulerView.prefilling`. It comes before all others.
    """

    def __init__(self, prefill_s: Callable[[int, int], float], prefilling: tuple[int, int] = (0, 0)) -> None:
        self.tokens = 0
        """Slots."""
        self.seconds = prefill_s(*prefilling) if prefilling[0] else 0.0
        """Time to compute what is not restored, without those whose restore has not started."""
        self._prefill_s = prefill_s
        self._keys: set[ChunkKey] = set()

    def add(self, request: QueuedRequest, ticket: Ticket | None) -> None:
        """One more."""
        allocated = covered = 0
        if ticket is not None:
            # A key names all tokens before it as well, so what is shared is at the beginning.
            shared = bisect_left(ticket.keys, True, key=lambda key: key not in self._keys)
            self._keys.update(ticket.keys[shared:])
            allocated = max(CHUNK_TOKENS * shared, ticket.restored)
            covered = max(allocated, ticket.on_device)
        self.tokens += request.num_tokens - allocated + request.new_tokens
        # Who is recomputed does not wait for one whose restore has not started.
        is_pending = ticket is not None and ticket.phase is Phase.PENDING
        if covered < request.num_tokens and not is_pending:
            self.seconds += self._prefill_s(request.num_tokens - covered, covered)


class Line:
    """Room for restores, and who must not be admitted before an earlier request that waits for one.

    Restores get slots within our share of the pool, and not those that other requests will need.

    SGLang admits a request that there is room for although one before it waits for its restore. While no restore runs,
    nobody is admitted behind the first one whose restore found no room, which would never grow then: SGLang, which
    needs as much room for the whole of that one, and more, admits nobody behind it either. Not so while pins hold room:
    they give it back by themselves. Behind the first one whose restore runs, two would do that one wrong:

    * who takes the room that it will need, the last place among running requests, or that of its adapter: it would be
      restored, and wait until others end.
    * who has much to compute. SGLang computes a long prompt in passes, one after the other, with no other prefill
      beside them: who is restored meanwhile would wait for all of them. All in all, a request is held back for that
      for half a minute at most: with priorities, restores may always come before it.

    Only until that restore is over: then SGLang does it. For the scheduler's thread.

    Args:
        may_overtake: how many tokens may be computed before one whose restore has so many seconds to go.
    """

    def __init__(
        self,
        device: Device,
        running: Running,
        waiting: Waiting,
        may_overtake: Callable[[float], float],
    ) -> None:
        self._tree = device.tree
        self._scheduler = device.scheduler
        self._has_adapters = device.adapters is not None
        self._running = running
        self._waiting = waiting
        self._may_overtake = may_overtake
        self._reserved = 0
        self._first: Ticket | None = None
        self._phase = Phase.PENDING
        """Of the first one, when that was looked at: it found no room, or its restore runs."""
        self._before = set[str]()
        self._most_tokens = math.inf
        self._fitting: set[str] | None = None

    # -- room ------------------------------------------------------------------------------------

    def look_for_room(self) -> None:
        """What running requests need may have changed: before restores start."""
        self._reserved = self._scheduler.reserved_tokens()

    @property
    def held_tokens(self) -> int:
        """Slots that restores fill, or have filled for requests that still wait."""
        return self._running.tokens + self._waiting.pinned_tokens

    @property
    def room(self) -> int:
        """Slots that are not needed by running requests."""
        return self._tree.room() - self._reserved

    def has_room(self, count: int, ahead: int) -> bool:
        """Whether ``count`` slots may be taken, with ``ahead`` left for requests that come first in the queue."""
        return not self.lacking_share(count) and self.room >= count + ahead

    def lacking_share(self, count: int) -> float:
        """So many of the tokens that we hold keep ``count`` slots from being within our share; 0: none do."""
        held = self.held_tokens
        return max(0.0, min(held, held + count - _MOST_HELD * self._tree.capacity()))

    def take(self, match: DeviceMatch, count: int, ahead: int) -> torch.Tensor | None:
        """``count`` slots behind ``match``, which is locked then; None if there is no room."""
        self._tree.lock(match.node)  # first, for what is locked is no room
        slots = self._tree.allocate(count) if self.has_room(count, ahead) else None
        if slots is None:
            self._tree.unlock(match.node)
        return slots

    # -- who may not be admitted -----------------------------------------------------------------

    def look(self, refused: Ticket | None) -> None:
        """Now and then.

        Args:
            refused: the first one whose restore found no room when that was last tried.
        """
        is_running = self._waiting.number_of(Phase.RUNNING) > 0
        self._phase = Phase.RUNNING if is_running else Phase.PENDING
        self._first, self._before = None, set()
        for request, ticket in self._waiting.queue() if is_running or refused is not None else ():
            is_first = ticket is not None and (
                ticket.phase is Phase.RUNNING if is_running else ticket is refused
            )
            if is_first and not request.is_passed_over:
                self._first = ticket
                break
            self._before.add(request.rid)
        if is_running and self._first is not None and self._first.restore is not None:
            self._most_tokens = self._may_overtake(self._running.left_s(self._first.restore))
            self._fitting = self._who_fits()

    def is_to_wait(self, rid: str, ticket: Ticket | None) -> bool:
        """Whether a request is behind the first one, and would take its room or its time.

        Args:
            ticket: its ticket, if it has one.
        """
        first = self._first
        if first is None or first.phase is not self._phase or ticket is first or rid in self._before:
            return False
        if first.phase is Phase.PENDING:
            return self._scheduler.is_running() and not self.held_tokens
        if self._fitting is not None and rid not in self._fitting:
            return True
        return ticket is not None and self._takes_long(ticket)

    def _who_fits(self) -> set[str] | None:
        """Those of SGLang's queue that there is room and a place for beside all those before them; None: all of them,
        and who comes next.
        """
        ahead, room, fitting = Ahead(lambda *_: 0.0), self.room, set[str]()
        first_ones = islice(self._waiting.queue(), _MOST_LOOKED_AT)
        queue = [(request, ticket) for request, ticket in first_ones if not request.is_passed_over]
        places = self._scheduler.places()
        # Of adapters there are fewer places, and who comes next may take the last one.
        is_for_all = len(queue) < places and not self._has_adapters
        if is_for_all and sum(request.num_tokens + request.new_tokens for request, _ in queue) <= room:
            return None
        for request, ticket in queue[: max(0, places)]:
            ahead.add(request, ticket)
            if ahead.tokens > room:
                return fitting
            fitting.add(request.rid)
        return None if is_for_all else fitting

    def _takes_long(self, ticket: Ticket) -> bool:
        """Whether it has more to compute than may be done before the first one."""
        if ticket.uncomputed <= self._most_tokens:
            return False
        now = self._waiting.clock()
        if ticket.held_back_since is None:
            ticket.held_back_since = now
        if now - ticket.held_back_since >= _MOST_HELD_BACK_S:
            return False
        if now - ticket.matched_at >= _MATCH_EVERY_S:  # others may have computed it meanwhile
            ticket.matched_at = now
            ticket.on_device = self._tree.match_length(ticket.prompt.tokens, ticket.prompt.tenant)
        return ticket.uncomputed > self._most_tokens
