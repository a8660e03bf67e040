"""A call that clears the tiers is answered when what it cleared cannot come back, and not before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang.srt.managers.io_struct import ClearHiCacheReqInput, ClearHiCacheReqOutput

from sglang_hcache.sglang_plugin.seam.ranks import Ranks
from sglang_hcache.sglang_plugin.serving.bridge import Bridge
from sglang_hcache.tier.tiered import TieredStore

logger = logging.getLogger(__name__)

_PAUSE_S = 0.02
"""An idle scheduler gives so much for the answer: SGLang may sleep for a second before it looks again."""
_LOOK_EVERY_S = 0.001
_PATIENCE_S = 20.0
"""So long files may take to be deleted, and a directory to be well again and take the note."""

_OUTCOMES = (False, None, True)
"""The worst first."""


@dataclass(slots=True, eq=False)
class _Call:
    request: ClearHiCacheReqInput
    is_durable: Callable[[], bool]
    began: float = field(default_factory=time.monotonic)

    def pause(self) -> None:
        """A moment, which is mostly enough."""
        while not self.is_durable() and time.monotonic() < self.began + _PAUSE_S:
            time.sleep(_LOOK_EVERY_S)

    def outcome(self, tiers: TieredStore) -> bool | None:
        """What to answer; None: nothing yet."""
        if self.is_durable():
            return True
        waited_s = time.monotonic() - self.began
        is_left_out = tiers.disk is None and tiers.is_clearing
        if waited_s < _PATIENCE_S and not is_left_out:
            return None
        directories = () if tiers.disk_stats is None else tiers.disk_stats.directories
        logger.warning(
            "hcache: a clear call is answered with 400: after %.0f s no directory has taken the note, or not all files "
            "are deleted (%s). Mend that and call again, or stop the server and use `hcache store clear`, which needs "
            "one directory that takes writes",
            waited_s, "; ".join(f"{item.path} is {item.condition}: {item.reason}".rstrip(": ") for item in directories),
        )  # fmt: skip
        return False


def _agreed(outcome: bool | None, ranks: Ranks) -> bool | None:
    """What all ranks answer: that it is for good only if it is so on each of them."""
    (worst,) = ranks.minimum(_OUTCOMES.index(outcome))
    return _OUTCOMES[int(worst)]


class ClearCalls:
    """The clear calls of one scheduler. SGLang's own handler answers at once that all went well.

    Everything runs on the scheduler's thread, which waits for no disk: a call that is not answered is handed to the
    scheduler again, as if it had just come.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    @property
    def unanswered(self) -> list[ClearHiCacheReqInput]:
        return [call.request for call in self._calls]

    def handle(
        self, request: ClearHiCacheReqInput, bridge: Bridge, *, may_pause: bool
    ) -> ClearHiCacheReqOutput | None:
        """The answer to a new call, or to one of those that are unanswered; None: not yet."""
        call = next((call for call in self._calls if call.request is request), None)
        if call is None:
            call = _Call(request, bridge.clear())
            self._calls.append(call)
            if may_pause:
                call.pause()
        success = _agreed(call.outcome(bridge.tiers), bridge.ranks)
        if success is None:
            return None
        self._calls.remove(call)
        return ClearHiCacheReqOutput(success=success)
