"""Threads that bring rows back on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch

from sglang_hcache.core.threads import started_threads

_ROWS_WORTH_A_LANE = 512
_MOST = 16
"""Two steps of 4,096 rows have no work for more, and each would keep memory for its products."""


class Lanes:
    """Threads that work on parts of layers, each with one thread of torch.

    A layer's work cut among torch's own threads ends when the slowest of them does, and a core that reads or decodes
    meanwhile slows down all of them. Here nobody waits for anybody before the last layer.

    Args:
        count: threads; None: as many as torch has, up to 16.
    """

    def __init__(self, count: int | None = None) -> None:
        own = torch.get_num_threads()
        self._count = count = count or min(own, _MOST)
        # Of low priority: as a stream of a GPU has.
        self._threads = started_threads(count, "hcache-lane", _be_single_threaded)
        torch.set_num_threads(own)  # what threads to come take over is set by whoever set it last

    def start(self, work: Callable[[int, int], None], count: int) -> list[Future[None]]:
        """Call ``work`` with parts [first, end) of rows [0, count), in inference mode; futures of all parts."""
        parts = max(1, min(self._count, count // _ROWS_WORTH_A_LANE))
        cuts = [count * part // parts for part in range(parts + 1)]
        inference = torch.inference_mode()(work)
        return [self._threads.submit(inference, cuts[part], cuts[part + 1]) for part in range(parts)]


def _be_single_threaded() -> None:
    torch.get_num_threads()  # a thread that has not asked yet would take over everybody's number later
    torch.set_num_threads(1)
