"""Rows of a layer as they are stored, and what stands for those on their way into the KV pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_hcache.core.layout import Method


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of one layer as they were captured.

    Args:
        method: what the rows are: ``HIDDEN`` or ``KV``.
        pieces: (n, width) each, contiguous, in the order of their tokens.
    """

    layer: int
    method: Method
    pieces: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, layer: int, method: Method, rows: torch.Tensor) -> StoredRows:
        """In one piece."""
        return cls(layer, method, (rows,))

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def rows(self) -> torch.Tensor:
        """Of those in one piece."""
        (rows,) = self.pieces
        return rows

    def moved(self, rows: torch.Tensor) -> StoredRows:
        """The same rows in other memory."""
        return StoredRows(self.layer, self.method, (rows,))

    def part(self, first: int, end: int) -> StoredRows:
        """Those of tokens [first, end)."""
        if len(self.pieces) == 1:
            return self.moved(self.pieces[0][first:end])
        found, begin = [], 0
        for piece in self.pieces:
            low, high = max(first - begin, 0), min(end - begin, len(piece))
            if low < high:
                found.append(piece[low:high])
            begin += len(piece)
        return StoredRows(self.layer, self.method, tuple(found))


class Writing(Protocol):
    """Rows that are on their way into the pool."""

    def done(self) -> bool: ...

    def cancel(self) -> bool:
        """Do not begin with it; False if it has begun."""

    def result(self) -> object:
        """Wait for the end; its error."""
