"""K and V of several layers at once on a GPU, out of the KV pool and into it.

Tested on a CPU with Triton's interpreter, and by hand on a GPU (``docs/gpu.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from sglang_hcache.device.triton_kernels import gather_rows, scatter_rows
from sglang_hcache.device.triton_launch import Launches

_VALUES_AT_ONCE = 2048
Pools = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Memory of K and V of each layer, (slots, kv_heads, head_dim) each; it stays where it is."""


class TritonGather:
    """One kernel for any number of layers, on the current stream. A :class:`~.kv_gather.KVGather`."""

    def __init__(self, pools: Pools) -> None:
        self._keys, self._values = _addresses(pools)
        with torch.inference_mode(False):  # else nobody outside of that mode could read it
            # Once, lest it is compiled while requests wait.
            key = pools[0][0]
            row = torch.empty(1, 1, 2 * key[0].numel(), dtype=key.dtype, device=key.device)
            self(row, 0, torch.zeros(1, dtype=torch.int64, device=key.device))

    def __call__(self, into: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        num_layers, num_rows, _ = into.shape
        if not num_rows:
            return  # a grid of no programs is an error
        gather_rows[(num_rows, num_layers)](
            self._keys[first:],
            self._values[first:],
            slots,
            into,
            num_rows,
            **constants_of(into.shape[2] // 2),
        )


class TritonScatter:
    """The same the other way. A :class:`~.row_writers.LayerWriter`."""

    def __init__(self, pools: Pools) -> None:
        self._keys, self._values = _addresses(pools)
        key = pools[0][0]
        width = key[0].numel()
        self._dtype = key.dtype
        self._launches = Launches(scatter_rows, constants_of(width))
        with torch.inference_mode():
            # Once, lest it is compiled while requests wait: what is in a slot of nobody is written there again.
            rows = torch.cat([buffer[0].view(1, width) for buffer in pools[0]], dim=1)
            self(rows, 0, torch.zeros(1, dtype=torch.int64, device=key.device))

    def __call__(self, rows: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        assert rows.dtype is self._dtype, f"rows of {rows.dtype} for a pool of {self._dtype}"
        count = slots.shape[0]
        if count:  # a grid of no programs is an error
            grid = (count, rows.shape[0] // count, 1)
            self._launches(grid, (rows, self._keys, self._values, slots), (first,))


def _addresses(pools: Pools) -> tuple[torch.Tensor, torch.Tensor]:
    """Of K and of V of each layer, on their device."""
    with torch.inference_mode(False):  # else nobody outside of that mode could read them
        keys, values = (
            torch.tensor([pool[which].data_ptr() for pool in pools], device=pools[0][0].device)
            for which in (0, 1)
        )
    return keys, values


def constants_of(width: int) -> dict[str, Any]:
    """What the kernel is compiled for: rows of K, and of V, of ``width`` values."""
    block = min(_VALUES_AT_ONCE, triton.next_power_of_2(width))
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(4, max(1, block // 256))}
