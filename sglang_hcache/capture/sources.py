"""Where a pass's rows come from, whoever brings them on their way."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_hcache.device.kv_gather import KVGather


class RowSource(Protocol):
    """Rows of neighbouring layers of one pass, on the model's device."""

    def write(self, into: torch.Tensor, layers: slice, rows: slice) -> None:
        """Some of them, to ``into``, (layers, rows, width), on the same device. Both slices have beginning and end."""


class HiddenSource:
    """Hidden states where the pass has them: (layers, at least all rows, width). A :class:`RowSource`."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def write(self, into: torch.Tensor, layers: slice, rows: slice) -> None:
        into.copy_(self._hidden[layers, rows])


class KVSource:
    """K and V that a pass has written to ``slots`` (n,) of the pool, from layer ``first`` on. A :class:`RowSource`."""

    def __init__(self, gather: KVGather, first: int, slots: torch.Tensor) -> None:
        self._gather = gather
        self._first = first
        self._slots = slots

    def write(self, into: torch.Tensor, layers: slice, rows: slice) -> None:
        self._gather(into, self._first + layers.start, self._slots[rows])
