"""The order of the queue: what those before a request need, and who may not overtake it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_hcache.sglang_plugin.tickets import Phase, Ticket


@dataclass(slots=True)
class Ahead:
    """The requests before one in the queue, and what they will need when they are admitted."""

    rids: set[str] = field(default_factory=set)
    tokens: int = 0
    """Slots."""
    seconds: float = 0.0
    """Of computing what does not come back."""

    def add(self, ticket: Ticket, prefill_s: Callable[[int, int], float]) -> None:
        """One more. ``prefill_s``: what computing so many tokens behind a prefix takes."""
        self.rids.add(ticket.prompt.rid)
        if ticket.phase is Phase.PENDING:
            return  # it awaits what another one's restore brings: how much it lacks then, nobody knows
        covered = ticket.covered
        missing = len(ticket.prompt.tokens) - covered
        if missing > 0:
            self.tokens += missing
            self.seconds += prefill_s(missing, covered)


class Line:
    """The first request whose restore found no room, and who may not overtake it."""

    def __init__(self) -> None:
        self._first: Ticket | None = None
        self._before: set[str] = set()
        self._since = 0.0

    def stand(self, first: Ticket | None, ahead: Ahead) -> None:
        """``first`` (None: nobody) found no room behind ``ahead``."""
        if first is not self._first or ahead.tokens:
            self._since = time.monotonic()  # while others come first, it is those whom SGLang has no room for
        self._first, self._before = first, ahead.rids

    def clear(self) -> None:
        """Nobody waits."""
        self._first = None

    def is_behind(self, ticket: Ticket) -> bool:
        """Whether it comes later than the first."""
        first = self._first
        return first is not None and ticket is not first and ticket.prompt.rid not in self._before

    @property
    def waited_s(self) -> float:
        """How long the first has waited with nobody before it."""
        return 0.0 if self._first is None else time.monotonic() - self._since
