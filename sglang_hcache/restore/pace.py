"""How fast a restore computes on a device beside the CPU while requests run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from sglang_hcache.device.streams import Stamp
from sglang_hcache.restore.rows import slices

YIELDING_SHARE = 0.2
"""Of the device's time for projections while requests run. What a restore computes, their passes lose, for the device
does both in turns: so the time between tokens grows by a quarter. To project a layer takes a sixth of a pass through it
or less, so a restore is still the faster way."""

_LOOK_S = 0.0005
_ROWS_BETWEEN = 1024
"""Of one projection while requests run. A device starts nobody's kernel before one that fills it has an end, whatever
their priorities: half a millisecond for 3,276 rows of 5,120 values on an H200."""


class Pace:
    """Cuts rows that are to be projected, and waits between the parts. Used by one thread, but for :meth:`turn`.

    What a row takes is learnt from parts that are over: the shortest time counts, for other passes come in between.

    Args:
        stamp: when the device has done what the calling thread has queued.
        rows_at_once: rows of a part where no requests run.
    """

    def __init__(self, stamp: Callable[[], Stamp], rows_at_once: int) -> None:
        self.yields = False
        """Whether requests that run go first."""
        self.turns = 0
        """How often that has changed."""
        self._stamp = stamp
        self._rows_at_once = rows_at_once
        self._asked: deque[tuple[int, Stamp, Stamp]] = deque()
        self._row_s: float | None = None
        self._next_s = 0.0

    def turn(self, yields: bool) -> None:
        """Requests that run go first from now on, or not. For one thread, which may be another one."""
        self.turns += yields is not self.yields
        self.yields = yields

    def parts(self, count: int) -> Iterator[slice]:
        """Of ``count`` rows, in order: each is to be projected when it comes."""
        yields = self.yields
        at_once = min(self._rows_at_once, _ROWS_BETWEEN) if yields else self._rows_at_once
        for part in slices(count, at_once):
            if not yields:
                yield part
                continue
            self._wait(part.stop - part.start)
            began = self._stamp()
            yield part
            self._asked.append((part.stop - part.start, began, self._stamp()))

    def _wait(self, num_rows: int) -> None:
        while self._asked and (self._asked[0][2].is_reached() or self._row_s is None):
            rows, began, ended = self._asked.popleft()
            while not ended.is_reached():  # the first one of all: nobody knows yet how long to wait
                time.sleep(_LOOK_S)
            row_s = ended.seconds_since(began) / rows
            self._row_s = row_s if self._row_s is None else min(self._row_s, row_s)
        pause_s = self._next_s - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)
        self._next_s = max(self._next_s, time.monotonic()) + num_rows * (self._row_s or 0.0) / YIELDING_SHARE
