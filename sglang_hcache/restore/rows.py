"""Rows of a layer as they are stored, and what stands for those on their way into the KV pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from sglang_hcache.core.layout import Method


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of one layer as they were captured.

    Args:
        method: what the rows are: ``HIDDEN`` or ``KV``.
        memory: (m, width), contiguous; some of its rows are meant.
        spans: which, as (first, count), in the order of their tokens.
    """

    layer: int
    method: Method
    memory: torch.Tensor
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layer: int, method: Method, rows: torch.Tensor) -> StoredRows:
        """All of ``rows``, (n, width)."""
        return cls(layer, method, rows, ((0, rows.shape[0]),))

    def __len__(self) -> int:
        return sum(count for _, count in self.spans)

    @property
    def row_bytes(self) -> int:
        return self.memory.shape[1] * self.memory.element_size()

    @property
    def rows(self) -> torch.Tensor:
        """(n, width), of those in one span."""
        ((first, count),) = self.spans
        return cut(self.memory, slice(first, first + count))

    @property
    def places(self) -> torch.Tensor:
        """(n,) int64: the row of ``memory`` of each token, of which there is at least one."""
        # By numpy, which takes a quarter of the time.
        of_spans = [np.arange(first, first + count, dtype=np.int64) for first, count in self.spans]
        return torch.from_numpy(np.concatenate(of_spans))

    def moved(self, rows: torch.Tensor) -> StoredRows:
        """The same rows in other memory, which holds nothing else."""
        return StoredRows.of(self.layer, self.method, rows)

    def part(self, first: int, end: int) -> StoredRows:
        """Those of tokens [first, end), as far as there are such."""
        if first <= 0 and end >= len(self):
            return self
        spans, begin = [], 0
        for start, count in self.spans:
            low, high = max(first - begin, 0), min(end - begin, count)
            if low < high:
                spans.append((start + low, high - low))
            begin += count
        return replace(self, spans=tuple(spans))


class Writing(Protocol):
    """Rows that are on their way into the pool."""

    def done(self) -> bool: ...

    def cancel(self) -> bool:
        """Do not begin with it; False if it has begun."""

    def result(self) -> object:
        """Wait for the end; its error."""


def cut(rows: torch.Tensor, part: slice) -> torch.Tensor:
    """``rows[part]``; where that is all of them, themselves: on a GPU's hot path each new view of a tensor counts."""
    return rows if part.stop - part.start == rows.shape[0] else rows[part]


def slices(count: int, at_once: int) -> Iterator[slice]:
    """Slices of ``count`` rows, in order, ``at_once`` each, and what is left."""
    for first in range(0, count, at_once):
        yield slice(first, min(first + at_once, count))
