"""How fast a restore computes on a GPU while requests run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from sglang_hcache.device.streams import Stamp
from sglang_hcache.restore.rows import slices

YIELDING_SHARE = 0.2
"""Share of the device's time for projections while requests run. The device does both in turns, so their passes lose
this share: the time between tokens grows by a quarter. Projecting a layer takes at most a sixth of a pass through it,
so a restore is still the faster way."""

_LOOK_S = 0.0005
"""Poll interval while the cost of a row is unknown."""
_SLEEP_S = 0.005
"""Longest single sleep. After each one a restore that is to stop can stop, and a row may turn out to take less time."""
_ROWS_BETWEEN = 1024
"""Rows of one projection while requests run. While a kernel fills the device, no other one starts there, whatever its
priority: half a millisecond for 3,276 rows of 5,120 values on an H200."""


class Pace:
    """Cuts rows that are to be projected, and waits between the parts. Used by one thread, but for :meth:`turn`.

    What a row takes is learnt from parts that are over: the shortest time counts, for other passes come in between.

    Args:
        stamp: when the device has done what the calling thread has queued.
    """

    def __init__(self, stamp: Callable[[], Stamp]) -> None:
        self.yields = False
        """Whether requests that run go first."""
        self._stamp = stamp
        self._asked: deque[tuple[int, Stamp, Stamp]] = deque()
        self._row_s: float | None = None
        self._last = (0.0, 0)
        """When the last part came, and its rows; none if nobody knew then how long they take."""

    def turn(self, yields: bool) -> bool:
        """Requests that run go first from now on, or not; whether that is a change. For one thread, which may be
        another one."""
        changes = yields is not self.yields
        self.yields = yields
        return changes

    def parts(self, count: int, check: Callable[[], object] = lambda: None) -> Iterator[slice]:
        """Parts of ``count`` rows, in order: each is to be projected when it comes.

        Args:
            check: called while it waits; an error that it raises ends the wait.
        """
        if not self.yields:
            yield slice(0, count)
            return
        for part in slices(count, _ROWS_BETWEEN):
            rows = part.stop - part.start
            while (pause_s := self._pause_s()) > 0:
                check()
                time.sleep(min(pause_s, _SLEEP_S))
            self._last = (time.monotonic(), 0 if self._row_s is None else rows)
            began = self._stamp()
            yield part
            self._asked.append((rows, began, self._stamp()))

    def _pause_s(self) -> float:
        """Until the last part has had its share of the time, by what is known of rows now."""
        while self._asked and self._asked[0][2].is_reached():
            rows, began, ended = self._asked.popleft()
            row_s = ended.seconds_since(began) / rows
            self._row_s = row_s if self._row_s is None else min(self._row_s, row_s)
        if self._row_s is None:
            return _LOOK_S if self._asked else 0.0  # the first one of all is waited for
        came, rows = self._last
        return came + rows * self._row_s / YIELDING_SHARE - time.monotonic()
