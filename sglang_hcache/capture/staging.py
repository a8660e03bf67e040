"""The staging ring: where rows land during a forward pass."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from sglang_hcache.core.layout import StateLayout

_SMALL = 1 / 16
"""A share of all rows: a span of no more goes as far to the end as it can, a larger one as far to the beginning. Else a
few decoded rows at the beginning leave two gaps where a pass of a long prompt needs one."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSpan:
    """Consecutive rows of the ring, [first, first + count)."""

    first: int
    count: int


class StagingRing:
    """Token rows for all layers, used again and again. Spans are reserved by one thread, and released by any, in any
    order.

    A span lies in one piece, layer by layer, so that a device can bring all of a small pass by one copy.

    Args:
        memory: uint8, 1-D; as many rows as fit into it.
        layout: what a row holds of each layer.
        dtype: element type of the rows.
        pass_rows: of the largest pass, of which the ring holds a few. Where it can, no large span lies across a
            multiple of it: a short one there would leave no gap for a whole pass.
    """

    def __init__(
        self, memory: torch.Tensor, layout: StateLayout, dtype: torch.dtype, pass_rows: int = 1
    ) -> None:
        self._layout = layout
        self._groups = layout.groups
        self._widths = [size // dtype.itemsize for size in layout.row_bytes]
        *self._begins, self._row_values = accumulate(self._widths, initial=0)
        self.num_rows = memory.nbytes // (self._row_values * dtype.itemsize)
        self._bytes: npt.NDArray[np.uint8] = memory.numpy()
        self._values = memory[: self.num_rows * self._row_values * dtype.itemsize].view(dtype)
        self._item_bytes = dtype.itemsize
        self._pass_rows = pass_rows
        self._spans: list[RowSpan] = []  # in order of their rows; also those that were released since
        self._released: deque[RowSpan] = deque()

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
        place = self._find(count)
        if place is None:
            return None
        first, index = place
        span = RowSpan(first, count)
        self._spans.insert(index, span)
        return span

    def release(self, span: RowSpan) -> None:
        """Give the rows back. From any thread."""
        self._released.append(span)

    def _begin(self, span: RowSpan, layer: int) -> int:
        """Where the span's rows of ``layer`` begin, in values."""
        return span.first * self._row_values + span.count * self._begins[layer]

    def _find(self, count: int) -> tuple[int, int] | None:
        """Where ``count`` rows begin, and how many spans lie before them; None: no gap is so large."""
        while self._released:
            self._spans.remove(self._released.popleft())
        if count > self.num_rows * _SMALL:
            return self._find_first(count, self._pass_rows) or self._find_first(count, 1)
        begin = self.num_rows
        for index in range(len(self._spans), 0, -1):
            span = self._spans[index - 1]
            if begin - span.first - span.count >= count:
                return begin - count, index
            begin = span.first
        return (begin - count, 0) if begin >= count else None

    def _find_first(self, count: int, step: int) -> tuple[int, int] | None:
        """As :meth:`_find`: the first place for them that begins at a multiple of ``step``, or ends before the next."""
        end = 0
        for index in range(len(self._spans) + 1):
            span = self._spans[index] if index < len(self._spans) else RowSpan(self.num_rows, 0)
            begin = end if end % step + count <= step else -(-end // step) * step
            if span.first - begin >= count:
                return begin, index
            end = span.first + span.count
        return None
