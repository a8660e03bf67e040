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
        rows: (n, width), contiguous.
    """

    layer: int
    method: Method
    rows: torch.Tensor

    def part(self, part: slice) -> StoredRows:
        """Some of the tokens."""
        return StoredRows(self.layer, self.method, self.rows[part])

    def moved(self, rows: torch.Tensor) -> StoredRows:
        """The same rows in other memory."""
        return StoredRows(self.layer, self.method, rows)


class Writing(Protocol):
    """Rows that are on their way into the pool."""

    def done(self) -> bool: ...

    def cancel(self) -> bool:
        """Do not begin with it; False if it has begun."""

    def result(self) -> object:
        """Wait for the end; its error."""
