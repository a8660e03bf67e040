"""The write budget: how many bytes were written in the last 24 hours, and who may write more."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sglang_hcache.core.errors import WriteBudgetError
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.format.state import built

_HOUR_S = 3600
_WINDOW_HOURS = 24
"""Whole ones that count, before the present one and after it: the clock may have been set back."""
_HOURS_KEPT = 100
"""More than count: a clock that is wrong for a moment does not make what was written before it forgotten."""
_SHARE_OF_NEW = 0.8
"""Chunks that were never used again may take up to this share of the budget."""


class WriteAllowance:
    """Bytes written by hour of the wall clock, which survives restarts. Safe from several threads.

    Args:
        budget_bytes: most in any 24 hours; None: unlimited, only counted.
        hours: bytes by hour since the epoch.
    """

    def __init__(self, budget_bytes: int | None, hours: Mapping[int, int] | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._hours = dict(hours or {})
        self._lock = threading.Lock()

    @classmethod
    def resumed(cls, budget_bytes: int | None, found: Any) -> WriteAllowance:
        """As :meth:`hours` said; anything else counts as nothing written."""
        return cls(budget_bytes, built(_hours_of, found))

    def add(self, written: Mapping[float, int]) -> None:
        """Bytes that an earlier process wrote, by time (seconds since 1970)."""
        with self._lock:
            for time_s, size in written.items():
                if math.isfinite(time_s):
                    hour = int(time_s // _HOUR_S)
                    self._hours[hour] = self._hours.get(hour, 0) + size

    def hours(self) -> dict[int, int]:
        """Bytes by hour since the epoch."""
        with self._lock:
            return dict(self._hours)

    def written(self, now_s: float) -> int:
        """Bytes written in the 24 hours before ``now_s`` (seconds since the epoch), and in up to one hour more.

        What is dated up to 24 hours later counts as well.
        """
        with self._lock:
            return self._written(now_s)

    def allows(self, size: int, *, reused: bool, now_s: float) -> bool:
        """Whether ``size`` more bytes may be written: the last fifth is kept for chunks that were used again."""
        with self._lock:
            return self._allows(size, 1.0 if reused else _SHARE_OF_NEW, now_s)

    @contextmanager
    def spending(self, size: int, *, now_s: float) -> Iterator[None]:
        """Count ``size`` bytes as written, unless the block fails: it makes room for them, before they are written.

        All of the budget may be used: of new chunks :meth:`allows` was asked before.

        Raises:
            WriteBudgetError: not within the budget; nothing is counted.
        """
        with self._lock:
            hour = int(now_s // _HOUR_S)
            if not self._allows(size, 1.0, now_s):
                budget = format_bytes(self.budget_bytes or 0)
                raise WriteBudgetError(
                    f"{budget} in 24 hours are (nearly) used up (--hcache-disk-write-budget)"
                )
            self._hours[hour] = self._hours.get(hour, 0) + size
            for far in sorted(self._hours, key=lambda item: abs(item - hour))[_HOURS_KEPT:]:
                del self._hours[far]
        try:
            yield
        except BaseException:
            with self._lock:
                self._hours[hour] = max(0, self._hours.get(hour, 0) - size)
            raise

    def _allows(self, size: int, share: float, now_s: float) -> bool:
        return self.budget_bytes is None or self._written(now_s) + size <= share * self.budget_bytes

    def _written(self, now_s: float) -> int:
        hour = int(now_s // _HOUR_S)
        return sum(size for item, size in self._hours.items() if abs(item - hour) <= _WINDOW_HOURS)


def _hours_of(found: dict[Any, Any]) -> dict[int, int]:
    return {int(hour): int(size) for hour, size in found.items() if int(size) > 0}
