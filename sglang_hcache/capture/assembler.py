"""The second stage of saving: rows of many requests and passes become sealed chunks.

Runs on its own thread. A request's rows arrive in order of position; a chunk is sealed when its 64 rows and
its 64 tokens are known. Tokens always arrive, rows may be missing (staging or the host tier was full): such a
chunk is dropped and counted, and the chain of keys goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
from array import array

from sglang_hcache.capture.beginnings import Beginnings
from sglang_hcache.capture.chunk_rows import PassRows
from sglang_hcache.capture.copiers import Copiers
from sglang_hcache.capture.events import Event, RequestBegins, RequestEnds, RowsCaptured
from sglang_hcache.capture.open_requests import OpenRequests
from sglang_hcache.capture.staging import StagingRing
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.tier.tiered import TieredStore

logger = logging.getLogger(__name__)

_SHARE_HELD = 1 / 16
"""The share of the staging ring for rows that wait until something else makes the assembler wake."""


class Assembler:
    """Consumes capture events and seals chunks.

    Args:
        ring: where captured rows lie, of the tiers' layout.
        tiers: where chunks go.
        copiers: copy what is large; closed by the assembler.
    """

    def __init__(self, ring: StagingRing, tiers: TieredStore, observer: Observer, copiers: Copiers) -> None:
        self._ring = ring
        self._observer = observer
        self._requests = OpenRequests(tiers, observer, copiers)
        self._may_trace = Throttle()
        self._held: list[Event] = []
        self._rows_held = 0
        self._events: queue.SimpleQueue[list[Event] | None] = queue.SimpleQueue()
        self.has_lost_requests = False
        """Whether an error has ended the saving of all requests; who publishes takes note."""
        self._published = self._handled = 0
        """Events. Each number is one thread's: the publisher's, and the assembler's."""
        self._thread = threading.Thread(target=self._run, name="hcache-assembler", daemon=True)
        self._thread.start()

    def publish(self, event: Event) -> None:
        """Hand over an event. Never blocks. All calls come from one thread.

        The assembler is not woken for decoded rows that can wait, nor for a request that begins, whose rows or end come
        next: each time it would take the interpreter from the next pass.
        """
        self._held.append(event)
        if isinstance(event, RequestBegins):
            return
        if isinstance(event, RowsCaptured) and event.can_wait and event.span is not None:
            self._rows_held += event.span.count
            if self._rows_held < self._ring.num_rows * _SHARE_HELD and len(self._held) < CHUNK_TOKENS:
                return
        self._hand_over()

    def wake(self) -> None:
        """Hand over the rows that wait, if any. From the thread that publishes."""
        if self._rows_held:
            self._hand_over()

    def _hand_over(self) -> None:
        events, self._held, self._rows_held = self._held, [], 0
        self._published += len(events)
        self._events.put(events)

    @property
    def is_busy(self) -> bool:
        """Whether events wait for its thread or are being handled. Not those that can wait for others."""
        return self._published != self._handled

    @property
    def beginnings(self) -> Beginnings:
        """First rows of chunks, for requests that begin inside of one."""
        return self._requests.beginnings

    @property
    def open_requests(self) -> int:
        """Requests whose rows are being collected."""
        return len(self._requests)

    def close(self, timeout_s: float | None = None) -> None:
        """Handle what was published before, then stop. What takes longer goes on, also when the tiers are closed."""
        self._hand_over()
        self._events.put(None)
        self._thread.join(timeout_s)
        if self.is_busy:
            logger.warning(
                "hcache: stopping: to save what was computed last takes longer than %.2g s; the rest of it may be lost",
                timeout_s,
            )

    # -- the assembler's thread ------------------------------------------------------------------

    def _run(self) -> None:
        while (events := self._events.get()) is not None:
            for event in events:
                self._try(event)
        self._requests.close()

    def _try(self, event: Event) -> None:
        try:
            self._handle(event)
        except Exception:
            # A failed event costs its chunks, never the thread.
            if self._may_trace():
                logger.exception("hcache: capture event failed")
            self._observer.count("capture.errors")
            self._requests.drop_all()
            self.has_lost_requests = True
        finally:
            if isinstance(event, RowsCaptured) and event.span is not None:
                self._ring.release(event.span)
            self._handled += 1

    def _handle(self, event: Event) -> None:
        match event:
            case RequestBegins():
                self._requests.begin(event)
            case RowsCaptured():
                if event.ready is not None:
                    event.ready.wait()
                self._requests.add_pass(event.requests, self._taken(event))
            case RequestEnds():
                if event.rid is None:
                    self._requests.end_all()
                else:
                    self._requests.end(event.rid)
            case _:
                event()

    def _taken(self, event: RowsCaptured) -> PassRows:
        tokens, span = array("q", event.tokens.tolist()), event.span
        count, groups = (0, []) if span is None else (span.count, self._ring.groups(span))
        why_dropped = "incomplete" if event.is_incomplete else "staging_full"
        return PassRows(tokens, count, groups, f"capture.chunks_dropped_{why_dropped}")
