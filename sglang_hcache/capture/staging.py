"""The staging ring: where rows land during a forward pass."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
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
        buffers: the memory of the ring, a tensor (layers, rows, width) for each group of the layout. A row is what the
            layout stores of a token.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = tuple(buffers)
        self._layers = [layer for buffer in buffers for layer in buffer.unbind()]
        self._lock = threading.Lock()
        self._spans: deque[RowSpan] = deque()

    @property
    def num_rows(self) -> int:
        return self._buffers[0].shape[1]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def layer(self, index: int, span: RowSpan) -> torch.Tensor:
        """Rows of one layer, a view: (span.count, width)."""
        rows = self._layers[index]
        return rows[span.first : span.first + span.count]

    def groups(self, first: int, count: int) -> list[torch.Tensor]:
        """Rows [first, first + count) of all layers, group by group, views: (layers, count, width) each."""
        return [buffer[:, first : first + count] for buffer in self._buffers]

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
