"""For what happens in another thread or process: there is a limit, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0, step_s: float = 0.01) -> None:
    """Fails if ``condition()`` does not hold in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(step_s)
