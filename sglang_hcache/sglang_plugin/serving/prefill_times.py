"""How long prefills take on a device that works beside the CPU, where a pass is only asked for."""

from __future__ import annotations

from collections import deque

from sglang_hcache.device.streams import Stamp
from sglang_hcache.restore.gate import RestoreGate
from sglang_hcache.restore.stage import DeviceStage


class PrefillTimes:
    """Tells ``gate``, some time after a pass, how long the device took for it. All on the scheduler's thread."""

    def __init__(self, gate: RestoreGate, stage: DeviceStage) -> None:
        self._gate = gate
        self._stage = stage
        self._began: Stamp | None = None
        self._asked: deque[tuple[int, int, Stamp, Stamp]] = deque()

    def begin(self) -> None:
        """A pass is about to be asked for."""
        self._began = self._stage.stamp()

    def end(self, num_tokens: int, start: int) -> None:
        """It was a prefill of ``num_tokens`` tokens from position ``start`` on, and is asked for."""
        if self._began is not None:
            self._asked.append((num_tokens, start, self._began, self._stage.stamp()))
            self._began = None

    def look(self) -> None:
        """Tell of those that are over."""
        while self._asked and self._asked[0][3].is_reached():
            num_tokens, start, began, ended = self._asked.popleft()
            self._gate.prefilled(num_tokens, start, ended.seconds_since(began))
