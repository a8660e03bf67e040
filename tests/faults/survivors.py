"""The model: what a killed store must still have, and what it may have."""

from __future__ import annotations

from tests.faults.worker import BEGIN, END, REFUSED, Report


class Survivors:
    """Learns from the reports of a process, one after the other, and from its end.

    Bytes follow from the key, so this is about which keys are there, not about which bytes they have.
    """

    def __init__(self) -> None:
        self.must: set[int] = set()
        """Acknowledged, and not cleared since: must be served."""
        self.may: set[int] = set()
        """Written, or begun to be written, and not cleared since: nothing else may be there."""
        self.acknowledged = 0
        self.cleared = 0
        self._writing: dict[int, frozenset[int]] = {}
        self._unsure: set[int] = set()
        """Writes under way while a clear was: gone with it, or not."""
        self._since: dict[int, set[int]] = {}
        """By clear under way: keys of writes that were or began while it ran."""

    def learn(self, report: Report) -> None:
        if report.what == BEGIN and report.keys is None:
            self._begin_clear(report.ticket)
        elif report.what == BEGIN and report.keys is not None:
            first, count = report.keys
            self._begin_write(report.ticket, frozenset(range(first, first + count)))
        elif report.what in (END, REFUSED) and report.ticket in self._writing:
            self._end_write(report.ticket, acknowledged=report.what == END)
        elif report.what == END:
            self._end_clear(report.ticket)

    def killed(self) -> None:
        """The process is gone; what was under way may be there or not."""
        self._writing.clear()
        self._since.clear()
        self._unsure.clear()

    def lost(self, *, everything: bool = False) -> None:
        """Something was damaged that acknowledged chunks depend on, or ``everything`` was deleted."""
        self.must.clear()
        if everything:
            self.may.clear()

    def found(self, present: set[int]) -> None:
        """After a start ``present`` were served: they will be after the next one."""
        self.must = set(present)

    def _begin_write(self, ticket: int, keys: frozenset[int]) -> None:
        self._writing[ticket] = keys
        self.may |= keys
        for seen in self._since.values():
            seen |= keys
        if self._since:
            self._unsure.add(ticket)

    def _end_write(self, ticket: int, *, acknowledged: bool) -> None:
        keys = self._writing.pop(ticket)
        if acknowledged:
            self.acknowledged += 1
            if ticket not in self._unsure:
                self.must |= keys
        self._unsure.discard(ticket)

    def _begin_clear(self, ticket: int) -> None:
        self.must.clear()
        self._unsure |= self._writing.keys()
        self._since[ticket] = set().union(*self._writing.values())

    def _end_clear(self, ticket: int) -> None:
        # Whatever had ended before the clear began is gone.
        self.may = self._since.pop(ticket)
        self.cleared += 1
