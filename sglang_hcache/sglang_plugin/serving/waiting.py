"""The requests that wait, and what is pinned on the device for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.observer import Observer
from sglang_hcache.sglang_plugin.seam.protocols import DeviceTree, Node, QueuedRequest, SchedulerView
from sglang_hcache.sglang_plugin.serving.tickets import Phase, Ticket

_LONG_ROUND_S = 1.0
_MOST_LOOKED_UP = 16  # at once: matching a long prompt takes time between passes of others


class Patience:
    """The clock by which requests wait. It goes on once a round, but not while the scheduler does not turn, paused or
    in one long pass, and not while as many requests run as may: nobody can be admitted then, whatever is given back.

    Args:
        clock: if it jumps, that was such a time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_turn = self._now = clock()

    def turn(self, *, is_full: bool) -> None:
        """Once a round; ``is_full``: as many requests run as may."""
        now = self._clock()
        self._now += 0.0 if is_full else min(now - self._last_turn, _LONG_ROUND_S)
        self._last_turn = now

    def now(self) -> float:
        """Seconds."""
        return self._now


class Waiting:
    """Tickets by request id, first come first. Everything runs on the scheduler's thread."""

    def __init__(
        self, tree: DeviceTree, scheduler: SchedulerView, observer: Observer, clock: Callable[[], float]
    ) -> None:
        self._tree = tree
        self._scheduler = scheduler
        self._observer = observer
        self._tickets: dict[str, Ticket] = {}
        self.clock = clock
        self.pinned_tokens = 0
        """Those that were restored and are pinned."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets.values()))

    def add(self, ticket: Ticket) -> None:
        """Its request enters the queue."""
        self._tickets[ticket.prompt.rid] = ticket

    def get(self, rid: str) -> Ticket | None:
        """The ticket of a request, if it has one."""
        return self._tickets.get(rid)

    def take(self, rid: str) -> Ticket | None:
        """The ticket of a request, which waits no longer; None if it has none."""
        return self._tickets.pop(rid, None)

    def keys_of(self, rid: str) -> Sequence[ChunkKey]:
        """The keys of the whole chunks of a request's prompt; empty if it has no ticket."""
        ticket = self.get(rid)
        return () if ticket is None else ticket.keys

    def let_go(self, ticket: Ticket) -> None:
        """What it holds is stopped, or may be evicted."""
        if ticket.phase is Phase.RUNNING and ticket.restore is not None:
            ticket.restore.abandon()
            ticket.restore.ticket = None
        elif ticket.phase is Phase.PINNED:
            self.unpin(ticket)

    def until_last_pending(self) -> Iterator[tuple[QueuedRequest, Ticket | None]]:
        """SGLang's queue, in order, down to the last request that waits for its restore to start.

        Without those passed over: nobody behind them has to wait, and what is restored for them would lie idle.
        """
        left = self.number_of(Phase.PENDING)
        for request, ticket in self.queue() if left else ():
            left -= ticket is not None and ticket.phase is Phase.PENDING
            if not request.is_passed_over:
                yield request, ticket
            if not left:
                return

    def queue(self) -> Iterator[tuple[QueuedRequest, Ticket | None]]:
        """SGLang's queue, in order."""
        for request in self._scheduler.waiting():
            yield request, self._tickets.get(request.rid)

    def outdated(self, evictions: int) -> list[Ticket]:
        """The first few of SGLang's queue that :meth:`Ticket.is_outdated`. While the device evicts, all may be."""
        outdated = {rid: ticket for rid, ticket in self._tickets.items() if ticket.is_outdated(evictions)}
        queue = self._scheduler.waiting() if outdated else ()
        tickets = (outdated[request.rid] for request in queue if request.rid in outdated)
        return list(itertools.islice(tickets, _MOST_LOOKED_UP))

    @property
    def num_restoring(self) -> int:
        """Those that wait for their restore to start or to end."""
        return self.number_of(Phase.PENDING) + self.number_of(Phase.RUNNING)

    def number_of(self, phase: Phase) -> int:
        """Tickets in that phase."""
        return sum(ticket.phase is phase for ticket in self._tickets.values())

    def phases(self) -> dict[str, int]:
        """Number of tickets in each phase. From any thread."""
        counts = {phase.value: 0 for phase in Phase}
        for ticket in self:  # a copy, which is made at once
            counts[ticket.phase.value] += 1
        return counts

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, ticket: Ticket, node: Node) -> None:
        """The prefix of ``ticket`` is in the tree down to ``node``: keep it there."""
        assert ticket.restore is not None
        self._tree.lock(node)
        self.pinned_tokens += ticket.restore.job.num_tokens
        ticket.pinned_node, ticket.pinned_since = node, self.clock()
        ticket.enter(Phase.PINNED)

    def unpin(self, ticket: Ticket) -> None:
        """Let the device evict it again."""
        assert ticket.pinned_node is not None
        assert ticket.restore is not None
        self._tree.unlock(ticket.pinned_node)
        self.pinned_tokens -= ticket.restore.job.num_tokens
        ticket.pinned_node, ticket.on_device = None, ticket.restore.end
        ticket.seen_evictions = self._tree.evictions
        ticket.enter(Phase.RESOLVED)

    def pinned_behind(self, ticket: Ticket) -> list[Ticket]:
        """What is pinned for requests behind this one in SGLang's queue, the last of them first."""
        if not self.pinned_tokens:
            return []
        queue = [other for _, other in self.queue()]
        behind = queue[queue.index(ticket) + 1 :]
        return [other for other in reversed(behind) if other is not None and other.phase is Phase.PINNED]

    def give_back_pins(self, older_than_s: float = 0.0) -> bool:
        """Let the device evict what was restored for requests that still wait; False if there was nothing."""
        if not self.pinned_tokens:
            return False
        pinned = [
            ticket
            for ticket in self._tickets.values()
            if ticket.phase is Phase.PINNED and self.clock() - ticket.pinned_since >= older_than_s
        ]
        self.give_back(pinned)
        return bool(pinned)

    def give_back(self, tickets: Iterable[Ticket]) -> None:
        """Let the device evict what is pinned for these."""
        for ticket in tickets:
            self._observer.count("restore.pins_given_back")
            ticket.note("what was restored is given back")
            self.unpin(ticket)
