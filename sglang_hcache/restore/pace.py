"""How fast a restore computes on a device beside the CPU while others decode."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from sglang_hcache.device.streams import Stamp

YIELDING_SHARE = 0.2
"""Of the device's time for projections while others decode. What a restore computes, their passes lose, for the device
does both in turns: so the time between tokens grows by a quarter. To project a layer takes a sixth of a pass through it
or less, so a restore is still the faster way."""
YIELDING_COSTS = 1 / YIELDING_SHARE
"""So many times as long projections take then."""

_ROWS_BETWEEN = 1024
"""Of one projection while others decode. A device starts nobody's kernel before one that fills it has an end, whatever
their priorities: half a millisecond for 3,276 rows of 5,120 values on an H200."""


class Pace:
    """Cuts rows that are to be projected, and waits between the parts. Used by one thread.

    What a row takes is learnt from parts that are over: the shortest time counts, for other passes come in between.

    Args:
        stamp: when the device has done what the calling thread has queued.
        rows_at_once: rows of a part where nobody decodes.
    """

    def __init__(self, stamp: Callable[[], Stamp], rows_at_once: int) -> None:
        self.yields = False
        """Whether others decode, and go first. Any thread may say so, at any time."""
        self._stamp = stamp
        self._rows_at_once = rows_at_once
        self._asked: deque[tuple[int, Stamp, Stamp]] = deque()
        self._row_s: float | None = None
        self._next_s = 0.0

    def parts(self, count: int) -> Iterator[slice]:
        """Of ``count`` rows, in order: each is to be projected when it comes."""
        yields = self.yields
        at_once = min(self._rows_at_once, _ROWS_BETWEEN) if yields else self._rows_at_once
        for first in range(0, count, at_once):
            part = slice(first, min(first + at_once, count))
            if not yields:
                yield part
                continue
            self._wait(part.stop - part.start)
            began = self._stamp()
            yield part
            self._asked.append((part.stop - part.start, began, self._stamp()))

    def _wait(self, num_rows: int) -> None:
        while self._asked and self._asked[0][2].is_reached():
            rows, began, ended = self._asked.popleft()
            row_s = ended.seconds_since(began) / rows
            self._row_s = row_s if self._row_s is None else min(self._row_s, row_s)
        pause_s = self._next_s - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)
        self._next_s = max(self._next_s, time.monotonic()) + num_rows * (self._row_s or 0.0) / YIELDING_SHARE
