"""Whether the wall clock can be believed when it says that a file is from the future."""

from __future__ import annotations

import math
import time

_STEADY_S = 3600.0
_STEP_S = 60.0
"""Less is no step: clocks are also set right little by little."""


class Steadiness:
    """A machine that starts without a battery is in another year until a time server answers: what was written before
    then lies in the future, and the clock is wrong, not the file. After an hour without a step the clock is right.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._offset_s = math.inf
        self._since_s = 0.0

    def __call__(self, now_s: float) -> bool:
        """Whether the wall clock, at ``now_s`` now, has gone as the monotonic one for an hour. Ask it now and then."""
        monotonic_s = time.monotonic()
        if not abs(now_s - monotonic_s - self._offset_s) < _STEP_S:
            self._offset_s, self._since_s = now_s - monotonic_s, monotonic_s
        return monotonic_s - self._since_s >= _STEADY_S
