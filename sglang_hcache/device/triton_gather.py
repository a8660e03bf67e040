"""K and V out of the KV pool on a GPU, all layers at once.

Tested on a CPU with Triton's interpreter, and by hand on a GPU (``docs/gpu.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from sglang_hcache.device.triton_kernels import gather_rows

_VALUES_AT_ONCE = 2048


class TritonGather:
    """One kernel for any number of layers, on the current stream. A :class:`~.kv_gather.KVGather`.

    Args:
        pools: memory of K and V of each layer, (slots, kv_heads, head_dim) each; it stays where it is.
    """

    def __init__(self, pools: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.inference_mode(False):  # else nobody outside of that mode could read it
            self._keys, self._values = (
                torch.tensor([pool[which].data_ptr() for pool in pools], device=pools[0][0].device)
                for which in (0, 1)
            )
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


def constants_of(width: int) -> dict[str, Any]:
    """What the kernel is compiled for: rows of K, and of V, of ``width`` values."""
    block = min(_VALUES_AT_ONCE, triton.next_power_of_2(width))
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(4, max(1, block // 256))}
