"""How long prefills take. A GPU is only asked for a pass, and is done with it later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from sglang_hcache.capture.events import RequestRows
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.device.streams import Stamp
from sglang_hcache.restore.gate import RestoreGate


class PrefillTimes:
    """Tells ``gate`` how long the device took for a pass, once it is over. All on the scheduler's thread.

    Args:
        stamp: when the device has done what it was asked for until now.
        largest_pass: most tokens of a pass.
    """

    def __init__(self, gate: RestoreGate, stamp: Callable[[], Stamp], largest_pass: int) -> None:
        self._gate = gate
        self._stamp = stamp
        self._largest_pass = largest_pass
        self._began: Stamp | None = None
        self._asked: deque[tuple[int, int, Stamp, Stamp]] = deque()

    def begin(self, num_tokens: int) -> None:
        """A pass of so many tokens, of all its requests, is about to be asked for. A short one tells nothing."""
        self._began = self._stamp() if num_tokens >= CHUNK_TOKENS else None

    def end(self, requests: Sequence[RequestRows], *, is_replayed: bool, is_prefill: bool) -> None:
        """It was asked for. Its time counts if it was of a single prompt.

        Args:
            is_replayed: by a CUDA graph. Other passes take longer, for their kernels are launched one by one: so its
                time counts only if the graph runs the largest pass, of which long prompts consist.
            is_prefill: that graph is one of those for prefill.
        """
        began, self._began = self._began, None
        if began is None or len(requests) != 1:
            return
        rows = requests[0]
        if not is_replayed or (is_prefill and rows.count == self._largest_pass):
            self._asked.append((rows.count, rows.position, began, self._stamp()))

    def look(self) -> None:
        """Tell of those that are over."""
        while self._asked and self._asked[0][3].is_reached():
            num_tokens, start, began, ended = self._asked.popleft()
            self._gate.prefilled(num_tokens, start, ended.seconds_since(began))
