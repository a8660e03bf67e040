"""The process that is killed: a real store under traffic, which says what it does over a pipe."""

from __future__ import annotations

import itertools
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from sglang_hcache.core.errors import StoreError, StoreFullError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.testing.io_faults import without_sync
from sglang_hcache.testing.stored_chunks import make_keys, write_keys
from tests.faults.traffic import Habits, Traffic

OPENED = "opened"
BEGIN = "begin"
"""A write or a clear is about to start."""
END = "end"
"""It has returned."""
REFUSED = "refused"
"""The write raised StoreFullError."""
CORRUPT = "corrupt"
"""A read raised CorruptExtentError."""
BROKEN = "broken"
"""Something happened that must not; with a traceback."""


@dataclass(frozen=True)
class Report:
    """One line of what the process says. Sent before the call (BEGIN) and after it (END)."""

    what: str
    ticket: int = 0
    """Which write or clear."""
    keys: tuple[int, int] | None = None
    """First and number of the keys; None: a clear."""
    text: str = ""


@dataclass(frozen=True)
class Job:
    config: StoreConfig
    habits: Habits
    sync: bool
    """Without syncs, which only matter when the power fails, more happens before the kill."""


class Mouthpiece:
    """The pipe, for several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def say(self, report: Report) -> None:
        with self._lock:
            self._connection.send(report)


def work(job: Job, connection: Connection) -> None:
    """Use the store in ``job.config`` until killed."""
    mouthpiece = Mouthpiece(connection)
    try:
        engine = without_sync(len(job.config.dirs)) if not job.sync else None
        store = DiskStore.open(job.config, Counters(), engine)
        mouthpiece.say(Report(OPENED))
        with ReportedTraffic(store, job.habits, mouthpiece) as traffic:
            traffic.join()
    except BaseException:
        mouthpiece.say(Report(BROKEN, text=traceback.format_exc()))


class ReportedTraffic(Traffic):
    """Reports writes and clears before and after; a write may only be refused for want of room."""

    def __init__(self, store: DiskStore, habits: Habits, mouthpiece: Mouthpiece) -> None:
        super().__init__(store, habits)
        self._say = mouthpiece.say
        self._tickets = itertools.count(1)

    def fail(self, text: str) -> None:
        self._say(Report(BROKEN, text=text))

    def clear(self) -> None:
        ticket = next(self._tickets)
        self._say(Report(BEGIN, ticket))
        self.store.clear()
        self._say(Report(END, ticket))

    def write(self, first: int, count: int, layers: tuple[int, ...]) -> None:
        ticket = next(self._tickets)
        self._say(Report(BEGIN, ticket, (first, count)))
        try:
            write_keys(self.store, make_keys(first, count), layers)
        except StoreFullError as error:
            self._say(Report(REFUSED, ticket, text=str(error)))
        else:
            self._say(Report(END, ticket))

    def corrupt(self, first: int, count: int, text: str) -> None:
        self._say(Report(CORRUPT, keys=(first, count), text=text))

    def read_failed(self, error: StoreError) -> None:
        raise error
