"""Where a pass's rows come from, whoever brings them on their way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hcache.device.kv_gather import KVGather

RowSource = Callable[[torch.Tensor, slice, slice], None]
"""Rows of neighbouring layers of one pass: ``(into, layers, rows)`` copies some of them to ``into``, (layers, rows,
width). Both are on the model's device, and both slices have beginning and end."""


def hidden_source(hidden: torch.Tensor) -> RowSource:
    """Hidden states where the pass has them: (layers, at least all rows, width)."""

    def write(into: torch.Tensor, layers: slice, rows: slice) -> None:
        into.copy_(hidden[layers, rows])

    return write


def kv_source(gather: KVGather, first: int, slots: torch.Tensor) -> RowSource:
    """K and V that a pass has written to ``slots`` (n,) of the pool, from layer ``first`` on."""

    def write(into: torch.Tensor, layers: slice, rows: slice) -> None:
        gather(into, first + layers.start, slots[rows])

    return write
