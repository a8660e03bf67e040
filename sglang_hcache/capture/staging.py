"""The staging ring: where rows land during a forward pass."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class RowSpan:
    """Consecutive rows of the ring, [first, first + count)."""

    first: int
    count: int
    _released: bool = False


class StagingRing:
    """A ring of token rows for all layers. Spans are reserved in order and may be released in any order.

    Args:
        buffer: (layers, rows, width), the memory of the ring. A row is what the layout stores of a token.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._lock = threading.Lock()
        self._spans: deque[RowSpan] = deque()

    @property
    def num_rows(self) -> int:
        return self.buffer.shape[1]

    def reserve(self, count: int) -> RowSpan | None:
        """``count`` consecutive rows, or None if they are not free. Never blocks."""
        with self._lock:
            first = self._find(count)
            if first is None:
                return None
            span = RowSpan(first, count)
            self._spans.append(span)
            return span

    def release(self, span: RowSpan) -> None:
        """Give the rows back."""
        with self._lock:
            span._released = True
            while self._spans and self._spans[0]._released:
                self._spans.popleft()

    def _find(self, count: int) -> int | None:
        if not self._spans:
            return 0 if count <= self.num_rows else None
        tail, head = self._spans[0].first, self._spans[-1].first + self._spans[-1].count
        if self._spans[-1].first >= tail:  # in use: [tail, head)
            if head + count <= self.num_rows:
                return head
            return 0 if count <= tail else None
        return head if head + count <= tail else None  # in use: [tail, end) and [0, head)
