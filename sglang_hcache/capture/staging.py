"""The staging ring: where rows land during a forward pass."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from sglang_hcache.core.layout import StateLayout


@dataclass(slots=True)
class RowSpan:
    """Consecutive rows of the ring, [first, first + count)."""

    first: int
    count: int
    _released: bool = False


class StagingRing:
    """A ring of token rows for all layers. Spans are reserved in order and may be released in any order.

    A span lies in one piece, layer by layer, so that a device can bring all of a small pass by one copy.

    Args:
        memory: uint8, 1-D; as many rows as fit into it.
        layout: what a row holds of each layer.
        dtype: element type of the rows.
    """

    def __init__(self, memory: torch.Tensor, layout: StateLayout, dtype: torch.dtype) -> None:
        self._layout = layout
        self._groups = layout.groups
        self._widths = [size // dtype.itemsize for size in layout.row_bytes]
        *self._begins, self._row_values = accumulate(self._widths, initial=0)
        self.num_rows = memory.nbytes // (self._row_values * dtype.itemsize)
        self._bytes: npt.NDArray[np.uint8] = memory.numpy()
        self._values = memory[: self.num_rows * self._row_values * dtype.itemsize].view(dtype)
        self._item_bytes = dtype.itemsize
        self._lock = threading.Lock()
        self._spans: deque[RowSpan] = deque()

    @property
    def num_layers(self) -> int:
        return self._layout.num_layers

    def layers(self, span: RowSpan, first: int, count: int) -> torch.Tensor:
        """The span's rows of ``count`` neighbouring layers of equal rows: a view (count, span.count, width)."""
        width = self._widths[first]
        begin = self._begin(span, first)
        return self._values[begin : begin + count * span.count * width].view(count, span.count, width)

    def rows(self, span: RowSpan) -> list[torch.Tensor]:
        """The span's rows of each layer: views (span.count, width). One call for a pass is cheaper than one a layer."""
        return [
            rows for group in self._groups for rows in self.layers(span, group.first, group.count).unbind()
        ]

    def groups(self, span: RowSpan) -> list[npt.NDArray[np.uint8]]:
        """The span's rows, group by group of the layout: views (layers, span.count, row bytes)."""
        found = []
        for group in self._groups:
            size = self._layout.row_bytes[group.first]
            begin = self._item_bytes * self._begin(span, group.first)
            rows = self._bytes[begin : begin + group.count * span.count * size]
            found.append(rows.reshape(group.count, span.count, size))
        return found

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

    def _begin(self, span: RowSpan, layer: int) -> int:
        """Where the span's rows of ``layer`` begin, in values."""
        return span.first * self._row_values + span.count * self._begins[layer]

    def _find(self, count: int) -> int | None:
        if not self._spans:
            return 0 if count <= self.num_rows else None
        tail, head = self._spans[0].first, self._spans[-1].first + self._spans[-1].count
        if self._spans[-1].first >= tail:  # in use: [tail, head)
            if head + count <= self.num_rows:
                return head
            return 0 if count <= tail else None
        return head if head + count <= tail else None  # in use: [tail, end) and [0, head)
